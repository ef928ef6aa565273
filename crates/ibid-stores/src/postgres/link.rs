//! One connection: its task, its prepared statements, and how much is under way on it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::store::ErrorKind;
use parking_lot::RwLock;
use tokio::{task::AbortHandle, task::JoinHandle, time::timeout};
use tokio_postgres::{
    Client, Error, Row,
    types::{ToSql, Type},
};

use super::{
    checks::{self, Findings},
    faults,
    place::Place,
    statements::{ALL, Statement},
    tls::Connector,
};
use crate::certificates::Certificates;

/// A connection that works, and what was found when it was made.
pub(super) struct Link {
    client: Client,
    /// In the order of [`ALL`]; `None` where statements have no names.
    prepared: Option<RwLock<Arc<[tokio_postgres::Statement]>>>,
    under_way: AtomicUsize,
    task: AbortHandle,
}

/// A call that is under way.
pub(super) struct UnderWay<'a>(&'a Link);

impl Link {
    /// Connects, looks at the server, prepares. Returns what drives the connection too: it ends with it.
    pub(super) async fn open(
        place: &Place, certificates: &Certificates, limit: Duration,
    ) -> Result<(Self, Findings, JoinHandle<()>), (ErrorKind, String)> {
        let opening = async {
            let connecting = place.config.connect(Connector::of(certificates).await).await;
            let (client, connection) = connecting.map_err(|error| faults::of_connecting(&error))?;
            // Whatever ends it, calls on it learn it from their own answers.
            let driver = tokio::spawn(async move { drop(connection.await) });
            let task = driver.abort_handle();
            let link = Self { client, prepared: None, under_way: AtomicUsize::new(0), task };
            link.set_up(place).await.map(|(link, findings)| (link, findings, driver))
        };
        match timeout(limit, opening).await {
            Ok(opened) => opened,
            Err(_) => Err((ErrorKind::NotApplied, format!("{place} did not answer within {limit:?}"))),
        }
    }

    async fn set_up(mut self, place: &Place) -> Result<(Self, Findings), (ErrorKind, String)> {
        let failed = |error: Error| faults::of_connecting(&error);
        if !place.unnamed {
            // The functions look again after a race, and must see what the other wrote.
            let set = "SET default_transaction_isolation = 'read committed'";
            self.client.batch_execute(set).await.map_err(failed)?;
        }
        let findings = checks::look(&self.client, place).await.map_err(failed)?;
        if let Some(refusal) = &findings.refusal {
            return Err((ErrorKind::Rejected, refusal.clone()));
        }
        if !place.unnamed {
            self.prepared = Some(RwLock::new(self.prepare().await.map_err(failed)?));
        }
        Ok((self, findings))
    }

    async fn prepare(&self) -> Result<Arc<[tokio_postgres::Statement]>, Error> {
        let mut prepared = Vec::with_capacity(ALL.len());
        for statement in ALL {
            prepared.push(self.client.prepare_typed(statement.sql(), statement.types()).await?);
        }
        Ok(prepared.into())
    }

    /// Sends one statement, which is one transaction, and waits for its end.
    pub(super) async fn run(&self, what: Statement, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        let Some(prepared) = &self.prepared else {
            let typed: Vec<_> = params.iter().copied().zip(what.types().iter().cloned()).collect();
            return self.client.query_typed(what.sql(), &typed).await;
        };
        let nth = ALL.iter().position(|one| *one == what).expect("all are listed");
        let statement = prepared.read()[nth].clone();
        match self.client.query(&statement, params).await {
            // The server did not run it.
            Err(error) if faults::wants_preparing(&error) => {
                let again = self.prepare().await?;
                let statement = again[nth].clone();
                *prepared.write() = again;
                self.client.query(&statement, params).await
            }
            answered => answered,
        }
    }

    /// Sends a statement that is rare enough not to be prepared.
    pub(super) async fn run_once(&self, sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Result<Vec<Row>, Error> {
        self.client.query_typed(sql, params).await
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed() || self.task.is_finished()
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.load(Relaxed)
    }

    pub(super) fn begin(&self) -> UnderWay<'_> {
        self.under_way.fetch_add(1, Relaxed);
        UnderWay(self)
    }

    /// Closes it: an answer that is overdue may come at any time, and nobody would know whose it is.
    pub(super) fn discard(&self) {
        self.task.abort();
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({} under way)", self.under_way())
    }
}
