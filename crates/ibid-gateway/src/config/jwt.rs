//! `[jwt]`: how callers' tokens are verified.

use http::{Uri, header};

use super::{
    env::ValueResolver,
    error::ConfigError,
    raw,
    secret::Secret,
    settings::{JwtKeys, JwtSettings, TokenSource},
    validate::build_client_tls,
};
use crate::{jwt::KeySet, routes::RouteTable};

pub(super) fn build_jwt(file: raw::RawJwt, lookup: &ValueResolver<'_>) -> Result<JwtSettings, ConfigError> {
    let wrong = |key: &str| {
        let key = key.to_owned();
        move |what: String| ConfigError::at(key, what)
    };
    let keys = match (file.secret, file.pem, file.jwks) {
        (Some(secret), None, None) => {
            KeySet::from_secret(secret.expose()).map_err(wrong("jwt.secret"))?;
            JwtKeys::Secret(secret)
        }
        (None, Some(pem), None) => {
            let pem = pem.load(lookup)?;
            KeySet::from_pem(pem.text()).map_err(wrong("jwt.pem"))?;
            JwtKeys::Pem(pem)
        }
        (None, None, Some(jwks)) => parse_jwks(jwks).map_err(wrong("jwt.jwks"))?,
        (None, None, None) => {
            return Err(ConfigError::at("jwt", "found no keys; allowed is one of \"secret\" \"pem\" \"jwks\""));
        }
        _ => {
            let what = "found keys in two places; allowed is one of \"secret\" \"pem\" \"jwks\"";
            return Err(ConfigError::at("jwt", what));
        }
    };
    for (name, given) in [("jwt.ca", file.ca.is_some()), ("jwt.cert", file.cert.is_some())] {
        if given && !matches!(keys, JwtKeys::JwksUrl(_)) {
            return Err(ConfigError::at(name, "only keys from a URL are fetched from somebody; set jwks to one"));
        }
    }
    Ok(JwtSettings {
        keys,
        tls: build_client_tls("jwt.", file.ca, file.cert, file.key, lookup)?,
        issuer: file.issuer,
        audience: file.audience,
        from: token_sources(file.from)?,
        leeway: file.leeway,
        refresh: file.refresh,
    })
}

/// Defaults to the `Authorization` header.
fn token_sources(written: Option<Vec<String>>) -> Result<Vec<TokenSource>, ConfigError> {
    let Some(written) = written else { return Ok(vec![TokenSource::Header(header::AUTHORIZATION)]) };
    if written.is_empty() {
        return Err(ConfigError::at(
            "jwt.from",
            "found no source; name at least one, such as \"header:Authorization\"",
        ));
    }
    let source = |text: &String| match text.split_once(':') {
        Some(("header", name)) => name.parse().ok().map(TokenSource::Header),
        Some(("cookie", name)) if !name.is_empty() => Some(TokenSource::Cookie(name.into())),
        _ => None,
    };
    let allowed = "allowed are \"header:NAME\" and \"cookie:NAME\"";
    let checked =
        |text: &String| source(text).ok_or_else(|| ConfigError::at("jwt.from", format!("found {text:?}; {allowed}")));
    written.iter().map(checked).collect()
}

/// A policy that uses claims requires `[jwt]`: unverified claims are worthless.
pub(super) fn require_verifier_for_claims(jwt: Option<&JwtSettings>, routes: &RouteTable) -> Result<(), ConfigError> {
    if jwt.is_some() {
        return Ok(());
    }
    for (at, route) in routes.iter().enumerate() {
        if let Some(claim) = route.policy.claims().next() {
            let place = if route.is_default_policy { "policy".to_owned() } else { format!("route[{}]", at + 1) };
            let what =
                format!("\"jwt:{claim}\" needs keys to verify tokens with; add [jwt] with a secret, pem or jwks");
            return Err(ConfigError::at(place, what));
        }
    }
    Ok(())
}

/// Parses the text of a JWK set, from `file:` or `env:`, or its URL.
fn parse_jwks(written: Secret) -> Result<JwtKeys, String> {
    let text = written.expose();
    if text.trim_start().starts_with('{') {
        KeySet::from_jwks(text.as_bytes())?;
        return Ok(JwtKeys::Jwks(written));
    }
    let allowed = "allowed is \"file:PATH\" or a URL such as \"https://id.example.com/.well-known/jwks.json\"";
    let Some(uri) = text.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some() && uri.authority().is_some()) else {
        return Err(format!("it is no JWK set; {allowed}"));
    };
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let here = host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    // A query may contain a secret.
    let shown = text.split('?').next().unwrap_or_default();
    match uri.scheme_str() {
        _ if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
            Err(format!("a URL with a user's name or password is not shown here; {allowed}"))
        }
        Some("https") => Ok(JwtKeys::JwksUrl(text.into())),
        Some("http") if here => Ok(JwtKeys::JwksUrl(text.into())),
        Some("http") => Err(format!("{shown:?}: the keys could be exchanged on the way; use https")),
        _ => Err(format!("{shown:?} is no URL for keys; {allowed}")),
    }
}
