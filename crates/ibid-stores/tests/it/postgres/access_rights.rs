//! Who sees and may do what: row-level security, grants, and the function that cleans up.

use std::{sync::Arc, time::Duration};

use ibid::store::{ClaimRequest, Store, Tags};
use testbed::TestPostgres;

use super::common::{claim_granted, claim_request, database, open};

async fn with_rows() -> (&'static TestPostgres, String) {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = open(&server.url("gateway", &name)).await;
    for user in ["u1", "u1", "u2", ""] {
        let tags = Tags::new("acme", user, "POST /payments", "k");
        claim_granted(&store, &Arc::new(ClaimRequest { tags, ..ClaimRequest::clone(&claim_request()) })).await;
    }
    (server, name)
}

#[tokio::test]
async fn there_are_exactly_three_policies_and_they_are_forced() {
    let (server, name) = with_rows().await;
    let policies = "SELECT string_agg(policyname, ' ' ORDER BY policyname) FROM pg_policies WHERE schemaname = 'ibid'";
    assert_eq!(
        server.sql(&name, policies),
        "admins_view_all_idempotency_keys service_role_insert_idempotency_keys users_own_idempotency_keys"
    );
    let forced =
        "SELECT relrowsecurity, relforcerowsecurity FROM pg_class WHERE oid = 'ibid.idempotency_keys'::regclass";
    assert_eq!(server.sql(&name, forced), "t|t");
    let role = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = 'gateway'";
    assert_eq!(server.sql(&name, role), "f", "the store itself is bound by them");
}

#[tokio::test]
async fn a_user_sees_its_own_rows_and_nothing_else() {
    let (server, name) = with_rows().await;
    let count = "SELECT count(*) FROM ibid.idempotency_keys";
    let refused = server.sql_as("alice", &name, count).unwrap_err();
    assert!(refused.contains("permission denied"), "{refused}");
    server.sql(
        &name,
        "GRANT USAGE ON SCHEMA ibid TO alice; GRANT SELECT, UPDATE, DELETE ON ibid.idempotency_keys TO alice",
    );
    let sees = |user: &str| server.sql_as("alice", &name, &format!("SET ibid.user_id = '{user}'; {count}")).unwrap();
    assert_eq!(server.sql_as("alice", &name, count).unwrap(), "0", "nobody said who asks");
    assert_eq!((sees("u1"), sees("u2"), sees("u3"), sees("")), ("2".into(), "1".into(), "0".into(), "0".into()));
    // Even with grants, policies let nobody but the service write.
    let change = "SET ibid.user_id = 'u1'; WITH gone AS (DELETE FROM ibid.idempotency_keys RETURNING 1) SELECT count(*) FROM gone";
    assert_eq!(server.sql_as("alice", &name, change).unwrap(), "0");
    assert_eq!(server.sql(&name, count), "4");
}

#[tokio::test]
async fn an_administrator_sees_all_and_changes_nothing() {
    let (server, name) = with_rows().await;
    assert_eq!(server.sql_as("auditor", &name, "SELECT count(*) FROM ibid.idempotency_keys").unwrap(), "4");
    for change in [
        "DELETE FROM ibid.idempotency_keys",
        "UPDATE ibid.idempotency_keys SET state = 'free'",
        "SELECT ibid.cleanup_old_idempotency_keys()",
    ] {
        let refused = server.sql_as("auditor", &name, change).unwrap_err();
        assert!(refused.contains("permission denied"), "{change}: {refused}");
    }
}

#[tokio::test]
async fn a_role_that_is_not_of_the_service_is_told_what_to_grant() {
    let (server, name) = with_rows().await;
    server.sql("postgres", "DO $$ BEGIN CREATE ROLE stranger LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$");
    let store = open(&server.url("stranger", &name)).await;
    let why = store.claim(&claim_request()).await.unwrap_err().to_string();
    assert!(why.contains("GRANT ibid_service TO \"stranger\""), "{why}");
}

#[tokio::test]
async fn cleaning_up_removes_what_has_expired_and_says_how_many() {
    let (server, name) = with_rows().await;
    let store = open(&server.url("gateway", &name)).await;
    for _ in 0..3 {
        let short = ClaimRequest {
            lease: Duration::from_millis(1),
            ttl: Duration::from_millis(1),
            ..ClaimRequest::clone(&claim_request())
        };
        claim_granted(&store, &Arc::new(short)).await;
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    let clean = |call: &str| server.sql_as("gateway", &name, &format!("SELECT {call}")).unwrap();
    assert_eq!(clean("ibid.cleanup_old_idempotency_keys(1)"), "1");
    assert_eq!(clean("cleanup_old_idempotency_keys()"), "2");
    assert_eq!(clean("cleanup_old_idempotency_keys()"), "0");
    assert_eq!(server.sql(&name, "SELECT count(*) FROM ibid.idempotency_keys"), "4");
}
