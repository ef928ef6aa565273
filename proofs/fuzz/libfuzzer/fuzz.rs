//! Fuzzes the target that the variable `FUZZ_TARGET` names.
#![no_main]

use std::{env, sync::LazyLock};

use libfuzzer_sys::fuzz_target;

static CHECK: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = env::var("FUZZ_TARGET").unwrap_or_default();
    ibid_fuzz::find_target(&name).unwrap_or_else(|why| panic!("FUZZ_TARGET: {why}"))
});

fuzz_target!(|input: &[u8]| CHECK(input));
