//! Recent history for the charts and `GET /api/stats`: sampled from the counters each second, kept in rings.
//!
//! It covers this process since its start and never asks the store. The console and the API share it, so that they
//! agree. Bound: 600 points of 1 s, 2,160 of 10 s and 1,440 of 60 s, about 300 bytes each.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use ibid::{RefusalReason, RequestOutcome, observe::ShadowOutcome};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use super::{Metrics, counters::HistogramSnapshot};
use crate::format::{as_millis, now_ms};

const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Point length and number of points of each ring: ten minutes, six hours, a day.
const RINGS: [(Duration, usize); 3] =
    [(SAMPLE_INTERVAL, 600), (Duration::from_secs(10), 2160), (Duration::from_secs(60), 1440)];
/// Window of the alerts of `deploy/prometheus`, and of the numbers at the top of the overview (10 min).
pub(crate) const ALERT_WINDOW: Duration = Duration::from_secs(600);
/// How long a rule must hold until it fires (10 min).
const ALERT_HOLD: Duration = Duration::from_secs(600);
/// With fewer requests in the window, no rule holds.
const ALERT_MIN_REQUESTS: u64 = 20;

/// Alert if hits exceed this share of the requests that were replayed or ran: a client retries too eagerly.
pub(crate) const HIT_RATE_ALERT: f64 = 0.10;
/// Alert if conflicts exceed this share of all requests: processing is slow.
pub(crate) const CONFLICT_RATE_ALERT: f64 = 0.05;

/// The share of hits, of those requests that found an answer or ran.
pub(crate) fn hit_share(counts: &TrafficCounts) -> (u64, u64) {
    (counts.hits, counts.hits + counts.misses)
}

/// The share of conflicts, of all requests.
pub(crate) fn conflict_share(counts: &TrafficCounts) -> (u64, u64) {
    (counts.requests.conflicts, counts.requests.total())
}

#[derive(Debug)]
pub struct MetricsHistory(Mutex<[HistoryRing; RINGS.len()]>);

#[derive(Debug)]
struct HistoryRing {
    last: TrafficCounts,
    /// When `last` was read.
    since: Instant,
    points: VecDeque<TrafficCounts>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ChartWindow {
    #[default]
    TenMinutes,
    OneHour,
    SixHours,
    OneDay,
}

impl MetricsHistory {
    /// Starts with the current counters as the baseline.
    pub(crate) fn new(metrics: &Metrics) -> Arc<Self> {
        let (last, since) = (metrics.snapshot(), Instant::now());
        Arc::new(Self(Mutex::new(RINGS.map(|_| HistoryRing { last, since, points: VecDeque::new() }))))
    }

    /// Samples the counters each second until the gateway stops.
    pub(crate) async fn run_sampler(self: Arc<Self>, metrics: Arc<Metrics>, mut stop: watch::Receiver<bool>) {
        let mut next = Instant::now() + SAMPLE_INTERVAL;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let now = Instant::now();
            self.record_sample(&metrics.snapshot(), now, now_ms());
            // Missed samples are not made up for: the next point is longer.
            next = (next + SAMPLE_INTERVAL).max(now);
        }
    }

    fn record_sample(&self, reading: &TrafficCounts, now: Instant, at_ms: u64) {
        let mut rings = self.0.lock();
        rings.iter_mut().zip(RINGS).for_each(|(ring, size)| ring.record_sample(reading, now, at_ms, size));
    }

    /// Whether a share has been above its limit for `ALERT_HOLD`, each time over the `ALERT_WINDOW` before and with enough
    /// requests: the rule of the shipped alerts.
    pub(crate) fn has_fired(&self, share: fn(&TrafficCounts) -> (u64, u64), limit: f64) -> bool {
        let (interval, _) = RINGS[1];
        let [window, hold] = [ALERT_WINDOW, ALERT_HOLD].map(|over| (over.as_secs() / interval.as_secs()) as usize);
        let points: Vec<TrafficCounts> = self.0.lock()[1].points.iter().copied().collect();
        if points.len() < hold + 1 {
            return false;
        }
        (points.len() - hold..points.len()).all(|last| {
            let mut sum = TrafficCounts::default();
            points[(last + 1).saturating_sub(window)..=last].iter().for_each(|point| sum.add(point));
            let (part, all) = share(&sum);
            sum.requests.total() >= ALERT_MIN_REQUESTS && part as f64 > limit * all as f64
        })
    }

    /// Totals of the last ten minutes, or since the start if that is shorter.
    pub(crate) fn recent_totals(&self) -> TrafficCounts {
        let rings = self.0.lock();
        let mut lately = TrafficCounts::default();
        for point in rings[0].points.iter().rev() {
            if lately.over >= ALERT_WINDOW {
                break;
            }
            lately.add(point);
        }
        lately
    }

    /// The columns of the charts, oldest first.
    pub(crate) fn chart_series(&self, window: ChartWindow) -> Value {
        let (all, first) = self.points(window);
        let points = &all[first..];
        let column = |of: &dyn Fn(&TrafficCounts) -> Value| points.iter().map(of).collect::<Value>();
        let rate = |of: fn(&RequestCounts) -> u64| {
            column(&|point| rounded_json(of(&point.requests) as f64 / point.over.as_secs_f64().max(0.001)))
        };
        let slow = |part: f64| {
            column(&|point| {
                point.overhead.quantile(part).map_or(Value::Null, |took| rounded_json(took.as_secs_f64() * 1e3))
            })
        };
        json!({
            "at": column(&|point| (point.at_ms / 1000).into()),
            "ran": rate(RequestCounts::ran),
            "replayed": rate(|requests| requests.replayed),
            "refused": rate(RequestCounts::total_refused),
            "open": rate(RequestCounts::open),
            "passed": rate(RequestCounts::passed_through),
            "hit_percent": trailing_percent(&all, first, hit_share),
            "conflict_percent": trailing_percent(&all, first, conflict_share),
            "fallbacks": column(&|point| point.fallbacks.into()),
            "unknown": column(&|point| point.requests.open().into()),
            "overhead_p50_ms": slow(0.5),
            "overhead_p99_ms": slow(0.99),
        })
    }

    /// The last hour as counts, oldest first.
    pub(crate) fn last_hour(&self) -> Value {
        let (all, first) = self.points(ChartWindow::OneHour);
        let points: Vec<Value> = all[first..].iter().map(period_json).collect();
        let (_, ring, _) = ChartWindow::OneHour.row();
        json!({ "every_ms": as_millis(RINGS[ring].0), "points": points })
    }

    /// The history of a window in up to `at_most` rows, latest first.
    pub(crate) fn rows(&self, window: ChartWindow, at_most: usize) -> Vec<TrafficCounts> {
        let (all, first) = self.points(window);
        let points = &all[first..];
        let each = points.len().div_ceil(at_most.max(1)).max(1);
        let rows = points.rchunks(each).map(|points| {
            let mut row = TrafficCounts::default();
            points.iter().for_each(|point| row.add(point));
            row
        });
        rows.collect()
    }

    /// All points of the window's ring, and the index of the first that the window covers.
    fn points(&self, window: ChartWindow) -> (Vec<TrafficCounts>, usize) {
        let (_, ring, count) = window.row();
        let all: Vec<TrafficCounts> = self.0.lock()[ring].points.iter().copied().collect();
        let first = all.len().saturating_sub(count);
        (all, first)
    }
}

/// For each point from `first` on, the share in the alert window up to it, in percent.
fn trailing_percent(points: &[TrafficCounts], first: usize, of: fn(&TrafficCounts) -> (u64, u64)) -> Value {
    let (mut from, mut over, mut some, mut all) = (0, Duration::ZERO, 0, 0);
    let percents = points.iter().map(|point| {
        let (part, whole) = of(point);
        (over, some, all) = (over + point.over, some + part, all + whole);
        while over.saturating_sub(points[from].over) >= ALERT_WINDOW {
            let (part, whole) = of(&points[from]);
            (over, some, all) = (over - points[from].over, some - part, all - whole);
            from += 1;
        }
        if all == 0 { Value::Null } else { rounded_json(some as f64 * 100.0 / all as f64) }
    });
    let percents: Vec<Value> = percents.collect();
    percents[first..].into()
}

impl HistoryRing {
    fn record_sample(
        &mut self, reading: &TrafficCounts, now: Instant, at_ms: u64, (interval, capacity): (Duration, usize),
    ) {
        let over = now - self.since;
        // A sample that comes slightly early still completes its point.
        if over + SAMPLE_INTERVAL / 2 < interval {
            return;
        }
        if self.points.len() == capacity {
            self.points.pop_front();
        }
        self.points.push_back(TrafficCounts { at_ms, over, ..reading.since(&self.last) });
        (self.last, self.since) = (*reading, now);
    }
}

/// A period as `GET /api/stats` shows it.
fn period_json(period: &TrafficCounts) -> Value {
    let requests = &period.requests;
    json!({
        "at_ms": period.at_ms,
        "over_ms": as_millis(period.over),
        "executed": requests.ran(),
        "replayed": requests.replayed,
        "hits": period.hits,
        "refused": requests.total_refused(),
        "conflicts": requests.conflicts,
        "unknown": requests.unknown,
        "degraded": requests.degraded,
        "keyless": requests.keyless,
        "shadowed": requests.shadowed,
        "fallbacks": period.fallbacks,
    })
}

impl ChartWindow {
    pub(crate) const ALL: [Self; 4] = [Self::TenMinutes, Self::OneHour, Self::SixHours, Self::OneDay];

    /// The name in URLs and on the page, the ring, and how many of its points the window covers.
    fn row(self) -> (&'static str, usize, usize) {
        match self {
            Self::TenMinutes => ("10m", 0, 600),
            Self::OneHour => ("1h", 1, 360),
            Self::SixHours => ("6h", 1, 2160),
            Self::OneDay => ("24h", 2, 1440),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.row().0
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|window| window.name() == name)
    }
}

fn rounded_json(value: f64) -> Value {
    json!((value * 1000.0).round() / 1000.0)
}

/// Counts since the process started, or of a period.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TrafficCounts {
    /// End of the period, in milliseconds since the Unix epoch.
    pub(crate) at_ms: u64,
    /// Length of the period. Longer than planned if the process was suspended.
    pub(crate) over: Duration,
    pub(crate) requests: RequestCounts,
    /// Requests that were replayed and ran nothing.
    pub(crate) hits: u64,
    /// Requests that found no answer and were granted a run.
    pub(crate) misses: u64,
    /// Store calls that one of two stores decided alone.
    pub(crate) fallbacks: u64,
    pub(crate) overhead: HistogramSnapshot,
}

/// Defines the counts, and the operations that work on each of them.
macro_rules! request_counts {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub(crate) struct RequestCounts {
            $($(#[$doc])* pub(crate) $name: u64,)+
        }

        impl RequestCounts {
            fn combine(&self, other: &Self, with: fn(u64, u64) -> u64) -> Self {
                Self { $($name: with(self.$name, other.$name),)+ }
            }

            pub(crate) fn total(&self) -> u64 {
                [$(self.$name),+].iter().sum()
            }
        }
    };
}

request_counts! {
    /// Ran, and the answer is stored or about to be.
    stored,
    /// Ran, and the answer is not remembered.
    released,
    unknown,
    /// Ran without protection.
    degraded,
    replayed,
    /// Refused because another request with the key was in progress.
    conflicts,
    /// Refused because the key was used for a different request.
    reused,
    /// Refused because the store or the gateway could not take it.
    outages,
    /// Refused because the app did not answer.
    upstream_errors,
    /// Refused for another reason.
    refused,
    /// Had no key and passed through.
    keyless,
    shadowed,
}

impl Metrics {
    pub(crate) fn snapshot(&self) -> TrafficCounts {
        TrafficCounts {
            requests: self
                .by_route()
                .fold(RequestCounts::default(), |sum, (_, more)| sum.combine(&more, u64::wrapping_add)),
            hits: self.total(|counters| &counters.hits),
            misses: self.total(|counters| &counters.misses),
            fallbacks: self.total(|counters| &counters.fallbacks),
            overhead: self.histogram(|counters| &counters.overhead),
            ..TrafficCounts::default()
        }
    }

    pub(crate) fn by_route(&self) -> impl Iterator<Item = (&str, RequestCounts)> {
        self.routes().map(|route| {
            let mut requests = RequestCounts::default();
            route.by_outcome().for_each(|(outcome, count)| *requests.counter_mut(outcome) += count);
            (route.name(), requests)
        })
    }
}

impl TrafficCounts {
    /// The counts since `before`, an earlier snapshot.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            requests: self.requests.combine(&before.requests, u64::saturating_sub),
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
            fallbacks: self.fallbacks.saturating_sub(before.fallbacks),
            overhead: self.overhead.since(&before.overhead),
            ..*self
        }
    }

    pub(super) fn add(&mut self, more: &Self) {
        self.at_ms = self.at_ms.max(more.at_ms);
        self.over += more.over;
        self.requests = self.requests.combine(&more.requests, u64::wrapping_add);
        self.hits += more.hits;
        self.misses += more.misses;
        self.fallbacks += more.fallbacks;
        self.overhead = self.overhead + more.overhead;
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.requests.total() as f64 / self.over.as_secs_f64().max(1.0)
    }

    /// `None` if there are no requests.
    pub(crate) fn share(&self, of: fn(&Self) -> (u64, u64)) -> Option<f64> {
        let (part, all) = of(self);
        (all > 0).then(|| part as f64 / all as f64)
    }

    pub(crate) fn hit_share(&self) -> Option<f64> {
        self.share(hit_share)
    }

    pub(crate) fn conflict_share(&self) -> Option<f64> {
        self.share(conflict_share)
    }
}

impl RequestCounts {
    fn counter_mut(&mut self, outcome: RequestOutcome) -> &mut u64 {
        match outcome {
            RequestOutcome::Executed | RequestOutcome::Pending => &mut self.stored,
            RequestOutcome::Released => &mut self.released,
            RequestOutcome::Unknown => &mut self.unknown,
            RequestOutcome::Degraded => &mut self.degraded,
            RequestOutcome::Replayed => &mut self.replayed,
            RequestOutcome::Refused(RefusalReason::InProgress) => &mut self.conflicts,
            RequestOutcome::Refused(RefusalReason::KeyReused) => &mut self.reused,
            RequestOutcome::Refused(RefusalReason::StoreUnavailable | RefusalReason::Overloaded) => &mut self.outages,
            RequestOutcome::Refused(
                RefusalReason::UpstreamUnreachable | RefusalReason::UpstreamLost | RefusalReason::UpstreamTimeout,
            ) => &mut self.upstream_errors,
            RequestOutcome::Refused(_) => &mut self.refused,
            RequestOutcome::Keyless => &mut self.keyless,
            RequestOutcome::Shadow(ShadowOutcome::Replay | ShadowOutcome::Refusal(_)) => &mut self.shadowed,
        }
    }

    /// Ran under a claim with a known outcome.
    pub(crate) fn ran(&self) -> u64 {
        self.stored + self.released
    }

    /// Refused for any reason.
    pub(crate) fn total_refused(&self) -> u64 {
        self.conflicts + self.reused + self.outages + self.upstream_errors + self.refused
    }

    /// What clients see as an error of the service, not of their own.
    pub(crate) fn errors(&self) -> u64 {
        self.outages + self.upstream_errors + self.open()
    }

    /// Passed through without a claim.
    pub(crate) fn passed_through(&self) -> u64 {
        self.keyless + self.shadowed
    }

    /// Ran without a known outcome or without protection.
    pub(crate) fn open(&self) -> u64 {
        self.unknown + self.degraded
    }
}

#[cfg(test)]
mod tests {
    use ibid::{Observer, RefusalReason, RequestOutcome, RequestReport, observe::EngineEvent};

    use super::*;

    fn tell(metrics: &Metrics, outcome: RequestOutcome, times: u32) {
        for _ in 0..times {
            metrics.on_request(&RequestReport {
                route: "POST /a",
                method: "POST",
                path: "/a",
                key: "",
                address: Some(ibid::store::Address([1; 32])),
                outcome,
                status: 200,
                attempt: (outcome == RequestOutcome::Executed).then_some(1),
                took: Duration::from_micros(1700),
                run_took: Duration::from_millis(1),
                client_address: None,
                request_id: "",
                user_agent: None,
                parts: None,
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_has_what_happened_in_it_and_what_was_before_the_start_is_not_shown() {
        let metrics = Arc::new(Metrics::default());
        tell(&metrics, RequestOutcome::Executed, 50);
        let history = MetricsHistory::new(&metrics);
        let (stop, stopping) = watch::channel(false);
        let following = tokio::spawn(history.clone().run_sampler(metrics.clone(), stopping));
        tokio::time::sleep(Duration::from_millis(1500)).await;
        tell(&metrics, RequestOutcome::Executed, 6);
        tell(&metrics, RequestOutcome::Replayed, 3);
        tell(&metrics, RequestOutcome::Refused(RefusalReason::InProgress), 1);
        let error = ibid::store::StoreError::new(ibid::store::ErrorKind::NotApplied, "redis", "gone");
        metrics.on_event(&EngineEvent::Fallback("claim", &error));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let series = history.chart_series(ChartWindow::TenMinutes);
        assert_eq!(series["ran"], json!([0.0, 6.0]));
        assert_eq!(series["replayed"], json!([0.0, 3.0]));
        assert_eq!(series["hit_percent"], json!([null, 33.333]));
        assert_eq!(series["conflict_percent"], json!([null, 10.0]));
        assert_eq!(series["fallbacks"], json!([0, 1]));
        assert_eq!(series["overhead_p50_ms"], json!([null, 0.75]));
        let lately = history.recent_totals();
        assert_eq!((lately.requests.total(), lately.fallbacks, lately.over), (10, 1, Duration::from_secs(2)));
        assert_eq!((lately.hit_share(), lately.conflict_share()), (Some(3.0 / 9.0), Some(0.1)));
        stop.send(true).unwrap();
        following.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn rings_are_bounded_and_each_has_its_own_step() {
        let history = MetricsHistory::new(&Metrics::default());
        let start = Instant::now();
        for second in 1..=26 * 3600 {
            let requests = RequestCounts { stored: second, ..RequestCounts::default() };
            let reading = TrafficCounts { requests, ..TrafficCounts::default() };
            history.record_sample(&reading, start + Duration::from_secs(second), second * 1000);
        }
        for (window, points) in [
            (ChartWindow::TenMinutes, 600),
            (ChartWindow::OneHour, 360),
            (ChartWindow::SixHours, 2160),
            (ChartWindow::OneDay, 1440),
        ] {
            let ran = history.chart_series(window)["ran"].as_array().unwrap().clone();
            assert_eq!(ran.len(), points, "{window:?}");
            assert!(ran.iter().all(|value| *value == json!(1.0)), "{window:?}");
        }
        assert_eq!(history.recent_totals().over, ALERT_WINDOW);
        let rows = history.rows(ChartWindow::OneHour, 12);
        assert_eq!(rows.len(), 12);
        assert!(rows.iter().all(|row| row.requests.total() == 300), "{rows:?}");
        assert!(rows.is_sorted_by(|a, b| a.at_ms > b.at_ms));
    }

    /// Feeds a history with a request per second, of which `is_hit` says whether it was replayed.
    fn history_of(seconds: u64, is_hit: fn(u64) -> bool) -> Arc<MetricsHistory> {
        let history = MetricsHistory::new(&Metrics::default());
        let (start, mut hits) = (Instant::now(), 0);
        for second in 1..=seconds {
            hits += u64::from(is_hit(second));
            let requests = RequestCounts { stored: second - hits, replayed: hits, ..RequestCounts::default() };
            let reading = TrafficCounts { requests, hits, misses: second - hits, ..TrafficCounts::default() };
            history.record_sample(&reading, start + Duration::from_secs(second), second * 1000);
        }
        history
    }

    #[tokio::test(start_paused = true)]
    async fn hits_are_a_part_of_what_came_in_the_ten_minutes_before() {
        let history = history_of(800, |second| second <= 100);
        let percent = history.chart_series(ChartWindow::OneHour)["hit_percent"].as_array().unwrap().clone();
        assert_eq!((percent.len(), &percent[9], &percent[19]), (80, &json!(100.0), &json!(50.0)));
        assert_eq!((&percent[59], &percent[64], &percent[70]), (&json!(16.667), &json!(8.333), &json!(0.0)));
    }

    /// As the shipped rule: above the limit for ten minutes, with at least 20 requests.
    #[tokio::test(start_paused = true)]
    async fn an_alert_fires_when_its_rule_has_held_for_ten_minutes() {
        let fired = |history: Arc<MetricsHistory>| history.has_fired(hit_share, HIT_RATE_ALERT);
        assert!(fired(history_of(1300, |second| second % 5 == 0)), "20 % for 20 minutes");
        assert!(!fired(history_of(500, |second| second % 5 == 0)), "not for long enough");
        assert!(!fired(history_of(1300, |second| second % 20 == 0)), "5 %");
        assert!(!fired(history_of(1300, |second| second > 900 && second % 5 == 0)), "only lately");
        let few = MetricsHistory::new(&Metrics::default());
        for second in 1..=1300_u64 {
            let hits = second / 100;
            let requests = RequestCounts { replayed: hits, ..RequestCounts::default() };
            let reading = TrafficCounts { requests, hits, ..TrafficCounts::default() };
            few.record_sample(&reading, Instant::now() + Duration::from_secs(second), second * 1000);
        }
        assert!(!few.has_fired(hit_share, HIT_RATE_ALERT), "all are hits, but six in ten minutes");
    }

    /// The last hour for programs equals the chart of the last hour.
    #[tokio::test(start_paused = true)]
    async fn programs_get_the_counts_that_charts_are_drawn_from() {
        let metrics = Metrics::default();
        let history = MetricsHistory::new(&metrics);
        let start = Instant::now();
        for step in 1..=400_u32 {
            tell(&metrics, RequestOutcome::Executed, step % 7);
            tell(&metrics, RequestOutcome::Replayed, step % 3);
            tell(&metrics, RequestOutcome::Refused(RefusalReason::InProgress), step % 2);
            tell(&metrics, RequestOutcome::Unknown, step % 5);
            tell(&metrics, RequestOutcome::Keyless, 1);
            // The process was suspended once.
            let held_up = if step > 300 { 30 } else { 0 };
            let seconds = u64::from(step) * 10 + held_up;
            history.record_sample(&metrics.snapshot(), start + Duration::from_secs(seconds), seconds * 1000);
        }
        let hour = history.last_hour();
        let points = hour["points"].as_array().unwrap();
        assert_eq!((hour["every_ms"].as_u64(), points.len()), (Some(10_000), 360));
        assert_eq!(points.iter().filter(|point| point["over_ms"] == 40_000).count(), 1);
        let series = history.chart_series(ChartWindow::OneHour);
        for (at, point) in points.iter().enumerate() {
            let rate = |name: &str| point[name].as_f64().unwrap() * 1000.0 / point["over_ms"].as_f64().unwrap();
            for (drawn, counted) in [
                ("ran", rate("executed")),
                ("replayed", rate("replayed")),
                ("refused", rate("refused")),
                ("open", rate("unknown") + rate("degraded")),
                ("passed", rate("keyless") + rate("shadowed")),
            ] {
                assert_eq!(series[drawn][at], rounded_json(counted), "{drawn} at {at}: {point}");
            }
            assert_eq!((&point["hits"], &point["conflicts"]), (&point["replayed"], &point["refused"]));
        }
        let sum = |name: &str| points.iter().map(|point| point[name].as_u64().unwrap()).sum::<u64>();
        assert_eq!(sum("keyless"), 360);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_makes_one_long_point_and_its_rate_is_still_right() {
        let metrics = Metrics::default();
        let history = MetricsHistory::new(&metrics);
        tell(&metrics, RequestOutcome::Executed, 40);
        history.record_sample(&metrics.snapshot(), Instant::now() + Duration::from_secs(4), 4000);
        assert_eq!(history.chart_series(ChartWindow::TenMinutes)["ran"], json!([10.0]));
    }

    #[test]
    fn windows_are_known_by_their_names() {
        assert!(ChartWindow::ALL.iter().all(|window| ChartWindow::from_name(window.name()) == Some(*window)));
        assert_eq!(ChartWindow::from_name("1y"), None);
    }
}

#[cfg(test)]
mod traffic_tests {
    use ibid::{Observer, RequestReport};

    use super::{super::all_outcomes, *};

    fn tell(metrics: &Metrics, route: &str, outcome: RequestOutcome) {
        metrics.on_request(&RequestReport {
            route,
            method: "POST",
            path: "/",
            key: "",
            address: Some(ibid::store::Address([1; 32])),
            outcome,
            status: 200,
            attempt: None,
            took: Duration::from_millis(3),
            run_took: Duration::from_millis(1),
            client_address: None,
            request_id: "",
            user_agent: None,
            parts: None,
        });
    }

    #[test]
    fn every_outcome_is_in_the_sum_once() {
        let metrics = Metrics::default();
        let all = all_outcomes();
        all.iter().for_each(|outcome| tell(&metrics, "POST /a", *outcome));
        let before = metrics.snapshot();
        assert_eq!(before.requests.total(), all.len() as u64);
        let requests = before.requests;
        let parts =
            requests.ran() + requests.total_refused() + requests.passed_through() + requests.open() + requests.replayed;
        assert_eq!(parts, requests.total(), "every part is drawn once");
        tell(&metrics, "POST /b", RequestOutcome::Replayed);
        let since = metrics.snapshot().since(&before);
        assert_eq!(since.requests, RequestCounts { replayed: 1, ..RequestCounts::default() });
        assert_eq!(since.overhead.count(), 1);
        let by_route: Vec<_> = metrics.by_route().collect();
        assert_eq!(by_route.len(), 2);
        assert_eq!(by_route[1], ("POST /b", RequestCounts { replayed: 1, ..RequestCounts::default() }));
    }
}
