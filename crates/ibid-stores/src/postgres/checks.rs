//! Checks the server settings that the guarantees depend on, whenever a connection is opened.

use ibid::store::ErrorKind;
use tokio_postgres::{Client, Error, Row};

use super::{migrate::SCHEMA_VERSION, url::PostgresUrl};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PostgresFindings {
    /// Findings that weaken the guarantees.
    pub(super) warnings: Vec<String>,
    /// Whether committed data may be lost in a crash.
    pub(super) may_lose_commits: bool,
    /// Why the server cannot be used at all.
    pub(super) refusal: Option<(ErrorKind, String)>,
}

const MIN_SERVER_VERSION: i32 = 130_000;

const CHECK_SQL: &str = "SELECT current_setting('server_version_num')::integer, current_setting('fsync'), \
    current_setting('full_page_writes'), current_setting('synchronous_commit'), pg_is_in_recovery(), \
    current_setting('default_transaction_read_only'), current_setting('default_transaction_isolation'), \
    r.rolsuper, r.rolbypassrls, r.rolname::text, \
    (SELECT has_schema_privilege(n.oid, 'USAGE') FROM pg_catalog.pg_namespace n WHERE n.nspname = 'ibid'), \
    (SELECT count(*) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
     WHERE n.nspname = 'ibid' AND c.relname = 'migrations') \
    FROM pg_catalog.pg_roles r WHERE r.rolname = current_user";

pub(super) async fn run_checks(client: &Client, place: &PostgresUrl) -> Result<PostgresFindings, Error> {
    let found = client.query_typed_one(CHECK_SQL, &[]).await?;
    let mut findings = PostgresFindings::default();
    check_settings(&found, &mut findings, place);
    let migrate = format!("run ibid migrate --store {place}");
    let (may_use, is_made): (Option<bool>, i64) = (found.try_get(10)?, found.try_get(11)?);
    let rejected = |why| Some((ErrorKind::Rejected, why));
    findings.refusal = match may_use {
        None => rejected(format!("there is no schema ibid in {place}; {migrate}")),
        Some(false) => {
            let role: String = found.try_get(9)?;
            rejected(format!(
                "the role {role:?} may not use the schema ibid in {place}; GRANT ibid_service TO {role:?}"
            ))
        }
        Some(true) if is_made == 0 => rejected(format!("the schema ibid in {place} was not made by ibid; {migrate}")),
        Some(true) => {
            let versions = "SELECT coalesce(max(version), 0), coalesce(max(oldest_reader), 0) FROM ibid.migrations";
            let found = client.query_typed_one(versions, &[]).await?;
            check_version(found.try_get(0)?, found.try_get(1)?, place, &migrate)
        }
    };
    Ok(findings)
}

/// A later schema is used if its migrations allow that: gateways of two versions run during an upgrade.
fn check_version(version: i32, oldest_reader: i32, place: &PostgresUrl, migrate: &str) -> Option<(ErrorKind, String)> {
    let is = format!("the schema ibid in {place} is of version {version}");
    match () {
        () if version < SCHEMA_VERSION => {
            Some((ErrorKind::Rejected, format!("{is}, and {SCHEMA_VERSION} is needed; {migrate}")))
        }
        () if oldest_reader > SCHEMA_VERSION => {
            let why =
                format!("{is}, and this ibid reads up to version {SCHEMA_VERSION}; use the ibid that migrated it");
            Some((ErrorKind::Corrupt, why))
        }
        () => None,
    }
}

fn check_settings(found: &Row, findings: &mut PostgresFindings, place: &PostgresUrl) {
    let setting = |at: usize| found.try_get::<_, String>(at).unwrap_or_default();
    let is = |at: usize| found.try_get::<_, bool>(at).unwrap_or(false);
    let version: i32 = found.try_get(0).unwrap_or(0);
    let (commit, isolation, role) = (setting(3), setting(6), setting(9));
    findings.may_lose_commits = setting(1) != "on" || setting(2) != "on" || commit == "off";
    // On sessions of our own, the store sets the isolation itself.
    let may_race = place.unnamed_statements && isolation != "read committed";
    #[rustfmt::skip]
    let wanting = [
        (setting(1) != "on", "fsync is off: a crash of the machine can lose or corrupt everything".into()),
        (setting(2) != "on", "full_page_writes is off: a crash of the machine can corrupt rows".into()),
        (commit == "off", "synchronous_commit is off: a crash can forget the last claims and answers; set it to on for this role".into()),
        (commit == "local", "synchronous_commit is local: a failover can forget the last claims and answers; set it to on".into()),
        (version < MIN_SERVER_VERSION, format!("PostgreSQL {} is older than 13, the oldest that ibid is made for", version / 10_000)),
        (is(4), "this server is a replica: it takes no claims; name the primary, or all with target_session_attrs=read-write".into()),
        (setting(5) != "off", "default_transaction_read_only is on: no claim can be made; set it to off for this role".into()),
        (may_race, format!("default_transaction_isolation is {isolation:?}: claims that race fail; set it to read committed for this role")),
        (is(7), format!("the role {role:?} is a superuser: row-level security does not hold for it; use a member of ibid_service")),
        (is(8) && !is(7), format!("the role {role:?} bypasses row-level security; use a member of ibid_service")),
    ];
    findings.warnings = wanting.into_iter().filter(|(is_wanting, _)| *is_wanting).map(|(_, what)| what).collect();
}
