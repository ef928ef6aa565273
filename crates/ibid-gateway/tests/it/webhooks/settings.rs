//! Which settings a route for webhooks may have, and what each mistake is told.

use ibid::{
    Policy, RefusalReason,
    key::KeySource,
    policy::{OnConcurrent, OnMismatch, OnUnknown},
    presets::WEBHOOK_PRESET_NAMES,
    scope::ScopePart,
};
use ibid_gateway::config::{ConfigError, Env, GatewaySettings, ServeArgs, forgotten_answers};

fn try_load(text: &str) -> Result<GatewaySettings, ConfigError> {
    let text = format!("upstream = \"http://127.0.0.1:3000\"\n{text}");
    let env = [("A", "whsec_YQ=="), ("B", "whsec_Yg=="), ("EMPTY", "")];
    GatewaySettings::from_text(&text, Some("ibid.toml".into()), &ServeArgs::default(), &Env::from_pairs(&env))
}

#[track_caller]
fn load(text: &str) -> GatewaySettings {
    try_load(text).unwrap_or_else(|why| panic!("{why}"))
}

/// What a mistake in a route is told.
#[track_caller]
fn config_error(dials: &str) -> String {
    let line = try_load(&format!("[[route]]\nmatch = \"POST /a\"\n{dials}")).expect_err("a mistake").to_string();
    let line = line.split_once(": route[1].").unwrap_or_else(|| panic!("{line}")).1;
    line.strip_suffix(" (match = \"POST /a\")").unwrap_or(line).to_owned()
}

fn route(settings: &GatewaySettings, at: usize) -> &Policy {
    &settings.routes.iter().nth(at).unwrap().policy
}

#[test]
fn every_preset_has_what_its_sender_needs() {
    let ids = ["header:webhook-id", "header:svix-id header:webhook-id", "header:x-github-delivery", "json:/id"];
    let ids = ids.into_iter().chain(["header:x-shopify-webhook-id", ""]);
    for (preset, ids) in WEBHOOK_PRESET_NAMES.into_iter().zip(ids) {
        let policy = Policy::preset(preset).unwrap();
        assert_eq!(policy.key.from.iter().map(KeySource::to_string).collect::<Vec<_>>().join(" "), ids);
        assert!(policy.key.required);
        assert_eq!(policy.scope, [ScopePart::Path]);
        assert!(policy.fingerprint.is_empty());
        assert_eq!(policy.on_mismatch, OnMismatch::Ignore);
        assert_eq!((policy.on_concurrent, policy.on_unknown), (OnConcurrent::Wait, OnUnknown::Retry));
        assert_eq!(policy.remember.to_string(), "2xx");
        assert!(policy.unknown_status.is_empty());
        assert_eq!(policy.status_of(RefusalReason::InProgress).as_u16(), 503);
        assert_eq!(policy.ttl.as_secs(), 7 * 24 * 3600);
        assert_eq!(policy.max_request, if preset == "webhook:github" { 25 << 20 } else { 1 << 20 });
    }
}

#[test]
fn secrets_are_needed_unless_anybody_may_send() {
    let missing = "secrets: is missing; name what the sender signs with, such as [\"env:HOOK_SECRET\"], or say unsigned = true \
                   to take deliveries from anybody";
    for preset in WEBHOOK_PRESET_NAMES.iter().filter(|preset| **preset != "webhook:custom") {
        assert_eq!(config_error(&format!("preset = \"{preset}\"")), missing, "{preset}");
        assert_eq!(config_error(&format!("preset = \"{preset}\"\nsecrets = []")), missing, "{preset}");
        let settings = load(&format!("[[route]]\nmatch = \"POST /a\"\npreset = \"{preset}\"\nunsigned = true"));
        assert_eq!(route(&settings, 0).signature, None, "{preset}");
        assert_eq!(settings.warnings.len(), 1, "{:?}", settings.warnings);
        let settings =
            load(&format!("[[route]]\nmatch = \"POST /a\"\npreset = \"{preset}\"\nsecrets = [\"env:A\", \"env:B\"]"));
        assert_eq!(route(&settings, 0).signature.as_ref().unwrap().secrets.len(), 2);
        assert!(settings.warnings.is_empty(), "{:?}", settings.warnings);
    }
    let line = try_load("[policy]\npreset = \"webhook:github\"").unwrap_err().to_string();
    assert!(line.contains(": policy.secrets: is missing"), "{line}");
}

#[test]
fn what_each_mistake_is_told() {
    let github = |dials: &str| config_error(&format!("preset = \"webhook:github\"\nsecrets = \"env:A\"\n{dials}"));
    let custom =
        |dials: &str| config_error(&format!("preset = \"webhook:custom\"\nkey.from = \"header:X-Id\"\n{dials}"));
    for (told, expected) in [
        (config_error("secrets = \"env:A\""), "secrets: only presets for webhooks have it, and this one is \"ietf\""),
        (
            config_error("preset = \"stripe\"\ntolerance = \"1m\""),
            "tolerance: only presets for webhooks have it, and this one is \"stripe\"",
        ),
        (config_error("unsigned = true"), "unsigned: only presets for webhooks have it, and this one is \"ietf\""),
        (
            config_error("preset = \"webhook:stripe\"\nsecrets = \"env:NONE\""),
            "secrets: \"env:NONE\": the environment variable NONE is not set",
        ),
        (
            config_error("preset = \"webhook:stripe\"\nsecrets = [\"env:A\", \"env:EMPTY\"]"),
            "secrets[2]: it is empty (from \"env:EMPTY\")",
        ),
        (
            config_error("preset = \"webhook:stripe\"\nsecrets = \"env:A\"\ntolerance = \"0s\""),
            "tolerance: is under a second; timestamps are in seconds, so it must be longer, such as \"5m\"",
        ),
        (github("tolerance = \"1m\""), "tolerance: github signs no time, so nothing can be too old; leave it out"),
        (
            github("key.required = false"),
            "key.required: is false; where deliveries are signed it must be true, because what has no key passes unchecked",
        ),
        (github("unsigned = true"), "secrets: there is nothing to check with it where unsigned is true; leave one out"),
        (
            github("signature.header = \"X-S\""),
            "signature: \"webhook:github\" has its own; leave it out, or take the preset \"webhook:custom\"",
        ),
        (
            custom("secrets = \"env:A\""),
            "signature: missing; say how the sender signs, such as { header = \"X-Signature\" }, or say unsigned = true",
        ),
        (
            custom("secrets = \"env:A\"\nsignature.prefix = \"v0=\""),
            "signature.header: missing; name the header that has the signature, such as \"X-Signature\"",
        ),
        (
            custom("secrets = \"env:A\"\nsignature = { header = \"X-S\", encoding = \"base32\" }"),
            "signature.encoding: \"base32\" is no encoding; allowed are \"hex\" \"base64\"",
        ),
        (
            custom("secrets = \"env:A\"\nsignature = { header = \"X-S\", content = \"{body}.\" }"),
            "signature.content: \"{body}.\" is not what can be signed: it must end with {body}; write it such as \"{X-Timestamp}.{body}\"",
        ),
        (
            custom("secrets = \"env:A\"\nsignature = { header = \"X-S\", timestamp = \"X-T\" }"),
            "signature.timestamp: names x-t, which is not signed, so anybody could change it; add {x-t} to signature.content",
        ),
        (
            custom("signature = { header = \"X-S\" }"),
            "secrets: is missing; name what the sender signs with, such as [\"env:HOOK_SECRET\"], or say unsigned = true to take deliveries from anybody",
        ),
        (
            config_error("preset = \"webhook:custom\"\nunsigned = true"),
            "key.from: is empty; name at least one source, such as \"header:Idempotency-Key\"",
        ),
    ] {
        assert_eq!(told, expected);
    }
    let told = config_error("preset = \"webhook:githib\"");
    assert!(told.starts_with("preset: \"webhook:githib\" is no preset, did you mean \"webhook:github\"?"), "{told}");
}

#[test]
fn deliveries_are_not_calls() {
    let grpc = "[[route]]\nmatch = \"grpc shop.Orders/Create\"\npreset = \"webhook:github\"\nsecrets = \"env:A\"";
    let line = try_load(grpc).unwrap_err().to_string();
    assert!(line.contains("\"webhook:github\" is for deliveries over HTTP, not for gRPC"), "{line}");
}

#[test]
fn a_route_takes_from_policy_what_it_does_not_say() {
    let settings = load(
        "[policy]\npreset = \"webhook:stripe\"\nsecrets = \"env:A\"\ntolerance = \"1m\"\n\
         [[route]]\nmatch = \"POST /a\"\n[[route]]\nmatch = \"POST /b\"\nsecrets = \"env:B\"\n\
         [[route]]\nmatch = \"POST /c\"\ntolerance = \"2m\"\n[[route]]\nmatch = \"POST /d\"\nunsigned = true",
    );
    let signature = |at| route(&settings, at).signature.clone();
    let [a, b, c] = [0, 1, 2].map(|at| signature(at).expect("signed"));
    assert_eq!((a.tolerance.as_secs(), b.tolerance.as_secs(), c.tolerance.as_secs()), (60, 60, 120));
    assert_eq!(a.secrets, c.secrets);
    assert_ne!(a.secrets, b.secrets);
    assert_eq!(signature(3), None);

    let settings = load(
        "[policy]\npreset = \"webhook:custom\"\nkey.from = \"header:X-Id\"\nunsigned = true\n[[route]]\nmatch = \"POST /a\"\n\
         [[route]]\nmatch = \"POST /b\"\nsecrets = \"env:A\"\nsignature.header = \"X-S\"",
    );
    assert_eq!(route(&settings, 0).signature, None);
    assert_eq!(route(&settings, 1).signature.as_ref().unwrap().scheme.to_string(), "x-s: hex of {body}");
}

/// Secrets come and go; what is remembered stays.
#[test]
fn another_secret_forgets_nothing() {
    let of = |dials: &str| load(&format!("[[route]]\nmatch = \"POST /a\"\npreset = \"webhook:standard\"\n{dials}"));
    let before = of("secrets = \"env:A\"");
    for after in [
        "secrets = \"env:B\"",
        "secrets = [\"env:B\", \"env:A\"]",
        "unsigned = true",
        "secrets = \"env:A\"\ntolerance = \"1h\"",
    ] {
        assert!(forgotten_answers(&before, &of(after)).is_empty(), "{after}");
        assert_ne!(before, of(after), "a reload takes it up: {after}");
    }
}
