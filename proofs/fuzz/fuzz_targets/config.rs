//! Configuration files: any text is taken or refused with errors that say something.
#![no_main]

use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
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
});
