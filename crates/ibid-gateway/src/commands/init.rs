//! `ibid init`: writes a commented configuration file for the app that it finds.

use std::{
    fs::OpenOptions,
    io::{self, BufRead, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

use ibid_tools::CommandError;

use crate::config::{DEFAULT_STORE, Env, GatewaySettings, ServeArgs};

/// The JSON schema of the file. Its first line names it, for editors.
pub const SCHEMA: &str = include_str!("../../assets/ibid.schema.json");
const SCHEMA_FILE: &str = "ibid.schema.json";
const DEFAULT_LISTEN: &str = "127.0.0.1:8080";
const OTHER_LISTEN: &str = "127.0.0.1:8090";
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// The port on which the app of a project with such a file usually listens.
const PORT_BY_FILE: [(&str, u16); 9] = [
    ("package.json", 3000),
    ("Gemfile", 3000),
    ("manage.py", 8000),
    ("pyproject.toml", 8000),
    ("requirements.txt", 8000),
    ("composer.json", 8000),
    ("pom.xml", 8080),
    ("build.gradle", 8080),
    ("go.mod", 8080),
];
const DEFAULT_PORT: u16 = 3000;

#[derive(Debug, Clone, clap::Args)]
pub struct InitArgs {
    /// The file to write; an existing one is never overwritten
    #[arg(value_name = "FILE", default_value = "ibid.toml")]
    pub file: PathBuf,
    /// Ask nothing: take what is found, and defaults
    #[arg(long, short)]
    pub yes: bool,
    /// The app, such as http://127.0.0.1:3000
    #[arg(long, value_name = "URL")]
    pub upstream: Option<String>,
    /// The preset of the default policy
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Where records are stored: embedded:PATH, redis://HOST, postgres://HOST/DB or memory:
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
}

pub fn run(args: &InitArgs, input: &mut dyn BufRead, out: &mut dyn Write) -> Result<(), CommandError> {
    let file = &args.file;
    if file.exists() {
        return Err(CommandError::Conflict(format!("{} exists; name another file", file.display())));
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (port, why) = find_app(folder, is_listening);
    let mut ask = |question: &str, hint: &str, given: &Option<String>, default: &str, check: fn(&str) -> ServeArgs| {
        if let Some(given) = given {
            return Ok(given.clone());
        }
        if args.yes {
            return Ok(default.to_owned());
        }
        ask_until_valid(&format!("{question} ({hint}) [{default}]: "), default, check, input, out)
    };
    let upstream = ask("The app", why, &args.upstream, &format!("http://127.0.0.1:{port}"), |text| ServeArgs {
        upstream: Some(text.into()),
        ..ServeArgs::default()
    })?;
    let hint = "ietf is strict, stripe for clients used to Stripe, mcp for MCP servers, docs/guide.md lists all";
    let preset = ask("Preset", hint, &args.preset, "ietf", |text| ServeArgs {
        preset: Some(text.into()),
        ..ServeArgs::default()
    })?;
    let hint = "embedded: for one gateway, redis:// or postgres:// for several";
    let store = ask("Store", hint, &args.store, DEFAULT_STORE, |text| ServeArgs {
        store: Some(text.into()),
        ..ServeArgs::default()
    })?;
    let text = render(&upstream, &preset, &store);
    GatewaySettings::from_text(&text, Some(file.clone()), &ServeArgs::default(), &Env::from_pairs(&[]))?;
    let failed = |path: &Path, why: io::Error| CommandError::Conflict(format!("{}: {why}", path.display()));
    // An existing file is left alone, even one that appeared meanwhile.
    let write = |path: &Path, text: &str| {
        OpenOptions::new().write(true).create_new(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()))
    };
    write(file, &text).map_err(|why| failed(file, why))?;
    let schema = folder.join(SCHEMA_FILE);
    match write(&schema, SCHEMA) {
        Err(why) if why.kind() != io::ErrorKind::AlreadyExists => return Err(failed(&schema, why)),
        _ => {}
    }
    let shown = file.display();
    writeln!(out, "Wrote {shown} and {} (for editors).", schema.display())?;
    Ok(writeln!(out, "Next: ibid doctor --config {shown}; ibid serve --config {shown}")?)
}

/// Asks again until the answer is valid. No answer means the default.
fn ask_until_valid(
    question: &str, default: &str, check: fn(&str) -> ServeArgs, input: &mut dyn BufRead, out: &mut dyn Write,
) -> Result<String, CommandError> {
    loop {
        write!(out, "{question}")?;
        out.flush()?;
        let mut line = String::new();
        let has_ended = input.read_line(&mut line)? == 0;
        let answer = if line.trim().is_empty() { default } else { line.trim() };
        let args = ServeArgs { upstream: Some("http://127.0.0.1:3000".into()), ..check(answer) };
        let args = ServeArgs { upstream: check(answer).upstream.or(args.upstream.clone()), ..args };
        match GatewaySettings::load(&args, &Env::from_pairs(&[])) {
            Ok(_) => return Ok(answer.to_owned()),
            Err(why) if has_ended => return Err(why.into()),
            Err(why) => writeln!(out, "{why}")?,
        }
    }
}

/// Returns the port of the app, and how it was found: a port that a file of the project suggests, and that something
/// listens on, comes first.
fn find_app(folder: &Path, is_listening: fn(u16) -> bool) -> (u16, &'static str) {
    let by_file = PORT_BY_FILE.iter().find(|(file, _)| folder.join(file).exists()).map(|(_, port)| *port);
    let usual = PORT_BY_FILE.iter().map(|(_, port)| *port);
    match by_file.into_iter().chain(usual).find(|port| is_listening(*port)) {
        Some(port) => (port, "something listens there"),
        None if by_file.is_some() => (by_file.unwrap_or(DEFAULT_PORT), "usual for this kind of project"),
        None => (DEFAULT_PORT, "scheme, host and port"),
    }
}

fn is_listening(port: u16) -> bool {
    TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), PROBE_TIMEOUT).is_ok()
}

fn render(upstream: &str, preset: &str, store: &str) -> String {
    let listen = if upstream.ends_with(":8080") { OTHER_LISTEN } else { DEFAULT_LISTEN };
    let secret =
        if store.contains('@') { "    # better: \"env:IBID_STORE\", which keeps the password out" } else { "" };
    let routes = if ibid::presets::AGENT_PRESET_NAMES.contains(&preset) {
        render_agent_route(preset)
    } else {
        render_policy(preset)
    };
    format!(
        r##"#:schema ./{SCHEMA_FILE}
# All settings: docs/configuration.md. Check this file: ibid doctor --config FILE

# Where clients connect, and the app behind it.
listen   = "{listen}"
upstream = "{upstream}"

# Proxies in front of ibid, whose X-Forwarded-For and scope headers are believed.
# trusted_proxies = ["127.0.0.0/8", "::1/128"]

[store]
url = "{store}"{secret}

# Console, metrics and health. Without a token, ibid serve prints a link that logs in once.
[admin]
listen = "127.0.0.1:8081"
# token = "env:IBID_ADMIN_TOKEN"        # openssl rand -hex 32

{routes}"##
    )
}

fn render_policy(preset: &str) -> String {
    format!(
        r##"# Every POST, PUT, PATCH and DELETE with a key. To try it without touching a response: mode = "shadow"
[policy]
preset = "{preset}"
# ttl        = "24h"                    # how long an answer is remembered
# on_unknown = "hold"                   # or "retry", where running twice does no harm

# A route overrides any of these settings.
# [[route]]
# match   = "POST /payments"
# ttl     = "72h"
# resolve = "GET /payments?key={{key}}"   # asks the app about an unknown outcome
"##
    )
}

fn render_agent_route(preset: &str) -> String {
    format!(
        r##"# What no route names passes through.
[policy]
preset = "off"

# The endpoint of the MCP server: a call of a tool with a key runs once.
[[route]]
match  = "POST /mcp"
preset = "{preset}"
# tools = "annotations"                 # those that the server calls read-only or idempotent pass
# guard = {{ fields = ["/order_id"] }}    # the same call under another key is refused for ten minutes
"##
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_in_use_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find_app(folder.path(), |_| false).0, 3000);
        assert_eq!(find_app(folder.path(), |port| port == 8000).0, 8000);
        std::fs::write(folder.path().join("go.mod"), "").unwrap();
        assert_eq!(find_app(folder.path(), |_| false).0, 8080);
        assert_eq!(find_app(folder.path(), |_| true).0, 8080);
        assert_eq!(find_app(folder.path(), |port| port == 3000).0, 3000);
    }
}
