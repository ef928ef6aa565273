//! What can go wrong: faults that are injected and healed.
//!
//! A [`Fault`] acts on targets, by name. The [script](crate::script) never has two faults at work on one target, so a
//! fault may rely on finding its targets whole.

use std::{fmt, future::Future, ops::Range, pin::Pin, sync::Arc, time::Duration};

use ibid_testkit::servers::link::Link;

use crate::fleet::Fleet;

/// What a fault does when it is injected or healed.
pub type Doing<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Something that goes wrong for a while.
pub trait Fault: Send + Sync {
    /// For the report: `redis: killed`.
    fn name(&self) -> String;

    /// What it acts on.
    fn targets(&self) -> Vec<String>;

    /// How long it may last.
    fn lasts(&self) -> Range<Duration>;

    /// Begins it.
    ///
    /// # Panics
    ///
    /// If that is not possible: then the run proves nothing, and ends.
    fn inject(&self) -> Doing<'_>;

    /// Ends it. Returns once the target works again, as far as the fault can tell.
    ///
    /// # Panics
    ///
    /// If the target does not come back.
    fn heal(&self) -> Doing<'_>;
}

impl fmt::Debug for dyn Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// A server that a store needs, as a process.
pub trait Process: Send + Sync {
    /// Such as `redis`.
    fn name(&self) -> String;
    /// SIGKILL, and waits for its end.
    fn kill(&self) -> Doing<'_>;
    /// Starts it again with what it had on disk, and waits until it answers.
    fn restart(&self) -> Doing<'_>;
    /// SIGSTOP.
    fn pause(&self) -> Doing<'_>;
    /// SIGCONT.
    fn resume(&self) -> Doing<'_>;
}

/// What happens to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// Killed; healed by a restart.
    Kill,
    /// Stopped; healed by going on.
    Pause,
}

impl Blow {
    fn word(self) -> &'static str {
        match self {
            Blow::Kill => "killed",
            Blow::Pause => "paused",
        }
    }

    /// Pauses outlast a lease of a second, some of them.
    fn lasts(self) -> Range<Duration> {
        match self {
            Blow::Kill => Duration::ZERO..Duration::from_millis(800),
            Blow::Pause => Duration::from_millis(200)..Duration::from_millis(2500),
        }
    }
}

/// A gateway is killed or paused.
pub struct OfGateway {
    fleet: Arc<Fleet>,
    nth: usize,
    blow: Blow,
}

impl OfGateway {
    /// Both blows for each gateway of the fleet.
    pub fn all(fleet: &Arc<Fleet>) -> Vec<Box<dyn Fault>> {
        let mut faults: Vec<Box<dyn Fault>> = Vec::new();
        for nth in 0..fleet.len() {
            for blow in [Blow::Kill, Blow::Pause] {
                faults.push(Box::new(OfGateway { fleet: Arc::clone(fleet), nth, blow }));
            }
        }
        faults
    }
}

impl Fault for OfGateway {
    fn name(&self) -> String {
        format!("gateway {}: {}", self.nth, self.blow.word())
    }

    fn targets(&self) -> Vec<String> {
        vec![format!("gateway {}", self.nth)]
    }

    fn lasts(&self) -> Range<Duration> {
        self.blow.lasts()
    }

    fn inject(&self) -> Doing<'_> {
        match self.blow {
            Blow::Kill => Box::pin(self.fleet.kill(self.nth)),
            Blow::Pause => Box::pin(self.fleet.pause(self.nth)),
        }
    }

    fn heal(&self) -> Doing<'_> {
        match self.blow {
            Blow::Kill => Box::pin(self.fleet.restart(self.nth)),
            Blow::Pause => Box::pin(self.fleet.resume(self.nth)),
        }
    }
}

/// A store's server is killed or paused.
pub struct OfProcess {
    process: Arc<dyn Process>,
    blow: Blow,
}

impl OfProcess {
    /// This blow to this process.
    pub fn by(process: &Arc<dyn Process>, blow: Blow) -> Box<dyn Fault> {
        Box::new(OfProcess { process: Arc::clone(process), blow })
    }
}

impl Fault for OfProcess {
    fn name(&self) -> String {
        format!("{}: {}", self.process.name(), self.blow.word())
    }

    fn targets(&self) -> Vec<String> {
        vec![self.process.name()]
    }

    fn lasts(&self) -> Range<Duration> {
        self.blow.lasts()
    }

    fn inject(&self) -> Doing<'_> {
        match self.blow {
            Blow::Kill => self.process.kill(),
            Blow::Pause => self.process.pause(),
        }
    }

    fn heal(&self) -> Doing<'_> {
        match self.blow {
            Blow::Kill => self.process.restart(),
            Blow::Pause => self.process.resume(),
        }
    }
}

/// What happens to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "as the methods of `Link` of the same names")]
pub enum Tear {
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
}

impl Tear {
    /// One of each kind, with values that a client of a store notices but survives.
    pub const ALL: [Tear; 10] = [
        Tear::Cut,
        Tear::CutAndRefuse,
        Tear::CutToServer,
        Tear::CutToClient,
        Tear::Reset,
        Tear::Refuse,
        Tear::Delay(Duration::from_millis(40)),
        Tear::Slice(7),
        Tear::DropAnswers(5),
        Tear::BreakAnswers(5),
    ];

    /// Whether nothing gets through, one way at least.
    pub fn separates(self) -> bool {
        matches!(self, Tear::Cut | Tear::CutAndRefuse | Tear::CutToServer | Tear::CutToClient)
    }

    fn apply(self, link: &Link) {
        match self {
            Tear::Cut => link.cut(),
            Tear::CutAndRefuse => link.cut_and_refuse(),
            Tear::CutToServer => link.cut_to_server(),
            Tear::CutToClient => link.cut_to_client(),
            Tear::Reset => link.reset(),
            Tear::Refuse => link.refuse(),
            Tear::Delay(by) => link.delay(by),
            Tear::Slice(bytes) => link.slice(bytes),
            Tear::DropAnswers(n) => link.drop_answers(n),
            Tear::BreakAnswers(n) => link.break_answers(n),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Tear::Cut => "cut",
            Tear::CutAndRefuse => "cut, refusing",
            Tear::CutToServer => "cut to the server",
            Tear::CutToClient => "cut to the client",
            Tear::Reset => "reset",
            Tear::Refuse => "refusing",
            Tear::Delay(_) => "slow",
            Tear::Slice(_) => "sliced",
            Tear::DropAnswers(_) => "answers dropped",
            Tear::BreakAnswers(_) => "answers broken",
        }
    }
}

/// A link is torn, or several in the same way at the same time.
pub struct OfLink {
    name: String,
    targets: Vec<String>,
    links: Vec<Arc<Link>>,
    tear: Tear,
}

impl OfLink {
    /// This tear of this link; `name` says between whom it is.
    pub fn one(name: &str, link: &Arc<Link>, tear: Tear) -> Box<dyn Fault> {
        OfLink::many(name, &[(name.to_owned(), Arc::clone(link))], tear)
    }

    /// This tear of the way between the clients and a gateway, which is the fleet's to heal while the gateway is down.
    pub fn to_gateway(fleet: &Fleet, nth: usize, tear: Tear) -> Box<dyn Fault> {
        let target = format!("gateway {nth}");
        OfLink::many(&format!("clients to gateway {nth}"), &[(target, Arc::clone(fleet.link(nth)))], tear)
    }

    /// This tear of all these links, each with its own name.
    pub fn many(name: &str, links: &[(String, Arc<Link>)], tear: Tear) -> Box<dyn Fault> {
        let (targets, links) = links.iter().cloned().unzip();
        Box::new(OfLink { name: name.to_owned(), targets, links, tear })
    }
}

impl Fault for OfLink {
    fn name(&self) -> String {
        format!("{}: {}", self.name, self.tear.word())
    }

    fn targets(&self) -> Vec<String> {
        self.targets.clone()
    }

    fn lasts(&self) -> Range<Duration> {
        match self.tear {
            Tear::Reset => Duration::ZERO..Duration::ZERO,
            _ => Duration::from_millis(100)..Duration::from_millis(1800),
        }
    }

    fn inject(&self) -> Doing<'_> {
        Box::pin(async { self.links.iter().for_each(|link| self.tear.apply(link)) })
    }

    fn heal(&self) -> Doing<'_> {
        Box::pin(async { self.links.iter().for_each(|link| link.heal()) })
    }
}

type Act = Box<dyn Fn() -> Doing<'static> + Send + Sync>;

/// Anything else: a failover, a reshard.
pub struct Other {
    target: String,
    word: String,
    lasts: Range<Duration>,
    inject: Act,
    heal: Act,
}

impl Other {
    /// A fault from two closures.
    pub fn from<I, H>(
        target: &str, word: &str, lasts: Range<Duration>, inject: impl Fn() -> I + Send + Sync + 'static,
        heal: impl Fn() -> H + Send + Sync + 'static,
    ) -> Box<dyn Fault>
    where
        I: Future<Output = ()> + Send + 'static,
        H: Future<Output = ()> + Send + 'static,
    {
        let (target, word) = (target.to_owned(), word.to_owned());
        let inject: Act = Box::new(move || Box::pin(inject()));
        let heal: Act = Box::new(move || Box::pin(heal()));
        Box::new(Other { target, word, lasts, inject, heal })
    }
}

impl Fault for Other {
    fn name(&self) -> String {
        format!("{}: {}", self.target, self.word)
    }

    fn targets(&self) -> Vec<String> {
        vec![self.target.clone()]
    }

    fn lasts(&self) -> Range<Duration> {
        self.lasts.clone()
    }

    fn inject(&self) -> Doing<'_> {
        (self.inject)()
    }

    fn heal(&self) -> Doing<'_> {
        (self.heal)()
    }
}
