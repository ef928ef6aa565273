//! The exchange API: apps in any language use the engine of this process without a proxy in between.
//!
//! It is a transport around [`Ibid::handle`]: `POST /v1/exchanges` begins an exchange, `…/end` carries the handler's
//! response ([`calls`], [`handler_app`]). Policies decide as they do in the gateway. [`pending`] has the exchanges of this process; a
//! [`handle`] ends an exchange that another process began.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ibid::Ibid;
use tokio::{
    sync::{Semaphore, oneshot, watch},
    time::timeout,
};

pub(crate) use self::handler_app::ProbeClient;
use self::{calls::ApiState, socket::ApiListener};
use crate::{
    admin::idle::{self, IdleLimits},
    config::ApiSettings,
    cores::Cores,
    watch::LiveConfig,
};

mod calls;
mod handle;
mod handler_app;
mod messages;
#[doc(hidden)]
pub use messages::parse_any_message;
mod pending;
mod problem;
mod socket;

/// The description of the API, also in `docs/exchange-api.json`.
pub const OPENAPI_DOCUMENT: &str = include_str!("api/openapi.json");

/// At shutdown: maximum time for the settlements of exchanges that were given up to reach the store.
const SETTLE_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// At shutdown: maximum time for the last calls to get their answers.
const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(2);
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A listening exchange API.
pub struct ApiServer {
    listener: ApiListener,
    /// Serve the connections. The work on an exchange runs on the core of its `begin`.
    cores: Cores,
    state: Arc<ApiState>,
}

impl ApiServer {
    pub async fn bind(
        settings: &ApiSettings, live: Arc<LiveConfig>, ibid: Ibid, stop: watch::Receiver<bool>,
    ) -> Result<Self, String> {
        let listener = ApiListener::bind(&settings.listen).await;
        let listener = listener.map_err(|why| format!("api.listen: {} cannot be bound: {why}", settings.listen))?;
        let cores = Cores::start().map_err(|why| format!("api: the threads cannot be started: {why}"))?;
        let token = settings.token.as_ref().map(|token| token.expose().to_owned());
        Ok(Self { listener, cores, state: Arc::new(ApiState::new(live, ibid, token, stop)) })
    }

    /// The address, unless it is a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.address()
    }

    /// Serves until `ended`. Exchanges that began before a shutdown can end until then; afterwards their handles are
    /// still valid.
    pub async fn run(self, mut ended: oneshot::Receiver<()>) {
        let Self { listener, cores, state } = self;
        let limits = state.live.now().settings.limits.clone();
        let room = Arc::new(Semaphore::new(limits.max_connections));
        let (limits, (close, closing)) = (IdleLimits::from(&limits), watch::channel(false));
        loop {
            let next = async {
                let permit = room.clone().acquire_owned().await.expect("never closed");
                (permit, listener.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                _ = &mut ended => break,
                next = next => next,
            };
            match accepted {
                Ok(Some(socket)) => {
                    let (state, mut closing) = (state.clone(), closing.clone());
                    cores.spawn(async move {
                        let _permit = permit;
                        let Ok(socket) = socket.into_stream() else { return };
                        let stop = async move { drop(closing.wait_for(|is_closing| *is_closing).await) };
                        idle::serve(socket, limits, stop, |request| state.clone().handle(request)).await;
                    });
                }
                Ok(None) => {}
                Err(why) => {
                    tracing::error!(%why, "api: a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
        state.give_up_work().await;
        let _ = close.send(true);
        let _ = timeout(LAST_ANSWERS_TIMEOUT, cores.wait_idle()).await;
        cores.abort().await;
        let later = state.ibid.engine().settle_queue();
        let _ = timeout(SETTLE_FLUSH_TIMEOUT, later.wait_until_empty()).await;
        cores.stop().await;
    }
}
