//! The client's half of idempotency: one key per operation, the same on every retry and after every restart, and an end
//! that says why.
//!
//! ```no_run
//! use ibid_client::{Options, send};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = reqwest::Client::new();
//! let request = client.post("http://127.0.0.1:8080/pay").body("amount=1").build()?;
//! let options = Options::in_folder("/var/lib/shop/keys").operation("order-17");
//! match send(&client, request, &options).await {
//!     Ok(answer) if answer.replayed => println!("it was paid before: {}", answer.response.status()),
//!     Ok(answer) => println!("{}", answer.response.status()),
//!     Err(stopped) => println!("{stopped}"),
//! }
//! # Ok(()) }
//! ```
//!
//! [`send`] is a plain function; [`IdempotencyMiddleware`] is the same as a layer of `reqwest-middleware`. What is retried and what is not:
//!
//! | answer | then |
//! |---|---|
//! | none, or not the whole of it | again, by the [`Schedule`] |
//! | 409 in progress | again, by the schedule |
//! | 429, 503 | again, by `Retry-After` (bounded), and not before the schedule |
//! | 502, 504 of an ibid gateway that did not get the app's answer | again, by the schedule |
//! | 409 outcome unknown, 422 key reused, any other refusal of ibid | [`SendError`] |
//! | another 5xx | the [`SentResponse`]; again if [`SendOptions::retry_5xx`] |
//! | anything else | the [`Response`] |
//!
//! `Ok` means that the operation's own answer is here, whatever its status. The key of a named operation is kept *before*
//! anything is sent. After a success it stays for as long as the server remembers it ([`SendOptions::server_ttl`]), so that running
//! the operation again gets the same answer; after a final 4xx it is forgotten. 401, 403, 408, 425 and 5xx are not
//! final, because an earlier attempt may have had its effect. Dropping a call's future leaves the key where it is.
//!
//! TLS is the caller's choice: this crate turns no feature of `reqwest` on.

use reqwest::{Client, Request, Response};

#[cfg(feature = "middleware")]
pub use self::middleware::{IdempotencyMiddleware, ResponseInfo};
pub use self::{
    classify::ServerProblem,
    journal::{FileJournal, JournalError, JournalFuture, KeyJournal, MemoryJournal, PendingOperation, StoredKey},
    key::{ClientKey, InvalidKey, KeyGenerator},
    options::{OperationSpec, SendOptions},
    outcome::{LastAttempt, SendError, SendErrorReason, SentResponse},
    schedule::Schedule,
};

use self::retry::{Transport, TransportError, send_with_retries};

mod buffered;
mod classify;
mod journal;
mod key;
#[cfg(feature = "middleware")]
mod middleware;
mod options;
mod outcome;
mod retry;
mod schedule;

/// Sends a request until it has its answer, or a reason to stop.
///
/// A request that carries the key header already keeps that key.
///
/// # Errors
/// Why it stopped: after how many attempts, and what the last one brought.
pub async fn send(client: &Client, request: Request, options: &SendOptions) -> Result<SentResponse, SendError> {
    send_with_retries(request, options, &options.operation, &mut ClientTransport(client)).await
}

struct ClientTransport<'a>(&'a Client);

impl Transport for ClientTransport<'_> {
    async fn send_once(&mut self, request: Request) -> Result<Response, TransportError> {
        self.0.execute(request).await.map_err(TransportError::from)
    }
}

impl From<reqwest::Error> for TransportError {
    fn from(error: reqwest::Error) -> Self {
        let for_good = error.is_builder() || error.is_redirect();
        TransportError { error: error.into(), is_permanent: for_good }
    }
}

/// The guide's code, tested with the rest.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/clients.md")]
struct GuideDoctests;
