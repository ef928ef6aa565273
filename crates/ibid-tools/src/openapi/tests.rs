//! Tests of the insertions: styles of YAML and JSON, existing content, coverage by routes.

use ibid::policy::PolicyMode;

use super::*;

/// A method or methods, a pattern whose `*` at the end matches the rest, and a policy.
type TestRoute = (&'static str, &'static str, Policy);

fn routes() -> Vec<TestRoute> {
    let preset = |name| Policy::preset(name).unwrap();
    let mut watched = Policy::ietf();
    watched.mode = PolicyMode::Shadow;
    vec![
        ("POST", "/payments", Policy::ietf()),
        ("POST|DELETE", "/payments/:id/*", preset("stripe")),
        ("PUT", "/v1/things/*", preset("membership")),
        ("POST", "/leads", preset("leads")),
        ("POST", "/watched", watched),
    ]
}

fn find<'a>(routes: &'a [TestRoute], method: &Method, path: &str) -> Option<CoveringRoute<'a>> {
    let matches = |pattern: &str| {
        let (pattern, path): (Vec<_>, Vec<_>) = (pattern.split('/').collect(), path.split('/').collect());
        let same = |(wanted, found): (&&str, &&str)| wanted == found || wanted.starts_with(':') || *wanted == "*";
        let open = pattern.last() == Some(&"*");
        (pattern.len() == path.len() || open && path.len() > pattern.len()) && pattern.iter().zip(&path).all(same)
    };
    let found =
        |(methods, pattern, _): &&TestRoute| methods.split('|').any(|name| name == method.as_str()) && matches(pattern);
    let (_, _, policy) = routes.iter().find(found)?;
    Some(CoveringRoute { policy, has_quota: false, is_default_policy: false })
}

fn annotate_with(
    text: &str, name: &str, routes: &[TestRoute], base: Option<&str>,
) -> Result<AnnotateOutcome, DocumentError> {
    annotate_file(text, name.as_ref(), &|method, path| find(routes, method, path), base)
}

/// Annotates a document and checks the invariants: lines are only added, and a second run adds none.
#[track_caller]
fn annotate(text: &str) -> annotate::AnnotateOutcome {
    annotate_as(text, "openapi.yaml", None)
}

#[track_caller]
fn annotate_as(text: &str, name: &str, base: Option<&str>) -> annotate::AnnotateOutcome {
    let routes = routes();
    let done = annotate_with(text, name, &routes, base).unwrap_or_else(|why| panic!("{why:?}"));
    let again = annotate_with(&done.text, name, &routes, base).unwrap();
    assert_eq!(again.text, done.text);
    let mut rest = done.text.chars();
    for character in text.chars() {
        assert!(rest.any(|found| found == character), "{character:?} was lost:\n{}", done.text);
    }
    done
}

#[track_caller]
fn wrong(text: &str) -> (usize, String) {
    let wrong = annotate_with(text, "openapi.yaml", &routes(), None).map(|done| done.text).unwrap_err();
    (wrong.line, wrong.why)
}

const YAML: &str = "\
openapi: 3.0.3 # the version
info:
  title: Payments
  version: 1.10   # not 1.1
paths:
  /payments:
    # Takes money.
    post:
      summary: |+
        Takes money.

        Keeps blank lines.

      # What comes back.
      responses:
        '201':
          description: Taken # gladly
        \"404\": { description: 'No such ''thing''' }
    get:
      responses: {'200': {description: All}}
# The end.
";

#[test]
fn yaml_keeps_everything_and_gets_what_it_lacks() {
    let done = annotate(YAML);
    assert_eq!((done.covered, done.operations), (1, 2));
    let expected = "\
openapi: 3.0.3 # the version
info:
  title: Payments
  version: 1.10   # not 1.1
paths:
  /payments:
    # Takes money.
    post:
      summary: |+
        Takes money.

        Keeps blank lines.

      parameters:
        - $ref: '#/components/parameters/IdempotencyKey'
      # What comes back.
      responses:
        '201':
          description: Taken # gladly
          headers:
            Idempotent-Replayed:
              $ref: '#/components/headers/IdempotentReplayed'
        \"404\": { description: 'No such ''thing''' }
        '400':
          $ref: '#/components/responses/Idempotency400'
        '409':
          $ref: '#/components/responses/Idempotency409'
        '413':
          $ref: '#/components/responses/Idempotency413'
        '422':
          $ref: '#/components/responses/Idempotency422'
        '502':
          $ref: '#/components/responses/Idempotency502'
        '503':
          $ref: '#/components/responses/Idempotency503'
        '504':
          $ref: '#/components/responses/Idempotency504'
    get:
      responses: {'200': {description: All}}
components:
  parameters:
    IdempotencyKey:
      name: Idempotency-Key
      in: header
      required: false
";
    assert!(done.text.starts_with(expected), "{}", done.text);
    assert!(done.text.ends_with("\n# The end.\n"), "{}", done.text);
    let pattern = r#"'^([!#-+\--:<-~]+|"([!#-\[\]-~]|\\["\\])+")$'"#;
    assert!(done.text.contains(&format!("        maxLength: 255\n        pattern: {pattern}\n")), "{}", done.text);
}

/// The gateway accepts every key that the pattern matches; other keys are refused or quoted.
#[test]
fn the_pattern_of_a_key_admits_what_the_gateway_takes() {
    let done =
        annotate_as(r#"{"openapi":"3.0.0","paths":{"/payments":{"post":{"responses":{}}}}}"#, "openapi.json", None);
    let parsed: serde_json::Value = serde_json::from_str(&done.text).unwrap();
    let pattern = parsed["components"]["parameters"]["IdempotencyKey"]["schema"]["pattern"].as_str().unwrap();
    let pattern = regex_lite::Regex::new(pattern).unwrap();
    for key in ["k-1", "550e8400", "a:b", "a\\b", "\"a,b\"", "\"a;b\"", "\"a\\\"b\"", "~", "!"] {
        assert!(pattern.is_match(key), "{key}");
        assert!(ibid::key::extract_key(key.as_bytes()).is_ok(), "{key}");
    }
    for key in ["a,b", "a;b", "a;p=1", "a\"b", "\"a", "a b", "", "\"\"", "\"a\\b\"", "\u{e9}", "a, b", "\"a\", \"b\""] {
        assert!(!pattern.is_match(key), "{key}");
        assert!(ibid::key::extract_key(key.as_bytes()).is_err(), "{key}");
    }
}

#[test]
fn a_response_that_is_there_is_described_too_or_somebody_is_told() {
    let text = "openapi: 3.0.3
paths:
  /payments:
    post:
      responses:
        '201': {description: Taken}
        '409': {description: Sold out}
        '422':
          description: Not valid
          content:
            application/json: {schema: {type: object}}
        '400': {$ref: '#/components/responses/Bad'}
        '503':
          description: Closed
          content:
            application/problem+json: {schema: {type: object}}
components:
  responses:
    Bad: {description: Bad, content: {application/json: {}}}
";
    let done = annotate_as(text, "openapi.yaml", None);
    let again = annotate_as(&done.text, "openapi.yaml", None);
    assert_eq!(again.text, done.text, "a second run adds nothing");
    let ours = "application/problem+json:\n              schema:\n                $ref: '#/components/schemas/IdempotencyProblem'\n";
    assert!(
        done.text.contains(&format!("application/json: {{schema: {{type: object}}}}\n            {ours}")),
        "{}",
        done.text
    );
    let inline = "'409': {description: Sold out, \"content\": {\"application/problem+json\": {\"schema\": \
                  {\"$ref\": \"#/components/schemas/IdempotencyProblem\"}}}}";
    assert!(done.text.contains(inline), "{}", done.text);
    for outcome in [&done, &again] {
        assert_eq!(outcome.undescribed, 2, "{:?}", outcome.notes);
        let told: Vec<_> = outcome.notes.iter().map(|(_, note)| note.as_str()).collect();
        let has = |part: &str| told.iter().any(|note| note.contains(part));
        assert!(has("the response 400 is in another place ($ref)"), "{told:?}");
        assert!(has("the response 503 describes application/problem+json in its own way"), "{told:?}");
    }
}

#[test]
fn json_keeps_its_layout() {
    let text = "{\n\t\"openapi\": \"3.1.0\",\n\t\"x-big\": 12345678901234567890.10e0,\n\t\"paths\": {\n\t\t\"/payments\": {\n\t\t\t\"post\": {\n\t\t\t\t\"responses\": {\"200\": {\"description\": \"\\ud83d\\ude00\"}}\n\t\t\t}\n\t\t}\n\t}\n}\n";
    let done = annotate_as(text, "openapi.json", None);
    let start = "{\n\t\"openapi\": \"3.1.0\",\n\t\"x-big\": 12345678901234567890.10e0,\n\t\"paths\": {\n\t\t\"/payments\": {\n\t\t\t\"post\": {\n\
                 \t\t\t\t\"parameters\": [\n\t\t\t\t\t{\n\t\t\t\t\t\t\"$ref\": \"#/components/parameters/IdempotencyKey\"\n\t\t\t\t\t}\n\t\t\t\t],\n\
                 \t\t\t\t\"responses\": {\"200\": {\"description\": \"\\ud83d\\ude00\", \"headers\": {\"Idempotent-Replayed\": {";
    assert!(done.text.starts_with(start), "{}", done.text);
    assert!(done.text.ends_with("\n\t\t}\n\t}\n}\n"), "{}", done.text);
    let parsed: serde_json::Value = serde_json::from_str(&done.text).unwrap();
    let response = &parsed["components"]["responses"]["Idempotency409"];
    assert_eq!(response["headers"]["Retry-After"]["schema"]["type"], "integer");
    let schema = &response["content"]["application/problem+json"]["schema"];
    assert_eq!(schema["$ref"], "#/components/schemas/IdempotencyProblem");
    // A document on one line stays on one line.
    let line = r#"{"openapi":"3.0.0","paths":{"/payments":{"post":{"parameters":[],"responses":{}}}}}"#;
    let done = annotate_as(line, "openapi.json", None);
    assert_eq!(done.text.lines().count(), 1);
    serde_json::from_str::<serde_json::Value>(&done.text).unwrap();
}

#[test]
fn empty_collections_of_json_get_lines_where_the_rest_has_them() {
    let text = "{\n  \"openapi\": \"3.0.0\",\n  \"paths\": {\n    \"/payments\": {\n      \"post\": {\n        \"parameters\": [],\n        \"responses\": {}\n      }\n    }\n  }\n}";
    let done = annotate_as(text, "openapi.json", None).text;
    let part = "        \"parameters\": [\n          {\n            \"$ref\": \"#/components/parameters/IdempotencyKey\"\n          }\n        ],\n        \"responses\": {\n          \"400\": {\n";
    assert!(done.contains(part), "{done}");
    serde_json::from_str::<serde_json::Value>(&done).unwrap();
}

#[test]
fn windows_lines_and_a_byte_order_mark_stay() {
    let text = format!("\u{feff}{}", YAML.replace('\n', "\r\n"));
    let done = annotate(&text);
    assert!(done.text.starts_with("\u{feff}openapi"));
    assert_eq!(done.text.matches('\n').count(), done.text.matches("\r\n").count());
    assert!(done.text.contains("\r\n      parameters:\r\n        - $ref:"));
}

/// Existing content is kept, in every place and form.
#[test]
fn a_key_that_is_there_is_kept() {
    let with = |path: &str, operation: &str| {
        format!(
            "openapi: 3.1.0\npaths:\n  /payments:\n{path}    post:\n{operation}      responses:\n        '200': {{description: ok}}\n\
             components:\n  parameters:\n    Key: {{name: idempotency-key, in: header}}\n    Other: {{name: Other, in: header}}\n    \
             Asked: {{name: Idempotency-Key, in: query}}\n"
        )
    };
    let here = "      parameters:\n      - {name: IDEMPOTENCY-KEY, in: header, required: true}\n";
    let pointed = "      parameters:\n        - $ref: '#/components/parameters/Key'\n";
    let shared = "    parameters:\n    - $ref: \"#/components/parameters/Key\"\n";
    let elsewhere = "      parameters:\n      - $ref: common.yaml#/IdempotencyKey\n";
    for (path, operation) in [("", here), ("", pointed), (shared, ""), ("", elsewhere)] {
        let done = annotate(&with(path, operation));
        assert!(!done.text.contains("#/components/parameters/IdempotencyKey"), "{}", done.text);
        assert!(done.text.contains("Idempotency409"));
    }
    let other = "      parameters:\n      - $ref: '#/components/parameters/Other'\n      - $ref: '#/components/parameters/Asked'\n";
    let done = annotate(&with("", other));
    let list = format!("{other}      - $ref: '#/components/parameters/IdempotencyKey'\n");
    assert!(done.text.contains(&list), "{}", done.text);
    let done = annotate(&with("", elsewhere));
    assert_eq!(
        done.notes,
        [(6, "common.yaml#/IdempotencyKey is not in this document; it is taken for Idempotency-Key".into())]
    );
}

#[test]
fn a_response_and_a_header_that_are_there_are_kept() {
    let text = "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses:\n        201:\n          headers:\n            \
                idempotent-replayed: {schema: {type: boolean}}\n          description: ok\n        409: {description: Mine}\n        default: {description: Any}\n";
    let done = annotate(text);
    assert!(!done.text.contains("Idempotency409"), "{}", done.text);
    assert!(!done.text.contains("IdempotentReplayed"), "{}", done.text);
    assert!(done.text.contains("        '422':\n"), "{}", done.text);
}

#[test]
fn a_component_with_the_name_gets_a_neighbour() {
    let text = "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses: {'200': {description: ok}}\n  /payments/{id}/refund:\n    \
                post:\n      responses: {'200': {description: ok}}\ncomponents:\n  schemas:\n    IdempotencyProblem: {type: string}\n";
    let done = annotate(text).text;
    assert!(done.contains("    IdempotencyProblem: {type: string}\n    IdempotencyProblem_2:\n"), "{done}");
    assert!(done.contains("$ref: '#/components/schemas/IdempotencyProblem_2'"), "{done}");
    // Stripe's 400 also means that another request uses the key.
    assert!(done.contains("    Idempotency400:\n") && done.contains("    Idempotency400_2:\n"), "{done}");
    assert!(done.contains(r##"responses: {'200': {description: ok, "headers": {"Idempotent-Replayed": {"$ref": "#/components/headers/IdempotentReplayed"}}}, "400": {"##), "{done}");
}

#[test]
fn routes_are_found_through_templates_and_servers() {
    let paths = "paths:\n  /payments/{id}/refund:\n    post: &op\n      responses: {}\n  /payments/{id}:\n    post:\n      responses: {}\n  \
                 /things/{id}:\n    put:\n      responses: {'200': {description: ok}}\n";
    let covered = |servers: &str| annotate(&format!("openapi: 3.0.0\n{servers}{paths}")).covered;
    assert_eq!(covered(""), 1);
    assert_eq!(covered("servers: [{url: 'https://api.example.com/v1'}]\n"), 1);
    assert_eq!(covered("servers: [{url: 'https://api.example.com'}, {url: /v1/}]\n"), 2);
    assert_eq!(covered("servers:\n- url: https://x/{base}\n  variables: {base: {default: v1}}\n"), 1);
    let done = annotate_as(&format!("openapi: 3.0.0\n{paths}"), "a.yaml", Some("/v1"));
    assert_eq!(done.covered, 1);
    assert!(done.text.contains("X-Idempotency-Cached"), "{}", done.text);
    assert!(done.notes.iter().any(|(line, note)| *line == 11 && note.contains("metadata")), "{:?}", done.notes);
    // Servers of the path and of the operation.
    let nearer = "openapi: 3.0.0\nservers: [{url: /v1}]\npaths:\n  /payments:\n    servers: [{url: /}]\n    post: {responses: {}}\n  \
                  /leads:\n    post: {servers: [{url: /}], responses: {}}\n";
    assert_eq!(annotate(nearer).covered, 2);
}

#[test]
fn what_is_only_observed_is_left_alone() {
    let text = "openapi: 3.0.0\npaths:\n  /watched:\n    post: {responses: {}}\n";
    let done = annotate(text);
    assert_eq!((done.text.as_str(), done.covered), (text, 0));
    assert_eq!(done.notes, [(4, "POST /watched is only observed (mode shadow)".to_owned())]);
}

#[test]
fn shared_responses_are_described_where_all_their_users_are_covered() {
    let text = |get: &str| {
        format!(
            "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses:\n        '201': {{$ref: '#/components/responses/Ok'}}\n{get}\
             components:\n  responses:\n    Ok:\n      description: ok\n"
        )
    };
    let done = annotate(&text("")).text;
    assert!(done.contains("    Ok:\n      description: ok\n      headers:\n        Idempotent-Replayed:\n"), "{done}");
    let done = annotate(&text("    get:\n      responses:\n        '200': {$ref: '#/components/responses/Ok'}\n"));
    assert!(!done.text.contains("Idempotent-Replayed"), "{}", done.text);
    assert_eq!(done.notes.len(), 1, "{:?}", done.notes);
}

#[test]
fn odd_yaml_is_kept_or_refused_but_never_damaged() {
    // A missing last value, a folded text at the end, no final line break, trailing commas, anchors, tags.
    for text in [
        "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses:\n        '200':\n          description: >-\n            folded\n            text",
        "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses:\n        '200':\n          description:\n",
        "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses: {'200': {description: ok,},}\n",
        "openapi: 3.0.0\npaths:\n  /payments:\n    post:\n      responses: {\n        '200': {description: ok},  # fine, yes\n      }\n",
        "---\nopenapi: !!str 3.0.0\npaths:\n  /payments:\n    post: &pay\n      tags:\n      - a\n      -   b   # two\n      responses: &r\n        '200': &ok {description: é}\nx-same: *pay\n...\n",
        "openapi: 3.0.0\npaths: {/payments: {post: {responses: {'200': {description: ok}}}}}\n",
        "openapi: 3.0.0\npaths:\n    /payments:\n        post:\n            parameters:\n            -   name: a\n                in: query\n            responses:\n                '200':\n                    description: ok\n",
        "openapi: 3.0.0\npaths:\n  ? /payments\n  : post:\n      responses:\n        '200':\n          description: \"a\n            b\"\n\n\n# last\n",
    ] {
        let done = annotate(text);
        assert_eq!(done.covered, 1, "{text}");
        assert!(done.text.contains("Idempotency409"), "{}", done.text);
    }
    let aliased =
        "openapi: 3.0.0\nx-r: &r\n  '200': {description: ok}\npaths:\n  /payments:\n    post:\n      responses: *r\n";
    assert_eq!(
        wrong(aliased),
        (7, "\"responses\" is an alias, so that adding to it would change other places; write it out".into())
    );
    let merged = "openapi: 3.0.0\nx-o: &o\n  responses: {'200': {description: ok}}\npaths:\n  /payments:\n    post:\n      <<: *o\n      summary: s\n";
    let (line, why) = wrong(merged);
    assert!(line == 7 && why.starts_with("\"responses\" is merged in (<<)"), "{line}: {why}");
}

#[test]
fn what_is_no_openapi_is_told_where() {
    for (text, line, why) in [
        ("swagger: '2.0'\n", 1, "this is a Swagger 2.0 document; 3.0 and 3.1 are understood"),
        ("a: 1\nopenapi: 4.0.0\n", 2, "this is OpenAPI 4.0.0; 3.0 and 3.1 are understood"),
        ("\n\ninfo: {}\n", 3, "this is no OpenAPI document: it has no \"openapi\"; 3.0 and 3.1 are understood"),
        ("openapi: 3.0.0\npaths: []\n", 2, "\"paths\" is no mapping"),
        ("openapi: 3.0.0\n---\nopenapi: 3.0.0\n", 3, "a second document begins here; give one at a time"),
        ("", 1, "the document is empty"),
    ] {
        assert_eq!(wrong(text), (line, why.to_owned()));
    }
    let (line, why) = wrong("openapi: 3.0.0\npaths:\n  /a: [\n  b: c\n");
    assert!(line >= 3 && why.starts_with("no YAML: "), "{line}: {why}");
    let json = annotate_with("{\n  \"openapi\": 3,\n  oops\n}", "a.json", &routes(), None).unwrap_err();
    assert!(json.line == 3 && json.why.starts_with("no JSON: "), "{json:?}");
    let deep = format!("openapi: 3.0.0\nx: {}{}\n", "[".repeat(300), "]".repeat(300));
    assert!(wrong(&deep).1.contains("recursion limit"), "{:?}", wrong(&deep));
    let deep = format!("{{\"openapi\": \"3.0.0\", \"x\": {}{}}}", "[".repeat(124), "]".repeat(124));
    assert!(wrong(&deep).1.contains("nested more than 120 deep"), "{:?}", wrong(&deep));
}

#[test]
fn keys_are_described_as_the_policy_has_them() {
    let text = "openapi: 3.0.0\npaths:\n  /leads:\n    post:\n      responses: {}\n";
    let done = annotate(text).text;
    let part = "      name: X-Idempotency-Key\n      in: header\n      required: true\n";
    assert!(done.contains(part), "{done}");
    assert!(done.contains("        format: uuid\n        minLength: 1\n        maxLength: 36\n"), "{done}");
    assert!(!done.contains("'422'") && !done.contains("Idempotent-Replayed"), "{done}");
}

#[test]
fn headers_of_the_scope_are_parameters() {
    let mut orders = Policy::ietf();
    orders.key.required = true;
    orders.scope = ["credential", "header:X-Shop", "header:Stripe-Account?", "header:Authorization"]
        .map(|part| part.parse().unwrap())
        .into();
    let routes = [("POST", "/api/*", Policy::preset("appsportal").unwrap()), ("POST", "/orders", orders)];
    let text = "openapi: 3.0.0\npaths:\n  /api/invoices:\n    post:\n      responses: {}\n  /orders:\n    post:\n      parameters:\n        \
                - {name: x-shop, in: header, schema: {type: string}}\n      responses: {}\n  /api/other:\n    post:\n      parameters:\n        \
                - $ref: 'common.yaml#/XTenantId'\n      responses: {}\n";
    let done = annotate_with(text, "openapi.yaml", &routes, None).unwrap();
    let parameters = |path: &str| {
        let (_, rest) = done.text.split_once(&format!("  {path}:\n")).unwrap();
        rest.split_once("responses").unwrap().0.to_owned()
    };
    let invoices = parameters("/api/invoices");
    for name in ["XIdempotencyKey", "XTenantIdParameter"] {
        assert!(invoices.contains(&format!("#/components/parameters/{name}'")), "{invoices}");
    }
    // Neither existing parameters, nor those that OpenAPI describes by other means.
    let orders = parameters("/orders");
    assert!(orders.contains("StripeAccountParameter'") && !orders.contains("XShop"), "{orders}");
    assert!(!done.text.contains("Authorization"), "{}", done.text);
    assert!(!parameters("/api/other").contains("#/components/parameters/XTenantId"), "{}", done.text);
    let notes: Vec<_> = done.notes.iter().map(|(_, note)| note.as_str()).collect();
    let known = "common.yaml#/XTenantId is not in this document; it is taken for X-Tenant-Id";
    assert!(notes.contains(&known), "{notes:?}");
    // It is needed for a key, so it is required only if the key is.
    let component = |name: &str| {
        let (_, rest) = done.text.split_once(&format!("\n    {name}:\n")).unwrap();
        rest.lines().take_while(|line| line.starts_with("      ")).collect::<Vec<_>>().join("\n")
    };
    let tenant = component("XTenantIdParameter");
    assert!(tenant.contains("name: X-Tenant-Id") && tenant.contains("required: false"), "{tenant}");
    assert!(tenant.contains("Required with a key."), "{tenant}");
    let account = component("StripeAccountParameter");
    assert!(account.contains("required: false") && !account.contains("Required with a key."), "{account}");
}
