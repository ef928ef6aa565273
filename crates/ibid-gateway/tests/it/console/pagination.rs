//! Long lists, page by page: forward, and the same way back.

use serde_json::Value;
use testbed::client::request;

use super::common::{ADMIN, ConsoleGateway, PageClient, UNKNOWN_KEY, link};

/// The addresses of the records on a page, in its order.
fn page_addresses(page: &str) -> Vec<String> {
    let rows = page.split("<tbody>").nth(1).unwrap_or_default();
    rows.split("href=\"/records/").skip(1).map(|rest| rest[..64].to_owned()).collect()
}

/// Turns pages until there is none in that direction. Each is what it was when it was first seen.
async fn follow_pages(reader: &PageClient, from: &str, rel: &str, most: usize) -> Vec<(String, Vec<String>)> {
    let (mut pages, mut here) = (Vec::new(), Some(from.to_owned()));
    while let Some(path) = here {
        let page = reader.get_page(&path).await;
        assert!(pages.len() < most, "it ends");
        here = link(&page, rel);
        pages.push((path, page_addresses(&page)));
    }
    pages
}

async fn make_payments(scene: &ConsoleGateway, many: usize) {
    for nth in 0..many {
        assert_eq!(scene.pay("any", &format!("key-{nth}"), 1 + nth % 2).send().await.status, 201);
    }
}

#[tokio::test]
async fn records_are_turned_forward_and_back_with_what_was_searched_for() {
    let scene = ConsoleGateway::start_empty().await;
    make_payments(&scene, 230).await;
    let reader = scene.log_in(ADMIN).await;
    for (start, lengths) in
        [("/records", &[50, 50, 50, 50, 30][..]), ("/records?user=user-1&state=done", &[50, 50, 15])]
    {
        let forward = follow_pages(&reader, start, "next", 10).await;
        assert_eq!(forward.iter().map(|(_, rows)| rows.len()).collect::<Vec<_>>(), lengths);
        let mut back = follow_pages(&reader, &forward.last().unwrap().0, "prev", 10).await;
        back.reverse();
        let rows = |pages: &[(String, Vec<String>)]| pages.iter().map(|(_, rows)| rows.clone()).collect::<Vec<_>>();
        assert_eq!(rows(&back), rows(&forward), "the same pages");
        let first = reader.get_page(start).await;
        assert!(link(&first, "prev").is_none() && !first.contains(">First</a>"));
        let last = reader.get_page(&forward.last().unwrap().0).await;
        assert!(last.contains(">First</a>") && link(&last, "next").is_none());
    }
    // An address that was made up is told so, and leads nowhere else.
    let wrong = reader.get("/records?cursor=x&back=%22%3E%3Cscript%3E").await;
    assert_eq!(wrong.status, 400);
    assert!(!wrong.text().contains("<script>\">") && !wrong.text().contains("\"><script>"));
    let many = format!("/records?cursor={}{}", "0".repeat(64), format!("&back={}", "1".repeat(64)).repeat(60));
    let page = reader.get_page(&many).await;
    assert!(link(&page, "prev").is_some_and(|previous| previous.len() < 2000), "it does not grow");
}

#[tokio::test]
async fn the_audit_trail_is_turned_back_and_forth() {
    let scene = ConsoleGateway::start_empty().await;
    make_payments(&scene, 120).await;
    let reader = scene.log_in(ADMIN).await;
    let records = follow_pages(&reader, "/records", "next", 10).await;
    for address in records.iter().flat_map(|(_, rows)| rows) {
        let asked = request("POST", scene.admin(), format!("/api/records/{address}/forget"));
        let asked = asked.header("Authorization", format!("Bearer {ADMIN}")).json(r#"{"reason":"to be run again"}"#);
        assert_eq!(asked.send().await.status, 200);
    }
    let earlier = follow_pages(&reader, "/audit", "next", 10).await;
    assert_eq!(earlier.iter().map(|(_, rows)| rows.len()).collect::<Vec<_>>(), [50, 50, 20]);
    let mut later = follow_pages(&reader, &earlier.last().unwrap().0, "prev", 10).await;
    later.reverse();
    assert_eq!(later, earlier, "the same pages");
    assert!(reader.get_page(&earlier[1].0).await.contains(">Latest</a>"));
}

/// The form has what the API has.
#[tokio::test]
async fn an_operator_says_how_long_an_answer_is_kept() {
    let scene = ConsoleGateway::start_filled().await;
    let mut reader = scene.log_in(ADMIN).await;
    let address = scene.address(UNKNOWN_KEY).await;
    let form = reader.get_page(&format!("/records/{address}/resolve")).await;
    assert!(form.contains("empty: 24h, as long as the record would have lived"), "{form}");
    let answer = [("as", "done"), ("status", "201"), ("reason", "the bank has it")];
    let wrong = reader.submit_form(&form, &[&answer[..], &[("keep", "for ever")]].concat()).await;
    assert_eq!(wrong.status, 400);
    assert!(wrong.text().contains("Keep: &#34;for ever&#34; is no duration"), "{}", wrong.text());
    assert!(wrong.text().contains("value=\"for ever\""), "what was typed is still there");
    let look = reader.submit_form(&form, &[&answer[..], &[("keep", "50h")]].concat()).await.text();
    assert!(look.contains("<dt>Kept for</dt><dd>50h</dd>"), "{look}");
    assert_eq!(reader.submit_form(&look, &[]).await.status, 303);
    let asked = request("GET", scene.admin(), format!("/api/records/{address}"));
    let record: Value = asked.header("Authorization", format!("Bearer {ADMIN}")).send().await.json();
    let left = record["expires_in_ms"].as_u64().expect("a number");
    assert!((49 * 3_600_000..=50 * 3_600_000).contains(&left), "{record:#}");
}
