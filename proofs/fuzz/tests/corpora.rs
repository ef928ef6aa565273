//! Every target on every input of its corpus.

use std::{collections::BTreeSet, fs, path::PathBuf};

use ibid_fuzz::{TARGETS, find_target};

const MAX_INPUT_BYTES: usize = 1024;

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "corpora"].iter().collect()
}

fn run_corpus(target: &str) {
    let check = find_target(target).expect("a target");
    let mut inputs = 0;
    for file in fs::read_dir(folder().join(target)).expect("the target's corpus") {
        let path = file.expect("a file").path();
        let input = fs::read(&path).expect("an input");
        assert!(input.len() <= MAX_INPUT_BYTES, "{} has {} bytes", path.display(), input.len());
        // Shown if the check panics.
        println!("{}: {:?}", path.display(), String::from_utf8_lossy(&input));
        check(&input);
        inputs += 1;
    }
    assert!(inputs >= 5, "only {inputs} inputs");
}

macro_rules! corpora {
    ($($target:ident)*) => {
        $(#[test]
        fn $target() {
            run_corpus(stringify!($target));
        })*

        #[test]
        fn every_target_has_a_corpus_and_a_test() {
            let tests = BTreeSet::from([$(stringify!($target).to_owned()),*]);
            assert_eq!(tests, TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect());
            let corpora = fs::read_dir(folder()).expect("the corpora");
            assert_eq!(tests, corpora.map(|one| one.expect("a folder").file_name().to_string_lossy().into()).collect());
        }
    };
}

corpora!(config exchange_api form json json_rpc key multipart record recovery resp routes upstream_reply);
