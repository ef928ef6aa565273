//! Two stores, of which one is down: `/readyz`, `/api/store`, the console and `/metrics` say which, and what still works.

use serde_json::Value;
use testbed::{TestPostgres, TestRedis, client::get, process::GatewayProcess, upstream::TestUpstream};

use super::common::{assert_degraded, migrated_database, pay};
use crate::support::{assert_ran, assert_refused, assert_replay, start_gateway, until_some};

const TOKEN: &str = "token-of-the-admin";

struct Stage {
    redis: TestRedis,
    postgres: TestPostgres,
    _upstream: TestUpstream,
    gateway: GatewayProcess,
}

/// What is said about both stores together, and about each.
struct Expected {
    status: u16,
    claims: &'static str,
    replays: &'static str,
    redis: &'static str,
    postgres: &'static str,
}

const BOTH_UP: Expected = Expected { status: 200, claims: "full", replays: "full", redis: "up", postgres: "up" };
const REDIS_DOWN: Expected = Expected { redis: "down", ..BOTH_UP };

impl Stage {
    /// `store` gets the URLs of Redis and PostgreSQL.
    async fn start(store: impl Fn(&str, &str) -> String) -> Stage {
        let (redis, postgres) = (TestRedis::start(), TestPostgres::start());
        let upstream = TestUpstream::start().await;
        let (url, _) = migrated_database(&postgres, postgres.port()).await;
        let config = format!(
            "[admin]\ntoken = {TOKEN:?}\n[store]\n{}\nlocal_cache = \"0\"\ntimeout = \"1s\"\n[policy]\npreset = \"ietf\"\non_store_down = \"closed\"\n",
            store(&redis.url(), &url)
        );
        let gateway = start_gateway(&config, &upstream).await;
        Stage { redis, postgres, _upstream: upstream, gateway }
    }

    async fn ready(&self) -> (u16, Value) {
        let answer = get(self.gateway.admin_addr(), "/readyz").send().await;
        (answer.status, answer.json())
    }

    async fn admin(&self, path: &str) -> testbed::client::TestResponse {
        get(self.gateway.admin_addr(), path).header("Authorization", format!("Bearer {TOKEN}")).send().await
    }

    /// Everybody says the same. Returns what `/api/store` says.
    async fn says(&self, expected: &Expected, role_of_redis: &str) -> Value {
        let (status, said) = self.ready().await;
        assert_eq!((status, &said["ready"]), (expected.status, &(expected.status == 200).into()), "{said:#}");
        self.agrees(&said["store"], expected, role_of_redis);
        assert_eq!(said["store"]["stores"][0]["url"], Value::Null, "nobody had to say who they are: {said:#}");
        let shown = self.admin("/api/store").await.json();
        self.agrees(&shown, expected, role_of_redis);
        assert_eq!(shown["stores"][0]["url"], self.redis.url().as_str(), "{shown:#}");
        let url = shown["stores"][1]["url"].as_str().unwrap_or_default();
        assert!(url.starts_with("postgres://gateway@127.0.0.1:"), "{shown:#}");

        let page = self.admin("/metrics").await.text();
        let console = self.admin("/store").await.text();
        for (name, state) in [("redis", expected.redis), ("postgres", expected.postgres)] {
            let sample = format!("\nidempotency_store_up{{store=\"{name}\"}} {}\n", u8::from(state == "up"));
            assert!(page.contains(&sample), "{sample} is not in\n{page}");
            let row = console.split("<tr>").find(|row| row.contains(&format!("<code>{name}</code>")));
            let row = row.unwrap_or_else(|| panic!("no row of {name} in\n{console}"));
            assert!(row.contains(&format!(">{state}</span>")), "{row}");
        }
        let one_is_down = expected.status == 200 && (expected.redis, expected.postgres) != ("up", "up");
        assert_eq!(console.contains("One of two stores is down."), one_is_down, "{console}");
        shown
    }

    #[track_caller]
    fn agrees(&self, store: &Value, expected: &Expected, role_of_redis: &str) {
        assert_eq!(
            (&store["claims"], &store["replays"]),
            (&expected.claims.into(), &expected.replays.into()),
            "{store:#}"
        );
        let each = [("redis", role_of_redis, expected.redis), ("postgres", "authority", expected.postgres)];
        assert_eq!(store["stores"].as_array().map(Vec::len), Some(2), "{store:#}");
        for (nth, (name, role, state)) in each.into_iter().enumerate() {
            let one = &store["stores"][nth];
            assert_eq!(
                (&one["name"], &one["role"], &one["state"]),
                (&name.into(), &role.into(), &state.into()),
                "{store:#}"
            );
            assert!(one["since"].as_str().is_some_and(|since| since.ends_with('Z')), "{one:#}");
            if state == "down" {
                let (said, why) = (text_of(store), one["last_error"]["text"].as_str().unwrap_or_default());
                assert!(!why.is_empty() && said.contains(&format!("{name} is down (")), "{said}: {one:#}");
            }
        }
        assert_eq!(store["error"].is_null(), expected.status == 200, "{store:#}");
        let both_up = (expected.redis, expected.postgres) == ("up", "up");
        assert_eq!(text_of(store).is_empty(), both_up, "{store:#}");
    }

    async fn until_both_are_up(&self) {
        until_some("both stores to be up", || async {
            let (_, said) = self.ready().await;
            let is_up = |nth: usize| said["store"]["stores"][nth]["state"] == "up";
            (is_up(0) && is_up(1)).then_some(())
        })
        .await;
    }
}

fn text_of(store: &Value) -> &str {
    store["error"].as_str().or(store["degraded"].as_str()).unwrap_or_default()
}

#[tokio::test]
async fn a_redis_with_a_fallback_goes_on_without_either() {
    let stage = Stage::start(|redis, postgres| format!("url = {redis:?}\nfallback = {postgres:?}")).await;
    let first = pay(&stage.gateway, "before").send().await;
    assert_ran(&first);
    assert_replay(&pay(&stage.gateway, "before").send().await, &first);
    let at_first = stage.says(&BOTH_UP, "front").await;
    assert_eq!(at_first["stores"][1]["last_error"], Value::Null);

    stage.postgres.kill();
    let alone = Expected { claims: "front-only", replays: "front-only", postgres: "down", ..BOTH_UP };
    let said = stage.says(&alone, "front").await;
    assert!(text_of(&said).ends_with("redis grants new keys alone, and their answers say degraded"), "{said:#}");
    assert_ne!(said["stores"][1]["since"], at_first["stores"][1]["since"]);
    assert_eq!(said["stores"][0]["since"], at_first["stores"][0]["since"]);
    assert_replay(&pay(&stage.gateway, "before").send().await, &first);
    // A call on a connection that has just died has no answer: it may have been applied, and never runs on Redis alone.
    let mut keys = 0..;
    let granted = until_some("a key to be granted by Redis alone", || {
        let key = format!("alone-{}", keys.next().expect("they do not end"));
        let stage = &stage;
        async move {
            let answer = pay(&stage.gateway, &key).send().await;
            (answer.status != 503).then_some(answer)
        }
    })
    .await;
    assert_degraded(&granted);

    stage.redis.kill();
    let none = Expected { status: 503, claims: "none", replays: "none", redis: "down", postgres: "down" };
    stage.says(&none, "front").await;
    assert_refused(&pay(&stage.gateway, "during").send().await, 503, "store-unavailable");

    stage.redis.restart();
    stage.postgres.restart();
    stage.until_both_are_up().await;
    let again = stage.says(&BOTH_UP, "front").await;
    assert!(again["stores"][1]["last_error"]["text"].is_string(), "it is still known: {again:#}");

    stage.redis.kill();
    let said = stage.says(&REDIS_DOWN, "front").await;
    assert!(text_of(&said).ends_with("; postgres decides alone"), "{said:#}");
    assert_ran(&pay(&stage.gateway, "during").send().await);
    assert_replay(&pay(&stage.gateway, "before").send().await, &first);
}

#[tokio::test]
async fn a_postgres_with_a_cache_goes_on_without_the_cache_only() {
    let stage = Stage::start(|redis, postgres| format!("url = {postgres:?}\ncache = {redis:?}")).await;
    let first = pay(&stage.gateway, "before").send().await;
    assert_ran(&first);
    assert_replay(&pay(&stage.gateway, "before").send().await, &first);
    stage.says(&BOTH_UP, "cache").await;

    stage.postgres.kill();
    let none = Expected { status: 503, claims: "none", replays: "front-only", postgres: "down", ..BOTH_UP };
    let said = stage.says(&none, "cache").await;
    assert!(text_of(&said).starts_with("new keys are refused: postgres is down ("), "{said:#}");
    assert_replay(&pay(&stage.gateway, "before").send().await, &first);
    assert_refused(&pay(&stage.gateway, "during").send().await, 503, "store-unavailable");
    stage.postgres.restart();
    stage.until_both_are_up().await;
    stage.says(&BOTH_UP, "cache").await;

    stage.redis.kill();
    stage.says(&REDIS_DOWN, "cache").await;
    assert_ran(&pay(&stage.gateway, "without-redis").send().await);
    assert_replay(&pay(&stage.gateway, "before").send().await, &first);
    stage.redis.restart();
    stage.until_both_are_up().await;
    stage.says(&BOTH_UP, "cache").await;
}
