//! What a call does besides its business.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Duration, sleep},
};
use tonic::{
    Code, Response, Status,
    metadata::{
        AsciiMetadataKey, AsciiMetadataValue, BinaryMetadataKey, BinaryMetadataValue, KeyAndValueRef, MetadataMap,
    },
};

use crate::{
    proto::{Entry, Played, Script, StatsReply},
    trailers::ExtraTrailers,
};

/// What ran, and what may go on.
#[derive(Debug, Default)]
pub(crate) struct ScriptRunner {
    runs: Mutex<RunCounts>,
    open_gates: watch::Sender<BTreeSet<String>>,
}

#[derive(Debug, Default)]
struct RunCounts {
    total: u64,
    by_key: BTreeMap<String, StatsReply>,
}

impl ScriptRunner {
    /// Plays a script to its end, and counts it under the call's key, if it has one.
    pub(crate) async fn run_script(&self, metadata: &MetadataMap, script: &Script) -> Result<Played, Status> {
        let key = metadata.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
        let run = self.begin(key);
        sleep(Duration::from_millis(script.sleep_ms.into())).await;
        if !script.gate.is_empty() {
            self.wait_gate(&script.gate).await;
        }
        self.runs.lock().by_key.entry(key.to_owned()).or_default().finished += 1;
        if script.code != 0 {
            return Err(failure(script)?);
        }
        let metadata = if script.echo_metadata { entries(metadata) } else { Vec::new() };
        Ok(Played { run, metadata, padding: vec![b'.'; script.padding as usize] })
    }

    fn begin(&self, key: &str) -> u64 {
        let mut runs = self.runs.lock();
        runs.total += 1;
        runs.by_key.entry(key.to_owned()).or_default().begun += 1;
        runs.total
    }

    pub(crate) async fn wait_gate(&self, gate: &str) {
        // It ends only with the stage, on which we stand.
        let _ = self.open_gates.subscribe().wait_for(|open| open.contains(gate)).await;
    }

    pub(crate) fn open_gate(&self, gate: &str) {
        self.open_gates.send_modify(|open| _ = open.insert(gate.to_owned()));
    }

    pub(crate) fn stats(&self, key: &str) -> StatsReply {
        self.runs.lock().by_key.get(key).copied().unwrap_or_default()
    }
}

/// The answer, with what the script puts around it.
pub(crate) fn answer<T: Default>(message: T, script: &Script) -> Result<Response<T>, Status> {
    let mut answer = Response::new(if script.empty { T::default() } else { message });
    *answer.metadata_mut() = to_metadata(&script.headers)?;
    if !script.trailers.is_empty() {
        answer.extensions_mut().insert(ExtraTrailers(to_metadata(&script.trailers)?.into_headers()));
    }
    Ok(answer)
}

fn failure(script: &Script) -> Result<Status, Status> {
    let metadata = to_metadata(script.headers.iter().chain(&script.trailers))?;
    let details = Bytes::copy_from_slice(&script.details);
    Ok(Status::with_details_and_metadata(Code::from_i32(script.code), &script.message, details, metadata))
}

fn to_metadata<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Result<MetadataMap, Status> {
    let mut map = MetadataMap::new();
    for Entry { name, value } in entries {
        let refused = || Status::invalid_argument(format!("{name:?} cannot be metadata with this value"));
        if name.ends_with("-bin") {
            let name = BinaryMetadataKey::from_bytes(name.as_bytes()).map_err(|_| refused())?;
            map.append_bin(name, BinaryMetadataValue::from_bytes(value));
        } else {
            let name = AsciiMetadataKey::from_bytes(name.as_bytes()).map_err(|_| refused())?;
            map.append(name, AsciiMetadataValue::try_from(value.as_slice()).map_err(|_| refused())?);
        }
    }
    Ok(map)
}

fn entries(metadata: &MetadataMap) -> Vec<Entry> {
    let entry = |name: &str, value: Vec<u8>| Entry { name: name.to_owned(), value };
    let all = metadata.iter().map(|pair| match pair {
        KeyAndValueRef::Ascii(name, value) => entry(name.as_str(), value.as_bytes().to_vec()),
        KeyAndValueRef::Binary(name, value) => {
            let value = value.to_bytes().map_or_else(|_| value.as_encoded_bytes().to_vec(), |bytes| bytes.to_vec());
            entry(name.as_str(), value)
        }
    });
    all.collect()
}
