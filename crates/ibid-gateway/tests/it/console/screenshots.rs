//! Pictures of the console, for people who want to see it: `scripts/screenshots [DIR]`.

use std::{path::Path, sync::Arc, time::Duration};

use ibid_testkit::upstream::{Fault, Reply};
use tokio::time::{Instant, sleep};

use super::{
    browser::{Browser, Scripts},
    kit::{ADMIN, LOST, Scene, link},
};

/// Long enough for charts that have something to show.
const LIVELY: Duration = Duration::from_secs(75);

/// Clients that pay, retry, collide, and sometimes reuse a key or lose an answer.
async fn bustle(scene: &Scene) {
    scene.upstream.on("/payments/slow", Reply::usual().delay(Duration::from_millis(400)));
    scene.upstream.on("/payments/gone", Fault::CloseWithoutReply);
    let until = Instant::now() + LIVELY;
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
    let scene = Arc::new(Scene::filled().await);
    bustle(&scene).await;
    // One whose key was used for another payment, too.
    let (lost, done) = (scene.address(LOST).await, scene.address("order-1150-pay").await);
    for (key, action, reason) in [
        ("order-1600-refund", "release", "OPS-311: the bank has no such refund"),
        ("order-1009-pay", "forget", "OPS-312: paid by card instead, to be run again"),
    ] {
        let path = format!("/records/{}/{action}", scene.address(key).await);
        let mut reader = scene.reader(ADMIN).await;
        let form = reader.read(&path).await;
        let look = reader.submit(&form, &[("reason", reason)]).await.text();
        assert_eq!(reader.submit(&look, &[]).await.status, 303, "{key}");
    }
    let reader = scene.reader(ADMIN).await;
    let second = link(&reader.read("/records").await, "next").expect("there are more than fit on a page");
    let browser = Browser::start(Scripts::On).await;
    let pages = [
        ("overview", "/".to_owned()),
        ("records", "/records".into()),
        ("records-2", second.clone()),
        ("records-end", second.clone()),
        ("record", format!("/records/{done}")),
        ("unknown", format!("/records/{lost}")),
        ("resolve", format!("/records/{lost}/resolve")),
        ("stuck", "/stuck".into()),
        ("policies", "/policies".into()),
        ("shadow", "/shadow".into()),
        ("store", "/store".into()),
        ("audit", "/audit".into()),
    ];
    for (look, width, height, phone, scheme) in
        [("light", 1360, 900, false, "light"), ("dark", 1360, 900, false, "dark"), ("phone", 390, 844, true, "light")]
    {
        browser.screen(width, height, phone).await;
        browser.prefers(scheme).await;
        browser.delete_all_cookies().await.unwrap();
        browser.goto(&scene.url("/login")).await.unwrap();
        picture(&browser, &folder.join(format!("login-{look}.png"))).await;
        browser.type_into("#token", ADMIN).await;
        browser.press("Log in").await;
        browser.see("main h1").await;
        for (name, path) in &pages {
            browser.goto(&scene.url(path)).await.unwrap();
            browser.see("main h1").await;
            if *name == "overview" {
                browser.see("[data-chart=overhead] canvas").await;
            }
            if *name == "records-end" {
                browser.execute("scrollTo(0, document.body.scrollHeight)", Vec::new()).await.unwrap();
            }
            sleep(Duration::from_millis(400)).await;
            picture(&browser, &folder.join(format!("{name}-{look}.png"))).await;
        }
    }
}

async fn picture(browser: &Browser, path: &Path) {
    std::fs::write(path, browser.screenshot().await.unwrap()).unwrap();
}
