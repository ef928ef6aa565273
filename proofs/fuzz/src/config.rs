//! Configuration files: any text is taken or refused with errors that say something.

use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};

/// See the module.
pub fn check(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    // Files of the machine are none of its business.
    if text.contains("file") {
        return;
    }
    let load = || GatewaySettings::from_text(text, None, &ServeArgs::default(), &Env::from_pairs(&[]));
    match load() {
        Ok(settings) => assert!(!settings.routes.iter().any(|route| route.name.is_empty())),
        Err(why) => {
            let said = why.to_string();
            assert!(!said.is_empty());
            assert_eq!(load().err().map(|why| why.to_string()), Some(said), "the same errors every time");
        }
    }
}
