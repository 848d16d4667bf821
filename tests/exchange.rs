//! The ring between the engine and the scheduler, under every order of the two threads' steps (loom), and the ways to break it
//! that loom has to notice: a checker that passes a broken ring has shown nothing about the sound one.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The file itself, compiled against the `sync` below.
#[path = "../src/cache/exchange.rs"]
mod exchange;

/// loom's atomics, with a flaw if the test asked for one.
mod sync {
    use super::{FLAW, Flaw};
    pub use loom::cell::UnsafeCell;
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::Ordering;
    use std::cell::Cell;

    thread_local! {
        /// The ring makes `taken` first, then `sent`.
        static MADE: Cell<usize> = const { Cell::new(0) };
    }

    pub struct AtomicUsize {
        inner: loom::sync::atomic::AtomicUsize,
        is_sent: bool,
    }

    impl AtomicUsize {
        pub fn new(value: usize) -> AtomicUsize {
            let made = MADE.replace(MADE.get() + 1);
            AtomicUsize { inner: loom::sync::atomic::AtomicUsize::new(value), is_sent: made % 2 == 1 }
        }

        pub fn load(&self, order: Ordering) -> usize {
            // Relaxed: the owner looks at its own counter, before it touches the place.
            let own = order == Ordering::Relaxed;
            match (FLAW.get(), self.is_sent) {
                (Flaw::SentTooEarly, true) | (Flaw::FreeTooEarly, false) if own => {
                    let value = self.inner.load(order);
                    self.inner.store(value.wrapping_add(1), Ordering::Release);
                    value
                }
                (Flaw::SentSeenRelaxed, true) | (Flaw::FreeSeenRelaxed, false) => self.inner.load(Ordering::Relaxed),
                (Flaw::OneTooMany, false) if !own => self.inner.load(order).wrapping_add(1),
                _ => self.inner.load(order),
            }
        }

        pub fn store(&self, value: usize, order: Ordering) {
            let order = match (FLAW.get(), self.is_sent) {
                (Flaw::SentRelaxed, true) | (Flaw::FreeRelaxed, false) => Ordering::Relaxed,
                _ => order,
            };
            self.inner.store(value, order);
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
}

/// Sends 1, 2, 3 through a ring of `capacity`, dropping what does not fit; what arrives is whole, in order and not invented.
fn model(capacity: usize) {
    const ITEMS: u32 = 3;
    loom::model(move || {
        // The number twice, so that half an item shows.
        let (mut sender, mut receiver) = exchange::exchange::<(u32, u32)>(capacity);
        let other =
            loom::thread::spawn(move || (1..=ITEMS).filter(|&i| sender.try_send(|item| *item = (i, i))).count());
        let mut last = 0;
        let mut arrived = 0;
        let mut take = |receiver: &mut exchange::Receiver<(u32, u32)>| {
            let Some((a, b)) = receiver.try_take(|item| std::mem::take(item)) else { return false };
            assert!(a == b && a > last && a <= ITEMS, "({a}, {b}) came after {last}");
            (last, arrived) = (a, arrived + 1);
            true
        };
        for _ in 0..2 {
            take(&mut receiver);
        }
        let sent = other.join().unwrap();
        for _ in 0..=ITEMS {
            take(&mut receiver);
        }
        assert_eq!(arrived, sent, "items were lost");
        assert!(sent >= capacity, "a free place was refused");
    });
}

#[test]
fn every_interleaving_hands_over_whole_items_in_order() {
    model(1);
    model(2);
}

#[test]
fn every_broken_ring_is_noticed() {
    // The failures that are wanted need not be printed. Only this thread's: the other test prints its own.
    let before = std::panic::take_hook();
    let here = std::thread::current().id();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() != here {
            before(info);
        }
    }));
    for flaw in FLAWS {
        FLAW.set(flaw);
        let noticed = [1, 2].iter().any(|&capacity| catch_unwind(AssertUnwindSafe(|| model(capacity))).is_err());
        FLAW.set(Flaw::None);
        assert!(noticed, "{flaw:?} goes unnoticed");
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
