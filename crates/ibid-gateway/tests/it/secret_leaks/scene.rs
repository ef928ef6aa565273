//! A gateway that has every kind of secret, its servers, and its clients.

use std::{
    net::SocketAddr,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{Method, Request, Response};
use http_body_util::Full;
use sha2::Sha256;
use tempfile::TempDir;
use testbed::{
    RedisOptions, TestPostgres, TestRedis,
    certificates::{CertificateAuthority, IssuedCertificate},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use super::secret_search::{PlantedSecret, base64};
use crate::{support::BIN, support::tls::send_over_tls};

use crate::support::run_ibid;

// What may be seen somewhere ([`ANSWER`], [`CANARY`]) has no dozen characters in common with what may not.
pub(super) const ADMIN: &str = "planted-token-of-the-admin-9c1f";
pub(super) const VIEWER: &str = "planted-token-of-a-viewer-77ab";
pub(super) const USER: &str = "planted-token-of-one-user-03de";
/// No token of ours.
pub(super) const WRONG: &str = "planted-token-of-nobody-5e55";
pub(super) const REDIS: &str = "planted-redis-word/4b1d";
pub(super) const POSTGRES: &str = "planted-postgres-word/c0de";
pub(super) const SEAL: &[u8; 32] = b"planted-bytes-that-seal-77112233";
pub(super) const OLD_SEAL: &[u8; 32] = b"planted-bytes-that-open-88223344";
pub(super) const ADDRESS: &[u8; 32] = b"planted-bytes-for-addresses-9933";
pub(super) const JWT: &str = "planted-secret-that-signs-tokens-0011aabb";
/// Of an issuer whom nobody knows.
const OTHER_JWT: &str = "planted-secret-of-another-issuer-2233ccdd";
pub(super) const HOOK: &str = "planted-secret-that-signs-deliveries-4455";
pub(super) const API_KEY: &str = "planted-api-key-of-a-client-6677";
pub(super) const COOKIE: &str = "planted-cookie-by-client-8899";
pub(super) const QUERY: &str = "planted-query-string-aabb";
pub(super) const BODY: &str = "planted-request-sent-ccdd";
pub(super) const ANSWER: &str = "planted-answer-given-eeff";
pub(super) const APP_COOKIE: &str = "planted-cookie-by-server-1029";
/// In a path, which is logged: what looks for the others must find this.
pub(super) const CANARY: &str = "planted-canary-in-a-path-5060";
pub(super) const KEY: &str = "planted-customer-4711-order-0815";

pub(super) struct SecretsGateway {
    pub(super) gateway: GatewayProcess,
    pub(super) upstream: TestUpstream,
    pub(super) collector: TestUpstream,
    pub(super) redis: TestRedis,
    pub(super) postgres: TestPostgres,
    pub(super) authority: CertificateAuthority,
    pub(super) config: String,
    /// What must not be seen; not [`ANSWER`], which operators may see in the record.
    pub(super) secrets: Vec<PlantedSecret>,
    _folder: TempDir,
}

/// A database with the store's tables, reached with a password that the server does not ask for.
async fn database(server: &TestPostgres) -> String {
    let name = server.create_database();
    let migrated = run_ibid(&["migrate", "--store", &server.url("migrator", &name)], &[]).await;
    assert!(migrated.code == Some(0), "{}", &migrated.stderr);
    format!("postgres://gateway:{}@127.0.0.1:{}/{name}", POSTGRES.replace('/', "%2F"), server.port())
}

async fn app() -> TestUpstream {
    let upstream = TestUpstream::start().await;
    let answer = UpstreamReply::status(201).json(&format!("{{\"card\":\"{ANSWER}\"}}"));
    upstream.reply_by_default(answer.header("X-Secret", ANSWER).header("Set-Cookie", format!("app={APP_COOKIE}")));
    upstream.on("/pay/lost", UpstreamFault::CloseWithoutReply);
    upstream
}

impl SecretsGateway {
    pub(super) async fn start(level: &str, format: &str) -> SecretsGateway {
        let (upstream, collector) = (app().await, TestUpstream::start().await);
        let redis = TestRedis::start_with(RedisOptions { password: Some(REDIS.into()), ..RedisOptions::default() });
        let postgres = TestPostgres::start();
        let authority = CertificateAuthority::new();
        let keys = ["listener", "admin", "towards-the-app"].map(|name| authority.vouch(name));
        let folder = tempfile::tempdir().unwrap();
        let jwt = folder.path().join("jwt");
        std::fs::write(&jwt, format!("{JWT}\n")).unwrap();
        let redis_url = format!("redis://:{}@127.0.0.1:{}/0", REDIS.replace('/', "%2F"), redis.port());
        let stores = [redis_url, database(&postgres).await];
        let config = config(level, format, &stores, &collector.url(), &keys, &jwt);
        let launch = GatewayProcess::launch(BIN).config(&config).upstream(&upstream.url()).env("PLANTED_ADMIN", ADMIN);
        let gateway = launch.start().await;
        let secrets = secrets(&keys);
        SecretsGateway { gateway, upstream, collector, redis, postgres, authority, config, secrets, _folder: folder }
    }

    async fn send(&self, addr: SocketAddr, request: Request<Full<Bytes>>) -> Response<Bytes> {
        send_over_tls(addr, &self.authority, None, request).await.expect("an answer").answer
    }

    /// A payment, with a token that `secret` signed.
    pub(super) async fn pay(&self, path: &str, key: &str, body: &str, secret: &str) -> Response<Bytes> {
        let request = Request::post(format!("{path}?token={QUERY}")).header("host", "shop.example");
        let request = request.header("authorization", format!("Bearer {}", token(secret)));
        let request = request.header("cookie", format!("session={COOKIE}")).header("x-api-key", API_KEY);
        let request = request.header("idempotency-key", key).header("content-type", "application/json");
        self.send(self.gateway.addr(), request.body(Full::from(format!("{{\"{body}\":\"{BODY}\"}}"))).unwrap()).await
    }

    /// One that is meant to run, be replayed and be refused.
    pub(super) async fn pay_valid(&self, path: &str, key: &str) -> Response<Bytes> {
        self.pay(path, key, "card", JWT).await
    }

    pub(super) async fn pay_with_foreign_token(&self) -> Response<Bytes> {
        self.pay("/pay/1", KEY, "card", OTHER_JWT).await
    }

    /// A delivery that `secret` signed.
    pub(super) async fn deliver_webhook(&self, id: &str, secret: &str) -> Response<Bytes> {
        let body = format!("{{\"hook\":\"{BODY}\"}}");
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
        mac.update(body.as_bytes());
        let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let request = Request::post("/hook").header("host", "shop.example").header("x-github-delivery", id);
        let request = request.header("x-hub-signature-256", format!("sha256={hex}"));
        self.send(self.gateway.addr(), request.body(Full::from(body)).unwrap()).await
    }

    pub(super) async fn get_contract(&self, accept: &str) -> Response<Bytes> {
        let request = Request::get("/.well-known/idempotency").header("host", "shop.example").header("accept", accept);
        self.send(self.gateway.addr(), request.body(Full::default()).unwrap()).await
    }

    /// A request of an operator; `who` is a line of headers such as a token.
    pub(super) async fn ask(&self, method: Method, path: &str, who: (&str, &str), body: &str) -> Response<Bytes> {
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        let request = request.header("sec-fetch-site", "same-origin").header("origin", "https://localhost");
        let form = if path == "/login" { "application/x-www-form-urlencoded" } else { "application/json" };
        let request = request.header("content-type", form).header(who.0, who.1);
        self.send(self.gateway.admin_addr(), request.body(Full::from(body.to_owned())).unwrap()).await
    }

    /// Replaces a part of the configuration that is there.
    pub(super) fn rewrite_config(&self, part: &str, by: &str) {
        assert!(self.config.contains(part), "{part}");
        self.gateway.rewrite_config(&self.config.replace(part, by));
    }
}

/// Who asks with a token.
pub(super) fn bearer(token: &str) -> (&'static str, String) {
    ("authorization", format!("Bearer {token}"))
}

fn config(
    level: &str, format: &str, [redis, postgres]: &[String; 2], collector: &str, keys: &[IssuedCertificate; 3],
    jwt: &Path,
) -> String {
    let [listener, admin, towards] = keys;
    let pair = |of: &IssuedCertificate| format!("cert = {:?}\nkey = {:?}", of.cert, of.key);
    let (seal, old_seal, address) = (base64(SEAL), base64(OLD_SEAL), base64(ADDRESS));
    format!(
        r#"upstream_cert = {:?}
upstream_key = {:?}
log = {{ level = "{level}", format = "{format}" }}
trace.otlp = "{collector}"

[tls]
{}

[admin]
token = "env:PLANTED_ADMIN"
tokens = [
    {{ role = "viewer", token = "{VIEWER}" }},
    {{ role = "user", user = "u1", token = "{USER}" }},
]
[admin.tls]
{}

[store]
url = "{redis}"
fallback = "{postgres}"
timeout = "2s"

[seal]
keys = [{{ id = "new", key = "{seal}" }}, {{ id = "old", key = "{old_seal}" }}]
address_secret = "{address}"

[jwt]
secret = "file:{}"

[[route]]
match = "POST /pay/*"
scope = ["host", "jwt:sub"]
label.user = "jwt:sub"

[[route]]
match = "POST /hook"
preset = "webhook:github"
secrets = ["{HOOK}"]
"#,
        towards.cert,
        towards.key,
        pair(listener),
        pair(admin),
        jwt.display(),
    )
}

fn secrets(keys: &[IssuedCertificate; 3]) -> Vec<PlantedSecret> {
    let mut secrets: Vec<PlantedSecret> = [
        ("the admin's token", ADMIN),
        ("a viewer's token", VIEWER),
        ("a user's token", USER),
        ("a wrong token", WRONG),
        ("the password of Redis", REDIS),
        ("the password of PostgreSQL", POSTGRES),
        ("the issuer's secret", JWT),
        ("another issuer's secret", OTHER_JWT),
        ("the secret of webhooks", HOOK),
        ("a client's API key", API_KEY),
        ("a client's cookie", COOKIE),
        ("a query", QUERY),
        ("a request's body", BODY),
        ("a cookie of the app", APP_COOKIE),
        ("a key of requests", KEY),
    ]
    .map(|(name, text)| PlantedSecret::text(name, text))
    .into();
    for (name, bytes) in [("seal.keys[1]", SEAL), ("seal.keys[2]", OLD_SEAL), ("address_secret", ADDRESS)] {
        secrets.push(PlantedSecret::text(name, std::str::from_utf8(bytes).expect("ASCII")));
        secrets.push(PlantedSecret::text(name, &base64(bytes)));
    }
    for (name, key) in ["tls.key", "admin.tls.key", "upstream_key"].into_iter().zip(keys) {
        // The number itself, within what is said about it; and the lines of the file.
        secrets.push(PlantedSecret::bytes(name, &key.key_der[36..68]));
        let pem = std::fs::read_to_string(&key.key).expect("a file of the test");
        let lines = pem.lines().filter(|line| !line.starts_with("-----") && line.len() > 40);
        secrets.extend(lines.skip(1).map(|line| PlantedSecret::text(name, line)));
    }
    for (name, secret) in [("a client's token", JWT), ("a client's bad token", OTHER_JWT)] {
        secrets.push(PlantedSecret::text(name, token(secret).rsplit('.').next().expect("a signature")));
    }
    secrets
}

/// A token of one user, always the same.
fn token(secret: &str) -> String {
    use std::sync::OnceLock;
    static EXPIRES: OnceLock<u64> = OnceLock::new();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock") + Duration::from_secs(3600);
    let expires = EXPIRES.get_or_init(|| now().as_secs());
    let url64 = |bytes: &[u8]| base64(bytes).replace('+', "-").replace('/', "_").trim_end_matches('=').to_owned();
    let content = format!(
        "{}.{}",
        url64(br#"{"alg":"HS256"}"#),
        url64(format!("{{\"sub\":\"u1\",\"exp\":{expires}}}").as_bytes())
    );
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    mac.update(content.as_bytes());
    format!("{content}.{}", url64(&mac.finalize().into_bytes()))
}
