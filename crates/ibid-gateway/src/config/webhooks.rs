//! The settings of webhook routes: the signature scheme and its secrets.
//!
//! Invariant: a route with a webhook preset has a signature scheme and secrets, or `unsigned = true`.

use ibid::{
    Policy,
    webhook::{CustomWebhookScheme, DEFAULT_TOLERANCE, WebhookScheme, WebhookVerifier},
};

use super::{
    error::ConfigError,
    raw::{RawDials, RawSignature},
    secret::Secret,
};

pub(crate) fn is_webhook_preset(preset: &str) -> bool {
    ibid::presets::WEBHOOK_PRESET_NAMES.contains(&preset)
}

/// Applies the dials that only webhook routes have. `inherits`: `policy` is the finished `[policy]`. `place` is the
/// path of the dials, such as `route[2]`.
pub(super) fn apply_webhook_dials(
    dials: &RawDials, preset: &str, inherits: bool, policy: &mut Policy, place: &str,
) -> Result<(), ConfigError> {
    let wrong = |name: &str, what: String| ConfigError::at(format!("{place}.{name}"), what);
    let written = [
        ("secrets", dials.secrets.is_some()),
        ("unsigned", dials.unsigned.is_some()),
        ("tolerance", dials.tolerance.is_some()),
        ("signature", dials.signature.is_some()),
    ];
    let written =
        |allowed: &str| written.iter().find(|(name, there)| *there && *name != allowed).map(|(name, _)| *name);
    if !is_webhook_preset(preset) {
        let what = || format!("only presets for webhooks have it, and this one is {preset:?}");
        return written("").map_or(Ok(()), |name| Err(wrong(name, what())));
    }
    if inherits && written("").is_none() {
        return Ok(());
    }
    if dials.unsigned == Some(true) {
        policy.signature = None;
        let what = "there is nothing to check with it where unsigned is true; leave one out";
        return written("unsigned").map_or(Ok(()), |name| Err(wrong(name, what.into())));
    }
    let scheme = signature_scheme(dials, preset, policy).map_err(|(name, what)| wrong(name, what))?;
    // A route inherits the signature of `[policy]` unless it sets its own.
    let above = policy.signature.take();
    let secrets = match &dials.secrets {
        None => above.as_ref().map(|above| above.secrets.clone()).unwrap_or_default(),
        Some(secrets) => {
            let read = |(at, secret): (usize, &Secret)| {
                scheme
                    .parse_secret(secret.expose())
                    .map_err(|why| wrong(&format!("secrets[{}]", at + 1), why.to_string()))
            };
            secrets.iter().enumerate().map(read).collect::<Result<_, _>>()?
        }
    };
    let tolerance = match dials.tolerance {
        Some(_) if !scheme.has_timestamp() => {
            let what = format!("{scheme} signs no time, so nothing can be too old; leave it out");
            return Err(wrong("tolerance", what));
        }
        Some(tolerance) => tolerance,
        None => above.map_or(DEFAULT_TOLERANCE, |above| above.tolerance),
    };
    policy.signature = Some(WebhookVerifier { scheme, secrets, tolerance });
    Ok(())
}

/// Returns the signature scheme: that of the preset, or the one written here or in `[policy]`. An error is a name and a
/// message.
fn signature_scheme(dials: &RawDials, preset: &str, policy: &Policy) -> Result<WebhookScheme, (&'static str, String)> {
    let known = WebhookScheme::from_name(preset.trim_start_matches("webhook:"));
    match (&dials.signature, known, &policy.signature) {
        (Some(_), Some(_), _) => {
            let what = format!("{preset:?} has its own; leave it out, or take the preset \"webhook:custom\"");
            Err(("signature", what))
        }
        (None, Some(scheme), _) => Ok(scheme),
        (Some(written), None, _) => custom_scheme(written).map(WebhookScheme::Custom),
        (None, None, Some(above)) => Ok(above.scheme.clone()),
        (None, None, None) => {
            let what =
                "missing; say how the sender signs, such as { header = \"X-Signature\" }, or say unsigned = true";
            Err(("signature", what.into()))
        }
    }
}

fn custom_scheme(written: &RawSignature) -> Result<CustomWebhookScheme, (&'static str, String)> {
    let RawSignature { header, prefix, encoding, content, timestamp } = written;
    let missing = "missing; name the header that has the signature, such as \"X-Signature\"";
    let custom = CustomWebhookScheme {
        header: header.clone().ok_or_else(|| ("signature.header", missing.into()))?,
        prefix: prefix.clone(),
        encoding: *encoding,
        content: content.clone(),
        timestamp: timestamp.clone(),
    };
    custom.check().map_err(|invalid| ("signature.timestamp", invalid.message().to_owned()))?;
    Ok(custom)
}
