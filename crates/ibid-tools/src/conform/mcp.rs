//! The profile `mcp`: calls a tool of an MCP server, loses answers on purpose, retries, and counts how often the tool
//! ran.
//!
//! No revision of MCP has keys, so a server without ibid or the like fails. The arguments of the tool are `--body`.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};

use self::client::{McpCall, McpClient};
use super::{
    checks::{format_run_count, require_reachable},
    connection::{RawExchange, RawRequest},
    session::ConformSession,
};
use crate::CommandError;

mod client;

const PRESET: &str = "ibid preset mcp (docs/presets/mcp.md)";
const SEP: &str = "MCP SEP-3182 (proposed)";
const NO_COUNTER: &str = "nothing counts the runs; name --count-tool, --count-resource or --count-url";
const DISCONNECT_AFTER: Duration = Duration::from_millis(300);

/// Id, title and source of each check.
#[rustfmt::skip]
pub(super) const CASES: &[(&str, &str, &str)] = &[
    ("mcp.first", "A call with a key runs the tool", PRESET),
    ("mcp.lost-answer", "A call whose answer was lost does not run again", SEP),
    ("mcp.result", "A retry gets the first result", SEP),
    ("mcp.id", "A retry gets the id of its own request", "JSON-RPC 2.0 §5"),
    ("mcp.hang-up", "Who hangs up and retries gets the result, and nothing runs twice", PRESET),
    ("mcp.concurrent", "Of many at the same moment, one runs", SEP),
    ("mcp.session", "A retry in another session does not run again", PRESET),
    ("mcp.arguments", "The key with other arguments is an error, and does not run", SEP),
    ("mcp.caller", "Another caller's key is another key", SEP),
    ("mcp.no-key", "A call without a key runs each time", PRESET),
    ("mcp.other-methods", "Other methods are answered each time, whatever their key", PRESET),
];

/// Runs every check. Stops early if the tool does not work.
pub(super) async fn run_all(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    let Some(tool) = session.args.tool.as_deref() else {
        return Err(CommandError::Usage("the profile mcp needs the name of a tool: --tool NAME".into()));
    };
    let mut client = McpClient { session, tool, session_id: None, last_id: 0, has_varying_results: false };
    client.session_id = client.open_session().await?;
    if client.check_first().await? {
        client.check_lost_answer().await?;
        client.check_hang_up().await?;
        client.check_concurrent().await?;
        client.check_arguments().await?;
        client.check_caller().await?;
        client.check_keyless().await?;
        client.check_other_methods().await;
    }
    Ok(())
}

impl McpClient<'_, '_> {
    fn report(&mut self, id: &str, fine: bool, expected: impl Into<String>, call: &McpCall) {
        self.session.report(id, fine, expected, &call.seen);
    }

    /// Whether the tool works, and whether anything tells its runs apart.
    async fn check_first(&mut self) -> Result<bool, CommandError> {
        let operation = self.session.new_operation();
        let before = self.count().await?;
        let first = self.call(&operation).await;
        require_reachable(&first.seen)?;
        let ran = self.ran_since(before).await?;
        let Some(result) = first.success() else {
            self.report("mcp.first", false, "a result", &first);
            self.session.skip_rest("the tool does not succeed: give it what it needs with --body and --header");
            return Ok(false);
        };
        if let Some(ran) = ran.filter(|ran| *ran != 1) {
            let why = format!("the counter does not count this tool: a first call moved it by {ran}");
            return Err(CommandError::Usage(why));
        }
        self.report("mcp.first", true, "a result", &first);
        let other = self.session.new_operation();
        let other = self.call(&other).await.success();
        self.has_varying_results = other.is_some_and(|other| other != result);
        if ran.is_none() && !self.has_varying_results {
            self.session.skip_rest("every call has the same result, so nothing shows that it ran; name --count-tool, --count-resource or --count-url");
            return Ok(false);
        }
        Ok(true)
    }

    /// The client does not see the answer to its call, and calls again: on another connection, with another id.
    async fn check_lost_answer(&mut self) -> Result<(), CommandError> {
        let operation = self.session.new_operation();
        let before = self.count().await?;
        let lost = self.call(&operation).await;
        let Some(result) = lost.success() else {
            self.report("mcp.lost-answer", false, "a result", &lost);
            return Ok(());
        };
        let retry = self.retry(&operation).await;
        let ran = self.ran_since(before).await?;
        let is_same = retry.success().is_some_and(|retried| retried == result);
        let once = ran.map_or(is_same, |ran| ran == 1);
        self.report("mcp.lost-answer", once, format!("one run{}", format_run_count(ran)), &retry);
        self.report("mcp.result", is_same, format!("the first result: {result}"), &retry);
        let expected = format!("a response with the id {}", retry.id);
        self.report("mcp.id", retry.has_own_id(), expected, &retry);
        self.check_session(&operation, &result).await
    }

    async fn check_session(&mut self, operation: &RawRequest, result: &Value) -> Result<(), CommandError> {
        const ID: &str = "mcp.session";
        if self.session_id.is_none() {
            self.session.skip(ID, "the server has no sessions");
            return Ok(());
        }
        let before = self.count().await?;
        let first = self.session_id.clone();
        self.session_id = self.open_session().await?;
        let retry = self.retry(operation).await;
        self.session_id = first;
        let ran = self.ran_since(before).await?;
        let is_same = retry.success().as_ref() == Some(result);
        let expected = format!("the first result, and no run{}", format_run_count(ran));
        self.report(ID, is_same && ran.unwrap_or(0) == 0, expected, &retry);
        Ok(())
    }

    async fn check_hang_up(&mut self) -> Result<(), CommandError> {
        const ID: &str = "mcp.hang-up";
        let Some(before) = self.count().await? else {
            self.session.skip(ID, NO_COUNTER);
            return Ok(());
        };
        let operation = self.session.new_variant(self.session.slow.clone());
        let (_, request) = self.call_message(&operation);
        let bytes = request.to_bytes(&self.session.server.authority);
        self.session.requests += 1;
        if self.session.server.send_and_disconnect(&bytes, DISCONNECT_AFTER).await.is_err() {
            self.session.skip(ID, "the request was not taken");
            return Ok(());
        }
        let mut retry = self.retry(&operation).await;
        let ran = self.ran_since(Some(before)).await?;
        retry.seen.request = format!("{}, hung up after {DISCONNECT_AFTER:?}; then the same again", retry.seen.request);
        let fine = retry.success().is_some() && ran == Some(1);
        self.report(ID, fine, format!("a result, from the one run{}", format_run_count(ran)), &retry);
        Ok(())
    }

    async fn check_concurrent(&mut self) -> Result<(), CommandError> {
        const ID: &str = "mcp.concurrent";
        let mut seen = String::new();
        for _ in 0..self.session.args.rounds {
            let operation = self.session.new_variant(self.session.slow.clone());
            let before = self.count().await?;
            let calls = self.call_concurrently(&operation).await;
            let settled = self.retry(&operation).await;
            let ran = self.ran_since(before).await?;
            let results: BTreeSet<String> =
                calls.iter().chain([&settled]).filter_map(McpCall::success).map(|result| result.to_string()).collect();
            let unexpected = calls.iter().find(|call| call.success().is_none() && !call.is_refused());
            let once = results.len() == 1 && ran.is_none_or(|ran| ran == 1);
            if !once || unexpected.is_some() {
                let expected = format!("one run{}, and its result or an error for the others", format_run_count(ran));
                let shown = unexpected.unwrap_or(&settled);
                let came = format!("{} different results, such as {}", results.len(), shown.seen.describe_response());
                self.session.report_text(ID, false, expected, settled.seen.request.clone(), came);
                return Ok(());
            }
            seen = settled.seen.request;
        }
        self.session.report_text(ID, true, "one run", seen, String::new());
        Ok(())
    }

    /// Sends the same call on many connections, each with its own id.
    async fn call_concurrently(&mut self, operation: &RawRequest) -> Vec<McpCall> {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..self.session.args.parallel {
            let (id, request) = self.call_message(operation);
            let (server, bytes) = (self.session.server.clone(), request.to_bytes(&self.session.server.authority));
            self.session.requests += 1;
            tasks.spawn(async move {
                McpCall::new(id, RawExchange { request: request.redacted(), response: server.exchange(&bytes).await })
            });
        }
        tasks.join_all().await
    }

    async fn check_arguments(&mut self) -> Result<(), CommandError> {
        const ID: &str = "mcp.arguments";
        let Some(other) = self.session.other_body.clone() else {
            self.session.skip(ID, "needs other arguments: --other-body");
            return Ok(());
        };
        let alone = self.session.new_operation();
        let alone = RawRequest { body: self.session.fill_nonce(&other), ..alone };
        if self.call(&alone).await.success().is_none() {
            self.session.skip(ID, "needs other arguments that the tool takes: --other-body");
            return Ok(());
        }
        let operation = self.session.new_operation();
        let first = self.call(&operation).await.success();
        let before = self.count().await?;
        let second = self.retry(&RawRequest { body: self.session.fill_nonce(&other), ..operation }).await;
        let ran = self.ran_since(before).await?;
        let fine = first.is_some() && second.is_refused() && ran.unwrap_or(0) == 0;
        self.report(ID, fine, format!("an error, and no run{}", format_run_count(ran)), &second);
        Ok(())
    }

    async fn check_caller(&mut self) -> Result<(), CommandError> {
        const ID: &str = "mcp.caller";
        if self.session.args.other_header.is_empty() {
            self.session.skip(ID, "needs the credential of a second caller: --other-header 'Authorization: …'");
            return Ok(());
        }
        let operation = self.session.new_operation();
        let first = self.call(&operation).await.success();
        let before = self.count().await?;
        let own = self.session_id.clone();
        let other = operation.with_headers(&self.session.args.other_header);
        self.session_id = if own.is_some() { self.open_session().await? } else { None };
        let second = self.retry(&other).await;
        self.session_id = own;
        let ran = self.ran_since(before).await?;
        let is_own = ran.map_or_else(|| second.success() != first, |ran| ran == 1);
        let fine = second.success().is_some() && is_own;
        self.report(ID, fine, format!("a run of its own{}", format_run_count(ran)), &second);
        Ok(())
    }

    async fn check_keyless(&mut self) -> Result<(), CommandError> {
        let operation = self.session.operation_without_key();
        let before = self.count().await?;
        let (first, second) = (self.call(&operation).await, self.call(&operation).await);
        let ran = self.ran_since(before).await?;
        let both = first.success().is_some() && second.success().is_some();
        let fine = both && ran.map_or_else(|| first.success() != second.success(), |ran| ran == 2);
        self.report("mcp.no-key", fine, format!("two runs{}", format_run_count(ran)), &second);
        Ok(())
    }

    async fn check_other_methods(&mut self) {
        let operation = self.session.new_operation();
        let (first, second) =
            (self.ask("tools/list", json!({}), &operation).await, self.ask("tools/list", json!({}), &operation).await);
        let lists = |call: &McpCall| call.has_own_id() && call.success().is_some_and(|list| list["tools"].is_array());
        self.report("mcp.other-methods", lists(&first) && lists(&second), "the list of tools, twice", &second);
    }
}
