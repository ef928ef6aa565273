//! `ibid conform URL`: checks whether a server with idempotency keys keeps its promises.
//!
//! A black-box test over HTTP/1.1: it sends the operation at the URL, repeats it, changes it, sends it many times at
//! once and abandons it, and compares every response with a profile. It *executes* the operation some dozens of times,
//! so use it on test systems.
//!
//! Invariants: it sends requests only to the hosts on the command line; the number of requests and the time are
//! bounded; a check that could not be made is reported as *not performed*, never as passed.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use http::Uri;
use rustls::ClientConfig;

use self::{profile::ConformProfile, session::ConformSession};
use crate::{CommandError, format};

mod checks;
mod connection;
mod mcp;
mod profile;
mod report;
mod session;

const DEFAULT_BODY: &str = r#"{"amount":1200,"currency":"EUR","reference":"conform-{nonce}"}"#;

#[derive(Debug, Args)]
pub struct ConformArgs {
    /// The operation, such as http://127.0.0.1:8080/payments. It is executed some dozens of times
    #[arg(value_name = "URL", required_unless_present = "list")]
    url: Option<String>,
    /// The preset whose promises are checked: ietf, stripe, acp, ucp, iceberg, mcp, leads, appsportal, bookings, platform
    /// or membership
    #[arg(long, value_name = "NAME", default_value = "ietf", value_parser = ConformProfile::parse)]
    profile: ConformProfile,
    /// Print the profile's checks with their reasons, and send nothing
    #[arg(long)]
    list: bool,
    /// The method of the operation
    #[arg(long, value_name = "METHOD", default_value = "POST", value_parser = parse_method)]
    method: String,
    /// Its body: JSON, or a file. {nonce} in it becomes another number for every operation
    #[arg(long, value_name = "JSON|FILE")]
    body: Option<String>,
    /// A header of every request, such as 'Authorization: Bearer …'; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = parse_header)]
    header: Vec<(String, String)>,
    /// Headers of a second caller, instead of the first caller's; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = parse_header)]
    other_header: Vec<(String, String)>,
    /// Another valid body [default: the body with an additional member]
    #[arg(long, value_name = "JSON|FILE")]
    other_body: Option<String>,
    /// Another operation on the same server
    #[arg(long, value_name = "URL")]
    other_url: Option<String>,
    /// Another method of the operation
    #[arg(long, value_name = "METHOD", value_parser = parse_method)]
    other_method: Option<String>,
    /// A body that makes the operation take a second or more
    #[arg(long, value_name = "JSON|FILE")]
    slow_body: Option<String>,
    /// A header that makes the operation take a second or more; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = parse_header)]
    slow_header: Vec<(String, String)>,
    /// A body that makes the operation fail
    #[arg(long, value_name = "JSON|FILE")]
    error_body: Option<String>,
    /// A header that makes the operation fail; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = parse_header)]
    error_header: Vec<(String, String)>,
    /// A URL that returns the number of executions, as JSON
    #[arg(long, value_name = "URL", group = "counter")]
    count_url: Option<String>,
    /// The place in that JSON: a number, or a list whose length counts
    #[arg(long, value_name = "POINTER", default_value = "", requires = "counter", value_parser = parse_pointer)]
    count_pointer: String,
    /// The tool to call, for the profile mcp; its arguments are --body
    #[arg(long, value_name = "NAME")]
    tool: Option<String>,
    /// A tool without arguments that returns the number of executions, for the profile mcp
    #[arg(long, value_name = "NAME", group = "counter")]
    count_tool: Option<String>,
    /// A resource that contains the number of executions, for the profile mcp
    #[arg(long, value_name = "URI", group = "counter")]
    count_resource: Option<String>,
    /// Where the key of a call is, for the profile mcp: a JSON pointer, or header
    #[arg(long, value_name = "POINTER", default_value = "/params/_meta/idempotency-key", value_parser = parse_key_place)]
    key_at: String,
    /// The revision of MCP; one before 2026-07-28 has sessions
    #[arg(long, value_name = "DATE", default_value = "2025-11-25")]
    protocol_version: String,
    /// Whether the operation requires a key [default: as the profile says; either for ietf]
    #[arg(long, value_name = "BOOL")]
    key_required: Option<bool>,
    /// The number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(2..=100))]
    parallel: u16,
    /// The number of rounds of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    rounds: u16,
    /// The timeout of one response
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_positive_duration)]
    timeout: Duration,
    /// The timeout of the whole run; the remaining checks are not performed
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_positive_duration)]
    limit: Duration,
    /// CA certificates for https, instead of the system's
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    ca: Option<PathBuf>,
    /// Accept any certificate
    #[arg(long)]
    insecure: bool,
    /// Fail the run also if advice is not followed
    #[arg(long)]
    strict: bool,
    /// Fail the run also if a check was not performed
    #[arg(long)]
    complete: bool,
    /// Also write the results as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// Builds the TLS configuration that trusts these CA certificates in PEM, those of the system, or any certificate.
pub type TlsBuilder<'a> = &'a dyn Fn(Option<&str>, bool) -> Result<Arc<ClientConfig>, String>;

/// Runs every check of the profile and prints the findings. Returns whether none failed.
pub fn run(args: &ConformArgs, tls: TlsBuilder<'_>, out: &mut dyn io::Write) -> Result<bool, CommandError> {
    if args.list {
        report::print_rules(&args.profile, out)?;
        return Ok(true);
    }
    let ca = args.ca.as_deref().map(read_text).transpose()?;
    let tls = tls(ca.as_deref(), args.insecure).map_err(CommandError::Usage)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let since = Instant::now();
    let (findings, requests) = runtime.block_on(async {
        let mut session = ConformSession::start(args, &tls).await?;
        match args.profile.name {
            "mcp" => mcp::run_all(&mut session).await?,
            _ => checks::run_all(&mut session).await?,
        }
        let requests = session.requests;
        Ok::<_, CommandError>((session.into_findings(), requests))
    })?;
    let report = report::ConformReport { args, findings: &findings, requests, elapsed: since.elapsed() };
    if args.json {
        report.print_json(out)?
    } else {
        report.print_text(out)?
    }
    if let Some(path) = &args.junit {
        std::fs::write(path, report.to_junit())
            .map_err(|why| io::Error::new(why.kind(), format!("{}: {why}", path.display())))?;
    }
    Ok(!findings.iter().any(|finding| args.fails_run(finding.verdict)))
}

/// Returns a JSON argument unchanged, or the text of the file that it names.
fn text_of(given: &str) -> Result<String, CommandError> {
    // Checks the JSON with {nonce} replaced, as it will be sent.
    if given.is_empty() || serde_json::from_str::<serde::de::IgnoredAny>(&given.replace("{nonce}", "1")).is_ok() {
        return Ok(given.to_owned());
    }
    read_text(given.as_ref())
}

fn read_text(path: &Path) -> Result<String, CommandError> {
    std::fs::read_to_string(path).map_err(|why| {
        CommandError::Usage(format!("{} is neither JSON nor a file that can be read: {why}", path.display()))
    })
}

fn one_more(body: &str) -> Option<String> {
    let inner = body.trim_end().strip_suffix('}')?;
    let rest = inner.trim_start().strip_prefix('{')?;
    let comma = if rest.trim().is_empty() { "" } else { "," };
    Some(format!("{inner}{comma}\"conform_other\":true}}"))
}

fn parse_url(text: &str) -> Result<Uri, String> {
    let wrong = |why: &str| {
        format!("{text:?} is no URL that can be checked: {why}; write http://HOST[:PORT]/PATH or https://…")
    };
    if !text.contains("://") {
        return Err(wrong("it has no scheme"));
    }
    let uri: Uri = text.parse().map_err(|why: http::uri::InvalidUri| wrong(&why.to_string()))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(wrong("its scheme is neither http nor https"));
    }
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => Err(wrong("user and password go into a --header")),
        Some(authority) if !authority.host().is_empty() => Ok(uri),
        _ => Err(wrong("it has no host")),
    }
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let parsed = text.split_once(':').map(|(name, value)| (name.trim(), value.trim()));
    let valid = |(name, value): &(&str, &str)| {
        http::HeaderName::try_from(*name).is_ok() && http::HeaderValue::from_str(value).is_ok()
    };
    let (name, value) = parsed.filter(valid).ok_or_else(|| format!("{text:?} is no header; write 'NAME: VALUE'"))?;
    Ok((name.to_owned(), value.to_owned()))
}

fn parse_method(text: &str) -> Result<String, String> {
    match http::Method::from_bytes(text.as_bytes()) {
        Ok(method) if text == text.to_uppercase() => Ok(method.to_string()),
        _ => Err(format!("{text:?} is no method; they are upper case, such as POST")),
    }
}

fn parse_pointer(text: &str) -> Result<String, String> {
    match text.is_empty() || text.starts_with('/') {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is no JSON pointer; write /member/0, or nothing for the whole")),
    }
}

fn parse_key_place(text: &str) -> Result<String, String> {
    match text == "header" || text.starts_with('/') {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is no place of a key; write header, or a pointer such as /params/_meta/key")),
    }
}

fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration; allowed is {}", format::ALLOWED_DURATION);
    let duration = format::parse_duration(text).ok_or_else(wrong)?;
    match duration.is_zero() {
        false => Ok(duration.min(Duration::from_secs(24 * 3600))),
        true => Err("it must be longer than nothing, such as 10s".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_body_has_one_member_more() {
        assert_eq!(one_more("{}").unwrap(), r#"{"conform_other":true}"#);
        assert_eq!(one_more("{\"a\": 1 }\n").unwrap(), r#"{"a": 1 ,"conform_other":true}"#);
        assert_eq!(one_more("[1]"), None);
        assert_eq!(one_more(""), None);
    }

    #[test]
    fn what_cannot_be_checked_is_told_why() {
        for (url, why) in [
            ("127.0.0.1:80/pay", "no scheme"),
            ("/pay", "no scheme"),
            ("ftp://h/pay", "neither http nor https"),
            ("http://u:p@h/pay", "go into a --header"),
        ] {
            let told = parse_url(url).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        assert!(parse_url("https://h:8443/a?b=c").is_ok());
        assert!(parse_header("Authorization Bearer x").is_err());
        assert_eq!(parse_header("A: b: c").unwrap(), ("A".into(), "b: c".into()));
    }
}
