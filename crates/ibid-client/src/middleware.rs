//! A layer for clients of `reqwest-middleware`.

use http::{Extensions, Method};
use reqwest::{Request, Response};
use reqwest_middleware::{Error, Middleware, Next};

use crate::{
    ClientKey, OperationSpec, SendOptions,
    retry::{Transport, TransportError, send_with_retries},
};

/// Gives every POST, PUT, PATCH and DELETE a key, and retries it with that key; other requests pass untouched.
///
/// A request's operation is named with an extension; the answer's extensions hold [`ResponseInfo`]. What stops it is a
/// [`SendError`](crate::SendError) inside [`reqwest_middleware::Error::Middleware`].
///
/// Put it before layers that act on each attempt, such as tracing or signing: it runs them once per attempt.
///
/// ```no_run
/// use ibid_client::{Idempotent, Operation, Options, Told};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
///     .with(Idempotent::new(Options::in_folder("/var/lib/shop/keys")))
///     .build();
/// let request = client.post("http://127.0.0.1:8080/pay").body("amount=1");
/// let response = request.with_extension(Operation::named("order-17")).send().await?;
/// println!("replayed: {}", response.extensions().get::<Told>().unwrap().replayed);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct IdempotencyMiddleware {
    options: SendOptions,
}

/// What is known about an answer besides itself; an extension of the response.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResponseInfo {
    /// Whether the operation had been carried out before, and this is what was answered then.
    pub replayed: bool,
    /// Whether the server said that it ran without protection.
    pub degraded: bool,
    /// The key that it was sent with.
    pub key: ClientKey,
    /// How many attempts it took.
    pub attempts: u32,
    /// Whether the journal failed to note the end of the operation, and why.
    pub journal_error: Option<String>,
}

impl IdempotencyMiddleware {
    /// A layer with these options. A name in them would be every request's, so it is dropped: requests are named one by one.
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
            // Another layer's: it knows what it does, and says no.
            Err(error) => Err(TransportError { error: error.into(), is_permanent: true }),
        }
    }
}
