//! The configuration in force, and how another takes its place without dropping a request.
//!
//! A request takes one [`Snapshot`] and keeps it to its end. A changed file is read again, checked, and swapped in;
//! one that is wrong, or that would forget what is remembered, is refused and said so.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderName, Method, request::Parts};
use ibid::{
    Quota, Reason, Refusal, Refusals,
    http::{Protocol, Routed, Routing, key_headers},
};

use crate::{
    admin::auth::Tokens,
    config::{ConfigError, Env, Seal, ServeArgs, Settings},
    contract_page,
    jwt::Verifier,
    proxy::Body,
    routes::Route,
    tls,
    trace::Collecting,
    upstream::{self, Target, Upstream},
};

/// How often the file is looked at. Its content is compared, so any way of replacing it is seen.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Everything that a request is decided by.
pub struct Snapshot {
    /// As configured.
    pub settings: Settings,
    /// By URL.
    upstreams: HashMap<String, Arc<Upstream<Body>>>,
    default: Arc<Upstream<Body>>,
    /// The same upstreams for gRPC calls, by the same URLs: over HTTP/2 in any case.
    for_calls: HashMap<String, Arc<Upstream<Body>>>,
    /// How the listener speaks TLS, if it does.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// How the admin port does.
    pub admin_tls: Option<Arc<rustls::ServerConfig>>,
    /// Verifies callers' tokens.
    jwt: Option<Arc<Verifier>>,
    /// Who takes traces, if anybody does.
    pub(crate) collector: Option<Arc<Collecting>>,
    /// Who may use the admin port.
    pub tokens: Tokens,
    /// The published contract.
    pub page: Page,
}

/// The published contract, rendered.
#[derive(Debug)]
pub struct Page {
    /// For people.
    pub html: String,
    /// For programs.
    pub json: String,
}

/// The upstream that a request goes to, in its extensions.
#[derive(Clone)]
pub struct Chosen {
    /// Where to.
    pub upstream: Arc<Upstream<Body>>,
    /// How refusals are written where no policy covers the request.
    pub refusals: Refusals,
    routed: Routed,
}

/// The snapshot in force.
pub struct Live {
    now: ArcSwap<Snapshot>,
    args: ServeArgs,
    /// What tenants may begin: counted on while its limits change.
    quota: Arc<Quota>,
}

/// What became of a changed file.
#[derive(Debug)]
pub enum Reload {
    /// It says the same as before.
    Unchanged,
    /// It is in force. What it cannot change without a restart is listed.
    Taken(Vec<&'static str>),
    /// It is wrong; the old one stays.
    Wrong(String),
    /// It would forget what is remembered; the old one stays.
    Forgets(Vec<String>),
}

impl Chosen {
    /// The one upstream that there is, with nothing covered.
    pub fn only(upstream: Arc<Upstream<Body>>) -> Self {
        Self { upstream, refusals: Refusals::Problem, routed: Routed::Pass }
    }
}

impl Snapshot {
    /// Connects nothing yet; upstreams of `before` keep their connections.
    ///
    /// # Errors
    /// If an upstream or its certificates make no sense.
    pub fn new(settings: Settings, before: Option<&Self>) -> Result<Self, String> {
        let (mut upstreams, mut for_calls) = (HashMap::new(), HashMap::new());
        let routes = settings.routes.iter().filter_map(|route| route.upstream.as_ref());
        for url in routes.chain([&settings.upstream]) {
            let known = before.filter(|before| before.reuses_upstreams_for(&settings));
            for (protocol, all) in [(Protocol::Http, &mut upstreams), (Protocol::Grpc, &mut for_calls)] {
                let upstream = match known.and_then(|before| before.upstreams(protocol).get(url)) {
                    Some(known) => known.clone(),
                    None => connectable(url, protocol, &settings)?,
                };
                all.insert(url.clone(), upstream);
            }
        }
        let default = upstreams[&settings.upstream].clone();
        let page = Page {
            html: contract_page::html(&settings.routes),
            json: format!("{:#}\n", contract_page::json(&settings.routes)),
        };
        // TLS is not turned off without a restart: until then, the last certificate goes on serving.
        let tls = match &settings.tls {
            Some(tls) => Some(tls::for_listener(tls)?),
            None => before.and_then(|before| before.tls.clone()),
        };
        let admin_tls = match settings.admin.as_ref().and_then(|admin| admin.tls.as_ref()) {
            Some(tls) => Some(tls::for_admin(tls)?),
            None => before.and_then(|before| before.admin_tls.clone()),
        };
        let jwt = match &settings.jwt {
            None => None,
            Some(jwt) => Some(match before.and_then(|before| before.jwt.as_ref()).filter(|known| known.is_for(jwt)) {
                Some(known) => known.clone(),
                None => Arc::new(Verifier::new(jwt)?),
            }),
        };
        // Whoever traces at the start does so to the end; only where to may change.
        let collector = match &settings.trace {
            None => before.and_then(|before| before.collector.clone()),
            Some(trace) => match before.filter(|before| before.settings.trace.as_ref() == Some(trace)) {
                Some(before) => before.collector.clone(),
                None => Some(Arc::new(Collecting::new(trace)?)),
            },
        };
        let tokens = Tokens::new(settings.admin.as_ref().map_or(&[], |admin| &admin.tokens));
        Ok(Self { settings, upstreams, default, for_calls, tls, admin_tls, jwt, collector, tokens, page })
    }

    /// Who verifies the token of a request, and the claims that its route asks for. `None` if it asks for none.
    pub(crate) fn verifier(&self, chosen: &Chosen) -> Option<(Arc<Verifier>, HashSet<String>)> {
        let Routed::Covered(route) = &chosen.routed else { return None };
        let wanted: HashSet<_> = route.policy.claims().map(str::to_owned).collect();
        self.jwt.clone().filter(|_| !wanted.is_empty()).map(|verifier| (verifier, wanted))
    }

    pub(crate) fn upstreams(&self, protocol: Protocol) -> &HashMap<String, Arc<Upstream<Body>>> {
        match protocol {
            Protocol::Http => &self.upstreams,
            Protocol::Grpc => &self.for_calls,
        }
    }

    /// Where the requests of a route go, or those of none.
    fn upstream(&self, protocol: Protocol, route: Option<&Route>) -> Arc<Upstream<Body>> {
        let own = route.and_then(|route| route.upstream.as_ref()).and_then(|url| self.upstreams(protocol).get(url));
        match (own, protocol) {
            (Some(own), _) => own.clone(),
            (None, Protocol::Http) => self.default.clone(),
            (None, Protocol::Grpc) => self.for_calls[&self.settings.upstream].clone(),
        }
    }

    fn reuses_upstreams_for(&self, settings: &Settings) -> bool {
        self.settings.max_upstream == settings.max_upstream
            && self.settings.upstream_ca == settings.upstream_ca
            && self.settings.upstream_identity == settings.upstream_identity
    }

    /// Finds the route of a request.
    pub fn choose(&self, protocol: Protocol, method: &Method, path: &str) -> Chosen {
        let routes = &self.settings.routes;
        let refusals = routes.refusals(path);
        if routes.ambiguous(protocol, method, path) {
            let detail = "the path has dot segments, empty segments, backslashes or encoded slashes, \
                          which the app may resolve to another path; send the path it resolves to";
            let routed = Routed::Refused(Refusal::new(Reason::RequestAmbiguous, detail));
            return Chosen { upstream: self.upstream(protocol, None), refusals, routed };
        }
        let covering = match protocol {
            Protocol::Http => routes.find(method, path),
            Protocol::Grpc => routes.find_call(path).filter(|_| method == Method::POST),
        };
        // A call that nothing covers still goes where its path leads to.
        let upstream = self.upstream(protocol, covering.or_else(|| routes.find(method, path)));
        let routed = match covering.filter(|route| route.policy.covers(method)) {
            Some(route) => Routed::Covered(route.guard.clone()),
            None => Routed::Pass,
        };
        Chosen { upstream, refusals, routed }
    }
}

fn connectable(url: &str, protocol: Protocol, settings: &Settings) -> Result<Arc<Upstream<Body>>, String> {
    let is_call = protocol == Protocol::Grpc;
    let url = match url.strip_prefix("http://") {
        Some(place) if is_call => format!("h2c://{place}"),
        _ => url.to_owned(),
    };
    let target: Target = url.parse().map_err(|why| format!("upstream {url:?}: {why}"))?;
    let settings = upstream::Settings {
        max_connections: settings.max_upstream,
        tls: tls::towards("upstream_", settings.upstream_ca.as_ref(), settings.upstream_identity.as_ref())?,
        for_calls: is_call,
        ..upstream::Settings::default()
    };
    Upstream::new(target, settings).map_err(|why| format!("upstream {url:?}: {why}"))
}

impl Live {
    /// Puts a snapshot in force.
    pub fn new(snapshot: Snapshot, args: ServeArgs) -> Arc<Self> {
        snapshot.jwt.iter().for_each(Verifier::keep_fresh);
        let limits = snapshot.settings.quota;
        let quota = Arc::new(Quota::new(limits.new_keys, limits.rate));
        Arc::new(Self { now: ArcSwap::from_pointee(snapshot), args, quota })
    }

    /// What tenants may begin, as the settings in force say.
    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// The snapshot in force.
    pub fn now(&self) -> arc_swap::Guard<Arc<Snapshot>> {
        self.now.load()
    }

    /// Reads the file again.
    pub fn reload(&self, env: &Env<'_>) -> Reload {
        self.reload_knowing(env, self.now().settings.reflected.clone())
    }

    /// The same, with what the upstreams say of themselves now.
    pub fn reload_knowing(&self, env: &Env<'_>, reflected: Option<Bytes>) -> Reload {
        let mut settings = match Settings::load_knowing(&self.args, env, reflected) {
            Ok(settings) if settings.reflects() && settings.reflected.is_none() => {
                return Reload::Wrong("descriptors: \"reflection\" is asked for at the start only; restart".into());
            }
            Ok(settings) => settings,
            Err(why) => return Reload::Wrong(ConfigError::to_string(&why)),
        };
        let before = self.now.load();
        if settings == before.settings {
            return Reload::Unchanged;
        }
        let forgotten = settings.forgets(&before.settings);
        if !forgotten.is_empty() && !settings.accept_forgetting {
            return Reload::Forgets(forgotten);
        }
        let fixed = settings.needs_restart_from(&before.settings);
        if let (Some(seal), Some(before)) = (&mut settings.seal, &before.settings.seal) {
            seal.adopt(before);
        }
        match Snapshot::new(settings, Some(&before)) {
            Ok(snapshot) => {
                // Before the first request under the new settings.
                snapshot.settings.seal.iter().for_each(Seal::apply);
                let known = before.jwt.as_ref();
                let new = snapshot.jwt.iter().filter(|jwt| known.is_none_or(|known| !Arc::ptr_eq(known, jwt)));
                new.for_each(Verifier::keep_fresh);
                let limits = snapshot.settings.quota;
                if limits != before.settings.quota {
                    self.quota.set(limits.new_keys, limits.rate);
                }
                self.now.store(Arc::new(snapshot));
                Reload::Taken(fixed)
            }
            Err(why) => Reload::Wrong(why),
        }
    }

    /// Looks at the file, and at those that its values are read from, every second, and at once when `nudged`.
    pub async fn watch(self: Arc<Self>, mut nudged: tokio::sync::mpsc::Receiver<()>) {
        let Some(path) = self.now().settings.file.clone() else { return };
        // Nothing at first, because the file may have changed since it was loaded.
        let mut last = None;
        loop {
            let told_to = tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => false,
                Some(()) = nudged.recv() => true,
            };
            let content = Some(contents(&path, &self.now().settings.files.clone()).await);
            if content == last && !told_to {
                continue;
            }
            last = content;
            self.say(self.reload(&Env::process()));
        }
    }

    /// Says what became of a reload.
    pub(crate) fn say(&self, reload: Reload) {
        let file = self.now().settings.file.clone().unwrap_or_default();
        let shown = file.display();
        match reload {
            Reload::Unchanged => {}
            Reload::Taken(fixed) if fixed.is_empty() => tracing::info!(file = %shown, "configuration taken up"),
            Reload::Taken(fixed) => {
                tracing::warn!(file = %shown, needs_restart = fixed.join(", "), "configuration taken up in part");
            }
            Reload::Wrong(why) => tracing::error!("{why}; the configuration in force stays"),
            Reload::Forgets(what) => tracing::error!(
                file = %shown,
                "the changed configuration would forget what is remembered, so the one in force stays; \
                 set accept_forgetting = true to take it all the same: {}",
                what.join("; ")
            ),
        }
    }
}

async fn contents(file: &Path, files: &[std::path::PathBuf]) -> Vec<Option<Vec<u8>>> {
    let mut found = Vec::with_capacity(1 + files.len());
    for path in files.iter().map(std::path::PathBuf::as_path).chain([file]) {
        found.push(tokio::fs::read(path).await.ok());
    }
    found
}

/// Reads what [`Snapshot::choose`] found from the request's extensions.
pub struct ByChoice(pub Arc<Live>);

impl Routing for ByChoice {
    fn route(&self, request: &Parts) -> Routed {
        request.extensions.get::<Chosen>().map_or(Routed::Pass, |chosen| chosen.routed.clone())
    }

    fn key_headers(&self, method: &Method, request: &Parts) -> Option<Vec<HeaderName>> {
        match self.0.now().choose(Protocol::Http, method, request.uri.path()).routed {
            Routed::Covered(route) => Some(key_headers(&route.policy)),
            Routed::Pass | Routed::Refused(_) => None,
        }
    }

    fn refusals(&self, request: &Parts) -> Refusals {
        request.extensions.get::<Chosen>().map(|chosen| chosen.refusals).unwrap_or_default()
    }
}
