//! Creates, upgrades and removes the schema, each in one transaction.
//!
//! A dry run prints the statements that it has executed and rolled back, as a file for psql.
//!
//! Invariants: nothing that ibid did not create is changed; of several concurrent migrations one does the work; a
//! second run finds nothing to do.

use tokio_postgres::Transaction;

use super::{error::error_text, *};

/// The kind of migration to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrateAction {
    /// Creates or upgrades the schema.
    Up,
    /// Returns the upgrade as an SQL file, without changing anything.
    DryRun,
    /// Removes the schema and everything in it.
    Down,
}

struct Migration {
    version: i32,
    name: &'static str,
    up: &'static str,
    down: &'static str,
    /// The schema version that a gateway must know to use the schema from this migration on. A lower one than `version`
    /// lets gateways of earlier versions continue.
    oldest_reader: i32,
}

macro_rules! migration {
    ($version:literal, $name:literal) => {
        Migration {
            version: $version,
            name: $name,
            up: include_str!(concat!("migrations/", $name, ".up.sql")),
            down: include_str!(concat!("migrations/", $name, ".down.sql")),
            oldest_reader: $version,
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

/// The schema version that the store needs.
pub(super) const SCHEMA_VERSION: i32 = 6;

/// What people search by. No end changes them.
const SEARCH_COLUMNS: [&str; 4] = ["tenant", "user_id", "key", "key_hash"];
const SERVICE_ROLE: &str = "ibid_service";
const ADMIN_ROLE: &str = "ibid_admin";
/// Comment that identifies our function outside our schema.
const OWNERSHIP_COMMENT: &str = "made by ibid migrate";
/// Deadline of a migration, which may build an index. An unreachable server is detected much earlier.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);

const MIGRATIONS_TABLE_SQL: &str = "CREATE TABLE ibid.migrations (
    version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    oldest_reader integer NOT NULL);
COMMENT ON TABLE ibid.migrations IS 'made by ibid migrate';
COMMENT ON COLUMN ibid.migrations.oldest_reader IS 'gateways whose schema version is lower must not use the schema';
";

/// Migrates the database that the URL names. Returns a report, line by line, or the SQL of a dry run.
///
/// # Errors
/// Returns why the migration failed; nothing was changed then.
pub async fn migrate(url: &str, how: MigrateAction) -> Result<Vec<String>, StoreSetupError> {
    migrate_with(url, how, MigrateOptions::default()).await
}

/// Choices about the schema.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MigrateOptions<'a> {
    /// The SQL expression for the user whose rows row-level security shows. `None` keeps the current one, initially
    /// `current_setting('ibid.user_id', true)`.
    pub rls_user: Option<&'a str>,
    /// Does without the indexes for searches by tenant, user and key, and removes them if they are there. Each costs a
    /// first request an index entry.
    pub no_search_indexes: bool,
}

/// As [`migrate`], with these choices.
///
/// # Errors
/// As [`migrate`].
pub async fn migrate_with(
    url: &str, how: MigrateAction, options: MigrateOptions<'_>,
) -> Result<Vec<String>, StoreSetupError> {
    let place = PostgresUrl::parse(url)?;
    let connecting = place.config.connect(place.tls.connector()?);
    let connected = timeout(Duration::from_secs(10), connecting).await;
    let connected = connected.map_err(|_| format!("{place} did not answer within 10 s"))?;
    let (mut client, connection) =
        connected.map_err(|error| format!("no connection to {place}: {}", error_text(&error)))?;
    let driver = tokio::spawn(async move { drop(connection.await) });
    let migrated = timeout(MIGRATION_TIMEOUT, run_migration(&mut client, how, options)).await;
    driver.abort();
    let migrated = migrated.map_err(|_| format!("{place} did not finish within {} s", MIGRATION_TIMEOUT.as_secs()))?;
    Ok(migrated.map_err(|why| format!("{place}: {why}; nothing was changed"))?)
}

async fn run_migration(
    client: &mut Client, how: MigrateAction, options: MigrateOptions<'_>,
) -> Result<Vec<String>, String> {
    let tx = client.transaction().await.map_err(|error| error_text(&error))?;
    let mut script = MigrationScript { tx: &tx, statements: Vec::new(), report: Vec::new() };
    // A concurrent migration waits here, and then finds nothing to do.
    script.execute("SELECT pg_advisory_xact_lock(1768057188, 2)").await?;
    let version = schema_version(&tx).await?;
    match (how, version) {
        (MigrateAction::Down, None) => script.report.push("there is no schema ibid".into()),
        (MigrateAction::Down, Some(version)) => migrate_down(&mut script, version).await?,
        (MigrateAction::Up | MigrateAction::DryRun, version) => migrate_up(&mut script, version, options).await?,
    }
    let MigrationScript { statements, mut report, .. } = script;
    if how == MigrateAction::DryRun {
        // Executed and rolled back: a failing statement is reported in a dry run, too.
        tx.rollback().await.map_err(|error| error_text(&error))?;
        return Ok(dry_run_file(&statements, &report));
    }
    tx.commit().await.map_err(|error| error_text(&error))?;
    if how == MigrateAction::Up && report.is_empty() {
        report.push(nothing_to_do());
    }
    Ok(report)
}

fn nothing_to_do() -> String {
    format!("the schema is of version {SCHEMA_VERSION}: nothing to do")
}

/// Returns a file for psql or any other client. Running it twice fails and changes nothing.
fn dry_run_file(statements: &[String], report: &[String]) -> Vec<String> {
    if report.is_empty() {
        return vec![format!("-- {}", nothing_to_do())];
    }
    let told = report.iter().map(|line| format!("--   {line}"));
    let head = format!(
        "-- Made by ibid migrate --dry-run, for a database as it was then. Version {SCHEMA_VERSION} of the schema:"
    );
    let lines = [head].into_iter().chain(told).chain(["BEGIN;".into()]);
    lines.chain(statements.iter().cloned()).chain(["COMMIT;".into()]).collect()
}

/// Executes statements and records them.
struct MigrationScript<'a> {
    tx: &'a Transaction<'a>,
    statements: Vec<String>,
    report: Vec<String>,
}

impl MigrationScript<'_> {
    async fn execute(&mut self, sql: &str) -> Result<(), String> {
        self.tx.batch_execute(sql).await.map_err(|error| error_text(&error))?;
        let sql = sql.trim_end();
        self.statements.push(if sql.ends_with(';') { sql.to_owned() } else { format!("{sql};") });
        Ok(())
    }
}

/// Returns the version of the existing schema, or `None` if there is none. Rejects a schema that is not ours.
async fn schema_version(tx: &Transaction<'_>) -> Result<Option<i32>, String> {
    let encoding = query_value::<String>(
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
    if !exists(tx, there).await? {
        return Ok(None);
    }
    let marked = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname = 'ibid' AND c.relname = 'migrations' AND obj_description(c.oid, 'pg_class') = 'made by ibid migrate'";
    if !exists(tx, marked).await? {
        let things = "SELECT (SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'ibid') \
            + (SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'ibid') \
            + (SELECT count(*) FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE n.nspname = 'ibid')";
        // Accept an empty schema: it may have been created for a role that cannot create one.
        if !exists(tx, things).await? {
            return Ok(Some(-1));
        }
        let why = "there is a schema ibid that ibid migrate did not make; rename it, or use another database";
        return Err(why.into());
    }
    let version: i32 = query_value(tx, "SELECT coalesce(max(version), 0) FROM ibid.migrations").await?;
    if version > SCHEMA_VERSION {
        let why = format!(
            "the schema is of version {version}, and this ibid knows up to {SCHEMA_VERSION}; use the later ibid"
        );
        return Err(why);
    }
    Ok(Some(version))
}

async fn migrate_up(
    script: &mut MigrationScript<'_>, version: Option<i32>, options: MigrateOptions<'_>,
) -> Result<(), String> {
    if version.is_none() {
        script.execute("CREATE SCHEMA ibid").await?;
    }
    if version.unwrap_or(-1) < 0 {
        script.execute(MIGRATIONS_TABLE_SQL).await?;
    }
    let roles = [ensure_role(script, SERVICE_ROLE).await?, ensure_role(script, ADMIN_ROLE).await?];
    let version = version.unwrap_or(0);
    for Migration { version, name, up, oldest_reader, .. } in
        MIGRATIONS.iter().filter(|migration| migration.version > version)
    {
        script.execute(up).await.map_err(|why| format!("{name}: {why}"))?;
        let applied = format!(
            "INSERT INTO ibid.migrations (version, name, oldest_reader) VALUES ({version}, '{name}', {oldest_reader})"
        );
        script.execute(&applied).await?;
        script.report.push(format!("applied {name}"));
    }
    set_search_indexes(script, version == 0, options.no_search_indexes).await?;
    grant_access(script, roles).await?;
    if let Some(user) = options.rls_user {
        set_rls_user(script, user).await?;
    }
    create_cleanup_alias(script).await
}

/// Creates the indexes for searches in a new schema, or removes them. A table that has none for long stays so: building
/// them would block its writers.
async fn set_search_indexes(script: &mut MigrationScript<'_>, is_new: bool, are_unwanted: bool) -> Result<(), String> {
    if is_new && !are_unwanted {
        for column in SEARCH_COLUMNS {
            let index = format!(
                "CREATE INDEX idempotency_keys_{column} ON ibid.idempotency_keys ({column}) WHERE {column} <> ''"
            );
            script.execute(&index).await?;
        }
    }
    let there = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'ibid' AND indexname = 'idempotency_keys_tenant'";
    if are_unwanted && exists(script.tx, there).await? {
        for column in SEARCH_COLUMNS {
            script.execute(&format!("DROP INDEX IF EXISTS ibid.idempotency_keys_{column}")).await?;
        }
        script.report.push("removed the indexes for searches".into());
    }
    Ok(())
}

/// Creates a server role if permitted. Returns whether the role exists.
async fn ensure_role(script: &mut MigrationScript<'_>, name: &str) -> Result<bool, String> {
    if exists(script.tx, &format!("SELECT count(*) FROM pg_roles WHERE rolname = '{name}'")).await? {
        return Ok(true);
    }
    let may = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user";
    if !query_value::<bool>(script.tx, may).await? {
        script.report.push(format!(
            "the role {name} is missing, and the migrating role may not make it: have somebody run \
             CREATE ROLE {name} NOLOGIN; then migrate again. Until then only the migrating role has its rights"
        ));
        return Ok(false);
    }
    script.execute(&format!("CREATE ROLE {name} NOLOGIN")).await?;
    script.report.push(format!("made the role {name}"));
    Ok(true)
}

/// Creates policies and grants for the existing roles. Skips those in place.
async fn grant_access(script: &mut MigrationScript<'_>, [service, admin]: [bool; 2]) -> Result<(), String> {
    for (policy, role, is_there) in [
        ("service_role_insert_idempotency_keys", SERVICE_ROLE, service),
        ("admins_view_all_idempotency_keys", ADMIN_ROLE, admin),
    ] {
        let named = format!(
            "SELECT count(*) FROM pg_policies WHERE schemaname = 'ibid' AND policyname = '{policy}' AND '{role}' = ANY(roles)"
        );
        if is_there && !exists(script.tx, &named).await? {
            // The owner is the current user, or the user who created the table earlier.
            let alter = format!(
                "DO $$ BEGIN EXECUTE format('ALTER POLICY {policy} ON ibid.idempotency_keys TO {role}, %I',
                     (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'ibid.idempotency_keys'::regclass)); END $$"
            );
            script.execute(&alter).await?;
            script.report.push(format!("{policy} holds for {role} and the owner of the table"));
        }
    }
    // Repeating a grant changes nothing.
    if service {
        script
            .execute(&format!(
                "GRANT USAGE ON SCHEMA ibid TO {SERVICE_ROLE};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ibid.idempotency_keys, ibid.unfinished_keys TO {SERVICE_ROLE};
                 GRANT SELECT, INSERT, UPDATE, DELETE
                     ON ibid.processed_events, ibid.failed_events, ibid.event_horizons TO {SERVICE_ROLE};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ibid.quota TO {SERVICE_ROLE};
                 GRANT SELECT, UPDATE ON ibid.meta TO {SERVICE_ROLE};
                 GRANT SELECT ON ibid.migrations TO {SERVICE_ROLE};
                 GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ibid TO {SERVICE_ROLE};"
            ))
            .await?;
    }
    if admin {
        let tables = "ibid.idempotency_keys, ibid.unfinished_keys, ibid.processed_events, ibid.failed_events, ibid.event_horizons";
        script
            .execute(&format!("GRANT USAGE ON SCHEMA ibid TO {ADMIN_ROLE}; GRANT SELECT ON {tables} TO {ADMIN_ROLE};"))
            .await?;
    }
    Ok(())
}

/// Sets the row-level security expression. It is recorded in the policy's comment, because the database returns
/// expressions rewritten.
async fn set_rls_user(script: &mut MigrationScript<'_>, user: &str) -> Result<(), String> {
    let noted = format!("'the user is {}'", user.replace('\'', "''"));
    let is_so = format!(
        "SELECT count(*) FROM pg_policy WHERE polrelid = 'ibid.idempotency_keys'::regclass \
         AND polname = 'users_own_idempotency_keys' AND obj_description(oid, 'pg_policy') = {noted}"
    );
    if exists(script.tx, &is_so).await? {
        return Ok(());
    }
    let alter = format!(
        "ALTER POLICY users_own_idempotency_keys ON ibid.idempotency_keys USING (user_id <> '' AND user_id = ({user})::text);
         COMMENT ON POLICY users_own_idempotency_keys ON ibid.idempotency_keys IS {noted};"
    );
    script.execute(&alter).await.map_err(|why| format!("store.rls_user: {why}"))?;
    script.report.push(format!("users_own_idempotency_keys shows the rows of {user}"));
    Ok(())
}

/// Creates `public.cleanup_old_idempotency_keys()` for jobs that call it without a schema, if permitted and the name is
/// free.
async fn create_cleanup_alias(script: &mut MigrationScript<'_>) -> Result<(), String> {
    let may = "SELECT coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = 'public'), false)";
    let taken = "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
        WHERE n.nspname = 'public' AND p.proname = 'cleanup_old_idempotency_keys'";
    if exists(script.tx, taken).await? || !query_value::<bool>(script.tx, may).await? {
        return Ok(());
    }
    script
        .execute(&format!(
            "CREATE FUNCTION public.cleanup_old_idempotency_keys() RETURNS bigint LANGUAGE sql
                 AS 'SELECT ibid.cleanup_old_idempotency_keys()';
             COMMENT ON FUNCTION public.cleanup_old_idempotency_keys() IS '{OWNERSHIP_COMMENT}';"
        ))
        .await?;
    script.report.push("public.cleanup_old_idempotency_keys() calls the one in the schema ibid".into());
    Ok(())
}

async fn migrate_down(script: &mut MigrationScript<'_>, version: i32) -> Result<(), String> {
    let ours = format!(
        "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'public' \
         AND p.proname = 'cleanup_old_idempotency_keys' AND obj_description(p.oid, 'pg_proc') = '{OWNERSHIP_COMMENT}'"
    );
    if exists(script.tx, &ours).await? {
        script.execute("DROP FUNCTION public.cleanup_old_idempotency_keys()").await?;
    }
    for migration in MIGRATIONS.iter().rev().filter(|migration| migration.version <= version) {
        script.execute(migration.down).await.map_err(|why| format!("{}: {why}", migration.name))?;
        script.report.push(format!("took back {}", migration.name));
    }
    if version >= 0 {
        script.execute("DROP TABLE ibid.migrations").await?;
    }
    // Fails if the schema contains foreign objects; nothing is removed then.
    script.execute("DROP SCHEMA ibid").await?;
    script.report.push("removed the schema ibid".into());
    script.report.push(format!(
        "the roles {SERVICE_ROLE} and {ADMIN_ROLE} belong to the whole server and stay; DROP ROLE removes them"
    ));
    Ok(())
}

/// Whether a count is above zero.
async fn exists(tx: &Transaction<'_>, count: &str) -> Result<bool, String> {
    Ok(query_value::<i64>(tx, count).await? > 0)
}

async fn query_value<T: for<'a> tokio_postgres::types::FromSql<'a>>(
    tx: &Transaction<'_>, sql: &str,
) -> Result<T, String> {
    let row = tx.query_typed(sql, &[]).await.map_err(|error| error_text(&error))?;
    let row = row.first().ok_or("an empty answer")?;
    row.try_get(0).map_err(|error| error_text(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_to_the_one_that_is_needed() {
        let versions: Vec<_> = MIGRATIONS.iter().map(|migration| migration.version).collect();
        assert_eq!(versions, (1..=SCHEMA_VERSION).collect::<Vec<_>>());
    }
}
