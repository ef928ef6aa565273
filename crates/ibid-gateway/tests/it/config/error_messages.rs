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
        "key.format: \"guid\" is no key format; allowed are \"any\" \"raw\" \"uuid\" \"uuid4\" \"uuid7\" \"token\" \"operation\" \"regex:PATTERN\"",
    );
    route("key.required = \"yes\"", "key.required: found \"yes\"; allowed is true or false");
    route("key.max_length = 1.5", "key.max_length: found 1.5; allowed is a whole number");
    route(
        "key.from = [\"header:A\", \"cookie:b\"]",
        "key.from[2]: \"cookie:b\" is no source of a key; allowed are \"header:NAME\" \"json:/pointer\" \"query:NAME\" \"body\"",
    );
    route("scope = { a = 1 }", "scope: found a table; allowed is a list, each part of a scope such as \"credential\"");
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
    let guard = "is empty; name the fields that make two requests the same operation, such as \"/order_id\"";
    route("guard = {}", &format!("guard.fields: {guard}"));
    route(
        "guard = { fields = [\"order\"] }",
        "guard.fields[1]: \"order\" is no JSON pointer; write one such as \"/meta/sent_at\"",
    );
    route(
        "guard = { fields = \"/order\", window = \"0s\" }",
        "guard.window: is zero; it must be longer, such as \"10m\"",
    );
    route(
        "ttl = \"5m\"\nguard = { fields = \"/order\" }",
        "guard.window: is 600s, and ttl is 300s; it must be at most ttl, or the first key runs again before another may",
    );
    route(
        "guard = { fields = \"/order\", on_match = \"warn\" }",
        "guard.on_match: \"warn\" is no on_match; allowed are \"reject\" \"hold\" \"count\"",
    );
    top(
        "[[route]]\nmatch = \"DELETE /a/*\"\nguard = { fields = \"/order\" }",
        "route[1].guard: is set, and no method of this route has a body to read fields from; leave it out (match = \"DELETE /a/*\")",
    );
    top(
        "[[route]]\nmatch = \"grpc shop.Payments/Pay\"\nguard = { fields = \"/order\" }",
        "route[1].guard: is set; it reads fields of JSON and form bodies, which a gRPC call does not have; leave it out (match = \"grpc shop.Payments/Pay\")",
    );
    route(
        "json_numbers = \"float\"",
        "json_numbers: \"float\" is no json_numbers; allowed are \"as-written\" \"decimal\"",
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
                 \"acp\" \"ucp\" \"iceberg\" \"mcp\" \"webhook:standard\" \"webhook:svix\" \"webhook:github\" \"webhook:stripe\" \"webhook:shopify\" \
                 \"webhook:custom\"";
    route("preset = \"paypal\"", &format!("preset: \"paypal\" is no preset; {names}"));
    route("preset = \"strpie\"", "preset: \"strpie\" is no preset, did you mean \"stripe\"?");
    route("preset = \"webhook:gitlab\"", "preset: \"webhook:gitlab\" is no preset, did you mean \"webhook:github\"?");
    route(
        "grpc_status.in_progress = \"ABORTD\"",
        "grpc_status.in_progress: \"ABORTD\" is no gRPC code, did you mean \"ABORTED\"?",
    );
}

#[test]
fn unknown_keys() {
    route("key.max-length = 3", "key.max-length: unknown key, did you mean \"max_length\"?");
    route("key.colour = 3", "key.colour: unknown key; allowed are \"from\" \"required\" \"format\" \"max_length\"");
    route("tll = \"1h\"", "tll: unknown key, did you mean \"ttl\"?");
    route("status.in-progress = 425", "status.in-progress: unknown key, did you mean \"in_progress\"?");
    let listed = "unknown key; docs/configuration.md lists all keys, and so does `ibid schema`";
    top("[policy]\nmaths = 1", &format!("policy.maths: {listed}"));
    top("[log]\n\"a b\" = 1", "log.\"a b\": unknown key; allowed are \"format\" \"level\"");
    top("[policy]\nmatch = \"POST /a\"", "policy.match: only a [[route]] has a match");
    // In the wrong table.
    top("token = \"x\"", "token: unknown key here; \"token\" belongs to [admin]");
    top("ttl = \"1h\"", "ttl: unknown key here; \"ttl\" belongs to [policy]");
    top("[log]\nlisten = \"x\"", "log.listen: unknown key here; \"listen\" belongs to the top of the file");
    top("[log]\nrole = \"x\"", "log.role: unknown key here; \"role\" belongs to [admin.tokens]");
}

#[test]
fn all_mistakes_are_told_at_once_with_their_lines() {
    let told = try_load(
        "listen = \"8080\"\nusptream = \"http://127.0.0.1:3000\"\n\n[store]\nurl = \"memory:\"\n  cache = \"redis://h\"\n\
         [[route]]\nmatch = \"POST /a\"\nttl = 5\nkey = { from = [\"header:A\", \"cookie:b\"] }\n\
         [[route]]\nmatch = \"POST /b\"\nfingerprint = []\n\
         [[route]]\nttl = \"1h\"\n",
        &[],
    );
    let told = told.unwrap_err().to_string();
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 8, "{told}");
    for (line, start) in lines.iter().zip([
        "ibid.toml:1:1: listen: \"8080\" is no address; ",
        "ibid.toml:2:1: usptream: unknown key, did you mean \"upstream\"?",
        "ibid.toml:6:3: store.cache: only a postgres store.url has a cache",
        "ibid.toml:9:1: route[1].ttl: found 5; allowed is a duration",
        "ibid.toml:10:29: route[1].key.from[2]: \"cookie:b\" is no source of a key",
        "ibid.toml:13:1: route[2].fingerprint: is empty",
        "ibid.toml:14:1: route[3].match: missing",
        "ibid.toml: upstream: missing",
    ]) {
        assert!(line.starts_with(start), "{line}\n{start}");
    }
}

/// A wrong value must not be followed by complaints about what it would have set.
#[test]
fn a_mistake_is_told_once() {
    for text in [
        "upstream = \"localhost:3000\"",
        "upstream = \"http://a\"\n[jwt]\nsecret = 5",
        "upstream = \"http://a\"\n[policy]\npreset = \"webook:github\"\nsecrets = [\"x\"]\n[[route]]\nmatch = \"POST /a\"\nscope = \"jwt:sub\"",
        "upstream = \"http://a\"\n[[route]]\nmatch = \"POST /a\"\npreset = \"webook:github\"\nsecrets = [\"x\"]",
    ] {
        let told = try_load(text, &[]).unwrap_err().to_string();
        assert_eq!(told.lines().count(), 1, "{told}");
    }
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
    top("max_running = 0", "max_running: expected at least 1, got 0");
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
    top("listen = \"0.0.0.0:3000\"", "upstream: \"http://127.0.0.1:3000\" is where ibid itself listens (0.0.0.0:3000)");
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
        store(url, &cache(REDIS), &format!("cache: only a postgres store.url has a cache; store.url is {is} store"));
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
        "store.url: \"mysql://****@h\" names no store of this build; built in are memory: embedded: redis:// rediss:// redis+sentinel:// redis+cluster:// valkey:// valkeys:// postgres://",
    );
    top(
        "cors.origins = [\"*\"]",
        "cors.origins[1]: \"*\" is no origin; allowed is a scheme and a host in lower case, such as \"https://shop.example.com\"",
    );
    let told = |text: &str| without_position(&try_load(text, &[]).unwrap_err());
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
        let text = format!("{UPSTREAM}[policy]\nttl = \"env:T\"\n[admin]\ntoken = \"env:A\"");
        without_position(&try_load(&text, env).unwrap_err())
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
    let told = |text: &str| try_load(text, &[]).unwrap_err().to_string();
    assert!(told("a = [1,\n\"x\" = ]").starts_with("ibid.toml:2:"), "{}", told("a = [1,\n\"x\" = ]"));
    assert_eq!(told("[log]\nlevel = \"warn\"\nlevel = \"info\"\n"), "ibid.toml:3:1: duplicate key");
    let quotes = told(
        "listen = 127.0.0.1:8080  # here\nupstream = http://127.0.0.1:3000\n[policy]\ntll = \"1h\"\nttl = 24h\npreset = stripe\n",
    );
    let expected = "ibid.toml:1:10: the value needs quotes: listen = \"…\"\n\
                    ibid.toml:2:12: the value needs quotes: upstream = \"…\"\n\
                    ibid.toml:4:1: policy.tll: unknown key, did you mean \"ttl\"?\n\
                    ibid.toml:5:7: the value needs quotes: ttl = \"…\"\n\
                    ibid.toml:6:10: the value needs quotes: preset = \"…\"";
    assert_eq!(quotes, expected);
    // A table that loses its header is not read as part of the table before it.
    assert_eq!(told("[log\nlevel = \"warn\"").lines().count(), 1);
}
