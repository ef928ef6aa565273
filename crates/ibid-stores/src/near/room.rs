//! The waiting room: all who wait here for one holder are one waiter at the store.
//!
//! The first who comes leads: it alone waits at the store, for as long as its own limit lets it. When it leaves early,
//! even by being dropped, the next one leads. When the holder is gone, the leader looks once at what came of it. If that
//! is an answer, it is copied and all may go at once: their claims are answered here. Otherwise they go one small group
//! after the other, because each of them will ask the store.
//!
//! Invariants: a room is for one address and one fence, so waiters that saw different holders do not disturb each other;
//! a room that is open stays open, and is no longer listed; a room without waiters is not listed.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ibid::store::{Address, Claim, Fence, StoreError};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use super::Near;

const SHARDS: usize = 16;
/// So many leave at the same time when each of them will ask the store, and the next after a pause.
const GROUP: u32 = 64;
const PAUSE: Duration = Duration::from_millis(5);
/// Nobody is held back for longer than that.
const LONGEST: Duration = Duration::from_secs(1);
/// Longer than anybody waits: what would overflow the clock.
const ENDLESS: Duration = Duration::from_secs(365 * 24 * 60 * 60);

type Door = (Address, Fence);
type Listed = HashMap<Door, Arc<Room>>;

#[derive(Debug)]
pub(super) struct Rooms(Box<[Mutex<Listed>]>);

#[derive(Debug, Default)]
struct Room {
    /// Told once when it opens, and whenever somebody has to lead.
    bell: Notify,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: u32,
    is_led: bool,
    open: Option<Open>,
    /// How many have gone since it opened.
    gone: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    AtOnce,
    InGroups,
}

impl Default for Rooms {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl Rooms {
    fn shard(&self, at: &Address) -> &Mutex<Listed> {
        &self.0[usize::from(at.0[30]) % SHARDS]
    }

    fn enter(&self, door: Door) -> Seat<'_> {
        let mut rooms = self.shard(&door.0).lock();
        let room = rooms.entry(door).or_default().clone();
        room.state.lock().waiting += 1;
        Seat { rooms: self, door, room }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.iter().map(|rooms| rooms.lock().len()).sum()
    }
}

/// One who waits. The last to leave takes the room off the list.
struct Seat<'a> {
    rooms: &'a Rooms,
    door: Door,
    room: Arc<Room>,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut rooms = self.rooms.shard(&self.door.0).lock();
        let mut state = self.room.state.lock();
        state.waiting -= 1;
        if state.waiting == 0 && rooms.get(&self.door).is_some_and(|listed| Arc::ptr_eq(listed, &self.room)) {
            rooms.remove(&self.door);
        }
    }
}

impl Seat<'_> {
    fn open(&self, how: Open) {
        // Off the list first: whoever comes now asks anew.
        let mut rooms = self.rooms.shard(&self.door.0).lock();
        if rooms.get(&self.door).is_some_and(|listed| Arc::ptr_eq(listed, &self.room)) {
            rooms.remove(&self.door);
        }
        drop(rooms);
        self.room.state.lock().open = Some(how);
        self.room.bell.notify_waiters();
    }
}

/// Who leads. However it ends, another may lead afterwards.
struct Leads<'a>(&'a Room);

impl Drop for Leads<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_led = false;
        if state.open.is_none() {
            drop(state);
            // One who listens hears it, or the next who comes. Who was told and is dropped passes it on.
            self.0.bell.notify_one();
        }
    }
}

enum Turn {
    Go(Duration),
    Lead,
    Listen,
}

impl Room {
    fn turn(&self) -> Turn {
        let mut state = self.state.lock();
        match state.open {
            Some(Open::AtOnce) => Turn::Go(Duration::ZERO),
            Some(Open::InGroups) => {
                state.gone += 1;
                Turn::Go((PAUSE * ((state.gone - 1) / GROUP)).min(LONGEST))
            }
            None if state.is_led => Turn::Listen,
            None => {
                state.is_led = true;
                Turn::Lead
            }
        }
    }
}

pub(super) async fn wait(near: &Near, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
    if limit.is_zero() || near.copies.has(at) {
        return Ok(());
    }
    let deadline = Instant::now() + limit.min(ENDLESS);
    let seat = near.rooms.enter((*at, seen));
    loop {
        let bell = seat.room.bell.notified();
        tokio::pin!(bell);
        // Before looking, so that nothing that rings after it is missed.
        bell.as_mut().enable();
        match seat.room.turn() {
            Turn::Go(held_back) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if !held_back.is_zero() {
                    sleep(held_back.min(left)).await;
                }
                return Ok(());
            }
            Turn::Lead => {
                let leads = Leads(&seat.room);
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                let waited = near.store.wait(at, seen, left).await;
                if waited.is_ok() && Instant::now() >= deadline {
                    return Ok(());
                }
                // Dropped from here on, it hands over too: the next one's wait returns at once.
                let found = if waited.is_ok() { near.look(at).await } else { Ok(None) };
                let is_here = matches!(found, Ok(Some(Claim::Done(_)))) && near.copies.has(at);
                seat.open(if is_here { Open::AtOnce } else { Open::InGroups });
                drop(leads);
                return waited;
            }
            Turn::Listen => {
                tokio::select! {
                    () = &mut bell => {}
                    () = sleep_until(deadline) => return Ok(()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ibid::store::Memory;

    use super::{super::Copies, *};

    #[tokio::test(start_paused = true)]
    async fn rooms_leave_no_trace() {
        let near = Near::new(Arc::new(Memory::default()), Copies::default());
        for _ in 0..3 {
            wait(&near, &Address([7; 32]), Fence(1), Duration::from_secs(1)).await.unwrap();
            assert_eq!(near.rooms.len(), 0);
        }
        let seat = near.rooms.enter((Address([7; 32]), Fence(1)));
        assert_eq!(near.rooms.len(), 1);
        drop(seat);
        assert_eq!(near.rooms.len(), 0);
    }
}
