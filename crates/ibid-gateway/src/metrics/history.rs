//! What happened lately, for the charts and for `GET /api/stats`: read from the counters each second, kept in rings.
//!
//! It is this process's own history: nothing is asked of the store for it, and it begins with the process. There is one, so
//! that the console and the API cannot disagree. Bound: 600 points of a second, 2,160 of ten and 1,440 of sixty, of some 300
//! bytes each.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use super::{Metrics, Reading, Requests, Spread};
use crate::records::view::{millis, now_ms};

/// How often the counters are read.
const EVERY: Duration = Duration::from_secs(1);
/// Length of a point in each ring, and how many of them are kept: ten minutes, six hours, a day.
const RINGS: [(Duration, usize); 3] = [(EVERY, 600), (Duration::from_secs(10), 2160), (Duration::from_secs(60), 1440)];
/// The alarms in the documentation look back for so long; so do the numbers at the top of the overview.
const LATELY: Duration = Duration::from_secs(300);

/// Hits above this part of all requests: a client that retries too eagerly.
pub(crate) const HITS_LIMIT: f64 = 0.10;
/// Conflicts above this part of all requests: slow processing.
pub(crate) const CONFLICTS_LIMIT: f64 = 0.05;

/// What happened lately.
#[derive(Debug)]
pub struct History(Mutex<[Ring; RINGS.len()]>);

#[derive(Debug)]
struct Ring {
    step: Duration,
    most: usize,
    last: Reading,
    /// When `last` was read.
    since: Instant,
    points: VecDeque<Point>,
}

/// What happened from one look at the counters to the next.
#[derive(Debug, Clone, Copy)]
struct Point {
    /// Milliseconds since the Unix epoch, at its end.
    at_ms: u64,
    /// Longer than its ring's step if the process was held up.
    over: Duration,
    requests: Requests,
    hits: u64,
    fallbacks: u64,
    overhead: Spread,
}

/// How far back a chart looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Window {
    /// Ten minutes.
    #[default]
    Minutes,
    /// One hour.
    Hour,
    /// Six hours.
    Hours,
    /// A day.
    Day,
}

/// What happened in the last five minutes, or since the start.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lately {
    /// What it covers.
    pub(crate) over: Duration,
    /// By what they got.
    pub(crate) requests: Requests,
    /// Of them, those that were answered from the record and ran nothing.
    pub(crate) hits: u64,
    /// Store calls that one of two stores decided alone.
    pub(crate) fallbacks: u64,
    /// What requests took beyond their operation.
    pub(crate) overhead: Spread,
}

impl History {
    /// Begins now.
    pub(crate) fn new(metrics: &Metrics) -> Arc<Self> {
        let (last, since) = (metrics.reading(), Instant::now());
        Arc::new(Self(Mutex::new(RINGS.map(|(step, most)| Ring { step, most, last, since, points: VecDeque::new() }))))
    }

    /// Reads the counters each second, until the gateway stops.
    pub(crate) async fn follow(self: Arc<Self>, metrics: Arc<Metrics>, mut stop: watch::Receiver<bool>) {
        let mut next = Instant::now() + EVERY;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let now = Instant::now();
            self.look(&metrics.reading(), now, now_ms());
            // What was missed is not caught up with: the point is longer instead.
            next = (next + EVERY).max(now);
        }
    }

    fn look(&self, reading: &Reading, now: Instant, at_ms: u64) {
        self.0.lock().iter_mut().for_each(|ring| ring.look(reading, now, at_ms));
    }

    /// What happened in the last five minutes.
    pub(crate) fn lately(&self) -> Lately {
        let rings = self.0.lock();
        let mut lately = Lately::default();
        for point in rings[0].points.iter().rev() {
            if lately.over >= LATELY {
                break;
            }
            lately.add(point);
        }
        lately
    }

    /// The columns of the charts, oldest first.
    pub(crate) fn series(&self, window: Window) -> Value {
        let (all, count) = self.points(window);
        let points = &all[all.len() - count..];
        let column = |of: &dyn Fn(&Point) -> Value| points.iter().map(of).collect::<Value>();
        let rate = |of: fn(&Requests) -> u64| column(&|point| rounded(point.per_second(of(&point.requests))));
        let slow = |part: f64| {
            column(&|point| point.overhead.quantile(part).map_or(Value::Null, |took| rounded(took.as_secs_f64() * 1e3)))
        };
        json!({
            "at": column(&|point| (point.at_ms / 1000).into()),
            "ran": rate(Requests::ran),
            "replayed": rate(|requests| requests.replayed),
            "refused": rate(Requests::all_refused),
            "open": rate(Requests::open),
            "passed": rate(Requests::passed),
            "hit_percent": trailing(&all, count, |point| point.hits),
            "conflict_percent": trailing(&all, count, |point| point.requests.conflicts),
            "fallbacks": column(&|point| point.fallbacks.into()),
            "unknown": column(&|point| point.requests.open().into()),
            "overhead_p50_ms": slow(0.5),
            "overhead_p99_ms": slow(0.99),
        })
    }

    /// The last hour as counts, for programs; oldest first.
    pub(crate) fn hour(&self) -> Value {
        let (all, count) = self.points(Window::Hour);
        let points: Vec<Value> = all[all.len() - count..].iter().map(Point::counts).collect();
        let (ring, _) = Window::Hour.place();
        json!({ "every_ms": millis(RINGS[ring].0), "points": points })
    }

    /// The same in a few rows, latest first, for those who read numbers.
    pub(crate) fn rows(&self, window: Window, at_most: usize) -> Vec<(u64, Lately)> {
        let (all, count) = self.points(window);
        let points = &all[all.len() - count..];
        let each = points.len().div_ceil(at_most.max(1)).max(1);
        let rows = points.rchunks(each).map(|points| {
            let mut row = Lately::default();
            points.iter().for_each(|point| row.add(point));
            (points.last().map_or(0, |point| point.at_ms), row)
        });
        rows.collect()
    }

    /// All that its ring has, and how many of the last ones are in the window.
    fn points(&self, window: Window) -> (Vec<Point>, usize) {
        let (ring, count) = window.place();
        let all: Vec<Point> = self.0.lock()[ring].points.iter().copied().collect();
        let count = count.min(all.len());
        (all, count)
    }
}

/// Percent of all requests in the time that alarms look back, up to each of the last `count` points.
fn trailing(points: &[Point], count: usize, of: fn(&Point) -> u64) -> Value {
    let (mut from, mut over, mut some, mut all) = (0, Duration::ZERO, 0, 0);
    let percents = points.iter().map(|point| {
        over += point.over;
        some += of(point);
        all += point.requests.all();
        while over.saturating_sub(points[from].over) >= LATELY {
            over -= points[from].over;
            some -= of(&points[from]);
            all -= points[from].requests.all();
            from += 1;
        }
        if all == 0 { Value::Null } else { rounded(some as f64 * 100.0 / all as f64) }
    });
    let percents: Vec<Value> = percents.collect();
    percents[points.len() - count..].into()
}

impl Ring {
    fn look(&mut self, reading: &Reading, now: Instant, at_ms: u64) {
        let over = now - self.since;
        // A look that comes a little early still ends its point.
        if over + EVERY / 2 < self.step {
            return;
        }
        let since = reading.since(&self.last);
        let Reading { requests, hits, fallbacks, overhead, .. } = since;
        if self.points.len() == self.most {
            self.points.pop_front();
        }
        self.points.push_back(Point { at_ms, over, requests, hits, fallbacks, overhead });
        (self.last, self.since) = (*reading, now);
    }
}

impl Point {
    fn counts(&self) -> Value {
        let requests = &self.requests;
        json!({
            "at_ms": self.at_ms,
            "over_ms": millis(self.over),
            "executed": requests.ran(),
            "replayed": requests.replayed,
            "hits": self.hits,
            "refused": requests.all_refused(),
            "conflicts": requests.conflicts,
            "unknown": requests.unknown,
            "degraded": requests.degraded,
            "keyless": requests.keyless,
            "shadowed": requests.shadowed,
            "fallbacks": self.fallbacks,
        })
    }

    fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.over.as_secs_f64().max(0.001)
    }
}

impl Window {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Minutes, Self::Hour, Self::Hours, Self::Day];

    /// As it is written in addresses, and on the page.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Minutes => "10m",
            Self::Hour => "1h",
            Self::Hours => "6h",
            Self::Day => "24h",
        }
    }

    /// The one with that name.
    pub(crate) fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|window| window.name() == name)
    }

    /// Which ring, and how many of its points.
    fn place(self) -> (usize, usize) {
        match self {
            Self::Minutes => (0, 600),
            Self::Hour => (1, 360),
            Self::Hours => (1, 2160),
            Self::Day => (2, 1440),
        }
    }
}

impl Lately {
    fn add(&mut self, point: &Point) {
        self.over += point.over;
        self.requests = self.requests.plus(&point.requests);
        self.hits += point.hits;
        self.fallbacks += point.fallbacks;
        self.overhead = self.overhead + point.overhead;
    }

    /// Requests in a second.
    pub(crate) fn per_second(&self) -> f64 {
        self.requests.all() as f64 / self.over.as_secs_f64().max(1.0)
    }

    /// Which part of the requests; `None` without any.
    pub(crate) fn part(&self, of: u64) -> Option<f64> {
        let all = self.requests.all();
        (all > 0).then(|| of as f64 / all as f64)
    }
}

fn rounded(value: f64) -> Value {
    json!((value * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use ibid::{Answered, Notice, Observer, Outcome, Reason};

    use super::*;

    fn tell(metrics: &Metrics, outcome: Outcome, times: u32) {
        for _ in 0..times {
            metrics.answered(&Answered {
                route: "POST /a",
                method: "POST",
                path: "/a",
                key: "",
                address: Some(ibid::store::Address([1; 32])),
                outcome,
                status: 200,
                attempt: None,
                took: Duration::from_micros(1700),
                ran_for: Duration::from_millis(1),
                peer: None,
                request_id: "",
                user_agent: None,
                parts: None,
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_has_what_happened_in_it_and_what_was_before_the_start_is_not_shown() {
        let metrics = Arc::new(Metrics::default());
        tell(&metrics, Outcome::Executed, 50);
        let history = History::new(&metrics);
        let (stop, stopping) = watch::channel(false);
        let following = tokio::spawn(history.clone().follow(metrics.clone(), stopping));
        tokio::time::sleep(Duration::from_millis(1500)).await;
        tell(&metrics, Outcome::Executed, 6);
        tell(&metrics, Outcome::Replayed, 3);
        tell(&metrics, Outcome::Refused(Reason::InProgress), 1);
        let error = ibid::store::StoreError::new(ibid::store::ErrorKind::NotApplied, "redis", "gone");
        metrics.noticed(&Notice::Fallback { call: "claim", error: &error });
        tokio::time::sleep(Duration::from_secs(1)).await;
        let series = history.series(Window::Minutes);
        assert_eq!(series["ran"], json!([0.0, 6.0]));
        assert_eq!(series["replayed"], json!([0.0, 3.0]));
        assert_eq!(series["hit_percent"], json!([null, 30.0]));
        assert_eq!(series["conflict_percent"], json!([null, 10.0]));
        assert_eq!(series["fallbacks"], json!([0, 1]));
        assert_eq!(series["overhead_p50_ms"], json!([null, 0.75]));
        let lately = history.lately();
        assert_eq!((lately.requests.all(), lately.fallbacks, lately.over), (10, 1, Duration::from_secs(2)));
        assert_eq!(lately.part(lately.hits), Some(0.3));
        stop.send(true).unwrap();
        following.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn rings_are_bounded_and_each_has_its_own_step() {
        let history = History::new(&Metrics::default());
        let start = Instant::now();
        for second in 1..=26 * 3600 {
            let requests = Requests { stored: second, ..Requests::default() };
            let reading = Reading { requests, ..Reading::default() };
            history.look(&reading, start + Duration::from_secs(second), second * 1000);
        }
        for (window, points) in
            [(Window::Minutes, 600), (Window::Hour, 360), (Window::Hours, 2160), (Window::Day, 1440)]
        {
            let ran = history.series(window)["ran"].as_array().unwrap().clone();
            assert_eq!(ran.len(), points, "{window:?}");
            assert!(ran.iter().all(|value| *value == json!(1.0)), "{window:?}");
        }
        assert_eq!(history.lately().over, LATELY);
        let rows = history.rows(Window::Hour, 12);
        assert_eq!(rows.len(), 12);
        assert!(rows.iter().all(|(_, row)| row.requests.all() == 300), "{rows:?}");
        assert!(rows.is_sorted_by(|a, b| a.0 > b.0));
    }

    #[tokio::test(start_paused = true)]
    async fn hits_are_a_part_of_what_came_in_the_five_minutes_before() {
        let history = History::new(&Metrics::default());
        let start = Instant::now();
        for second in 1..=400_u64 {
            // All of the first ten seconds are hits, nothing later is.
            let requests = Requests { stored: second, ..Requests::default() };
            let reading = Reading { requests, hits: second.min(10), ..Reading::default() };
            history.look(&reading, start + Duration::from_secs(second), second * 1000);
        }
        let percent = history.series(Window::Minutes)["hit_percent"].as_array().unwrap().clone();
        assert_eq!((percent.len(), &percent[9], &percent[19]), (400, &json!(100.0), &json!(50.0)));
        assert_eq!((&percent[299], &percent[304], &percent[310]), (&json!(3.333), &json!(1.667), &json!(0.0)));
    }

    /// What programs get of the last hour is what the chart of the last hour draws.
    #[tokio::test(start_paused = true)]
    async fn programs_get_the_counts_that_charts_are_drawn_from() {
        let metrics = Metrics::default();
        let history = History::new(&metrics);
        let start = Instant::now();
        for step in 1..=400_u32 {
            tell(&metrics, Outcome::Executed, step % 7);
            tell(&metrics, Outcome::Replayed, step % 3);
            tell(&metrics, Outcome::Refused(Reason::InProgress), step % 2);
            tell(&metrics, Outcome::Unknown, step % 5);
            tell(&metrics, Outcome::Keyless, 1);
            // The process was held up once.
            let held_up = if step > 300 { 30 } else { 0 };
            let seconds = u64::from(step) * 10 + held_up;
            history.look(&metrics.reading(), start + Duration::from_secs(seconds), seconds * 1000);
        }
        let hour = history.hour();
        let points = hour["points"].as_array().unwrap();
        assert_eq!((hour["every_ms"].as_u64(), points.len()), (Some(10_000), 360));
        assert_eq!(points.iter().filter(|point| point["over_ms"] == 40_000).count(), 1);
        let series = history.series(Window::Hour);
        for (at, point) in points.iter().enumerate() {
            let rate = |name: &str| point[name].as_f64().unwrap() * 1000.0 / point["over_ms"].as_f64().unwrap();
            for (drawn, counted) in [
                ("ran", rate("executed")),
                ("replayed", rate("replayed")),
                ("refused", rate("refused")),
                ("open", rate("unknown") + rate("degraded")),
                ("passed", rate("keyless") + rate("shadowed")),
            ] {
                assert_eq!(series[drawn][at], rounded(counted), "{drawn} at {at}: {point}");
            }
            assert_eq!((&point["hits"], &point["conflicts"]), (&point["replayed"], &point["refused"]));
        }
        let sum = |name: &str| points.iter().map(|point| point[name].as_u64().unwrap()).sum::<u64>();
        assert_eq!(sum("keyless"), 360);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_makes_one_long_point_and_its_rate_is_still_right() {
        let metrics = Metrics::default();
        let history = History::new(&metrics);
        tell(&metrics, Outcome::Executed, 40);
        history.look(&metrics.reading(), Instant::now() + Duration::from_secs(4), 4000);
        assert_eq!(history.series(Window::Minutes)["ran"], json!([10.0]));
    }

    #[test]
    fn windows_are_known_by_their_names() {
        assert!(Window::ALL.iter().all(|window| Window::of(window.name()) == Some(*window)));
        assert_eq!(Window::of("1y"), None);
    }
}
