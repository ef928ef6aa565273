//! A layer for `reqwest-middleware` clients.

use http::{Extensions, Method};
use reqwest::{Request, Response};
use reqwest_middleware::{Error, Middleware, Next};

use crate::{
    ClientKey, OperationSpec, SendOptions,
    retry::{Transport, TransportError, send_with_retries},
};

/// Gives every POST, PUT, PATCH and DELETE a key, and retries it with that key. Other requests pass unchanged.
///
/// A request extension, [`OperationSpec`], names the operation; the response extension [`ResponseInfo`] describes the
/// result. A call that gives up returns a [`SendError`](crate::SendError) inside
/// [`reqwest_middleware::Error::Middleware`].
///
/// Add it before layers that act on each attempt, such as tracing or signing: it runs them once per attempt.
///
/// ```no_run
/// use ibid_client::{IdempotencyMiddleware, OperationSpec, ResponseInfo, SendOptions};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
///     .with(IdempotencyMiddleware::new(SendOptions::in_folder("/var/lib/shop/keys")))
///     .build();
/// let request = client.post("http://127.0.0.1:8080/pay").body("amount=1");
/// let response = request.with_extension(OperationSpec::named("order-17")).send().await?;
/// println!("replayed: {}", response.extensions().get::<ResponseInfo>().unwrap().replayed);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct IdempotencyMiddleware {
    options: SendOptions,
}

/// Describes how a response was obtained; an extension of the response.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResponseInfo {
    /// Whether this is the stored response of an earlier run.
    pub replayed: bool,
    /// Whether the server ran the operation without protection.
    pub degraded: bool,
    /// The key that was sent.
    pub key: ClientKey,
    /// Number of attempts, at least 1.
    pub attempts: u32,
    /// Why the journal could not record the final response.
    pub journal_error: Option<String>,
}

impl IdempotencyMiddleware {
    /// Makes a layer with these options. It drops an operation name in them, which would apply to every request: use
    /// the extension.
    pub fn new(mut options: SendOptions) -> IdempotencyMiddleware {
        options.operation.name = None;
        IdempotencyMiddleware { options }
    }
}

#[async_trait::async_trait]
impl Middleware for IdempotencyMiddleware {
    async fn handle(
        &self, request: Request, extensions: &mut Extensions, next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let covered = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE].contains(request.method());
        if !covered {
            return next.run(request, extensions).await;
        }
        let operation = extensions.get::<OperationSpec>().cloned().unwrap_or_default();
        let mut through = NextTransport { next, extensions };
        let answer =
            send_with_retries(request, &self.options, &operation, &mut through).await.map_err(Error::middleware)?;
        let told = ResponseInfo {
            replayed: answer.replayed,
            degraded: answer.degraded,
            key: answer.key,
            attempts: answer.attempts,
            journal_error: answer.journal_error.map(|error| error.to_string()),
        };
        let mut response = answer.response;
        response.extensions_mut().insert(told);
        Ok(response)
    }
}

struct NextTransport<'a, 'e> {
    next: Next<'a>,
    extensions: &'e mut Extensions,
}

impl Transport for NextTransport<'_, '_> {
    async fn send_once(&mut self, request: Request) -> Result<Response, TransportError> {
        match self.next.clone().run(request, self.extensions).await {
            Ok(response) => Ok(response),
            Err(Error::Reqwest(error)) => Err(error.into()),
            // Another layer rejected the request; a retry would not change that.
            Err(error) => Err(TransportError { error: error.into(), is_permanent: true }),
        }
    }
}
