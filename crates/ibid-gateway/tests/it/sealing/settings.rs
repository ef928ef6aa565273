//! What can be written in `[seal]`, and what is told to who writes something else.

use ibid_gateway::config::{Env, GatewaySettings, ServeArgs, forgotten_answers};

use super::{SECRET, ibid, key_base64, table};

const UPSTREAM: &str = "upstream = \"http://127.0.0.1:3000\"\n";

fn load(text: &str) -> Result<GatewaySettings, String> {
    let variables = [("KEY", &*key_base64("from-a-variable")), ("SECRET", &*key_base64(SECRET))];
    let settings = GatewaySettings::from_text(
        &format!("{UPSTREAM}{text}"),
        Some("ibid.toml".into()),
        &ServeArgs::default(),
        &Env::from_pairs(&variables),
    );
    settings.map_err(|why| why.to_string())
}

fn seal(table: &str) -> Result<GatewaySettings, String> {
    load(&format!("[seal]\n{table}"))
}

#[test]
fn keys_come_from_variables_and_the_first_seals() {
    let keys = format!("keys = [{{ id = \"b\", key = \"env:KEY\" }}, {{ id = \"a\", key = {:?} }}]", key_base64("a"));
    let settings = seal(&format!("{keys}\naddress_secret = \"env:SECRET\"")).unwrap();
    assert_eq!(settings.sealing().unwrap().key_ids(), ["b", "a"]);
    let seal = settings.seal.unwrap();
    let summary = "keys b (seals, opens), a (opens); what is not sealed is refused; addresses are keyed";
    assert_eq!(seal.description(), summary);
    assert!(seal.address_secret().is_some());
}

#[test]
fn a_secret_alone_keys_addresses_and_seals_nothing() {
    let settings = seal("address_secret = \"env:SECRET\"").unwrap();
    assert!(settings.sealing().is_none());
    let seal = settings.seal.unwrap();
    assert!(seal.address_secret().is_some());
    assert_eq!(seal.description(), "addresses are keyed");
    assert!(load("").unwrap().seal.is_none());
}

#[test]
fn what_is_wrong_is_said_without_what_was_found() {
    const ALLOWED: &str = "allowed are 32 random bytes in base64, as `openssl rand -base64 32` prints them";
    let (key, secret) = (key_base64("a"), "address_secret = \"env:SECRET\"");
    let short = &key[..40];
    let zero = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    let one = format!("{{ id = \"a\", key = {key:?} }}");
    for (table, told) in [
        (
            format!("keys = [{one}]"),
            format!(
                "address_secret: missing; addresses, tags and fingerprints are keyed with it, and it never changes; {ALLOWED}"
            ),
        ),
        (
            String::new(),
            format!(
                "address_secret: missing; addresses, tags and fingerprints are keyed with it, and it never changes; {ALLOWED}"
            ),
        ),
        (format!("keys = [{{ key = {key:?} }}]"), "keys[1].id: missing; name the key, such as \"2026-11\"".into()),
        (
            "keys = [{ id = \"a\" }]".into(),
            "keys[1].key: missing; write one such as \"file:seal-2026-11.key\" or \"env:IBID_SEAL_KEY\"".into(),
        ),
        (
            format!("keys = [{one}, {{ id = \"b\", key = {short:?} }}]"),
            format!("keys[2].key: it has 30 bytes; {ALLOWED}"),
        ),
        ("keys = [{ id = \"a\", key = \"s3cret-s3cret\" }]".into(), format!("keys[1].key: it is no base64; {ALLOWED}")),
        (
            format!("keys = [{{ id = \"a\", key = {zero:?} }}]"),
            format!("keys[1].key: all its bytes are the same; {ALLOWED}"),
        ),
        (
            "keys = [{ id = \"a\", key = \"env:NONE\" }]".into(),
            "keys[1].key: \"env:NONE\": the environment variable NONE is not set".into(),
        ),
        (
            format!("keys = [{{ id = \"a b\", key = {key:?} }}]"),
            "keys[1].id: \"a b\" is no key's id; allowed are 1 to 64 letters, digits, \"_\" \"-\" \".\"".into(),
        ),
        (
            format!("keys = [{one}, {{ id = \"a\", key = \"env:KEY\" }}]\n{secret}"),
            "keys[2].id: \"a\" is there twice; each key has its own".into(),
        ),
        (
            format!("keys = [{one}, {{ id = \"b\", key = {key:?} }}]\n{secret}"),
            "keys[2].key: it is the same as that of \"a\"; each id has its own".into(),
        ),
        (
            format!("keys = [{one}]\naddress_secret = {key:?}"),
            "address_secret: it is the same as the key \"a\", which will change one day; it needs its own".into(),
        ),
        (format!("keys = [{one}]\naddress_secret = \"s3cret\""), format!("address_secret: it is no base64; {ALLOWED}")),
        (
            format!("{secret}\naccept_plain = true"),
            "accept_plain: without seal.keys nothing is sealed; leave \"accept_plain\" out, or add a key".into(),
        ),
        (
            format!("{secret}\nplain_addresses = true"),
            "plain_addresses: without seal.keys nothing is sealed; leave \"plain_addresses\" out, or add a key".into(),
        ),
        ("keys = [{ id = \"a\", kye = 1 }]".into(), "keys[1].kye: unknown key, did you mean \"key\"?".into()),
    ] {
        let said = seal(&table).map(|_| "valid").unwrap_err();
        let (place, rest) = said.split_once(": ").expect("a place");
        assert!(place.starts_with("ibid.toml"), "{said}");
        assert_eq!(rest, format!("seal.{told}"));
        assert!(!said.contains("s3cret") && !said.contains(short), "{said}");
    }
    // A secret in the wrong place is not shown either.
    for table in [
        "address_secret = 4711471147114711",
        "keys = \"s3cret\"",
        "keys = [\"s3cret\"]",
        "keys = [{ id = \"a\", key = [\"s3cret\"] }]",
    ] {
        let said = seal(table).map(|_| "valid").unwrap_err();
        assert!(!said.contains("s3cret") && !said.contains("4711"), "{said}");
    }
}

#[test]
fn what_is_probably_not_meant_is_said() {
    let settings = load(&format!("{}accept_plain = true\nplain_addresses = true\n", table(&["a"]))).unwrap();
    assert!(settings.warnings.iter().any(|said| said.starts_with("seal.accept_plain: ")), "{:?}", settings.warnings);
    assert!(settings.notes.iter().any(|said| said.starts_with("seal.plain_addresses: ")), "{:?}", settings.notes);
    assert!(settings.seal.unwrap().address_secret().is_none());
}

#[test]
fn another_secret_forgets_and_another_key_does_not() {
    let load = |text: String| load(&text).unwrap();
    let forgets = |old: &GatewaySettings, new: &GatewaySettings| forgotten_answers(old, new).join("; ");
    let other_secret = |text: String| text.replace(&key_base64(SECRET), &key_base64("another"));
    let (plain, sealed) = (load(String::new()), load(table(&["a"])));
    let rotated = load(table(&["b", "a"]));
    assert_eq!(forgets(&sealed, &rotated), "");
    assert_eq!(forgets(&rotated, &load(table(&["b"]))), "");
    assert!(rotated.settings_needing_restart(&sealed).is_empty(), "keys are taken up at once");

    let lost = "every address is another, and nothing that is remembered will be found again";
    let keyed = load(format!("[seal]\naddress_secret = {:?}", key_base64(SECRET)));
    let cases = [
        (&plain, &sealed, format!("seal.address_secret keys addresses that were plain: {lost}")),
        (&plain, &keyed, format!("seal.address_secret keys addresses that were plain: {lost}")),
        (&sealed, &plain, format!("seal.address_secret no longer keys addresses: {lost}")),
        (&sealed, &load(other_secret(table(&["a"]))), format!("seal.address_secret changed: {lost}")),
        (&sealed, &keyed, "seal.keys removed: what is sealed will not be opened again".into()),
        (
            &keyed,
            &sealed,
            "seal.keys added, and seal.accept_plain is off: what is remembered in clear will be refused".into(),
        ),
    ];
    for (old, new, told) in cases {
        assert_eq!(forgets(old, new), told);
        assert_eq!(new.settings_needing_restart(old), ["seal"], "{told}");
    }
    // The way to switch sealing on without forgetting anything.
    assert_eq!(forgets(&keyed, &load(format!("{}accept_plain = true", table(&["a"])))), "");
    let plain_addresses = format!("{}accept_plain = true\nplain_addresses = true", table(&["a"]));
    assert_eq!(forgets(&plain, &load(plain_addresses.clone())), "");
    let told = "seal.address_secret changed: remembered requests will not be recognised again";
    assert_eq!(forgets(&load(plain_addresses.clone()), &load(other_secret(plain_addresses))), told);
}

#[tokio::test]
async fn check_shows_the_names_of_keys_and_nothing_else_of_them() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{UPSTREAM}{}", table(&["2026-11", "2026-10"]))).unwrap();
    let (code, printed, said) = ibid(&["check", file.path().to_str().unwrap()]).await;
    assert_eq!((code, said.as_str()), (Some(0), ""));
    let line = "  seal            keys 2026-11 (seals, opens), 2026-10 (opens); what is not sealed is refused; addresses are keyed\n";
    assert!(printed.contains(line), "{printed}");
    let settings = load(&table(&["2026-11", "2026-10"])).unwrap();
    let shown = format!("{printed}{settings:?}{settings:#?}");
    for secret in [key_base64("2026-11"), key_base64("2026-10"), key_base64(SECRET)] {
        assert!(!shown.contains(&secret[..12]), "{shown}");
    }
    for byte in SECRET.bytes().collect::<Vec<_>>().windows(3) {
        assert!(!shown.contains(&format!("{}, {}, {}", byte[0], byte[1], byte[2])), "as a list of numbers");
    }
}
