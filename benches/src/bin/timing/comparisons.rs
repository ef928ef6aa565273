//! What B sends, and what is compared.

use std::net::SocketAddr;

use ibid_bench::timing::{TimingDifference, shuffle};

use super::{
    app::{DELAYED_PATH, HELD_PATH, IMMEDIATE_PATH, LOST_PATH, TimingApp},
    caller::{TimingCaller, TimingConnection, TimingRequest, use_keys},
};

const REQUEST_BODY: &str = r#"{"amount":1}"#;
const OTHER_BODY: &str = r#"{"amount":2}"#;
/// Keys that are in flight at a time; each is asked about several times.
const KEYS_IN_FLIGHT: usize = 128;

pub(super) struct TimingRow {
    pub(super) name: &'static str,
    pub(super) comparison: TimingDifference,
    /// A control that must be seen.
    pub(super) must_differ: bool,
    /// Although it may drown in what this store takes.
    pub(super) may_be_undetected: bool,
}

pub(super) struct TimingComparison<'a> {
    to: SocketAddr,
    app: &'a TimingApp,
    samples_per_kind: usize,
    seed: &'a mut u64,
    caller_b: TimingConnection,
    keys: u64,
}

/// A request of B, and whether it is of the first kind.
type TimedProbe<'a> = (TimingRequest<'a>, bool);

impl<'a> TimingComparison<'a> {
    pub(super) fn new(to: SocketAddr, app: &'a TimingApp, each: usize, seed: &'a mut u64) -> Result<Self, String> {
        let b = TimingConnection::open(to, TimingCaller::B)?;
        Ok(Self { to, app, samples_per_kind: each, seed, caller_b: b, keys: 0 })
    }

    /// New keys. Which are which is decided by chance, so that nothing else can be.
    fn new_keys(&mut self, count: usize) -> Vec<String> {
        let first = self.keys;
        self.keys += count as u64;
        let mut keys: Vec<_> = (first..self.keys).map(|n| format!("key-{n:028x}")).collect();
        shuffle(&mut keys, self.seed);
        keys
    }

    /// Two sets of new keys, of which A has used the first.
    fn half_used_keys(&mut self, count: usize) -> Result<[Vec<String>; 2], String> {
        let mut used = self.new_keys(2 * count);
        let unused = used.split_off(count);
        use_keys(self.to, TimingCaller::A, IMMEDIATE_PATH, &used, REQUEST_BODY, 201)?;
        Ok([used, unused])
    }

    /// B sends each once, in random order.
    fn compare(
        &mut self, what: &'static str, mut probes: Vec<TimedProbe<'_>>, expected: u16,
    ) -> Result<TimingRow, String> {
        shuffle(&mut probes, self.seed);
        // The last one may have been idle for so long that the gateway has hung up.
        self.caller_b = TimingConnection::open(self.to, TimingCaller::B)?;
        let mut times = [Vec::new(), Vec::new()];
        for (ask, is_first) in probes {
            let (status, time) = self.caller_b.send_timed(ask)?;
            if status != expected {
                return Err(format!("{what}: B got {status} instead of {expected}"));
            }
            times[usize::from(!is_first)].push(time);
        }
        let compared = TimingDifference::of(&times[0], &times[1]).ok_or("nothing to compare")?;
        Ok(TimingRow { name: what, comparison: compared, must_differ: false, may_be_undetected: false })
    }

    /// Everything but quotas, row by row.
    pub(super) fn compare_all(&mut self, tell: &mut dyn FnMut(&TimingRow)) -> Result<(), String> {
        let each = self.samples_per_kind;
        // What is not warm yet would be taken for a difference.
        let warm = self.new_keys(each / 4);
        use_keys(self.to, TimingCaller::B, IMMEDIATE_PATH, &warm, REQUEST_BODY, 201)?;
        let [used, unused] = self.half_used_keys(each)?;
        let of = |body| probe_both(&used, &unused, IMMEDIATE_PATH, body);
        tell(&self.compare("201, its first", of(REQUEST_BODY), 201)?);
        tell(&self.compare("201, a replay of its own", of(REQUEST_BODY), 201)?);
        tell(&self.compare("422 key-reused, of its own", of(OTHER_BODY), 422)?);
        tell(&self.unknown()?);
        tell(&self.in_progress()?);
        tell(&self.invalid()?);
        let (one, other) = (self.new_keys(each), self.new_keys(each));
        tell(&self.compare(
            "control: nobody used either, its first",
            probe_both(&one, &other, IMMEDIATE_PATH, REQUEST_BODY),
            201,
        )?);
        let (now, later) = (self.new_keys(each), self.new_keys(each));
        let sent = probes(&later, DELAYED_PATH, REQUEST_BODY, true)
            .chain(probes(&now, IMMEDIATE_PATH, REQUEST_BODY, false))
            .collect();
        let slower = self.compare("control: 20 µs more against none, its first", sent, 201)?;
        tell(&TimingRow { must_differ: true, may_be_undetected: slower.comparison.medians[1] > 1000.0, ..slower });
        let fresh = self.new_keys(each);
        let sent = probes(&used, IMMEDIATE_PATH, REQUEST_BODY, true)
            .chain(probes(&fresh, IMMEDIATE_PATH, REQUEST_BODY, false))
            .collect();
        tell(&TimingRow { must_differ: true, ..self.compare("control: its replays against its first", sent, 201)? });
        Ok(())
    }

    fn unknown(&mut self) -> Result<TimingRow, String> {
        let [used, unused] = self.half_used_keys(self.samples_per_kind)?;
        // In random order: what was used last is found a little faster, whoever else has used it.
        let mut all: Vec<_> = used.iter().chain(&unused).cloned().collect();
        shuffle(&mut all, self.seed);
        use_keys(self.to, TimingCaller::B, LOST_PATH, &all, REQUEST_BODY, 502)?;
        self.compare("409 outcome-unknown, of its own", probe_both(&used, &unused, LOST_PATH, REQUEST_BODY), 409)
    }

    fn in_progress(&mut self) -> Result<TimingRow, String> {
        let [used, unused] = self.half_used_keys(KEYS_IN_FLIGHT / 2)?;
        self.app.close_gate();
        let mut held = Vec::new();
        let mut all: Vec<_> = used.iter().chain(&unused).collect();
        shuffle(&mut all, self.seed);
        for key in all {
            let mut connection = TimingConnection::open(self.to, TimingCaller::B)?;
            connection.send(TimingRequest { path: HELD_PATH, key, body: REQUEST_BODY })?;
            held.push(connection);
        }
        if !self.app.wait_for_held(held.len()) {
            return Err("the requests that are to be held do not arrive".into());
        }
        let row = self.compare(
            "409 in-progress, of its own",
            repeat_probes(probe_both(&used, &unused, HELD_PATH, REQUEST_BODY), self.samples_per_kind),
            409,
        );
        self.app.open_gate();
        for mut connection in held {
            connection.read_status()?;
        }
        row
    }

    fn invalid(&mut self) -> Result<TimingRow, String> {
        let spaced = |keys: Vec<String>| keys.into_iter().map(|key| key.replace("key-", "key ")).collect::<Vec<_>>();
        let (used, unused) = (self.new_keys(self.samples_per_kind), self.new_keys(self.samples_per_kind));
        let (used, unused) = (spaced(used), spaced(unused));
        use_keys(self.to, TimingCaller::A, IMMEDIATE_PATH, &used, REQUEST_BODY, 400)?;
        self.compare("400 key-invalid", probe_both(&used, &unused, IMMEDIATE_PATH, REQUEST_BODY), 400)
    }

    /// On a gateway with a quota of [`quota_needed`].
    pub(super) fn compare_over_quota(&mut self, tell: &mut dyn FnMut(&TimingRow)) -> Result<(), String> {
        let [used, unused] = self.half_used_keys(self.samples_per_kind)?;
        let spent = self.new_keys(quota_needed(self.samples_per_kind) + 1);
        let mut over = false;
        for key in &spent {
            over = self.caller_b.send_timed(TimingRequest { path: IMMEDIATE_PATH, key, body: REQUEST_BODY })?.0 == 429;
            if over {
                break;
            }
        }
        if !over {
            return Err("B has more than its quota".into());
        }
        tell(&self.compare("429 quota-exceeded", probe_both(&used, &unused, IMMEDIATE_PATH, REQUEST_BODY), 429)?);
        Ok(())
    }
}

/// What A needs of its quota, and B uses up.
pub(super) fn quota_needed(each: usize) -> usize {
    each + each / 50
}

fn probes<'a>(
    keys: &'a [String], path: &'a str, body: &'a str, is_first: bool,
) -> impl Iterator<Item = TimedProbe<'a>> {
    keys.iter().map(move |key| (TimingRequest { path, key, body }, is_first))
}

fn probe_both<'a>(first: &'a [String], second: &'a [String], path: &'a str, body: &'a str) -> Vec<TimedProbe<'a>> {
    probes(first, path, body, true).chain(probes(second, path, body, false)).collect()
}

/// The same ones over and over, until there are so many of each kind.
fn repeat_probes(few: Vec<TimedProbe<'_>>, each: usize) -> Vec<TimedProbe<'_>> {
    let times = (2 * each).div_ceil(few.len());
    few.iter().copied().cycle().take(times * few.len()).collect()
}
