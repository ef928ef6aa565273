//! The table of checks, with the reason for each profile.
//!
//! A profile is a preset's policy. The expectations come from that policy, so presets and checks cannot drift apart.
//! `ietf`, `stripe`, `acp`, `ucp` and `iceberg` describe third-party servers: a check is required only where the draft,
//! Stripe's documentation or the protocol requires it; the others are advice. `mcp` has checks of its own.

use ibid::{
    Policy,
    fingerprint::JsonNumbers,
    key::{KeyFormat, KeySource},
    policy::{OnConcurrent, RefusalFormat, ResponseEnvelope},
    presets::{AGENT_PRESET_NAMES, PRESET_NAMES},
    scope::ScopePart,
};

use super::mcp;
use crate::describe;

const IETF_SOURCE: &str = "draft-ietf-httpapi-idempotency-key-header-07";
const STRIPE_SOURCE: &str = "Stripe API reference, \"Idempotent requests\"";

#[derive(Debug, Clone)]
pub(super) struct ConformProfile {
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

/// How strict a check is, and its source. `None`: it is not made.
type Citation = Option<(CheckLevel, &'static str)>;

/// Id and title of a check, the section of the draft, the sentence of Stripe's documentation, and the dial that promises
/// it in all other presets.
type CheckCase = (&'static str, &'static str, Citation, Citation, &'static str);

#[derive(Debug, Clone)]
pub(super) struct CheckRule {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) level: CheckLevel,
    pub(super) citation: String,
}

impl ConformProfile {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let names: Vec<_> = PRESET_NAMES.into_iter().chain(AGENT_PRESET_NAMES).collect();
        let name = names.iter().copied().find(|name| *name == text);
        let name = name.ok_or_else(|| format!("{text:?} is no profile; allowed are {}", names.join(", ")))?;
        Ok(Self { name, policy: Policy::preset(name).expect("it has a name") })
    }

    pub(super) fn is_third_party(&self) -> bool {
        matches!(self.name, "ietf" | "stripe") || self.protocol().is_some()
    }

    fn protocol(&self) -> Option<&'static ProtocolSource> {
        PROTOCOLS.iter().find(|protocol| protocol.preset == self.name)
    }

    /// The usual spelling of the key's header.
    pub(super) fn key_header(&self) -> String {
        let name = self.policy.key.from.iter().find_map(|source| match source {
            KeySource::Header(name) => Some(describe::header(name)),
            _ => None,
        });
        name.expect("all these presets name a header")
    }

    /// The header in which a proxy names the caller.
    pub(super) fn scope_header(&self) -> Option<&str> {
        self.policy.scope.iter().find_map(|part| match part {
            ScopePart::Header(name) => Some(name.as_str()),
            _ => None,
        })
    }

    pub(super) fn rules(&self) -> Vec<CheckRule> {
        if self.name == "mcp" {
            let rule = |&(id, title, citation): &(&'static str, &'static str, &str)| CheckRule {
                id,
                title,
                level: Required,
                citation: citation.to_owned(),
            };
            return mcp::CASES.iter().map(rule).collect();
        }
        CASES.iter().filter(|case| self.is_applicable(case.0)).filter_map(|case| self.rule(case)).collect()
    }

    fn rule(&self, &(id, title, ietf, stripe, dial): &CheckCase) -> Option<CheckRule> {
        let (level, citation) = match self.name {
            "ietf" => ietf.map(|(level, place)| {
                let in_draft = place.starts_with('§') || place.starts_with("Security");
                (level, if in_draft { format!("{IETF_SOURCE} {place}") } else { place.to_owned() })
            })?,
            "stripe" => stripe.map(|(level, said)| match level {
                CheckLevel::Required => (level, format!("{STRIPE_SOURCE}: {said}")),
                CheckLevel::Advised => (level, said.to_owned()),
            })?,
            preset => {
                let value = describe::dial_values(&self.policy).into_iter().find(|(name, _)| *name == dial);
                let promise = value.map_or_else(|| dial.to_owned(), |(name, value)| format!("{name} = {value}"));
                let promise = format!("ibid preset {preset} (docs/presets/{preset}.md): {promise}");
                match self.protocol() {
                    None => (CheckLevel::Required, promise),
                    Some(protocol) => match protocol.required.iter().find(|(required, _)| *required == id) {
                        Some((_, place)) => (CheckLevel::Required, format!("{}: {place}", protocol.source)),
                        None => (CheckLevel::Advised, format!("good practice: {promise}")),
                    },
                }
            }
        };
        Some(CheckRule { id, title, level, citation })
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
            // A raw key is what the header contains.
            "key.blank" | "key.quoted" | "key.list" | "key.parameters" | "key.bad-escape" | "key.open-quote" => {
                policy.key.format != KeyFormat::Raw
            }
            "mismatch.numbers" => policy.json_numbers == JsonNumbers::Decimal,
            "answer.echo" => policy.refusals == RefusalFormat::Acp,
            "config.lifetime" => policy.refusals == RefusalFormat::Iceberg,
            "concurrent.refused" | "concurrent.retry-after" => policy.on_concurrent == OnConcurrent::Reject,
            "concurrent.waits" => policy.on_concurrent == OnConcurrent::Wait,
            _ => true,
        }
    }
}

use CheckLevel::{Advised, Required};

const fn required(citation: &'static str) -> Citation {
    Some((Required, citation))
}

const fn advised(citation: &'static str) -> Citation {
    Some((Advised, citation))
}

const VALIDATE_KEY: &str = "§2.1; Security Considerations (always validate the key before processing)";
const UNAMBIGUOUS_KEY: &str = "good practice: a key that can be read in two ways is refused";

/// What a protocol requires: ids of checks, and where it says so.
struct ProtocolSource {
    preset: &'static str,
    source: &'static str,
    required: &'static [(&'static str, &'static str)],
}

#[rustfmt::skip]
const PROTOCOLS: &[ProtocolSource] = &[
    ProtocolSource { preset: "acp", source: "Agentic Commerce Protocol, rfc.agentic_checkout", required: &[
        ("first.processed", "§6.1"),
        ("first.independent", "§6.1 (the key names the request)"),
        ("replay.once", "§6.3 (no side effects on replay)"),
        ("replay.status", "§6.3 (the same HTTP status)"),
        ("replay.body", "§6.3 (the original response)"),
        ("mismatch.body", "§6.4 (422)"),
        ("mismatch.keeps-first", "§6.3"),
        ("mismatch.layout", "§6.2 (the order of members does not count)"),
        ("mismatch.numbers", "§6.2 (1.0 equals 1)"),
        ("mismatch.path", "§6.1 (endpoints are independent)"),
        ("concurrent.one-run", "§6.3, §6.4"),
        ("concurrent.refused", "§6.4 (409)"),
        ("concurrent.retry-after", "OpenAPI 2026-04-17, IdempotencyInFlight"),
        ("concurrent.settles", "§6.3"),
        ("disconnect.answer", "§6.3"),
        ("error.answer", "§6.3, §6.5 (5xx is not cached)"),
        ("caller.isolated", "§6.1 (keys belong to an identity)"),
        ("key.missing", "§6.1 (400)"),
        ("key.longest", "§6.1 (255 characters)"),
        ("answer.echo", "OpenAPI 2026-04-17, response headers"),
        ("problem.shape", "§6.4 (type and code)"),
    ]},
    ProtocolSource { preset: "ucp", source: "Universal Commerce Protocol, signatures, \"Replay Protection\"", required: &[
        ("first.processed", "a new key is a new request"),
        ("first.independent", "a new key is a new request"),
        ("replay.once", "a matching duplicate is not executed"),
        ("replay.status", "a matching duplicate gets the cached response"),
        ("replay.body", "a matching duplicate gets the cached response"),
        ("mismatch.body", "another payload gets 409"),
        ("mismatch.layout", "the raw bytes are compared"),
        ("mismatch.keeps-first", "a matching duplicate gets the cached response"),
        ("concurrent.one-run", "a duplicate is not executed"),
        ("concurrent.settles", "a matching duplicate gets the cached response"),
        ("disconnect.answer", "a matching duplicate gets the cached response"),
        ("caller.isolated", "keys are unique per client"),
        ("problem.shape", "\"REST Error Response\""),
    ]},
    ProtocolSource { preset: "iceberg", source: "Iceberg REST catalog, OpenAPI", required: &[
        ("first.processed", "idempotency-key"),
        ("first.independent", "idempotency-key (globally unique)"),
        ("replay.once", "idempotency-key (no additional effects)"),
        ("replay.status", "idempotency-key (an equivalent response)"),
        ("concurrent.one-run", "idempotency-key (no additional effects)"),
        ("concurrent.waits", "updateTable (409 means that the commit failed)"),
        ("concurrent.settles", "idempotency-key (an equivalent response)"),
        ("disconnect.answer", "idempotency-key (no additional effects)"),
        ("error.answer", "idempotency-key, \"Finalization rules\""),
        ("key.missing", "idempotency-key (not required)"),
        ("config.lifetime", "CatalogConfig, idempotency-key-lifetime"),
        ("problem.shape", "IcebergErrorResponse"),
    ]},
];

#[rustfmt::skip]
const CASES: &[CheckCase] = &[
    ("first.processed", "A first request is processed",
        required("§2.6 (first time request)"), required("a new key is a new request"), "key"),
    ("first.independent", "Another key is another operation",
        required("§2.2"), required("the key recognises retries of the same request"), "key"),
    ("first.unmarked", "A first answer does not say that it is a replay",
        advised("good practice: a client can tell a replay from a first answer"), required("Idempotent-Replayed is only on replays"), "replay_headers"),
    ("replay.once", "A retry does not run the operation again",
        required("§2.6 (retry)"), required("retry without performing the operation twice"), "remember"),
    ("replay.status", "A retry gets the first answer's status",
        required("§2.6 (retry)"), required("the resulting status code is saved"), "remember"),
    ("replay.body", "A retry gets the first answer's body",
        required("§2.6 (retry)"), required("the body of the first request is saved"), "remember"),
    ("replay.headers", "A retry gets the headers that describe the first answer",
        required("§2.6 (retry)"), advised("good practice: a body without its Content-Type is not the same answer"), "remember"),
    ("replay.cookies", "A retry gets no cookies of the first answer",
        advised("good practice: a cookie belongs to one answer"), None, "drop_headers"),
    ("replay.marker", "A replay says that it is one",
        advised("good practice: a client can tell a replay from a first answer"), required("replays have Idempotent-Replayed: true"), "replay_headers"),
    ("replay.envelope", "The metadata of a replay says so, and since when",
        None, None, "envelope"),
    ("mismatch.body", "The key with another body",
        required("§2.7 (422)"), required("incoming parameters are compared, and it errors if they differ"), "on_mismatch"),
    ("mismatch.keeps-first", "The key still gives the first answer afterwards",
        required("§2.6 (retry)"), required("subsequent requests with the same key return the same result"), "on_mismatch"),
    ("mismatch.layout", "The key with the same JSON in another layout",
        None, None, "fingerprint"),
    ("mismatch.numbers", "The key with numbers of the same value, written otherwise",
        None, None, "json_numbers"),
    ("mismatch.query", "The key with another query",
        advised("§2.2, §2.4 (good practice: what is asked for is part of the request)"), advised("good practice: a query is a parameter, too"), "fingerprint"),
    ("mismatch.path", "The key on another path",
        advised("§2.2, §2.4 (good practice: what is asked for is part of the request)"), advised("good practice: what is asked for is part of the request"), "fingerprint"),
    ("mismatch.method", "The key with another method",
        advised("§2.2, §2.4 (good practice: what is asked for is part of the request)"), None, "fingerprint"),
    ("concurrent.one-run", "Of many at the same moment, one runs",
        required("§2.6 (concurrent request)"), required("a request that conflicts with one that is executing is not executed"), "on_concurrent"),
    ("concurrent.refused", "A duplicate of a running request is refused as a conflict",
        required("§2.6, §2.7 (409)"), required("409: the request conflicts with another one"), "on_concurrent"),
    ("concurrent.waits", "A duplicate of a running request gets its answer",
        None, None, "on_concurrent"),
    ("concurrent.retry-after", "The conflict says when to try again",
        advised("RFC 9110 §10.2.3 (Retry-After)"), advised("RFC 9110 §10.2.3 (Retry-After)"), "on_concurrent"),
    ("concurrent.settles", "Afterwards the key gives that one run's answer",
        required("§2.6 (retry)"), required("such requests can be retried"), "on_concurrent"),
    ("disconnect.answer", "Who hangs up and retries gets the answer, and nothing runs twice",
        required("§1, §2.6 (a client that timed out retries)"), required("after a connection error the request can be repeated"), "on_concurrent"),
    ("error.answer", "A failure is remembered or run again, as promised",
        advised("good practice: a failure of the server that is replayed wedges the key"), required("results are saved whether it succeeds or fails, 500 errors included"), "remember"),
    ("caller.isolated", "Another caller's key is another key",
        required("Security Considerations (data leaks; a composite key per client)"), required("keys belong to an account"), "scope"),
    ("key.missing", "A request without a key",
        required("§2.7 (400 where it is required)"), required("keys are optional"), "key"),
    ("key.empty", "An empty key is refused",
        required(VALIDATE_KEY), advised(UNAMBIGUOUS_KEY), "key"),
    ("key.blank", "A key that is empty inside its quotes is refused",
        required(VALIDATE_KEY), None, "key"),
    ("key.longest", "A key of the greatest length is taken",
        advised("good practice: 255 characters are a common limit"), required("keys are up to 255 characters long"), "key"),
    ("key.too-long", "A longer key is refused",
        advised("good practice: 255 characters are a common limit"), required("keys are up to 255 characters long"), "key"),
    ("key.format", "A key of another form is refused",
        None, None, "key"),
    ("key.quoted", "A key in quotes is the same key without them",
        required("§2.1 (the key is a String, in quotes)"), None, "a header may carry the key bare or as a string"),
    ("key.two-headers", "Two key headers are refused",
        required("§2.1 (not more than one)"), advised(UNAMBIGUOUS_KEY), "two key headers are refused"),
    ("key.list", "A list of keys is refused",
        required("§2.1 (an Item, not a List)"), None, "a list of keys is refused"),
    ("key.parameters", "A key with parameters is refused",
        advised(UNAMBIGUOUS_KEY), None, "a key with parameters is refused"),
    ("key.bad-escape", "A key with a bad escape is refused",
        required(VALIDATE_KEY), None, "a key with a bad escape is refused"),
    ("key.open-quote", "A key whose quote is not closed is refused",
        required(VALIDATE_KEY), None, "a key with an open quote is refused"),
    ("key.control-byte", "A key with a control byte is refused",
        required(VALIDATE_KEY), advised(UNAMBIGUOUS_KEY), "only visible ASCII is allowed in keys"),
    ("key.non-ascii", "A key outside ASCII is refused",
        required(VALIDATE_KEY), advised(UNAMBIGUOUS_KEY), "only visible ASCII is allowed in keys"),
    ("key.nominated", "A key that Connection would remove on the way is refused",
        None, None, "what can be read in two ways is refused"),
    ("key.twin", "A second key under a header with underscores is refused",
        None, None, "what can be read in two ways is refused"),
    ("answer.echo", "Answers repeat the key and the id of the request",
        None, None, "refusals"),
    ("config.lifetime", "The configuration of the catalog says how long keys are valid",
        None, None, "ttl"),
    ("get.passes", "A key on a GET changes nothing",
        advised("§1 (GET is idempotent already)"), required("a key has no effect in GET requests"), "methods"),
    ("problem.shape", "Refusals are problems that a program can read",
        advised("§2.7 (examples), RFC 9457"), advised("good practice: its SDKs parse {\"error\":{\"type\",\"message\"}}"), "refusals"),
    ("problem.link", "A refused key leads to the documentation",
        advised("§2.7 (a link to relevant documentation)"), None, "refusals link to the published contract"),
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
        assert!(ConformProfile::parse("nope").unwrap_err().ends_with("ucp, iceberg, mcp"));
    }

    #[test]
    fn ids_are_unique() {
        let mut ids: Vec<_> = CASES.iter().map(|case| case.0).collect();
        ids.sort_unstable();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
