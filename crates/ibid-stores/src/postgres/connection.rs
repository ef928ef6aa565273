//! One connection: its task, its prepared statements, and its load.

use parking_lot::RwLock;

use super::{statements::ALL_STATEMENTS, *};

pub(super) struct PostgresConnection {
    client: Client,
    /// In the order of `ALL_STATEMENTS`; `None` if statements are unnamed.
    prepared: Option<RwLock<Arc<[tokio_postgres::Statement]>>>,
    in_flight: AtomicUsize,
    /// Set before the task ends, so that no further call is sent.
    is_discarded: AtomicBool,
    task: AbortHandle,
}

/// Counts a call as in flight until dropped.
pub(super) struct InFlightCall<'a>(&'a PostgresConnection);

impl PostgresConnection {
    /// Connects, checks the server and prepares the statements. The returned task drives the connection, and ends with
    /// it.
    pub(super) async fn open(
        place: &PostgresUrl, certificates: &ReloadingTlsConfig, limit: Duration,
    ) -> Result<(Self, PostgresFindings, JoinHandle<()>), (ErrorKind, String)> {
        let opening = async {
            let (client, driver) = Self::connect(place, certificates).await?;
            let task = driver.abort_handle();
            let (in_flight, is_discarded) = Default::default();
            let link = Self { client, prepared: None, in_flight, is_discarded, task };
            link.set_up(place).await.map(|(link, findings)| (link, findings, driver))
        };
        match timeout(limit, opening).await {
            Ok(opened) => opened,
            Err(_) => Err((ErrorKind::NotApplied, format!("{place} did not answer within {limit:?}"))),
        }
    }

    /// Connects, and starts to drive the connection. When it ends, each call on it gets its own error.
    async fn connect(
        place: &PostgresUrl, certificates: &ReloadingTlsConfig,
    ) -> Result<(Client, JoinHandle<()>), (ErrorKind, String)> {
        let failed = |error: Error| error::connect_error(&error);
        #[cfg(feature = "simulation")]
        if let Some(connecting) = place.host_name().and_then(crate::simulation::connect) {
            let stream = connecting.await.map_err(|error| (ErrorKind::NotApplied, error.to_string()))?;
            let opened = place.config.connect_raw(stream, tokio_postgres::NoTls).await;
            let (client, connection) = opened.map_err(failed)?;
            return Ok((client, tokio::spawn(async move { drop(connection.await) })));
        }
        let connecting = place.config.connect(tls::connector(certificates).await).await;
        let (client, connection) = connecting.map_err(failed)?;
        Ok((client, tokio::spawn(async move { drop(connection.await) })))
    }

    async fn set_up(mut self, place: &PostgresUrl) -> Result<(Self, PostgresFindings), (ErrorKind, String)> {
        let failed = |error: Error| error::connect_error(&error);
        if !place.unnamed_statements {
            // Functions read again after a race, and must see the other transaction's write. A plan that was made while
            // the table was small must not read all of it later; without a pooler plans are made once.
            let set = "SET default_transaction_isolation = 'read committed'; SET plan_cache_mode = force_generic_plan; \
                SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off; \
                SET statement_timeout = '60s'";
            self.client.batch_execute(set).await.map_err(failed)?;
        }
        let findings = checks::run_checks(&self.client, place).await.map_err(failed)?;
        if let Some(refusal) = &findings.refusal {
            return Err(refusal.clone());
        }
        if !place.unnamed_statements {
            self.prepared = Some(RwLock::new(self.prepare().await.map_err(failed)?));
        }
        Ok((self, findings))
    }

    async fn prepare(&self) -> Result<Arc<[tokio_postgres::Statement]>, Error> {
        let mut prepared = Vec::with_capacity(ALL_STATEMENTS.len());
        for statement in ALL_STATEMENTS {
            prepared.push(self.client.prepare_typed(statement.sql(), statement.param_types()).await?);
        }
        Ok(prepared.into())
    }

    /// Sends one statement, which is one transaction, and waits for its result.
    pub(super) async fn run(&self, what: Statement, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        let Some(prepared) = &self.prepared else {
            let typed: Vec<_> = params.iter().copied().zip(what.param_types().iter().cloned()).collect();
            return self.client.query_typed(what.sql(), &typed).await;
        };
        let nth = ALL_STATEMENTS.iter().position(|one| *one == what).expect("all are listed");
        let statement = prepared.read()[nth].clone();
        match self.client.query(&statement, params).await {
            // The server did not run the statement.
            Err(error) if error::needs_reprepare(&error) => {
                let again = self.prepare().await?;
                let statement = again[nth].clone();
                *prepared.write() = again;
                self.client.query(&statement, params).await
            }
            answered => answered,
        }
    }

    /// Sends a statement that is too rare to prepare.
    pub(super) async fn run_once(&self, sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Result<Vec<Row>, Error> {
        self.client.query_typed(sql, params).await
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_discarded.load(Relaxed) || self.client.is_closed() || self.task.is_finished()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    pub(super) fn begin_call(&self) -> InFlightCall<'_> {
        self.in_flight.fetch_add(1, Relaxed);
        InFlightCall(self)
    }

    /// Closes the connection: a late reply could be taken for that of another call.
    pub(super) fn discard(&self) {
        self.is_discarded.store(true, Relaxed);
        self.task.abort();
    }
}

impl Drop for InFlightCall<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

impl Drop for PostgresConnection {
    fn drop(&mut self) {
        self.task.abort();
    }
}
