//! Authenticates callers: by a token in `Authorization`, or by the cookie of a session that started with a token.
//!
//! Invariants: a token is compared with all configured tokens, in constant time. Every request uses the tokens of the
//! current configuration ([`AdminTokens`]): a removed token and all sessions started with it stop working at once.
//! Sessions are bounded and exist in this process only. A client that fails to log in more than
//! [`MAX_FAILED_LOGINS_PER_MINUTE`] times a minute is rate-limited, except with a token that it has used before:
//! another client behind the same address cannot lock it out.
//!
//! Without any token, a link that `ibid serve` prints starts one session, from this machine and within
//! [`LOGIN_LINK_LIFETIME`]. That session ends once a token is configured.

use std::{collections::HashMap, fmt, net::IpAddr, time::Duration};

use http::{HeaderMap, HeaderValue, header};
use ibid::store::ClaimToken as Random;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

pub use self::login_limits::MAX_FAILED_LOGINS_PER_MINUTE;
use self::login_limits::{LoginAttempts, client_entry};
use crate::{
    config::{AdminToken, Role},
    jwt::cookie_values,
};

mod login_limits;

pub const SESSION_COOKIE: &str = "ibid_session";
/// The header in which a page repeats its session's CSRF token to make a change.
pub const CSRF_HEADER: &str = "ibid-csrf";

/// Concurrent sessions; a new one ends the oldest.
const MAX_SESSIONS: usize = 256;
pub const SESSION_LIFETIME: Duration = Duration::from_secs(12 * 60 * 60);

/// How long a log-in link works.
pub const LOGIN_LINK_LIFETIME: Duration = Duration::from_secs(10 * 60);

type TokenHash = [u8; 32];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminCaller {
    pub role: Role,
    /// The user whose records a [`Role::User`] sees; `None` for other roles.
    pub user: Option<String>,
    /// The token's name, for the audit trail.
    pub name: String,
    pub client: IpAddr,
    pub authenticated_by: AuthMethod,
}

#[derive(Clone, PartialEq, Eq)]
pub enum AuthMethod {
    /// A token in the request. Pages of other origins cannot send one.
    Bearer,
    /// A session cookie. Browsers send it with any request, so a change also needs the CSRF token.
    Session {
        /// A form or a script must repeat it to make a change.
        csrf: String,
    },
}

/// Why a caller is not authenticated, as the API says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error(
        "no token is configured, so nobody may use the admin API: set admin.token in the gateway's configuration, such \
         as token = \"file:/etc/ibid/admin.token\"; it is taken up without a restart"
    )]
    NoTokens,
    /// The request has neither a token nor a session cookie.
    #[error("send a token of [admin] in the header Authorization: Bearer TOKEN")]
    MissingToken,
    /// The token is wrong, or the session has ended.
    #[error("this is no token of [admin]; send one in the header Authorization: Bearer TOKEN, or log in again")]
    InvalidToken,
    #[error("too many log-ins from this address have failed; try again later")]
    RateLimited {
        /// Whole seconds, at least 1.
        retry_after: Duration,
    },
}

#[derive(Clone, PartialEq, Eq)]
pub struct SessionSecrets {
    pub cookie: String,
    pub csrf: String,
}

pub struct AdminTokens(Vec<(TokenHash, AdminToken)>);

/// Sessions, and failed log-ins by client. It outlives configurations, so a reload does not reset the limits.
#[derive(Default)]
pub struct Authenticator {
    sessions: Mutex<HashMap<TokenHash, AdminSession>>,
    clients: Mutex<HashMap<IpAddr, LoginAttempts>>,
    link: Mutex<Option<LoginLink>>,
}

/// A link that logs in once.
struct LoginLink {
    code: TokenHash,
    /// The token that it stands for; `None` if none is configured.
    token: Option<TokenHash>,
    made_at: Instant,
}

struct AdminSession {
    /// `None` if a link started it while no token was configured.
    token: Option<TokenHash>,
    csrf: String,
    started_at: Instant,
}

impl AdminTokens {
    pub fn new(tokens: &[AdminToken]) -> Self {
        Self(tokens.iter().map(|token| (Sha256::digest(token.token.expose()).into(), token.clone())).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn find(&self, hash: &TokenHash) -> Option<&AdminToken> {
        // Compares all of them, so that the time does not depend on the match.
        let same = |known: &TokenHash| bool::from(known.ct_eq(hash));
        self.0.iter().fold(None, |found, (known, token)| same(known).then_some(token).or(found))
    }
}

fn to_caller(token: &AdminToken, client: IpAddr, authenticated_by: AuthMethod) -> AdminCaller {
    let AdminToken { role, user, name, .. } = token;
    AdminCaller { role: *role, user: user.clone(), name: name.clone(), client, authenticated_by }
}

impl Authenticator {
    pub fn caller(&self, tokens: &AdminTokens, headers: &HeaderMap, client: IpAddr) -> Result<AdminCaller, AuthError> {
        if tokens.is_empty() {
            let session = session_cookie(headers).filter(|_| !headers.contains_key(header::AUTHORIZATION));
            let caller = session.and_then(|cookie| self.session_caller(tokens, cookie, client));
            return caller.ok_or(AuthError::NoTokens);
        }
        let mut written = headers.get_all(header::AUTHORIZATION).iter();
        match (written.next(), written.next()) {
            (Some(only), None) if let Some(token) = bearer_token(only) => {
                let (known, _) = self.check_token(tokens, token, client)?;
                Ok(to_caller(known, client, AuthMethod::Bearer))
            }
            (Some(_), _) => Err(client_entry(&mut self.clients.lock(), client).record_failure()),
            (None, _) => match session_cookie(headers) {
                Some(cookie) => self.session_caller(tokens, cookie, client).ok_or(AuthError::InvalidToken),
                None => Err(AuthError::MissingToken),
            },
        }
    }

    pub fn log_in(&self, tokens: &AdminTokens, token: &str, client: IpAddr) -> Result<SessionSecrets, AuthError> {
        if tokens.is_empty() {
            return Err(AuthError::NoTokens);
        }
        let (_, hash) = self.check_token(tokens, token, client)?;
        Ok(self.start_session(Some(hash)))
    }

    /// Makes the link that logs in once, for the first token of role `admin` if there is one. Returns its code.
    pub fn create_login_link(&self, tokens: &AdminTokens) -> String {
        let code = random_secret();
        let token = tokens.0.iter().find(|(_, token)| token.role == Role::Admin).map(|(hash, _)| *hash);
        let link = LoginLink { code: Sha256::digest(&code).into(), token, made_at: Instant::now() };
        *self.link.lock() = Some(link);
        code
    }

    /// Starts a session by the code of the link, once. A client of another machine is refused.
    pub fn log_in_by_link(
        &self, tokens: &AdminTokens, code: &str, client: IpAddr,
    ) -> Result<SessionSecrets, AuthError> {
        let hash = TokenHash::from(Sha256::digest(code));
        let is_valid = |link: &mut LoginLink| {
            let is_current = link.made_at.elapsed() < LOGIN_LINK_LIFETIME && link.token.is_some() != tokens.is_empty();
            client.to_canonical().is_loopback() && is_current && bool::from(link.code.ct_eq(&hash))
        };
        match self.link.lock().take_if(is_valid) {
            Some(link) => Ok(self.start_session(link.token)),
            None => Err(client_entry(&mut self.clients.lock(), client).record_failure()),
        }
    }

    fn start_session(&self, token: Option<TokenHash>) -> SessionSecrets {
        let session = SessionSecrets { cookie: random_secret(), csrf: random_secret() };
        let mut sessions = self.sessions.lock();
        sessions.retain(|_, open| open.started_at.elapsed() < SESSION_LIFETIME);
        if sessions.len() >= MAX_SESSIONS
            && let Some(oldest) = sessions.iter().min_by_key(|(_, open)| open.started_at).map(|(hash, _)| *hash)
        {
            sessions.remove(&oldest);
        }
        let open = AdminSession { token, csrf: session.csrf.clone(), started_at: Instant::now() };
        sessions.insert(Sha256::digest(&session.cookie).into(), open);
        session
    }

    /// Ends the session that the headers name, if there is one.
    pub fn log_out(&self, headers: &HeaderMap) {
        if let Some(cookie) = session_cookie(headers) {
            self.sessions.lock().remove(&TokenHash::from(Sha256::digest(cookie)));
        }
    }

    fn session_caller(&self, tokens: &AdminTokens, cookie: &str, client: IpAddr) -> Option<AdminCaller> {
        // Looks up the hash, so that the time reveals nothing about the cookie.
        let hash = TokenHash::from(Sha256::digest(cookie));
        let mut sessions = self.sessions.lock();
        let open = sessions.get(&hash)?;
        let method = AuthMethod::Session { csrf: open.csrf.clone() };
        let caller = match &open.token {
            _ if open.started_at.elapsed() >= SESSION_LIFETIME => None,
            Some(token) => tokens.find(token).map(|known| to_caller(known, client, method)),
            None => tokens.is_empty().then(|| AdminCaller {
                role: Role::Admin,
                user: None,
                name: "log-in link".into(),
                client,
                authenticated_by: method,
            }),
        };
        if caller.is_none() {
            sessions.remove(&hash);
        }
        caller
    }

    /// Looks up a token, unless the client is rate-limited. Also returns its hash.
    fn check_token<'a>(
        &self, tokens: &'a AdminTokens, token: &str, client: IpAddr,
    ) -> Result<(&'a AdminToken, TokenHash), AuthError> {
        let hash = TokenHash::from(Sha256::digest(token));
        let found = tokens.find(&hash);
        let mut clients = self.clients.lock();
        let seen = client_entry(&mut clients, client);
        let Some(known) = found else { return Err(seen.record_failure()) };
        if !seen.verified_tokens.contains(&hash) {
            if seen.refill() < 1.0 {
                return Err(seen.rate_limit_error());
            }
            // Drop hashes of tokens that are no longer configured.
            seen.verified_tokens.retain(|shown| tokens.find(shown).is_some());
            seen.verified_tokens.push(hash);
        }
        Ok((known, hash))
    }
}

/// Why an authenticated caller may not make a change, as the API says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ForbiddenReason {
    #[error("this token sees and does not change; a change needs a token of role \"admin\"")]
    ReadOnlyRole,
    #[error("a page of another origin asked for this change; changes are taken from here only")]
    CrossOrigin,
    #[error(
        "in a session a change needs the header Ibid-Csrf with the session's secret, sent by a browser from a page of \
         this origin"
    )]
    MissingCsrfToken,
}

impl AdminCaller {
    /// Checks whether the caller may make a change. `csrf` comes from [`CSRF_HEADER`] or a form field.
    pub fn authorize_change(&self, headers: &HeaderMap, csrf: Option<&str>) -> Result<(), ForbiddenReason> {
        if is_cross_origin(headers) {
            return Err(ForbiddenReason::CrossOrigin);
        }
        if !self.can_change() {
            return Err(ForbiddenReason::ReadOnlyRole);
        }
        // Browsers name the origin of a change. Without one, a cookie is not trusted.
        let from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
        let meant = self.authenticated_by == AuthMethod::Bearer || from_page && self.has_valid_csrf(csrf);
        if meant { Ok(()) } else { Err(ForbiddenReason::MissingCsrfToken) }
    }

    pub fn can_change(&self) -> bool {
        self.role == Role::Admin
    }

    /// Whether the caller may see more than one user's records.
    pub fn can_see_all(&self) -> bool {
        self.role != Role::User
    }

    /// Whether `csrf` is the session's CSRF token. Always true for a bearer token, which needs none.
    pub fn has_valid_csrf(&self, csrf: Option<&str>) -> bool {
        match &self.authenticated_by {
            AuthMethod::Bearer => true,
            AuthMethod::Session { csrf: own } => {
                csrf.is_some_and(|csrf| bool::from(Sha256::digest(csrf).ct_eq(&Sha256::digest(own))))
            }
        }
    }
}

/// Whether a browser sent the request for a page of another origin. Other programs send no origin.
pub fn is_cross_origin(headers: &HeaderMap) -> bool {
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

fn bearer_token(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The session cookie; `None` if it occurs twice.
fn session_cookie(headers: &HeaderMap) -> Option<&str> {
    match cookie_values(headers, SESSION_COOKIE)[..] {
        [only] => std::str::from_utf8(only).ok(),
        _ => None,
    }
}

/// 256 random bits in hex.
pub(crate) fn random_secret() -> String {
    data_encoding::HEXLOWER.encode(&[Random::mint().0, Random::mint().0].concat())
}

impl fmt::Debug for AuthMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Bearer { "Bearer" } else { "Session(****)" })
    }
}

impl fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authenticator(****)")
    }
}

impl fmt::Debug for AdminTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminTokens(****)")
    }
}

impl fmt::Debug for SessionSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionSecrets(****)")
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::{
        login_limits::{FAILED_LOGIN_WINDOW, MAX_TRACKED_CLIENTS},
        *,
    };
    use crate::config::{Env, GatewaySettings, ServeArgs};

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const THERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    struct TestAuth {
        auth: Authenticator,
        tokens: AdminTokens,
    }

    fn tokens(table: &str) -> AdminTokens {
        let text = format!("upstream = \"http://127.0.0.1:1\"\n[admin]\n{table}");
        let settings = GatewaySettings::from_text(&text, None, &ServeArgs::default(), &Env::from_pairs(&[])).unwrap();
        AdminTokens::new(&settings.admin.unwrap().tokens)
    }

    fn test_auth() -> TestAuth {
        let table = "token = \"root-token\"\ntokens = [{ role = \"user\", user = \"u1\", token = \"u1-token\" }]";
        TestAuth { auth: Authenticator::default(), tokens: tokens(table) }
    }

    impl TestAuth {
        fn caller(&self, headers: &HeaderMap, client: IpAddr) -> Result<AdminCaller, AuthError> {
            self.auth.caller(&self.tokens, headers, client)
        }

        fn log_in(&self, token: &str, client: IpAddr) -> Result<SessionSecrets, AuthError> {
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
        let desk = test_auth();
        let admin = desk.caller(&bearing("root-token"), HERE).unwrap();
        assert_eq!(
            (admin.role, admin.user.as_deref(), admin.can_change(), admin.can_see_all()),
            (Role::Admin, None, true, true)
        );
        let user = desk.caller(&bearing("u1-token"), HERE).unwrap();
        assert_eq!(
            (user.role, user.user.as_deref(), user.can_change(), user.can_see_all()),
            (Role::User, Some("u1"), false, false)
        );
        assert_eq!(desk.caller(&HeaderMap::new(), HERE), Err(AuthError::MissingToken));
        for wrong in ["", "root-toke", "root-token2", "ROOT-TOKEN"] {
            assert_eq!(desk.caller(&bearing(wrong), HERE), Err(AuthError::InvalidToken), "{wrong}");
        }
        let mut twice = bearing("root-token");
        twice.append("authorization", "Bearer root-token".parse().unwrap());
        assert_eq!(desk.caller(&twice, HERE), Err(AuthError::InvalidToken));
        assert_eq!(desk.caller(&with("authorization", "Basic root-token"), HERE), Err(AuthError::InvalidToken));
        let none = TestAuth { tokens: tokens(""), ..desk };
        assert_eq!(none.caller(&bearing("root-token"), HERE), Err(AuthError::NoTokens));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_limited_per_client_and_never_below_thirty_a_minute() {
        let desk = test_auth();
        for nth in 0..MAX_FAILED_LOGINS_PER_MINUTE {
            assert_eq!(desk.caller(&bearing("guess"), HERE), Err(AuthError::InvalidToken), "{nth}");
        }
        assert_eq!(
            desk.caller(&bearing("guess"), HERE),
            Err(AuthError::RateLimited { retry_after: Duration::from_secs(2) })
        );
        // The response does not tell a right guess from a wrong one.
        assert!(matches!(desk.caller(&bearing("root-token"), HERE), Err(AuthError::RateLimited { .. })));
        assert!(matches!(desk.log_in("root-token", HERE), Err(AuthError::RateLimited { .. })));
        assert!(desk.caller(&bearing("root-token"), THERE).is_ok(), "another client is not concerned");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(desk.caller(&bearing("root-token"), HERE).is_ok());
        for _ in 0..2 * MAX_FAILED_LOGINS_PER_MINUTE {
            let _ = desk.caller(&bearing("guess"), HERE);
        }
        assert!(desk.caller(&bearing("root-token"), HERE).is_ok(), "whoever has shown a token goes on with it");
        assert!(matches!(desk.caller(&bearing("u1-token"), HERE), Err(AuthError::RateLimited { .. })));
        tokio::time::advance(FAILED_LOGIN_WINDOW).await;
        let failed = (0..100).filter(|_| desk.caller(&bearing("guess"), HERE) == Err(AuthError::InvalidToken)).count();
        assert_eq!(failed, MAX_FAILED_LOGINS_PER_MINUTE as usize, "as many again in the next minute");
    }

    #[tokio::test(start_paused = true)]
    async fn clients_are_bounded() {
        let desk = test_auth();
        for nth in 0..2 * MAX_TRACKED_CLIENTS as u32 {
            let client = IpAddr::from((0x0a00_0000 + nth).to_be_bytes());
            assert_eq!(desk.caller(&bearing("guess"), client), Err(AuthError::InvalidToken));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(desk.auth.clients.lock().len() <= MAX_TRACKED_CLIENTS);
        let network = |last: u128| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8 << 96 | last));
        for last in 0..u128::from(MAX_FAILED_LOGINS_PER_MINUTE) {
            assert_eq!(desk.caller(&bearing("guess"), network(last)), Err(AuthError::InvalidToken));
        }
        assert!(
            matches!(desk.caller(&bearing("guess"), network(77)), Err(AuthError::RateLimited { .. })),
            "one network"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_its_token_until_it_ends() {
        let desk = test_auth();
        let session = desk.log_in("u1-token", HERE).unwrap();
        let cookies = with("cookie", &format!("other=1; {SESSION_COOKIE}={}", session.cookie));
        let caller = desk.caller(&cookies, THERE).unwrap();
        assert_eq!((caller.role, caller.user.as_deref()), (Role::User, Some("u1")));
        assert!(caller.has_valid_csrf(Some(&session.csrf)));
        assert!(
            !caller.has_valid_csrf(None)
                && !caller.has_valid_csrf(Some(""))
                && !caller.has_valid_csrf(Some(&session.cookie))
        );
        assert_eq!(caller.authorize_change(&cookies, Some(&session.csrf)), Err(ForbiddenReason::ReadOnlyRole));
        assert_eq!(desk.caller(&with("cookie", &format!("{SESSION_COOKIE}=x")), HERE), Err(AuthError::InvalidToken));
        desk.auth.log_out(&cookies);
        assert_eq!(desk.caller(&cookies, HERE), Err(AuthError::InvalidToken));

        let old = desk.log_in("root-token", HERE).unwrap();
        let mut page = with("cookie", &format!("{SESSION_COOKIE}={}", old.cookie));
        let admin = desk.caller(&page, HERE).unwrap();
        assert_eq!(
            admin.authorize_change(&page, Some(&old.csrf)),
            Err(ForbiddenReason::MissingCsrfToken),
            "no browser"
        );
        page.insert("host", "h".parse().unwrap());
        page.insert("origin", "http://h".parse().unwrap());
        assert_eq!(admin.authorize_change(&page, Some(&old.csrf)), Ok(()));
        assert_eq!(admin.authorize_change(&page, Some("x")), Err(ForbiddenReason::MissingCsrfToken));
        page.insert("origin", "http://evil.example".parse().unwrap());
        assert_eq!(admin.authorize_change(&page, Some(&old.csrf)), Err(ForbiddenReason::CrossOrigin));
        tokio::time::advance(SESSION_LIFETIME).await;
        assert_eq!(
            desk.caller(&with("cookie", &format!("{SESSION_COOKIE}={}", old.cookie)), HERE),
            Err(AuthError::InvalidToken)
        );
        for _ in 0..2 * MAX_SESSIONS {
            desk.log_in("root-token", HERE).unwrap();
        }
        assert_eq!(desk.auth.sessions.lock().len(), MAX_SESSIONS);
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_change_and_who_failed_is_still_known() {
        let mut desk = test_auth();
        let (root, user) = (desk.log_in("root-token", HERE).unwrap(), desk.log_in("u1-token", HERE).unwrap());
        let session = |session: &SessionSecrets| with("cookie", &format!("{SESSION_COOKIE}={}", session.cookie));
        for _ in 0..MAX_FAILED_LOGINS_PER_MINUTE {
            assert_eq!(desk.caller(&bearing("guess"), THERE), Err(AuthError::InvalidToken));
        }
        // Replaces the admin's token, and makes the user's token a viewer's.
        desk.tokens = tokens("token = \"next-token\"\ntokens = [{ role = \"viewer\", token = \"u1-token\" }]");
        assert_eq!(desk.caller(&bearing("root-token"), HERE), Err(AuthError::InvalidToken));
        assert_eq!(desk.caller(&session(&root), HERE), Err(AuthError::InvalidToken), "its session has ended");
        assert_eq!(desk.log_in("root-token", HERE), Err(AuthError::InvalidToken));
        assert_eq!(desk.caller(&bearing("next-token"), HERE).map(|caller| caller.role), Ok(Role::Admin));
        let viewer = desk.caller(&session(&user), HERE).unwrap();
        assert_eq!((viewer.role, viewer.user), (Role::Viewer, None), "who has the token is what it says now");
        assert!(
            matches!(desk.caller(&bearing("next-token"), THERE), Err(AuthError::RateLimited { .. })),
            "still limited"
        );
        // The session stays ended when its token returns.
        desk.tokens = tokens("token = \"root-token\"");
        assert_eq!(desk.caller(&session(&root), HERE), Err(AuthError::InvalidToken));
        for nth in 0..100 {
            desk.tokens = tokens(&format!("token = \"token-{nth}\""));
            assert!(desk.caller(&bearing(&format!("token-{nth}")), HERE).is_ok());
        }
        assert_eq!(desk.auth.clients.lock()[&HERE].verified_tokens.len(), 1, "of those that are gone nothing is kept");
        desk.tokens = tokens("");
        assert_eq!(desk.caller(&bearing("token-99"), HERE), Err(AuthError::NoTokens));
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
            assert_eq!(is_cross_origin(&headers(pairs)), !own, "{pairs:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_logs_in_once_from_this_machine_and_for_ten_minutes() {
        let (auth, none) = (Authenticator::default(), AdminTokens::new(&[]));
        let code = auth.create_login_link(&none);
        assert_eq!(auth.log_in_by_link(&none, "guess", HERE).unwrap_err(), AuthError::InvalidToken);
        assert_eq!(auth.log_in_by_link(&none, &code, THERE).unwrap_err(), AuthError::InvalidToken, "another machine");
        let session = auth.log_in_by_link(&none, &code, HERE).unwrap();
        assert_eq!(auth.log_in_by_link(&none, &code, HERE).unwrap_err(), AuthError::InvalidToken, "it was used");
        let cookie = HeaderValue::from_str(&format!("{SESSION_COOKIE}={}", session.cookie)).unwrap();
        let headers = HeaderMap::from_iter([(header::COOKIE, cookie)]);
        let caller = auth.caller(&none, &headers, HERE).unwrap();
        assert_eq!((caller.role, &*caller.name), (Role::Admin, "log-in link"));
        // A token ends it, for good.
        let some = tokens("token = \"0123456789abcdef\"");
        assert_eq!(auth.caller(&some, &headers, HERE).unwrap_err(), AuthError::InvalidToken);
        assert_eq!(auth.caller(&none, &headers, HERE).unwrap_err(), AuthError::NoTokens);

        let code = auth.create_login_link(&none);
        tokio::time::advance(LOGIN_LINK_LIFETIME).await;
        assert_eq!(auth.log_in_by_link(&none, &code, HERE).unwrap_err(), AuthError::InvalidToken, "too late");
        let code = auth.create_login_link(&some);
        assert!(auth.log_in_by_link(&some, &code, HERE).is_ok(), "with a token it stands for that one");
    }
}
