//! What a panic, or a careless line of log, would show of values that hold a secret: their `Debug`.

use ibid::{
    scope::AddressSecret,
    store::{Address, Store as _},
};
use ibid_gateway::{
    admin::auth::{AdminTokens, Authenticator},
    config::{AdminTlsArgs, ClientTls, Env, GatewaySettings, Secret, ServeArgs, StoreSelection},
};
use ibid_stores::{RemoteOptions, StoreUrl, postgres::Postgres, redis::Redis, seal::SealKey};
use testbed::certificates::CertificateAuthority;

use super::secret_search::{PlantedSecret, base64};

const TEXT: &str = "planted-text-that-is-a-secret-7788";
const BYTES: &[u8; 32] = b"planted-bytes-that-are-a-secret9";

#[tokio::test]
async fn no_value_shows_the_secret_that_it_holds() {
    let authority = CertificateAuthority::new();
    let vouched = authority.vouch("server");
    let (cert, key) = (&vouched.cert, &vouched.key);
    let bytes = base64(BYTES);
    let redis = format!("redis://u:{TEXT}@127.0.0.1:1/0");
    let postgres = format!("postgres://u:{TEXT}@127.0.0.1:1/db?connect_timeout=1");
    let config = format!(
        "upstream = \"http://127.0.0.1:3000\"\nupstream_cert = {cert:?}\nupstream_key = {key:?}\n\
         tls = {{ cert = {cert:?}, key = {key:?} }}\n\
         [admin]\ntoken = {TEXT:?}\ntls = {{ cert = {cert:?}, key = {key:?} }}\n\
         [store]\nurl = {redis:?}\nfallback = {postgres:?}\n\
         [seal]\nkeys = [{{ id = \"k\", key = {bytes:?} }}]\naddress_secret = {:?}\n\
         [jwt]\nsecret = {TEXT:?}\n\
         [[route]]\nmatch = \"POST /a\"\nscope = [\"jwt:sub\"]\n\
         [[route]]\nmatch = \"POST /b\"\npreset = \"webhook:github\"\nsecrets = {TEXT:?}\n",
        base64(b"planted-bytes-that-address-these"),
    );
    let settings = GatewaySettings::from_text(&config, None, &ServeArgs::default(), &Env::from_pairs(&[])).unwrap();
    let keys_at = |url: &str| {
        let config = format!("upstream = \"http://h\"\n[jwt]\njwks = {url:?}\n[policy]\nscope = [\"jwt:sub\"]");
        GatewaySettings::from_text(&config, None, &ServeArgs::default(), &Env::from_pairs(&[])).unwrap().jwt
    };
    let (auth, tokens) = (Authenticator::default(), AdminTokens::new(&settings.admin.as_ref().unwrap().tokens));
    let session = auth.log_in(&tokens, TEXT, [127, 0, 0, 1].into()).unwrap();
    let cookie = format!("ibid_session={}", session.cookie);
    let headers = http::HeaderMap::from_iter([(http::header::COOKIE, cookie.parse().unwrap())]);
    let caller = auth.caller(&tokens, &headers, [127, 0, 0, 1].into()).unwrap();
    let env = [("A", TEXT)];
    let named: StoreUrl = redis.parse().unwrap();
    let remote = RemoteOptions::default();
    let redis_store = Redis::open(&redis, remote.clone()).await.unwrap();
    let postgres_store = Postgres::open(&postgres, remote).await.unwrap();
    let away = Address([7; 32]);
    let args = ServeArgs { store: Some(redis.clone()), ..ServeArgs::default() };
    let choice = StoreSelection { store: Some(redis.clone()), ..StoreSelection::default() };
    let tls_args = AdminTlsArgs { admin_cert: Some(cert.clone()), admin_key: Some(key.clone()), admin_ca: None };
    let admin_tls: ClientTls = tls_args.load(&Env::from_pairs(&[])).unwrap();
    let shown = [
        format!("{settings:?} {settings:#?} {:?} {:?}", settings.sealing(), settings.store.store_config()),
        format!("{:?} {:?}", keys_at(&format!("https://h/keys?token={TEXT}")), Env::from_pairs(&env)),
        format!("{auth:?} {tokens:?} {session:?} {caller:?}"),
        format!("{args:?} {choice:?} {tls_args:?} {admin_tls:?}"),
        format!("{named:?} {:?}", postgres.parse::<StoreUrl>().unwrap()),
        format!("{:?} {:?}", Secret::from_source("env:A", &Env::from_pairs(&env)).unwrap(), AddressSecret::new(*BYTES)),
        format!("{:?}", SealKey::new("k", *BYTES).unwrap()),
        format!("{redis_store:?} {:?} {:?}", redis_store.guarantees(), redis_store.get(&away).await.unwrap_err()),
        format!(
            "{postgres_store:?} {:?} {:?}",
            postgres_store.guarantees(),
            postgres_store.get(&away).await.unwrap_err()
        ),
    ];
    let secrets = [
        PlantedSecret::text("the text", TEXT),
        PlantedSecret::text("the bytes", std::str::from_utf8(BYTES).unwrap()),
        PlantedSecret::text("the bytes in base64", &bytes),
        PlantedSecret::text("the address secret", "planted-bytes-that-address-these"),
        PlantedSecret::bytes("the private key", &vouched.key_der[36..68]),
        PlantedSecret::text("the session", &session.cookie),
        PlantedSecret::text("the session's secret", &session.csrf),
    ];
    for shown in shown {
        assert!(shown.len() > 4, "{shown}");
        for secret in &secrets {
            assert_eq!(secret.found_in(&shown), None, "{}: {shown}", secret.name);
        }
    }
}
