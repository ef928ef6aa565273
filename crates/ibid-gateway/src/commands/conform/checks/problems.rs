//! Checks of the refusals that the other checks received.

use ibid::RefusalFormat;
use serde_json::Value;

use super::super::{connection::RawResponse, session::ConformSession};

pub(super) fn check_all(session: &mut ConformSession) {
    let refusals = std::mem::take(&mut session.refusals);
    let refusals_are = session.plan.profile.policy.refusals;
    let answers =
        || refusals.iter().filter_map(|(id, of_key, seen)| Some((id, *of_key, seen, seen.response.as_ref().ok()?)));
    match answers().next() {
        None => session.report_not_performed("problem.shape", "no refusal was seen"),
        Some((_, _, any, _)) => {
            match answers()
                .find_map(|(id, _, seen, answer)| Some((id, seen, find_problem_error(answer, refusals_are)?)))
            {
                None => session.report_exchange("problem.shape", true, refusals_are.media_type(), any),
                Some((id, seen, why)) => {
                    session.report_exchange("problem.shape", false, format!("{why} (seen in {id})"), seen)
                }
            }
        }
    }
    match answers().find(|(_, of_key, ..)| *of_key) {
        None => session.report_not_performed("problem.link", "no key was refused"),
        Some((_, _, any, _)) => {
            match answers().find(|(_, of_key, _, answer)| *of_key && !has_documentation_link(answer)) {
                None => session.report_exchange("problem.link", true, "a link", any),
                Some((id, _, seen, _)) => {
                    let expected = format!("a Link header, or a problem whose type is an address (seen in {id})");
                    session.report_exchange("problem.link", false, expected, seen);
                }
            }
        }
    }
}

/// Describes what is wrong with a problem response, as an expectation.
fn find_problem_error(answer: &RawResponse, refusals: RefusalFormat) -> Option<String> {
    let kind = answer.header("content-type").unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case(refusals.media_type()) {
        return Some(format!("content-type: {}", refusals.media_type()));
    }
    let Ok(Value::Object(problem)) = serde_json::from_slice(&answer.body) else {
        return Some("a JSON object".into());
    };
    if refusals == RefusalFormat::Stripe {
        let text = |name: &str| problem.get("error").is_some_and(|error| error[name].is_string());
        return ["type", "message"].into_iter().find(|name| !text(name)).map(|name| format!("a {name} in its error"));
    }
    if problem.get("status").is_some_and(|status| *status != answer.status) {
        return Some(format!("the status of the answer, {}, in the problem's status", answer.status));
    }
    let text = |name: &str| problem.get(name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    ["type", "title", "detail"].into_iter().find(|name| !text(name)).map(|name| format!("a {name} in the problem"))
}

/// Whether the refusal links to documentation.
fn has_documentation_link(answer: &RawResponse) -> bool {
    let linked = answer.values("link").any(|link| link.contains("describedby") || link.contains("help"));
    let problem: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let kind = problem["type"].as_str().unwrap_or_default();
    linked || kind.contains('/') && kind != "about:blank"
}
