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
    let args = ServeArgs { listen: Some("x".into()), upstream: Some("http://a".into()), ..ServeArgs::default() };
    let told = |args: &ServeArgs, env: &[(&str, &str)]| {
        GatewaySettings::load(args, &Env::from_pairs(env)).unwrap_err().to_string()
    };
    assert_eq!(
        told(&args, &[]),
        "--listen: \"x\" is no address; allowed is an address and a port such as \"127.0.0.1:8080\""
    );
    let none = ServeArgs::default();
    assert_eq!(
        told(&none, &[("IBID_LOG_LEVEL", "loud"), ("IBID_UPSTREAM", "http://a")]),
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
