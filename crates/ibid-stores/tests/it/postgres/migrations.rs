//! The schema: made once, removed whole, and never over what somebody else made.

use ibid::store::{ClaimOutcome, ClaimRequest, ErrorKind, Store, Tags};
use ibid_stores::{
    StoreSetupError,
    postgres::{MigrateAction, MigrateOptions, migrate, migrate_with},
};
use testbed::TestPostgres;

use super::common::{claim_granted, claim_request, competing_request, database, open, patient_options};

const SCHEMA_OBJECTS_SQL: &str = "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'ibid') \
    + (SELECT count(*) FROM pg_proc WHERE proname LIKE '%idempotency_keys%') \
    + (SELECT count(*) FROM pg_class WHERE relname LIKE '%idempotency_keys%')";

async fn migrate_as(url: &str, how: MigrateAction, rls_user: Option<&str>) -> Result<Vec<String>, StoreSetupError> {
    migrate_with(url, how, MigrateOptions { rls_user, ..MigrateOptions::default() }).await
}

#[tokio::test]
async fn the_second_time_there_is_nothing_to_do() {
    let server = TestPostgres::shared();
    let url = server.url("migrator", &server.create_database());
    let first = migrate(&url, MigrateAction::Up).await.unwrap();
    assert!(first.iter().any(|line| line == "applied 0001_tables"), "{first:?}");
    let second = migrate(&url, MigrateAction::Up).await.unwrap();
    assert_eq!(second, ["the schema is of version 6: nothing to do"]);
    assert_eq!(migrate(&url, MigrateAction::DryRun).await.unwrap(), [format!("-- {}", second[0])]);
}

#[tokio::test]
async fn a_dry_run_says_what_it_would_do_and_changes_nothing() {
    let server = TestPostgres::shared();
    let name = server.create_database();
    let would = migrate(&server.url("migrator", &name), MigrateAction::DryRun).await.unwrap();
    assert!(would.iter().any(|sql| sql.contains("CREATE TABLE ibid.idempotency_keys")), "{would:?}");
    assert_eq!(server.sql(&name, SCHEMA_OBJECTS_SQL), "0");
}

/// The file makes the roles, the schema, its comments and its grants, and is then known as a migration.
#[tokio::test]
async fn what_a_dry_run_prints_is_a_file_that_psql_runs() {
    let server = TestPostgres::start();
    server.sql("postgres", "DROP ROLE gateway, auditor, ibid_service, ibid_admin");
    let name = server.create_database();
    let url = server.url("migrator", &name);
    let file =
        migrate_as(&url, MigrateAction::DryRun, Some("current_setting('app.user', true)")).await.unwrap().join("\n");
    assert_eq!(server.sql(&name, SCHEMA_OBJECTS_SQL), "0");
    let sql = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(sql.path(), &file).unwrap();
    server.sql_file("migrator", &name, sql.path()).unwrap();
    let again = server.sql_file("migrator", &name, sql.path()).unwrap_err();
    assert!(again.contains("already exists"), "{again}");
    assert_eq!(migrate(&url, MigrateAction::Up).await.unwrap(), ["the schema is of version 6: nothing to do"]);
    assert_eq!(server.sql(&name, "SELECT count(*) FROM pg_roles WHERE rolname IN ('ibid_service', 'ibid_admin')"), "2");
    server.sql("postgres", "CREATE ROLE gateway LOGIN IN ROLE ibid_service");
    claim_granted(&open(&server.url("gateway", &name)).await, &claim_request()).await;
    // What it makes is what a migration makes.
    let other = server.create_database();
    migrate_as(&server.url("migrator", &other), MigrateAction::Up, Some("current_setting('app.user', true)"))
        .await
        .unwrap();
    let made = "SELECT string_agg(d, E'\\n' ORDER BY d) FROM (
        SELECT polname || pg_get_expr(polqual, polrelid) || polroles::regrole[]::text FROM pg_policy
        UNION ALL SELECT relname || coalesce(relacl::text, '') || coalesce(obj_description(oid, 'pg_class'), '')
            FROM pg_class WHERE relnamespace = 'ibid'::regnamespace
        UNION ALL SELECT oid::regprocedure::text || md5(prosrc) || coalesce(proacl::text, '') FROM pg_proc
            WHERE pronamespace = 'ibid'::regnamespace OR proname = 'cleanup_old_idempotency_keys') AS all_of_it(d)";
    assert_eq!(server.sql(&name, made), server.sql(&other, made));
}

#[tokio::test]
async fn the_user_of_row_level_security_is_an_expression_of_ones_own() {
    let server = TestPostgres::shared();
    let name = database(server);
    let url = server.url("migrator", &name);
    server.sql(
        &name,
        "CREATE SCHEMA auth; CREATE FUNCTION auth.uid() RETURNS uuid LANGUAGE sql STABLE \
         AS $$ SELECT nullif(current_setting('request.sub', true), '')::uuid $$; \
         GRANT USAGE ON SCHEMA auth, ibid TO PUBLIC; GRANT SELECT ON ibid.idempotency_keys TO PUBLIC",
    );
    let user = "550e8400-e29b-41d4-a716-446655440000";
    let store = open(&server.url("gateway", &name)).await;
    for of in [user, "somebody-else"] {
        let ask =
            ClaimRequest { tags: Tags::new("acme", of, "POST /pay", "k"), ..ClaimRequest::clone(&claim_request()) };
        claim_granted(&store, &ask.into()).await;
    }
    let changed = migrate_as(&url, MigrateAction::Up, Some("auth.uid()")).await.unwrap();
    assert_eq!(changed, ["users_own_idempotency_keys shows the rows of auth.uid()"]);
    for how in [None, Some("auth.uid()")] {
        assert_eq!(
            migrate_as(&url, MigrateAction::Up, how).await.unwrap(),
            ["the schema is of version 6: nothing to do"],
            "{how:?}"
        );
    }
    server.sql("postgres", &format!("CREATE ROLE reader_of_{name}"));
    let seen = |sub: &str| {
        let sql =
            format!("SET ROLE reader_of_{name}; SET request.sub = '{sub}'; SELECT user_id FROM ibid.idempotency_keys");
        server.sql(&name, &sql).lines().last().unwrap_or_default().to_owned()
    };
    assert_eq!(seen(user), user);
    assert_ne!(seen(""), user);
    let why = migrate_as(&url, MigrateAction::Up, Some("no_such()")).await.unwrap_err().to_string();
    assert!(why.contains("store.rls_user") && why.contains("nothing was changed"), "{why}");
}

#[tokio::test]
async fn down_removes_all_and_up_brings_it_back_under_an_open_store() {
    let server = TestPostgres::shared();
    let name = database(server);
    let (store, url) = (open(&server.url("gateway", &name)).await, server.url("migrator", &name));
    let ask = claim_request();
    claim_granted(&store, &ask).await;
    migrate(&url, MigrateAction::Down).await.unwrap();
    assert_eq!(server.sql(&name, SCHEMA_OBJECTS_SQL), "0");
    assert_eq!(migrate(&url, MigrateAction::Down).await.unwrap(), ["there is no schema ibid"]);
    let refused = store.claim(&ask).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Rejected, "{refused}");
    migrate(&url, MigrateAction::Up).await.unwrap();
    claim_granted(&store, &competing_request(&ask)).await;
}

#[tokio::test]
async fn what_others_made_is_refused_and_left_alone() {
    let server = TestPostgres::shared();
    for theirs in ["CREATE TABLE ibid.idempotency_keys (id int)", "CREATE TABLE ibid.migrations (version int)"] {
        let name = server.create_database();
        server.sql(&name, &format!("CREATE SCHEMA ibid AUTHORIZATION migrator; {theirs}"));
        for how in [MigrateAction::Up, MigrateAction::DryRun, MigrateAction::Down] {
            let why = migrate(&server.url("migrator", &name), how).await.unwrap_err().to_string();
            assert!(why.contains("did not make") && why.contains("nothing was changed"), "{why}");
        }
        let left =
            "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = 'ibid'";
        assert_eq!(server.sql(&name, left), "1");
    }
}

#[tokio::test]
async fn an_empty_schema_made_beforehand_is_welcome() {
    let server = TestPostgres::shared();
    let name = server.create_database();
    server.sql(&name, "CREATE SCHEMA ibid AUTHORIZATION migrator");
    migrate(&server.url("migrator", &name), MigrateAction::Up).await.unwrap();
    claim_granted(&open(&server.url("gateway", &name)).await, &claim_request()).await;
}

#[tokio::test]
async fn of_several_at_the_same_time_one_does_the_work() {
    let server = TestPostgres::shared();
    let url = server.url("migrator", &server.create_database());
    let up = || migrate(&url, MigrateAction::Up);
    let (a, b, c) = tokio::join!(up(), up(), up());
    let worked = [a, b, c].map(|report| report.unwrap().len() > 1);
    assert_eq!(worked.iter().filter(|worked| **worked).count(), 1, "{worked:?}");
}

/// Gateways of this version continue on a later schema if its migrations allow that.
#[tokio::test]
async fn a_later_schema_is_refused_where_it_says_so() {
    let server = TestPostgres::shared();
    let name = database(server);
    let later = |reader: i32| {
        let row =
            format!("VALUES (99, 'later', {reader}) ON CONFLICT (version) DO UPDATE SET oldest_reader = {reader}");
        server.sql(&name, &format!("INSERT INTO ibid.migrations (version, name, oldest_reader) {row}"));
    };
    later(6);
    for how in [MigrateAction::Up, MigrateAction::Down] {
        let why = migrate(&server.url("migrator", &name), how).await.unwrap_err().to_string();
        assert!(why.contains("version 99, and this ibid knows up to 6; use the later ibid"), "{why}");
    }
    assert!(matches!(
        open(&server.url("gateway", &name)).await.claim(&claim_request()).await,
        Ok(ClaimOutcome::Granted(_))
    ));
    later(7);
    let why =
        ibid_stores::postgres::Postgres::open(&server.url("gateway", &name), patient_options()).await.err().unwrap();
    assert!(why.to_string().contains("version 99, and this ibid reads up to version 6; use the ibid that"), "{why}");
}

#[tokio::test]
async fn roles_are_made_where_that_is_allowed_and_asked_for_where_not() {
    let server = TestPostgres::start();
    server.sql("postgres", "DROP ROLE gateway, auditor, ibid_service, ibid_admin; CREATE ROLE modest LOGIN");
    let name = server.create_database();
    server.sql("postgres", &format!("GRANT CREATE ON DATABASE {name} TO modest"));
    let report = migrate(&server.url("modest", &name), MigrateAction::Up).await.unwrap();
    assert!(report.iter().any(|line| line.contains("CREATE ROLE ibid_service")), "{report:?}");
    claim_granted(&open(&server.url("modest", &name)).await, &claim_request()).await;
    // Somebody makes the roles; the next run takes them up.
    server.sql(
        "postgres",
        "CREATE ROLE ibid_service; CREATE ROLE ibid_admin; CREATE ROLE gateway LOGIN IN ROLE ibid_service",
    );
    let report = migrate(&server.url("modest", &name), MigrateAction::Up).await.unwrap();
    assert!(report.iter().any(|line| line.contains("ibid_service")), "{report:?}");
    claim_granted(&open(&server.url("gateway", &name)).await, &claim_request()).await;
    let other = server.create_database();
    server.sql("postgres", &format!("DROP DATABASE {name} WITH (FORCE)"));
    server.sql("postgres", "DROP ROLE gateway, ibid_service, ibid_admin");
    let report = migrate(&server.url("migrator", &other), MigrateAction::Up).await.unwrap();
    assert!(report.iter().any(|line| line == "made the role ibid_service"), "{report:?}");
}

#[tokio::test]
async fn indexes_for_searches_are_optional() {
    let server = TestPostgres::shared();
    let indexes = |name: &str| server.sql(name, "SELECT count(*) FROM pg_indexes WHERE tablename = 'idempotency_keys'");
    let without = MigrateOptions { no_search_indexes: true, ..MigrateOptions::default() };
    let (one, other) = (database(server), server.create_database());
    assert_eq!(indexes(&one), "7", "the address, two times, and four for searches");
    migrate_with(&server.url("migrator", &other), MigrateAction::Up, without).await.unwrap();
    assert_eq!(indexes(&other), "3");
    let removed = migrate_with(&server.url("migrator", &one), MigrateAction::Up, without).await.unwrap();
    assert_eq!((removed, indexes(&one).as_str()), (vec!["removed the indexes for searches".to_owned()], "3"));
    // Later migrations leave it so.
    let again = migrate(&server.url("migrator", &one), MigrateAction::Up).await.unwrap();
    assert_eq!(again, ["the schema is of version 6: nothing to do"]);
    let store = open(&server.url("gateway", &one)).await;
    claim_granted(&store, &claim_request()).await;
    let filter = ibid::store::EntryFilter { tenant: Some("acme".into()), ..Default::default() };
    let found = store.admin().list(&filter, Default::default(), 10).await.unwrap();
    assert_eq!(found.entries.len(), 1, "searches still work");
}
