use super::*;

fn of(parts: &[ScopePart], headers: &[(&'static str, &str)], peer: &str) -> Result<Scope, Refusal> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(*name, value.parse().unwrap());
    }
    let caller = ScopeInput {
        method: &Method::POST,
        uri: &Uri::from_static("/pay"),
        headers: &map,
        peer: Some(peer.parse().unwrap()),
        identity: None,
        route: "POST /pay",
        trusted: &TrustedProxies::loopback(),
        credentials: &Credentials::default(),
    };
    Scope::of(parts, &caller)
}

#[test]
fn callers_with_other_credentials_have_other_addresses() {
    let parts = [ScopePart::Host, ScopePart::Credential];
    let a = of(&parts, &[("host", "x"), ("authorization", "Bearer a")], "10.0.0.1").unwrap();
    let b = of(&parts, &[("host", "x"), ("authorization", "Bearer b")], "10.0.0.1").unwrap();
    let c = of(&parts, &[("host", "X"), ("authorization", "Bearer a")], "10.0.0.1").unwrap();
    assert_ne!(a.address("k", None, None), b.address("k", None, None));
    assert_eq!(a.address("k", None, None), c.address("k", None, None));
    let d = of(&parts, &[("host", "x"), ("x-api-key", "Bearer a")], "10.0.0.1").unwrap();
    assert_ne!(a.address("k", None, None), d.address("k", None, None));
}

#[test]
fn an_address_is_the_same_whether_or_not_its_scope_is_kept() {
    let secret = AddressSecret([7; 32]);
    for (host, credential) in [("x", "a".to_owned()), ("longer.example", "b".repeat(10_000)), ("x", String::new())] {
        for secret in [None, Some(&secret)] {
            let headers = [("host", host), ("authorization", &*credential)];
            let scope = of(&[ScopePart::Host, ScopePart::Credential], &headers, "10.0.0.1").unwrap();
            assert_eq!(scope.clone().into_address("k", secret), scope.address("k", None, secret), "{host}");
        }
    }
}

#[test]
fn parts_do_not_run_into_each_other() {
    assert_ne!(
        Scope::from_parts(&["ab", "c"]).address("k", None, None),
        Scope::from_parts(&["a", "bc"]).address("k", None, None)
    );
    assert_ne!(
        Scope::from_parts(&["a"]).address("bk", None, None),
        Scope::from_parts(&["ab"]).address("k", None, None)
    );
}

#[test]
fn a_caller_known_by_cookies_only_is_told_which_setting_to_use() {
    let refusal = of(&[ScopePart::Credential], &[("cookie", "session=1")], "127.0.0.1").unwrap_err();
    assert_eq!(refusal.reason, RefusalReason::ScopeMissing);
    assert!(refusal.detail.contains("cookie:session"), "{}", refusal.detail);
    assert!(of(&[ScopePart::Credential], &[], "127.0.0.1").is_ok());
}

#[test]
fn a_scope_header_is_believed_only_from_trusted_proxies() {
    let parts = ["header:X-User-Id".parse().unwrap()];
    assert!(of(&parts, &[("x-user-id", "u1")], "127.0.0.9").is_ok());
    assert_eq!(of(&parts, &[("x-user-id", "u1")], "10.0.0.1").unwrap_err().reason, RefusalReason::ScopeRefused);
    assert_eq!(of(&parts, &[], "127.0.0.1").unwrap_err().reason, RefusalReason::ScopeMissing);
    let twice = of(&parts, &[("x-user-id", "u1"), ("x-user-id", "u2")], "127.0.0.1");
    assert_eq!(twice.unwrap_err().reason, RefusalReason::RequestAmbiguous);
}

#[test]
fn the_port_is_no_part_of_the_host() {
    for (one, other) in [
        ("shop.example", "Shop.Example:8080"),
        ("shop.example:8080", "shop.example:8082"),
        ("shop.example:", "shop.example"),
        ("127.0.0.1:1", "127.0.0.1:2"),
        ("[::1]:8080", "[::1]"),
        ("[2001:DB8::1]:1", "[2001:db8::1]:2"),
    ] {
        let address = |host| of(&[ScopePart::Host], &[("host", host)], "127.0.0.1").unwrap();
        assert_eq!(address(one), address(other), "{one} {other}");
    }
    let hosts = ["", "shop.example", "[::1]", "[::2]", "::1", "::2", "shop.example:x", "a:1:2", "[::1"];
    let all: Vec<_> =
        hosts.iter().map(|host| of(&[ScopePart::Host], &[("host", host)], "127.0.0.1").unwrap()).collect();
    for (at, one) in all.iter().enumerate() {
        assert!(!all[..at].contains(one), "{}", hosts[at]);
    }
    // The authority of the request line takes precedence, as in the app.
    let uri = Uri::from_static("http://u@Shop.Example:8080/pay");
    let (headers, trusted, credentials) = Default::default();
    let caller = ScopeInput {
        method: &Method::POST,
        uri: &uri,
        headers: &headers,
        peer: None,
        identity: None,
        route: "",
        trusted: &trusted,
        credentials: &credentials,
    };
    assert_eq!(Scope::of(&[ScopePart::Host], &caller).unwrap(), all[1]);
}

#[test]
fn a_missing_optional_part_is_a_value_of_its_own() {
    let parts: [ScopePart; 2] = ["header:X-A?".parse().unwrap(), "header:X-B?".parse().unwrap()];
    assert_eq!(parts[0].to_string(), "header:x-a?");
    let all = [
        of(&parts, &[], "127.0.0.1").unwrap(),
        of(&parts, &[("x-a", "")], "127.0.0.1").unwrap(),
        of(&parts, &[("x-a", "1")], "127.0.0.1").unwrap(),
        of(&parts, &[("x-b", "1")], "127.0.0.1").unwrap(),
        of(&parts, &[("x-a", "1"), ("x-b", "1")], "127.0.0.1").unwrap(),
    ];
    for (at, one) in all.iter().enumerate() {
        assert!(!all[..at].contains(one), "{at}");
    }
    assert_eq!(of(&parts, &[("x-a", "1")], "10.0.0.1").unwrap_err().reason, RefusalReason::ScopeRefused);
    assert_eq!(of(&parts, &[], "10.0.0.1").unwrap(), all[0]);
    for text in ["cookie:sid?", "jwt:org?"] {
        assert_eq!(text.parse::<ScopePart>().unwrap().to_string(), text);
    }
    for bad in ["host?", "credential?", "global?", "header:?", "header:X-A??", "?"] {
        assert!(bad.parse::<ScopePart>().is_err(), "{bad}");
    }
}

#[test]
fn beside_a_credential_a_header_narrows_the_scope_whoever_sends_it() {
    let parts: [ScopePart; 2] = [ScopePart::Credential, "header:Stripe-Account?".parse().unwrap()];
    let with =
        |account: &str| of(&parts, &[("authorization", "Bearer a"), ("stripe-account", account)], "10.0.0.1").unwrap();
    assert_ne!(with("acct_1"), with("acct_2"));
    let stranger = of(&parts, &[("authorization", "Bearer b"), ("stripe-account", "acct_1")], "10.0.0.1").unwrap();
    assert_ne!(stranger, with("acct_1"));
}

#[test]
fn a_user_agent_is_no_user() {
    for (part, is) in [
        ("header:X-User-Id", true),
        ("header:X-User-Id?", true),
        ("jwt:sub", true),
        ("header:User-Agent", false),
        ("header:X-User-Agent", false),
        ("jwt:org", false),
    ] {
        assert_eq!(part.parse::<ScopePart>().unwrap().names_user(), is, "{part}");
    }
}

#[test]
fn cookies_are_found_among_others() {
    let parts = ["cookie:sid".parse().unwrap()];
    let one = of(&parts, &[("cookie", "a=1; sid=x; b=2")], "127.0.0.1").unwrap();
    let other = of(&parts, &[("cookie", "sid=x")], "127.0.0.1").unwrap();
    assert_eq!(one, other);
    assert!(of(&parts, &[("cookie", "sid=x; sid=y")], "127.0.0.1").is_err());
}

#[test]
fn networks_contain_what_they_should() {
    let trusted = TrustedProxies::parse(["10.1.0.0/16", "::1", "fd00::/8"]).unwrap();
    for (peer, is) in [
        ("10.1.2.3", true),
        ("10.2.0.1", false),
        ("::1", true),
        ("::2", false),
        ("fd12::1", true),
        ("::ffff:10.1.0.9", true),
    ] {
        assert_eq!(trusted.trusts(Some(peer.parse().unwrap())), is, "{peer}");
    }
    assert!(TrustedProxies::parse(["10.0.0.0/33"]).is_err());
    assert!(TrustedProxies::parse(["0.0.0.0/0"]).unwrap().trusts(Some([8, 8, 8, 8].into())));
}

#[test]
fn a_secret_changes_every_address() {
    let scope = Scope::from_parts(&["a"]);
    let secret = AddressSecret::new([7; 32]);
    assert_ne!(scope.address("k", None, Some(&secret)), scope.address("k", None, None));
    assert_eq!(format!("{secret:?}"), "AddressSecret(****)");
}
