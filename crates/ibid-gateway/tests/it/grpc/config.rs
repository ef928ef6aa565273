//! gRPC in the configuration: what is allowed, what is told, what a change forgets.

use ibid::{http::Protocol, key::KeySource};
use ibid_gateway::{
    commands::check::{CheckArgs, run},
    config::{Env, GatewaySettings, ServeArgs, forgotten_answers},
    contract_page,
};

use super::descriptors;

/// Beside a file `shop.bin`.
fn load(text: &str) -> Result<GatewaySettings, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("shop.bin"), descriptors()).unwrap();
    std::fs::write(folder.path().join("junk.bin"), "junk").unwrap();
    let text = format!("upstream = \"http://127.0.0.1:3000\"\n{text}");
    let path = folder.path().join("ibid.toml");
    let loaded = GatewaySettings::from_text(&text, Some(path.clone()), &ServeArgs::default(), &Env::from_pairs(&[]));
    loaded.map_err(|why| why.to_string().replace(&format!("{}: ", path.display()), ""))
}

#[test]
fn what_cannot_be_is_told() {
    for (text, told) in [
        (
            "[[route]]\nmatch = \"grpc shop.Orders.Create\"",
            "route[1].match: \"grpc shop.Orders.Create\" is no match; write \"grpc package.Service/Method\", \
             \"grpc package.Service/*\" or \"grpc *\"",
        ),
        ("[[route]]\nmatch = \"grpc *\"", "does not say which methods are unary; name them one by one"),
        ("[[route]]\nmatch = \"grpc shop.Orders/*\"", "does not say which methods are unary; name them one by one"),
        (
            "descriptors = \"shop.bin\"\n[[route]]\nmatch = \"grpc shop.Orders/Chat\"",
            "\"grpc shop.Orders/Chat\" is a streaming method by the descriptors; only unary ones can be covered",
        ),
        (
            "descriptors = \"shop.bin\"\n[[route]]\nmatch = \"grpc shop.Orders/Creat\"",
            "\"grpc shop.Orders/Creat\" is not in the descriptors; shop.Orders has Cancel, Chat, Create, Get",
        ),
        (
            "descriptors = \"shop.bin\"\n[[route]]\nmatch = \"grpc shop.Order/*\"",
            "\"grpc shop.Order/*\": the descriptors have no service shop.Order",
        ),
        ("descriptors = \"none.bin\"", "descriptors: cannot read \"none.bin\": No such file"),
        ("descriptors = \"junk.bin\"", "descriptors: \"junk.bin\" cannot be used: it is no FileDescriptorSet"),
        (
            "[[route]]\nmatch = \"grpc a.B/C\"\nkey.from = \"json:/id\"",
            "key.from: has \"json:/id\", which a gRPC call does not have; use \"header:NAME\"",
        ),
        ("[[route]]\nmatch = \"grpc a.B/C\"\nresolve = \"GET /a\"", "resolve: is \"GET /a\", an HTTP request"),
        (
            "[[route]]\nmatch = \"grpc a.B/C\"\nreplay_headers = { Replayed-Bin = \"1\" }",
            "replay_headers: has \"replayed-bin\", which is no gRPC metadata",
        ),
        ("[[route]]\nmatch = \"grpc a.B/C\"\nmethods = \"PUT\"", "the methods of a route are those in its match"),
        (
            "[[route]]\nmatch = \"grpc a.B/C\"\n[[route]]\nmatch = \"grpc a.B/C\"",
            "\"grpc a.B/C\" is the match of route[1] already",
        ),
    ] {
        let why = load(text).expect_err(text);
        assert!(why.contains(told), "{text}\n{why}");
    }
}

#[test]
fn routes_cover_calls_in_the_order_of_the_file() {
    let settings = load(
        "descriptors = \"shop.bin\"\n\
         [[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"stripe\"\n\
         [[route]]\nmatch = \"grpc other.Service/Do\"\nkey.from = \"header:Idempotency-Key\"\n\
         [[route]]\nmatch = \"POST /shop.Orders/Create/*\"\n\
         [[route]]\nmatch = \"grpc *\"",
    )
    .unwrap();
    let name = |path| settings.routes.find_call(path).map(|route| route.name.as_str());
    assert_eq!(name("/shop.Orders/Create"), Some("grpc shop.Orders/Create"));
    assert_eq!(name("/other.Service/Do"), Some("grpc other.Service/Do"), "who names it says that it is unary");
    assert_eq!(name("/shop.Orders/Cancel"), Some("grpc *"));
    assert_eq!(name("/shop.Orders/Chat"), None);
    assert_eq!(name("/other.Service/Undo"), None);
    let calls: Vec<_> = settings.routes.calls().into_iter().collect();
    assert_eq!(calls, ["/other.Service/Do", "/shop.Orders/Cancel", "/shop.Orders/Create"]);
    let keys = |path| settings.routes.find_call(path).unwrap().policy.key.from.clone();
    let header = |name: &str| KeySource::Header(name.parse().unwrap());
    assert_eq!(keys("/shop.Orders/Create"), [header("idempotency-key"), header("x-idempotency-key")]);
    assert_eq!(keys("/other.Service/Do"), [header("idempotency-key")], "what is written stays");
    assert!(settings.warnings.is_empty(), "{:?}", settings.warnings);
}

#[test]
fn descriptors_without_a_route_for_calls_are_warned_about() {
    let off = "descriptors = \"shop.bin\"\n[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /a\"";
    let settings = load(off).unwrap();
    assert_eq!(settings.warnings, ["descriptors: no route uses it; write one such as match = \"grpc *\""]);
    let settings = load("descriptors = \"shop.bin\"").unwrap();
    assert!(settings.warnings.is_empty());
    assert_eq!(
        settings.routes.iter().map(|route| route.protocol).collect::<Vec<_>>(),
        [Protocol::Http, Protocol::Grpc]
    );
}

#[test]
fn a_change_that_forgets_calls_is_told() {
    let all = load("descriptors = \"shop.bin\"\n[[route]]\nmatch = \"grpc *\"").unwrap();
    let each =
        load("[[route]]\nmatch = \"grpc shop.Orders/Create\"\n[[route]]\nmatch = \"grpc shop.Orders/Cancel\"").unwrap();
    assert!(forgotten_answers(&all, &each).is_empty(), "{:?}", forgotten_answers(&all, &each));
    assert!(forgotten_answers(&each, &all).is_empty(), "{:?}", forgotten_answers(&each, &all));
    let one = load("[[route]]\nmatch = \"grpc shop.Orders/Create\"\n[[route]]\nmatch = \"POST /shop.Orders/Cancel\"");
    assert_eq!(
        forgotten_answers(&all, &one.unwrap()),
        ["grpc *: shop.Orders/Cancel is no longer covered: retries of remembered requests will run again"]
    );
    let scoped = load("descriptors = \"shop.bin\"\n[[route]]\nmatch = \"grpc *\"\nscope = \"global\"").unwrap();
    let told = forgotten_answers(&all, &scoped);
    assert!(
        told.len() == 1 && told[0].starts_with("grpc *: scope changed from [host, credential] to [global]"),
        "{told:?}"
    );
}

#[test]
fn check_and_the_contract_show_what_is_covered() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("shop.bin"), descriptors()).unwrap();
    let file = folder.path().join("ibid.toml");
    let text = "upstream = \"http://127.0.0.1:3000\"\ndescriptors = \"shop.bin\"\n\
                [[route]]\nmatch = \"grpc shop.Orders/*\"\ngrpc_status.key_reused = \"ALREADY_EXISTS\"\n\
                [[route]]\nmatch = \"POST /pay\"";
    std::fs::write(&file, text).unwrap();
    let mut out = Vec::new();
    let _ = run(&CheckArgs { file: file.clone(), against: None }, &Env::from_pairs(&[]), &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    for line in [
        "  descriptors     shop.bin (2 unary methods to protect)\n",
        "route[1]  grpc shop.Orders/*    (preset ietf)\n  methods         POST\n",
        "\n  key             header:idempotency-key, header:x-idempotency-key; optional, any",
        "\n* grpc_status     key_reused ALREADY_EXISTS\n",
    ] {
        assert!(out.contains(line), "{line}\n{out}");
    }
    let settings = GatewaySettings::load(&ServeArgs::for_file(&file), &Env::from_pairs(&[])).unwrap();
    let page = contract_page::json(&settings.routes);
    let route = &page["routes"][0];
    assert_eq!((&route["match"], &route["protocol"]), (&"grpc shop.Orders/*".into(), &"grpc".into()));
    assert_eq!(route["calls"], serde_json::json!(["shop.Orders/Cancel", "shop.Orders/Create"]));
    let reused = route["refusals"].as_array().unwrap().iter().find(|refusal| refusal["name"] == "key-reused").unwrap();
    assert_eq!(reused["grpc_status"], "ALREADY_EXISTS");
    assert_eq!(page["routes"][1]["protocol"], "http");
    let html = contract_page::render_html(&settings.routes);
    for part in [
        "shop.Orders/*",
        "shop.Orders/Cancel, shop.Orders/Create",
        "ALREADY_EXISTS",
        "DATA_LOSS leave the outcome open",
    ] {
        assert!(html.contains(part), "{part}");
    }
}
