//! An operator's way through the console, in a browser.

use ibid::store::ErrorKind;
use ibid_testkit::wrappers::CallFilter;

use super::{
    browser::{ConsoleBrowser, ScriptSetting},
    common::{ADMIN, ConsoleGateway, MARKUP_KEY, UNKNOWN_KEY, VIEWER},
};

async fn log_in(browser: &ConsoleBrowser, scene: &ConsoleGateway, token: &str) {
    browser.goto(&scene.url("/")).await.unwrap();
    browser.type_into("#token", token).await;
    browser.click_text("Log in").await;
}

/// A chart is as wide as its place, and something is painted on it.
async fn assert_charts_drawn(browser: &ConsoleBrowser) {
    let drawn = "const wide = (canvas) => canvas.clientWidth > 300 && canvas.clientWidth < canvas.closest('figure').clientWidth; \
                 const painted = (canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height) \
                   .data.some((byte) => byte > 0); \
                 return [...document.querySelectorAll('[data-chart] canvas')].filter((canvas) => wide(canvas) && painted(canvas)).length";
    crate::support::until_some("four charts are drawn", || async {
        (browser.execute(drawn, Vec::new()).await.unwrap() == 4).then_some(())
    })
    .await;
}

/// Search, open, resolve with a reason, and see who did it; then the client gets what the operator said.
async fn resolve_record(browser: &ConsoleBrowser, scene: &ConsoleGateway) {
    browser.click_text("Records").await;
    browser.type_into("#key", UNKNOWN_KEY).await;
    browser.click_text("Search").await;
    browser.wait_for_text("1 record").await;
    browser.click_text(UNKNOWN_KEY).await;
    browser.wait_for_text("There is none: the outcome is unknown.").await;
    browser.click_text("Resolve").await;
    browser.click("input[value=done]").await;
    browser.type_into("#status", "201").await;
    browser.type_into("#headers", "Location: /payments/1841").await;
    browser.type_into("#body", "{\"id\":\"re_1841\"}").await;
    browser.type_into("#keep", "7d").await;

    browser.click_text("Review").await;
    let focused = browser.active_element().await.unwrap().attr("id").await.unwrap();
    assert_eq!(focused.as_deref(), Some("reason"), "the browser asks for the reason that is missing");
    browser.type_into("#reason", "ticket 7: the bank shows it").await;
    browser.click_text("Review").await;
    browser.wait_for_text("Nothing has been changed yet").await;
    browser.wait_for_text("7d").await;
    assert_eq!(scene.pay("lost", UNKNOWN_KEY, 1).send().await.status, 409, "nothing was changed");

    // The form has a hidden step that commits; the step of the button counts.
    browser.click_text("Change something").await;
    browser.wait_for_element("#reason").await;
    assert_eq!(scene.pay("lost", UNKNOWN_KEY, 1).send().await.status, 409, "nothing was changed");
    browser.click_text("Review").await;
    browser.wait_for_text("Nothing has been changed yet").await;

    browser.click_text("Resolve").await;
    browser.wait_for_text("Resolved: every retry with this key gets this answer from now on.").await;
    let page = browser.text().await;
    for part in [
        "re_1841",
        "ticket 7: the bank shows it",
        "admin.token",
        "unknown",
        "completed 201",
        "in 6d",
        "Resolved by an operator",
        "resolved by an operator",
    ] {
        assert!(page.contains(part), "{part}:\n{page}");
    }
    let answer = scene.pay("lost", UNKNOWN_KEY, 1).send().await;
    assert_eq!((answer.status, answer.text().as_str()), (201, "{\"id\":\"re_1841\"}"));
    assert_eq!(answer.header("location"), Some("/payments/1841"));
    browser.click_text("Audit").await;
    browser.wait_for_text("ticket 7: the bank shows it").await;
}

/// A key and an answer that hold markup are text on every page that shows them.
async fn assert_markup_is_text(browser: &ConsoleBrowser, scene: &ConsoleGateway) {
    let address = scene.address(MARKUP_KEY).await;
    for path in ["/records", &format!("/records/{address}"), &format!("/records/{address}/forget")] {
        browser.goto(&scene.url(path)).await.unwrap();
        browser.wait_for_text(MARKUP_KEY).await;
        assert!(browser.get_alert_text().await.is_err(), "{path}: a script of the key ran");
        let images = browser.find_all(fantoccini::Locator::Css("img, main script")).await.unwrap();
        assert!(images.is_empty(), "{path}: the key became markup");
    }
    browser.goto(&scene.url(&format!("/records/{address}"))).await.unwrap();
    browser.wait_for_text("<b onclick=alert(3)>bold</b>").await;
}

/// The store goes, and every page says so; it comes back, and so do the pages, by themselves.
async fn assert_store_outage_shown(browser: &ConsoleBrowser, scene: &ConsoleGateway) {
    scene.store.fail(CallFilter::All, ErrorKind::NotApplied);
    browser.goto(&scene.url("/records")).await.unwrap();
    browser.wait_for_text("The store does not answer").await;
    browser.wait_for_text("Check that it runs and can be reached").await;
    scene.store.heal();
    browser.wait_for_text("order-0-pay").await;
    scene.store.fail(CallFilter::All, ErrorKind::NotApplied);
    browser.goto(&scene.url("/")).await.unwrap();
    browser.wait_for_text("The store does not answer.").await;
    browser.wait_for_element("[data-chart=traffic] canvas").await;
    scene.store.heal();
    browser.wait_for_element(".state.good").await;
    assert!(!browser.text().await.contains("The store does not answer."), "it has come back");
}

#[tokio::test]
async fn an_operator_finds_a_lost_operation_says_how_it_ended_and_sees_it_written_down() {
    let scene = ConsoleGateway::start_filled().await;
    let browser = ConsoleBrowser::start(ScriptSetting::On).await;
    log_in(&browser, &scene, "not a token").await;
    browser.wait_for_text("That is none of this gateway's tokens.").await;
    log_in(&browser, &scene, ADMIN).await;
    browser.wait_for_text("Needs attention").await;
    assert_charts_drawn(&browser).await;
    resolve_record(&browser, &scene).await;
    assert_markup_is_text(&browser, &scene).await;
    assert_store_outage_shown(&browser, &scene).await;

    for path in ["/unknown", "/policies", "/shadow", "/store", "/audit"] {
        browser.goto(&scene.url(path)).await.unwrap();
        browser.wait_for_element("main h1").await;
    }
    // The wrong token and pages of the lost store are logged by the browser; nothing else is.
    let complaints = browser.console_errors().await;
    let expected = |line: &&String| line.contains("status of 503") || line.contains("/login") && line.contains("401");
    let others: Vec<_> = complaints.iter().filter(|line| !expected(line)).collect();
    assert!(others.is_empty(), "{others:?}");
    let own = scene.url("/");
    let asked = browser.requested_urls().await;
    assert!(asked.len() > 10, "{asked:?}");
    let elsewhere: Vec<_> = asked.iter().filter(|url| !url.starts_with(&own) && !url.starts_with("data:")).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");

    // The gateway forgets its sessions, as at a restart: the next page says so and leads back.
    browser.delete_cookie("ibid_session").await.unwrap();
    let gone = "ibid_session=0000";
    browser.execute(&format!("document.cookie = '{gone}; path=/'"), Vec::new()).await.unwrap();
    browser.goto(&scene.url("/store")).await.unwrap();
    browser.wait_for_text("Your session has ended").await;
    browser.type_into("#token", VIEWER).await;
    browser.click_text("Log in").await;
    browser.wait_for_text("Survives a crash").await;
    browser.click_text("Log out").await;
    browser.wait_for_text("You are logged out.").await;
}

#[tokio::test]
async fn everything_works_without_scripts() {
    let scene = ConsoleGateway::start_filled().await;
    let browser = ConsoleBrowser::start(ScriptSetting::Off).await;
    log_in(&browser, &scene, ADMIN).await;
    browser.wait_for_text("Needs attention").await;
    browser.click_text("The last 10m in numbers").await;
    browser.wait_for_text("Overhead p50").await;
    let charts = browser.find_all(fantoccini::Locator::Css("canvas")).await.unwrap();
    assert!(charts.is_empty(), "scripts are on");
    resolve_record(&browser, &scene).await;
}
