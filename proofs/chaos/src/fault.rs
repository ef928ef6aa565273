//! What can go wrong: faults that are injected and healed.
//!
//! A [`ChaosFault`] acts on targets, by name. The [script](crate::fault_schedule) never has two faults at work on one target, so a
//! fault may rely on finding its targets whole.

use std::{fmt, future::Future, ops::Range, pin::Pin, sync::Arc, time::Duration};

use testbed::FaultProxy;

use crate::{fleet::GatewayFleet, sandbox::drop_packets};

/// What a fault does when it is injected or healed.
pub type FaultFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Something that goes wrong for a while.
pub trait ChaosFault: Send + Sync {
    /// For the report: `redis: killed`.
    fn name(&self) -> String;

    /// What it acts on.
    fn targets(&self) -> Vec<String>;

    /// How long it may last.
    fn durations(&self) -> Range<Duration>;

    /// Begins it.
    ///
    /// # Panics
    ///
    /// If that is not possible: then the run proves nothing, and ends.
    fn inject(&self) -> FaultFuture<'_>;

    /// Ends it. Returns once the target works again, as far as the fault can tell.
    ///
    /// # Panics
    ///
    /// If the target does not come back.
    fn heal(&self) -> FaultFuture<'_>;
}

impl fmt::Debug for dyn ChaosFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// A server that a store needs, as a process.
pub trait ServerProcess: Send + Sync {
    /// Such as `redis`.
    fn name(&self) -> String;
    /// SIGKILL, and waits for its end.
    fn kill(&self) -> FaultFuture<'_>;
    /// Starts it again with what it had on disk, and waits until it answers.
    fn restart(&self) -> FaultFuture<'_>;
    /// SIGSTOP.
    fn pause(&self) -> FaultFuture<'_>;
    /// SIGCONT.
    fn resume(&self) -> FaultFuture<'_>;
}

/// What happens to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessFault {
    /// Killed; healed by a restart.
    Kill,
    /// Stopped; healed by going on.
    Pause,
}

impl ProcessFault {
    fn description(self) -> &'static str {
        match self {
            ProcessFault::Kill => "killed",
            ProcessFault::Pause => "paused",
        }
    }

    /// Pauses outlast a lease of a second, some of them.
    fn durations(self) -> Range<Duration> {
        match self {
            ProcessFault::Kill => Duration::ZERO..Duration::from_millis(800),
            ProcessFault::Pause => Duration::from_millis(200)..Duration::from_millis(2500),
        }
    }
}

/// A gateway is killed or paused.
pub struct GatewayFault {
    fleet: Arc<GatewayFleet>,
    index: usize,
    kind: ProcessFault,
}

impl GatewayFault {
    /// Both blows for each gateway of the fleet.
    pub fn all(fleet: &Arc<GatewayFleet>) -> Vec<Box<dyn ChaosFault>> {
        let mut faults: Vec<Box<dyn ChaosFault>> = Vec::new();
        for nth in 0..fleet.len() {
            for blow in [ProcessFault::Kill, ProcessFault::Pause] {
                faults.push(Box::new(GatewayFault { fleet: Arc::clone(fleet), index: nth, kind: blow }));
            }
        }
        faults
    }
}

impl ChaosFault for GatewayFault {
    fn name(&self) -> String {
        format!("gateway {}: {}", self.index, self.kind.description())
    }

    fn targets(&self) -> Vec<String> {
        vec![format!("gateway {}", self.index)]
    }

    fn durations(&self) -> Range<Duration> {
        self.kind.durations()
    }

    fn inject(&self) -> FaultFuture<'_> {
        match self.kind {
            ProcessFault::Kill => Box::pin(self.fleet.kill(self.index)),
            ProcessFault::Pause => Box::pin(self.fleet.pause(self.index)),
        }
    }

    fn heal(&self) -> FaultFuture<'_> {
        match self.kind {
            ProcessFault::Kill => Box::pin(self.fleet.restart(self.index)),
            ProcessFault::Pause => Box::pin(self.fleet.resume(self.index)),
        }
    }
}

/// A gateway is replaced as in an upgrade: SIGTERM, then a new process.
pub struct GatewayReplacement {
    fleet: Arc<GatewayFleet>,
    index: usize,
}

impl GatewayReplacement {
    /// One for each gateway of the fleet.
    pub fn all(fleet: &Arc<GatewayFleet>) -> Vec<Box<dyn ChaosFault>> {
        let replacement = |index| GatewayReplacement { fleet: Arc::clone(fleet), index };
        (0..fleet.len()).map(|index| Box::new(replacement(index)) as Box<dyn ChaosFault>).collect()
    }
}

impl ChaosFault for GatewayReplacement {
    fn name(&self) -> String {
        format!("gateway {}: replaced", self.index)
    }

    fn targets(&self) -> Vec<String> {
        vec![format!("gateway {}", self.index)]
    }

    fn durations(&self) -> Range<Duration> {
        Duration::ZERO..Duration::from_millis(200)
    }

    fn inject(&self) -> FaultFuture<'_> {
        Box::pin(self.fleet.terminate(self.index))
    }

    fn heal(&self) -> FaultFuture<'_> {
        Box::pin(self.fleet.restart(self.index))
    }
}

/// A store's server is killed or paused.
pub struct ServerFault {
    process: Arc<dyn ServerProcess>,
    kind: ProcessFault,
}

impl ServerFault {
    /// This blow to this process.
    pub fn boxed(process: &Arc<dyn ServerProcess>, blow: ProcessFault) -> Box<dyn ChaosFault> {
        Box::new(ServerFault { process: Arc::clone(process), kind: blow })
    }
}

impl ChaosFault for ServerFault {
    fn name(&self) -> String {
        format!("{}: {}", self.process.name(), self.kind.description())
    }

    fn targets(&self) -> Vec<String> {
        vec![self.process.name()]
    }

    fn durations(&self) -> Range<Duration> {
        self.kind.durations()
    }

    fn inject(&self) -> FaultFuture<'_> {
        match self.kind {
            ProcessFault::Kill => self.process.kill(),
            ProcessFault::Pause => self.process.pause(),
        }
    }

    fn heal(&self) -> FaultFuture<'_> {
        match self.kind {
            ProcessFault::Kill => self.process.restart(),
            ProcessFault::Pause => self.process.resume(),
        }
    }
}

/// What happens to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "as the methods of `FaultProxy` of the same names; packets are dropped by the kernel")]
pub enum NetworkFault {
    Cut,
    CutAndRefuse,
    CutToServer,
    CutToClient,
    Reset,
    Refuse,
    Delay(Duration),
    Slice(usize),
    DropAnswers(usize),
    BreakAnswers(usize),
    DropPacketsToServer,
    DropPacketsToClient,
    LosePackets,
}

impl NetworkFault {
    /// One of each kind, with values that a client of a store notices but survives.
    pub const ALL: [NetworkFault; 10] = [
        NetworkFault::Cut,
        NetworkFault::CutAndRefuse,
        NetworkFault::CutToServer,
        NetworkFault::CutToClient,
        NetworkFault::Reset,
        NetworkFault::Refuse,
        NetworkFault::Delay(Duration::from_millis(40)),
        NetworkFault::Slice(7),
        NetworkFault::DropAnswers(5),
        NetworkFault::BreakAnswers(5),
    ];

    /// What happens to packets, in a [sandbox](crate::sandbox).
    pub const PACKETS: [NetworkFault; 3] =
        [NetworkFault::DropPacketsToServer, NetworkFault::DropPacketsToClient, NetworkFault::LosePackets];

    /// Whether nothing gets through, one way at least.
    pub fn isolates(self) -> bool {
        matches!(
            self,
            NetworkFault::Cut
                | NetworkFault::CutAndRefuse
                | NetworkFault::CutToServer
                | NetworkFault::CutToClient
                | NetworkFault::DropPacketsToServer
                | NetworkFault::DropPacketsToClient
        )
    }

    /// The set of ports whose packets the kernel drops.
    fn packet_set(self) -> Option<&'static str> {
        match self {
            NetworkFault::DropPacketsToServer => Some("to_server"),
            NetworkFault::DropPacketsToClient => Some("to_client"),
            NetworkFault::LosePackets => Some("lossy"),
            _ => None,
        }
    }

    fn heal(self, link: &FaultProxy) {
        match self.packet_set() {
            Some(set) => drop_packets(set, link.addr().port(), false),
            None => link.heal(),
        }
    }

    fn apply(self, link: &FaultProxy) {
        if let Some(set) = self.packet_set() {
            drop_packets(set, link.addr().port(), true);
        }
        match self {
            NetworkFault::Cut => link.cut(),
            NetworkFault::CutAndRefuse => link.cut_and_refuse(),
            NetworkFault::CutToServer => link.cut_to_server(),
            NetworkFault::CutToClient => link.cut_to_client(),
            NetworkFault::Reset => link.reset(),
            NetworkFault::Refuse => link.refuse(),
            NetworkFault::Delay(by) => link.delay(by),
            NetworkFault::Slice(bytes) => link.slice(bytes),
            NetworkFault::DropAnswers(n) => link.drop_answers(n),
            NetworkFault::BreakAnswers(n) => link.break_answers(n),
            NetworkFault::DropPacketsToServer | NetworkFault::DropPacketsToClient | NetworkFault::LosePackets => {}
        }
    }

    fn description(self) -> &'static str {
        match self {
            NetworkFault::Cut => "cut",
            NetworkFault::CutAndRefuse => "cut, refusing",
            NetworkFault::CutToServer => "cut to the server",
            NetworkFault::CutToClient => "cut to the client",
            NetworkFault::Reset => "reset",
            NetworkFault::Refuse => "refusing",
            NetworkFault::Delay(_) => "slow",
            NetworkFault::Slice(_) => "sliced",
            NetworkFault::DropAnswers(_) => "answers dropped",
            NetworkFault::BreakAnswers(_) => "answers broken",
            NetworkFault::DropPacketsToServer => "packets to the server dropped",
            NetworkFault::DropPacketsToClient => "packets to the client dropped",
            NetworkFault::LosePackets => "packets lost",
        }
    }
}

/// A link is torn, or several in the same way at the same time.
pub struct ProxyFault {
    name: String,
    targets: Vec<String>,
    proxies: Vec<Arc<FaultProxy>>,
    kind: NetworkFault,
}

impl ProxyFault {
    /// This tear of this link; `name` says between whom it is.
    pub fn one(name: &str, link: &Arc<FaultProxy>, tear: NetworkFault) -> Box<dyn ChaosFault> {
        ProxyFault::many(name, &[(name.to_owned(), Arc::clone(link))], tear)
    }

    /// This tear of the way between the clients and a gateway, which is the fleet's to heal while the gateway is down.
    pub fn to_gateway(fleet: &GatewayFleet, nth: usize, tear: NetworkFault) -> Box<dyn ChaosFault> {
        let target = format!("gateway {nth}");
        ProxyFault::many(&format!("clients to gateway {nth}"), &[(target, Arc::clone(fleet.proxy(nth)))], tear)
    }

    /// This tear of all these links, each with its own name.
    pub fn many(name: &str, links: &[(String, Arc<FaultProxy>)], tear: NetworkFault) -> Box<dyn ChaosFault> {
        let (targets, links) = links.iter().cloned().unzip();
        Box::new(ProxyFault { name: name.to_owned(), targets, proxies: links, kind: tear })
    }
}

impl ChaosFault for ProxyFault {
    fn name(&self) -> String {
        format!("{}: {}", self.name, self.kind.description())
    }

    fn targets(&self) -> Vec<String> {
        self.targets.clone()
    }

    fn durations(&self) -> Range<Duration> {
        match self.kind {
            NetworkFault::Reset => Duration::ZERO..Duration::ZERO,
            _ => Duration::from_millis(100)..Duration::from_millis(1800),
        }
    }

    fn inject(&self) -> FaultFuture<'_> {
        Box::pin(async { self.proxies.iter().for_each(|link| self.kind.apply(link)) })
    }

    fn heal(&self) -> FaultFuture<'_> {
        Box::pin(async { self.proxies.iter().for_each(|link| self.kind.heal(link)) })
    }
}

type FaultAction = Box<dyn Fn() -> FaultFuture<'static> + Send + Sync>;

/// Anything else: a failover, a reshard.
pub struct CustomFault {
    target: String,
    description: String,
    durations: Range<Duration>,
    inject: FaultAction,
    heal: FaultAction,
}

impl CustomFault {
    /// A fault from two closures.
    pub fn from<I, H>(
        target: &str, word: &str, lasts: Range<Duration>, inject: impl Fn() -> I + Send + Sync + 'static,
        heal: impl Fn() -> H + Send + Sync + 'static,
    ) -> Box<dyn ChaosFault>
    where
        I: Future<Output = ()> + Send + 'static,
        H: Future<Output = ()> + Send + 'static,
    {
        let (target, word) = (target.to_owned(), word.to_owned());
        let inject: FaultAction = Box::new(move || Box::pin(inject()));
        let heal: FaultAction = Box::new(move || Box::pin(heal()));
        Box::new(CustomFault { target, description: word, durations: lasts, inject, heal })
    }
}

impl ChaosFault for CustomFault {
    fn name(&self) -> String {
        format!("{}: {}", self.target, self.description)
    }

    fn targets(&self) -> Vec<String> {
        vec![self.target.clone()]
    }

    fn durations(&self) -> Range<Duration> {
        self.durations.clone()
    }

    fn inject(&self) -> FaultFuture<'_> {
        (self.inject)()
    }

    fn heal(&self) -> FaultFuture<'_> {
        (self.heal)()
    }
}
