//! Changes: a form with a reason, a look at what is about to be done, and then the deed.
//!
//! Nothing is changed before the second page was confirmed, and then only if the record is still the one that was seen.

use std::time::Duration;

use askama::Template;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::{
    form::{Form, lines},
    page::Shell,
    record::fields,
    row::{Field, known_state, name},
    words::{plain, plain_lines, sentence},
};
use crate::{
    admin::{
        Problem,
        body::{LONGEST_REASON, checked_keep, checked_reason},
    },
    records::{Answer, View, What, change::rough},
};

/// What can be done to a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Release,
    Forget,
    Resolve,
}

/// What a form holds.
#[derive(Debug, Clone, Default)]
pub(super) struct Given {
    /// `done` or `not-executed`; for [`Action::Resolve`] only.
    ended: String,
    status: String,
    headers: String,
    body: String,
    /// How long to keep the answer; empty: as long as the record would have lived.
    keep: String,
    reason: String,
}

#[derive(Template)]
#[template(path = "console/act.html")]
pub(super) struct Act {
    shell: Shell,
    name: String,
    state: &'static str,
    endpoint: String,
    address: String,
    seen: u64,
    action: &'static str,
    verb: &'static str,
    question: &'static str,
    meaning: &'static str,
    given: Given,
    longest_reason: usize,
    /// How long an answer is kept if nobody says.
    life: String,
    /// To ask the app with.
    known: Vec<Field>,
    wrong: Option<String>,
}

#[derive(Template)]
#[template(path = "console/confirm.html")]
pub(super) struct Confirm {
    shell: Shell,
    name: String,
    state: &'static str,
    endpoint: String,
    address: String,
    seen: u64,
    action: &'static str,
    verb: &'static str,
    consequence: &'static str,
    fields: Vec<Field>,
    body: Option<String>,
    hidden: Vec<(&'static str, String)>,
    button: &'static str,
    danger: bool,
}

impl Action {
    pub(super) fn of(name: &str) -> Option<Self> {
        [Self::Release, Self::Forget, Self::Resolve].into_iter().find(|action| action.path() == name)
    }

    /// As in addresses.
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Forget => "forget",
            Self::Resolve => "resolve",
        }
    }

    fn verb(self) -> &'static str {
        match self {
            Self::Release => "Release",
            Self::Forget => "Forget",
            Self::Resolve => "Resolve",
        }
    }

    fn question(self) -> (&'static str, &'static str) {
        match self {
            Self::Release => (
                "It never happened",
                "You say that the operation had no effect. The next request with this key runs it. If it did have an \
                 effect after all, it will have it twice.",
            ),
            Self::Forget => (
                "Remember nothing of it",
                "The record is removed, whatever its state. A retry of its request runs again, even while the first one \
                 still runs. What was remembered cannot be brought back.",
            ),
            Self::Resolve => (
                "Nobody saw how it ended. You know.",
                "What you say here is what every retry with this key will be told.",
            ),
        }
    }
}

impl Given {
    pub(super) fn of(form: &Form) -> Self {
        Self {
            ended: form.value("as").to_owned(),
            status: form.value("status").to_owned(),
            headers: lines(form.text("headers")).trim().to_owned(),
            body: lines(form.text("body")),
            keep: form.value("keep").to_owned(),
            reason: form.value("reason").to_owned(),
        }
    }

    /// Why.
    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    /// What is to be done.
    ///
    /// # Errors
    /// What is missing or wrong, for whoever filled the form in.
    pub(super) fn what(&self, action: Action) -> Result<What, String> {
        if self.reason.is_empty() {
            return Err("Give a reason: the audit trail keeps it, and the next person will want to know.".into());
        }
        checked_reason(&self.reason).map_err(told)?;
        match (action, self.ended.as_str()) {
            (Action::Release, _) | (Action::Resolve, "not-executed") => Ok(What::Release),
            (Action::Forget, _) => Ok(What::Forget),
            (Action::Resolve, "done") => self.answer().map(What::Resolve),
            (Action::Resolve, _) => Err("Say how it ended: it happened, or it never happened.".into()),
        }
    }

    fn answer(&self) -> Result<Answer, String> {
        let status = self.status.parse::<u16>().ok().and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.filter(|status| (200..600).contains(&status.as_u16()));
        let status = status.ok_or("Give the status of the answer: a number from 200 to 599, such as 201.")?;
        let mut headers = HeaderMap::new();
        for line in self.headers.lines().filter(|line| !line.trim().is_empty()) {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let (name, value) = Answer::header(name, value).map_err(|why| format!("Headers: {why}."))?;
            headers.append(name, value);
        }
        let keep = (!self.keep.is_empty()).then(|| checked_keep(&self.keep)).transpose().map_err(told)?;
        Ok(Answer { status, headers, body: Bytes::from(self.body.clone()), keep })
    }
}

/// The same words as the API's.
fn told(problem: Problem) -> String {
    sentence(&problem.detail)
}

/// As long as it would have lived in all.
fn life(view: &View) -> String {
    // To the nearest second: both were cut, and a day less a millisecond is not 23 hours.
    let millis = view.age_ms.saturating_add(view.expires_in_ms).saturating_add(500);
    rough(Duration::from_secs(millis / 1000))
}

impl Act {
    /// The form, as it is or with what is wrong with it.
    pub(super) fn new(
        shell: Shell, action: Action, view: &View, seen: u64, given: Given, wrong: Option<String>,
    ) -> Self {
        let (question, meaning) = action.question();
        Self {
            shell,
            name: name(&view.key, &view.address),
            state: known_state(&view.state),
            endpoint: plain(&view.endpoint).into_owned(),
            address: view.address.clone(),
            seen,
            action: action.path(),
            verb: action.verb(),
            question,
            meaning,
            given,
            longest_reason: LONGEST_REASON,
            life: life(view),
            known: fields(view),
            wrong,
        }
    }
}

impl Confirm {
    /// What is about to be done.
    pub(super) fn new(shell: Shell, action: Action, view: &View, seen: u64, given: &Given, what: &What) -> Self {
        let mut fields = vec![Field::new("Reason", plain_lines(&given.reason))];
        let (verb, consequence, button) = match what {
            What::Release => {
                ("Release", "The next request with this key will run the operation.", "It never happened: release")
            }
            What::Forget => {
                ("Forget", "The record will be removed. A retry of its request will run again.", "Forget it")
            }
            What::Resolve(answer) => {
                fields.push(Field::new("Status", answer.status.to_string()));
                for (name, value) in &answer.headers {
                    let line = format!("{name}: {}", plain(&String::from_utf8_lossy(value.as_bytes())));
                    fields.push(Field::code("Header", line));
                }
                let kept = if answer.keep.is_some() { plain(&given.keep).into_owned() } else { life(view) };
                fields.push(Field::new("Kept for", kept));
                (
                    "Resolve",
                    "Every retry with this key will get this answer, and nothing will run.",
                    "It happened: resolve",
                )
            }
        };
        let body = match what {
            What::Resolve(answer) if !answer.body.is_empty() => Some(plain_lines(&given.body)),
            _ => None,
        };
        let hidden = [
            ("as", &given.ended),
            ("status", &given.status),
            ("headers", &given.headers),
            ("body", &given.body),
            ("keep", &given.keep),
            ("reason", &given.reason),
        ];
        Self {
            shell,
            name: name(&view.key, &view.address),
            state: known_state(&view.state),
            endpoint: plain(&view.endpoint).into_owned(),
            address: view.address.clone(),
            seen,
            action: action.path(),
            verb,
            consequence,
            fields,
            body,
            hidden: hidden
                .into_iter()
                .filter(|(_, value)| !value.is_empty())
                .map(|(name, value)| (name, value.clone()))
                .collect(),
            button,
            danger: matches!(what, What::Forget),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what(action: Action, form: &str) -> Result<What, String> {
        Given::of(&Form::of(form.as_bytes())).what(action)
    }

    #[test]
    fn nothing_is_done_without_a_reason_and_an_end() {
        for action in [Action::Release, Action::Forget, Action::Resolve] {
            assert!(what(action, "as=not-executed&reason=++").is_err_and(|why| why.contains("reason")), "{action:?}");
        }
        assert!(what(Action::Resolve, "reason=r").is_err_and(|why| why.contains("how it ended")));
        assert!(what(Action::Resolve, "reason=r&as=done&status=99").is_err_and(|why| why.contains("200 to 599")));
        assert!(what(Action::Resolve, "reason=r&as=done&status=201&headers=Content-Length:+1").is_err());
        assert!(what(Action::Resolve, "reason=r&as=done&status=201&headers=no+header").is_err());
        assert!(what(Action::Forget, &format!("reason={}", "x".repeat(1001))).is_err_and(|why| why.contains("1000")));
        assert!(matches!(what(Action::Resolve, "reason=r&as=not-executed"), Ok(What::Release)));
        assert!(matches!(what(Action::Forget, "reason=r"), Ok(What::Forget)));
    }

    #[test]
    fn an_answer_is_kept_for_as_long_as_was_typed() {
        let kept = |keep: &str| match what(Action::Resolve, &format!("reason=r&as=done&status=201&keep={keep}")) {
            Ok(What::Resolve(answer)) => Ok(answer.keep),
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
        let Ok(What::Resolve(answer)) = what(Action::Resolve, form) else { panic!("an answer") };
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (201, &b"{\n}"[..]));
        assert_eq!(
            (&answer.headers["location"], &answer.headers["x-a"]),
            (&"/p/7".parse().unwrap(), &"b".parse().unwrap())
        );
    }
}
