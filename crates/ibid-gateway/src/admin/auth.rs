//! Who is asking: a token in `Authorization`, or the cookie of a session that began with one.
//!
//! Invariants: a token is compared with all that there are, in constant time. Which there are ([`Tokens`]) changes with the
//! configuration, and is asked each time: one that was removed is good for nothing from then on, and neither are the
//! sessions that began with it. Sessions are bounded and live in this process only. A client that fails to log in more than [`FAILURES`] times a minute is told to come back later, except
//! with a token that it has shown to have: whoever shares its address cannot lock it out.

use std::{collections::HashMap, fmt, net::IpAddr, time::Duration};

use http::{HeaderMap, HeaderValue, header};
use ibid::store::Token as Random;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

pub use self::limits::FAILURES;
use self::limits::{Client, entry};
use crate::config::{Role, Token};

mod limits;

/// The cookie that names a session.
pub const COOKIE: &str = "ibid_session";
/// The header in which a page that has a session repeats its secret when it changes something.
pub const CSRF_HEADER: &str = "ibid-csrf";

/// Sessions at a time; beyond it the oldest ends.
const SESSIONS: usize = 256;
/// How long a session lasts.
pub const SESSION_LASTS: Duration = Duration::from_secs(12 * 60 * 60);

type Hash = [u8; 32];

/// Somebody whose token was believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// What they may do.
    pub role: Role,
    /// Whose records a [`Role::User`] sees. `None` for all others.
    pub user: Option<String>,
    /// What the audit trail calls them.
    pub name: String,
    /// Where they ask from.
    pub client: IpAddr,
    /// How they were known.
    pub via: Via,
}

/// How a caller was known.
#[derive(Clone, PartialEq, Eq)]
pub enum Via {
    /// By a token with the request: no page of another origin can send one.
    Bearer,
    /// By a cookie, which browsers send by themselves: a change needs the session's secret besides.
    Session {
        /// To be repeated by whoever changes something.
        csrf: String,
    },
}

/// Why somebody is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// No token is configured, so that nobody can be.
    NoTokens,
    /// Nothing was shown.
    Missing,
    /// What was shown is no token of ours, or a session that has ended.
    Wrong,
    /// Too many failed from there.
    Limited {
        /// When to try again.
        retry_after: Duration,
    },
}

/// What a page keeps of a session that has begun.
#[derive(Clone, PartialEq, Eq)]
pub struct Session {
    /// The value of [`COOKIE`].
    pub cookie: String,
    /// See [`Via::Session`].
    pub csrf: String,
}

/// The tokens of a configuration. Only their hashes are kept.
pub struct Tokens(Vec<Known>);

/// Knows who was seen with a token. It outlives configurations: failures are counted across them.
#[derive(Default)]
pub struct Auth {
    sessions: Mutex<HashMap<Hash, Open>>,
    clients: Mutex<HashMap<IpAddr, Client>>,
}

struct Known {
    hash: Hash,
    role: Role,
    user: Option<String>,
    name: String,
}

struct Open {
    token: Hash,
    csrf: String,
    began: Instant,
}

impl Tokens {
    /// To believe these.
    pub fn new(tokens: &[Token]) -> Self {
        let known = |token: &Token| Known {
            hash: Sha256::digest(token.token.expose()).into(),
            role: token.role,
            user: token.user.clone(),
            name: token.name.clone(),
        };
        Self(tokens.iter().map(known).collect())
    }

    /// Whether nobody can be believed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn find(&self, hash: &Hash) -> Option<&Known> {
        // All of them, whichever it is.
        let same = |known: &Known| bool::from(known.hash.ct_eq(hash));
        self.0.iter().fold(None, |found, known| same(known).then_some(known).or(found))
    }
}

impl Known {
    fn called(&self, client: IpAddr, via: Via) -> Caller {
        let Self { role, user, name, .. } = self;
        Caller { role: *role, user: user.clone(), name: name.clone(), client, via }
    }
}

impl Auth {
    /// Who sent a request with these headers.
    ///
    /// # Errors
    /// Why nobody is believed to have.
    pub fn caller(&self, tokens: &Tokens, headers: &HeaderMap, client: IpAddr) -> Result<Caller, Denied> {
        if tokens.is_empty() {
            return Err(Denied::NoTokens);
        }
        let mut written = headers.get_all(header::AUTHORIZATION).iter();
        match (written.next(), written.next()) {
            (Some(only), None) => {
                let token = bearer(only).ok_or(Denied::Wrong).or_else(|wrong| self.failed(client, wrong))?;
                Ok(self.check(tokens, token, client)?.called(client, Via::Bearer))
            }
            (Some(_), Some(_)) => self.failed(client, Denied::Wrong),
            (None, _) => match cookie(headers) {
                Some(cookie) => self.in_session(tokens, cookie, client).ok_or(Denied::Wrong),
                None => Err(Denied::Missing),
            },
        }
    }

    /// Begins a session with a token.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn log_in(&self, tokens: &Tokens, token: &str, client: IpAddr) -> Result<Session, Denied> {
        if tokens.is_empty() {
            return Err(Denied::NoTokens);
        }
        let known = self.check(tokens, token, client)?;
        let session = Session { cookie: secret(), csrf: secret() };
        let mut sessions = self.sessions.lock();
        sessions.retain(|_, open| open.began.elapsed() < SESSION_LASTS);
        if sessions.len() >= SESSIONS
            && let Some(oldest) = sessions.iter().min_by_key(|(_, open)| open.began).map(|(hash, _)| *hash)
        {
            sessions.remove(&oldest);
        }
        let open = Open { token: known.hash, csrf: session.csrf.clone(), began: Instant::now() };
        sessions.insert(Sha256::digest(&session.cookie).into(), open);
        Ok(session)
    }

    /// Ends the session of a request with these headers, if it has one.
    pub fn log_out(&self, headers: &HeaderMap) {
        if let Some(cookie) = cookie(headers) {
            self.sessions.lock().remove(&Hash::from(Sha256::digest(cookie)));
        }
    }

    fn in_session(&self, tokens: &Tokens, cookie: &str, client: IpAddr) -> Option<Caller> {
        // By its hash: how long the search takes says nothing about the cookie.
        let hash = Hash::from(Sha256::digest(cookie));
        let mut sessions = self.sessions.lock();
        let open = sessions.get(&hash)?;
        let known = tokens.find(&open.token).filter(|_| open.began.elapsed() < SESSION_LASTS);
        let Some(known) = known else {
            sessions.remove(&hash);
            return None;
        };
        Some(known.called(client, Via::Session { csrf: open.csrf.clone() }))
    }

    /// What is known of a token, if this client may try.
    fn check<'a>(&self, tokens: &'a Tokens, token: &str, client: IpAddr) -> Result<&'a Known, Denied> {
        let found = tokens.find(&Hash::from(Sha256::digest(token)));
        let mut clients = self.clients.lock();
        let seen = entry(&mut clients, client);
        match found {
            None => seen.fail(Denied::Wrong),
            Some(known) if seen.shown.contains(&known.hash) => Ok(known),
            Some(known) => {
                if seen.refilled() < 1.0 {
                    return Err(seen.limited());
                }
                // Of those that are gone nothing need be known.
                seen.shown.retain(|shown| tokens.find(shown).is_some());
                seen.shown.push(known.hash);
                Ok(known)
            }
        }
    }

    fn failed<T>(&self, client: IpAddr, why: Denied) -> Result<T, Denied> {
        entry(&mut self.clients.lock(), client).fail(why)
    }
}

/// Why a change is not taken from somebody who is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forbidden {
    /// Their role only sees.
    Role,
    /// A page of another origin sent it.
    Elsewhere,
    /// Nothing shows that the page meant it: the session's secret is not there.
    NotMeant,
}

impl Caller {
    /// Whether a change is taken from them. `csrf` is what their page repeated, in [`CSRF_HEADER`] or in a field of a form.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check_change(&self, headers: &HeaderMap, csrf: Option<&str>) -> Result<(), Forbidden> {
        if from_elsewhere(headers) {
            return Err(Forbidden::Elsewhere);
        }
        if !self.may_change() {
            return Err(Forbidden::Role);
        }
        // Browsers say where a change comes from; one that does not is not to be trusted with a cookie.
        let from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
        let meant = self.via == Via::Bearer || from_page && self.meant(csrf);
        if meant { Ok(()) } else { Err(Forbidden::NotMeant) }
    }

    /// Whether they may change anything.
    pub fn may_change(&self) -> bool {
        self.role == Role::Admin
    }

    /// Whether they may see what is not about one user.
    pub fn sees_all(&self) -> bool {
        self.role != Role::User
    }

    /// Whether a page asks for something that its reader meant: with a token always, in a session only with its secret.
    pub fn meant(&self, csrf: Option<&str>) -> bool {
        match &self.via {
            Via::Bearer => true,
            Via::Session { csrf: own } => {
                csrf.is_some_and(|csrf| bool::from(Sha256::digest(csrf).ct_eq(&Sha256::digest(own))))
            }
        }
    }
}

/// Whether a browser sent it for a page of another origin. Programs say nothing of origins.
pub fn from_elsewhere(headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get("sec-fetch-site")
        && site != "same-origin"
        && site != "none"
    {
        return true;
    }
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = origins.next() else { return false };
    let own = |origin: &HeaderValue| {
        let (origin, host) = (origin.to_str().ok()?, headers.get(header::HOST)?.to_str().ok()?);
        let place = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
        place.eq_ignore_ascii_case(host).then_some(())
    };
    origins.next().is_some() || own(origin).is_none()
}

/// What stands behind `Bearer`.
fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The session's cookie. Two are none.
fn cookie(headers: &HeaderMap) -> Option<&str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let mut values = pairs.filter(|(name, _)| *name == COOKIE).map(|(_, value)| value);
    let first = values.next()?;
    values.next().is_none().then_some(first)
}

/// 256 random bits as text.
pub(crate) fn secret() -> String {
    crate::records::view::hex(&[Random::mint().0, Random::mint().0].concat())
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").finish_non_exhaustive()
    }
}

impl fmt::Debug for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bearer => "Bearer",
            Self::Session { .. } => "Session(****)",
        })
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Session(****)")
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("count", &self.0.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::{
        limits::{CLIENTS, MINUTE},
        *,
    };
    use crate::config::{Env, ServeArgs, Settings};

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const THERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    /// With a configuration's tokens.
    struct Desk {
        auth: Auth,
        tokens: Tokens,
    }

    fn tokens(table: &str) -> Tokens {
        let text = format!("upstream = \"http://127.0.0.1:1\"\n[admin]\n{table}");
        let settings = Settings::from_text(&text, None, &ServeArgs::default(), &Env::of(&[])).unwrap();
        Tokens::new(&settings.admin.unwrap().tokens)
    }

    fn desk() -> Desk {
        let table = "token = \"root-token\"\ntokens = [{ role = \"user\", user = \"u1\", token = \"u1-token\" }]";
        Desk { auth: Auth::default(), tokens: tokens(table) }
    }

    impl Desk {
        fn caller(&self, headers: &HeaderMap, client: IpAddr) -> Result<Caller, Denied> {
            self.auth.caller(&self.tokens, headers, client)
        }

        fn log_in(&self, token: &str, client: IpAddr) -> Result<Session, Denied> {
            self.auth.log_in(&self.tokens, token, client)
        }
    }

    fn with(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())])
    }

    fn bearing(token: &str) -> HeaderMap {
        with("authorization", &format!("Bearer {token}"))
    }

    #[tokio::test]
    async fn tokens_say_who_it_is() {
        let desk = desk();
        let admin = desk.caller(&bearing("root-token"), HERE).unwrap();
        assert_eq!(
            (admin.role, admin.user.as_deref(), admin.may_change(), admin.sees_all()),
            (Role::Admin, None, true, true)
        );
        let user = desk.caller(&bearing("u1-token"), HERE).unwrap();
        assert_eq!(
            (user.role, user.user.as_deref(), user.may_change(), user.sees_all()),
            (Role::User, Some("u1"), false, false)
        );
        assert_eq!(desk.caller(&HeaderMap::new(), HERE), Err(Denied::Missing));
        for wrong in ["", "root-toke", "root-token2", "ROOT-TOKEN"] {
            assert_eq!(desk.caller(&bearing(wrong), HERE), Err(Denied::Wrong), "{wrong}");
        }
        let mut twice = bearing("root-token");
        twice.append("authorization", "Bearer root-token".parse().unwrap());
        assert_eq!(desk.caller(&twice, HERE), Err(Denied::Wrong));
        assert_eq!(desk.caller(&with("authorization", "Basic root-token"), HERE), Err(Denied::Wrong));
        let none = Desk { tokens: tokens(""), ..desk };
        assert_eq!(none.caller(&bearing("root-token"), HERE), Err(Denied::NoTokens));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_limited_per_client_and_never_below_thirty_a_minute() {
        let desk = desk();
        for nth in 0..FAILURES {
            assert_eq!(desk.caller(&bearing("guess"), HERE), Err(Denied::Wrong), "{nth}");
        }
        assert_eq!(desk.caller(&bearing("guess"), HERE), Err(Denied::Limited { retry_after: Duration::from_secs(2) }));
        // A right guess is not told from a wrong one.
        assert!(matches!(desk.caller(&bearing("root-token"), HERE), Err(Denied::Limited { .. })));
        assert!(matches!(desk.log_in("root-token", HERE), Err(Denied::Limited { .. })));
        assert!(desk.caller(&bearing("root-token"), THERE).is_ok(), "another client is not concerned");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(desk.caller(&bearing("root-token"), HERE).is_ok());
        for _ in 0..2 * FAILURES {
            let _ = desk.caller(&bearing("guess"), HERE);
        }
        assert!(desk.caller(&bearing("root-token"), HERE).is_ok(), "whoever has shown a token goes on with it");
        assert!(matches!(desk.caller(&bearing("u1-token"), HERE), Err(Denied::Limited { .. })));
        tokio::time::advance(MINUTE).await;
        let failed = (0..100).filter(|_| desk.caller(&bearing("guess"), HERE) == Err(Denied::Wrong)).count();
        assert_eq!(failed, FAILURES as usize, "as many again in the next minute");
    }

    #[tokio::test(start_paused = true)]
    async fn clients_are_bounded() {
        let desk = desk();
        for nth in 0..2 * CLIENTS as u32 {
            let client = IpAddr::from((0x0a00_0000 + nth).to_be_bytes());
            assert_eq!(desk.caller(&bearing("guess"), client), Err(Denied::Wrong));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(desk.auth.clients.lock().len() <= CLIENTS);
        let network = |last: u128| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8 << 96 | last));
        for last in 0..u128::from(FAILURES) {
            assert_eq!(desk.caller(&bearing("guess"), network(last)), Err(Denied::Wrong));
        }
        assert!(matches!(desk.caller(&bearing("guess"), network(77)), Err(Denied::Limited { .. })), "one network");
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_its_token_until_it_ends() {
        let desk = desk();
        let session = desk.log_in("u1-token", HERE).unwrap();
        let cookies = with("cookie", &format!("other=1; {COOKIE}={}", session.cookie));
        let caller = desk.caller(&cookies, THERE).unwrap();
        assert_eq!((caller.role, caller.user.as_deref()), (Role::User, Some("u1")));
        assert!(caller.meant(Some(&session.csrf)));
        assert!(!caller.meant(None) && !caller.meant(Some("")) && !caller.meant(Some(&session.cookie)));
        assert_eq!(caller.check_change(&cookies, Some(&session.csrf)), Err(Forbidden::Role));
        assert_eq!(desk.caller(&with("cookie", &format!("{COOKIE}=x")), HERE), Err(Denied::Wrong));
        desk.auth.log_out(&cookies);
        assert_eq!(desk.caller(&cookies, HERE), Err(Denied::Wrong));

        let old = desk.log_in("root-token", HERE).unwrap();
        let mut page = with("cookie", &format!("{COOKIE}={}", old.cookie));
        let admin = desk.caller(&page, HERE).unwrap();
        assert_eq!(admin.check_change(&page, Some(&old.csrf)), Err(Forbidden::NotMeant), "no browser");
        page.insert("host", "h".parse().unwrap());
        page.insert("origin", "http://h".parse().unwrap());
        assert_eq!(admin.check_change(&page, Some(&old.csrf)), Ok(()));
        assert_eq!(admin.check_change(&page, Some("x")), Err(Forbidden::NotMeant));
        page.insert("origin", "http://evil.example".parse().unwrap());
        assert_eq!(admin.check_change(&page, Some(&old.csrf)), Err(Forbidden::Elsewhere));
        tokio::time::advance(SESSION_LASTS).await;
        assert_eq!(desk.caller(&with("cookie", &format!("{COOKIE}={}", old.cookie)), HERE), Err(Denied::Wrong));
        for _ in 0..2 * SESSIONS {
            desk.log_in("root-token", HERE).unwrap();
        }
        assert_eq!(desk.auth.sessions.lock().len(), SESSIONS);
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_change_and_who_failed_is_still_known() {
        let mut desk = desk();
        let (root, user) = (desk.log_in("root-token", HERE).unwrap(), desk.log_in("u1-token", HERE).unwrap());
        let session = |session: &Session| with("cookie", &format!("{COOKIE}={}", session.cookie));
        for _ in 0..FAILURES {
            assert_eq!(desk.caller(&bearing("guess"), THERE), Err(Denied::Wrong));
        }
        // The admin's is replaced, and the user's is a viewer's from now on.
        desk.tokens = tokens("token = \"next-token\"\ntokens = [{ role = \"viewer\", token = \"u1-token\" }]");
        assert_eq!(desk.caller(&bearing("root-token"), HERE), Err(Denied::Wrong));
        assert_eq!(desk.caller(&session(&root), HERE), Err(Denied::Wrong), "its session has ended");
        assert_eq!(desk.log_in("root-token", HERE), Err(Denied::Wrong));
        assert_eq!(desk.caller(&bearing("next-token"), HERE).map(|caller| caller.role), Ok(Role::Admin));
        let viewer = desk.caller(&session(&user), HERE).unwrap();
        assert_eq!((viewer.role, viewer.user), (Role::Viewer, None), "who has the token is what it says now");
        assert!(matches!(desk.caller(&bearing("next-token"), THERE), Err(Denied::Limited { .. })), "still limited");
        // Not back with the token, either.
        desk.tokens = tokens("token = \"root-token\"");
        assert_eq!(desk.caller(&session(&root), HERE), Err(Denied::Wrong));
        for nth in 0..100 {
            desk.tokens = tokens(&format!("token = \"token-{nth}\""));
            assert!(desk.caller(&bearing(&format!("token-{nth}")), HERE).is_ok());
        }
        assert_eq!(desk.auth.clients.lock()[&HERE].shown.len(), 1, "of those that are gone nothing is kept");
        desk.tokens = tokens("");
        assert_eq!(desk.caller(&bearing("token-99"), HERE), Err(Denied::NoTokens));
    }

    #[test]
    fn pages_of_other_origins_are_told_by_what_browsers_send() {
        let headers = |pairs: &[(&'static str, &str)]| {
            let mut headers = with("host", "127.0.0.1:8081");
            for (name, value) in pairs {
                headers.append(*name, value.parse().unwrap());
            }
            headers
        };
        for (own, pairs) in [
            (true, &[][..]),
            (true, &[("origin", "http://127.0.0.1:8081")]),
            (true, &[("origin", "https://127.0.0.1:8081")]),
            (true, &[("sec-fetch-site", "same-origin"), ("origin", "http://127.0.0.1:8081")]),
            (true, &[("sec-fetch-site", "none")]),
            (false, &[("origin", "http://127.0.0.1:8080")]),
            (false, &[("origin", "http://evil.example")]),
            (false, &[("origin", "null")]),
            (false, &[("origin", "http://127.0.0.1:8081"), ("origin", "http://evil.example")]),
            (false, &[("sec-fetch-site", "cross-site")]),
            (false, &[("sec-fetch-site", "same-site")]),
        ] {
            assert_eq!(from_elsewhere(&headers(pairs)), !own, "{pairs:?}");
        }
    }
}
