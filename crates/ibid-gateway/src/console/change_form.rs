//! Changes: a form with a reason, a confirmation page, then the change.
//!
//! Nothing changes before the confirmation, and then only if the record still has the fence that the operator saw.

use askama::Template;

use super::{
    form::Form,
    page::{PageShell, filters},
    record::PageField,
};
use crate::{
    admin::input::{MAX_REASON_CHARS, parse_keep, validate_reason},
    format::{capitalize, escape_invisible, escape_invisible_lines, format_rough_ms, to_sentence},
    records::{ChangeAction, ChangeVerb, RecordView, ResolvedAnswer},
};

/// What the form of a change asks for. `as` is `done` or `not-executed`, for [`ChangeVerb::Resolve`] only; an empty `keep`
/// stands for the record's total lifetime.
const CHANGE_FIELDS: [&str; 6] = ["as", "status", "headers", "body", "keep", "reason"];

#[derive(Template)]
#[template(path = "console/act.html")]
pub(super) struct ChangeFormPage<'a> {
    shell: PageShell,
    view: &'a RecordView,
    seen: u64,
    verb: ChangeVerb,
    question: &'static str,
    meaning: &'static str,
    form: Form,
    longest_reason: usize,
    /// The ttl of an answer if the form leaves it empty.
    life: String,
    error: Option<String>,
}

#[derive(Template)]
#[template(path = "console/confirm.html")]
pub(super) struct ConfirmPage<'a> {
    shell: PageShell,
    view: &'a RecordView,
    seen: u64,
    verb: ChangeVerb,
    /// What the change is called; a resolution can turn out as a release.
    action: String,
    consequence: &'static str,
    fields: Vec<PageField>,
    body: Option<String>,
    form: Form,
    button: &'static str,
    danger: bool,
}

impl ChangeVerb {
    fn question(self) -> (&'static str, &'static str) {
        match self {
            Self::Release => (
                "Release: the operation did not happen",
                "The next request with this key runs the operation. If it did have an effect after all, it will have it \
                 twice.",
            ),
            Self::Forget => (
                "Forget the record",
                "The record is removed, whatever its state. A retry of its request runs again, even while the first one \
                 still runs. What was remembered cannot be brought back.",
            ),
            Self::Resolve => {
                ("Resolve: the outcome is unknown", "Every retry with this key will get the answer that you give here.")
            }
        }
    }
}

/// The form of a change.
impl Form {
    /// The error says what is missing or wrong, as a sentence for the form.
    pub(super) fn to_action(&self, verb: ChangeVerb) -> Result<ChangeAction, String> {
        let reason = self.value("reason");
        if reason.is_empty() {
            return Err("Give a reason: the audit trail keeps it, and the next person will want to know.".into());
        }
        validate_reason(reason).map_err(|why| to_sentence(&why))?;
        match (verb, self.value("as")) {
            (ChangeVerb::Release, _) | (ChangeVerb::Resolve, "not-executed") => Ok(ChangeAction::Release),
            (ChangeVerb::Forget, _) => Ok(ChangeAction::Forget),
            (ChangeVerb::Resolve, "done") => self.parse_answer().map(ChangeAction::Resolve),
            (ChangeVerb::Resolve, _) => Err("Choose what happened: it happened, or it did not happen.".into()),
        }
    }

    fn parse_answer(&self) -> Result<ResolvedAnswer, String> {
        let status = self.value("status").parse().ok().and_then(ResolvedAnswer::parse_status);
        let status = status.ok_or("Give the status of the answer: a number from 200 to 599, such as 201.")?;
        let lines = self.value("headers").lines().filter(|line| !line.trim().is_empty());
        let headers = lines.map(|line| line.split_once(':').unwrap_or((line, "")));
        let headers = ResolvedAnswer::parse_headers(headers).map_err(|why| format!("Headers: {why}."))?;
        let keep = self.non_empty("keep").map(|keep| parse_keep(&keep)).transpose();
        let keep = keep.map_err(|why| to_sentence(&why))?;
        Ok(ResolvedAnswer { status, headers, body: self.raw_value("body").to_owned().into(), keep })
    }

    fn change_fields(&self) -> [(&'static str, &str); 6] {
        CHANGE_FIELDS.map(|name| (name, if name == "body" { self.raw_value(name) } else { self.value(name) }))
    }
}

/// The record's total lifetime: its age and the time left.
fn lifetime(view: &RecordView) -> String {
    // Rounded to seconds: both values are truncated, and a day less a millisecond must not show as 23 hours.
    let millis = view.age_ms.saturating_add(view.expires_in_ms).saturating_add(500);
    format_rough_ms(millis / 1000 * 1000)
}

impl<'a> ChangeFormPage<'a> {
    pub(super) fn new(
        shell: PageShell, verb: ChangeVerb, view: &'a RecordView, seen: u64, form: Form, error: Option<String>,
    ) -> Self {
        let ((question, meaning), life) = (verb.question(), lifetime(view));
        Self { shell, view, seen, verb, question, meaning, form, longest_reason: MAX_REASON_CHARS, life, error }
    }
}

impl<'a> ConfirmPage<'a> {
    pub(super) fn new(
        shell: PageShell, verb: ChangeVerb, view: &'a RecordView, seen: u64, form: Form, what: ChangeAction,
    ) -> Self {
        let mut fields = vec![PageField::new("Reason", escape_invisible_lines(form.value("reason")))];
        let mut body = None;
        let (consequence, button) = match &what {
            ChangeAction::Release => ("The next request with this key will run the operation.", "Release"),
            ChangeAction::Forget => ("The record will be removed. A retry of its request will run again.", "Forget"),
            ChangeAction::Resolve(answer) => {
                fields.push(PageField::new("Status", answer.status.to_string()));
                for (name, value) in &answer.headers {
                    let line = format!("{name}: {}", escape_invisible(&String::from_utf8_lossy(value.as_bytes())));
                    fields.push(PageField::code("Header", line));
                }
                let kept = if answer.keep.is_some() {
                    escape_invisible(form.value("keep")).into_owned()
                } else {
                    lifetime(view)
                };
                fields.push(PageField::new("Kept for", kept));
                body = (!answer.body.is_empty()).then(|| escape_invisible_lines(form.raw_value("body")));
                ("Every retry with this key will get this answer, and nothing will run.", "Resolve")
            }
        };
        let (action, danger) = (capitalize(what.name()), matches!(what, ChangeAction::Forget));
        Self { shell, view, seen, verb, action, consequence, fields, body, form, button, danger }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn what(action: ChangeVerb, form: &str) -> Result<ChangeAction, String> {
        Form::parse(form.as_bytes()).to_action(action)
    }

    #[test]
    fn nothing_is_done_without_a_reason_and_an_end() {
        for action in [ChangeVerb::Release, ChangeVerb::Forget, ChangeVerb::Resolve] {
            assert!(what(action, "as=not-executed&reason=++").is_err_and(|why| why.contains("reason")), "{action:?}");
        }
        assert!(what(ChangeVerb::Resolve, "reason=r").is_err_and(|why| why.contains("what happened")));
        assert!(what(ChangeVerb::Resolve, "reason=r&as=done&status=99").is_err_and(|why| why.contains("200 to 599")));
        assert!(what(ChangeVerb::Resolve, "reason=r&as=done&status=201&headers=Content-Length:+1").is_err());
        assert!(what(ChangeVerb::Resolve, "reason=r&as=done&status=201&headers=no+header").is_err());
        assert!(
            what(ChangeVerb::Forget, &format!("reason={}", "x".repeat(1001))).is_err_and(|why| why.contains("1000"))
        );
        assert!(matches!(what(ChangeVerb::Resolve, "reason=r&as=not-executed"), Ok(ChangeAction::Release)));
        assert!(matches!(what(ChangeVerb::Forget, "reason=r"), Ok(ChangeAction::Forget)));
    }

    #[test]
    fn an_answer_is_kept_for_as_long_as_was_typed() {
        let kept = |keep: &str| match what(ChangeVerb::Resolve, &format!("reason=r&as=done&status=201&keep={keep}")) {
            Ok(ChangeAction::Resolve(answer)) => Ok(answer.keep),
            Ok(_) => panic!("an answer"),
            Err(why) => Err(why),
        };
        assert_eq!(kept(""), Ok(None));
        assert_eq!(kept("+7d+"), Ok(Some(Duration::from_secs(7 * 86_400))));
        for wrong in ["0s", "7", "soon", "-1h"] {
            assert!(kept(wrong).is_err_and(|why| why.starts_with("Keep: ") && why.contains("such as 24h")), "{wrong}");
        }
    }

    #[test]
    fn an_answer_is_as_it_was_typed() {
        let form = "reason=r&as=done&status=201&headers=Location:+/p/7%0D%0AX-A:+b&body=%7B%0D%0A%7D";
        let Ok(ChangeAction::Resolve(answer)) = what(ChangeVerb::Resolve, form) else { panic!("an answer") };
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (201, &b"{\n}"[..]));
        assert_eq!(
            (&answer.headers["location"], &answer.headers["x-a"]),
            (&"/p/7".parse().unwrap(), &"b".parse().unwrap())
        );
    }
}
