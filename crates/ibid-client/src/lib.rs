//! Sends HTTP requests with an idempotency key: one key per operation, the same on every retry and after every restart.
//! A call that gives up says why.
//!
//! ```no_run
//! use ibid_client::{SendOptions, send};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = reqwest::Client::new();
//! let request = client.post("http://127.0.0.1:8080/pay").body("amount=1").build()?;
//! let options = SendOptions::in_folder("/var/lib/shop/keys").operation("order-17");
//! match send(&client, request, &options).await {
//!     Ok(sent) if sent.replayed => println!("paid before: {}", sent.response.status()),
//!     Ok(sent) => println!("{}", sent.response.status()),
//!     Err(error) => println!("{error}"),
//! }
//! # Ok(()) }
//! ```
//!
//! [`send`] is a plain function; `IdempotencyMiddleware` does the same as a `reqwest-middleware` layer. The response
//! decides what happens next:
//!
//! | response | action |
//! |---|---|
//! | none, or an incomplete one | retry, by the [`Schedule`] |
//! | 409 in progress | retry, by the schedule |
//! | 429, 503 | retry after `Retry-After` (bounded), but not before the schedule |
//! | 502, 504 of an ibid gateway that did not get the app's response | retry, by the schedule |
//! | 409 outcome unknown, 422 key reused, any other ibid refusal | return a [`SendError`] |
//! | another 5xx | return the [`SentResponse`]; retry if [`SendOptions::retry_5xx`] is on |
//! | anything else | return the [`SentResponse`] |
//!
//! `Ok` holds the operation's own response, whatever its status. The journal stores the key of a named operation
//! *before* anything is sent. After a success the key stays for as long as the server remembers it
//! ([`SendOptions::server_ttl`]), so that running the operation again returns the same response; after a final 4xx the
//! journal deletes it. 401, 403, 408, 425 and 5xx are not final, because an earlier attempt may have had an effect.
//! Dropping a call's future leaves the key in the journal.
//!
//! The caller chooses the TLS implementation: this crate enables no feature of `reqwest`.

use reqwest::{Client, Request, Response};

#[cfg(feature = "middleware")]
pub use self::middleware::{IdempotencyMiddleware, ResponseInfo};
pub use self::{
    classify::ServerProblem,
    journal::{FileJournal, JournalError, JournalFuture, KeyJournal, MemoryJournal, PendingOperation, StoredKey},
    key::{ClientKey, InvalidKey, KeyGenerator},
    options::{OperationSpec, Schedule, SendOptions},
    outcome::{LastAttempt, SendError, SendErrorReason, SentResponse},
};

use self::retry::{Transport, TransportError, send_with_retries};

mod classify;
mod journal;
mod key;
#[cfg(feature = "middleware")]
mod middleware;
mod options;
mod outcome;
mod retry;

/// Sends a request, and retries it until it has a response or a reason to give up.
///
/// If the request already has the key header, that key is used.
///
/// # Errors
/// A [`SendError`] with the reason, the number of attempts and the result of the last one.
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

/// Runs the guide's code as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/clients.md")]
struct GuideDoctests;
