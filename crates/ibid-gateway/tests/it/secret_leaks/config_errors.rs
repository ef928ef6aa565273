//! What is told about a configuration in which a secret is written wrongly.

use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};
use testbed::certificates::CertificateAuthority;

use super::secret_search::{PlantedSecret, base64};
use crate::support::run_ibid;

const SECRET: &str = "planted-secret-of-this-mistake-77";

/// Lines with the secret in them that cannot be; and why not, so that it is what was meant to be wrong.
fn invalid_lines() -> Vec<(String, &'static str)> {
    let webhook = |dials: &str| format!("[[route]]\nmatch = \"POST /a\"\npreset = \"webhook:standard\"\n{dials}");
    let store = |url: &str| format!("store.url = \"{}\"", url.replace("SECRET", SECRET));
    let all = [
        ("admin = \"SECRET\"", "admin: "),
        ("admin.token = { it = \"SECRET\" }", "admin.token: "),
        ("admin.token = [\"SECRET\"]\nadmin.tokens = \"SECRET\"", "admin.token"),
        ("admin.tokens = \"SECRET\"", "admin.tokens: "),
        ("admin.tokens = [\"SECRET\"]", "admin.tokens[1]: "),
        ("admin.tokens = [{ token = \"SECRET\" }]", "admin.tokens[1].role: missing"),
        ("admin.tokens = [{ role = \"user\", token = \"SECRET\" }]", "admin.tokens[1].user: missing"),
        ("admin.tokens = [{ role = \"viewer\", token = [\"SECRET\", \"SECRET\"] }]", "admin.tokens[1].token: "),
        ("admin.token = \"SECRET\"\nadmin.tokens = [{ role = \"admin\", token = \"SECRET\" }]", "is the same"),
        ("admin.tls = \"SECRET\"", "admin.tls: "),
        ("admin.tls = { cert = \"/no/such\", key = \"SECRET\" }", "admin.tls.cert: "),
        ("tls = \"SECRET\"", "tls: "),
        ("upstream_key = \"SECRET\"", "upstream_cert: missing"),
        ("upstream_key = [[\"SECRET\"]]", "upstream_key: "),
        ("store = \"redis://:SECRET@127.0.0.1\"", "store: "),
        ("store.url = [\"redis://:SECRET@127.0.0.1\"]", "store.url: "),
        ("seal = \"SECRET\"", "seal: "),
        ("seal.keys = \"SECRET\"", "seal.keys: "),
        ("seal.keys = [\"SECRET\"]", "seal.keys[1]: "),
        ("seal.keys = [{ key = \"SECRET\" }]", "seal.keys[1].id: missing"),
        ("seal.keys = [{ id = \"a\", key = \"SECRET\" }]", "seal.keys[1].key: "),
        ("seal.keys = [{ id = \"a\", key = { it = \"SECRET\" } }]", "seal.keys[1].key: "),
        ("seal.address_secret = \"SECRET\"", "seal.address_secret: "),
        ("seal.address_secret = { it = \"SECRET\" }", "seal.address_secret: "),
        ("jwt = \"SECRET\"", "jwt: "),
        ("jwt.secret = \"SECRET\"\njwt.pem = \"SECRET\"", "jwt: found keys in two places"),
        ("jwt.secret = { it = \"SECRET\" }", "jwt.secret: "),
        ("jwt.jwks = \"SECRET\"", "jwt.jwks: "),
        ("jwt.jwks = \"https://u:SECRET@h/keys\"", "jwt.jwks: "),
        ("jwt.jwks = \"http://h/keys?token=SECRET\"", "jwt.jwks: "),
        ("jwt.jwks = \"ftp://h/keys?token=SECRET\"", "jwt.jwks: "),
        ("jwt.jwks = '{\"keys\":[{\"kty\":\"oct\",\"k\":\"SECRET\"}]}'", "jwt.jwks: "),
        ("jwt.jwks = '{\"keys\":\"SECRET\"}'", "jwt.jwks: "),
        ("jwt.secret = \"short\"\njwt.audience = 7", "jwt."),
        ("trace = \"http://u:SECRET@127.0.0.1\"", "trace: "),
        ("trace.otlp = \"http://u:SECRET@127.0.0.1\"", "trace.otlp: "),
        ("trace.otlp = [\"http://u:SECRET@127.0.0.1\"]", "trace.otlp: "),
        ("admin.token = \"SECRET", "ibid.toml:2:"),
        ("admin.token = SECRET", "ibid.toml:2:"),
        ("admin.token \"SECRET\"", "ibid.toml:2:"),
    ];
    let mut mistakes: Vec<_> = all.into_iter().map(|(text, why)| (text.replace("SECRET", SECRET), why)).collect();
    for url in [
        "SECRET",
        "redis:SECRET",
        "redis://:SECRET@h:port",
        "redis://:SECRET%@h",
        "redis://:SEC/SECRET@h",
        "redis://u:SECRET@h?SECRET=1",
        "redis://u:SECRET@h?ca=SECRET",
        "rediss://u:SECRET@h?cert=SECRET",
        "redis://SECRET@h",
        "redis+sentinel://:SECRET@h",
        "redis+cluster://:SECRET@h/7",
        "postgres://u:SECRET@h:port/db",
        "postgres://u:SECRET@/db",
        "postgres://u:SECRET@h/db?pool=0",
        "postgres://u:a?pool=SECRET@h/db",
        "postgres://u:SECRET@h/db?password=SECRET&port=x",
        "mysql://u:SECRET@h/db?password=SECRET",
    ] {
        mistakes.push((store(url), "store.url: "));
    }
    for dials in [
        format!("secrets = {{ it = \"{SECRET}\" }}"),
        format!("secrets = [[\"{SECRET}\"]]"),
        format!("secrets = \"whsec_{SECRET}!\""),
        format!("secrets = \"{SECRET}\"\nunsigned = true"),
        format!("secrets = \"{SECRET}\"\nsignature = \"{SECRET}\""),
    ] {
        mistakes.push((webhook(&dials), "route[1]."));
    }
    mistakes.push((format!("[[route]]\nmatch = \"POST /a\"\nsecrets = \"{SECRET}\""), "route[1].secrets: "));
    mistakes
        .push((format!("[[route]]\nmatch = \"POST /a\"\nupstream = \"http://u:{SECRET}@h\""), "route[1].upstream: "));
    mistakes
}

#[test]
fn no_secret_is_repeated_to_who_wrote_it_wrongly() {
    let planted = [
        PlantedSecret::text("the secret", SECRET),
        PlantedSecret::text("the secret in base64", &base64(SECRET.as_bytes())),
    ];
    for (text, why) in invalid_lines() {
        let config = format!("upstream = \"http://127.0.0.1:1\"\n{text}\n");
        let path = Some("ibid.toml".into());
        let told = GatewaySettings::from_text(&config, path, &ServeArgs::default(), &Env::from_pairs(&[])).err();
        let told = told.unwrap_or_else(|| panic!("{text} is no mistake"));
        let said = format!("{told}\n{told:?}");
        assert!(said.contains(why), "{text}: {said}");
        for planted in &planted {
            assert_eq!(planted.found_in(&said), None, "{text}: {said}");
        }
    }
}

#[test]
fn nor_if_it_comes_from_a_variable_or_a_flag() {
    let planted = PlantedSecret::text("the secret", SECRET);
    for key in
        ["store.url", "seal.address_secret", "jwt.jwks", "tls.key", "admin.tls.key", "upstream_key", "trace.otlp"]
    {
        let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
        let cert = if key.ends_with("tls.key") { "cert = \"env:IT\"\n" } else { "" };
        let text = match table {
            "" => format!("upstream = \"http://127.0.0.1:1\"\n{name} = \"env:IT\"\nupstream_cert = \"env:IT\"\n"),
            _ => format!("upstream = \"http://127.0.0.1:1\"\n[{table}]\n{name} = \"env:IT\"\n{cert}"),
        };
        let value = format!("http://u:{SECRET}@h");
        // What should be a certificate's path is shown: it is no secret, and not in the place of one.
        let shown = ["tls.key", "admin.tls.key", "upstream_key"].contains(&key);
        let text =
            if shown { text.replace("cert = \"env:IT\"", "cert = \"-----BEGIN CERTIFICATE-----\"") } else { text };
        let env = [("IT", value.as_str())];
        let told =
            GatewaySettings::from_text(&text, None, &ServeArgs::default(), &Env::from_pairs(&env)).expect_err(key);
        assert_eq!(planted.found_in(&format!("{told}\n{told:?}")), None, "{key}: {told}");
    }
    for url in [SECRET.to_owned(), format!("redis://:{SECRET}@h:port"), format!("postgres://u:{SECRET}@h:port/db")] {
        let args = ServeArgs { store: Some(url.clone()), ..ServeArgs::default() };
        let told = GatewaySettings::load(&args, &Env::from_pairs(&[])).expect_err("no store");
        let by_variable = GatewaySettings::load(&ServeArgs::default(), &Env::from_pairs(&[("IBID_STORE", &url)]))
            .expect_err("no store");
        let said = format!("{told} {told:?} {by_variable} {by_variable:?}");
        assert_eq!(planted.found_in(&said), None, "{said}");
    }
}

/// Certificates and keys that do not fit, or are something else.
#[tokio::test]
async fn no_private_key_is_repeated_to_who_mixed_it_up() {
    let authority = CertificateAuthority::new();
    let (one, other) = (authority.vouch("one"), authority.vouch("other"));
    let key = std::fs::read_to_string(&one.key).unwrap();
    let body: String = key.lines().filter(|line| !line.starts_with("-----")).collect();
    let planted = PlantedSecret::bytes("the key", &one.key_der[36..68]);
    let lines: Vec<_> = key
        .lines()
        .skip(2)
        .filter(|line| line.len() > 40)
        .map(|line| PlantedSecret::text("a line of it", line))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ibid.toml");
    let broken = format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", &body[..body.len() - 8]);
    for table in ["tls", "admin.tls"] {
        for (cert, secret) in [
            (one.cert.display().to_string(), body.clone()),
            (one.cert.display().to_string(), broken.clone()),
            (other.cert.display().to_string(), key.clone()),
            (key.clone(), key.clone()),
            (key.clone(), one.cert.display().to_string()),
        ] {
            let text = format!(
                "listen = \"127.0.0.1:0\"\nupstream = \"http://127.0.0.1:1\"\nstore.url = \"memory:\"\n[{table}]\ncert = {cert:?}\nkey = {secret:?}\n"
            );
            let text = if table == "tls" {
                text.replace("[tls]", "admin.listen = \"off\"\n[tls]")
            } else {
                text.replace("[admin.tls]", "admin.listen = \"127.0.0.1:0\"\n[admin.tls]")
            };
            std::fs::write(&file, text).unwrap();
            let output = run_ibid(&["serve", "--config", file.to_str().unwrap()], &[]).await;
            let said = format!("{}{}", output.text(), &output.stderr);
            assert!(output.code != Some(0) && said.contains("tls"), "{said}");
            for planted in lines.iter().chain([&planted]) {
                assert_eq!(planted.found_in(&said), None, "{said}");
            }
        }
    }
}
