//! The table of checks, with the reason for each profile.
//!
//! A profile is a preset's policy. The expectations come from that policy, so presets and checks cannot drift apart.
//! `ietf` and `stripe` describe third-party servers: a check is required only where the draft, or Stripe's
//! documentation, requires it; the others are advice.

use ibid::{KeyFormat, KeySource, OnConcurrent, Policy, ResponseEnvelope, ScopePart, presets::PRESET_NAMES};

use crate::describe;

const IETF_SOURCE: &str = "draft-ietf-httpapi-idempotency-key-header-07";
const STRIPE_SOURCE: &str = "Stripe API reference, \"Idempotent requests\"";

#[derive(Debug, Clone)]
pub(super) struct ConformProfile {
    /// The preset's name.
    pub(super) name: &'static str,
    pub(super) policy: Policy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CheckLevel {
    /// A failure fails the run.
    Required,
    /// A failure is reported, and fails the run only with `--strict`.
    Advised,
}

struct CheckCase {
    id: &'static str,
    title: &'static str,
    /// The section of the draft.
    ietf: Option<(CheckLevel, &'static str)>,
    /// The sentence of Stripe's documentation.
    stripe: Option<(CheckLevel, &'static str)>,
    /// The dial that promises it in all other presets.
    promising_dial: Option<&'static str>,
}

/// A case under a profile.
#[derive(Debug, Clone)]
pub(super) struct CheckRule {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) level: CheckLevel,
    pub(super) citation: String,
}

impl ConformProfile {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let name = PRESET_NAMES.into_iter().find(|name| *name == text);
        let name = name.ok_or_else(|| format!("{text:?} is no profile; allowed are {}", PRESET_NAMES.join(", ")))?;
        Ok(Self { name, policy: Policy::preset(name).expect("it has a name") })
    }

    /// Whether the profile describes third-party servers.
    pub(super) fn is_third_party(&self) -> bool {
        matches!(self.name, "ietf" | "stripe")
    }

    /// The usual spelling of the key's header.
    pub(super) fn key_header(&self) -> String {
        let KeySource::Header(name) = &self.policy.key.from[0] else { unreachable!("all these presets name a header") };
        describe::header(name)
    }

    /// The header in which a proxy names the caller.
    pub(super) fn scope_header(&self) -> Option<&str> {
        self.policy.scope.iter().find_map(|part| match part {
            ScopePart::Header(name) => Some(name.as_str()),
            _ => None,
        })
    }

    pub(super) fn rules(&self) -> Vec<CheckRule> {
        CASES.iter().filter(|case| self.is_applicable(case.id)).filter_map(|case| self.rule(case)).collect()
    }

    fn rule(&self, case: &CheckCase) -> Option<CheckRule> {
        let (level, cites) = match self.name {
            "ietf" => case.ietf.map(|(level, place)| {
                let in_draft = place.starts_with('§') || place.starts_with("Security");
                (level, if in_draft { format!("{IETF_SOURCE} {place}") } else { place.to_owned() })
            })?,
            "stripe" => case.stripe.map(|(level, said)| match level {
                CheckLevel::Required => (level, format!("{STRIPE_SOURCE}: {said}")),
                CheckLevel::Advised => (level, said.to_owned()),
            })?,
            preset => {
                let dial = case.promising_dial?;
                let value = describe::dial_values(&self.policy).into_iter().find(|(name, _)| *name == dial);
                let promise = value.map_or_else(|| dial.to_owned(), |(name, value)| format!("{name} = {value}"));
                (CheckLevel::Required, format!("ibid preset {preset} (docs/presets/{preset}.md): {promise}"))
            }
        };
        Some(CheckRule { id: case.id, title: case.title, level, citation: cites })
    }

    /// Whether a case can be observed under this policy.
    fn is_applicable(&self, id: &str) -> bool {
        let policy = &self.policy;
        match id {
            "replay.marker" | "first.unmarked" => !policy.replay_headers.is_empty(),
            "replay.envelope" => policy.envelope == ResponseEnvelope::Metadata,
            "caller.isolated" => policy.scope.iter().any(ScopePart::names_caller),
            "key.format" => !matches!(policy.key.format, KeyFormat::Any | KeyFormat::Raw),
            // Other formats have their own length.
            "key.longest" => matches!(policy.key.format, KeyFormat::Any | KeyFormat::Raw),
            "concurrent.refused" | "concurrent.retry-after" => policy.on_concurrent == OnConcurrent::Reject,
            "concurrent.waits" => policy.on_concurrent == OnConcurrent::Wait,
            _ => true,
        }
    }
}

use CheckLevel::{Advised, Required};

const VALIDATE_KEY: &str = "§2.1; Security Considerations (always validate the key before processing)";
const UNAMBIGUOUS_KEY: &str = "good practice: a key that can be read in two ways is refused";

#[rustfmt::skip]
const CASES: &[CheckCase] = &[
    CheckCase { id: "first.processed", title: "A first request is processed",
        ietf: Some((Required, "§2.6 (first time request)")), stripe: Some((Required, "a new key is a new request")), promising_dial: Some("key") },
    CheckCase { id: "first.independent", title: "Another key is another operation",
        ietf: Some((Required, "§2.2")), stripe: Some((Required, "the key recognises retries of the same request")), promising_dial: Some("key") },
    CheckCase { id: "first.unmarked", title: "A first answer does not say that it is a replay",
        ietf: Some((Advised, "good practice: a client can tell a replay from a first answer")),
        stripe: Some((Required, "Idempotent-Replayed is only on replays")), promising_dial: Some("replay_headers") },
    CheckCase { id: "replay.once", title: "A retry does not run the operation again",
        ietf: Some((Required, "§2.6 (retry)")), stripe: Some((Required, "retry without performing the operation twice")), promising_dial: Some("remember") },
    CheckCase { id: "replay.status", title: "A retry gets the first answer's status",
        ietf: Some((Required, "§2.6 (retry)")), stripe: Some((Required, "the resulting status code is saved")), promising_dial: Some("remember") },
    CheckCase { id: "replay.body", title: "A retry gets the first answer's body",
        ietf: Some((Required, "§2.6 (retry)")), stripe: Some((Required, "the body of the first request is saved")), promising_dial: Some("remember") },
    CheckCase { id: "replay.headers", title: "A retry gets the headers that describe the first answer",
        ietf: Some((Required, "§2.6 (retry)")), stripe: Some((Advised, "good practice: a body without its Content-Type is not the same answer")), promising_dial: Some("remember") },
    CheckCase { id: "replay.cookies", title: "A retry gets no cookies of the first answer",
        ietf: Some((Advised, "good practice: a cookie belongs to one answer")), stripe: None, promising_dial: Some("drop_headers") },
    CheckCase { id: "replay.marker", title: "A replay says that it is one",
        ietf: Some((Advised, "good practice: a client can tell a replay from a first answer")),
        stripe: Some((Required, "replays have Idempotent-Replayed: true")), promising_dial: Some("replay_headers") },
    CheckCase { id: "replay.envelope", title: "The metadata of a replay says so, and since when",
        ietf: None, stripe: None, promising_dial: Some("envelope") },
    CheckCase { id: "mismatch.body", title: "The key with another body",
        ietf: Some((Required, "§2.7 (422)")), stripe: Some((Required, "incoming parameters are compared, and it errors if they differ")), promising_dial: Some("on_mismatch") },
    CheckCase { id: "mismatch.keeps-first", title: "The key still gives the first answer afterwards",
        ietf: Some((Required, "§2.6 (retry)")), stripe: Some((Required, "subsequent requests with the same key return the same result")), promising_dial: Some("on_mismatch") },
    CheckCase { id: "mismatch.query", title: "The key with another query",
        ietf: Some((Advised, "§2.2, §2.4 (good practice: what is asked for is part of the request)")), stripe: Some((Advised, "good practice: a query is a parameter, too")), promising_dial: Some("fingerprint") },
    CheckCase { id: "mismatch.path", title: "The key on another path",
        ietf: Some((Advised, "§2.2, §2.4 (good practice: what is asked for is part of the request)")), stripe: Some((Advised, "good practice: what is asked for is part of the request")), promising_dial: Some("fingerprint") },
    CheckCase { id: "mismatch.method", title: "The key with another method",
        ietf: Some((Advised, "§2.2, §2.4 (good practice: what is asked for is part of the request)")), stripe: None, promising_dial: Some("fingerprint") },
    CheckCase { id: "concurrent.one-run", title: "Of many at the same moment, one runs",
        ietf: Some((Required, "§2.6 (concurrent request)")), stripe: Some((Required, "a request that conflicts with one that is executing is not executed")), promising_dial: Some("on_concurrent") },
    CheckCase { id: "concurrent.refused", title: "A duplicate of a running request is refused as a conflict",
        ietf: Some((Required, "§2.6, §2.7 (409)")), stripe: Some((Required, "409: the request conflicts with another one")), promising_dial: Some("on_concurrent") },
    CheckCase { id: "concurrent.waits", title: "A duplicate of a running request gets its answer",
        ietf: None, stripe: None, promising_dial: Some("on_concurrent") },
    CheckCase { id: "concurrent.retry-after", title: "The conflict says when to try again",
        ietf: Some((Advised, "RFC 9110 §10.2.3 (Retry-After)")), stripe: Some((Advised, "RFC 9110 §10.2.3 (Retry-After)")), promising_dial: Some("on_concurrent") },
    CheckCase { id: "concurrent.settles", title: "Afterwards the key gives that one run's answer",
        ietf: Some((Required, "§2.6 (retry)")), stripe: Some((Required, "such requests can be retried")), promising_dial: Some("on_concurrent") },
    CheckCase { id: "disconnect.answer", title: "Who hangs up and retries gets the answer, and nothing runs twice",
        ietf: Some((Required, "§1, §2.6 (a client that timed out retries)")), stripe: Some((Required, "after a connection error the request can be repeated")), promising_dial: Some("on_concurrent") },
    CheckCase { id: "error.answer", title: "A failure is remembered or run again, as promised",
        ietf: Some((Advised, "good practice: a failure of the server that is replayed wedges the key")),
        stripe: Some((Required, "results are saved whether it succeeds or fails, 500 errors included")), promising_dial: Some("remember") },
    CheckCase { id: "caller.isolated", title: "Another caller's key is another key",
        ietf: Some((Required, "Security Considerations (data leaks; a composite key per client)")), stripe: Some((Required, "keys belong to an account")), promising_dial: Some("scope") },
    CheckCase { id: "key.missing", title: "A request without a key",
        ietf: Some((Required, "§2.7 (400 where it is required)")), stripe: Some((Required, "keys are optional")), promising_dial: Some("key") },
    CheckCase { id: "key.empty", title: "An empty key is refused",
        ietf: Some((Required, VALIDATE_KEY)), stripe: Some((Advised, UNAMBIGUOUS_KEY)), promising_dial: Some("key") },
    CheckCase { id: "key.blank", title: "A key that is empty inside its quotes is refused",
        ietf: Some((Required, VALIDATE_KEY)), stripe: None, promising_dial: Some("key") },
    CheckCase { id: "key.longest", title: "A key of the greatest length is taken",
        ietf: Some((Advised, "good practice: 255 characters are a common limit")), stripe: Some((Required, "keys are up to 255 characters long")), promising_dial: Some("key") },
    CheckCase { id: "key.too-long", title: "A longer key is refused",
        ietf: Some((Advised, "good practice: 255 characters are a common limit")), stripe: Some((Required, "keys are up to 255 characters long")), promising_dial: Some("key") },
    CheckCase { id: "key.format", title: "A key of another form is refused",
        ietf: None, stripe: None, promising_dial: Some("key") },
    CheckCase { id: "key.quoted", title: "A key in quotes is the same key without them",
        ietf: Some((Required, "§2.1 (the key is a String, in quotes)")), stripe: None, promising_dial: Some("a header may carry the key bare or as a string") },
    CheckCase { id: "key.two-headers", title: "Two key headers are refused",
        ietf: Some((Required, "§2.1 (not more than one)")), stripe: Some((Advised, UNAMBIGUOUS_KEY)), promising_dial: Some("two key headers are refused") },
    CheckCase { id: "key.list", title: "A list of keys is refused",
        ietf: Some((Required, "§2.1 (an Item, not a List)")), stripe: None, promising_dial: Some("a list of keys is refused") },
    CheckCase { id: "key.parameters", title: "A key with parameters is refused",
        ietf: Some((Advised, UNAMBIGUOUS_KEY)), stripe: None, promising_dial: Some("a key with parameters is refused") },
    CheckCase { id: "key.bad-escape", title: "A key with a bad escape is refused",
        ietf: Some((Required, VALIDATE_KEY)), stripe: None, promising_dial: Some("a key with a bad escape is refused") },
    CheckCase { id: "key.open-quote", title: "A key whose quote is not closed is refused",
        ietf: Some((Required, VALIDATE_KEY)), stripe: None, promising_dial: Some("a key with an open quote is refused") },
    CheckCase { id: "key.control-byte", title: "A key with a control byte is refused",
        ietf: Some((Required, VALIDATE_KEY)), stripe: Some((Advised, UNAMBIGUOUS_KEY)), promising_dial: Some("only visible ASCII is allowed in keys") },
    CheckCase { id: "key.non-ascii", title: "A key outside ASCII is refused",
        ietf: Some((Required, VALIDATE_KEY)), stripe: Some((Advised, UNAMBIGUOUS_KEY)), promising_dial: Some("only visible ASCII is allowed in keys") },
    CheckCase { id: "key.nominated", title: "A key that Connection would remove on the way is refused",
        ietf: None, stripe: None, promising_dial: Some("what can be read in two ways is refused") },
    CheckCase { id: "key.twin", title: "A second key under a header with underscores is refused",
        ietf: None, stripe: None, promising_dial: Some("what can be read in two ways is refused") },
    CheckCase { id: "get.passes", title: "A key on a GET changes nothing",
        ietf: Some((Advised, "§1 (GET is idempotent already)")), stripe: Some((Required, "a key has no effect in GET requests")), promising_dial: Some("methods") },
    CheckCase { id: "problem.shape", title: "Refusals are problems that a program can read",
        ietf: Some((Advised, "§2.7 (examples), RFC 9457")), stripe: Some((Advised, "good practice: its SDKs parse {\"error\":{\"type\",\"message\"}}")), promising_dial: Some("refusals are RFC 9457 problems") },
    CheckCase { id: "problem.link", title: "A refused key leads to the documentation",
        ietf: Some((Advised, "§2.7 (a link to relevant documentation)")), stripe: None, promising_dial: Some("refusals link to the published contract") },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_cites_a_rule_for_every_check() {
        for name in PRESET_NAMES {
            let profile: ConformProfile = ConformProfile::parse(name).unwrap();
            let rules = profile.rules();
            assert!(rules.len() > 20, "{name}: {}", rules.len());
            assert!(rules.iter().all(|rule| rule.citation.len() > 10), "{rules:#?}");
            assert!(rules.iter().any(|rule| rule.level == Required));
            if !profile.is_third_party() {
                assert!(rules.iter().all(|rule| rule.level == Required && rule.citation.contains(name)), "{rules:#?}");
            }
        }
        assert!(ConformProfile::parse("nope").unwrap_err().ends_with("ietf, stripe"));
    }

    #[test]
    fn ids_are_unique() {
        let mut ids: Vec<_> = CASES.iter().map(|case| case.id).collect();
        ids.sort_unstable();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
