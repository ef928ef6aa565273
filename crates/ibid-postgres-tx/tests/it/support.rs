//! What the tests share: a database with our schema and a table of effects, and both drivers behind one face.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use ibid::{
    Policy, Scope,
    policy::{OnConcurrent, OnUnknown},
    store::Store,
};
use ibid_postgres_tx::{IdempotentCall, Tx, TxError, TxFuture, TxOutcome, TxPool, run_tx};
use ibid_stores::{
    RemoteOptions,
    postgres::{MigrateAction, Postgres, migrate},
};
use sqlx::postgres::{PgPool, PgPoolOptions};
use testbed::TestPostgres;

pub(crate) type TestError = Box<dyn std::error::Error + Send + Sync>;

/// A driver, as far as the tests need one.
pub(crate) trait TestDriver: 'static {
    type Pool: TxPool + Clone + 'static;
    fn pool(url: &str, size: u32) -> impl Future<Output = Self::Pool> + Send;
    /// In an operation.
    fn execute<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: &'t str) -> TxFuture<'t, Result<(), TestError>>;
    /// A number, in an operation.
    fn query_number<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: &'t str) -> TxFuture<'t, Result<i64, TestError>>;
    /// Does something in a savepoint, and takes it back.
    fn execute_and_roll_back<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: &'t str) -> TxFuture<'t, Result<(), TestError>>;
    /// Outside of any transaction.
    fn execute_outside<'t>(pool: &'t Self::Pool, sql: &'t str) -> TxFuture<'t, Result<(), TestError>>;
}

pub(crate) struct SqlxDriver;
pub(crate) struct TokioPostgresDriver;

impl TestDriver for SqlxDriver {
    type Pool = PgPool;

    async fn pool(url: &str, size: u32) -> PgPool {
        let options = PgPoolOptions::new().max_connections(size).acquire_timeout(Duration::from_secs(60));
        options.connect_lazy(url).unwrap()
    }

    fn execute<'t>(tx: &'t mut Tx<'_, PgPool>, sql: &'t str) -> TxFuture<'t, Result<(), TestError>> {
        let sql = sqlx::AssertSqlSafe(sql.to_owned());
        Box::pin(async move { Ok(sqlx::raw_sql(sql).execute(&mut **tx).await.map(drop)?) })
    }

    fn query_number<'t>(tx: &'t mut Tx<'_, PgPool>, sql: &'t str) -> TxFuture<'t, Result<i64, TestError>> {
        let sql = sqlx::AssertSqlSafe(sql.to_owned());
        Box::pin(async move { Ok(sqlx::query_scalar(sql).fetch_one(&mut **tx).await?) })
    }

    fn execute_and_roll_back<'t>(tx: &'t mut Tx<'_, PgPool>, sql: &'t str) -> TxFuture<'t, Result<(), TestError>> {
        Box::pin(async move {
            let mut inner = sqlx::Connection::begin(&mut **tx).await?;
            drop(Self::execute(&mut inner, sql).await);
            Ok(inner.rollback().await?)
        })
    }

    fn execute_outside<'t>(pool: &'t PgPool, sql: &'t str) -> TxFuture<'t, Result<(), TestError>> {
        let sql = sqlx::AssertSqlSafe(sql.to_owned());
        Box::pin(async move { Ok(sqlx::raw_sql(sql).execute(pool).await.map(drop)?) })
    }
}

impl TestDriver for TokioPostgresDriver {
    type Pool = deadpool_postgres::Pool;

    async fn pool(url: &str, size: u32) -> deadpool_postgres::Pool {
        let config = url.parse().unwrap();
        let manager = deadpool_postgres::Manager::new(config, tokio_postgres::NoTls);
        deadpool_postgres::Pool::builder(manager).max_size(size as usize).build().unwrap()
    }

    fn execute<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: &'t str) -> TxFuture<'t, Result<(), TestError>> {
        Box::pin(async move { Ok(tx.batch_execute(sql).await?) })
    }

    fn query_number<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: &'t str) -> TxFuture<'t, Result<i64, TestError>> {
        Box::pin(async move { Ok(tx.query_one(sql, &[]).await?.try_get(0)?) })
    }

    fn execute_and_roll_back<'t>(tx: &'t mut Tx<'_, Self::Pool>, sql: &'t str) -> TxFuture<'t, Result<(), TestError>> {
        Box::pin(async move {
            let inner = tx.savepoint().await?;
            drop(inner.batch_execute(sql).await);
            Ok(inner.rollback().await?)
        })
    }

    fn execute_outside<'t>(pool: &'t Self::Pool, sql: &'t str) -> TxFuture<'t, Result<(), TestError>> {
        Box::pin(async move { Ok(pool.get().await?.batch_execute(sql).await?) })
    }
}

/// One test per case and driver.
macro_rules! with_both_drivers {
    ($($case:ident)*) => {
        mod sqlx_ {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case::<crate::support::SqlxDriver>().await })*
        }
        mod tokio_postgres_ {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case::<crate::support::TokioPostgresDriver>().await })*
        }
    };
}
pub(crate) use with_both_drivers;

/// A database with our schema, and a table `effects` for what operations do.
pub(crate) struct TxDatabase {
    pub(crate) server: &'static TestPostgres,
    pub(crate) name: String,
}

impl TxDatabase {
    pub(crate) fn new() -> Self {
        let server = TestPostgres::shared();
        let name = database(server);
        Self { server, name }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url("gateway", &self.name)
    }

    /// As superuser.
    pub(crate) fn sql(&self, sql: &str) -> String {
        self.server.sql(&self.name, sql)
    }

    pub(crate) fn effects(&self) -> usize {
        self.sql("SELECT count(*) FROM effects").parse().unwrap()
    }

    pub(crate) fn remembered_answers(&self) -> usize {
        self.sql("SELECT count(*) FROM ibid.idempotency_keys").parse().unwrap()
    }

    pub(crate) async fn store(&self) -> Postgres {
        open(&self.url()).await
    }
}

pub(crate) async fn open(url: &str) -> Postgres {
    // On a loaded machine an answer may take a while.
    let store = Postgres::open(url, RemoteOptions { timeout: Duration::from_secs(20), ..RemoteOptions::default() })
        .await
        .unwrap();
    let wanting = store.guarantees().warnings;
    assert!(wanting.is_empty(), "{wanting:?}");
    store
}

/// A fresh database on a server.
pub(crate) fn database(server: &TestPostgres) -> String {
    let name = server.create_database();
    let url = server.url("migrator", &name);
    // Callers are in a runtime already.
    let migrating = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(migrate(&url, MigrateAction::Up)).unwrap();
    });
    migrating.join().unwrap();
    server.sql(&name, "CREATE TABLE effects (what text UNIQUE); GRANT ALL ON effects TO gateway");
    name
}

pub(crate) fn call(key: &str) -> IdempotentCall {
    IdempotentCall::new(&scope(), key).request(b"12.50 EUR").tenant("acme").user("u1").endpoint("POST /payments")
}

pub(crate) fn scope() -> Scope {
    Scope::from_parts(&["acme", "payments"])
}

/// Waits for others for a long while: the machine may be loaded.
pub(crate) fn patient_policy() -> Policy {
    let mut policy = Policy::ietf();
    policy.on_concurrent = OnConcurrent::Wait;
    policy.wait_timeout = Duration::from_secs(60);
    policy
}

pub(crate) fn retrying_policy() -> Policy {
    let mut policy = patient_policy();
    policy.on_unknown = OnUnknown::Retry;
    policy
}

pub(crate) fn paid_response(body: &str) -> Response<Bytes> {
    let response = Response::builder().status(StatusCode::CREATED).header("content-type", "text/plain");
    response.header("set-cookie", "never=stored").body(Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

/// The thing itself, with arguments of its own.
pub(crate) async fn run<D, F, E>(
    pool: &D::Pool, policy: Policy, call: IdempotentCall, operation: F,
) -> Result<TxOutcome, TxError>
where
    D: TestDriver,
    F: for<'t, 'c> FnMut(&'t mut Tx<'c, D::Pool>) -> TxFuture<'t, Result<Response<Bytes>, E>> + Send,
    E: Into<TestError> + Send,
{
    run_tx(pool, &policy, &call, operation).await
}

/// Comes back once it is so.
pub(crate) async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..600 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never came: {what}");
}
