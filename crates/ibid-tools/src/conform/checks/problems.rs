//! Checks of the refusals that the other checks received.

use bytes::Bytes;
use http::{Response, header};
use ibid::policy::RefusalFormat;
use serde_json::Value;

use super::super::{request::header_of, session::ConformSession};

pub(super) fn check_all(session: &mut ConformSession<'_>) {
    let refusals = std::mem::take(&mut session.refusals);
    let format = session.policy.refusals;
    let shape = |answer: &Response<Bytes>| find_problem_error(answer, format);
    let link = |answer: &Response<Bytes>| {
        (!has_documentation_link(answer)).then(|| "a Link header, or a problem whose type is an address".to_owned())
    };
    let answers = |only_of_keys: bool| {
        let wanted = refusals.iter().filter(move |(_, of_key, _)| *of_key || !only_of_keys);
        wanted.filter_map(|(id, _, seen)| Some((id, seen, seen.response.as_ref().ok()?)))
    };
    type FindError<'a> = &'a dyn Fn(&Response<Bytes>) -> Option<String>;
    let checks: [(_, _, _, _, FindError<'_>); 2] = [
        ("problem.shape", false, format.media_type(), "no refusal was seen", &shape),
        ("problem.link", true, "a link", "no key was refused", &link),
    ];
    for (check, only_of_keys, expected, without, find_error) in checks {
        let wrong = answers(only_of_keys).find_map(|(id, seen, answer)| Some((id, seen, find_error(answer)?)));
        match (answers(only_of_keys).next(), wrong) {
            (None, _) => session.skip(check, without),
            (Some((_, any, _)), None) => session.report(check, true, expected, any),
            (Some(_), Some((id, seen, why))) => session.report(check, false, format!("{why} (seen in {id})"), seen),
        }
    }
}

/// Describes what is wrong with a problem response, as an expectation.
fn find_problem_error(answer: &Response<Bytes>, refusals: RefusalFormat) -> Option<String> {
    let kind = header_of(answer, "content-type").unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case(refusals.media_type()) {
        return Some(format!("content-type: {}", refusals.media_type()));
    }
    let Ok(Value::Object(problem)) = serde_json::from_slice(answer.body()) else {
        return Some("a JSON object".into());
    };
    if refusals == RefusalFormat::Stripe {
        let text = |name: &str| problem.get("error").is_some_and(|error| error[name].is_string());
        return ["type", "message"].into_iter().find(|name| !text(name)).map(|name| format!("a {name} in its error"));
    }
    let status = answer.status().as_u16();
    if problem.get("status").is_some_and(|found| *found != status) {
        return Some(format!("the status of the answer, {status}, in the problem's status"));
    }
    let text = |name: &str| problem.get(name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    ["type", "title", "detail"].into_iter().find(|name| !text(name)).map(|name| format!("a {name} in the problem"))
}

fn has_documentation_link(answer: &Response<Bytes>) -> bool {
    let mut links = answer.headers().get_all(header::LINK).iter().filter_map(|link| link.to_str().ok());
    let problem: Value = serde_json::from_slice(answer.body()).unwrap_or_default();
    let kind = problem["type"].as_str().unwrap_or_default();
    links.any(|link| link.contains("describedby") || link.contains("help"))
        || kind.contains('/') && kind != "about:blank"
}
