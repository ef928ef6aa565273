//! Log-ins that fail.

use super::common::{ADMIN_TOKEN, VIEWER_TOKEN, assert_problem};
use crate::support::TestGateway;

#[tokio::test]
async fn failed_log_ins_are_limited_and_never_below_thirty_a_minute() {
    let office = TestGateway::with_operators().await;
    assert_eq!(office.admin_get(VIEWER_TOKEN, "/api/records").await.status, 200);
    // Who shows nothing guesses nothing.
    for _ in 0..50 {
        assert_eq!(office.admin_get("", "/api/records").await.status, 401);
    }
    for nth in 0..30 {
        let answer = office.admin_get(&format!("guess-{nth}"), "/api/records").await;
        assert_eq!(answer.status, 401, "{nth}: {answer:?}");
    }
    let mut limited = None;
    for nth in 0..100 {
        let answer = office.admin_get(&format!("guess-{nth}"), "/api/records").await;
        if answer.status == 429 {
            limited = Some(answer);
            break;
        }
        assert_eq!(answer.status, 401, "{answer:?}");
    }
    let limited = limited.expect("it ends");
    assert_problem(&limited, 429, "have failed");
    let after: u64 = limited.header("retry-after").expect("it says when").parse().expect("seconds");
    assert!((1..=60).contains(&after), "{after}");
    // A token that was never seen from here might be a guess; one that was is not.
    for _ in 0..3 {
        let _ = office.admin_get("guess", "/api/records").await;
        assert_eq!(office.admin_get(VIEWER_TOKEN, "/api/records").await.status, 200);
    }
    for path in ["/healthz", "/metrics"] {
        assert_eq!(office.admin_get("", path).await.status, 200, "{path}");
    }
    let later = async {
        loop {
            let answer = office.admin_get(ADMIN_TOKEN, "/api/records").await;
            if answer.status == 200 {
                return;
            }
            assert_eq!(answer.status, 429, "{answer:?}");
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), later).await.expect("it is let in again");
}
