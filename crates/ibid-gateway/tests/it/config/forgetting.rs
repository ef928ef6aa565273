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
        &[&format!("POST /payments/*: key.format changed from any (keys as sent) to uuid (keys lower-cased): {lost}")],
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
        &["credentials changed from [api-key, authorization, x-api-key, x-auth-token] to [authorization, x-token]: \
           answers to callers with these headers will not be found again"],
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
        &format!("{PAY}json_numbers = \"decimal\""),
        &[&format!("POST /payments/*: json_numbers changed from as-written to decimal: {other}")],
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
    for harmless in
        ["key.format = \"token\"", "on_mismatch = \"ignore\"", "remember = \"all\"", "lease = \"1m\"", "ttl = \"1h\""]
    {
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
    let sooner = shortened_memory(&load(PAY), &load(&format!("{PAY}ttl = \"1h\"")));
    assert_eq!(sooner, ["POST /payments/*: ttl shortened from 24h to 1h: answers will be forgotten sooner"]);
    assert!(shortened_memory(&load(PAY), &load(&format!("{PAY}ttl = \"72h\""))).is_empty());
    let guarded = |fields: &str| load(&format!("{PAY}guard = {{ fields = [{fields}] }}"));
    assert!(shortened_memory(&load(PAY), &guarded("\"/a\"")).is_empty(), "a new guard forgets nothing");
    let other = &shortened_memory(&guarded("\"/a\""), &guarded("\"/a\", \"/b\""))[0];
    assert!(other.contains("guard.fields changed from [/a] to [/a, /b]: operations of the last window"), "{other}");
    assert!(shortened_memory(&guarded("\"/a\""), &load(PAY))[0].contains("from [/a] to none"));
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
