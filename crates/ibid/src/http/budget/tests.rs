use std::{future::poll_fn, time::Duration};

use tokio::time::advance;

use super::*;

fn budget(limit: u64) -> MemoryBudget {
    MemoryBudget::new(limit, TrustedProxies::loopback())
}

fn client(address: &str, connection: &PeerConnection) -> BudgetClient {
    let (peer, connection) = (address.parse().ok(), Some(connection.clone()));
    BudgetClient::new(&RequestSender { peer, connection, ..RequestSender::default() })
}

async fn is_evicted(reservation: &TransferReservation) -> bool {
    poll_fn(|cx| Poll::Ready(reservation.poll_evicted(cx).is_ready())).await
}

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn what_is_dropped_can_be_reserved_again() {
    let budget = budget(10);
    let first = budget.reserve(4).unwrap();
    assert!(budget.reserve(7).is_none());
    assert!(budget.reserve(6).is_some());
    let mut second = budget.reserve(1).unwrap();
    assert!(!second.grow(6) && second.grow(5) && budget.reserve(1).is_none());
    drop(second);
    assert!(budget.reserve(6).is_some());
    drop(first);
    assert!(budget.reserve(10).is_some());
}

#[tokio::test]
async fn answers_are_counted_beyond_the_limit() {
    let budget = budget(10);
    let mut running = budget.reserve(1).unwrap();
    running.count(100);
    assert!(budget.reserve(1).is_none());
    drop(running);
    let sending = budget.send(&BudgetClient::default());
    sending.count(100);
    assert!(budget.reserve(1).is_none());
    sending.release_sent(95);
    assert!(budget.reserve(5).is_some());
    drop(sending);
    assert!(budget.reserve(10).is_some());
}

#[tokio::test]
async fn one_connection_and_one_address_hold_a_part_of_it() {
    let budget = budget(64 * MIB);
    let connection = PeerConnection::default();
    let first = budget.begin_receive(&client("127.0.0.1", &connection));
    first.grow_to(16 * MIB).expect("a single body may use what is free");
    let second = budget.begin_receive(&client("127.0.0.1", &connection));
    assert_eq!(second.grow_to(1), Err(BudgetExhausted), "more than an eighth");
    let proxied = budget.begin_receive(&client("127.0.0.1", &PeerConnection::default()));
    proxied.grow_to(8 * MIB).expect("a trusted proxy has many connections");
    drop((first, second, proxied));

    let of = |address: &str| {
        let reservation = budget.begin_receive(&client(address, &PeerConnection::default()));
        reservation.grow_to(8 * MIB).map(|()| reservation)
    };
    let held = [of("192.0.2.1").unwrap(), of("192.0.2.1").unwrap()];
    assert!(of("192.0.2.1").is_err(), "more than a quarter");
    let other = of("192.0.2.2").unwrap();
    drop(held);
    assert!(of("192.0.2.1").is_ok());
    drop(other);
    let held = [of("2001:db8::1").unwrap(), of("2001:db8::2").unwrap()];
    assert!(of("2001:db8::3").is_err(), "a client has a whole /64");
    assert!(of("2001:db8:0:1::3").is_ok());
    drop(held);
    assert_eq!(budget.0.used.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn the_slowest_is_evicted_first_and_its_memory_is_free_at_once() {
    let budget = budget(64 * MIB);
    let begin = |bytes: u64| {
        let reservation = budget.begin_receive(&client("127.0.0.1", &PeerConnection::default()));
        reservation.grow_to(bytes).map(|()| reservation)
    };
    let [silent, slow, fast] = [begin(8 * MIB).unwrap(), begin(16 * MIB).unwrap(), begin(40 * MIB).unwrap()];
    assert!(begin(1).is_err(), "nobody is evicted as soon as it has begun");
    for _ in 0..20 {
        advance(Duration::from_millis(100)).await;
        slow.record_progress(1000);
        fast.record_progress(100 << 10);
    }
    let newcomer = begin(6 * MIB).unwrap();
    assert!(is_evicted(&silent).await);
    assert!(!is_evicted(&slow).await && !is_evicted(&fast).await);
    assert_eq!(silent.grow_to(9 * MIB), Err(BudgetExhausted), "what was evicted stays so");
    fast.grow_to(44 * MIB).expect("the slow one has to go");
    assert!(is_evicted(&slow).await);
    assert!(begin(40 * MIB).is_err(), "the fast one goes on");
    assert_eq!(newcomer.complete(), Ok(()));
    drop((silent, slow, fast, newcomer));
    assert_eq!(budget.0.used.load(Relaxed), 0);
    assert!(budget.0.transfers.lock().by_id.is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_nobody_reads_is_cut_for_another() {
    let budget = budget(16 * MIB);
    let cut = ResponseAbort::default();
    let client = BudgetClient::new(&RequestSender { abort: Some(cut.clone()), ..RequestSender::default() });
    let unread = budget.answer(&client, 16 * MIB).await.unwrap();
    let begun = Instant::now();
    let next = budget.answer(&BudgetClient::default(), MIB).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(poll_fn(|cx| Poll::Ready(cut.poll_aborted(cx))).await.is_ready());
    assert!(is_evicted(&unread).await);
    let unread = unread.in_flight_counter();
    unread.count(MIB);
    drop(next);
    assert_eq!(budget.0.used.load(Relaxed), 0, "an answer that was cut is not counted");
}

#[tokio::test(start_paused = true)]
async fn clients_that_fill_the_memory_again_and_again_do_not_keep_others_out() {
    let budget = budget(16 * MIB);
    let greedy: Vec<_> = (0..8).map(|_| client("127.0.0.1", &PeerConnection::default())).collect();
    // Each client has more responses waiting than it may use, and reads none.
    for client in greedy.iter().flat_map(|client| vec![client.clone(); 50]) {
        let budget = budget.clone();
        tokio::spawn(async move {
            while let Ok(unread) = budget.answer(&client, MIB).await {
                poll_fn(|cx| unread.poll_evicted(cx)).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    for _ in 0..20 {
        let begun = Instant::now();
        let other = budget.answer(&client("127.0.0.1", &PeerConnection::default()), MIB).await;
        assert!(other.is_ok() && begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
        tokio::time::sleep(Duration::from_millis(130)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn silent_bodies_hold_little_and_are_evicted() {
    let budget = budget(MIB);
    let silent: Vec<_> = (0..256)
        .map(|_| {
            let reservation = budget.begin_receive(&BudgetClient::default());
            reservation.grow_to(0).unwrap();
            reservation
        })
        .collect();
    let newcomer = budget.begin_receive(&BudgetClient::default());
    assert_eq!(newcomer.grow_to(1), Err(BudgetExhausted));
    advance(EVICTION_GRACE).await;
    newcomer.grow_to(64 << 10).unwrap();
    let mut evicted = 0;
    for reservation in &silent {
        evicted += usize::from(is_evicted(reservation).await);
    }
    assert_eq!(evicted, 16, "no more than needed");
}
