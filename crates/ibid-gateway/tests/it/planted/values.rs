//! What a panic, or a careless line of log, would show of values that hold a secret: their `Debug`.

use ibid::{
    AddressSecret,
    store::{Address, Store as _},
};
use ibid_gateway::{
    admin::auth::{Auth, Tokens},
    config::{AdminTls, AdminTlsArgs, Env, Secret, ServeArgs, Settings, StoreChoice},
};
use ibid_stores::{Named, Remote, postgres::Postgres, redis::Redis, seal::SealKey};
use ibid_testkit::certificates::Authority;

use super::search::{Planted, base64};

const TEXT: &str = "planted-text-that-is-a-secret-7788";
const BYTES: &[u8; 32] = b"planted-bytes-that-are-a-secret9";

#[tokio::test]
async fn no_value_shows_the_secret_that_it_holds() {
    let authority = Authority::new();
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
    let settings = Settings::from_text(&config, None, &ServeArgs::default(), &Env::of(&[])).unwrap();
    let keys_at = |url: &str| {
        let config = format!("upstream = \"http://h\"\n[jwt]\njwks = {url:?}\n[policy]\nscope = [\"jwt:sub\"]");
        Settings::from_text(&config, None, &ServeArgs::default(), &Env::of(&[])).unwrap().jwt
    };
    let (auth, tokens) = (Auth::default(), Tokens::new(&settings.admin.as_ref().unwrap().tokens));
    let session = auth.log_in(&tokens, TEXT, [127, 0, 0, 1].into()).unwrap();
    let cookie = format!("ibid_session={}", session.cookie);
    let headers = http::HeaderMap::from_iter([(http::header::COOKIE, cookie.parse().unwrap())]);
    let caller = auth.caller(&tokens, &headers, [127, 0, 0, 1].into()).unwrap();
    let env = [("A", TEXT)];
    let named: Named = redis.parse().unwrap();
    let remote = Remote::default();
    let redis_store = Redis::open(&redis, remote.clone()).await.unwrap();
    let postgres_store = Postgres::open(&postgres, remote).await.unwrap();
    let away = Address([7; 32]);
    let args = ServeArgs { store: Some(redis.clone()), ..ServeArgs::default() };
    let choice = StoreChoice { store: Some(redis.clone()), ..StoreChoice::default() };
    let tls_args = AdminTlsArgs { admin_cert: Some(cert.clone()), admin_key: Some(key.clone()), admin_ca: None };
    let admin_tls: AdminTls = tls_args.load(&Env::of(&[])).unwrap();
    let shown = [
        format!("{settings:?} {settings:#?} {:?} {:?}", settings.sealing(), settings.store.layout()),
        format!("{:?} {:?}", keys_at(&format!("https://h/keys?token={TEXT}")), Env::of(&env)),
        format!("{auth:?} {tokens:?} {session:?} {caller:?}"),
        format!("{args:?} {choice:?} {tls_args:?} {admin_tls:?}"),
        format!("{named:?} {:?}", postgres.parse::<Named>().unwrap()),
        format!("{:?} {:?}", Secret::from_source("env:A", &Env::of(&env)).unwrap(), AddressSecret::new(*BYTES)),
        format!("{:?}", SealKey::new("k", *BYTES).unwrap()),
        format!("{redis_store:?} {:?} {:?}", redis_store.promise(), redis_store.get(&away).await.unwrap_err()),
        format!("{postgres_store:?} {:?} {:?}", postgres_store.promise(), postgres_store.get(&away).await.unwrap_err()),
    ];
    let secrets = [
        Planted::text("the text", TEXT),
        Planted::text("the bytes", std::str::from_utf8(BYTES).unwrap()),
        Planted::text("the bytes in base64", &bytes),
        Planted::text("the address secret", "planted-bytes-that-address-these"),
        Planted::bytes("the private key", &vouched.key_der[36..68]),
        Planted::text("the session", &session.cookie),
        Planted::text("the session's secret", &session.csrf),
    ];
    for shown in shown {
        assert!(shown.len() > 4, "{shown}");
        for secret in &secrets {
            assert_eq!(secret.found_in(&shown), None, "{}: {shown}", secret.name);
        }
    }
}
