//! The documentation holds: its sessions run against the binary, its tables say what the code says.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use ibid::{
    Policy, RefusalReason,
    grpc::{CallOutcome, GrpcStatusCode},
    presets::{AGENT_PRESET_NAMES, PRESET_NAMES, WEBHOOK_PRESET_NAMES},
};
use ibid_gateway::{
    config::{Env, GatewaySettings, ServeArgs},
    metrics::FAMILIES,
};
use serde_json::Value;
use testbed::{
    docs::DocPage,
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::timeout,
};

use crate::support::{BIN, run_ibid, start_gateway};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn preset_page(name: &str) -> PathBuf {
    root().join(format!("docs/presets/{name}.md"))
}

/// The presets that have a page each.
fn paged_presets() -> impl Iterator<Item = &'static str> {
    PRESET_NAMES.into_iter().chain(AGENT_PRESET_NAMES)
}

#[test]
fn the_page_of_mcp_has_the_code_of_every_refusal() {
    let page = std::fs::read_to_string(preset_page("mcp")).unwrap();
    for reason in RefusalReason::all() {
        let row = format!("| {} | `{}` |", reason.json_rpc_code(), reason.name());
        assert!(page.lines().any(|line| line == row), "{row}");
    }
}

#[tokio::test]
async fn every_preset_page_shows_what_happens() {
    for name in paged_presets() {
        let page = DocPage::read(preset_page(name));
        let upstream = TestUpstream::start().await;
        let paid = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"paid"}]}}"#;
        upstream.on("/mcp", UpstreamReply::status(200).json(paid));
        upstream.on("/v1/config", UpstreamReply::status(200).json(r#"{"defaults":{},"overrides":{}}"#));
        let config = page.config().expect("a preset page has a configuration").to_owned();
        let gateway = start_gateway(&config, &upstream).await;
        page.gateway(gateway.addr()).run().await;
    }
}

#[tokio::test]
async fn every_preset_page_has_the_dials_that_the_code_has() {
    for name in paged_presets() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("upstream = \"http://127.0.0.1:3000\"\n[policy]\npreset = \"{name}\"\n"))
            .unwrap();
        let output = run_ibid(&["check", file.path().to_str().unwrap()], &[]).await;
        let printed = output.text();
        let dials = printed.split("[policy]").nth(1).expect("the policy's dials").lines().skip(1);
        let code: BTreeMap<_, _> = dials
            .map_while(|line| line.trim_end_matches('*').trim().split_once("  "))
            .map(|(dial, value)| (dial.to_owned(), value.trim().to_owned()))
            .filter(|(dial, _)| dial != "methods")
            .collect();
        let page = std::fs::read_to_string(preset_page(name)).unwrap();
        let table = page.split("\n## ").find(|section| section.starts_with("Dials")).expect("a section of dials");
        let rows = table.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
        let documented: BTreeMap<_, _> = rows
            .filter(|(dial, _)| code.contains_key(*dial))
            .map(|(dial, value)| (dial.to_owned(), value.to_owned()))
            .collect();
        assert!(code.len() > 20, "{printed}");
        assert_eq!(documented, code, "docs/presets/{name}.md");
    }
}

#[test]
fn every_preset_page_lists_the_routes_of_its_shipped_configuration() {
    for name in paged_presets() {
        let settings = |text: &str| {
            GatewaySettings::from_text(text, None, &ServeArgs::default(), &Env::from_pairs(&[]))
                .unwrap_or_else(|why| panic!("{why}"))
        };
        let page = DocPage::read(preset_page(name));
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("presets/{name}.toml"));
        let shipped = settings(&std::fs::read_to_string(shipped).unwrap());
        assert_eq!(settings(page.config().unwrap()).routes, shipped.routes, "{name}");
    }
}

const HOOK_SECRETS: [(&str, &str); 6] = [
    ("BILLING_HOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    ("SVIX_HOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    ("GITHUB_HOOK_SECRET", "It's a Secret to Everybody"),
    ("STRIPE_HOOK_SECRET", "whsec_stripe"),
    ("SHOPIFY_HOOK_SECRET", "shopify"),
    ("SLACK_HOOK_SECRET", "slack"),
];

#[tokio::test]
async fn the_page_of_webhooks_shows_what_happens() {
    let page = DocPage::read(preset_page("webhooks"));
    let upstream = TestUpstream::start().await;
    let config = page.config().expect("a configuration").to_owned();
    let launch = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url());
    let launch = HOOK_SECRETS.iter().fold(launch, |launch, (name, value)| launch.env(name, value));
    let gateway = launch.start().await;
    page.gateway(gateway.addr()).run().await;
}

#[tokio::test]
async fn the_page_of_webhooks_has_the_dials_that_the_code_has() {
    let page = std::fs::read_to_string(preset_page("webhooks")).unwrap();
    let rows = |text: &str| -> BTreeMap<String, String> {
        let rows = text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
        rows.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let section = page.split("\n## ").find(|section| section.starts_with("Dials")).expect("a section of dials");
    let documented = rows(section.split("\nOnly these").next().unwrap());
    let presets = rows(page.split("\n## ").next().unwrap());
    for preset in WEBHOOK_PRESET_NAMES {
        let file = tempfile::NamedTempFile::new().unwrap();
        let key = if preset == "webhook:custom" { "key.from = \"header:yours\"\n" } else { "" };
        let config = format!("upstream = \"http://h\"\n[policy]\npreset = \"{preset}\"\nunsigned = true\n{key}");
        std::fs::write(file.path(), config).unwrap();
        let output = run_ibid(&["check", file.path().to_str().unwrap()], &[]).await;
        let printed = output.text();
        let dials = printed.split("[policy]").nth(1).expect("the policy's dials").lines().skip(1);
        let code: BTreeMap<_, _> = dials
            .map_while(|line| line.trim_start_matches('*').trim().split_once("  "))
            .map(|(dial, value)| (dial.to_owned(), value.trim().to_owned()))
            .collect();
        assert!(code.len() > 20, "{printed}");
        let shown = presets[&format!("`{preset}`")].split(" | ").next().unwrap();
        let from = code["key"].split(';').next().unwrap();
        assert_eq!(shown, if preset == "webhook:custom" { "yours: `key.from`" } else { from }, "{preset}");
        for (dial, value) in code.iter().filter(|(dial, _)| !["methods", "key", "signature"].contains(&dial.as_str())) {
            let expected = match (preset, dial.as_str()) {
                ("webhook:github", "max_request") => "25MiB",
                _ => documented.get(dial).unwrap_or_else(|| panic!("{dial} is not documented")),
            };
            assert_eq!(value, expected, "{dial} of {preset}");
        }
        assert!(
            documented
                .keys()
                .filter(|dial| !["dial", "---"].contains(&dial.as_str()))
                .all(|dial| code.contains_key(dial))
        );
    }
}

#[test]
fn the_page_of_webhooks_lists_the_routes_of_the_shipped_configuration() {
    let settings = |text: &str| {
        let loaded = GatewaySettings::from_text(text, None, &ServeArgs::default(), &Env::from_pairs(&HOOK_SECRETS));
        loaded.unwrap_or_else(|why| panic!("{why}"))
    };
    let page = DocPage::read(preset_page("webhooks"));
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("presets/webhooks.toml");
    let shipped = settings(&std::fs::read_to_string(shipped).unwrap());
    assert!(shipped.warnings.is_empty(), "{:?}", shipped.warnings);
    assert_eq!(shipped.routes.iter().map(|route| route.preset).collect::<Vec<_>>(), WEBHOOK_PRESET_NAMES);
    assert_eq!(settings(page.config().unwrap()).routes, shipped.routes);
}

/// The pages of webhooks and gRPC say that these files take effect within a second: they are among the watched ones.
#[test]
fn files_of_secrets_and_descriptors_are_watched() {
    let folder = tempfile::tempdir().unwrap();
    let (secret, descriptors) = (folder.path().join("hook.secret"), folder.path().join("shop.bin"));
    std::fs::write(&secret, "It's a Secret to Everybody").unwrap();
    std::fs::write(&descriptors, crate::grpc::descriptors()).unwrap();
    let text = format!(
        "upstream = \"http://h\"\ndescriptors = {descriptors:?}\n[[route]]\nmatch = \"POST /hooks/github\"\n\
         preset = \"webhook:github\"\nsecrets = [\"file:{}\"]\n",
        secret.display()
    );
    let settings = GatewaySettings::from_text(&text, None, &ServeArgs::default(), &Env::from_pairs(&[]));
    let settings = settings.unwrap_or_else(|why| panic!("{why}"));
    for (page, said, file) in [
        ("presets/webhooks", "`file:` secrets take effect within a second", &secret),
        ("grpc", "A changed descriptor file takes effect within a second", &descriptors),
    ] {
        let page = std::fs::read_to_string(root().join(format!("docs/{page}.md"))).unwrap();
        assert!(page.contains(said), "{said}");
        assert!(settings.value_files.contains(file), "{} is not watched", file.display());
    }
}

/// Every metric, in order, with its type and what the page itself says about it.
#[test]
fn the_metrics_are_documented_as_the_code_has_them() {
    let page = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with("Metrics")).expect("a section of metrics");
    let documented: Vec<_> =
        section.split("\n### ").next().expect("the table").lines().filter(|line| line.starts_with("| `")).collect();
    let row = |family: &ibid_gateway::metrics::MetricFamily| {
        let labels = if family.labels.is_empty() { String::new() } else { format!("{{{}}}", family.labels.join(",")) };
        // The page shows names as code where a sentence has them.
        let help = family.help.trim_end_matches('.').replace("in-progress", "`in-progress`");
        let help = help.replace("key-reused", "`key-reused`").replace("; wait ", "; `wait` ");
        format!("| `{}{labels}` | {} | {help} |", family.name, family.kind)
    };
    let code: Vec<_> = FAMILIES.iter().map(row).collect();
    assert_eq!(documented, code);
}

/// What the first column of a table under a heading names, without its back quotes.
fn named_in_table<'a>(page: &'a str, heading: &str, table: &str) -> Vec<&'a str> {
    let section = page.split(&format!("\n## {heading}\n")).nth(1).expect("the section is there");
    let section = section.split("\n## ").next().expect("it is not empty");
    let rows = section.split(table).nth(1).expect("the table is there").lines().skip(1);
    let rows = rows.skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let first = rows.filter_map(|row| row.strip_prefix("| ")?.split(" | ").next());
    first.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`')).collect()
}

/// The keys that the configuration accepts in a table (`""`: at the top level).
fn accepted_keys(table: &str) -> BTreeSet<String> {
    let schema = ibid_gateway::config::file_schema();
    let table = if table.is_empty() { &schema } else { &schema["properties"][table] };
    table["properties"].as_object().expect("a table").keys().cloned().collect()
}

/// The keys that a table of the page names, each without the name of its table and without what is nested in it.
fn documented_keys(page: &str, heading: &str, header: &str, table: &str) -> BTreeSet<String> {
    let names = named_in_table(page, heading, header).into_iter().filter(|name| !name.starts_with("---"));
    let key = |name: &str| {
        let rest = if table.is_empty() { Some(name) } else { name.strip_prefix(&format!("{table}.")) };
        let rest = rest.unwrap_or_else(|| panic!("{name} is not of [{table}]"));
        rest.split('.').next().expect("a name").to_owned()
    };
    names.map(key).collect()
}

const SETTINGS_TABLES: [&str; 11] =
    ["tls", "jwt", "quota", "limits", "log", "trace", "admin", "api", "ext_proc", "store", "seal"];
const SETTINGS_HEADER: &str = "| key | default | meaning |";

#[test]
fn the_page_of_settings_has_every_key() {
    let page = std::fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    for table in SETTINGS_TABLES {
        let documented = documented_keys(&page, &format!("`[{table}]`"), SETTINGS_HEADER, table);
        assert_eq!(documented, accepted_keys(table), "[{table}]");
    }
    let mut top = documented_keys(&page, "Top level", SETTINGS_HEADER, "");
    top.extend(SETTINGS_TABLES.into_iter().chain(["policy", "route"]).map(str::to_owned));
    assert_eq!(top, accepted_keys(""));
    let mut dials = documented_keys(&page, "Dials", "| dial | values | `ietf` | meaning |", "");
    dials.extend(["preset", "match"].map(str::to_owned));
    assert_eq!(dials, accepted_keys("policy"));
}

/// Writing a documented default into the file changes nothing.
#[test]
fn the_page_of_settings_has_the_defaults_of_the_code() {
    let page = std::fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let settings = |text: &str| {
        let text = format!("upstream = \"http://127.0.0.1:3000\"\n{text}");
        GatewaySettings::from_text(&text, None, &ServeArgs::default(), &Env::from_pairs(&[]))
            .unwrap_or_else(|why| panic!("{why}"))
    };
    let sections = page.split("\n## ").filter(|section| section.contains(SETTINGS_HEADER));
    // The settings of these tables hold only together with keys that have no default.
    let sections = sections.filter(|section| !section.starts_with("`[jwt]`") && !section.starts_with("`[seal]`"));
    let mut compared = 0;
    for row in sections.flat_map(str::lines).filter_map(|line| line.strip_prefix("| `")) {
        let mut cells = row.split(" | ");
        let (Some(key), Some(default)) = (cells.next().and_then(|cell| cell.strip_suffix('`')), cells.next()) else {
            continue;
        };
        let value = default.trim_matches('`');
        let is_literal = value.starts_with(['"', '[']) || value.parse::<u64>().is_ok() || value.parse::<bool>().is_ok();
        if !is_literal || value.contains('`') || key.contains('`') {
            continue;
        }
        assert!(settings(&format!("{key} = {value}")) == settings(""), "{key} is not {value} by default");
        compared += 1;
    }
    assert!(compared > 25, "{compared} defaults");
}

#[test]
fn the_page_of_operating_lists_what_needs_a_restart() {
    let page = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let listed = page.split("only read at the start: ").nth(1).expect("the list").split(". ").next().expect("it ends");
    let listed: Vec<_> = listed.split('`').skip(1).step_by(2).collect();
    let settings = |text: &str| {
        GatewaySettings::from_text(text, None, &ServeArgs::default(), &Env::from_pairs(&[]))
            .unwrap_or_else(|why| panic!("{why}"))
    };
    let pem = "cert = \"-----BEGIN CERTIFICATE-----\"\nkey = \"-----BEGIN PRIVATE KEY-----\"";
    let secret = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let everything = format!(
        "upstream = \"http://127.0.0.1:3000\"\nlisten = \"127.0.0.1:1\"\ntrusted_proxies = []\n\
         credentials = [\"X-Api-Key\"]\ncredential_schemes = [\"Token\"]\nmax_running = 1\nbuffer_memory = \"64MiB\"\n\
         cors = {{ origins = [\"https://shop.example.com\"] }}\njournal = \"elsewhere\"\n[tls]\n{pem}\n\
         [limits]\nmax_headers = 7\n[log]\nlevel = \"warn\"\n[trace]\notlp = \"http://127.0.0.1:4318\"\n\
         [admin]\nlisten = \"127.0.0.1:2\"\n[admin.tls]\n{pem}\n[api]\nlisten = \"unix:api.sock\"\n[store]\nurl = \"memory:\"\n\
         [seal]\naddress_secret = \"{secret}\"\n"
    );
    let changed = settings(&everything).settings_needing_restart(&settings("upstream = \"http://127.0.0.1:3000\""));
    assert_eq!(listed, changed);
}

#[test]
fn the_promises_in_the_docs_are_those_that_check_prints() {
    let page = std::fs::read_to_string(root().join("README.md")).unwrap();
    for (store, parts) in [
        (
            "url = \"redis://h/0\"",
            &["what a crash loses depends on AOF", "an asynchronous failover can forget a claim"][..],
        ),
        ("url = \"postgres://h/d\"", &["survives a crash", "an asynchronous failover can lose the last commits"]),
        ("url = \"postgres://h/d\"\ncache = \"redis://h/0\"", &["losing Redis changes speed only"]),
        (
            "url = \"redis://h/0\"\nfallback = \"postgres://h/d\"",
            &[
                "which are counted: one gateway sees only Redis and another only PostgreSQL; Redis loses what PostgreSQL has \
                 not seen, or is left alone without it",
            ],
        ),
    ] {
        let text = format!("upstream = \"http://127.0.0.1:3000\"\n[store]\n{store}");
        let settings = GatewaySettings::from_text(&text, None, &ServeArgs::default(), &Env::from_pairs(&[])).unwrap();
        let promise = settings.store.store_config().guarantee_summary();
        for part in parts {
            assert!(promise.contains(part), "{part} in {promise}");
            assert!(page.contains(part), "{part} in README.md");
        }
    }
}

/// A finished entry and an unknown one together have every member.
#[tokio::test]
async fn the_page_of_operating_has_every_member_of_an_entry() {
    let page = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let documented: BTreeSet<&str> =
        named_in_table(&page, "Looking at and resolving keys", "| member | meaning |").into_iter().collect();
    let entries = crate::keys::finished_and_unknown().await;
    let members: BTreeSet<&str> =
        entries.iter().flat_map(|entry| entry.as_object().expect("an object").keys()).map(String::as_str).collect();
    assert_eq!(documented, members);
}

#[test]
fn the_grpc_page_says_what_each_status_means() {
    let page = std::fs::read_to_string(root().join("docs/grpc.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    let documented: Vec<_> = rows.filter(|(name, _)| GrpcStatusCode::from_name(name).is_some()).collect();
    let policy = Policy::ietf();
    let code: Vec<_> = GrpcStatusCode::all()
        .map(|code| match CallOutcome::of(&policy, code) {
            CallOutcome::Remembered => (code.name(), "remembered"),
            CallOutcome::Released => (code.name(), "released"),
            CallOutcome::OutcomeUnknown => (code.name(), "unknown"),
        })
        .collect();
    assert_eq!(documented, code);
    for reason in RefusalReason::all() {
        let row = page.lines().find(|line| line.starts_with("| `") && line.contains(&format!("`{reason}`")));
        let name = GrpcStatusCode::from_number(reason.grpc_status().into()).name();
        assert!(row.is_some_and(|row| row.ends_with(&format!(" | {name} |"))), "{reason} is {name}: {row:?}");
    }
}

#[tokio::test]
async fn the_page_of_openapi_shows_what_happens() {
    DocPage::read(root().join("docs/openapi.md")).binary(BIN).run().await;
}

#[tokio::test]
async fn the_page_of_conform_shows_what_happens_and_has_every_check() {
    let path = root().join("docs/conform.md");
    let upstream = TestUpstream::start().await;
    let launch = GatewayProcess::launch(BIN).upstream(&upstream.url()).arg("--store").arg("memory:");
    let gateway = launch.start().await;
    DocPage::read(&path).gateway(gateway.addr()).binary(BIN).run().await;
    let page = std::fs::read_to_string(path).unwrap();
    let mut documented = named_in_table(&page, "Checks", "| check | what is checked |");
    let mut code = BTreeSet::new();
    for name in paged_presets() {
        let list = run_ibid(&["conform", "--list", "--profile", name], &[]).await.stdout;
        let list = String::from_utf8(list).unwrap();
        let ids = list.lines().filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next());
        code.extend(ids.map(str::to_owned));
    }
    documented.sort_unstable();
    assert_eq!(documented, code.into_iter().collect::<Vec<_>>());
}

/// The first screen of the README, against the demo that it tells people to start.
#[tokio::test]
async fn the_readme_shows_what_the_demo_does() {
    let mut demo = Command::new(BIN)
        .args(["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines();
    let address = timeout(Duration::from_secs(10), async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(address) = line.strip_prefix("ibid: listening on http://") {
                return address.parse().unwrap();
            }
        }
        panic!("the demo ended");
    });
    let address = address.await.expect("the demo starts");
    DocPage::read(root().join("README.md")).gateway(address).run().await;
}

/// README's configuration covers README's request.
#[tokio::test]
async fn the_readmes_configuration_covers_its_request() {
    let page = DocPage::read(root().join("README.md"));
    let upstream = TestUpstream::start().await;
    let charged = r#"{"id":"pay_0001","amount":1200,"status":"charged","at":"now"}"#;
    upstream.on("/payments", UpstreamReply::status(201).json(charged));
    let config = page.config().expect("the README has a configuration").to_owned();
    let gateway = start_gateway(&config, &upstream).await;
    page.gateway(gateway.addr()).run().await;
    assert_eq!(upstream.executions_at("/payments"), 1);
    let settings = GatewaySettings::from_text(&config, None, &ServeArgs::default(), &Env::from_pairs(&[])).unwrap();
    let route = settings.routes.find(&http::Method::POST, "/payments").expect("a route");
    assert_eq!((route.name.as_str(), route.is_default_policy), ("POST /payments", false));
    assert!(settings.warnings.is_empty(), "{:?}", settings.warnings);
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> Vec<String> {
    let mut is_code = false;
    let mut anchors: Vec<String> = Vec::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        let Some(heading) = line.strip_prefix('#').filter(|_| !is_code) else { continue };
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || [' ', '-', '_'].contains(letter));
        anchors.push(kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect());
    }
    anchors
}

/// Links between the pages lead to a file, and to a heading that it has.
#[test]
fn no_link_is_dead() {
    let mut pages: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
        .map(|page| root().join(page))
        .into();
    for folder in [
        "docs",
        "docs/presets",
        "examples",
        "examples/appsportal",
        "examples/bookings-nestjs",
        "examples/leads-php",
        "examples/membership-nextjs",
        "examples/tonic",
        "clients/go",
        "clients/js",
        "clients/php",
        "clients/python",
    ] {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        pages.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    let (mut dead, mut seen) = (Vec::new(), 0);
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            if target.contains("://") {
                continue;
            }
            seen += 1;
            let target = if target.is_empty() { page.clone() } else { page.parent().unwrap().join(target) };
            let leads = target.exists()
                && (anchor.is_empty()
                    || std::fs::read_to_string(&target)
                        .is_ok_and(|text| anchors(&text).iter().any(|one| one == anchor)));
            if !leads {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
    assert!(seen > 100);
}

/// The schema for editors: types as the code reads them, descriptions as the page of settings has them.
#[test]
fn the_schema_of_the_configuration_is_committed_as_it_is() {
    let page = std::fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let mut schema = ibid_gateway::config::file_schema();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let (meaning, default) = match cells[..] {
            [_, default, meaning] => (meaning, default),
            [_, _, default, meaning] => (meaning, default),
            _ => continue,
        };
        let default = if default.is_empty() { String::new() } else { format!(" Default: {default}.") };
        let description = plain_text(&format!("{meaning}{default}"));
        for name in cells[0].split(", ").map(|name| name.trim_matches('`')) {
            for dials in ["", "policy.", "route."] {
                describe(&mut schema, &format!("{dials}{}", name.trim_end_matches(".NAME")), &description);
            }
        }
    }
    let mut whole = serde_json::json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "The configuration of the ibid gateway",
    });
    let members = schema.as_object().expect("a table").clone();
    whole.as_object_mut().unwrap().extend(members);
    let path = root().join("crates/ibid-gateway/assets/ibid.schema.json");
    let committed = std::fs::read_to_string(&path).unwrap();
    if serde_json::from_str::<Value>(&committed).ok() != Some(whole.clone()) {
        let new = root().join("target/ibid.schema.json");
        std::fs::write(&new, format!("{whole:#}\n")).unwrap();
        panic!("settings or docs/configuration.md have changed: copy {} to {}", new.display(), path.display());
    }
    for setting in ["listen", "admin", "policy"] {
        assert!(whole["properties"][setting].is_object(), "{setting}");
    }
    assert!(whole["properties"]["listen"]["description"].as_str().is_some_and(|text| text.contains("clients")));
}

/// Describes the setting at a dotted path, if there is one.
fn describe(schema: &mut Value, path: &str, description: &str) {
    let mut node = schema;
    for step in path.split('.') {
        let node_or_item = if node.get("items").is_some() { &mut node["items"] } else { node };
        match node_or_item.pointer_mut(&format!("/properties/{step}")) {
            Some(member) => node = member,
            None => return,
        }
    }
    node["description"] = description.into();
}

/// Without the marks of links and code.
fn plain_text(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once("](") {
        let (before, label) = before.rsplit_once('[').expect("a link");
        text.push_str(before);
        text.push_str(label);
        rest = link.split_once(')').expect("the end of a link").1;
    }
    text.push_str(rest);
    text.replace('`', "").replace("\\|", "|")
}

/// Every refusal has a row, with its status.
#[test]
fn the_catalogue_of_refusals_is_complete() {
    let page = std::fs::read_to_string(root().join("docs/refusals.md")).unwrap();
    let rows = page.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        Some((cells.next()?.to_owned(), cells.next()?.trim_matches('`').to_owned()))
    });
    let documented: BTreeSet<_> = rows.filter(|(status, _)| status.parse::<u16>().is_ok()).collect();
    let code: BTreeSet<_> =
        RefusalReason::all().map(|reason| (reason.status().as_u16().to_string(), reason.name().to_owned())).collect();
    assert_eq!(documented, code);
}

/// The set-up with two gateways, with a Redis and ports of the test's own.
#[tokio::test]
async fn two_gateways_share_their_answers_as_the_page_says() {
    let page = DocPage::read(root().join("docs/two-gateways.md"));
    let (upstream, redis) = (TestUpstream::start().await, testbed::TestRedis::start());
    let config = page.config().expect("a configuration").replace("redis://127.0.0.1:6379/0", &redis.url());
    let config = config.replace("upstream = \"http://127.0.0.1:3000\"\n", "");
    let first = start_gateway(&config, &upstream).await;
    let second = start_gateway(&config, &upstream).await;
    let text = std::fs::read_to_string(root().join("docs/two-gateways.md")).unwrap();
    let mut answers = Vec::new();
    for (line, gateway) in text.lines().filter(|line| line.starts_with("curl ")).zip([&first, &second]) {
        let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split('/').next()).expect("a port");
        let line = line.replace(&format!("127.0.0.1:{port}"), &gateway.addr().to_string());
        let output = Command::new("bash").args(["-c", &line]).output().await.unwrap();
        answers.push(String::from_utf8(output.stdout).unwrap());
    }
    let [first, second] = &answers[..] else { panic!("two requests: {answers:?}") };
    let body = |answer: &str| answer.split("\r\n\r\n").nth(1).unwrap_or_default().to_owned();
    assert!(first.starts_with("HTTP/1.1 2") && !first.contains("idempotent-replayed"), "{first}");
    assert!(second.contains("idempotent-replayed: true") && body(first) == body(second), "{second}");
    assert_eq!(upstream.executions(), 1);
}

/// The site has every page, and no page that is gone.
#[test]
fn the_table_of_contents_has_every_page() {
    let summary = std::fs::read_to_string(root().join("docs/book/SUMMARY.md")).unwrap();
    let listed: BTreeSet<&str> = summary.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(listed.iter().all(|page| root().join(page).exists()), "{listed:?}");
    for folder in ["docs", "docs/presets"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let page = format!("{folder}/{name}");
            assert!(!name.ends_with(".md") || listed.contains(page.as_str()), "{page} is not in docs/book/SUMMARY.md");
        }
    }
}
