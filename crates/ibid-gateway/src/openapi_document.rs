//! Annotates the app's own OpenAPI document as it passes, like `ibid openapi` does offline.
//!
//! Every request goes to the app, which decides who may read the document. The gateway sends the entity tag of the
//! version that it annotated last, so a 304 means that this version is still current. The client's conditions do not
//! reach the app: they refer to the annotated document, which also changes with the configuration.
//!
//! Invariant: a response is the app's own, unchanged, or the whole annotated document with its own entity tag.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use ibid::{
    Ibid, RefusalReason,
    http::{MemoryReservation, ResponseBody},
};
use ibid_tools::openapi::{AnnotateOutcome, annotate_text};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::{sync::OwnedMutexGuard, time::timeout};

use self::conditions::Conditions;
use crate::{
    commands::openapi::find_route,
    proxy::{ProxyResponseBody, RequestFailure},
    routes::RouteTable,
    server::client_body::ClientBody,
};

mod conditions;

/// Maximum size in bytes. Larger documents pass unchanged.
const MAX_DOCUMENT: u64 = 10 << 20;
/// Bytes to reserve per byte of the document while annotating it: two trees of nodes and the new text.
const MEMORY_PER_BYTE: u64 = 16;

/// Headers of the app's response that do not apply to the annotated document.
pub(crate) const REPLACED_HEADERS: [HeaderName; 9] = [
    header::ACCEPT_RANGES,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::LAST_MODIFIED,
    header::TRAILER,
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("content-md5"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("repr-digest"),
];

pub(crate) type Answer = Response<ResponseBody<ProxyResponseBody>>;

/// A document of the app, under one configuration.
pub(crate) struct Document {
    pub(crate) path: String,
    routes: RouteTable,
    /// Held while annotating, so that only one version is annotated at a time.
    annotating: Arc<tokio::sync::Mutex<()>>,
    last: Mutex<Option<Arc<Version>>>,
    told_of_memory: AtomicBool,
}

struct Version {
    /// Host, path and query of the request that returned it.
    target: String,
    etag: Option<HeaderValue>,
    /// SHA-256 of its bytes, if all of them were read.
    digest: Option<[u8; 32]>,
    /// The annotated document, or why there is none.
    made: Result<Annotated, String>,
}

#[derive(Clone)]
struct Annotated {
    text: Bytes,
    etag: HeaderValue,
    content_type: HeaderValue,
    _memory: Arc<MemoryReservation>,
}

/// What identifies a response of the app that is a document.
#[derive(Clone)]
struct DocumentResponse {
    target: String,
    etag: Option<HeaderValue>,
    content_type: HeaderValue,
}

pub(crate) struct Asked {
    pub(crate) document: Arc<Document>,
    pub(crate) ibid: Ibid,
    /// Maximum time for the app to send the body.
    pub(crate) timeout: Duration,
    /// The refusal if the body is late or breaks off.
    pub(crate) failure: RequestFailure,
}

pub(crate) enum BodyRead {
    Whole(Bytes, Option<HeaderMap>, MemoryReservation),
    /// Why reading stopped, and the complete body for the client.
    Begun(NotAnnotated, ResponseBody<ProxyResponseBody>),
}

pub(crate) enum NotAnnotated {
    /// Permanent for these bytes.
    Wrong(String),
    /// Temporary.
    NoMemory,
}

impl Document {
    pub(crate) fn new(path: String, routes: RouteTable) -> Arc<Self> {
        let (annotating, last, told_of_memory) = Default::default();
        Arc::new(Self { path, routes, annotating, last, told_of_memory })
    }

    /// If the last version has these bytes, records that another response had them too, and returns that version.
    fn same_bytes(&self, digest: [u8; 32], response: &DocumentResponse) -> Option<Arc<Version>> {
        let mut last = self.last.lock();
        let same = last.as_ref().filter(|last| last.digest == Some(digest))?;
        let DocumentResponse { target, etag, content_type } = response.clone();
        let made = same.made.clone().map(|made| Annotated { content_type, ..made });
        let version = Arc::new(Version { target, etag, digest: Some(digest), made });
        *last = Some(version.clone());
        Some(version)
    }

    /// Makes a version the last one. Logs why it passes unchanged, unless that is already logged.
    fn keep(&self, version: Arc<Version>) {
        let last = self.last.lock().replace(version.clone());
        let Err(why) = &version.made else { return };
        let is_known = last.is_some_and(|last| {
            (&last.target, &last.etag, &last.digest) == (&version.target, &version.etag, &version.digest)
                && last.made.as_ref().err() == Some(why)
        });
        if !is_known {
            self.warn(why);
        }
    }

    fn warn(&self, why: &str) {
        tracing::warn!(path = self.path, why, "openapi: the document passes unchanged");
    }

    fn warn_of_memory(&self) {
        if !self.told_of_memory.swap(true, Relaxed) {
            self.warn(&format!("buffer_memory has no room for it: it takes {MEMORY_PER_BYTE} times its size"));
        }
    }

    /// Annotates a version. Blocks the thread.
    fn annotate(&self, given: &[u8], content_type: HeaderValue, ibid: &Ibid) -> Result<Annotated, NotAnnotated> {
        let text = std::str::from_utf8(given).map_err(|why| NotAnnotated::Wrong(format!("it is not UTF-8: {why}")))?;
        let _working = ibid.reserve(given.len() as u64 * MEMORY_PER_BYTE).ok_or(NotAnnotated::NoMemory)?;
        let is_yaml = is_yaml(&content_type) == Some(true);
        let done = annotate_text(text, is_yaml, &find_route(&self.routes), None)
            .map_err(|wrong| NotAnnotated::Wrong(format!("line {}: {}", wrong.line, wrong.why)))?;
        let memory = ibid.reserve(done.text.len() as u64).ok_or(NotAnnotated::NoMemory)?;
        self.tell(&done);
        let text = Bytes::from(done.text);
        let digest = data_encoding::HEXLOWER.encode(&Sha256::digest(&text)[..16]);
        let etag = HeaderValue::from_str(&format!("\"{digest}\"")).expect("hexadecimal digits");
        Ok(Annotated { text, etag, content_type, _memory: Arc::new(memory) })
    }

    fn tell(&self, done: &AnnotateOutcome) {
        let AnnotateOutcome { operations, covered, .. } = *done;
        if covered == 0 {
            let why = "do the paths of its servers and the routes agree?";
            tracing::warn!(path = self.path, operations, why, "openapi: no operation of the document is covered");
        } else {
            tracing::info!(path = self.path, operations, covered, "openapi: document annotated");
        }
        for (line, note) in &done.notes {
            tracing::debug!(path = self.path, line, note, "openapi");
        }
    }
}

impl Asked {
    /// Forwards the request to the app and annotates the response if it is a document.
    pub(crate) async fn answer<F>(
        self, mut request: Request<ClientBody>, send: impl FnOnce(Request<ClientBody>) -> F,
    ) -> Answer
    where
        F: Future<Output = Answer>,
    {
        let is_head = request.method() == Method::HEAD;
        // A response to HEAD has no body to compute the annotated document's headers from.
        *request.method_mut() = Method::GET;
        let target = target(&request);
        let conditions = Conditions::take(request.headers_mut());
        let headers = request.headers_mut();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let known = self.document.last.lock().clone().filter(|last| last.target == target && last.etag.is_some());
        // The gateway has no copy of a version that passes unchanged. A 304 then only helps a client that has one.
        let known = known.filter(|known| known.made.is_ok() || conditions.hold(known.etag.as_ref()));
        if let Some(etag) = known.as_ref().and_then(|known| known.etag.as_ref()) {
            headers.insert(header::IF_NONE_MATCH, etag.clone());
        }
        let answer = send(request).await;
        let answer = match (answer.status(), known) {
            (StatusCode::NOT_MODIFIED, Some(known)) => match &known.made {
                Ok(annotated) => annotated.instead_of(answer),
                Err(_) => answer,
            },
            (StatusCode::OK, _) => self.annotated(answer, target).await,
            _ => answer,
        };
        let is_unmodified = answer.status() == StatusCode::OK && conditions.hold(answer.headers().get(header::ETAG));
        let answer = if is_unmodified { not_modified(answer) } else { answer };
        if is_head { answer.map(|_| ResponseBody::whole("", None)) } else { answer }
    }

    async fn annotated(&self, answer: Answer, target: String) -> Answer {
        let etag = answer.headers().get(header::ETAG).filter(|etag| conditions::opaque(etag).is_some()).cloned();
        let left = |why: String, etag| Arc::new(Version { target: target.clone(), etag, digest: None, made: Err(why) });
        let content_type = match document_type(answer.headers()) {
            Ok(content_type) => content_type,
            Err(why) => {
                self.document.keep(left(why, etag));
                return answer;
            }
        };
        let is_left = |last: Arc<Version>| last.target == target && last.etag == etag && last.made.is_err();
        if etag.is_some() && self.document.last.lock().clone().is_some_and(is_left) {
            return answer;
        }
        let (head, body) = answer.into_parts();
        let (given, trailers, memory) = match timeout(self.timeout, read_body(&self.ibid, body)).await {
            Ok(Ok(BodyRead::Whole(given, trailers, memory))) => (given, trailers, memory),
            Ok(Ok(BodyRead::Begun(unread, body))) => {
                match unread {
                    NotAnnotated::Wrong(why) => self.document.keep(left(why, etag)),
                    NotAnnotated::NoMemory => self.document.warn_of_memory(),
                }
                return Response::from_parts(head, body);
            }
            Ok(Err(why)) => return self.failed(RefusalReason::UpstreamLost, &why),
            Err(_) => {
                return self.failed(RefusalReason::UpstreamTimeout, "the body did not end within limits.reply_timeout");
            }
        };
        let version = self.version(given.clone(), DocumentResponse { target, etag, content_type }).await;
        match version.as_ref().map(|version| &version.made) {
            Some(Ok(annotated)) => annotated.instead_of(Response::from_parts(head, ResponseBody::whole("", None))),
            _ => {
                Response::from_parts(head, ResponseBody::begun(given, Some(memory), ResponseBody::whole("", trailers)))
            }
        }
    }

    /// Returns the version with these bytes and makes it the last one. `None` if it cannot be annotated now.
    async fn version(&self, given: Bytes, response: DocumentResponse) -> Option<Arc<Version>> {
        let digest: [u8; 32] = Sha256::digest(&given).into();
        if let Some(same) = self.document.same_bytes(digest, &response) {
            return Some(same);
        }
        let alone = self.document.annotating.clone().lock_owned().await;
        // Another request may have annotated it meanwhile.
        if let Some(same) = self.document.same_bytes(digest, &response) {
            return Some(same);
        }
        let DocumentResponse { target, etag, content_type } = response;
        // Runs to its end even if the client disconnects, so that the next request finds the result.
        let (document, ibid) = (self.document.clone(), self.ibid.clone());
        let work = move || {
            let _alone: OwnedMutexGuard<()> = alone;
            let made = match document.annotate(&given, content_type, &ibid) {
                Ok(made) => Ok(made),
                Err(NotAnnotated::Wrong(why)) => Err(why),
                Err(NotAnnotated::NoMemory) => {
                    document.warn_of_memory();
                    return None;
                }
            };
            let version = Arc::new(Version { target, etag, digest: Some(digest), made });
            document.keep(version.clone());
            Some(version)
        };
        tokio::task::spawn_blocking(work).await.ok().flatten()
    }

    fn failed(&self, reason: RefusalReason, why: &str) -> Answer {
        self.failure.refuse(reason, why).0.map(ResponseBody::untouched)
    }
}

impl Annotated {
    fn instead_of(&self, answer: Answer) -> Answer {
        let mut answer = answer.map(|_| ResponseBody::whole(self.text.clone(), None));
        *answer.status_mut() = StatusCode::OK;
        let headers = answer.headers_mut();
        REPLACED_HEADERS.iter().for_each(|name| drop(headers.remove(name)));
        headers.insert(header::ETAG, self.etag.clone());
        headers.insert(header::CONTENT_TYPE, self.content_type.clone());
        headers.insert(header::CONTENT_LENGTH, self.text.len().into());
        answer
    }
}

/// Reads a body unless it is too large.
pub(crate) async fn read_body(ibid: &Ibid, mut body: ResponseBody<ProxyResponseBody>) -> Result<BodyRead, String> {
    let too_large = || NotAnnotated::Wrong(format!("it is larger than {} MiB", MAX_DOCUMENT >> 20));
    if body.size_hint().lower() > MAX_DOCUMENT {
        return Ok(BodyRead::Begun(too_large(), body));
    }
    let Some(mut memory) = ibid.reserve(0) else { return Ok(BodyRead::Begun(NotAnnotated::NoMemory, body)) };
    let (mut given, mut trailers) = (Vec::new(), None);
    while let Some(frame) = Pin::new(&mut body).frame().await {
        match frame.map_err(|why| why.to_string())?.into_data() {
            Ok(data) => {
                let has_room = memory.grow(data.len() as u64);
                given.extend_from_slice(&data);
                let is_too_large = given.len() as u64 > MAX_DOCUMENT;
                if is_too_large || !has_room {
                    let unread = if is_too_large { too_large() } else { NotAnnotated::NoMemory };
                    return Ok(BodyRead::Begun(unread, ResponseBody::begun(given.into(), Some(memory), body)));
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    Ok(BodyRead::Whole(given.into(), trailers, memory))
}

/// Whether a media type is YAML; `None` if it is neither YAML nor JSON.
pub(crate) fn is_yaml(content_type: &HeaderValue) -> Option<bool> {
    let media = content_type.to_str().ok()?.split(';').next()?.trim().to_ascii_lowercase();
    match media.as_str() {
        "application/json" | "text/json" => Some(false),
        "application/yaml" | "application/x-yaml" | "text/yaml" | "text/x-yaml" => Some(true),
        _ if media.ends_with("+json") => Some(false),
        _ if media.ends_with("+yaml") => Some(true),
        _ => None,
    }
}

/// Returns the media type of a response that may be a document, or why it is none.
pub(crate) fn document_type(headers: &HeaderMap) -> Result<HeaderValue, String> {
    let shown = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    if let Some(coding) = headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity") {
        return Err(format!("its content coding is {}, although identity was asked for", shown(coding)));
    }
    match headers.get(header::CONTENT_TYPE) {
        Some(found) if is_yaml(found).is_some() => Ok(found.clone()),
        Some(other) => Err(format!("its media type is {}, neither JSON nor YAML", shown(other))),
        None => Err("it has no media type".into()),
    }
}

/// Identifies the document: apps with several hosts may have one for each.
fn target<B>(request: &Request<B>) -> String {
    let uri = request.uri();
    let host = match uri.authority() {
        Some(authority) => authority.as_str(),
        None => request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default(),
    };
    format!("{host} {}", uri.path_and_query().map_or("", |found| found.as_str()))
}

fn not_modified(mut answer: Answer) -> Answer {
    *answer.status_mut() = StatusCode::NOT_MODIFIED;
    for name in [header::CONTENT_LENGTH, header::CONTENT_TYPE, header::CONTENT_ENCODING, header::TRAILER] {
        answer.headers_mut().remove(name);
    }
    answer.map(|_| ResponseBody::whole("", None))
}
