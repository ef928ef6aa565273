//! gRPC clients that nobody here wrote: Python's grpcio and Node's @grpc/grpc-js, against the shop in `examples/tonic`,
//! once with the layer in it, once bare behind the gateway, once bare behind Envoy with ibid beside it.
//!
//! The clients (`tests/grpc/client.py`, `tests/grpc/client.mjs`) play a scenario and say what they saw; what it should
//! have been is said here, once for both clients and both servers. `scripts/tools` installs what they need.

mod common;
mod expectations;

use std::{fs, path::Path};

use ibid_example_tonic::DESCRIPTORS;

use self::common::{GrpcClientKind, GrpcShop};
use crate::support::run_ibid;

/// Each scenario, by each client, against each server.
macro_rules! scenarios {
    (everywhere: [$($name:ident)*], without_envoy: [$($other:ident)*]) => {
        scenarios!(@server layer, GrpcShop::start_with_layer(), [$($name)* $($other)*]);
        scenarios!(@server gateway, GrpcShop::start_with_gateway(), [$($name)* $($other)*]);
        scenarios!(@server envoy, GrpcShop::start_with_envoy(), [$($name)*]);
    };
    (@server $server:ident, $scene:expr, [$($name:ident)*]) => {
        mod $server {
            use super::{GrpcClientKind, GrpcShop, expectations};
            scenarios!(@client python, GrpcClientKind::Python, $scene, [$($name)*]);
            scenarios!(@client node, GrpcClientKind::Node, $scene, [$($name)*]);
        }
    };
    (@client $module:ident, $client:expr, $scene:expr, [$($name:ident)*]) => {
        mod $module {
            use super::{GrpcClientKind, GrpcShop, expectations};
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    expectations::$name(&$scene.await, $client).await;
                }
            )*
        }
    };
}

scenarios! {
    everywhere: [
        a_first_call_runs_once_and_arrives_as_it_was_sent
        a_replay_has_the_message_metadata_trailers_and_details_of_the_first
        a_key_for_another_message_or_method_is_refused
        a_call_without_a_key_is_refused
        a_client_tries_again_by_itself_while_the_first_runs
        a_compressed_call_and_a_plain_one_are_the_same
        messages_beyond_ascii_come_back_as_they_were
        empty_messages_are_messages
        large_answers_are_kept_up_to_the_limit
        streams_with_a_key_pass_as_they_come
        of_fifty_calls_at_once_one_runs
        reflection_passes
        health_passes
    ],
    // Envoy gives up the call to the app when its client leaves: the outcome is unknown (`ext_proc::grpc`). It joins
    // binary values, which Python cannot read.
    without_envoy: [
        binary_metadata_of_one_name_stay_several
        a_deadline_in_mid_run_leaves_one_effect_and_its_answer
        a_cancelled_call_leaves_one_effect_and_its_answer
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_client_was_answered_another_is_too() {
    let others = [GrpcShop::start_with_gateway().await, GrpcShop::start_with_envoy().await];
    for scene in [GrpcShop::start_with_layer().await].into_iter().chain(others) {
        let python = scene.run_scenario(GrpcClientKind::Python, "first").await;
        let node = scene.run_scenario(GrpcClientKind::Node, "first").await;
        for part in ["code", "id", "body", "echo"] {
            assert_eq!(node["answer"][part], python["answer"][part], "{part}");
        }
        assert_eq!(scene.shop.runs("first"), (1, 1));
    }
}

/// The guide of the example shows what is tested here.
#[tokio::test]
async fn the_examples_guide_has_a_valid_configuration_and_the_clients_retry_policy() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = fs::read_to_string(here.join("../../examples/tonic/README.md")).unwrap();
    let block = |kind: &str| guide.split(&format!("```{kind}\n")).nth(1).unwrap().split("```").next().unwrap();
    assert_eq!(block("json"), fs::read_to_string(here.join("tests/grpc/retry.json")).unwrap());

    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("shop.bin"), DESCRIPTORS).unwrap();
    let file = folder.path().join("ibid.toml");
    fs::write(&file, block("toml")).unwrap();
    let output = run_ibid(&["check", file.to_str().unwrap()], &[]).await;
    let said = output.text() + &output.stderr;
    assert!(output.code == Some(0) && said.contains("grpc shop.Orders/*"), "{said}");
}
