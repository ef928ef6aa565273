//! The schema: made, brought up to date and removed, in one transaction each.
//!
//! Invariants: nothing that ibid did not make is changed; of several that migrate at the same time one does the work;
//! a second run finds nothing to do.

use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::{Client, Transaction};

use super::{faults::said, place::Place};

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Migrate {
    /// Bring the schema up to date.
    Up,
    /// Say what that would do, and do nothing.
    DryRun,
    /// Remove the schema and everything in it.
    Down,
}

struct Migration {
    version: i32,
    name: &'static str,
    up: &'static str,
    down: &'static str,
}

macro_rules! migration {
    ($version:literal, $name:literal) => {
        Migration {
            version: $version,
            name: $name,
            up: include_str!(concat!("migrations/", $name, ".up.sql")),
            down: include_str!(concat!("migrations/", $name, ".down.sql")),
        }
    };
}

static MIGRATIONS: [Migration; 6] = [
    migration!(1, "0001_tables"),
    migration!(2, "0002_functions"),
    migration!(3, "0003_access"),
    migration!(4, "0004_transactions"),
    migration!(5, "0005_inbox"),
    migration!(6, "0006_quota"),
];

/// The version that the store needs.
pub(super) const VERSION: i32 = 6;

const SERVICE: &str = "ibid_service";
const ADMIN: &str = "ibid_admin";
/// How our function outside our schema is known.
const MARK: &str = "made by ibid migrate";
/// Making an index may take long; a server that is not there is noticed much earlier.
const LIMIT: Duration = Duration::from_secs(600);

const LEDGER: &str = "CREATE TABLE ibid.migrations (
    version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
COMMENT ON TABLE ibid.migrations IS 'made by ibid migrate';
";

/// Migrates the database that the URL names. Returns what was done (or would be), line by line.
///
/// # Errors
/// Why it was not done; then nothing was changed.
pub async fn migrate(url: &str, how: Migrate) -> Result<Vec<String>, String> {
    let place: Place = url.parse()?;
    let connecting = place.config.connect(place.tls.connector()?);
    let connected = timeout(Duration::from_secs(10), connecting).await;
    let connected = connected.map_err(|_| format!("{place} did not answer within 10 s"))?;
    let (mut client, connection) = connected.map_err(|error| format!("no connection to {place}: {}", said(&error)))?;
    let driver = tokio::spawn(async move { drop(connection.await) });
    let migrated = timeout(LIMIT, run(&mut client, how)).await;
    driver.abort();
    let migrated = migrated.map_err(|_| format!("{place} did not finish within {} s", LIMIT.as_secs()))?;
    migrated.map_err(|why| format!("{place}: {why}; nothing was changed"))
}

async fn run(client: &mut Client, how: Migrate) -> Result<Vec<String>, String> {
    let tx = client.transaction().await.map_err(|error| said(&error))?;
    // Whoever comes second waits, and then finds nothing to do.
    exec(&tx, "SELECT pg_advisory_xact_lock(1768057188, 2)").await?;
    let version = version(&tx).await?;
    let mut report = Vec::new();
    match (how, version) {
        (Migrate::Down, None) => report.push("there is no schema ibid".into()),
        (Migrate::Down, Some(version)) => down(&tx, version, &mut report).await?,
        (Migrate::Up, version) => up(&tx, version, &mut report).await?,
        (Migrate::DryRun, version) => {
            for migration in pending(version.unwrap_or(0)) {
                report.push(format!("would apply {}:\n{}", migration.name, migration.up));
            }
            // Done and undone: what cannot be done is said here already.
            up(&tx, version, &mut Vec::new()).await?;
            tx.rollback().await.map_err(|error| said(&error))?;
            if report.is_empty() {
                report.push(format!("the schema is of version {VERSION}: nothing to do"));
            }
            return Ok(report);
        }
    }
    tx.commit().await.map_err(|error| said(&error))?;
    Ok(report)
}

fn pending(version: i32) -> impl DoubleEndedIterator<Item = &'static Migration> {
    MIGRATIONS.iter().filter(move |migration| migration.version > version)
}

/// Of the schema that is there; `None` if none is. One that is not ours is refused.
async fn version(tx: &Transaction<'_>) -> Result<Option<i32>, String> {
    let encoding = one::<String>(
        tx,
        "SELECT pg_encoding_to_char(encoding)::text FROM pg_database WHERE datname = current_database()",
    );
    let encoding = encoding.await?;
    if encoding != "UTF8" {
        return Err(format!(
            "the database is encoded in {encoding}, and ibid needs UTF8: make one with ENCODING 'UTF8'"
        ));
    }
    let there = "SELECT count(*) FROM pg_namespace WHERE nspname = 'ibid'";
    if one::<i64>(tx, there).await? == 0 {
        return Ok(None);
    }
    let marked = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname = 'ibid' AND c.relname = 'migrations' AND obj_description(c.oid, 'pg_class') = 'made by ibid migrate'";
    if one::<i64>(tx, marked).await? == 0 {
        let things = "SELECT (SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'ibid') \
            + (SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'ibid') \
            + (SELECT count(*) FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE n.nspname = 'ibid')";
        // An empty schema, made beforehand for a role that may not make one, is welcome.
        if one::<i64>(tx, things).await? == 0 {
            return Ok(Some(-1));
        }
        let why = "there is a schema ibid that ibid migrate did not make; rename it, or use another database";
        return Err(why.into());
    }
    let version: i32 = one(tx, "SELECT coalesce(max(version), 0) FROM ibid.migrations").await?;
    if version > VERSION {
        let why =
            format!("the schema is of version {version}, and this ibid knows up to {VERSION}; use the later ibid");
        return Err(why);
    }
    Ok(Some(version))
}

async fn up(tx: &Transaction<'_>, version: Option<i32>, report: &mut Vec<String>) -> Result<(), String> {
    if version.is_none() {
        exec(tx, "CREATE SCHEMA ibid").await?;
    }
    if version.unwrap_or(-1) < 0 {
        exec(tx, LEDGER).await?;
    }
    let roles = [role(tx, SERVICE, report).await?, role(tx, ADMIN, report).await?];
    for migration in pending(version.unwrap_or(-1).max(0)) {
        exec(tx, migration.up).await.map_err(|why| format!("{}: {why}", migration.name))?;
        let noted = "INSERT INTO ibid.migrations (version, name) VALUES ($1, $2)";
        tx.execute(noted, &[&migration.version, &migration.name]).await.map_err(|error| said(&error))?;
        report.push(format!("applied {}", migration.name));
    }
    access(tx, roles, report).await?;
    alias(tx, report).await?;
    if report.is_empty() {
        report.push(format!("the schema is of version {VERSION}: nothing to do"));
    }
    Ok(())
}

/// Makes a role of the server, where we may. Says whether it is there.
async fn role(tx: &Transaction<'_>, name: &str, report: &mut Vec<String>) -> Result<bool, String> {
    if one::<i64>(tx, &format!("SELECT count(*) FROM pg_roles WHERE rolname = '{name}'")).await? > 0 {
        return Ok(true);
    }
    let may = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user";
    if !one::<bool>(tx, may).await? {
        report.push(format!(
            "the role {name} is missing, and the migrating role may not make it: have somebody run \
             CREATE ROLE {name} NOLOGIN; then migrate again. Until then only the migrating role has its rights"
        ));
        return Ok(false);
    }
    exec(tx, &format!("CREATE ROLE {name} NOLOGIN")).await?;
    report.push(format!("made the role {name}"));
    Ok(true)
}

/// Policies and grants, for the roles that are there. Changes nothing that is so already.
async fn access(tx: &Transaction<'_>, [service, admin]: [bool; 2], report: &mut Vec<String>) -> Result<(), String> {
    let owner: String = one(
        tx,
        "SELECT quote_ident(pg_get_userbyid(relowner)::text) FROM pg_class WHERE oid = 'ibid.idempotency_keys'::regclass",
    )
    .await?;
    for (policy, role, is_there) in
        [("service_role_insert_idempotency_keys", SERVICE, service), ("admins_view_all_idempotency_keys", ADMIN, admin)]
    {
        let named = format!(
            "SELECT count(*) FROM pg_policies WHERE schemaname = 'ibid' AND policyname = '{policy}' AND '{role}' = ANY(roles)"
        );
        if is_there && one::<i64>(tx, &named).await? == 0 {
            exec(tx, &format!("ALTER POLICY {policy} ON ibid.idempotency_keys TO {role}, {owner}")).await?;
            report.push(format!("{policy} holds for {role} and {owner}"));
        }
    }
    // Granting again what was granted changes nothing.
    if service {
        exec(
            tx,
            &format!(
                "GRANT USAGE ON SCHEMA ibid TO {SERVICE};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ibid.idempotency_keys TO {SERVICE};
                 GRANT SELECT, INSERT, UPDATE, DELETE
                     ON ibid.processed_events, ibid.failed_events, ibid.event_horizons TO {SERVICE};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ibid.quota TO {SERVICE};
                 GRANT SELECT, UPDATE ON ibid.fences, ibid.meta TO {SERVICE};
                 GRANT SELECT ON ibid.migrations TO {SERVICE};
                 GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ibid TO {SERVICE};"
            ),
        )
        .await?;
    }
    if admin {
        let tables = "ibid.idempotency_keys, ibid.processed_events, ibid.failed_events, ibid.event_horizons";
        exec(tx, &format!("GRANT USAGE ON SCHEMA ibid TO {ADMIN}; GRANT SELECT ON {tables} TO {ADMIN};")).await?;
    }
    Ok(())
}

/// `cleanup_old_idempotency_keys()` without a schema, for jobs that call it so: in `public`, if we may put it there and
/// nobody else has.
async fn alias(tx: &Transaction<'_>, report: &mut Vec<String>) -> Result<(), String> {
    let may = "SELECT coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = 'public'), false)";
    let taken = "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
        WHERE n.nspname = 'public' AND p.proname = 'cleanup_old_idempotency_keys'";
    if one::<i64>(tx, taken).await? > 0 || !one::<bool>(tx, may).await? {
        return Ok(());
    }
    exec(
        tx,
        &format!(
            "CREATE FUNCTION public.cleanup_old_idempotency_keys() RETURNS bigint LANGUAGE sql
                 AS 'SELECT ibid.cleanup_old_idempotency_keys()';
             COMMENT ON FUNCTION public.cleanup_old_idempotency_keys() IS '{MARK}';"
        ),
    )
    .await?;
    report.push("public.cleanup_old_idempotency_keys() calls the one in the schema ibid".into());
    Ok(())
}

async fn down(tx: &Transaction<'_>, version: i32, report: &mut Vec<String>) -> Result<(), String> {
    let ours = format!(
        "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'public' \
         AND p.proname = 'cleanup_old_idempotency_keys' AND obj_description(p.oid, 'pg_proc') = '{MARK}'"
    );
    if one::<i64>(tx, &ours).await? > 0 {
        exec(tx, "DROP FUNCTION public.cleanup_old_idempotency_keys()").await?;
    }
    for migration in MIGRATIONS.iter().rev().filter(|migration| migration.version <= version) {
        exec(tx, migration.down).await.map_err(|why| format!("{}: {why}", migration.name))?;
        report.push(format!("took back {}", migration.name));
    }
    if version >= 0 {
        exec(tx, "DROP TABLE ibid.migrations").await?;
    }
    // Fails if somebody else has put something there: then all stays.
    exec(tx, "DROP SCHEMA ibid").await?;
    report.push("removed the schema ibid".into());
    report.push(format!("the roles {SERVICE} and {ADMIN} belong to the whole server and stay; DROP ROLE removes them"));
    Ok(())
}

async fn exec(tx: &Transaction<'_>, sql: &str) -> Result<(), String> {
    tx.batch_execute(sql).await.map_err(|error| said(&error))
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(tx: &Transaction<'_>, sql: &str) -> Result<T, String> {
    let row = tx.query_typed(sql, &[]).await.map_err(|error| said(&error))?;
    let row = row.first().ok_or("an empty answer")?;
    row.try_get(0).map_err(|error| said(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_to_the_one_that_is_needed() {
        let versions: Vec<_> = MIGRATIONS.iter().map(|migration| migration.version).collect();
        assert_eq!(versions, (1..=VERSION).collect::<Vec<_>>());
    }
}
