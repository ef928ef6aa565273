//! Pictures of the console, for people who want to see it: `scripts/screenshots [DIR]`.

use std::{path::Path, sync::Arc, time::Duration};

use testbed::upstream::{UpstreamFault, UpstreamReply};
use tokio::time::{Instant, sleep};

use super::{
    browser::{ConsoleBrowser, ScriptSetting},
    common::{ADMIN, ConsoleGateway, UNKNOWN_KEY, link},
};

/// Long enough for charts that have something to show.
const TRAFFIC_DURATION: Duration = Duration::from_secs(75);

/// Clients that pay, retry, collide, and sometimes reuse a key or lose an answer.
async fn generate_traffic(scene: &ConsoleGateway) {
    scene.upstream.on("/payments/slow", UpstreamReply::usual().delay(Duration::from_millis(400)));
    scene.upstream.on("/payments/gone", UpstreamFault::CloseWithoutReply);
    let until = Instant::now() + TRAFFIC_DURATION;
    let mut nth = 0_u64;
    while Instant::now() < until {
        nth += 1;
        let key = format!("order-{}-pay", 1000 + nth);
        let users = 1 + (nth % 7) as usize;
        scene.pay(&format!("{nth}"), &key, users).send().await;
        // Waves, so that a chart has a shape.
        let calm = 12.0 + 10.0 * (nth as f64 / 90.0).sin();
        if nth.is_multiple_of(9) {
            scene.pay(&format!("{nth}"), &key, users).send().await;
        }
        if nth.is_multiple_of(40) {
            let key = format!("{key}-slow");
            let (first, second) = (scene.pay("slow", &key, 9), scene.pay("slow", &key, 9));
            tokio::join!(first.send(), async {
                sleep(Duration::from_millis(60)).await;
                second.send().await
            });
        }
        if nth.is_multiple_of(150) {
            scene.pay_amount(2, &format!("{nth}"), &key, users).send().await;
        }
        if nth.is_multiple_of(600) {
            scene.pay("gone", &format!("order-{}-refund", 1000 + nth), users).send().await;
        }
        sleep(Duration::from_millis(calm as u64)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "makes pictures for people to look at; scripts/screenshots runs it"]
async fn pictures_of_a_gateway_at_work() {
    let folder = std::env::var("IBID_SCREENSHOTS").expect("the folder for the pictures, in IBID_SCREENSHOTS");
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder).unwrap();
    let scene = Arc::new(ConsoleGateway::start_filled().await);
    generate_traffic(&scene).await;
    // One whose key was used for another payment, too.
    let (lost, done) = (scene.address(UNKNOWN_KEY).await, scene.address("order-1150-pay").await);
    for (key, action, reason) in [
        ("order-1600-refund", "release", "OPS-311: the bank has no such refund"),
        ("order-1009-pay", "forget", "OPS-312: paid by card instead, to be run again"),
    ] {
        let path = format!("/records/{}/{action}", scene.address(key).await);
        let mut reader = scene.log_in(ADMIN).await;
        let form = reader.get_page(&path).await;
        let look = reader.submit_form(&form, &[("reason", reason)]).await.text();
        assert_eq!(reader.submit_form(&look, &[]).await.status, 303, "{key}");
    }
    let reader = scene.log_in(ADMIN).await;
    let second = link(&reader.get_page("/records").await, "next").expect("there are more than fit on a page");
    let browser = ConsoleBrowser::start(ScriptSetting::On).await;
    let pages = [
        ("overview", "/".to_owned()),
        ("recent", "/recent".into()),
        ("records", "/records".into()),
        ("records-2", second.clone()),
        ("records-end", second.clone()),
        ("record", format!("/records/{done}")),
        ("record-unknown", format!("/records/{lost}")),
        ("resolve", format!("/records/{lost}/resolve")),
        ("unknown", "/unknown".into()),
        ("policies", "/policies".into()),
        ("shadow", "/shadow".into()),
        ("store", "/store".into()),
        ("audit", "/audit".into()),
    ];
    for (look, width, height, phone, scheme) in
        [("light", 1360, 900, false, "light"), ("dark", 1360, 900, false, "dark"), ("phone", 390, 844, true, "light")]
    {
        browser.set_screen_size(width, height, phone).await;
        browser.set_color_scheme(scheme).await;
        browser.delete_all_cookies().await.unwrap();
        browser.goto(&scene.url("/login")).await.unwrap();
        save_screenshot(&browser, &folder.join(format!("login-{look}.png"))).await;
        browser.type_into("#token", ADMIN).await;
        browser.click_text("Log in").await;
        browser.wait_for_element("main h1").await;
        for (name, path) in &pages {
            browser.goto(&scene.url(path)).await.unwrap();
            browser.wait_for_element("main h1").await;
            if *name == "overview" {
                browser.wait_for_element("[data-chart=overhead] canvas").await;
            }
            if *name == "records-end" {
                browser.execute("scrollTo(0, document.body.scrollHeight)", Vec::new()).await.unwrap();
            }
            sleep(Duration::from_millis(400)).await;
            save_screenshot(&browser, &folder.join(format!("{name}-{look}.png"))).await;
        }
    }
}

async fn save_screenshot(browser: &ConsoleBrowser, path: &Path) {
    std::fs::write(path, browser.screenshot().await.unwrap()).unwrap();
}
