//! The last requests of this gateway, live.

use std::time::Duration;

use askama::Template;
use ibid::{RefusalReason, RequestOutcome, grpc::GrpcStatusCode, observe::ShadowOutcome};

use super::{
    form::Form,
    page::{PageShell, Visit, filters},
};
use crate::{
    format::{format_date, format_time_with_millis},
    metrics::RecentRequest,
};

const MAX_ROWS_SHOWN: usize = 200;
/// A status of 100 stands for a request that has been passed on and is not answered yet.
const NOT_ANSWERED_YET: u16 = 100;

/// The value of a filter, and its title.
const OUTCOME_FILTERS: &[(&str, &str)] = &[
    ("ran", "ran"),
    ("replayed", "replayed"),
    ("refused", "refused"),
    ("errors", "errors and unknown"),
    ("passed", "passed through"),
];

#[derive(Template)]
#[template(path = "console/recent.html")]
pub(super) struct RecentPage {
    shell: PageShell,
    search: Form,
    link: String,
    rows: Vec<RecentRequest>,
    /// How many requests are kept, whether they match or not.
    kept: usize,
}

impl RecentPage {
    pub(super) fn new(visit: &Visit, search: Form) -> Self {
        let all = visit.state.recent.latest();
        let (kept, text) = (all.len(), search.value("text").to_lowercase());
        let matches = |request: &RecentRequest| {
            let shown = search.value("show");
            (shown.is_empty() || request.filter_name() == shown) && (text.is_empty() || request.contains(&text))
        };
        let rows = all.into_iter().filter(matches).take(MAX_ROWS_SHOWN).collect();
        let link = Form::build_url("/recent", &[("text", search.value("text")), ("show", search.value("show"))]);
        Self { shell: visit.shell(), search, link, rows, kept }
    }
}

impl Form {
    fn is_set(&self) -> bool {
        !self.value("text").is_empty() || !self.value("show").is_empty()
    }
}

impl RecentRequest {
    fn filter_name(&self) -> &'static str {
        use RefusalReason::{Overloaded, StoreUnavailable, UpstreamLost, UpstreamTimeout, UpstreamUnreachable};
        use RequestOutcome::{Degraded, Executed, Keyless, Pending, Refused, Released, Replayed, Shadow, Unknown};
        match self.outcome {
            Executed | Released | Pending => "ran",
            Replayed => "replayed",
            Unknown | Degraded => "errors",
            Refused(Overloaded | StoreUnavailable | UpstreamLost | UpstreamTimeout | UpstreamUnreachable) => "errors",
            Refused(_) => "refused",
            Keyless | Shadow(ShadowOutcome::Replay | ShadowOutcome::Refusal(_)) => "passed",
        }
    }

    fn contains(&self, text: &str) -> bool {
        let address = self.address.map(|address| address.to_string()).unwrap_or_default();
        let client = self.client.map(|client| client.to_string()).unwrap_or_default();
        let all = [&self.path, &self.method, &self.key, &client, &address];
        all.into_iter().any(|field| field.to_lowercase().contains(text))
    }

    fn css_class(&self) -> &'static str {
        match self.filter_name() {
            "ran" => "done",
            "replayed" => "processing",
            "refused" => "warn",
            "errors" => "bad",
            _ => "",
        }
    }

    fn duration(&self) -> Option<Duration> {
        (self.status != NOT_ANSWERED_YET).then_some(self.took)
    }

    fn time(&self) -> String {
        format_time_with_millis(&format_date(self.at_ms))
    }

    fn status_text(&self) -> String {
        match GrpcStatusCode::from_summary_status(self.status) {
            Some(code) => code.name().into(),
            None if self.status == NOT_ANSWERED_YET => String::new(),
            None => self.status.to_string(),
        }
    }
}
