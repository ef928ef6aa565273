//! On a phone, and by keyboard.

use super::{
    browser::{ConsoleBrowser, ScriptSetting},
    common::{ADMIN, ConsoleGateway, UNKNOWN_KEY},
};

#[tokio::test]
async fn no_page_is_wider_than_a_phone_and_the_keyboard_reaches_everything() {
    let scene = ConsoleGateway::start_filled().await;
    let lost = scene.address(UNKNOWN_KEY).await;
    let browser = ConsoleBrowser::start(ScriptSetting::On).await;
    browser.set_screen_size(390, 844, true).await;
    browser.goto(&scene.url("/login")).await.unwrap();
    let wide = "return document.documentElement.scrollWidth";
    assert!(browser.execute(wide, Vec::new()).await.unwrap().as_u64() <= Some(390), "/login");
    browser.type_into("#token", ADMIN).await;
    browser.click_text("Log in").await;
    browser.wait_for_text("Needs attention").await;
    let record = format!("/records/{lost}");
    let resolve = format!("/records/{lost}/resolve");
    for path in ["/", "/recent", "/records", &record, &resolve, "/unknown", "/policies", "/shadow", "/store", "/audit"]
    {
        browser.goto(&scene.url(path)).await.unwrap();
        browser.wait_for_element("main h1").await;
        let width = browser.execute(wide, Vec::new()).await.unwrap();
        assert!(width.as_u64() <= Some(390), "{path} is {width} wide");
        // Every field has a name, every table its heads, and there is one heading of the first order.
        let unnamed = "return [...document.querySelectorAll('input:not([type=hidden]), select, textarea:not([hidden])')] \
                       .filter((field) => !field.labels.length).map((field) => field.outerHTML)";
        let unnamed = browser.execute(unnamed, Vec::new()).await.unwrap();
        assert_eq!(unnamed, serde_json::json!([]), "{path}");
        let tables = "return [...document.querySelectorAll('table')].every((table) => table.caption && \
                      table.querySelector('th[scope=col]'))";
        assert_eq!(browser.execute(tables, Vec::new()).await.unwrap(), true, "{path}");
        let heads = browser.find_all(fantoccini::Locator::Css("h1")).await.unwrap();
        assert_eq!(heads.len(), 1, "{path}");
    }

    browser.goto(&scene.url("/records")).await.unwrap();
    let tab = serde_json::json!({ "type": "rawKeyDown", "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9 });
    browser.devtools_command("Input.dispatchKeyEvent", tab).await;
    let first = browser.active_element().await.unwrap();
    assert_eq!(first.text().await.unwrap(), "To the content", "the first stop skips the bar");
    assert!(first.rectangle().await.unwrap().0 >= 0.0, "it is seen while it has the focus");
    let outline = "return getComputedStyle(document.activeElement).outlineStyle";
    assert_eq!(browser.execute(outline, Vec::new()).await.unwrap(), "solid");
}
