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
        json_numbers = "decimal"
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
        guard = { fields = ["/order_id", "/amount"], window = "30m", on_match = "hold" }
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
    assert_eq!(policy.json_numbers.to_string(), "decimal");
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
    let guard = policy.guard.as_ref().unwrap();
    assert_eq!((guard.fields.len(), guard.window), (2, Duration::from_secs(1800)));
    assert_eq!(guard.on_match.to_string(), "hold");
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

/// OpenTelemetry's variables, where the file says nothing.
#[test]
fn variables_of_opentelemetry() {
    let trace = |text: &str, env: &[(&str, &str)]| try_load(&format!("{UPSTREAM}{text}"), env).unwrap().trace;
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/a");
    let url = |env: &[(&str, &str)]| trace("", env).map(|trace| trace.collector.to_string());
    assert_eq!(url(&[endpoint]).as_deref(), Some("http://collector:4318/a/v1/traces"));
    let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other:4318/spans");
    assert_eq!(url(&[endpoint, traces]).as_deref(), Some("http://other:4318/spans"));
    assert_eq!(url(&[endpoint, ("OTEL_SDK_DISABLED", "true")]), None);
    assert_eq!(url(&[]), None);
    let file = trace("[trace]\notlp = \"http://file:1\"", &[endpoint]).unwrap();
    assert_eq!(file.collector.to_string(), "http://file:1/v1/traces");
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(file.resource, [pair("service.name", "ibid")]);
    let attributes = ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=staging%20eu, service.name=pay");
    let named = trace("", &[endpoint, attributes]).unwrap().resource;
    assert_eq!(named, [pair("service.name", "pay"), pair("deployment.environment", "staging eu")]);
    let named = trace("", &[endpoint, attributes, ("OTEL_SERVICE_NAME", "shop")]).unwrap().resource;
    assert_eq!(named[0], pair("service.name", "shop"));
    let told = try_load(UPSTREAM, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")]).unwrap_err().to_string();
    assert!(told.starts_with("OTEL_EXPORTER_OTLP_ENDPOINT: found \"collector\""), "{told}");
}
