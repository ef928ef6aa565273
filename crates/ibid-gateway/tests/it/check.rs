//! `ibid check`, as its user sees it.

use ibid_gateway::{
    commands::check::{CheckArgs, ConfigComparison, run},
    config::Env,
};

fn check(file: &str, against: Option<&str>) -> (ConfigComparison, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("upstream = \"http://127.0.0.1:3000\"\n{text}")).unwrap();
        path
    };
    let args = CheckArgs { file: path("new.toml", file), against: against.map(|text| path("old.toml", text)) };
    let mut out = Vec::new();
    let verdict = run(&args, &Env::from_pairs(&[("TOKEN", "a-s3cret-of-some-length")]), &mut out).unwrap();
    let out = String::from_utf8(out).unwrap().replace(&format!("{}/", folder.path().display()), "");
    (verdict, out)
}

#[test]
fn it_prints_every_dial_and_marks_what_differs() {
    let (verdict, out) = check(
        "admin.token = \"env:TOKEN\"\nstore.url = \"embedded:data\"\n\
         [policy]\npreset = \"off\"\n\
         [[route]]\nmatch = \"POST /payments/*\"\npreset = \"stripe\"\nttl = \"72h\"\nupstream = \"http://b\"",
        None,
    );
    assert_eq!(verdict, ConfigComparison::NothingForgotten);
    let expected = "\
new.toml: valid

  listen          127.0.0.1:8080
  upstream        http://127.0.0.1:3000
  admin           127.0.0.1:8081, tokens: admin
  store           embedded:data (timeout 500ms, sweep every 1m)
  promise         at most one run per key; survives SIGKILL and power loss; one machine
  journal         ibid-journal

route[1]  POST /payments/*    (preset stripe)
  methods         POST
  key             header:idempotency-key; optional, raw, at most 255 characters
  scope           host, credential, header:stripe-account?, header:stripe-context?
  label           tenant from scope, user from scope, key masked
  fingerprint     method, path, query, type, body
  json_ignore     none
  json_numbers    as-written
  on_mismatch     reject
  on_concurrent   reject
  on_unknown      hold
  resolve         none
  on_store_down   closed
  remember        !409 !429
  refusals        stripe
  unknown_status  none
  remember_body   true
  max_request     1MiB
  max_response    1MiB
  digest_status   original
* ttl             72h
  lease           30s
  timeout         1m
  wait_timeout    10s
  late_answer     30s
  first_headers   none
  replay_headers  idempotent-replayed: true
  drop_headers    server-timing, alt-svc, age
  status          key_reused 400
  grpc_status     none
  envelope        none
  guard           none
  mode            enforce
* upstream        http://b

[policy]  off    what no route names is not covered

* differs from the preset

warnings:
  - route[1] (POST /payments/*): POST /payments itself is none of its paths and is not covered; write a route for it

notes:
  - route[1] (POST /payments/*): scope has \"credential\": requests with none of Api-Key, Authorization, X-Api-Key, X-Auth-Token share one anonymous scope
";
    assert_eq!(out, expected);
}

#[test]
fn it_says_what_each_store_promises() {
    const REDIS: &str = "url = \"redis://:s3cret@127.0.0.1:6379/0\"";
    const POSTGRES: &str = "url = \"postgres://ibid:s3cret@127.0.0.1/ibid\"";
    let redis =
        "at most one run per key; what a crash loses depends on AOF; an asynchronous failover can forget a claim";
    let postgres = "at most one run per key; survives a crash; an asynchronous failover can lose the last commits";
    let near = ("local_cache", "64MiB of finished answers in this process");
    for (store, lines) in [
        (
            "url = \"memory:\"".to_owned(),
            vec![
                ("store", "memory: (timeout 500ms, sweep every 1m)"),
                ("promise", "at most one run per key and process; forgotten on restart"),
                ("journal", "off"),
            ],
        ),
        (
            "url = \"embedded:data?durability=crash\"".to_owned(),
            vec![
                ("store", "embedded:data?durability=crash (timeout 500ms, sweep every 1m)"),
                ("promise", "at most one run per key; survives SIGKILL, not power loss; one machine"),
                ("journal", "ibid-journal"),
            ],
        ),
        (
            format!("{REDIS}\ntimeout = \"1s\""),
            vec![
                ("store", "redis://:****@127.0.0.1:6379/0 (timeout 1s, sweep every 1m)"),
                near,
                ("promise", redis),
                ("journal", "ibid-journal"),
            ],
        ),
        (
            format!("{REDIS}\nlocal_cache = 0\nwait_replicas = 1"),
            vec![
                ("store", "redis://:****@127.0.0.1:6379/0 (timeout 500ms, sweep every 1m)"),
                ("promise", &format!("{redis}; 1 replica must have it first")),
                ("journal", "ibid-journal"),
            ],
        ),
        (
            POSTGRES.to_owned(),
            vec![
                ("store", "postgres://ibid:****@127.0.0.1/ibid (timeout 500ms, sweep every 1m)"),
                near,
                ("promise", postgres),
                ("journal", "ibid-journal"),
            ],
        ),
        (
            format!("{POSTGRES}\ncache = \"redis://:s3cret@127.0.0.1:6379/0\"\nlocal_cache = \"1GiB\""),
            vec![
                ("store", "postgres://ibid:****@127.0.0.1/ibid (timeout 500ms, sweep every 1m)"),
                ("cache", "redis://:****@127.0.0.1:6379/0"),
                ("local_cache", "1GiB of finished answers in this process"),
                ("promise", &format!("{postgres}; losing Redis changes speed only")),
                ("journal", "ibid-journal"),
            ],
        ),
        (
            format!("{REDIS}\nfallback = \"postgres://ibid:s3cret@127.0.0.1/ibid\""),
            vec![
                ("store", "redis://:****@127.0.0.1:6379/0 (timeout 500ms, sweep every 1m)"),
                ("fallback", "postgres://ibid:****@127.0.0.1/ibid, which decides"),
                near,
                (
                    "promise",
                    "at most one run per key, except in windows, which are counted: one gateway sees only Redis and another \
                     only PostgreSQL; Redis loses what PostgreSQL has not seen, or is left alone without it",
                ),
                ("journal", "ibid-journal"),
            ],
        ),
    ] {
        let (_, out) = check(&format!("[store]\n{store}"), None);
        let lines: String = lines.iter().map(|(name, value)| format!("  {name:<14}  {value}\n")).collect();
        assert!(out.contains(&format!("\n{lines}\n")), "{lines}\nis not in\n{out}");
        assert!(!out.contains("s3cret"), "{out}");
    }
}

#[test]
fn it_says_what_a_change_forgets() {
    let old = "[[route]]\nmatch = \"POST /a\"";
    let (verdict, out) = check("[[route]]\nmatch = \"POST /a\"\nscope = \"global\"\nttl = \"1h\"", Some(old));
    assert_eq!((verdict, verdict.code()), (ConfigComparison::AnswersForgotten, 1));
    let end = "against old.toml: this forgets:\n  \
               - POST /a: scope changed from [host, credential] to [global]: remembered answers of this route will not be found again\n\n\
               against old.toml: notes:\n  \
               - POST /a: ttl shortened from 24h to 1h: answers will be forgotten sooner\n";
    assert!(out.ends_with(end), "{out}");
    // A reload takes up a shorter ttl, so this is no reason to fail either.
    let (verdict, out) = check("[[route]]\nmatch = \"POST /a\"\nttl = \"1h\"", Some(old));
    assert_eq!((verdict, verdict.code()), (ConfigComparison::NothingForgotten, 0));
    let end = "against old.toml: nothing that is remembered is forgotten\n\n\
               against old.toml: notes:\n  - POST /a: ttl shortened from 24h to 1h: answers will be forgotten sooner\n";
    assert!(out.ends_with(end), "{out}");
    let (verdict, out) = check(old, Some(old));
    assert_eq!((verdict, verdict.code()), (ConfigComparison::NothingForgotten, 0));
    assert!(out.ends_with("against old.toml: nothing that is remembered is forgotten\n"), "{out}");
}
