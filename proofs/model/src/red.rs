//! The rules that hold the house up, and what breaks without each.
//!
//! A rule that can be left out without a counterexample is either not needed or not modelled; both are worth knowing.

use crate::{
    FaultBudget, ModelOnUnknown, ModelSetup, StoreSetup,
    gateway::UpstreamOutcome::{self, ConnectionLost, NotSent, Remembered, Unremembered},
    properties,
};

/// A rule that a red variant leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelRule {
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
    ConnectionLostIsParked,
    RecordThenAnswer,
    AmbiguousRefusalReleases,
    LoserComparesFingerprints,
    DriversDoNotRepeatRefusedClaims,
    // A tiered store.
    NoFrontOnlyIfAmbiguous,
    AuthorityWinsOverInProgress,
    FrontIsReleased,
    MarkerIsReadAfterTakeover,
    VerifyMarkerBeforeRun,
    AnyMarkerIsTrusted,
    NoFrontOnlyAfterTakeover,
    FrontOnlyIsTakenOverInFront,
    SameFingerprintTakesOverInFront,
    CopyKeepsItsFingerprint,
    LostReleaseReachesFront,
    ClaimLostStaysOutOfFront,
    FrontOnlyEndsWhenAuthorityMayKnow,
    LostInFrontReachesAuthority,
    FrontOnlyEndWaitsForHolder,
    TakeoverIsShownInFront,
    MarkerIsReadAfterShown,
    FrontOnlyIsRecordedInAuthority,
    LostCopyAllowsSecondRun,
}

/// How many there are.
pub const RULE_COUNT: usize = ModelRule::LostCopyAllowsSecondRun as usize + 1;

/// All rules, less at most one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ModelRules(pub Option<ModelRule>);

impl ModelRules {
    pub fn leaves_out(self, rule: ModelRule) -> bool {
        self.0 == Some(rule)
    }
}

/// A world in which one rule is left out, and the property that must break.
#[derive(Debug, Clone)]
pub struct Mutant {
    pub name: &'static str,
    pub broken_property: &'static str,
    pub setup: ModelSetup,
}

/// Every red variant.
pub fn all_mutants() -> Vec<Mutant> {
    let mut all = single_store_mutants();
    all.extend(tiered_mutants());
    all
}

fn mutant(name: &'static str, rule: ModelRule, breaks: &'static str, mut world: ModelSetup) -> Mutant {
    world.name = name;
    world.rules = ModelRules(Some(rule));
    Mutant { name, broken_property: breaks, setup: world }
}

fn setup_with(
    stores: StoreSetup, on_unknown: ModelOnUnknown, bodies: &[u8], replies: &[UpstreamOutcome], faults: FaultBudget,
) -> ModelSetup {
    ModelSetup {
        stores,
        on_unknown,
        fingerprints: bodies.to_vec(),
        replies: replies.to_vec(),
        faults,
        ..ModelSetup::default()
    }
}

fn single_store_mutants() -> Vec<Mutant> {
    use ModelOnUnknown::{Hold, Retry};
    let one = |on_unknown, bodies: &[u8], replies: &[UpstreamOutcome], faults| {
        setup_with(StoreSetup::One, on_unknown, bodies, replies, faults)
    };
    let none = FaultBudget::default();
    let lossy = FaultBudget { losses: 2, ..none };
    let same = &[0, 0];
    vec![
        mutant(
            "a lapsed lease is free",
            ModelRule::LapsedIsUnknown,
            properties::ONE_START,
            one(Hold, same, &[Remembered], none),
        ),
        mutant(
            "the TTL is the lease",
            ModelRule::LeaseIsNotTheTtl,
            properties::ONE_START,
            one(Hold, same, &[Remembered], none),
        ),
        mutant(
            "a repeated claim is a new claim",
            ModelRule::RepeatedClaimKeepsItsToken,
            properties::EXPLAINED_UNKNOWN,
            one(Hold, same, &[Remembered], lossy),
        ),
        mutant(
            "takeover before the fingerprint check",
            ModelRule::FingerprintBeforeTakeover,
            properties::SAME_FINGERPRINT_TAKES_OVER,
            one(Retry, &[0, 1], &[Remembered, ConnectionLost], none),
        ),
        mutant(
            "a takeover does not name its holder",
            ModelRule::TakeoverNamesItsHolder,
            properties::SAME_FINGERPRINT_TAKES_OVER,
            one(Retry, &[0, 1, 0], &[Remembered, Unremembered, NotSent], none),
        ),
        mutant(
            "no free entry after a release",
            ModelRule::ReleaseLeavesFreeEntry,
            properties::EXPLAINED_UNKNOWN,
            one(Hold, same, &[NotSent], FaultBudget { repeats: 1, ..none }),
        ),
        mutant(
            "a release under another holder does not spend its token",
            ModelRule::ReleaseUnderAnotherHolderSpends,
            properties::EXPLAINED_UNKNOWN,
            one(Hold, same, &[NotSent], lossy),
        ),
        mutant(
            "a released takeover is free",
            ModelRule::ReleasedTakeoverIsUnknown,
            properties::RELEASED_TAKEOVER_UNKNOWN,
            one(Retry, same, &[ConnectionLost, NotSent], none),
        ),
        mutant(
            "settles are not fenced",
            ModelRule::SettlesAreFenced,
            properties::EQUAL_ANSWERS,
            one(Retry, same, &[Remembered], none),
        ),
        mutant(
            "fences are counted by entries that can be lost",
            ModelRule::FencesComeFromTheClock,
            properties::FENCES_GROW,
            one(Hold, same, &[Remembered], FaultBudget { failovers: 1, ..none }),
        ),
        mutant(
            "a cut connection is released",
            ModelRule::ConnectionLostIsParked,
            properties::RIGHT_RELEASE,
            one(Hold, same, &[ConnectionLost], none),
        ),
        mutant(
            "answer before record",
            ModelRule::RecordThenAnswer,
            properties::EQUAL_ANSWERS,
            one(Retry, same, &[Remembered], FaultBudget { crashes: 1, ..none }),
        ),
        mutant(
            "a claim that is refused after a lost answer is not released",
            ModelRule::AmbiguousRefusalReleases,
            properties::EXPLAINED_UNKNOWN,
            one(Hold, same, &[NotSent], lossy),
        ),
        mutant(
            "a holder that lost its claim gets another body's answer",
            ModelRule::LoserComparesFingerprints,
            properties::SAME_FINGERPRINT_REPLAYS,
            one(Hold, &[0, 1], &[Remembered], FaultBudget { failovers: 1, ..none }),
        ),
        mutant(
            "a driver repeats a refused claim unseen",
            ModelRule::DriversDoNotRepeatRefusedClaims,
            properties::EXPLAINED_UNKNOWN,
            one(Hold, same, &[NotSent], FaultBudget { repeats: 1, ..none }),
        ),
    ]
}

fn tiered_mutants() -> Vec<Mutant> {
    use ModelOnUnknown::{Hold, Retry};
    use StoreSetup::{Loose, Strict};
    let none = FaultBudget::default();
    let split = FaultBudget { authority_unreachable: 1, ..none };
    let (same, three) = (&[0, 0], &[0, 0, 0]);
    vec![
        mutant(
            "solo although the last store may have answered",
            ModelRule::NoFrontOnlyIfAmbiguous,
            properties::ONE_START,
            setup_with(Loose, Hold, same, &[Remembered], FaultBudget { losses: 1, front_unreachable: 1, ..none }),
        ),
        mutant(
            "busy in the first store beats finished in the last",
            ModelRule::AuthorityWinsOverInProgress,
            properties::COMPLETED_STAYS,
            setup_with(Strict, Hold, same, &[Remembered], none),
        ),
        mutant(
            "a release that the last store calls lost is not told to the first",
            ModelRule::LostReleaseReachesFront,
            properties::EXPLAINED_UNKNOWN,
            setup_with(Strict, Hold, same, &[NotSent], FaultBudget { losses: 1, front_unreachable: 1, ..none }),
        ),
        mutant(
            "no release in the first store",
            ModelRule::FrontIsReleased,
            properties::EXPLAINED_UNKNOWN,
            setup_with(Strict, Hold, same, &[Remembered], split),
        ),
        mutant(
            "a holder unknown to the store is lost on a released entry",
            ModelRule::FreeIsAbsentForAHolder,
            properties::REPLIES_RECORDED,
            setup_with(Loose, Hold, same, &[Remembered, NotSent], split),
        ),
        mutant(
            "the mark is not read after the takeover",
            ModelRule::MarkerIsReadAfterTakeover,
            properties::ONE_START,
            setup_with(Loose, Hold, same, &[Remembered], split),
        ),
        mutant(
            "solo runs before the extend",
            ModelRule::VerifyMarkerBeforeRun,
            properties::ONE_START,
            setup_with(Loose, Hold, same, &[Remembered], split),
        ),
        mutant(
            "a mark is believed only for the fence that was taken over",
            ModelRule::AnyMarkerIsTrusted,
            properties::ONE_START,
            setup_with(Loose, Hold, three, &[Remembered], split),
        ),
        mutant(
            "solo after a takeover in the first store",
            ModelRule::NoFrontOnlyAfterTakeover,
            properties::ONE_START,
            setup_with(Loose, Hold, same, &[Remembered], split),
        ),
        mutant(
            "a solo claim is taken over in the last store alone",
            ModelRule::FrontOnlyIsTakenOverInFront,
            properties::ONE_START,
            setup_with(Loose, Retry, same, &[Remembered], split),
        ),
        mutant(
            "an answer that the last store calls lost is told to the first",
            ModelRule::ClaimLostStaysOutOfFront,
            properties::EQUAL_ANSWERS,
            setup_with(Strict, Retry, three, &[Remembered], FaultBudget { authority_unreachable: 1, ..none }),
        ),
        mutant(
            "a solo claim that the last store knows is still settled in the first alone",
            ModelRule::FrontOnlyEndsWhenAuthorityMayKnow,
            properties::EQUAL_ANSWERS,
            setup_with(
                Loose,
                Retry,
                three,
                &[Remembered],
                FaultBudget { authority_unreachable: 2, heartbeats: 1, ..none },
            ),
        ),
        mutant(
            "a solo claim that is lost in the first store is not told to the last",
            ModelRule::LostInFrontReachesAuthority,
            properties::REPLIES_RECORDED,
            setup_with(Loose, Hold, same, &[Remembered], FaultBudget { authority_unreachable: 2, ..none }),
        ),
        mutant(
            "a solo claim gives up when the last store shows another holder",
            ModelRule::FrontOnlyEndWaitsForHolder,
            properties::REPLIES_RECORDED,
            setup_with(Loose, Retry, three, &[Remembered, NotSent], split),
        ),
        mutant(
            "another body takes over in the first store",
            ModelRule::SameFingerprintTakesOverInFront,
            properties::SAME_FINGERPRINT_TAKES_OVER,
            setup_with(Loose, Hold, &[0, 1], &[Remembered], split),
        ),
        mutant(
            "another body's answer is copied to the first store",
            ModelRule::CopyKeepsItsFingerprint,
            properties::SAME_FINGERPRINT_REPLAYS,
            setup_with(Strict, Hold, &[0, 1, 1], &[Remembered], FaultBudget { front_unreachable: 1, ..none }),
        ),
        mutant(
            "a takeover runs without being shown in the first store",
            ModelRule::TakeoverIsShownInFront,
            properties::ONE_START,
            setup_with(Loose, Retry, three, &[Remembered, NotSent], split),
        ),
        mutant(
            "the mark is not read after a takeover is shown in the first store",
            ModelRule::MarkerIsReadAfterShown,
            properties::ONE_START,
            setup_with(Loose, Retry, &[0, 1, 0], &[Remembered, NotSent], split),
        ),
        mutant(
            "a solo claim that is taken over is not told to the last store",
            ModelRule::FrontOnlyIsRecordedInAuthority,
            properties::EXPLAINED_UNKNOWN,
            setup_with(Loose, Retry, same, &[Remembered, NotSent], FaultBudget { heartbeats: 1, losses: 1, ..split }),
        ),
        mutant(
            "only two windows: a copy that the first store lost is none",
            ModelRule::LostCopyAllowsSecondRun,
            properties::ONE_START,
            setup_with(Loose, Hold, same, &[Remembered], FaultBudget { failovers: 1, ..split }),
        ),
    ]
}
