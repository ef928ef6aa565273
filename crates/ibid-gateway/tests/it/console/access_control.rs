//! Who gets in, and what a page does in whose name.

use testbed::client::{get, post, request};

use super::common::{ADMIN, ConsoleGateway, PageClient, UNKNOWN_KEY, USER, VIEWER};

#[tokio::test]
async fn a_stranger_sees_the_log_in_and_nothing_else() {
    let scene = ConsoleGateway::start_filled().await;
    let stranger = PageClient::anonymous(scene.admin());
    let lost = scene.address(UNKNOWN_KEY).await;
    let record = format!("/records/{lost}");
    for path in
        ["/", "/series", "/records?state=unknown", &record, "/unknown", "/policies", "/shadow", "/store", "/audit"]
    {
        let answer = stranger.get(path).await;
        assert_eq!(answer.status, 303, "{path}");
        assert!(answer.header("location").is_some_and(|place| place.starts_with("/login")), "{path}: {answer:?}");
        assert!(answer.text().is_empty(), "{path}");
    }
    let answer = stranger.get("/records?state=unknown").await;
    assert_eq!(answer.header("location"), Some("/login?next=%2Frecords%3Fstate%3Dunknown"));
    let part = get(scene.admin(), "/").header("HX-Request", "true").send().await;
    assert_eq!((part.status, part.header("hx-redirect")), (401, Some("/login")));
    let mut stranger = stranger;
    let answer = stranger.post_form(&format!("{record}/forget"), &[("reason", "r"), ("step", "commit")]).await;
    assert_eq!(answer.status, 303);
    assert_eq!(scene.log_in(ADMIN).await.get(&record).await.status, 200, "it is still there");
}

#[tokio::test]
async fn a_log_in_goes_on_to_the_page_that_was_wanted_and_never_elsewhere() {
    let scene = ConsoleGateway::start_empty().await;
    for (next, place) in [("/records?state=unknown", "/records?state=unknown"), ("//evil.example/", "/"), ("", "/")] {
        let mut reader = PageClient::anonymous(scene.admin());
        let answer = reader.post_form("/login", &[("token", ADMIN), ("next", next)]).await;
        assert_eq!((answer.status, answer.header("location")), (303, Some(place)), "{next}");
        let cookie = answer.header("set-cookie").expect("a cookie");
        for word in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age="] {
            assert!(cookie.contains(word), "{cookie}");
        }
        assert!(!cookie.contains(ADMIN), "the token is not in the cookie");
    }
}

/// Of somebody who is not known little is read: a token, and nothing more.
#[tokio::test]
async fn a_stranger_takes_up_no_memory() {
    let scene = ConsoleGateway::start_filled().await;
    let mut stranger = PageClient::anonymous(scene.admin());
    let long = "x".repeat(64 << 10);
    let answer = stranger.post_form("/login", &[("token", &long)]).await;
    assert_eq!(answer.status, 413, "{answer:?}");
    assert!(answer.text().contains("larger than 16 KiB"), "{}", answer.text());
    let forget = format!("/records/{}/forget", scene.address(UNKNOWN_KEY).await);
    let answer = stranger.post_form(&forget, &[("reason", &long)]).await;
    assert_eq!(answer.status, 303, "to the log-in: {answer:?}");
    let mut admin = scene.log_in(ADMIN).await;
    assert_eq!(
        admin.post_form(&forget, &[("reason", &long)]).await.status,
        403,
        "read, and without its secret refused"
    );
    let answer = admin.post_form(&forget, &[("reason", &"x".repeat(2 << 20))]).await;
    assert_eq!(answer.status, 413, "{answer:?}");
    assert!(answer.text().contains("1 MiB") && answer.text().contains("ibid keys resolve"), "{}", answer.text());
}

#[tokio::test]
async fn wrong_tokens_are_told_so_and_limited() {
    let scene = ConsoleGateway::start_empty().await;
    let mut reader = PageClient::anonymous(scene.admin());
    let answer = reader.post_form("/login", &[("token", "nonsense")]).await;
    assert_eq!(answer.status, 401);
    assert!(answer.text().contains("That is none of this gateway&#39;s tokens."), "{}", answer.text());
    assert!(answer.header("set-cookie").is_none());
    assert_eq!(reader.post_form("/login", &[("token", " ")]).await.status, 401);
    let mut limited = None;
    for nth in 0..100 {
        let answer = reader.post_form("/login", &[("token", "nonsense")]).await;
        if answer.status == 429 {
            limited = Some((nth, answer));
            break;
        }
    }
    let (nth, answer) = limited.expect("a hundred are too many");
    assert!(nth >= 28, "30 a minute are allowed, not {nth}");
    assert!(answer.header("retry-after").is_some() && answer.text().contains("Too many log-ins"), "{answer:?}");
}

#[tokio::test]
async fn a_viewer_sees_everything_and_changes_nothing() {
    let scene = ConsoleGateway::start_filled().await;
    let lost = scene.address(UNKNOWN_KEY).await;
    let mut viewer = scene.log_in(VIEWER).await;
    let page = viewer.get_page(&format!("/records/{lost}")).await;
    assert!(page.contains(UNKNOWN_KEY) && page.contains("Changes by operators"));
    assert!(!page.contains(">Resolve<") && !page.contains(&format!("{lost}/resolve")), "no buttons");
    for action in ["resolve", "release", "forget"] {
        let answer = viewer.get(&format!("/records/{lost}/{action}")).await;
        assert_eq!(answer.status, 403, "{action}");
        assert!(answer.text().contains("You may look, and not change"));
        let page = viewer.get_page("/audit").await;
        let csrf =
            page.split("name=\"csrf\" value=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap().to_owned();
        let fields =
            [("csrf", csrf.as_str()), ("reason", "r"), ("step", "commit"), ("seen", "1"), ("as", "not-executed")];
        assert_eq!(viewer.post_form(&format!("/records/{lost}/{action}"), &fields).await.status, 403, "{action}");
    }
    assert_eq!(scene.pay("lost", UNKNOWN_KEY, 1).send().await.status, 409, "still unknown");
}

#[tokio::test]
async fn a_user_sees_its_own_records_and_nothing_else() {
    let scene = ConsoleGateway::start_filled().await;
    let (own, other) = (scene.address("order-0-pay").await, scene.address("order-1-pay").await);
    let user = scene.log_in(USER).await;
    assert_eq!(user.get("/").await.header("location"), Some("/records"));
    let page = user.get_page("/records").await;
    assert!(page.contains("order-0-pay") && !page.contains("order-1-pay"), "{page}");
    assert!(!page.contains("href=\"/audit\"") && !page.contains("href=\"/store\""), "no way to where it may not go");
    let page = user.get_page("/records?user=user-2").await;
    assert!(!page.contains("order-1-pay"), "asking for another user's changes nothing");
    let page = user.get_page(&format!("/records/{own}")).await;
    assert!(page.contains("pay_0") && !page.contains("Changes by operators") && !page.contains("Forget"), "{page}");
    let hidden = user.get(&format!("/records/{other}")).await;
    assert_eq!(hidden.status, 404);
    let absent = user.get(&format!("/records/{}", "0".repeat(64))).await;
    assert_eq!(hidden.text(), absent.text(), "whether it exists is not said");
    for path in ["/unknown", "/policies", "/shadow", "/store", "/audit", "/series", &format!("/records/{own}/forget")] {
        assert_eq!(user.get(path).await.status, 403, "{path}");
    }
}

#[tokio::test]
async fn a_form_of_another_page_changes_nothing() {
    let scene = ConsoleGateway::start_filled().await;
    let lost = scene.address(UNKNOWN_KEY).await;
    let path = format!("/records/{lost}/forget");
    let admin = scene.log_in(ADMIN).await;
    let page = admin.get_page(&path).await;
    let value = |name: &str| {
        let rest = page.split(&format!("name=\"{name}\" value=\"")).nth(1).expect("it is in the form");
        rest.split('"').next().unwrap().to_owned()
    };
    let (csrf, seen) = (value("csrf"), value("seen"));
    let own = format!("http://{}", scene.admin());
    let fields = |csrf: &str| {
        let fields = [("csrf", csrf), ("seen", seen.as_str()), ("reason", "r"), ("step", "commit")];
        fields.map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    for (what, csrf, origin, site) in [
        ("another site", csrf.as_str(), "http://evil.example", "cross-site"),
        ("another port", csrf.as_str(), "http://127.0.0.1:1", "same-site"),
        ("no secret", "", own.as_str(), "same-origin"),
        ("another secret", "0000", own.as_str(), "same-origin"),
    ] {
        let fields = fields(csrf);
        let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let request = admin.form(&path, &fields).header("Origin", origin).header("Sec-Fetch-Site", site);
        let answer = request.send().await;
        assert_eq!(answer.status, 403, "{what}: {answer:?}");
        assert!(answer.text().contains("Nothing was changed."), "{what}");
    }
    assert_eq!(admin.get(&format!("/records/{lost}")).await.status, 200, "it is still there");
    let login = PageClient::anonymous(scene.admin()).form("/login", &[("token", ADMIN)]);
    let login = login.header("Origin", "http://evil.example").send().await;
    assert_eq!((login.status, login.header("set-cookie")), (403, None), "nobody is logged in by another page");
}

#[tokio::test]
async fn what_is_not_a_form_or_not_understood_is_refused_plainly() {
    let scene = ConsoleGateway::start_empty().await;
    let at = scene.admin();
    let answer = post(at, "/login").json(r#"{"token":"x"}"#).send().await;
    assert_eq!(answer.status, 415);
    let long = post(at, "/login").header("Content-Type", "application/x-www-form-urlencoded").body(vec![b'a'; 2 << 20]);
    assert_eq!(long.send().await.status, 413);
    for (method, path, allow) in [
        ("DELETE", "/records", "GET"),
        ("POST", "/", "GET"),
        ("PUT", "/login", "GET, POST"),
        ("GET", "/logout", "POST"),
    ] {
        let answer = request(method, at, path).send().await;
        assert_eq!((answer.status, answer.header("allow")), (405, Some(allow)), "{method} {path}");
    }
    for path in ["/records/xyz", "/records/../api", "/assets/../Cargo.toml", "/assets/none.js", "/nowhere"] {
        assert_eq!(get(at, path).send().await.status, 404, "{path}");
    }
}
