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
