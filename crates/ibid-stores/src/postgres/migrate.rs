//! The schema: made, brought up to date and removed, in one transaction each.
//!
//! A dry run prints the very statements that it has executed and undone, as a file that psql runs.
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
    /// Give that as a file of SQL, and do nothing.
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

/// Migrates the database that the URL names. Returns what was done, line by line; of a dry run, the SQL that would do it.
///
/// # Errors
/// Why it was not done; then nothing was changed.
pub async fn migrate(url: &str, how: Migrate) -> Result<Vec<String>, String> {
    migrate_for(url, how, None).await
}

/// As [`migrate`]. `rls_user` is the SQL expression for the user whose rows row-level security shows; `None` leaves it as it
/// is, which at first is `current_setting('ibid.user_id', true)`.
///
/// # Errors
/// As [`migrate`].
pub async fn migrate_for(url: &str, how: Migrate, rls_user: Option<&str>) -> Result<Vec<String>, String> {
    let place: Place = url.parse()?;
    let connecting = place.config.connect(place.tls.connector()?);
    let connected = timeout(Duration::from_secs(10), connecting).await;
    let connected = connected.map_err(|_| format!("{place} did not answer within 10 s"))?;
    let (mut client, connection) = connected.map_err(|error| format!("no connection to {place}: {}", said(&error)))?;
    let driver = tokio::spawn(async move { drop(connection.await) });
    let migrated = timeout(LIMIT, run(&mut client, how, rls_user)).await;
    driver.abort();
    let migrated = migrated.map_err(|_| format!("{place} did not finish within {} s", LIMIT.as_secs()))?;
    migrated.map_err(|why| format!("{place}: {why}; nothing was changed"))
}

async fn run(client: &mut Client, how: Migrate, rls_user: Option<&str>) -> Result<Vec<String>, String> {
    let tx = client.transaction().await.map_err(|error| said(&error))?;
    let mut script = Script { tx: &tx, statements: Vec::new(), report: Vec::new() };
    // Whoever comes second waits, and then finds nothing to do.
    script.exec("SELECT pg_advisory_xact_lock(1768057188, 2)").await?;
    let version = version(&tx).await?;
    match (how, version) {
        (Migrate::Down, None) => script.report.push("there is no schema ibid".into()),
        (Migrate::Down, Some(version)) => down(&mut script, version).await?,
        (Migrate::Up | Migrate::DryRun, version) => up(&mut script, version, rls_user).await?,
    }
    let Script { statements, mut report, .. } = script;
    if how == Migrate::DryRun {
        // Done and undone: what cannot be done is said here already.
        tx.rollback().await.map_err(|error| said(&error))?;
        return Ok(file(&statements, &report));
    }
    tx.commit().await.map_err(|error| said(&error))?;
    if how == Migrate::Up && report.is_empty() {
        report.push(nothing_to_do());
    }
    Ok(report)
}

fn nothing_to_do() -> String {
    format!("the schema is of version {VERSION}: nothing to do")
}

/// A file that psql, and every other client, runs; a second time it fails and changes nothing.
fn file(statements: &[String], report: &[String]) -> Vec<String> {
    if report.is_empty() {
        return vec![format!("-- {}", nothing_to_do())];
    }
    let told = report.iter().map(|line| format!("--   {line}"));
    let head =
        format!("-- Made by ibid migrate --dry-run, for a database as it was then. Version {VERSION} of the schema:");
    let lines = [head].into_iter().chain(told).chain(["BEGIN;".into()]);
    lines.chain(statements.iter().cloned()).chain(["COMMIT;".into()]).collect()
}

/// What a migration does: executed, and noted.
struct Script<'a> {
    tx: &'a Transaction<'a>,
    statements: Vec<String>,
    /// For people.
    report: Vec<String>,
}

impl Script<'_> {
    async fn exec(&mut self, sql: &str) -> Result<(), String> {
        self.tx.batch_execute(sql).await.map_err(|error| said(&error))?;
        let sql = sql.trim_end();
        self.statements.push(if sql.ends_with(';') { sql.to_owned() } else { format!("{sql};") });
        Ok(())
    }
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

async fn up(script: &mut Script<'_>, version: Option<i32>, rls_user: Option<&str>) -> Result<(), String> {
    if version.is_none() {
        script.exec("CREATE SCHEMA ibid").await?;
    }
    if version.unwrap_or(-1) < 0 {
        script.exec(LEDGER).await?;
    }
    let roles = [role(script, SERVICE).await?, role(script, ADMIN).await?];
    for Migration { version, name, up, .. } in pending(version.unwrap_or(-1).max(0)) {
        script.exec(up).await.map_err(|why| format!("{name}: {why}"))?;
        script.exec(&format!("INSERT INTO ibid.migrations (version, name) VALUES ({version}, '{name}')")).await?;
        script.report.push(format!("applied {name}"));
    }
    access(script, roles).await?;
    if let Some(user) = rls_user {
        own_rows(script, user).await?;
    }
    alias(script).await
}

/// Makes a role of the server, where we may. Says whether it is there.
async fn role(script: &mut Script<'_>, name: &str) -> Result<bool, String> {
    if one::<i64>(script.tx, &format!("SELECT count(*) FROM pg_roles WHERE rolname = '{name}'")).await? > 0 {
        return Ok(true);
    }
    let may = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user";
    if !one::<bool>(script.tx, may).await? {
        script.report.push(format!(
            "the role {name} is missing, and the migrating role may not make it: have somebody run \
             CREATE ROLE {name} NOLOGIN; then migrate again. Until then only the migrating role has its rights"
        ));
        return Ok(false);
    }
    script.exec(&format!("CREATE ROLE {name} NOLOGIN")).await?;
    script.report.push(format!("made the role {name}"));
    Ok(true)
}

/// Policies and grants, for the roles that are there. Changes nothing that is so already.
async fn access(script: &mut Script<'_>, [service, admin]: [bool; 2]) -> Result<(), String> {
    for (policy, role, is_there) in
        [("service_role_insert_idempotency_keys", SERVICE, service), ("admins_view_all_idempotency_keys", ADMIN, admin)]
    {
        let named = format!(
            "SELECT count(*) FROM pg_policies WHERE schemaname = 'ibid' AND policyname = '{policy}' AND '{role}' = ANY(roles)"
        );
        if is_there && one::<i64>(script.tx, &named).await? == 0 {
            // The owner is who runs this, or who made the table before.
            let alter = format!(
                "DO $$ BEGIN EXECUTE format('ALTER POLICY {policy} ON ibid.idempotency_keys TO {role}, %I',
                     (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'ibid.idempotency_keys'::regclass)); END $$"
            );
            script.exec(&alter).await?;
            script.report.push(format!("{policy} holds for {role} and the owner of the table"));
        }
    }
    // Granting again what was granted changes nothing.
    if service {
        script
            .exec(&format!(
                "GRANT USAGE ON SCHEMA ibid TO {SERVICE};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ibid.idempotency_keys TO {SERVICE};
                 GRANT SELECT, INSERT, UPDATE, DELETE
                     ON ibid.processed_events, ibid.failed_events, ibid.event_horizons TO {SERVICE};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ibid.quota TO {SERVICE};
                 GRANT SELECT, UPDATE ON ibid.fences, ibid.meta TO {SERVICE};
                 GRANT SELECT ON ibid.migrations TO {SERVICE};
                 GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ibid TO {SERVICE};"
            ))
            .await?;
    }
    if admin {
        let tables = "ibid.idempotency_keys, ibid.processed_events, ibid.failed_events, ibid.event_horizons";
        script.exec(&format!("GRANT USAGE ON SCHEMA ibid TO {ADMIN}; GRANT SELECT ON {tables} TO {ADMIN};")).await?;
    }
    Ok(())
}

/// Whose rows a user of the database sees. The expression is noted with the policy, because the database gives it back in words of its own.
async fn own_rows(script: &mut Script<'_>, user: &str) -> Result<(), String> {
    let noted = format!("'the user is {}'", user.replace('\'', "''"));
    let is_so = format!(
        "SELECT count(*) FROM pg_policy WHERE polrelid = 'ibid.idempotency_keys'::regclass \
         AND polname = 'users_own_idempotency_keys' AND obj_description(oid, 'pg_policy') = {noted}"
    );
    if one::<i64>(script.tx, &is_so).await? > 0 {
        return Ok(());
    }
    let alter = format!(
        "ALTER POLICY users_own_idempotency_keys ON ibid.idempotency_keys USING (user_id <> '' AND user_id = ({user})::text);
         COMMENT ON POLICY users_own_idempotency_keys ON ibid.idempotency_keys IS {noted};"
    );
    script.exec(&alter).await.map_err(|why| format!("store.rls_user: {why}"))?;
    script.report.push(format!("users_own_idempotency_keys shows the rows of {user}"));
    Ok(())
}

/// `cleanup_old_idempotency_keys()` without a schema, for jobs that call it so: in `public`, if we may put it there and
/// nobody else has.
async fn alias(script: &mut Script<'_>) -> Result<(), String> {
    let may = "SELECT coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = 'public'), false)";
    let taken = "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
        WHERE n.nspname = 'public' AND p.proname = 'cleanup_old_idempotency_keys'";
    if one::<i64>(script.tx, taken).await? > 0 || !one::<bool>(script.tx, may).await? {
        return Ok(());
    }
    script
        .exec(&format!(
            "CREATE FUNCTION public.cleanup_old_idempotency_keys() RETURNS bigint LANGUAGE sql
                 AS 'SELECT ibid.cleanup_old_idempotency_keys()';
             COMMENT ON FUNCTION public.cleanup_old_idempotency_keys() IS '{MARK}';"
        ))
        .await?;
    script.report.push("public.cleanup_old_idempotency_keys() calls the one in the schema ibid".into());
    Ok(())
}

async fn down(script: &mut Script<'_>, version: i32) -> Result<(), String> {
    let ours = format!(
        "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'public' \
         AND p.proname = 'cleanup_old_idempotency_keys' AND obj_description(p.oid, 'pg_proc') = '{MARK}'"
    );
    if one::<i64>(script.tx, &ours).await? > 0 {
        script.exec("DROP FUNCTION public.cleanup_old_idempotency_keys()").await?;
    }
    for migration in MIGRATIONS.iter().rev().filter(|migration| migration.version <= version) {
        script.exec(migration.down).await.map_err(|why| format!("{}: {why}", migration.name))?;
        script.report.push(format!("took back {}", migration.name));
    }
    if version >= 0 {
        script.exec("DROP TABLE ibid.migrations").await?;
    }
    // Fails if somebody else has put something there: then all stays.
    script.exec("DROP SCHEMA ibid").await?;
    script.report.push("removed the schema ibid".into());
    script
        .report
        .push(format!("the roles {SERVICE} and {ADMIN} belong to the whole server and stay; DROP ROLE removes them"));
    Ok(())
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
