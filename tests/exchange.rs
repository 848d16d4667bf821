//! The ring between the engine and the scheduler, under every order of the two threads' steps (loom), and the ways to break it
//! that loom has to notice: a checker that passes a broken ring has shown nothing about the sound one.

use std::cell::Cell;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The file itself, compiled against the `sync` below.
#[path = "../src/cache/exchange.rs"]
mod exchange;

/// loom's atomics, with a flaw if the test asked for one.
mod sync {
    use super::{CAPACITY, FLAW, Flaw};
    pub use loom::cell::UnsafeCell;
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::Ordering;
    use std::cell::RefCell;
    use std::sync::atomic::AtomicUsize as Plain;
    use std::sync::{Arc as Shared, Weak};

    thread_local! {
        /// The ring's counters as it makes them: `taken`, then `sent`.
        static MADE: RefCell<Vec<Weak<Counter>>> = const { RefCell::new(Vec::new()) };
    }

    struct Counter {
        inner: loom::sync::atomic::AtomicUsize,
        /// What was stored last; only its owner looks.
        last: Plain,
        is_sent: bool,
    }

    pub struct AtomicUsize(Shared<Counter>);

    /// The other counter of the last ring.
    fn other(of: &Counter) -> Shared<Counter> {
        MADE.with_borrow(|made| made[made.len() - 1 - usize::from(of.is_sent)].upgrade()).expect("the ring is alive")
    }

    impl AtomicUsize {
        pub fn new(value: usize) -> AtomicUsize {
            MADE.with_borrow_mut(|made| {
                let (inner, last) = (loom::sync::atomic::AtomicUsize::new(value), Plain::new(value));
                let counter = Shared::new(Counter { inner, last, is_sent: made.len() % 2 == 1 });
                made.push(Shared::downgrade(&counter));
                AtomicUsize(counter)
            })
        }

        pub fn load(&self, order: Ordering) -> usize {
            let Counter { inner, is_sent, .. } = &*self.0;
            let own = other(&self.0);
            let last = own.last.load(Ordering::Relaxed);
            match (FLAW.get(), *is_sent) {
                (Flaw::SentSeenRelaxed, true) | (Flaw::FreeSeenRelaxed, false) => inner.load(Ordering::Relaxed),
                (Flaw::OneTooMany, false) => inner.load(order).wrapping_add(1),
                // The place is touched after the load and before the store: to store now is to store too early.
                (Flaw::SentTooEarly, false) => {
                    let taken = inner.load(order);
                    if last - taken != CAPACITY.get() {
                        own.inner.store(last + 1, Ordering::Release);
                    }
                    taken
                }
                (Flaw::FreeTooEarly, true) => {
                    let sent = inner.load(order);
                    if last != sent {
                        own.inner.store(last + 1, Ordering::Release);
                    }
                    sent
                }
                _ => inner.load(order),
            }
        }

        pub fn store(&self, value: usize, order: Ordering) {
            let order = match (FLAW.get(), self.0.is_sent) {
                (Flaw::SentRelaxed, true) | (Flaw::FreeRelaxed, false) => Ordering::Relaxed,
                _ => order,
            };
            self.0.last.store(value, Ordering::Relaxed);
            self.0.inner.store(value, order);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    None,
    /// Published before it is written; given back before it was read.
    SentTooEarly,
    FreeTooEarly,
    /// Relaxed where Release is needed.
    SentRelaxed,
    FreeRelaxed,
    /// Relaxed where Acquire is needed.
    SentSeenRelaxed,
    FreeSeenRelaxed,
    /// The ring counts as full with one item more than it has places.
    OneTooMany,
}

const FLAWS: [Flaw; 7] = [
    Flaw::SentTooEarly,
    Flaw::FreeTooEarly,
    Flaw::SentRelaxed,
    Flaw::FreeRelaxed,
    Flaw::SentSeenRelaxed,
    Flaw::FreeSeenRelaxed,
    Flaw::OneTooMany,
];

thread_local! {
    // loom runs a model's threads as fibres of the test's own thread.
    static FLAW: Cell<Flaw> = const { Cell::new(Flaw::None) };
    static CAPACITY: Cell<usize> = const { Cell::new(0) };
}

/// Sends 1, 2, 3 through a ring of `capacity`, dropping what does not fit; what arrives is whole, in order and not invented. Returns
/// the number of orders that were tried.
fn model(capacity: usize) -> usize {
    const ITEMS: u32 = 3;
    CAPACITY.set(capacity);
    let tried = Arc::new(AtomicUsize::new(0));
    let count = tried.clone();
    loom::model(move || {
        count.fetch_add(1, Ordering::Relaxed);
        // The number twice, so that half an item shows.
        let (mut sender, mut receiver) = exchange::exchange::<(u32, u32)>(capacity);
        let other =
            loom::thread::spawn(move || (1..=ITEMS).filter(|&i| sender.try_send(|item| *item = (i, i))).count());
        let mut last = 0;
        let mut arrived = 0;
        let mut take = || {
            let Some((a, b)) = receiver.try_take(std::mem::take) else { return };
            assert!(a == b && a > last && a <= ITEMS, "({a}, {b}) came after {last}");
            (last, arrived) = (a, arrived + 1);
        };
        (0..ITEMS).for_each(|_| take());
        let sent = other.join().unwrap();
        (0..ITEMS).for_each(|_| take());
        assert_eq!(arrived, sent, "items were lost");
        assert!(sent >= capacity, "a free place was refused");
    });
    tried.load(Ordering::Relaxed)
}

/// Says which flaw to build in; for the processes that [`every_broken_ring_is_noticed`] starts.
const FLAW_VARIABLE: &str = "EXCHANGE_FLAW";

#[test]
fn every_interleaving_hands_over_whole_items_in_order() {
    let name = std::env::var(FLAW_VARIABLE).unwrap_or_default();
    FLAW.set(FLAWS.into_iter().find(|flaw| format!("{flaw:?}") == name).unwrap_or(Flaw::None));
    for capacity in [1, 2] {
        let tried = model(capacity);
        println!("{tried} orders of a ring of {capacity}");
        assert!(tried > 100, "loom tried only {tried} orders");
    }
}

/// Each in a process of its own: loom may abort when a model fails.
#[test]
fn every_broken_ring_is_noticed() {
    let run = |flaw: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "every_interleaving_hands_over_whole_items_in_order", "--nocapture"]);
        let output = child.env(FLAW_VARIABLE, flaw).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert!(run("None").0, "the sound ring fails");
    for flaw in FLAWS {
        let (passes, said) = run(&format!("{flaw:?}"));
        assert!(!passes, "{flaw:?} goes unnoticed");
        // By loom itself, or by what arrived.
        assert!(said.contains("Causality violation") || said.contains("came after"), "{flaw:?}: {said}");
    }
}

/// The same source with the real atomics, at full speed.
#[test]
fn two_real_threads_lose_nothing_that_was_accepted() {
    use dynamicinfer::cache::exchange::exchange;
    const ITEMS: u64 = 300_000;
    let (mut sender, mut receiver) = exchange::<[u64; 9]>(7);
    let sending = std::thread::spawn(move || {
        let mut refused = 0u64;
        for i in 1..=ITEMS {
            while !sender.try_send(|item| item.fill(i)) {
                refused += 1;
                std::thread::yield_now();
            }
        }
        refused
    });
    for i in 1..=ITEMS {
        let item = loop {
            match receiver.try_take(|item| *item) {
                Some(item) => break item,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(item, [i; 9]);
    }
    sending.join().unwrap();
    assert!(receiver.try_take(|_| ()).is_none());
}

#[test]
fn a_full_ring_refuses_and_calls_nothing() {
    use dynamicinfer::cache::exchange::exchange;
    let (mut sender, mut receiver) = exchange::<Vec<u32>>(2);
    for round in 0..5u32 {
        assert!(sender.try_send(|item| item.push(round)));
        assert!(sender.try_send(|item| item.push(round)));
        assert!(!sender.try_send(|_| panic!("there is no room")));
        // An item keeps its room: it is used where it lies.
        let swapped = receiver.try_take(|item| item.len()).unwrap();
        assert_eq!(swapped, round as usize + 1);
        assert_eq!(receiver.try_take(|item| item.last().copied()), Some(Some(round)));
        assert!(receiver.try_take(|_| ()).is_none());
    }
}
