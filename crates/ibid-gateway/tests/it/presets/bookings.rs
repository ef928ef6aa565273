//! The key names user, operation, resource and time; only successes are remembered.

use testbed::upstream::filler;

use super::*;

const KEY: &str = "usr_abc123:booking.create:res_xyz:1704067200000";
const BODY: &str = r#"{"holdId":"hold_123","paymentMethodId":"pm_456"}"#;
const ENDPOINTS: [&str; 9] = [
    "POST /bookings",
    "POST /bookings/:id/confirm",
    "DELETE /bookings/:id",
    "POST /bookings/:id/check-in",
    "POST /offline-payments",
    "POST /refunds",
    "POST /payment-intents",
    "POST /coach-blocks",
    "POST /coaches/:id/students",
];
const PAYMENTS: [&str; 4] =
    ["POST /bookings/:id/confirm", "POST /offline-payments", "POST /refunds", "POST /payment-intents"];

async fn start_preset() -> TestGateway {
    TestGateway::shipped("bookings").await
}

fn booking(bench: &TestGateway, key: &str) -> TestRequest {
    bench.post("/bookings").key(key).json(BODY)
}

#[tokio::test]
async fn a_retried_booking_gets_the_first_answer() {
    let bench = start_preset().await;
    bench.upstream.on("/bookings", UpstreamReply::usual().header("Location", "/bookings/1").set_cookie("a=b"));
    let first = booking(&bench, KEY).send().await;
    assert_run(&first, 1);
    let retry = booking(&bench, KEY).send().await;
    assert_replay(&retry, &first, &NO_HEADERS);
    assert_eq!((retry.header("location"), retry.header("set-cookie")), (Some("/bookings/1"), None));
    assert_eq!(bench.upstream.last().key(), Some(KEY));
    bench.assert_executed(1);
}

#[tokio::test]
async fn the_nine_endpoints_need_a_key_and_run_once() {
    let bench = start_preset().await;
    for (at, endpoint) in ENDPOINTS.iter().enumerate() {
        let (method, path) = endpoint.split_once(' ').unwrap();
        let request = bench.request(method, &path.replace(":id", "bkg_456")).json(BODY);
        assert_refusal(&request.send().await, 400, "key-missing");
        let request = request.key(format!("usr_abc123:op{at}:bkg_456:1704067200000"));
        let first = request.send().await;
        assert_run(&first, at + 1);
        assert_replay(&request.send().await, &first, &NO_HEADERS);
        bench.assert_executed(at + 1);
    }
}

#[tokio::test]
async fn what_is_not_listed_passes_through() {
    let bench = start_preset().await;
    for (method, path) in [
        ("GET", "/bookings"),
        ("GET", "/bookings/1"),
        ("PUT", "/bookings/1"),
        ("PATCH", "/bookings/1"),
        ("POST", "/bookings/1"),
        ("DELETE", "/bookings"),
        ("POST", "/bookings/1/2/confirm"),
        ("POST", "/holds"),
    ] {
        passes_through(&bench, &bench.request(method, path).json(BODY)).await;
        passes_through(&bench, &bench.request(method, path).key(KEY).json(BODY)).await;
    }
}

#[tokio::test]
async fn post_and_delete_are_covered_and_other_methods_are_not() {
    let bench = TestGateway::everywhere("bookings", "").await;
    for method in ["POST", "DELETE"] {
        assert_refusal(&bench.request(method, "/any").send().await, 400, "key-missing");
    }
    for method in ["GET", "PUT", "PATCH"] {
        passes_through(&bench, &bench.request(method, "/any").key(KEY)).await;
    }
}

#[tokio::test]
async fn a_missing_key_is_refused_and_nothing_runs() {
    let bench = start_preset().await;
    let problem = assert_refusal(&bench.post("/bookings").json(BODY).send().await, 400, "key-missing");
    assert!(problem["detail"].as_str().unwrap().contains("idempotency-key"), "{problem}");
    let other = bench.post("/bookings").header("X-Idempotency-Key", KEY).json(BODY);
    assert_refusal(&other.send().await, 400, "key-missing");
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn keys_have_four_parts_and_the_last_is_a_number() {
    let bench = start_preset().await;
    for (run, key) in [
        KEY,
        "usr_abc123:payment.record:bkg_456:1704067200001",
        "usr_abc123:booking.confirm:bkg_789:1704067200002",
        "\"usr_abc123:booking.confirm:bkg_789:1704067200003\"",
    ]
    .into_iter()
    .enumerate()
    {
        assert_run(&booking(&bench, key).send().await, run + 1);
    }
    for key in [
        UUID,
        "usr_abc123:booking.create:res_xyz",
        "usr_abc123:booking.create:res_xyz:",
        "usr_abc123:booking.create:res_xyz:now",
        "usr_abc123:booking.create:res_xyz:17040672x",
        "usr_abc123:booking.create:res_xyz:-1704067200000",
        "usr_abc123:booking.create:res_xyz:1704067200000:5",
        ":booking.create:res_xyz:1704067200000",
        "usr_abc123::res_xyz:1704067200000",
        "usr_abc123:booking.create::1704067200000",
        "usr abc123:booking.create:res_xyz:1704067200000",
        ":::",
    ] {
        key_is_invalid(&bench, &booking(&bench, key)).await;
    }
    let long = |length: usize| format!("{}:a:b:1", "u".repeat(length - 6));
    key_is_invalid(&bench, &booking(&bench, &long(256))).await;
    assert_run(&booking(&bench, &long(255)).send().await, 5);
}

#[tokio::test]
async fn edge_case_clock_skew_the_timestamp_is_not_judged_and_the_whole_key_counts() {
    let bench = start_preset().await;
    for (run, time) in ["0", "1", "1704067200000", "4102444800000", "99999999999999999999"].into_iter().enumerate() {
        let key = format!("usr_abc123:booking.create:res_xyz:{time}");
        let first = booking(&bench, &key).send().await;
        assert_run(&first, run + 1);
        assert_replay(&booking(&bench, &key).send().await, &first, &NO_HEADERS);
    }
    key_is_invalid(&bench, &booking(&bench, "usr_abc123:booking.create:res_xyz:999999999999999999999")).await;
    bench.assert_executed(5);
}

#[tokio::test]
async fn each_part_of_the_key_tells_operations_apart() {
    let bench = start_preset().await;
    for (run, key) in ["u1:a:r1:1", "u2:a:r1:1", "u1:b:r1:1", "u1:a:r2:1", "u1:a:r1:2"].into_iter().enumerate() {
        assert_run(&booking(&bench, key).send().await, run + 1);
    }
    bench.assert_executed(5);
}

#[tokio::test]
async fn keys_are_shared_by_all_callers_because_they_name_the_user() {
    let bench = start_preset().await;
    let first = booking(&bench, KEY).header("Authorization", "Bearer old").send().await;
    assert_run(&first, 1);
    let refreshed = booking(&bench, KEY).header("Authorization", "Bearer new").header("Host", "b.example").send().await;
    assert_replay(&refreshed, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn a_key_used_for_something_else_gets_the_first_answer() {
    let bench = start_preset().await;
    let first = booking(&bench, KEY).send().await;
    assert_run(&first, 1);
    let other = bench.post("/refunds").key(KEY).json(r#"{"amount":5}"#);
    assert_replay(&other.send().await, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn edge_case_a_key_that_collides_with_a_running_one_gets_409_and_a_new_key_runs() {
    let bench = start_preset().await;
    let gate = bench.upstream.gate("/bookings");
    let mut first = burst(1, &booking(&bench, KEY));
    gate.arrived(1).await;
    let other = bench.post("/refunds").json(r#"{"amount":5}"#);
    let problem = assert_refusal(&other.clone().key(KEY).send().await, 409, "in-progress");
    assert_eq!(problem["key"], "usr_****0000");
    assert_run(&other.key("usr_abc123:refund:bkg_1:1704067200009").send().await, 2);
    gate.open();
    assert_run(&next(&mut first).await, 1);
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_are_told_to_come_back() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &booking(&bench, KEY), &NO_HEADERS).await;
}

#[tokio::test]
async fn the_client_of_the_document_gets_its_booking() {
    // It retries 409 and nothing else.
    let bench = start_preset().await;
    let gate = bench.upstream.gate("/bookings");
    let request = booking(&bench, KEY);
    let gone = request.start().await;
    gate.arrived(1).await;
    drop(gone);
    assert_refusal(&request.send().await, 409, "in-progress");
    gate.open();
    assert_run(&send_until_not_in_progress(&request).await, 1);
    bench.assert_executed(1);
}

#[tokio::test]
async fn only_successes_are_remembered() {
    let bench = start_preset().await;
    let key = |status: u16| format!("usr_abc123:booking.create:res_xyz:{status}");
    let statuses = [307, 308, 400, 401, 404, 409, 422, 429, 500, 502, 503, 504];
    not_remembered(&bench, &statuses, |status| booking(&bench, &key(status)), &NO_HEADERS).await;
    let before = bench.upstream.executions();
    for (count, status) in [200, 201, 202, 204, 302, 303].into_iter().enumerate() {
        bench.upstream.reply_by_default(UpstreamReply::status(status));
        let first = booking(&bench, &key(status)).send().await;
        assert_eq!((first.status, ibid_headers(&first)), (status, NO_HEADERS.to_vec()), "{first:?}");
        assert_replay(&booking(&bench, &key(status)).send().await, &first, &NO_HEADERS);
        bench.assert_executed(before + count + 1);
    }
}

#[tokio::test]
async fn a_booking_is_cancelled_once() {
    let bench = start_preset().await;
    bench.upstream.on_each("/bookings/bkg_1", [UpstreamReply::status(204), UpstreamReply::status(404)]);
    let request = bench.request("DELETE", "/bookings/bkg_1").key("usr_abc123:booking.cancel:bkg_1:1704067200000");
    for _ in 0..3 {
        let answer = request.send().await;
        assert_eq!((answer.status, answer.text()), (204, String::new()), "{answer:?}");
        assert_eq!(ibid_headers(&answer), NO_HEADERS);
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn edge_case_a_response_too_large_to_keep_is_answered_with_200_and_its_digest() {
    let bench = TestGateway::shipped_with("bookings", "max_response = 64").await;
    let reply = UpstreamReply::status(201).header("Content-Type", "text/plain").header("Location", "/bookings/1");
    bench.upstream.on("/bookings", reply.header("ETag", "\"e\"").large(1000));
    let first = booking(&bench, KEY).send().await;
    assert_eq!((first.status, &first.body), (201, &filler(1000)), "{first:?}");
    assert_eq!(
        (first.header("content-type"), ibid_headers(&first)),
        (Some("text/plain"), NO_HEADERS.to_vec()),
        "{first:?}"
    );
    let replay = booking(&bench, KEY).send().await;
    assert_eq!(replay.status, 200, "{replay:?}");
    assert_eq!(ibid_headers(&replay), [("Idempotency-Body", "digest")], "{replay:?}");
    assert_eq!(replay.header("content-type"), Some("application/json"), "{replay:?}");
    assert_eq!((replay.header("location"), replay.header("etag")), (Some("/bookings/1"), None), "{replay:?}");
    // sha256sum of the thousand bytes.
    let sha256 = "f1587cfb6db37a1b1d2b124e18ad82b37b011871b1c05e042b2dbc605141d943";
    assert_eq!(replay.text(), format!(r#"{{"length":1000,"sha256":"{sha256}"}}"#));
    bench.assert_executed(1);
    // The client asks for the rest with GET.
    assert_eq!(bench.request("GET", "/bookings/1").send().await.status, 200);
}

#[tokio::test]
async fn a_response_that_just_fits_is_kept_whole() {
    let bench = TestGateway::shipped_with("bookings", "max_response = 64").await;
    bench.upstream.on("/bookings", UpstreamReply::status(201).large(64));
    let first = booking(&bench, KEY).send().await;
    assert_eq!(first.body, filler(64));
    assert_replay(&booking(&bench, KEY).send().await, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn a_lost_answer_is_run_again_once_its_lease_has_lapsed() {
    let bench = TestGateway::shipped_with("bookings", SHORT_LEASE).await;
    let (second, third) = a_lost_answer_runs_again(&bench, &booking(&bench, KEY)).await;
    assert_run(&second, 2);
    assert_replay(&third, &second, &NO_HEADERS);
}

#[tokio::test]
async fn a_timed_out_booking_runs_again_after_its_lease() {
    let bench = TestGateway::shipped_with("bookings", "timeout = \"200ms\"\nlease = \"1s\"").await;
    let request = booking(&bench, KEY);
    a_timed_out_operation_runs_again_after_its_lease(&bench, &request, Duration::from_secs(1)).await;
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("bookings", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &booking(&bench, KEY)).await;
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &booking(&bench, KEY), KEY, "usr_****0000").await;
}

#[tokio::test]
async fn the_configuration_lists_the_nine_endpoints_and_keeps_payments_for_72_hours() {
    let routes = checked_routes("bookings").await;
    assert_eq!(routes.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ENDPOINTS);
    for (name, dials) in &routes {
        let ttl = if PAYMENTS.contains(&name.as_str()) { "72h" } else { "24h" };
        assert_eq!(dials["ttl"], ttl, "{name}");
    }
    let column = [
        ("key", "header:idempotency-key; required, operation, at most 255 characters"),
        ("scope", "global"),
        ("fingerprint", "none"),
        ("on_mismatch", "ignore"),
        ("on_concurrent", "reject"),
        ("on_unknown", "retry"),
        ("on_store_down", "open"),
        ("remember", "success"),
        ("unknown_status", "none"),
        ("digest_status", "200"),
        ("lease", "5m"),
        ("timeout", "5m"),
        ("first_headers", "none"),
        ("replay_headers", "none"),
        ("envelope", "none"),
    ];
    every_route_has("bookings", &column).await;
}
