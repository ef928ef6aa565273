//! An operator's way through the console, in a browser.

use ibid::store::ErrorKind;
use ibid_testkit::wrappers::Calls;

use super::{
    browser::{Browser, Scripts},
    kit::{ADMIN, LOST, MARKUP, Scene, VIEWER},
};

async fn log_in(browser: &Browser, scene: &Scene, token: &str) {
    browser.goto(&scene.url("/")).await.unwrap();
    browser.type_into("#token", token).await;
    browser.press("Log in").await;
}

/// A chart is as wide as its place, and something is painted on it.
async fn charts_are_drawn(browser: &Browser) {
    let drawn = "const wide = (canvas) => canvas.clientWidth > 300 && canvas.clientWidth < canvas.closest('figure').clientWidth; \
                 const painted = (canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height) \
                   .data.some((byte) => byte > 0); \
                 return [...document.querySelectorAll('[data-chart] canvas')].filter((canvas) => wide(canvas) && painted(canvas)).length";
    super::kit::eventually("four charts are drawn", || async {
        browser.execute(drawn, Vec::new()).await.unwrap() == 4
    })
    .await;
}

/// Search, open, resolve with a reason, and see who did it; then the client gets what the operator said.
async fn resolve(browser: &Browser, scene: &Scene) {
    browser.press("Records").await;
    browser.type_into("#key", LOST).await;
    browser.press("Search").await;
    browser.reads("1 record").await;
    browser.press(LOST).await;
    browser.reads("There is none: nobody has seen how it ended.").await;
    browser.press("Say how it ended…").await;
    browser.click("input[value=done]").await;
    browser.type_into("#status", "201").await;
    browser.type_into("#headers", "Location: /payments/1841").await;
    browser.type_into("#body", "{\"id\":\"re_1841\"}").await;
    browser.type_into("#keep", "7d").await;

    browser.press("Review").await;
    let focused = browser.active_element().await.unwrap().attr("id").await.unwrap();
    assert_eq!(focused.as_deref(), Some("reason"), "the browser asks for the reason that is missing");
    browser.type_into("#reason", "ticket 7: the bank shows it").await;
    browser.press("Review").await;
    browser.reads("Nothing has been changed yet").await;
    browser.reads("7d").await;
    assert_eq!(scene.pay("lost", LOST, 1).send().await.status, 409, "nothing was changed");

    browser.press("It happened: resolve").await;
    browser.reads("Resolved: every retry with this key gets this answer from now on.").await;
    let page = browser.text().await;
    for part in ["re_1841", "ticket 7: the bank shows it", "admin.token", "unknown", "done 201", "in 6d"] {
        assert!(page.contains(part), "{part}:\n{page}");
    }
    let answer = scene.pay("lost", LOST, 1).send().await;
    assert_eq!((answer.status, answer.text().as_str()), (201, "{\"id\":\"re_1841\"}"));
    assert_eq!(answer.header("location"), Some("/payments/1841"));
    browser.press("Audit").await;
    browser.reads("ticket 7: the bank shows it").await;
}

/// A key and an answer that hold markup are text on every page that shows them.
async fn markup_is_text(browser: &Browser, scene: &Scene) {
    let address = scene.address(MARKUP).await;
    for path in ["/records", &format!("/records/{address}"), &format!("/records/{address}/forget")] {
        browser.goto(&scene.url(path)).await.unwrap();
        browser.reads(MARKUP).await;
        assert!(browser.get_alert_text().await.is_err(), "{path}: a script of the key ran");
        let images = browser.find_all(fantoccini::Locator::Css("img, main script")).await.unwrap();
        assert!(images.is_empty(), "{path}: the key became markup");
    }
    browser.goto(&scene.url(&format!("/records/{address}"))).await.unwrap();
    browser.reads("<b onclick=alert(3)>bold</b>").await;
}

/// The store goes, and every page says so; it comes back, and so do the pages, by themselves.
async fn store_lost(browser: &Browser, scene: &Scene) {
    scene.store.fail(Calls::All, ErrorKind::NotApplied);
    browser.goto(&scene.url("/records")).await.unwrap();
    browser.reads("The store does not answer").await;
    browser.reads("Check that it runs and can be reached").await;
    scene.store.heal();
    browser.reads("order-0-pay").await;
    scene.store.fail(Calls::All, ErrorKind::NotApplied);
    browser.goto(&scene.url("/")).await.unwrap();
    browser.reads("The store does not answer.").await;
    browser.see("[data-chart=traffic] canvas").await;
    scene.store.heal();
    browser.see(".state.good").await;
    assert!(!browser.text().await.contains("The store does not answer."), "it has come back");
}

#[tokio::test]
async fn an_operator_finds_a_lost_operation_says_how_it_ended_and_sees_it_written_down() {
    let scene = Scene::filled().await;
    let browser = Browser::start(Scripts::On).await;
    log_in(&browser, &scene, "not a token").await;
    browser.reads("That is none of this gateway's tokens.").await;
    log_in(&browser, &scene, ADMIN).await;
    browser.reads("Needs somebody").await;
    charts_are_drawn(&browser).await;
    resolve(&browser, &scene).await;
    markup_is_text(&browser, &scene).await;
    store_lost(&browser, &scene).await;

    for path in ["/stuck", "/policies", "/shadow", "/store", "/audit"] {
        browser.goto(&scene.url(path)).await.unwrap();
        browser.see("main h1").await;
    }
    // The wrong token and pages of the lost store are logged by the browser; nothing else is.
    let complaints = browser.complaints().await;
    let expected = |line: &&String| line.contains("status of 503") || line.contains("/login") && line.contains("401");
    let others: Vec<_> = complaints.iter().filter(|line| !expected(line)).collect();
    assert!(others.is_empty(), "{others:?}");
    let own = scene.url("/");
    let asked = browser.asked_for().await;
    assert!(asked.len() > 10, "{asked:?}");
    let elsewhere: Vec<_> = asked.iter().filter(|url| !url.starts_with(&own) && !url.starts_with("data:")).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");

    // The gateway forgets its sessions, as at a restart: the next page says so and leads back.
    browser.delete_cookie("ibid_session").await.unwrap();
    let gone = "ibid_session=0000";
    browser.execute(&format!("document.cookie = '{gone}; path=/'"), Vec::new()).await.unwrap();
    browser.goto(&scene.url("/store")).await.unwrap();
    browser.reads("Your session has ended").await;
    browser.type_into("#token", VIEWER).await;
    browser.press("Log in").await;
    browser.reads("Survives a crash").await;
    browser.press("Log out").await;
    browser.reads("You are logged out.").await;
}

#[tokio::test]
async fn everything_works_without_scripts() {
    let scene = Scene::filled().await;
    let browser = Browser::start(Scripts::Off).await;
    log_in(&browser, &scene, ADMIN).await;
    browser.reads("Needs somebody").await;
    browser.press("The last 10m in numbers").await;
    browser.reads("Overhead p50").await;
    let charts = browser.find_all(fantoccini::Locator::Css("canvas")).await.unwrap();
    assert!(charts.is_empty(), "scripts are on");
    resolve(&browser, &scene).await;
}
