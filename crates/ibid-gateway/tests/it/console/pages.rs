//! What pages hold, as a plain HTTP client sees them.

use testbed::client::get;

use super::common::{ADMIN, ConsoleGateway, MARKUP_KEY, PageClient, UNKNOWN_KEY, USER, VIEWER};

use crate::support::{TestGateway, until_some};

#[tokio::test]
async fn every_page_may_do_little_and_is_kept_by_nobody() {
    let scene = ConsoleGateway::start_filled().await;
    let reader = scene.log_in(ADMIN).await;
    let lost = scene.address(UNKNOWN_KEY).await;
    let (record, forget) = (format!("/records/{lost}"), format!("/records/{lost}/forget"));
    let pages = [
        "/",
        "/records",
        &record,
        &forget,
        "/unknown",
        "/policies",
        "/shadow",
        "/store",
        "/audit",
        "/login",
        "/series",
    ];
    for path in pages {
        let answer = reader.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        let policy = answer.header("content-security-policy").expect("a policy");
        for part in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(answer.header("referrer-policy"), Some("same-origin"), "{path}");
        assert_eq!(answer.header("cache-control"), Some("no-store"), "{path}");
        let page = answer.text();
        assert!(!page.contains(" style=") && !page.contains("<style") && !page.contains("javascript:"), "{path}");
        assert!(!page.contains(" on") || !page.contains(" onclick="), "{path}");
        for quoted in page.split(['"', '\'']) {
            assert!(!quoted.starts_with("//") && !quoted.contains("://"), "{path} names another place: {quoted}");
        }
        for script in page.split("<script").skip(1) {
            assert!(script.starts_with(" src=\"/assets/"), "{path}: a script in the page");
        }
    }
}

#[tokio::test]
async fn the_files_of_the_pages_are_there() {
    let scene = ConsoleGateway::start_empty().await;
    let page = PageClient::anonymous(scene.admin()).get_page("/login").await;
    let overview = scene.log_in(ADMIN).await.get_page("/").await;
    let mut seen = 0;
    for place in [page, overview].iter().flat_map(|page| page.split('"')).filter(|text| text.starts_with("/assets/")) {
        let answer = get(scene.admin(), place).send().await;
        assert_eq!(answer.status, 200, "{place}");
        assert!(answer.header("content-type").is_some_and(|kind| !kind.contains("plain")), "{place}");
        let known = get(scene.admin(), place).header("If-None-Match", answer.header("etag").unwrap()).send().await;
        assert_eq!((known.status, known.text().len()), (304, 0), "{place}");
        seen += 1;
    }
    assert!(seen >= 8, "{seen}");
}

#[tokio::test]
async fn a_search_finds_by_every_field_and_pages_through_what_it_found() {
    let scene = ConsoleGateway::start_filled().await;
    let reader = scene.log_in(ADMIN).await;
    for (query, found) in [
        ("key=order-0-pay", 1),
        ("state=unknown", 1),
        ("state=failed", 1),
        ("tenant=acme", 7),
        ("tenant=globex", 0),
        ("user=user-2", 3),
        ("user=user-2&state=failed", 0),
        ("endpoint=POST+%2Fpayments%2F*", 7),
        ("older_than=1h", 0),
        ("older_than=0s", 7),
    ] {
        let page = reader.get_page(&format!("/records?{query}")).await;
        assert_eq!(page.matches("href=\"/records/").count(), found, "{query}");
        if found == 0 {
            assert!(page.contains("Nothing matches."), "{query}");
        }
    }
    let address = scene.address(UNKNOWN_KEY).await;
    let answer = reader.get(&format!("/records?key={address}")).await;
    assert_eq!((answer.status, answer.header("location")), (303, Some(format!("/records/{address}").as_str())));
    for (query, said) in [
        ("state=gone", "is no state"),
        ("older_than=soon", "is no duration"),
        ("cursor=1", "search again"),
        ("key=%00", "can be shown"),
    ] {
        let answer = reader.get(&format!("/records?{query}")).await;
        assert_eq!(answer.status, 400, "{query}");
        assert!(answer.text().contains(said), "{query}");
    }

    for nth in 0..60 {
        assert_eq!(scene.pay("many", &format!("many-{nth:02}"), 5).send().await.status, 201);
    }
    let (mut keys, mut place, mut pages) = (Vec::new(), "/records?user=user-5".to_owned(), 0);
    loop {
        let page = reader.get_page(&place).await;
        pages += 1;
        keys.extend(page.split('>').filter(|text| text.starts_with("many-")).map(|text| text[..7].to_owned()));
        let next = page.split("rel=\"next\" href=\"").nth(1).and_then(|rest| rest.split('"').next());
        match next {
            Some(next) => place = next.replace("&#38;", "&"),
            None => break,
        }
        assert!(pages < 10, "paging never ends");
    }
    keys.sort();
    assert_eq!((pages, keys), (2, (0..60).map(|nth| format!("many-{nth:02}")).collect()));
}

#[tokio::test]
async fn a_record_is_shown_with_every_field_and_the_answer_as_text() {
    let scene = ConsoleGateway::start_filled().await;
    let reader = scene.log_in(ADMIN).await;
    let page = reader.get_page(&format!("/records/{}", scene.address("order-0-pay").await)).await;
    for part in [
        "order-0-pay",
        "POST /payments/0",
        "acme",
        "user-1",
        "Requested",
        "Completed",
        "Duration",
        "Expires",
        "Attempt",
        "Fence",
        "Fingerprint",
        "127.0.0.1",
        "shop/1.4",
        "201",
        "pay_0",
        "content-type",
        "History",
        "Answered",
    ] {
        assert!(page.contains(part), "{part}:\n{page}");
    }
    let page = reader.get_page(&format!("/records/{}", scene.address(MARKUP_KEY).await)).await;
    assert!(!page.contains("<script>alert") && !page.contains("<img") && !page.contains("<b onclick"), "{page}");
    assert!(page.contains("&#60;script&#62;alert(1)"), "{page}");
}

#[tokio::test]
async fn a_reuse_that_was_refused_is_shown_with_what_was_different() {
    let scene = ConsoleGateway::start_filled().await;
    let address = scene.address("order-0-pay").await;
    let refused = scene.pay_amount(2, "0", "order-0-pay", 1).send().await;
    assert_eq!(refused.status, 422, "{refused:?}");
    let reader = scene.log_in(ADMIN).await;
    let page = reader.get_page(&format!("/records/{address}")).await;
    assert!(page.contains("Reuses that were refused") && page.contains("another body"), "{page}");
}

#[tokio::test]
async fn a_release_and_a_removal_take_a_reason_a_look_and_a_confirmation() {
    let scene = ConsoleGateway::start_filled().await;
    let mut reader = scene.log_in(ADMIN).await;
    let lost = scene.address(UNKNOWN_KEY).await;
    let form = reader.get_page(&format!("/records/{lost}/release")).await;
    let answer = reader.submit_form(&form, &[("reason", "  ")]).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("Give a reason"), "{}", answer.text());
    let look = reader.submit_form(&form, &[("reason", "ticket <9>")]).await;
    assert_eq!(look.status, 200);
    assert!(look.text().contains("Nothing has been changed yet") && look.text().contains("ticket &#60;9&#62;"));
    let back = reader.submit_form(&look.text(), &[("step", "edit")]).await;
    assert!(back.status == 200 && back.text().contains(">ticket &#60;9&#62;</textarea>"), "what was typed is kept");
    assert_eq!(scene.pay("lost", UNKNOWN_KEY, 1).send().await.status, 409, "nothing was changed");
    let done = reader.submit_form(&look.text(), &[]).await;
    assert_eq!((done.status, done.header("location")), (303, Some("/audit?done=release")));
    let audit = reader.get_page("/audit?done=release").await;
    assert!(audit.contains("Released: the next request with this key runs.") && audit.contains("ticket &#60;9&#62;"));
    assert_eq!(reader.get(&format!("/records/{lost}")).await.status, 404);

    // Confirmed a second time: there is nothing left to change, and it says so.
    let again = reader.submit_form(&look.text(), &[]).await;
    assert_eq!(again.status, 404);
    let paid = scene.address("order-2-pay").await;
    let form = reader.get_page(&format!("/records/{paid}/forget")).await;
    let look = reader.submit_form(&form, &[("reason", "to be run again")]).await;
    assert_eq!(reader.submit_form(&look.text(), &[]).await.header("location"), Some("/audit?done=forget"));
    let before = scene.upstream.executions_at("/payments/2");
    assert_eq!(scene.pay("2", "order-2-pay", 1).send().await.status, 201);
    assert_eq!(scene.upstream.executions_at("/payments/2"), before + 1, "it ran again");
}

#[tokio::test]
async fn a_record_that_changed_since_it_was_looked_at_is_left_alone() {
    let scene = ConsoleGateway::start_filled().await;
    let mut reader = scene.log_in(ADMIN).await;
    let paid = scene.address("order-3-pay").await;
    let form = reader.get_page(&format!("/records/{paid}/forget")).await;
    let look = reader.submit_form(&form, &[("reason", "mine")]).await.text();
    let mut other = scene.log_in(ADMIN).await;
    let theirs = other.get_page(&format!("/records/{paid}/forget")).await;
    let theirs = other.submit_form(&theirs, &[("reason", "theirs")]).await.text();
    assert_eq!(other.submit_form(&theirs, &[]).await.status, 303);
    assert_eq!(scene.pay("3", "order-3-pay", 2).send().await.status, 201, "it runs again, under another fence");
    let late = reader.submit_form(&look, &[]).await;
    assert_eq!(late.status, 409);
    assert!(
        late.text().contains("Nothing was changed") && late.text().contains("it has changed meanwhile"),
        "{}",
        late.text()
    );
    assert_eq!(reader.get(&format!("/records/{paid}")).await.status, 200, "the other's is still there");
    // A running or finished one is not released, whoever says so.
    let form = reader.get_page(&format!("/records/{paid}/release")).await;
    let look = reader.submit_form(&form, &[("reason", "r")]).await.text();
    assert_eq!(reader.submit_form(&look, &[]).await.status, 409);
}

#[tokio::test]
async fn the_overview_counts_what_happens() {
    let scene = ConsoleGateway::start_filled().await;
    let reader = scene.log_in(ADMIN).await;
    for _ in 0..3 {
        assert_eq!(scene.pay("0", "order-0-pay", 1).send().await.status, 201);
    }
    let sum = |series: &serde_json::Value, name: &str| {
        let column = series[name].as_array().expect("a column");
        column.iter().map(|value| value.as_f64().unwrap_or(0.0)).sum::<f64>()
    };
    // Points are rates over about a second each; the counts behind them are whole, so their sum is near.
    until_some("the charts show three replays", || async {
        let series = reader.get("/series?window=10m").await.json();
        (sum(&series, "replayed") > 2.0 && sum(&series, "open") > 0.5 && sum(&series, "ran") > 4.0).then_some(())
    })
    .await;
    let page = reader.get_page("/").await;
    for part in [
        "Outcome unknown",
        "POST /payments/*",
        "Needs attention",
        UNKNOWN_KEY,
        "alert if above 5 % for 10 minutes",
        "alert if above 10 % for 10 minutes",
        "Errors",
        "Reused keys",
    ] {
        assert!(page.contains(part), "{part}:\n{page}");
    }
    // Three hits in a few requests are no alert, and there is no second store to fall back to.
    assert!(!page.contains("Fallbacks") && page.matches("tile alert").count() == 1, "{page}");
    for part in [env!("CARGO_PKG_VERSION"), " · memory · up "] {
        assert!(page.contains(part), "{part}:\n{page}");
    }
    for window in ["10m", "1h", "6h", "24h"] {
        assert!(
            reader.get_page(&format!("/?window={window}")).await.contains(&format!("The last {window} in numbers"))
        );
    }
    let page = reader.get_page("/policies").await;
    for part in ["POST /payments/*", "on_unknown", "hold", "<strong>shadow</strong>"] {
        assert!(page.contains(part), "{part}");
    }
    let page = reader.get_page("/store").await;
    for part in ["Survives a crash", "memory", "claim", "settle"] {
        assert!(page.contains(part), "{part}");
    }
}

#[tokio::test]
async fn an_empty_gateway_says_what_will_be_there() {
    let scene = ConsoleGateway::start_empty().await;
    let reader = scene.log_in(ADMIN).await;
    for (path, said) in [
        ("/", "No outcome is unknown"),
        ("/recent", "No request yet."),
        ("/records", "Nothing is remembered yet."),
        ("/unknown", "Every operation that was started has a known outcome"),
        ("/audit", "Nothing was changed."),
    ] {
        assert!(reader.get_page(path).await.contains(said), "{path}");
    }
}

/// Without a token nobody gets in, and the page says how to set one.
#[tokio::test]
async fn a_gateway_without_tokens_says_how_to_set_one() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start("").await;
    let at = gateway.admin_addr();
    let page = get(at, "/login").send().await.text();
    assert!(page.contains("No token is configured") && page.contains("env:IBID_ADMIN_TOKEN"), "{page}");
    assert_eq!(get(at, "/").send().await.status, 303);
    // The link that it prints logs in, once.
    let line = gateway.wait_for_log("ibid: console (this link logs in once").await;
    let link = line.split(&at.to_string()).nth(1).expect("a link to this gateway").trim().to_owned();
    let answer = get(at, link.as_str()).send().await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/")), "{answer:?}");
    let cookie = answer.header("set-cookie").and_then(|cookie| cookie.split(';').next()).expect("a session").to_owned();
    assert_eq!(get(at, "/").header("Cookie", cookie.as_str()).send().await.status, 200);
    assert_eq!(get(at, link.as_str()).send().await.status, 401, "once");
}

#[tokio::test]
async fn recent_requests_are_listed_newest_first_and_lead_to_their_records() {
    let scene = ConsoleGateway::start_filled().await;
    let reader = scene.log_in(ADMIN).await;
    assert_eq!(scene.pay("0", "order-0-pay", 1).send().await.status, 201);
    let page = until_some("the replay is listed", || async {
        let page = reader.get_page("/recent").await;
        page.contains("replayed").then_some(page)
    })
    .await;
    let (replayed, executed) = (page.find(">replayed<").unwrap(), page.find(">executed<").unwrap());
    assert!(replayed < executed, "newest first: {page}");
    for part in ["POST /payments/0", "127.0.0.1", &format!("/records/{}", scene.address("order-0-pay").await)] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let page = reader.get_page("/recent?show=replayed").await;
    assert!(page.contains(">replayed<") && !page.contains(">executed<"), "{page}");
    let page = reader.get_page("/recent?text=PAYMENTS/LOST").await;
    assert!(page.contains("/payments/lost") && !page.contains("/payments/0"), "{page}");
    assert_eq!(scene.log_in(USER).await.get("/recent").await.status, 403, "others' requests");
}

#[tokio::test]
async fn unknown_outcomes_say_why_and_are_released_together() {
    let scene = ConsoleGateway::start_filled().await;
    let mut reader = scene.log_in(ADMIN).await;
    assert_eq!(scene.pay("lost", "order-77-refund", 1).send().await.status, 502);
    let page = until_some("both are listed", || async {
        let page = reader.get_page("/unknown").await;
        page.contains("order-77-refund").then_some(page)
    })
    .await;
    assert!(page.contains("connection lost before the whole answer") && page.contains("POST /payments/lost"), "{page}");
    let badge = reader.get_page("/badge").await;
    assert!(badge.contains("class=\"badge\">2<"), "{badge}");
    let lost = scene.address(UNKNOWN_KEY).await;
    assert!(reader.get_page(&format!("/records/{lost}")).await.contains("connection lost before the whole answer"));
    let boxes: Vec<String> =
        page.split("name=\"record\" value=\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect();
    assert_eq!(boxes.len(), 2, "{page}");
    let csrf = page.rsplit("name=\"csrf\" value=\"").next().and_then(|rest| rest.split('"').next()).unwrap().to_owned();
    let records: Vec<(&str, &str)> = boxes.iter().map(|value| ("record", value.as_str())).collect();
    let with = |more: &[(&'static str, &'static str)]| [&records[..], &[("csrf", csrf.as_str())], more].concat();
    let refused = reader.post_form("/unknown", &with(&[("do", "release"), ("reason", " ")])).await;
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("Give a reason"), "{}", refused.text());
    let refused = reader.post_form("/unknown", &with(&[("do", "resolve"), ("reason", "r"), ("status", "99")])).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let done = reader.post_form("/unknown", &with(&[("do", "release"), ("reason", "ticket 12: none happened")])).await;
    assert_eq!(done.status, 200);
    assert_eq!(done.text().matches("</b>: changed").count(), 2, "{}", done.text());
    assert_eq!(reader.get_page("/audit").await.matches("ticket 12: none happened").count(), 2, "one entry for each");
    // The same page again: both have changed meanwhile.
    let late = reader.post_form("/unknown", &with(&[("do", "release"), ("reason", "again")])).await;
    assert!(late.text().contains("not changed"), "{}", late.text());
    let viewer = scene.log_in(VIEWER).await.get_page("/unknown").await;
    assert!(!viewer.contains("name=\"record\""), "a viewer changes nothing");
}

#[tokio::test]
async fn records_are_sorted_by_age_where_the_store_can() {
    let scene = ConsoleGateway::start_filled().await;
    let reader = scene.log_in(ADMIN).await;
    assert_eq!(scene.pay("9", "order-99-last", 1).send().await.status, 201);
    let first_key =
        |page: &str| page.split("<tbody>").nth(1).and_then(|rows| rows.split("</a>").next()).unwrap().to_owned();
    let newest = reader.get_page("/records?sort=newest").await;
    assert!(first_key(&newest).ends_with("order-99-last"), "{newest}");
    let oldest = reader.get_page("/records?sort=oldest").await;
    assert!(!first_key(&oldest).ends_with("order-99-last") && oldest.contains("order-99-last"), "{oldest}");
    assert!(newest.contains("newest first") && !newest.contains("rel=\"next\""), "{newest}");
}

#[tokio::test]
async fn the_newest_of_more_records_than_one_page_of_the_store_come_first() {
    let scene = ConsoleGateway::start_empty().await;
    for number in 0..1_100 {
        assert_eq!(scene.pay("9", &format!("order-{number}"), 1).send().await.status, 201);
    }
    let newest = scene.log_in(ADMIN).await.get_page("/records?sort=newest").await;
    for number in 1_000..1_100 {
        assert!(newest.contains(&format!("order-{number}")), "order-{number} is among the newest 200");
    }
    assert!(newest.contains("200 of 1,100"), "{newest}");
}
