//! `ibid check FILE [--against OLD]`: validates a file, prints each route's dials, and reports the answers that a
//! change would forget.

use std::{io, path::PathBuf};

use ibid::scope::Credentials;

use ibid_tools::{
    CommandError,
    format::{format_duration, format_list, format_size},
};

use crate::{
    config::{ConfigError, Env, GatewaySettings, ServeArgs, TlsSettings, dials, forgotten_answers, shortened_memory},
    routes::RouteEntry,
    snapshot::ConfigSnapshot,
};

#[derive(Debug, Clone, clap::Args)]
pub struct CheckArgs {
    /// The configuration file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Also report the answers that a change from this file to FILE would forget
    #[arg(long, value_name = "OLD")]
    pub against: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum ConfigComparison {
    /// No answers would be forgotten, or there was no file to compare with.
    NothingForgotten,
    AnswersForgotten,
}

impl ConfigComparison {
    pub fn code(self) -> u8 {
        self as u8
    }
}

pub fn run(args: &CheckArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<ConfigComparison, CommandError> {
    let settings = GatewaySettings::load(&ServeArgs::for_file(&args.file), env)?;
    // Loads certificates, keys and upstreams as a start does.
    ConfigSnapshot::new(settings.clone(), None)
        .map_err(|why| ConfigError::new(args.file.display().to_string(), String::new(), why))?;
    let old = args.against.as_ref().map(|old| GatewaySettings::load(&ServeArgs::for_file(old), env)).transpose()?;
    writeln!(out, "{}: valid\n", args.file.display())?;
    print_settings(&settings, out)?;
    for (at, route) in settings.routes.iter().enumerate() {
        writeln!(out)?;
        print_route(at + 1, route, out)?;
    }
    if !settings.routes.iter().any(|route| route.is_default_policy) {
        writeln!(out, "\n[policy]  off    what no route names is not covered")?;
    }
    writeln!(out, "\n* differs from the preset")?;
    print_section("warnings", &settings.warnings, out)?;
    print_section("notes", &settings.notes, out)?;
    let (Some(old), Some(path)) = (old, &args.against) else { return Ok(ConfigComparison::NothingForgotten) };
    let lost = forgotten_answers(&old, &settings);
    if lost.is_empty() {
        writeln!(out, "\nagainst {}: nothing that is remembered is forgotten", path.display())?;
    }
    print_section(&format!("against {}: this forgets", path.display()), &lost, out)?;
    // A reload applies these changes.
    print_section(&format!("against {}: notes", path.display()), &shortened_memory(&old, &settings), out)?;
    Ok(if lost.is_empty() { ConfigComparison::NothingForgotten } else { ConfigComparison::AnswersForgotten })
}

fn print_settings(settings: &GatewaySettings, out: &mut dyn io::Write) -> io::Result<()> {
    let with_tls = |tls: &Option<TlsSettings>| if tls.is_some() { " (TLS)" } else { "" };
    let admin = settings.admin.as_ref().map_or("off".into(), |admin| {
        let who = admin.tokens.iter().map(|token| match &token.user {
            None => token.role.to_string(),
            Some(user) => format!("{} {user}", token.role),
        });
        let tokens = if admin.tokens.is_empty() { "no token".into() } else { format!("tokens: {}", format_list(who)) };
        format!("{}{}, {tokens}", admin.listen, with_tls(&admin.tls))
    });
    let store = &settings.store;
    let (timeout, sweep) = (format_duration(store.timeout), format_duration(store.sweep_every));
    let mut lines = vec![
        ("listen", format!("{}{}", settings.listen, with_tls(&settings.tls))),
        ("upstream", settings.upstream.clone()),
        ("admin", admin),
        ("store", format!("{} (timeout {timeout}, sweep every {sweep})", store.url)),
    ];
    let layout = store.store_config();
    lines.extend(store.fallback.as_ref().map(|url| ("fallback", format!("{url}, which decides"))));
    lines.extend(store.cache.as_ref().map(|url| ("cache", url.to_string())));
    if layout.local_cache_bytes() > 0 {
        let size = format_size(layout.local_cache_bytes());
        lines.push(("local_cache", format!("{size} of finished answers in this process")));
    }
    lines.push(("promise", layout.guarantee_summary()));
    lines.extend(settings.seal.as_ref().map(|seal| ("seal", seal.description())));
    if let Some(file) = &settings.descriptors {
        let known = settings.routes.unary_methods.paths().count();
        let plural = if known == 1 { "" } else { "s" };
        let said = match settings.uses_reflection() {
            true => format!("{file}: upstreams are asked when the gateway starts"),
            false => format!("{file} ({known} unary method{plural} to protect)"),
        };
        lines.push(("descriptors", said));
    }
    if settings.credentials.headers() != Credentials::default().headers() {
        lines.push(("credentials", format_list(settings.credentials.headers())));
    }
    if !settings.credentials.schemes().is_empty() {
        lines.push(("credential_schemes", format_list(settings.credentials.schemes())));
    }
    lines.extend(settings.grpc_unknown.map(|set| ("grpc_unknown", set.to_string())));
    if !settings.openapi.is_empty() {
        lines.push(("openapi", format!("{}, annotated", format_list(&settings.openapi))));
    }
    lines.extend(settings.trace.as_ref().map(|trace| ("trace", trace.collector.to_string())));
    lines.push(("journal", settings.journal.as_ref().map_or("off".into(), |path| path.display().to_string())));
    for (name, value) in lines {
        writeln!(out, "  {name:<14}  {value}")?;
    }
    Ok(())
}

fn print_route(number: usize, route: &RouteEntry, out: &mut dyn io::Write) -> io::Result<()> {
    let through = if route.inherits_policy && !route.is_default_policy { ", through [policy]" } else { "" };
    let place = if route.is_default_policy { "[policy]".into() } else { format!("route[{number}]") };
    let name = route.title();
    writeln!(out, "{place}  {name}    (preset {}{through})", route.preset)?;
    for dial in dials::route_dials(route) {
        writeln!(out, "{} {:<14}  {}", if dial.overridden { '*' } else { ' ' }, dial.name, dial.value)?;
    }
    if let Some(upstream) = &route.upstream {
        writeln!(out, "* {:<14}  {upstream}", "upstream")?;
    }
    Ok(())
}

fn print_section(title: &str, sentences: &[String], out: &mut dyn io::Write) -> io::Result<()> {
    if !sentences.is_empty() {
        writeln!(out, "\n{title}:")?;
    }
    sentences.iter().try_for_each(|sentence| writeln!(out, "  - {sentence}"))
}
