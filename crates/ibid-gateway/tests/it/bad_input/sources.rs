//! Keys that come from the query or the body: the same rules, another place.

use super::{BODY, HOST, TestGateway, assert_problem};

const SOURCES: &str = r#"
[[route]]
match = "POST /json"
key = { from = ["json:/order/id"], required = true, max_length = 20 }
[[route]]
match = "POST /query"
key = { from = ["query:key"], required = true }
[[route]]
match = "POST /body"
key = { from = ["body"] }
[[route]]
match = "POST /any"
key = { from = ["json:/id", "query:key", "header:Idempotency-Key"], required = true }
"#;

#[tokio::test]
async fn a_key_in_json_is_a_string_or_a_number() {
    let world = TestGateway::in_memory(SOURCES).await;
    let good = |value: &str| world.shop_post("/json").json(&format!(r#"{{"order":{{"id":{value}}}}}"#));
    let cases = [
        ("absent", "key-missing", r#"{"order":{}}"#),
        ("an empty document", "key-missing", ""),
        ("not JSON", "key-missing", r#"{"order":{"id":"j-1"}"#),
        ("an array", "key-missing", r#"[{"order":{"id":"j-1"}}]"#),
        ("the wrong case", "key-missing", r#"{"Order":{"id":"j-1"}}"#),
        ("two members of that name", "key-missing", r#"{"order":{"id":"j-1","id":"j-2"}}"#),
        ("empty", "key-invalid", r#"{"order":{"id":""}}"#),
        ("null", "key-invalid", r#"{"order":{"id":null}}"#),
        ("true", "key-invalid", r#"{"order":{"id":true}}"#),
        ("an object", "key-invalid", r#"{"order":{"id":{"a":1}}}"#),
        ("an array of keys", "key-invalid", r#"{"order":{"id":["j-1"]}}"#),
        ("a space", "key-invalid", r#"{"order":{"id":"j 1"}}"#),
        ("a control byte", "key-invalid", r#"{"order":{"id":"j\u0000"}}"#),
        ("not ASCII", "key-invalid", r#"{"order":{"id":"jé"}}"#),
        ("too long", "key-invalid", r#"{"order":{"id":"123456789012345678901"}}"#),
        ("too long a number", "key-invalid", r#"{"order":{"id":123456789012345678901}}"#),
    ];
    for (case, name, body) in cases {
        let answer = world.shop_post("/json").json(body).send().await;
        assert_problem(case, &answer, 400, name, None);
    }
    let answer =
        world.shop_post("/json").header("Content-Type", "text/plain").body(r#"{"order":{"id":"j-1"}}"#).send().await;
    assert_problem("JSON by another name", &answer, 400, "key-missing", None);
    assert_eq!(world.upstream.requests(), 0);
    for (at, value) in ["\"j-1\"", "12345", "\"a,b\"", "1e5"].into_iter().enumerate() {
        let first = good(value).send().await;
        assert_eq!((first.status, first.json()["run"].as_u64()), (201, Some(at as u64 + 1)), "{value}");
        assert_eq!(good(value).send().await.header("idempotent-replayed"), Some("true"), "{value}");
    }
    // A string and a number that are written alike are one key, and two requests.
    let answer = good("\"12345\"").send().await;
    assert_problem("as a string", &answer, 422, "key-reused", Some("12345"));
    assert_eq!(good("\"\\u006a-1\"").send().await.header("idempotent-replayed"), Some("true"));
    assert_eq!(world.upstream.executions(), 4);
}

#[tokio::test]
async fn a_key_in_the_query_is_sent_once_and_whole() {
    let world = TestGateway::in_memory(SOURCES).await;
    for (case, name, query) in [
        ("none", "key-missing", ""),
        ("another parameter", "key-missing", "?keys=q-1"),
        ("the wrong case", "key-missing", "?Key=q-1"),
        ("empty", "key-invalid", "?key="),
        ("without a value", "key-invalid", "?key"),
        ("twice", "key-invalid", "?key=q-1&key=q-2"),
        ("twice, spelled differently", "key-invalid", "?key=q-1&%6bey=q-1"),
        ("a broken escape", "key-invalid", "?key=q%2"),
        ("no escape at all", "key-invalid", "?key=q%zz"),
        ("a space", "key-invalid", "?key=q+1"),
        ("a control byte", "key-invalid", "?key=q%00"),
        ("not ASCII", "key-invalid", "?key=q%C3%A9"),
        ("DEL", "key-invalid", "?key=q%7f"),
        ("too long", "key-invalid", &format!("?key={}", "q".repeat(256))),
    ] {
        let answer = world.shop_post(&format!("/query{query}")).json(BODY).send().await;
        assert_problem(case, &answer, 400, name, None);
    }
    // The header is not where this route looks.
    let answer = world.shop_post("/query").key("q-1").json(BODY).send().await;
    assert_problem("in the header", &answer, 400, "key-missing", None);
    assert_eq!(world.upstream.requests(), 0);
    let first = world.shop_post("/query?a=1&key=q%2d1").json(BODY).send().await;
    assert_eq!((first.status, first.json()["run"].as_u64()), (201, Some(1)));
    let again = world.shop_post("/query?a=1&key=q%2d1").json(BODY).send().await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"), "{again:?}");
    // The same key spelled differently is the same key; the query, compared as sent, is another.
    let answer = world.shop_post("/query?a=1&key=q-1").json(BODY).send().await;
    assert_problem("spelled differently", &answer, 422, "key-reused", Some("q-1"));
    assert_eq!(world.upstream.executions(), 1);
}

#[tokio::test]
async fn a_request_that_is_its_own_key_runs_once() {
    let world = TestGateway::in_memory(SOURCES).await;
    let run = async |body: &str| world.shop_post("/body").json(body).send().await.json()["run"].as_u64();
    assert_eq!(run(r#"{"a":1,"b":2}"#).await, Some(1));
    assert_eq!(run(r#"{ "b": 2, "a": 1 }"#).await, Some(1), "a double click");
    assert_eq!(run(r#"{"a":1,"b":3}"#).await, Some(2));
    assert_eq!(run("").await, Some(3));
    assert_eq!(run("").await, Some(3));
    assert_eq!(run("{not json").await, Some(4));
    // A key of the client's is not asked for, so it makes no difference.
    assert_eq!(world.shop_post("/body").key("\"unclosed").json("").send().await.json()["run"], 3);
    assert_eq!(world.upstream.executions(), 4);
}

#[tokio::test]
async fn every_source_of_a_list_is_looked_at_in_order() {
    let world = TestGateway::in_memory(SOURCES).await;
    let text = |target: &str| world.shop_post(target).header("Content-Type", "text/plain").body("hello");
    // Only JSON bodies can have the first: a request with another body still has the others.
    for (run, (case, request)) in [
        ("json", world.shop_post("/any").json(r#"{"id":"any-1"}"#)),
        ("query, a JSON body without the member", world.shop_post("/any?key=any-2").json("{}")),
        ("query, another body", text("/any?key=any-3")),
        ("header, a JSON body without the member", world.shop_post("/any").key("any-4").json("{}")),
        ("header, another body", text("/any").key("any-5")),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = request.send().await;
        assert_eq!((answer.status, world.upstream.executions()), (201, run + 1), "{case}: {answer:?}");
        let answer = request.send().await;
        assert_eq!(answer.header("idempotent-replayed"), Some("true"), "{case}: {answer:?}");
    }
    for (case, name, request) in [
        ("nowhere", "key-missing", world.shop_post("/any").json("{}")),
        ("nowhere, another body", "key-missing", text("/any")),
        ("malformed in the first", "key-invalid", world.shop_post("/any?key=any-6").key("any-6").json(r#"{"id":""}"#)),
        ("malformed in the second", "key-invalid", world.shop_post("/any?key=").key("any-6").json("{}")),
        ("malformed in the second, another body", "key-invalid", text("/any?key=").key("any-6")),
        ("malformed in the third", "key-invalid", world.shop_post("/any").key("\"any-6").json("{}")),
        ("malformed in the third, another body", "key-invalid", text("/any").key("any-6,any-7")),
        ("the third sent twice", "request-ambiguous", world.shop_post("/any").key("any-6").key("any-6").json("{}")),
    ] {
        let answer = request.send().await;
        assert_problem(case, &answer, 400, name, None);
    }
    assert_eq!(world.upstream.executions(), 5);
    let good = format!("POST /any HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: any-6\r\n\r\n");
    assert_eq!(world.exchange(good).await.status, 201);
}
