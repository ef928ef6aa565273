//! The configuration as its writer sees it: what can be written, what wins, what each mistake is told.

use std::time::Duration;

use http::{Method, StatusCode};
use ibid::{
    FingerprintPart, KeyFormat, KeySource, OnConcurrent, OnUnknown, Policy, PolicyMode, RefusalReason, Remember,
    ScopePart,
};
use ibid_gateway::config::{
    ConfigError, Env, GatewaySettings, LogFormat, LogLevel, Role, ServeArgs, forgotten_answers, shortened_ttls,
};

const UPSTREAM: &str = "upstream = \"http://127.0.0.1:3000\"\n";

fn try_load(text: &str, env: &[(&str, &str)]) -> Result<GatewaySettings, ConfigError> {
    GatewaySettings::from_text(text, Some("ibid.toml".into()), &ServeArgs::default(), &Env::from_pairs(env))
}

/// With an upstream.
fn load(text: &str) -> GatewaySettings {
    try_load(&format!("{UPSTREAM}{text}"), &[]).unwrap_or_else(|why| panic!("{why}"))
}

/// The whole line that a mistake is told.
fn error_line(text: &str) -> String {
    try_load(&format!("{UPSTREAM}{text}"), &[]).map(|_| "valid").unwrap_err().to_string()
}

fn policy<'a>(settings: &'a GatewaySettings, method: &Method, path: &str) -> &'a Policy {
    &settings.routes.find(method, path).expect("covered").policy
}

mod accepted_settings {
    use super::*;

    #[test]
    fn an_upstream_is_enough() {
        let args = ServeArgs { upstream: Some("http://127.0.0.1:3000".into()), ..ServeArgs::default() };
        let settings = GatewaySettings::load(&args, &Env::from_pairs(&[])).unwrap();
        assert_eq!(settings.listen.to_string(), "127.0.0.1:8080");
        assert_eq!(settings.admin.as_ref().unwrap().listen.to_string(), "127.0.0.1:8081");
        assert_eq!(settings.store.url.to_string(), "embedded:ibid-data");
        assert_eq!(settings.journal.as_deref(), Some(std::path::Path::new("ibid-journal")));
        assert_eq!(settings.upstream, "http://127.0.0.1:3000");
        assert_eq!(policy(&settings, &Method::PATCH, "/any/path"), &Policy::ietf());
        assert_eq!(settings.file, None);
        assert!(settings.warnings.is_empty(), "{:?}", settings.warnings);
    }

    #[test]
    fn the_file_of_the_guide() {
        let text = r#"
            listen   = "127.0.0.1:8080"
            upstream = "http://127.0.0.1:3000"
            trusted_proxies = ["127.0.0.0/8", "::1/128"]
            max_running = 10000
            buffer_memory = "256MiB"
            cors = { origins = ["https://shop.example.com"] }

            [admin]
            listen = "127.0.0.1:8081"
            token  = "env:IBID_ADMIN_TOKEN"
            tokens = [{ role = "viewer", token = "env:IBID_VIEWER" }, { role = "user", user = "u1", token = "env:IBID_U1" }]

            [store]
            url      = "embedded:ibid-data"
            prefix   = "idempotency"
            timeout  = "500ms"
            compress = true
            sweep_every = "1m"
            strict   = false

            [policy]
            preset = "ietf"

            [[route]]
            match  = "POST /api/leads"
            preset = "leads"

            [[route]]
            match = "POST /payments"
            ttl   = "72h"
            resolve = "GET /payments?key={key}"
        "#;
        let env = [("IBID_ADMIN_TOKEN", "s3cret-a"), ("IBID_VIEWER", "s3cret-v"), ("IBID_U1", "s3cret-u")];
        let settings = try_load(text, &env).unwrap();
        let admin = settings.admin.as_ref().unwrap();
        let roles: Vec<_> =
            admin.tokens.iter().map(|token| (token.role, token.user.as_deref(), token.token.expose())).collect();
        assert_eq!(
            roles,
            [(Role::Admin, None, "s3cret-a"), (Role::Viewer, None, "s3cret-v"), (Role::User, Some("u1"), "s3cret-u")]
        );
        assert_eq!(settings.journal, Some("ibid-journal".into()));
        assert_eq!(settings.cors_origins, ["https://shop.example.com"]);
        assert_eq!(settings.buffer_memory, 256 << 20);
        let leads = policy(&settings, &Method::POST, "/api/leads");
        assert_eq!((leads.ttl, leads.on_concurrent), (Duration::from_secs(300), OnConcurrent::Wait));
        let payments = policy(&settings, &Method::POST, "/payments");
        assert_eq!(payments.ttl, Duration::from_secs(72 * 3600));
        assert_eq!(payments.resolve.as_ref().unwrap().to_string(), "GET /payments?key={key}");
        assert_eq!(payments.methods, [Method::POST]);
        assert!(settings.routes.find(&Method::PUT, "/payments").unwrap().is_default_policy);
        assert!(settings.routes.find(&Method::POST, "/payments/1").unwrap().is_default_policy);
        assert!(!format!("{settings:?}").contains("s3cret"));
    }

    #[test]
    fn every_dial() {
        let settings = load(
            r#"
            [[route]]
            match = "POST|PUT /a"
            key = { from = ["header:X-Key", "json:/id", "query:k"], required = true, format = "regex:[a-z]+", max_length = 64 }
            scope = ["cookie:sid", "path"]
            label = { tenant = "header:X-Tenant-Id", user = "cookie:sid", key = "clear" }
            fingerprint = ["method", "header:Accept", "body"]
            json_ignore = ["/sent_at", "/meta/trace"]
            on_mismatch = "new"
            on_concurrent = "wait"
            on_unknown = "retry"
            resolve = "HEAD /x/{key}"
            on_store_down = "open"
            remember = ["2xx", "!204", 404, "410"]
            unknown_status = [500, 502]
            remember_body = false
            max_request = 4096
            max_response = "10KB"
            digest_status = 200
            ttl = "7d"
            lease = "500ms"
            timeout = "5m"
            wait_timeout = "1h"
            late_answer = "0s"
            first_headers = { X-First = "{request_id}" }
            replay_headers = { X-Replay = "yes", X-Time = "{original_time}" }
            drop_headers = ["X-Trace"]
            status = { in_progress = 425, key_reused = 409 }
            grpc_status = { key_reused = "ALREADY_EXISTS", in_progress = 10 }
            envelope = "metadata"
            upstream = "https://other.example.com"
            mode = "shadow"
            "#,
        );
        let route = settings.routes.find(&Method::PUT, "/a").unwrap();
        let policy = &route.policy;
        assert_eq!(route.upstream.as_deref(), Some("https://other.example.com"));
        assert_eq!(policy.key.from.len(), 3);
        assert!(policy.key.required);
        assert_eq!(policy.key.format.to_string(), "regex:[a-z]+");
        assert_eq!(policy.key.max_length, 64);
        assert_eq!(policy.scope, [ScopePart::Cookie("sid".into()), ScopePart::Path]);
        assert_eq!(policy.label.user, Some(ScopePart::Cookie("sid".into())));
        assert_eq!(policy.fingerprint[1], FingerprintPart::Header(http::header::ACCEPT));
        assert_eq!(policy.json_ignore.len(), 2);
        assert_eq!(policy.remember.to_string(), "2xx 404 410 !204");
        assert_eq!(policy.unknown_status, [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::BAD_GATEWAY]);
        assert!(!policy.remember_body);
        assert_eq!((policy.max_request, policy.max_response), (4096, 10_000));
        assert_eq!(policy.digest_status, Some(StatusCode::OK));
        assert_eq!(policy.ttl, Duration::from_secs(7 * 86_400));
        assert_eq!(policy.lease, Duration::from_millis(500));
        assert_eq!(policy.late_answer, Some(Duration::ZERO));
        assert_eq!(policy.replay_headers.len(), 2);
        assert_eq!(policy.drop_headers, ["x-trace"]);
        assert_eq!(policy.status_of(RefusalReason::InProgress), StatusCode::TOO_EARLY);
        assert_eq!(policy.status_of(RefusalReason::KeyReused), StatusCode::CONFLICT);
        assert_eq!(policy.grpc_status_of(RefusalReason::KeyReused), 6);
        assert_eq!(policy.mode, PolicyMode::Shadow);
    }

    #[test]
    fn dotted_keys_single_values_and_original() {
        let settings = load(
            "[policy]\nkey.required = true\nkey.from = \"header:X-K\"\nscope = \"global\"\nfingerprint = \"body\"\n\
             status.in_progress = 425\ngrpc_status.in_progress = \"UNAVAILABLE\"\nunknown_status = 503\n\
             digest_status = \"original\"\nremember = \"success\"\nmethods = \"POST\"\njson_ignore = []\nlabel.key = \"clear\"",
        );
        let policy = policy(&settings, &Method::POST, "/");
        assert_eq!(policy.key.from, ["header:x-k".parse::<KeySource>().unwrap()]);
        assert_eq!(policy.scope, [ScopePart::Global]);
        assert_eq!(policy.fingerprint, [FingerprintPart::Body]);
        assert_eq!(policy.unknown_status, [StatusCode::SERVICE_UNAVAILABLE]);
        assert_eq!(policy.remember, Remember::Success);
        assert_eq!(policy.digest_status, None);
        assert!(settings.routes.find(&Method::PUT, "/").is_none());
    }

    #[test]
    fn all_presets_by_name_and_their_example_files() {
        for preset in ibid::presets::PRESET_NAMES {
            let settings = load(&format!("[policy]\npreset = {preset:?}"));
            assert_eq!(*settings.routes.iter().next().unwrap().policy, Policy::preset(preset).unwrap());
            let path = format!("{}/presets/{preset}.toml", env!("CARGO_MANIFEST_DIR"));
            let settings = GatewaySettings::load(&ServeArgs::for_file(path), &Env::from_pairs(&[]))
                .unwrap_or_else(|why| panic!("{why}"));
            assert!(settings.warnings.is_empty(), "{preset}: {:?}", settings.warnings);
            assert!(settings.routes.iter().all(|route| route.preset == preset));
        }
    }

    #[test]
    fn values_from_variables_and_files_even_numbers() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "s3cret\n").unwrap();
        std::fs::write(folder.path().join("cert.pem"), "-----BEGIN CERTIFICATE-----\n").unwrap();
        let text = format!(
            "{UPSTREAM}max_running = \"env:RUNNING\"\naccept_forgetting = \"env:FORGET\"\n[admin]\ntoken = \"file:token\"\n\
             [tls]\ncert = \"cert.pem\"\nkey = \"env:PEM\"\n[policy]\nttl = \"env:TTL\"\nscope = [\"env:SCOPE\"]"
        );
        let path = folder.path().join("ibid.toml");
        std::fs::write(&path, text).unwrap();
        let env = [
            ("RUNNING", "7"),
            ("FORGET", "true"),
            ("TTL", "1h"),
            ("SCOPE", "global"),
            ("PEM", "-----BEGIN PRIVATE KEY-----\nx"),
        ];
        let settings = GatewaySettings::load(&ServeArgs::for_file(&path), &Env::from_pairs(&env)).unwrap();
        assert_eq!(settings.max_running, 7);
        assert!(settings.accept_forgetting);
        assert_eq!(settings.admin.as_ref().unwrap().tokens[0].token.expose(), "s3cret");
        assert_eq!(policy(&settings, &Method::POST, "/").ttl, Duration::from_secs(3600));
        let tls = settings.tls.as_ref().unwrap();
        assert!(tls.cert.text().contains("CERTIFICATE") && tls.key.text().contains("PRIVATE"));
        assert!(!format!("{settings:?}").contains("BEGIN"));
    }

    #[test]
    fn one_store_or_two_as_one() {
        use ibid_stores::StoreKind;
        let redis = "[store]\nurl = \"redis://:s3cret@127.0.0.1:6379/0\"\n";
        let postgres = "[store]\nurl = \"postgres://ibid:s3cret@127.0.0.1/ibid\"\n";
        for (text, decides, near) in [
            ("", StoreKind::Embedded, 0),
            ("store.url = \"memory:\"", StoreKind::Memory, 0),
            ("store.local_cache = \"1MiB\"", StoreKind::Embedded, 1 << 20),
            ("store.wait_replicas = 0\nstore.local_cache = 0", StoreKind::Embedded, 0),
            (redis, StoreKind::Redis, 64 << 20),
            (&format!("{redis}local_cache = \"0\"\nwait_replicas = 2"), StoreKind::Redis, 0),
            (&format!("{redis}fallback = \"postgres://ibid:s3cret@127.0.0.1/ibid\""), StoreKind::Postgres, 64 << 20),
            (postgres, StoreKind::Postgres, 64 << 20),
            (&format!("{postgres}cache = \"redis+cluster://127.0.0.1:7000\"\nlocal_cache = 5"), StoreKind::Postgres, 5),
        ] {
            let settings = load(text);
            let layout = settings.store.store_config();
            assert_eq!((layout.authority().kind(), layout.local_cache_bytes()), (decides, near), "{text}");
            assert_eq!(settings.journal.is_some(), decides != StoreKind::Memory, "{text}");
            let shown = format!("{settings:?} {layout:?}");
            assert!(!shown.contains("s3cret"), "{shown}");
        }
        let tiered = format!("{redis}fallback = \"postgres://ibid@127.0.0.1/ibid\"");
        for (text, compresses) in [
            ("", true),
            (redis, true),
            (&format!("{redis}compress = false"), false),
            (postgres, false),
            (&tiered, false),
            (&format!("{postgres}compress = true"), true),
        ] {
            assert_eq!(load(text).store.compresses(), compresses, "{text}");
        }
        let settings = load(&format!("{postgres}rls_user = \"auth.uid()\"\n[quota]\nnew_bytes = \"1GiB/24h\""));
        assert_eq!(settings.store.rls_user.as_deref(), Some("auth.uid()"));
        let limit = settings.quota.new_bytes.expect("a limit");
        assert_eq!((limit.most, limit.per), (1 << 30, Duration::from_secs(86_400)));
        let settings = load(&format!("{redis}prefix = \"shop\"\ntimeout = \"250ms\"\nwait_replicas = 2"));
        let shown = format!("{:?}", settings.store.store_config());
        for part in ["prefix: \"shop\"", "timeout: 250ms", "wait_replicas: 2"] {
            assert!(shown.contains(part), "{part} reaches the store: {shown}");
        }
    }

    #[test]
    fn limits_log_journal_and_admin_off() {
        let settings = load(
            "max_upstream = 8\njournal = \"/var/lib/ibid\"\nadmin.listen = \"off\"\n\
             upstream_idle = \"2s\"\nupgrades = [\"WebSocket\", \"spdy/3.1\"]\n\
             [limits]\nheader_timeout = \"1s\"\nreply_timeout = \"20m\"\nmax_header_bytes = \"16KiB\"\nshutdown = \"0s\"\n\
             [log]\nformat = \"json\"\nlevel = \"debug\"",
        );
        assert_eq!(settings.max_upstream, 8);
        assert_eq!(settings.journal, Some("/var/lib/ibid".into()));
        assert!(settings.admin.is_none());
        assert_eq!(settings.limits.header_timeout, Duration::from_secs(1));
        assert_eq!(settings.limits.body_timeout, Duration::from_secs(30));
        assert_eq!(settings.limits.idle_timeout, Duration::from_secs(75));
        assert_eq!(settings.limits.write_timeout, Duration::from_secs(60));
        assert_eq!(settings.upstream_idle, Duration::from_secs(2));
        assert_eq!(settings.upgrades, ["websocket", "spdy/3.1"]);
        assert_eq!(settings.limits.reply_timeout, Duration::from_secs(1200));
        assert_eq!(settings.limits.pool_timeout, Duration::from_secs(10));
        assert_eq!(settings.limits.tunnel_timeout, Duration::from_secs(600));
        assert_eq!(settings.limits.max_header_bytes, 16 << 10);
        assert_eq!((settings.limits.max_headers, settings.limits.max_connections), (100, 10_000));
        assert_eq!((settings.log.format, settings.log.level), (LogFormat::Json, LogLevel::Debug));
    }
}

mod precedence {
    use super::*;

    #[test]
    fn flags_over_variables_over_the_file_over_defaults() {
        let text = "listen = \"127.0.0.1:1\"\nupstream = \"http://file\"\nstore.url = \"embedded:file\"\n\
                    [log]\nlevel = \"warn\"\n[policy]\npreset = \"leads\"\nttl = \"1m\"";
        let env = Env::from_pairs(&[
            ("IBID_LISTEN", "127.0.0.1:2"),
            ("IBID_UPSTREAM", "http://variable"),
            ("IBID_STORE", ""),
            ("IBID_PRESET", "stripe"),
            ("IBID_LOG_FORMAT", "json"),
            ("IBID_ADMIN", "off"),
        ]);
        let args = ServeArgs { listen: Some("127.0.0.1:3".into()), ..ServeArgs::default() };
        let settings = GatewaySettings::from_text(text, None, &args, &env).unwrap();
        assert_eq!(settings.listen.port(), 3);
        assert_eq!(settings.upstream, "http://variable");
        assert_eq!(settings.store.url.to_string(), "embedded:file");
        assert_eq!((settings.log.format, settings.log.level), (LogFormat::Json, LogLevel::Warn));
        assert!(settings.admin.is_none());
        let route = settings.routes.iter().next().unwrap();
        assert_eq!((route.preset, route.policy.ttl), ("stripe", Duration::from_secs(60)));
    }

    #[test]
    fn mistakes_name_the_flag_or_the_variable() {
        let args = ServeArgs { listen: Some("x".into()), ..ServeArgs::default() };
        let told = |args: &ServeArgs, env: &[(&str, &str)]| {
            GatewaySettings::load(args, &Env::from_pairs(env)).unwrap_err().to_string()
        };
        assert_eq!(
            told(&args, &[]),
            "--listen: \"x\" is no address; allowed is an address and a port such as \"127.0.0.1:8080\""
        );
        let none = ServeArgs::default();
        assert_eq!(
            told(&none, &[("IBID_LOG_LEVEL", "loud")]),
            "IBID_LOG_LEVEL: \"loud\" is no log level; allowed are \"error\" \"warn\" \"info\" \"debug\" \"trace\""
        );
        assert_eq!(
            told(&none, &[]),
            "upstream: missing; name the app, such as \"http://127.0.0.1:3000\", here, by --upstream or by IBID_UPSTREAM"
        );
        assert_eq!(
            told(&none, &[("IBID_CONFIG", "/no/such.toml")]),
            "/no/such.toml: cannot be read: No such file or directory (os error 2)"
        );
    }

    #[test]
    fn a_route_with_a_preset_takes_nothing_from_policy_and_one_without_takes_all() {
        let settings = load(
            "[policy]\npreset = \"platform\"\nttl = \"1h\"\nstatus.in_progress = 425\nupstream = \"http://p\"\n\
             [[route]]\nmatch = \"POST /own\"\npreset = \"stripe\"\n\
             [[route]]\nmatch = \"POST /from\"\nstatus.key_reused = 409\nreplay_headers = {}",
        );
        let own = settings.routes.find(&Method::POST, "/own").unwrap();
        assert_eq!(*own.policy, Policy::stripe());
        assert_eq!((own.inherits_policy, own.upstream.as_deref()), (false, None));
        let from = settings.routes.find(&Method::POST, "/from").unwrap();
        assert_eq!((from.inherits_policy, from.upstream.as_deref()), (true, Some("http://p")));
        assert_eq!(from.policy.ttl, Duration::from_secs(3600));
        assert_eq!(from.policy.status_of(RefusalReason::InProgress), StatusCode::TOO_EARLY);
        assert_eq!(from.policy.status_of(RefusalReason::KeyReused), StatusCode::CONFLICT);
        assert_eq!(from.policy.on_unknown, OnUnknown::Retry);
        let other = settings.routes.find(&Method::POST, "/other").unwrap();
        assert_eq!(
            (other.name.as_str(), other.is_default_policy, other.upstream.as_deref()),
            ("*", true, Some("http://p"))
        );
        assert_eq!(other.policy.ttl, Duration::from_secs(3600), "what no route names is under [policy]");
    }

    #[test]
    fn routes_without_policy_start_from_ietf_and_so_does_what_they_do_not_name() {
        let settings = load("[[route]]\nmatch = \"DELETE /a\"\nkey.format = \"uuid\"");
        let route = settings.routes.find(&Method::DELETE, "/a").unwrap();
        assert_eq!((route.preset, &route.policy.key.format), ("ietf", &KeyFormat::Uuid));
        assert_eq!(route.policy.methods, [Method::DELETE]);
        let other = settings.routes.find(&Method::DELETE, "/b").unwrap();
        assert_eq!((other.is_default_policy, &*other.policy), (true, &Policy::ietf()));
    }

    #[test]
    fn under_a_policy_that_is_off_only_routes_are_covered() {
        let settings = load(
            "[policy]\npreset = \"off\"\nttl = \"1h\"\n[[route]]\nmatch = \"POST /a\"\n\
             [[route]]\nmatch = \"POST /b\"\npreset = \"leads\"",
        );
        let route = settings.routes.find(&Method::POST, "/a").unwrap();
        assert_eq!((route.preset, route.policy.ttl), ("ietf", Duration::from_secs(3600)), "its dials hold for routes");
        assert_eq!(settings.routes.find(&Method::POST, "/b").unwrap().preset, "leads");
        assert!(settings.routes.find(&Method::POST, "/c").is_none());
        assert!(settings.warnings.is_empty(), "{:?}", settings.warnings);
        assert_eq!(
            load("[policy]\npreset = \"off\"").warnings,
            ["policy: preset is \"off\" and there is no route, so nothing is covered"]
        );
        assert_eq!(
            error_line("[[route]]\nmatch = \"POST /a\"\npreset = \"off\""),
            "ibid.toml: route[1].preset: only [policy] has the preset \"off\"; a route is switched off by mode = \"off\" \
             (match = \"POST /a\")"
        );
    }
}

mod error_messages {
    use super::*;

    /// Each mistake in the second route of a file.
    #[track_caller]
    fn route(dial: &str, told: &str) {
        let text = format!("[[route]]\nmatch = \"POST /a\"\n[[route]]\nmatch = \"POST /b\"\n{dial}");
        assert_eq!(error_line(&text), format!("ibid.toml: route[2].{told} (match = \"POST /b\")"));
    }

    #[track_caller]
    fn top(text: &str, told: &str) {
        assert_eq!(error_line(text), format!("ibid.toml: {told}"));
    }

    #[test]
    fn values_of_dials() {
        route("on_unknown = \"wait\"", "on_unknown: \"wait\" is no on_unknown; allowed are \"hold\" \"retry\"");
        route("mode = true", "mode: found true; allowed is \"enforce\" \"shadow\" \"off\"");
        let duration = "allowed is a duration such as \"500ms\" \"30s\" \"5m\" \"24h\" \"7d\"";
        route("ttl = \"1 day\"", &format!("ttl: \"1 day\" is no duration; {duration}"));
        route("ttl = \"99999999999999999d\"", &format!("ttl: \"99999999999999999d\" is no duration; {duration}"));
        route("ttl = 5", &format!("ttl: found 5; {duration}"));
        route("ttl = 2024-01-01", &format!("ttl: found a date; {duration}"));
        let size = "allowed is bytes, or a size such as \"64KiB\" \"1MiB\" \"1GiB\" \"10KB\"";
        route("max_request = \"1 meg\"", &format!("max_request: \"1 meg\" is no size; {size}"));
        route("max_request = -1", &format!("max_request: -1 is no size; {size}"));
        route(
            "key.format = \"guid\"",
            "key.format: \"guid\" is no key format; allowed are \"any\" \"raw\" \"uuid\" \"uuid4\" \"token\" \"operation\" \"regex:PATTERN\"",
        );
        route("key.required = \"yes\"", "key.required: found \"yes\"; allowed is true or false");
        route("key.max_length = 1.5", "key.max_length: found 1.5; allowed is a whole number");
        route(
            "key.from = [\"header:A\", \"cookie:b\"]",
            "key.from[2]: \"cookie:b\" is no source of a key; allowed are \"header:NAME\" \"json:/pointer\" \"query:NAME\" \"body\"",
        );
        route(
            "scope = { a = 1 }",
            "scope: found a table; allowed is a list, each part of a scope such as \"credential\"",
        );
        route("unknown_status = [999]", "unknown_status[1]: 999 is no status code; allowed is 100 to 599");
        route(
            "remember = \"some\"",
            "remember: \"some\" is no remember; allowed are \"all\" \"final\" \"success\" or a list such as [\"2xx\", 404, \"!409\"]",
        );
        route(
            "remember = [\"9xx\"]",
            "remember[1]: \"9xx\" is no status; allowed are a code such as 404, or a class such as \"2xx\"",
        );
        route("status.in_progress = 200", "status.in_progress: 200 is no status of a refusal; allowed is 400 to 599");
        route(
            "grpc_status.in_progress = 17",
            "grpc_status.in_progress: 17 is no gRPC code of a refusal; allowed is 1 to 16",
        );
        route(
            "digest_status = \"first\"",
            "digest_status: \"first\" is no digest_status; allowed is \"original\" or a status code such as 200",
        );
        route("json_ignore = \"a\"", "json_ignore: \"a\" is no JSON pointer; write one such as \"/meta/sent_at\"");
        route(
            "replay_headers = { X-A = \"{nope}\" }",
            "replay_headers.X-A: \"{nope}\" is no header value; {request_id} and {original_time} are filled in",
        );
        route(
            "replay_headers = { Content-Length = \"1\" }",
            "replay_headers: \"content-length\" frames the message and cannot be set",
        );
        route(
            "resolve = \"POST /x\"",
            "resolve: \"POST /x\" is no probe; write a safe method and a path, such as \"GET /payments?key={key}\"",
        );
        route("key = \"uuid\"", "key: found \"uuid\"; allowed is a table");
        route("key = [\"a\"]", "key: found a list; allowed is a table");
    }

    #[test]
    fn presets() {
        let names = "allowed are \"leads\" \"appsportal\" \"bookings\" \"platform\" \"membership\" \"ietf\" \"stripe\" \
                     \"webhook:standard\" \"webhook:svix\" \"webhook:github\" \"webhook:stripe\" \"webhook:shopify\" \
                     \"webhook:custom\"";
        route("preset = \"paypal\"", &format!("preset: \"paypal\" is no preset; {names}"));
        route("preset = \"strpie\"", &format!("preset: \"strpie\" is no preset, did you mean \"stripe\"? {names}"));
        route(
            "preset = \"webhook:gitlab\"",
            &format!("preset: \"webhook:gitlab\" is no preset, did you mean \"webhook:github\"? {names}"),
        );
    }

    #[test]
    fn unknown_keys() {
        let keys = "allowed are \"from\" \"required\" \"format\" \"max_length\"";
        route("key.max-length = 3", &format!("key.max-length: unknown key, did you mean \"max_length\"? {keys}"));
        route("key.colour = 3", &format!("key.colour: unknown key; {keys}"));
        let told = error_line("[[route]]\nmatch = \"POST /a\"\ntll = \"1h\"");
        assert!(told.starts_with("ibid.toml: route[1].tll: unknown key, did you mean \"ttl\"? allowed are \"match\" \"preset\" \"methods\" "), "{told}");
        let told = error_line("[policy]\nmaths = 1");
        assert!(told.contains("policy.maths: unknown key; allowed are \"preset\" \"methods\""), "{told}");
        let told = error_line("[[route]]\nmatch = \"POST /a\"\nstatus.in-progress = 425");
        assert!(told.starts_with("ibid.toml: route[1].status.in-progress: unknown key, did you mean \"in_progress\"? allowed are \"key_missing\""), "{told}");
        top("[log]\n\"a b\" = 1", "log.\"a b\": unknown key; allowed are \"format\" \"level\"");
        top("[policy]\nmatch = \"POST /a\"", "policy.match: only a [[route]] has a match");
    }

    #[test]
    fn matches() {
        top(
            "[[route]]\nmatch = \"/payments\"",
            "route[1].match: \"/payments\" is no match, it names no method; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"",
        );
        top(
            "[[route]]\nttl = \"1h\"",
            "route[1].match: missing; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"",
        );
        top(
            "[[route]]\nmatch = \"POST|PUT /a\"\n[[route]]\nmatch = \"PUT|POST /a\"",
            "route[2].match: \"PUT|POST /a\" is the match of route[1] already",
        );
        top("[route]\nmatch = \"POST /a\"", "route: found no list of routes; write [[route]], with two brackets");
        top("[admin]\ntokens = \"x\"", "admin.tokens: found text; allowed is a list");
        route("methods = [\"PUT\"]", "methods: the methods of a route are those in its match; leave methods out");
    }

    #[test]
    fn contradictions() {
        route(
            "fingerprint = []",
            "fingerprint: is empty, so nothing can mismatch; set on_mismatch = \"ignore\" or add parts",
        );
        route("scope = [\"global\", \"host\"]", "scope: has \"global\" beside other parts; use it alone");
        route("ttl = \"0s\"", "ttl: is zero; it must be longer, such as \"30s\"");
        route("key.max_length = 256", "key.max_length: is 256; allowed is 1 to 255");
        top("[policy]\nmethods = []", "policy.methods: is empty; name at least one, or use mode = \"off\"");
        top(
            "[admin]\nlisten = \"127.0.0.1:8080\"",
            "admin.listen: \"127.0.0.1:8080\" is where clients connect already (listen)",
        );
        top("[tls]\ncert = \"a\"", "tls.key: missing; [tls] needs a cert and a key");
        top("max_running = 0", "max_running: found 0; allowed is 1 and more");
        top("[limits]\nwrite_timeout = \"0s\"", "limits.write_timeout: it is zero; it must be longer, such as \"30s\"");
        top("[limits]\nidle_timeout = \"0s\"", "limits.idle_timeout: it is zero; it must be longer, such as \"30s\"");
        for (name, value) in
            [("reply", "limits.reply_timeout"), ("pool", "limits.pool_timeout"), ("tunnel", "limits.tunnel_timeout")]
        {
            let told = format!("{value}: it is zero; it must be longer, such as \"30s\"");
            top(&format!("[limits]\n{name}_timeout = \"0s\""), &told);
        }
        for protocol in ["h2c", "H2C", "HTTP/2.0", "TLS/1.0"] {
            let told = "is not allowed: requests inside such a connection would reach the app uncovered";
            let told = format!("upgrades[2]: \"{protocol}\" {told}");
            top(&format!("upgrades = [\"websocket\", \"{protocol}\"]"), &told);
        }
        top(
            "upgrades = \"web socket\"",
            "upgrades: \"web socket\" is no protocol; allowed is a protocol such as \"websocket\"",
        );
        top(
            "[admin]\ntokens = [{ role = \"user\", token = \"x\" }]",
            "admin.tokens[1].user: missing; a token of role \"user\" names whose it is",
        );
        top(
            "[admin]\ntokens = [{ role = \"root\", token = \"x\" }]",
            "admin.tokens[1].role: \"root\" is no role; allowed are \"admin\" \"viewer\" \"user\"",
        );
        top(
            "[admin]\ntoken = \"x\"\ntokens = [{ role = \"viewer\", token = \"x\" }]",
            "admin.tokens[1].token: another token is the same; each needs its own",
        );
        top(
            "listen = \"127.0.0.1:3000\"",
            "upstream: \"http://127.0.0.1:3000\" is where ibid itself listens (127.0.0.1:3000)",
        );
        top(
            "listen = \"0.0.0.0:3000\"",
            "upstream: \"http://127.0.0.1:3000\" is where ibid itself listens (0.0.0.0:3000)",
        );
    }

    #[test]
    fn stores_that_contradict_each_other() {
        const REDIS: &str = "redis://127.0.0.1:6379/0";
        const POSTGRES: &str = "postgres://ibid@127.0.0.1/ibid";
        let store = |url: &str, more: &str, told: &str| {
            top(&format!("[store]\nurl = \"{url}\"\n{more}"), &format!("store.{told}"));
        };
        let fallback = |url: &str| format!("fallback = \"{url}\"");
        let cache = |url: &str| format!("cache = \"{url}\"");
        for (url, is) in [("memory:", "a memory"), ("embedded:data", "an embedded")] {
            let told = format!("fallback: only a redis store.url has a fallback; store.url is {is} store");
            store(url, &fallback(POSTGRES), &told);
            store(
                url,
                &cache(REDIS),
                &format!("cache: only a postgres store.url has a cache; store.url is {is} store"),
            );
            let told = format!(
                "wait_replicas: found 1; only a redis store.url has replicas to wait for, and store.url is {is} store"
            );
            store(url, "wait_replicas = 1", &told);
            store(url, "wait_replicas = -1", "wait_replicas: found -1; allowed is a whole number");
        }
        store(
            POSTGRES,
            &fallback(POSTGRES),
            "fallback: only a redis store.url has a fallback; store.url is a postgres store, which may have a cache",
        );
        store(
            REDIS,
            &cache(REDIS),
            "cache: only a postgres store.url has a cache; store.url is a redis store, which may have a fallback",
        );
        for (other, is) in [("memory:", "a memory"), ("embedded:x", "an embedded"), (REDIS, "a redis")] {
            let told = format!("fallback: found {is} store; allowed is one such as \"postgres://ibid@127.0.0.1/ibid\"");
            store(REDIS, &fallback(other), &told);
        }
        for (other, is) in [("memory:", "a memory"), ("embedded:x", "an embedded"), (POSTGRES, "a postgres")] {
            let told = format!("cache: found {is} store; allowed is one such as \"redis://127.0.0.1:6379/0\"");
            store(POSTGRES, &cache(other), &told);
        }
        // Each of the two contradicts something.
        let both = format!("{}\n{}", fallback(POSTGRES), cache(REDIS));
        store(
            REDIS,
            &both,
            "cache: only a postgres store.url has a cache; store.url is a redis store, which may have a fallback",
        );
        store(
            POSTGRES,
            &both,
            "fallback: only a redis store.url has a fallback; store.url is a postgres store, which may have a cache",
        );
        // It is PostgreSQL that decides here, so no replica of Redis is worth waiting for.
        store(
            POSTGRES,
            &format!("{}\nwait_replicas = 2", cache(REDIS)),
            "wait_replicas: found 2; only a redis store.url has replicas to wait for, and store.url is a postgres store",
        );
        store(REDIS, "wait_replicas = 101", "wait_replicas: found 101; allowed is 0 to 100");
        store(
            REDIS,
            "local_cache = \"much\"",
            "local_cache: \"much\" is no size; allowed is bytes, or a size such as \"64KiB\" \"1MiB\" \"1GiB\" \"10KB\"",
        );
        store(REDIS, "timeout = \"0s\"", "timeout: it is zero; it must be longer, such as \"30s\"");
        let told = error_line("[store]\nurl = \"redis://:s3cret@h/0\"\nfallback = \"postgers://u:s3cret@h/d\"");
        assert!(told.starts_with("ibid.toml: store.fallback: \"postgers://****@h/d\" names no store"), "{told}");
        let args = ServeArgs { store: Some("embedded:x".into()), ..ServeArgs::default() };
        let text = format!("{UPSTREAM}[store]\nurl = {REDIS:?}\nfallback = {POSTGRES:?}");
        let told = GatewaySettings::from_text(&text, None, &args, &Env::from_pairs(&[])).unwrap_err().to_string();
        assert_eq!(told, "store.fallback: only a redis store.url has a fallback; store.url is an embedded store");
    }

    #[test]
    fn quotas_of_bytes_and_users_of_rows() {
        for most in ["1GiB", "lots/24h", "1GiB/never", "0/24h"] {
            top(
                &format!("quota.new_bytes = \"{most}\""),
                &format!(
                    "quota.new_bytes: \"{most}\" is no limit of bytes; allowed is so many bytes in so long, such as \"1GiB/24h\""
                ),
            );
        }
        top("store.rls_user = \"auth.uid()\"", "store.rls_user: only a postgres store has row-level security");
        top(
            "store.url = \"postgres://ibid@127.0.0.1/ibid\"\nstore.rls_user = \"a(); DROP TABLE b\"",
            "store.rls_user: found \"a(); DROP TABLE b\"; allowed is an SQL expression such as \"auth.uid()\"",
        );
    }

    #[test]
    fn addresses_and_servers() {
        top(
            "listen = \"8080\"",
            "listen: \"8080\" is no address; allowed is an address and a port such as \"127.0.0.1:8080\"",
        );
        top(
            "trusted_proxies = [\"10.0.0.0/33\"]",
            "trusted_proxies: \"10.0.0.0/33\" is no network; write one such as \"10.0.0.0/8\" or \"::1/128\"",
        );
        top(
            "store.url = \"mysql://u:s3cret@h\"",
            "store.url: \"mysql://****@h\" names no store of this build; built in are memory: embedded: redis:// rediss:// redis+sentinel:// redis+cluster:// postgres://",
        );
        top(
            "cors.origins = [\"*\"]",
            "cors.origins[1]: \"*\" is no origin; allowed is a scheme and a host in lower case, such as \"https://shop.example.com\"",
        );
        let told = |text: &str| try_load(text, &[]).unwrap_err().to_string();
        assert_eq!(
            told("upstream = \"http://a/b\""),
            "ibid.toml: upstream: \"http://a/b\" is no upstream, it has a path; allowed is a URL without a path, such as \"http://127.0.0.1:3000\""
        );
        assert_eq!(
            told("upstream = \"localhost:3000\""),
            "ibid.toml: upstream: \"localhost:3000\" is no upstream, it lacks \"http://\"; allowed is a URL without a path, such as \"http://127.0.0.1:3000\""
        );
    }

    #[test]
    fn what_values_point_to() {
        top("admin.token = \"env:NOPE\"", "admin.token: \"env:NOPE\": the environment variable NOPE is not set");
        top(
            "admin.token = \"file:nope\"",
            "admin.token: \"file:nope\": cannot read it: No such file or directory (os error 2)",
        );
        let told = |env: &[(&str, &str)]| {
            try_load(&format!("{UPSTREAM}[policy]\nttl = \"env:T\"\n[admin]\ntoken = \"env:A\""), env)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(told(&[("A", ""), ("T", "1h")]), "ibid.toml: admin.token: it is empty (from \"env:A\")");
        assert_eq!(
            told(&[("A", "x"), ("T", "soon")]),
            "ibid.toml: policy.ttl: \"soon\" is no duration; allowed is a duration such as \"500ms\" \"30s\" \"5m\" \"24h\" \"7d\" (from \"env:T\")"
        );
        top(
            "[tls]\ncert = \"nope.pem\"\nkey = \"k\"",
            "tls.cert: cannot read \"nope.pem\": No such file or directory (os error 2)",
        );
    }

    #[test]
    fn mistakes_in_toml_itself() {
        let told = error_line("a = [1,\n\"x\" = ]");
        assert!(told.starts_with("ibid.toml: line "), "{told}");
        assert_eq!(told.lines().count(), 1);
        let told = try_load("listen = 1\nlisten = 2\n", &[]).unwrap_err().to_string();
        assert_eq!(told, "ibid.toml: line 2, column 1: duplicate key");
    }
}

mod warnings_and_notes {
    use super::*;

    #[test]
    fn a_route_that_an_earlier_one_hides() {
        let settings = load(
            "[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /a\"\npreset = \"leads\"\n\
             [[route]]\nmatch = \"POST /a/*\"\npreset = \"leads\"\n[[route]]\nmatch = \"PUT /a/:x\"\npreset = \"leads\"\n\
             [[route]]\nmatch = \"POST|PUT /a/b\"\npreset = \"leads\"\n[[route]]\nmatch = \"PUT /a/b/c\"\npreset = \"leads\"",
        );
        assert_eq!(
            settings.warnings,
            [
                "route[4] (POST|PUT /a/b): never matches, because all its requests go to route[2] (POST /a/*) and route[3] (PUT /a/:x) before it"
            ]
        );
        assert!(settings.notes.is_empty());
        // Whatever is spoken: method and path alone decide.
        let settings = load("[[route]]\nmatch = \"POST /*\"\n[[route]]\nmatch = \"grpc shop.Orders/Create\"");
        let hidden = "route[2] (grpc shop.Orders/Create): never matches, because all its requests go to route[1] (POST /*) before it";
        assert_eq!(settings.warnings, [hidden]);
    }

    #[test]
    fn a_pattern_for_the_rest_without_its_beginning() {
        let one = "[[route]]\nmatch = \"POST|PUT /payments/*\"\n";
        let told = |text: &str| load(text).warnings;
        assert_eq!(
            told(one),
            [
                "route[1] (POST|PUT /payments/*): POST|PUT /payments itself is none of its paths and is under [policy]; write a route for it"
            ]
        );
        assert_eq!(
            told(&format!("[policy]\npreset = \"off\"\n{one}[[route]]\nmatch = \"POST /:any\"")),
            [
                "route[1] (POST|PUT /payments/*): PUT /payments itself is none of its paths and is not covered; write a route for it"
            ]
        );
        assert!(told(&format!("{one}[[route]]\nmatch = \"POST|PUT /payments\"")).is_empty());
        assert!(told("[[route]]\nmatch = \"POST /*\"").is_empty());
    }

    #[test]
    fn what_is_probably_not_meant() {
        let settings = load(
            "trusted_proxies = []\nbuffer_memory = \"1KiB\"\nadmin.listen = \"0.0.0.0:8081\"\n[policy]\npreset = \"off\"\n\
             [[route]]\nmatch = \"GET /a\"\npreset = \"membership\"\nttl = \"1m\"\nwait_timeout = \"0s\"",
        );
        assert_eq!(
            settings.warnings,
            [
                "route[1] (GET /a): lease (5m) is longer than ttl (1m), so a silent claim outlives its answer",
                "route[1] (GET /a): scope needs the header x-user-id, and trusted_proxies is empty: nobody is believed, every keyed request is refused (403)",
                "route[1] (GET /a): max_request (1MiB) is more than buffer_memory (1KiB), so the largest never fit",
                "route[1] (GET /a): on_concurrent is \"wait\" and wait_timeout is zero, so nobody waits",
                "route[1] (GET /a): GET changes nothing by its definition; remembered answers of it grow stale",
                "admin.listen: 0.0.0.0:8081 is reachable from other machines, and no token is set",
                "admin.listen: 0.0.0.0:8081 is reachable from other machines without TLS, so tokens and answers can be read on the way; set [admin.tls]",
            ]
        );
    }

    #[test]
    fn who_shares_the_anonymous_scope() {
        assert_eq!(
            load("").notes,
            [
                "policy: scope has \"credential\": requests with none of Api-Key, Authorization, X-Api-Key, X-Auth-Token share one anonymous scope"
            ]
        );
        assert_eq!(
            load("credentials = \"X-Token\"").notes,
            ["policy: scope has \"credential\": requests with none of X-Token share one anonymous scope"]
        );
    }

    #[test]
    fn beside_a_credential_a_header_needs_no_trusted_proxy() {
        let with = |scope: &str| load(&format!("trusted_proxies = []\n[policy]\nscope = {scope}")).warnings;
        assert!(with("[\"credential\", \"header:X-Org\"]").is_empty());
        assert_eq!(
            with("[\"host\", \"header:X-Org?\"]"),
            [
                "policy: scope reads the header x-org, and trusted_proxies is empty: nobody is believed, every keyed request with it is refused (403)"
            ]
        );
    }
}

mod forgetting {
    use super::*;

    #[track_caller]
    fn from(old: &str, new: &str, told: &[&str]) {
        assert_eq!(forgotten_answers(&load(old), &load(new)), told);
    }

    const PAY: &str = "[[route]]\nmatch = \"POST /payments/*\"\n";

    #[test]
    fn the_same_file_forgets_nothing() {
        for preset in ibid::presets::PRESET_NAMES {
            let text = format!(
                "[policy]\npreset = {preset:?}\n[[route]]\nmatch = \"POST /a/b\"\nscope = [\"route\"]\n[[route]]\nmatch = \"POST /a/*\""
            );
            from(&text, &text, &[]);
        }
        from("", "", &[]);
    }

    #[test]
    fn changed_addresses_and_fingerprints() {
        let lost = "remembered answers of this route will not be found again";
        let other = "remembered requests of this route will not be recognised again";
        from(
            PAY,
            &format!("{PAY}scope = \"global\""),
            &[&format!("POST /payments/*: scope changed from [host, credential] to [global]: {lost}")],
        );
        from(
            PAY,
            &format!("{PAY}key.format = \"uuid\""),
            &[&format!(
                "POST /payments/*: key.format changed from any (keys as sent) to uuid (keys lower-cased): {lost}"
            )],
        );
        from(
            PAY,
            &format!("{PAY}key.format = \"raw\""),
            &[&format!(
                "POST /payments/*: key.format changed from any (keys as sent) to raw (keys with their quotes): {lost}"
            )],
        );
        from(
            PAY,
            &format!("credentials = [\"X-Token\", \"Authorization\"]\n{PAY}"),
            &[
                "credentials changed from [api-key, authorization, x-api-key, x-auth-token] to [authorization, x-token]: \
               answers to callers with these headers will not be found again",
            ],
        );
        let global = format!("[policy]\npreset = \"off\"\n{PAY}scope = \"global\"");
        from(&global, &format!("credentials = \"X-Token\"\n{global}"), &[]);
        from(PAY, &format!("credential_schemes = \"Token\"\n{PAY}"), &[]);
        from(
            PAY,
            &format!("{PAY}key.from = \"query:k\""),
            &[&format!("POST /payments/*: key.from changed from [header:idempotency-key] to [query:k]: {lost}")],
        );
        from(
            PAY,
            &format!("{PAY}json_ignore = \"/t\""),
            &[&format!("POST /payments/*: json_ignore changed from [] to [/t]: {other}")],
        );
        from(
            PAY,
            &format!("{PAY}fingerprint = \"body\""),
            &[&format!(
                "POST /payments/*: fingerprint changed from [method, path, query, type, body, preconditions] to [body]: {other}"
            )],
        );
        from(
            PAY,
            &format!("{PAY}on_mismatch = \"new\""),
            &[&format!("POST /payments/*: on_mismatch changed from reject to new: {lost}")],
        );
        for harmless in [
            "key.format = \"token\"",
            "on_mismatch = \"ignore\"",
            "remember = \"all\"",
            "lease = \"1m\"",
            "ttl = \"1h\"",
        ] {
            from(PAY, &format!("{PAY}{harmless}"), &[]);
        }
    }

    #[test]
    fn removed_routes_methods_and_modes() {
        let again = "retries of remembered requests will run again";
        let only = |routes: &str| format!("[policy]\npreset = \"off\"\n{routes}");
        let other = "[[route]]\nmatch = \"POST /other\"\n";
        let told = format!("POST /payments/*: POST is no longer covered: {again}");
        from(&only(&format!("{PAY}{other}")), &only(other), &[&told]);
        from(&format!("{PAY}{other}"), other, &[]);
        from(
            &only("[[route]]\nmatch = \"POST|PUT /a\""),
            &only("[[route]]\nmatch = \"POST /a\""),
            &[&format!("POST|PUT /a: PUT is no longer covered: {again}")],
        );
        from(
            PAY,
            &format!("{PAY}mode = \"off\""),
            &[&format!("POST /payments/*: mode changed from enforce to off: {again}")],
        );
        from(&only(&format!("{PAY}mode = \"shadow\"")), &only(other), &[]);
        let narrower = "[[route]]\nmatch = \"POST /payments/:id\"";
        let told = format!("POST /payments/*: POST is no longer covered on all its paths: {again}");
        from(&only(PAY), &only(narrower), &[&told]);
        from(PAY, narrower, &[]);
        let everything = ["POST", "PUT", "PATCH", "DELETE"]
            .map(|method| format!("every path: {method} is no longer covered on all its paths: {again}"));
        let told = forgotten_answers(&load(""), &load(&only(PAY)));
        assert_eq!(told[0], everything[0]);
        assert_eq!(told.len(), 4);
        from("", PAY, &[]);
    }

    #[test]
    fn a_route_whose_requests_another_takes_over() {
        from(PAY, "", &[]);
        from(PAY, "[[route]]\nmatch = \"PUT|POST /payments/*\"", &[]);
        from(
            PAY,
            "[policy]\nscope = \"global\"",
            &[
                "POST /payments/* (now every path): scope changed from [host, credential] to [global]: remembered answers of this route will not be found again",
                "every other path: scope changed from [host, credential] to [global]: remembered answers of this route will not be found again",
            ],
        );
        from(
            PAY,
            &format!("[[route]]\nmatch = \"POST /payments/:id/refund\"\nscope = \"global\"\n{PAY}"),
            &[
                "POST /payments/* (now POST /payments/:id/refund): scope changed from [host, credential] to [global]: remembered answers of this route will not be found again",
            ],
        );
        from(
            "[[route]]\nmatch = \"POST /a\"\nscope = \"route\"",
            "[[route]]\nmatch = \"POST|PUT /a\"\nscope = \"route\"",
            &[
                "POST /a (now POST|PUT /a): match changed from \"POST /a\" to \"POST|PUT /a\": it is part of scope, so remembered answers will not be found again",
                "every other path (now POST|PUT /a): scope changed from [host, credential] to [route]: remembered answers of this route will not be found again",
            ],
        );
    }

    #[test]
    fn another_store_and_a_shorter_ttl() {
        from(
            "",
            "store.url = \"embedded:data\"",
            &[
                "store.url changed from embedded:ibid-data to embedded:data: what the old store remembers will not be found again",
            ],
        );
        from(
            "",
            "store.prefix = \"x\"",
            &["store.prefix changed from \"idempotency\" to \"x\": nothing that is remembered will be found again"],
        );
        // What decides is what counts: a cache holds nothing of its own.
        let (redis, postgres) = ("redis://127.0.0.1/0", "postgres://u@127.0.0.1/d");
        let fallback = format!("[store]\nurl = {redis:?}\nfallback = {postgres:?}");
        let cache = format!("[store]\nurl = {postgres:?}\ncache = {redis:?}");
        let (redis, postgres) = (format!("[store]\nurl = {redis:?}"), format!("[store]\nurl = {postgres:?}"));
        for (one, other) in [(&postgres, &cache), (&cache, &fallback), (&fallback, &postgres)] {
            from(one, other, &[]);
            from(other, one, &[]);
        }
        from(
            &redis,
            &fallback,
            &[
                "the store that decides changed from redis://127.0.0.1/0 to postgres://u@127.0.0.1/d: what the old store remembers will not be found again",
            ],
        );
        from(
            &redis,
            &postgres,
            &[
                "store.url changed from redis://127.0.0.1/0 to postgres://u@127.0.0.1/d: what the old store remembers will not be found again",
            ],
        );
        let sooner = shortened_ttls(&load(PAY), &load(&format!("{PAY}ttl = \"1h\"")));
        assert_eq!(sooner, ["POST /payments/*: ttl shortened from 24h to 1h: answers will be forgotten sooner"]);
        assert!(shortened_ttls(&load(PAY), &load(&format!("{PAY}ttl = \"72h\""))).is_empty());
    }

    #[test]
    fn every_change_of_address_is_told() {
        let presets = ibid::presets::PRESET_NAMES;
        for (old, new) in presets.iter().flat_map(|old| presets.iter().map(move |new| (old, new))) {
            let of = |preset: &str| load(&format!("{PAY}preset = {preset:?}"));
            let alike = Policy::preset(old).unwrap().has_same_records_as(&Policy::preset(new).unwrap());
            assert_eq!(forgotten_answers(&of(old), &of(new)).is_empty(), alike, "{old} to {new}");
        }
    }

    /// All pairs of files with two routes, against what single requests would find.
    #[test]
    fn a_request_whose_answer_is_lost_is_always_told() {
        let patterns = ["/a", "/a/*", "/a/b", "/:x", "/*", "/a/:x"];
        let paths = ["/", "/a", "/b", "/a/", "/a/b", "/a/c", "/b/c", "/a/b/c"];
        let routes: Vec<String> = (patterns.iter())
            .flat_map(|path| {
                ["", "scope = \"global\"", "mode = \"off\""]
                    .map(|dial| format!("[[route]]\nmatch = \"POST {path}\"\n{dial}\n"))
            })
            .collect();
        let pairs = routes.iter().flat_map(|one| routes.iter().map(move |two| format!("{UPSTREAM}{one}{two}")));
        let files: Vec<GatewaySettings> = pairs.filter_map(|text| try_load(&text, &[]).ok()).collect();
        assert_eq!(files.len(), 18 * 15, "all but those with the same match twice");
        let covered = |settings: &GatewaySettings, path: &str| {
            let route = settings.routes.find(&Method::POST, path);
            route.map(|route| route.policy.clone()).filter(|policy| policy.covers(&Method::POST))
        };
        for old in &files {
            assert!(forgotten_answers(old, old).is_empty());
            for new in &files {
                let lost = paths.iter().any(|path| match (covered(old, path), covered(new, path)) {
                    (None, _) => false,
                    (Some(_), None) => true,
                    (Some(old), Some(new)) => !old.has_same_records_as(&new),
                });
                assert!(!lost || !forgotten_answers(old, new).is_empty(), "{:?}\n{:?}", old.routes, new.routes);
            }
        }
    }
}
