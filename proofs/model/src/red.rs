//! The rules that hold the house up, and what breaks without each.
//!
//! A rule that can be left out without a counterexample is either not needed or not modelled; both are worth knowing.

use crate::{
    Faults, OnUnknown, Stores, World,
    gateway::Reply::{self, Cut, NotSent, Remembered, Unremembered},
    properties,
};

/// A rule that a red variant leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    // A store.
    LapsedIsUnknown,
    LeaseIsNotTheTtl,
    TakeoverNamesItsHolder,
    ReleaseLeavesFreeEntry,
    ReleaseUnderAnotherHolderSpends,
    ReleasedTakeoverIsUnknown,
    SettlesAreFenced,
    FreeIsAbsentForAHolder,
    FencesComeFromTheClock,
    // A gateway.
    RepeatedClaimKeepsItsToken,
    FingerprintBeforeTakeover,
    CutIsParked,
    RecordThenAnswer,
    RefusedInDoubtReleases,
    LoserComparesBodies,
    DriversDoNotRepeatRefusedClaims,
    // A tiered store.
    NoSoloInDoubt,
    LastWinsOverBusy,
    FirstIsReleased,
    LastIsReleasedBeforeFirst,
    MarkIsReadAfterTakeover,
    ProveBeforeRun,
    AnyMarkIsBelieved,
    NoSoloAfterTakeover,
    SoloIsTakenOverInFirst,
    SameBodyTakesOverInFirst,
    CopyKeepsItsBody,
    LostReleaseIsToldToFirst,
    LostIsNotToldToFirst,
    SoloEndsWhenLastMayKnow,
    LostInFirstIsToldToLast,
    TakeoverIsShownInFirst,
    SoloIsPutInLast,
    LostCopyIsAWindow,
}

/// How many there are.
pub const RULES: usize = Rule::LostCopyIsAWindow as usize + 1;

/// All rules, less at most one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rules(pub Option<Rule>);

impl Rules {
    pub fn breaks(self, rule: Rule) -> bool {
        self.0 == Some(rule)
    }
}

/// A world in which one rule is left out, and the property that must break.
#[derive(Debug, Clone)]
pub struct Red {
    pub name: &'static str,
    pub breaks: &'static str,
    pub world: World,
}

/// Every red variant.
pub fn variants() -> Vec<Red> {
    let mut all = in_one_store();
    all.extend(in_tiered_stores());
    all
}

fn red(name: &'static str, rule: Rule, breaks: &'static str, mut world: World) -> Red {
    world.name = name;
    world.rules = Rules(Some(rule));
    Red { name, breaks, world }
}

fn world(stores: Stores, on_unknown: OnUnknown, bodies: &[u8], replies: &[Reply], faults: Faults) -> World {
    World { stores, on_unknown, bodies: bodies.to_vec(), replies: replies.to_vec(), faults, ..World::default() }
}

fn in_one_store() -> Vec<Red> {
    use OnUnknown::{Hold, Retry};
    let one =
        |on_unknown, bodies: &[u8], replies: &[Reply], faults| world(Stores::One, on_unknown, bodies, replies, faults);
    let none = Faults::default();
    let lossy = Faults { losses: 2, ..none };
    let same = &[0, 0];
    vec![
        red(
            "a lapsed lease is free",
            Rule::LapsedIsUnknown,
            properties::ONE_START,
            one(Hold, same, &[Remembered], none),
        ),
        red(
            "the TTL is the lease",
            Rule::LeaseIsNotTheTtl,
            properties::ONE_START,
            one(Hold, same, &[Remembered], none),
        ),
        red(
            "a repeated claim is a new claim",
            Rule::RepeatedClaimKeepsItsToken,
            properties::REAL_UNKNOWN,
            one(Hold, same, &[Remembered], lossy),
        ),
        red(
            "takeover before the fingerprint check",
            Rule::FingerprintBeforeTakeover,
            properties::SAME_BODY,
            one(Retry, &[0, 1], &[Remembered, Cut], none),
        ),
        red(
            "a takeover does not name its holder",
            Rule::TakeoverNamesItsHolder,
            properties::SAME_BODY,
            one(Retry, &[0, 1, 0], &[Remembered, Unremembered, NotSent], none),
        ),
        red(
            "no free entry after a release",
            Rule::ReleaseLeavesFreeEntry,
            properties::REAL_UNKNOWN,
            one(Hold, same, &[NotSent], Faults { repeats: 1, ..none }),
        ),
        red(
            "a release under another holder does not spend its token",
            Rule::ReleaseUnderAnotherHolderSpends,
            properties::REAL_UNKNOWN,
            one(Hold, same, &[NotSent], lossy),
        ),
        red(
            "a released takeover is free",
            Rule::ReleasedTakeoverIsUnknown,
            properties::UNKNOWN_AGAIN,
            one(Retry, same, &[Cut, NotSent], none),
        ),
        red(
            "settles are not fenced",
            Rule::SettlesAreFenced,
            properties::EQUAL_ANSWERS,
            one(Retry, same, &[Remembered], none),
        ),
        red(
            "fences are counted by entries that can be lost",
            Rule::FencesComeFromTheClock,
            properties::FENCES_GROW,
            one(Hold, same, &[Remembered], Faults { failovers: 1, ..none }),
        ),
        red(
            "a cut connection is released",
            Rule::CutIsParked,
            properties::RIGHT_RELEASE,
            one(Hold, same, &[Cut], none),
        ),
        red(
            "answer before record",
            Rule::RecordThenAnswer,
            properties::EQUAL_ANSWERS,
            one(Retry, same, &[Remembered], Faults { crashes: 1, ..none }),
        ),
        red(
            "a claim that is refused after a lost answer is not released",
            Rule::RefusedInDoubtReleases,
            properties::REAL_UNKNOWN,
            one(Hold, same, &[NotSent], lossy),
        ),
        red(
            "a holder that lost its claim gets another body's answer",
            Rule::LoserComparesBodies,
            properties::SAME_BODY_REPLAYS,
            one(Hold, &[0, 1], &[Remembered], Faults { failovers: 1, ..none }),
        ),
        red(
            "a driver repeats a refused claim unseen",
            Rule::DriversDoNotRepeatRefusedClaims,
            properties::REAL_UNKNOWN,
            one(Hold, same, &[NotSent], Faults { repeats: 1, ..none }),
        ),
    ]
}

fn in_tiered_stores() -> Vec<Red> {
    use OnUnknown::{Hold, Retry};
    use Stores::{Loose, Strict};
    let none = Faults::default();
    let split = Faults { last_unreachable: 1, ..none };
    let (same, three) = (&[0, 0], &[0, 0, 0]);
    vec![
        red(
            "solo although the last store may have answered",
            Rule::NoSoloInDoubt,
            properties::ONE_START,
            world(Loose, Hold, same, &[Remembered], Faults { losses: 1, first_unreachable: 1, ..none }),
        ),
        red(
            "busy in the first store beats finished in the last",
            Rule::LastWinsOverBusy,
            properties::FINISHED_STAYS,
            world(Strict, Hold, same, &[Remembered], none),
        ),
        red(
            "a release that the last store calls lost is not told to the first",
            Rule::LostReleaseIsToldToFirst,
            properties::REAL_UNKNOWN,
            world(Strict, Hold, same, &[NotSent], Faults { losses: 1, first_unreachable: 1, ..none }),
        ),
        red(
            "no release in the first store",
            Rule::FirstIsReleased,
            properties::REAL_UNKNOWN,
            world(Strict, Hold, same, &[Remembered], split),
        ),
        red(
            "the first store is released before the last",
            Rule::LastIsReleasedBeforeFirst,
            properties::RECORDED,
            world(Loose, Hold, same, &[Remembered], Faults { losses: 1, ..split }),
        ),
        red(
            "a holder unknown to the store is lost on a released entry",
            Rule::FreeIsAbsentForAHolder,
            properties::RECORDED,
            world(Loose, Hold, same, &[Remembered, NotSent], split),
        ),
        red(
            "the mark is not read after the takeover",
            Rule::MarkIsReadAfterTakeover,
            properties::ONE_START,
            world(Loose, Hold, same, &[Remembered], split),
        ),
        red(
            "solo runs before the extend",
            Rule::ProveBeforeRun,
            properties::ONE_START,
            world(Loose, Hold, same, &[Remembered], split),
        ),
        red(
            "a mark is believed only for the fence that was taken over",
            Rule::AnyMarkIsBelieved,
            properties::ONE_START,
            world(Loose, Hold, three, &[Remembered], split),
        ),
        red(
            "solo after a takeover in the first store",
            Rule::NoSoloAfterTakeover,
            properties::ONE_START,
            world(Loose, Hold, same, &[Remembered], split),
        ),
        red(
            "a solo claim is taken over in the last store alone",
            Rule::SoloIsTakenOverInFirst,
            properties::ONE_START,
            world(Loose, Retry, same, &[Remembered], split),
        ),
        red(
            "an answer that the last store calls lost is told to the first",
            Rule::LostIsNotToldToFirst,
            properties::EQUAL_ANSWERS,
            world(Strict, Retry, three, &[Remembered], Faults { last_unreachable: 1, ..none }),
        ),
        red(
            "a solo claim that the last store knows is still settled in the first alone",
            Rule::SoloEndsWhenLastMayKnow,
            properties::EQUAL_ANSWERS,
            world(Loose, Retry, three, &[Remembered], Faults { last_unreachable: 2, beats: 1, ..none }),
        ),
        red(
            "a solo claim that is lost in the first store is not told to the last",
            Rule::LostInFirstIsToldToLast,
            properties::RECORDED,
            world(Loose, Hold, same, &[Remembered], Faults { last_unreachable: 2, ..none }),
        ),
        red(
            "another body takes over in the first store",
            Rule::SameBodyTakesOverInFirst,
            properties::SAME_BODY,
            world(Loose, Hold, &[0, 1], &[Remembered], split),
        ),
        red(
            "another body's answer is copied to the first store",
            Rule::CopyKeepsItsBody,
            properties::SAME_BODY_REPLAYS,
            world(Strict, Hold, &[0, 1, 1], &[Remembered], Faults { first_unreachable: 1, ..none }),
        ),
        red(
            "a takeover runs without being shown in the first store",
            Rule::TakeoverIsShownInFirst,
            properties::ONE_START,
            world(Loose, Retry, three, &[Remembered, NotSent], split),
        ),
        red(
            "a solo claim that is taken over is not told to the last store",
            Rule::SoloIsPutInLast,
            properties::REAL_UNKNOWN,
            world(Loose, Retry, same, &[Remembered, NotSent], Faults { beats: 1, losses: 1, ..split }),
        ),
        red(
            "only two windows: a copy that the first store lost is none",
            Rule::LostCopyIsAWindow,
            properties::ONE_START,
            world(Loose, Hold, same, &[Remembered], Faults { failovers: 1, ..split }),
        ),
    ]
}
