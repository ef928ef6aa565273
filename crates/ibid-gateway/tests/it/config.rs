//! The configuration as its writer sees it: what can be written, what wins, what each mistake is told.

use std::time::Duration;

use http::{Method, StatusCode};
use ibid::{
    Policy, RefusalReason,
    key::{KeyFormat, KeySource},
    policy::{FingerprintPart, OnConcurrent, OnUnknown, PolicyMode, Remember},
    scope::ScopePart,
};
use ibid_gateway::config::{
    ConfigError, Env, GatewaySettings, LogFormat, LogLevel, Role, ServeArgs, forgotten_answers, shortened_memory,
};

mod accepted_settings;
mod error_messages;
mod forgetting;
mod precedence;
mod warnings_and_notes;

const UPSTREAM: &str = "upstream = \"http://127.0.0.1:3000\"\n";

fn try_load(text: &str, env: &[(&str, &str)]) -> Result<GatewaySettings, ConfigError> {
    GatewaySettings::from_text(text, Some("ibid.toml".into()), &ServeArgs::default(), &Env::from_pairs(env))
}

/// With an upstream.
fn load(text: &str) -> GatewaySettings {
    try_load(&format!("{UPSTREAM}{text}"), &[]).unwrap_or_else(|why| panic!("{why}"))
}

/// All that the writer of a mistake is told, with `ibid.toml:` for `ibid.toml:LINE:COLUMN:`.
fn error_line(text: &str) -> String {
    without_position(&try_load(&format!("{UPSTREAM}{text}"), &[]).map(|_| "valid").unwrap_err())
}

fn without_position(error: &ConfigError) -> String {
    let (shown, position) = (error.to_string(), error.position);
    let position = position.map(|(line, column)| format!("ibid.toml:{line}:{column}: ")).unwrap_or_default();
    shown.strip_prefix(&position).map_or(shown.clone(), |rest| format!("ibid.toml: {rest}"))
}

fn policy<'a>(settings: &'a GatewaySettings, method: &Method, path: &str) -> &'a Policy {
    &settings.routes.find(method, path).expect("covered").policy
}
