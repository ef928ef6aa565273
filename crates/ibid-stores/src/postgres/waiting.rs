//! Who waits for a holder, and the one task that looks for all of them.
//!
//! A waiter holds no connection: it is an entry in a table here. While there are any, one task asks for all of them in
//! one statement, which also marks their rows, so that the holder's end is notified (and only then: NOTIFY is kept off
//! the way of claims that nobody waits for). Beneath that it asks again, jittered, and whenever a lease would lapse.
//! Where sessions are not our own there is no LISTEN: it asks more often instead.
//!
//! With copies in this process, the same connection hears for good what was forgotten; where it cannot, a counter is
//! asked for. Any gap flushes the copies.

use std::{collections::HashMap, future::poll_fn, sync::Arc, time::Duration};

use ibid::store::{Address, Fence};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_postgres::{AsyncMessage, Row, types::ToSql};

use super::{
    pool::{Failed, Pool},
    rows,
    statements::Statement,
    tls::Connector,
};
use crate::{breaker::jittered, near::Copies};

/// How often it asks again where it is told.
const RARELY: Duration = Duration::from_secs(1);
/// And where it is not.
const OFTEN: Duration = Duration::from_millis(60);
/// At most so many are asked for in one statement.
const ROWS: usize = 256;
/// After so many failures in a row waiters are let go: their own claims will say what is wrong.
const FAILURES: u32 = 3;
/// How long the listening connection stays when nobody waits.
const LINGER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Waiting {
    pool: Arc<Pool>,
    copies: Option<Copies>,
    table: Mutex<HashMap<(Address, Fence), Seat>>,
    /// Somebody came, or something was heard.
    nudge: Notify,
    /// Somebody waits. Set under the table's lock.
    wanted: watch::Sender<bool>,
    /// Whether the end of a marked row would be heard.
    heard: watch::Sender<bool>,
}

/// All who wait for one holder.
#[derive(Debug)]
struct Seat {
    waiters: Vec<oneshot::Sender<()>>,
    /// When to ask next.
    due: Instant,
}

impl Waiting {
    pub(super) fn new(pool: Arc<Pool>, copies: Option<Copies>) -> Arc<Self> {
        Arc::new(Self {
            pool,
            copies,
            table: Mutex::default(),
            nudge: Notify::new(),
            wanted: watch::Sender::new(false),
            heard: watch::Sender::new(false),
        })
    }

    /// Until `seen` does not run any more, or `limit`.
    pub(super) async fn wait(&self, at: &Address, seen: Fence, limit: Duration) {
        let (wake, woken) = oneshot::channel();
        {
            let mut table = self.table.lock();
            let seat = table.entry((*at, seen)).or_insert_with(|| Seat { waiters: Vec::new(), due: Instant::now() });
            // Those who gave up make room, so that a long-lived seat does not grow for ever.
            if seat.waiters.len() == seat.waiters.capacity() {
                seat.waiters.retain(|waiter| !waiter.is_closed());
            }
            seat.waiters.push(wake);
            self.wanted.send_replace(true);
        }
        self.nudge.notify_one();
        drop(timeout(limit.min(Duration::from_secs(1 << 32)), woken).await);
    }

    /// Asks for all who wait, for ever.
    pub(super) async fn look(self: Arc<Self>) {
        let mut failures = 0;
        loop {
            match self.next_due() {
                None => self.nudge.notified().await,
                Some(due) => tokio::select! {
                    () = sleep_until(due) => {}
                    () = self.nudge.notified() => {}
                },
            }
            let due = self.take_due();
            if due.is_empty() {
                continue;
            }
            match self.ask(&due).await {
                Ok(()) => failures = 0,
                Err(()) => {
                    failures += 1;
                    if failures >= FAILURES {
                        due.iter().for_each(|(at, seen)| self.wake(at, *seen));
                    }
                }
            }
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let mut table = self.table.lock();
        table.retain(|_, seat| seat.waiters.iter().any(|waiter| !waiter.is_closed()));
        self.wanted.send_replace(!table.is_empty());
        table.values().map(|seat| seat.due).min()
    }

    /// Those to ask for now; they are due again after a while.
    fn take_due(&self) -> Vec<(Address, Fence)> {
        let now = Instant::now();
        let again = now + jittered(self.pause());
        let mut due = Vec::new();
        for (at, seat) in self.table.lock().iter_mut().filter(|(_, seat)| seat.due <= now).take(ROWS) {
            seat.due = again;
            due.push(*at);
        }
        due
    }

    fn pause(&self) -> Duration {
        if *self.heard.borrow() { RARELY } else { OFTEN }
    }

    async fn ask(&self, due: &[(Address, Fence)]) -> Result<(), ()> {
        let addresses: Vec<&[u8]> = due.iter().map(|(at, _)| &at.0[..]).collect();
        let seen: Vec<i64> = due.iter().map(|(_, seen)| rows::fence(*seen)).collect();
        let mark = *self.heard.borrow();
        let sent = match self.watch(&addresses, &seen, mark).await {
            // A row cannot be marked now: look at it, and come back soon.
            Err(failed) if failed.in_the_way => {
                self.come_back(due, Instant::now() + jittered(OFTEN));
                self.watch(&addresses, &seen, false).await
            }
            sent => sent,
        };
        for row in sent.map_err(|_| ())? {
            let (nth, runs): (Result<i32, _>, Result<Option<i64>, _>) = (rows::column(&row, 0), rows::column(&row, 1));
            let nth = nth.ok().and_then(|nth| due.get(usize::try_from(nth - 1).ok()?));
            let Some((at, seen)) = nth else { continue };
            match runs.ok().flatten() {
                None => self.wake(at, *seen),
                Some(us) => {
                    let lapses = Instant::now() + Duration::from_micros(us.clamp(1000, 1 << 40) as u64);
                    if let Some(seat) = self.table.lock().get_mut(&(*at, *seen)) {
                        seat.due = seat.due.min(lapses);
                    }
                }
            }
        }
        Ok(())
    }

    async fn watch(&self, addresses: &[&[u8]], seen: &[i64], mark: bool) -> Result<Vec<Row>, Failed> {
        let params: [&(dyn ToSql + Sync); 3] = [&addresses, &seen, &mark];
        self.pool.call(Statement::Watch, &params, self.pool.deadline()).await
    }

    fn come_back(&self, to: &[(Address, Fence)], due: Instant) {
        let mut table = self.table.lock();
        for at in to {
            if let Some(seat) = table.get_mut(at) {
                seat.due = due;
            }
        }
    }

    fn wake(&self, at: &Address, seen: Fence) {
        if let Some(seat) = self.table.lock().remove(&(*at, seen)) {
            for waiter in seat.waiters {
                let _ = waiter.send(());
            }
        }
    }

    /// Keeps a connection that listens while it is needed, for ever.
    pub(super) async fn listen(self: Arc<Self>) {
        if self.pool.place.unnamed {
            return self.poll_forgets().await;
        }
        let mut pause = OFTEN;
        loop {
            if self.copies.is_none() {
                let mut wanted = self.wanted.subscribe();
                drop(wanted.wait_for(|wanted| *wanted).await);
            }
            let began = Instant::now();
            let was_heard = self.hear().await;
            self.heard.send_replace(false);
            if let Some(copies) = &self.copies {
                copies.flush();
            }
            // Marked rows may have ended unheard.
            self.ask_for_all();
            pause = if was_heard && began.elapsed() > RARELY { OFTEN } else { (pause * 2).min(RARELY * 2) };
            if *self.wanted.borrow() || self.copies.is_some() {
                sleep(jittered(pause)).await;
            }
        }
    }

    /// One connection's time of listening. Says whether it came about.
    async fn hear(&self) -> bool {
        let pool = &self.pool;
        let connecting = async { pool.place.config.connect(Connector::of(&pool.certificates).await).await };
        let Ok(Ok((client, mut connection))) = timeout(pool.connecting_limit(), connecting).await else { return false };
        let listening = async {
            let listened =
                timeout(pool.connecting_limit(), client.batch_execute("LISTEN ibid_wake; LISTEN ibid_forget"));
            if !matches!(listened.await, Ok(Ok(()))) {
                return false;
            }
            // From here on nothing is missed; what came before is not known.
            if let Some(copies) = &self.copies {
                copies.flush();
            }
            self.heard.send_replace(true);
            self.ask_for_all();
            self.is_needed(&client).await;
            true
        };
        let hearing = async {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(said) = message {
                    self.is_told(said.channel(), said.payload());
                }
            }
        };
        tokio::select! {
            came_about = listening => came_about,
            () = hearing => *self.heard.borrow(),
        }
    }

    fn ask_for_all(&self) {
        self.table.lock().values_mut().for_each(|seat| seat.due = Instant::now());
        self.nudge.notify_one();
    }

    /// Until nobody has waited for a while, or the connection does not answer any more.
    async fn is_needed(&self, client: &tokio_postgres::Client) {
        loop {
            sleep(LINGER).await;
            if self.copies.is_none() && !*self.wanted.borrow() {
                return;
            }
            // A peer that vanished says nothing: ask it.
            if !matches!(timeout(self.pool.connecting_limit(), client.batch_execute("")).await, Ok(Ok(()))) {
                return;
            }
        }
    }

    fn is_told(&self, channel: &str, payload: &str) {
        match channel {
            "ibid_wake" => {
                let Some((address, fence)) = payload.split_once(':') else { return };
                if let (Some(at), Ok(fence)) = (Address::from_hex(address), fence.parse()) {
                    self.wake(&at, Fence(fence));
                }
            }
            "ibid_forget" => {
                if let (Some(copies), Some(at)) = (&self.copies, Address::from_hex(payload)) {
                    copies.forget(&at);
                }
            }
            _ => {}
        }
    }

    /// Where nothing can be heard: a counter says that something was forgotten, not what.
    async fn poll_forgets(&self) {
        let Some(copies) = &self.copies else { return };
        let mut last = None;
        loop {
            let asked = self.pool.read("SELECT m.forgets FROM ibid.meta m", &[], self.pool.timeout).await;
            let now = asked.ok().and_then(|found| rows::column::<i64>(found.first()?, 0).ok());
            if now.is_none() || now != last {
                copies.flush();
            }
            last = now;
            sleep(jittered(RARELY)).await;
        }
    }
}
