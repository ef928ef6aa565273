//! What the messages of a server change in this process: the waits for holders, and the local cache.

use ibid::store::{Address, Fence, HolderWaits};

use crate::local_cache::AnswerCache;

#[derive(Debug)]
pub(crate) struct ServerNotifications {
    pub(crate) waits: HolderWaits,
    answer_cache: Option<AnswerCache>,
}

impl ServerNotifications {
    pub(crate) fn new(answer_cache: Option<AnswerCache>) -> Self {
        Self { waits: HolderWaits::default(), answer_cache }
    }

    pub(crate) fn has_cache(&self) -> bool {
        self.answer_cache.is_some()
    }

    /// Handles a message about a holder that no longer runs.
    pub(crate) fn on_wake(&self, message: &str) {
        if let Some((at, fence)) = parse_wake_message(message) {
            self.waits.wake(&at, fence);
        }
    }

    /// Handles a message about a forgotten entry.
    pub(crate) fn on_forget(&self, message: &str) {
        if let Some(at) = Address::from_hex(message) {
            self.forget(&at);
        }
    }

    pub(crate) fn forget(&self, at: &Address) {
        if let Some(answers) = &self.answer_cache {
            answers.forget(at);
        }
    }

    /// Empties the cache, because messages about forgotten entries may have been missed.
    pub(crate) fn flush_cache(&self) {
        if let Some(answers) = &self.answer_cache {
            answers.flush();
        }
    }
}

fn parse_wake_message(message: &str) -> Option<(Address, Fence)> {
    let (at, fence) = message.split_once(':')?;
    Some((Address::from_hex(at)?, Fence(fence.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_whose_end_it_is() {
        let at = Address([7; 32]);
        assert_eq!(parse_wake_message(&format!("{at}:12")), Some((at, Fence(12))));
        assert_eq!(parse_wake_message("x:1"), None);
        assert_eq!(parse_wake_message(&at.to_string()), None);
    }
}
