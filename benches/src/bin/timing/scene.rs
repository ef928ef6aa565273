//! What B sends, and what is compared.

use std::net::SocketAddr;

use ibid_bench::timing::{Compared, shuffle};

use super::{
    app::{App, HELD, LATER, LOST, PAY},
    caller::{Ask, Caller, Connection, use_all},
};

const BODY: &str = r#"{"amount":1}"#;
const OTHER: &str = r#"{"amount":2}"#;
/// Keys that are in flight at a time; each is asked about several times.
const KEPT: usize = 128;

pub(super) struct Row {
    pub(super) what: &'static str,
    pub(super) compared: Compared,
    /// A control that must be seen.
    pub(super) must_differ: bool,
    /// Although it may drown in what this store takes.
    pub(super) may_be_lost: bool,
}

pub(super) struct Scene<'a> {
    to: SocketAddr,
    app: &'a App,
    each: usize,
    seed: &'a mut u64,
    b: Connection,
    keys: u64,
}

/// A request of B, and whether it is of the first kind.
type Probe<'a> = (Ask<'a>, bool);

impl<'a> Scene<'a> {
    pub(super) fn new(to: SocketAddr, app: &'a App, each: usize, seed: &'a mut u64) -> Result<Self, String> {
        let b = Connection::open(to, Caller::B)?;
        Ok(Self { to, app, each, seed, b, keys: 0 })
    }

    /// New keys. Which are which is decided by chance, so that nothing else can be.
    fn keys(&mut self, count: usize) -> Vec<String> {
        let first = self.keys;
        self.keys += count as u64;
        let mut keys: Vec<_> = (first..self.keys).map(|n| format!("key-{n:028x}")).collect();
        shuffle(&mut keys, self.seed);
        keys
    }

    /// Two sets of new keys, of which A has used the first.
    fn shared(&mut self, count: usize) -> Result<[Vec<String>; 2], String> {
        let mut used = self.keys(2 * count);
        let unused = used.split_off(count);
        use_all(self.to, Caller::A, PAY, &used, BODY, 201)?;
        Ok([used, unused])
    }

    /// B sends each once, in random order.
    fn compare(&mut self, what: &'static str, mut probes: Vec<Probe<'_>>, expected: u16) -> Result<Row, String> {
        shuffle(&mut probes, self.seed);
        // The last one may have been idle for so long that the gateway has hung up.
        self.b = Connection::open(self.to, Caller::B)?;
        let mut times = [Vec::new(), Vec::new()];
        for (ask, is_first) in probes {
            let (status, time) = self.b.ask(ask)?;
            if status != expected {
                return Err(format!("{what}: B got {status} instead of {expected}"));
            }
            times[usize::from(!is_first)].push(time);
        }
        let compared = Compared::of(&times[0], &times[1]).ok_or("nothing to compare")?;
        Ok(Row { what, compared, must_differ: false, may_be_lost: false })
    }

    /// Everything but quotas, row by row.
    pub(super) fn all(&mut self, tell: &mut dyn FnMut(&Row)) -> Result<(), String> {
        let each = self.each;
        // What is not warm yet would be taken for a difference.
        let warm = self.keys(each / 4);
        use_all(self.to, Caller::B, PAY, &warm, BODY, 201)?;
        let [used, unused] = self.shared(each)?;
        let of = |body| both(&used, &unused, PAY, body);
        tell(&self.compare("201, its first", of(BODY), 201)?);
        tell(&self.compare("201, a replay of its own", of(BODY), 201)?);
        tell(&self.compare("422 key-reused, of its own", of(OTHER), 422)?);
        tell(&self.unknown()?);
        tell(&self.in_progress()?);
        tell(&self.invalid()?);
        let (one, other) = (self.keys(each), self.keys(each));
        tell(&self.compare("control: nobody used either, its first", both(&one, &other, PAY, BODY), 201)?);
        let (now, later) = (self.keys(each), self.keys(each));
        let sent = probes(&later, LATER, BODY, true).chain(probes(&now, PAY, BODY, false)).collect();
        let slower = self.compare("control: 20 µs more against none, its first", sent, 201)?;
        tell(&Row { must_differ: true, may_be_lost: slower.compared.medians[1] > 1000.0, ..slower });
        let fresh = self.keys(each);
        let sent = probes(&used, PAY, BODY, true).chain(probes(&fresh, PAY, BODY, false)).collect();
        tell(&Row { must_differ: true, ..self.compare("control: its replays against its first", sent, 201)? });
        Ok(())
    }

    fn unknown(&mut self) -> Result<Row, String> {
        let [used, unused] = self.shared(self.each)?;
        // In random order: what was used last is found a little faster, whoever else has used it.
        let mut all: Vec<_> = used.iter().chain(&unused).cloned().collect();
        shuffle(&mut all, self.seed);
        use_all(self.to, Caller::B, LOST, &all, BODY, 502)?;
        self.compare("409 outcome-unknown, of its own", both(&used, &unused, LOST, BODY), 409)
    }

    fn in_progress(&mut self) -> Result<Row, String> {
        let [used, unused] = self.shared(KEPT / 2)?;
        self.app.hold();
        let mut held = Vec::new();
        let mut all: Vec<_> = used.iter().chain(&unused).collect();
        shuffle(&mut all, self.seed);
        for key in all {
            let mut connection = Connection::open(self.to, Caller::B)?;
            connection.send(Ask { path: HELD, key, body: BODY })?;
            held.push(connection);
        }
        if !self.app.holds(held.len()) {
            return Err("the requests that are to be held do not arrive".into());
        }
        let row = self.compare("409 in-progress, of its own", again(both(&used, &unused, HELD, BODY), self.each), 409);
        self.app.release();
        for mut connection in held {
            connection.answer()?;
        }
        row
    }

    fn invalid(&mut self) -> Result<Row, String> {
        let spaced = |keys: Vec<String>| keys.into_iter().map(|key| key.replace("key-", "key ")).collect::<Vec<_>>();
        let (used, unused) = (self.keys(self.each), self.keys(self.each));
        let (used, unused) = (spaced(used), spaced(unused));
        use_all(self.to, Caller::A, PAY, &used, BODY, 400)?;
        self.compare("400 key-invalid", both(&used, &unused, PAY, BODY), 400)
    }

    /// On a gateway with a quota of [`allowance`].
    pub(super) fn over_quota(&mut self, tell: &mut dyn FnMut(&Row)) -> Result<(), String> {
        let [used, unused] = self.shared(self.each)?;
        let spent = self.keys(allowance(self.each) + 1);
        let mut over = false;
        for key in &spent {
            over = self.b.ask(Ask { path: PAY, key, body: BODY })?.0 == 429;
            if over {
                break;
            }
        }
        if !over {
            return Err("B has more than its quota".into());
        }
        tell(&self.compare("429 quota-exceeded", both(&used, &unused, PAY, BODY), 429)?);
        Ok(())
    }
}

/// What A needs of its quota, and B uses up.
pub(super) fn allowance(each: usize) -> usize {
    each + each / 50
}

fn probes<'a>(keys: &'a [String], path: &'a str, body: &'a str, is_first: bool) -> impl Iterator<Item = Probe<'a>> {
    keys.iter().map(move |key| (Ask { path, key, body }, is_first))
}

fn both<'a>(first: &'a [String], second: &'a [String], path: &'a str, body: &'a str) -> Vec<Probe<'a>> {
    probes(first, path, body, true).chain(probes(second, path, body, false)).collect()
}

/// The same ones over and over, until there are so many of each kind.
fn again(few: Vec<Probe<'_>>, each: usize) -> Vec<Probe<'_>> {
    let times = (2 * each).div_ceil(few.len());
    few.iter().copied().cycle().take(times * few.len()).collect()
}
