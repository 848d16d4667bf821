//! A queue from one thread to another that never waits and never allocates: a ring of items that were made beforehand.
//!
//! The engine sends observations to the scheduler and takes decisions from it (DynamicInfer 4.2.1). Neither may wait for the other, so
//! a full ring refuses an item and the sender counts it. Items are filled and used where they lie in the ring, so their buffers are
//! reused.
//!
//! Only the sender changes `sent`, only the receiver `taken`. An item belongs to the sender until `sent` says that it is filled,
//! and to the receiver from then on until `taken` says that it is free: each is stored with Release after the last access to the
//! item and loaded with Acquire before the first.

use super::sync::{Arc, AtomicUsize, Ordering, UnsafeCell};

/// Keeps the counters of the two threads on different cache lines.
#[repr(align(128))]
struct Padded(AtomicUsize);

struct Ring<T> {
    /// Number of items taken since the beginning; `sent` counts those sent. Both wrap.
    taken: Padded,
    sent: Padded,
    items: Box<[UnsafeCell<T>]>,
}

// SAFETY: only one thread at a time accesses an item, see the module's text; the items go from thread to thread.
unsafe impl<T: Send> Sync for Ring<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Ring<T> {}

/// The end of an exchange that sends. There is one.
pub struct Sender<T> {
    ring: Arc<Ring<T>>,
    /// The value of the ring's `sent`, which nothing else changes.
    sent: usize,
}

/// The end of an exchange that receives. There is one.
pub struct Receiver<T> {
    ring: Arc<Ring<T>>,
    taken: usize,
}

/// An exchange with room for `capacity` items, at least one. Nothing more is allocated later.
pub fn exchange<T: Default>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    exchange_of(capacity, T::default)
}

/// As [`exchange`], with items that `make` makes.
pub fn exchange_of<T>(capacity: usize, mut make: impl FnMut() -> T) -> (Sender<T>, Receiver<T>) {
    let items = (0..capacity.max(1)).map(|_| UnsafeCell::new(make())).collect();
    let ring = Ring { taken: Padded(AtomicUsize::new(0)), sent: Padded(AtomicUsize::new(0)), items };
    let ring = Arc::new(ring);
    (Sender { ring: ring.clone(), sent: 0 }, Receiver { ring, taken: 0 })
}

impl<T> Sender<T> {
    /// Lets `fill` write the next item over one that was sent earlier, and sends it. Returns `false`, without calling `fill`, if there is
    /// no room.
    #[inline]
    pub fn try_send(&mut self, fill: impl FnOnce(&mut T)) -> bool {
        let Ring { taken, sent, items } = &*self.ring;
        if self.sent.wrapping_sub(taken.0.load(Ordering::Acquire)) == items.len() {
            return false;
        }
        // SAFETY: the receiver is done with the item, and does not look at it before `sent` is stored.
        items[self.sent % items.len()].with_mut(|item| fill(unsafe { &mut *item }));
        self.sent = self.sent.wrapping_add(1);
        sent.0.store(self.sent, Ordering::Release);
        true
    }
}

impl<T> Receiver<T> {
    /// Lets `take` use the oldest item, which it may swap for another, and gives it back to the sender; `None` if there is none.
    #[inline]
    pub fn try_take<R>(&mut self, take: impl FnOnce(&mut T) -> R) -> Option<R> {
        let Ring { taken, sent, items } = &*self.ring;
        if self.taken == sent.0.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: the sender has filled the item, and does not touch it before `taken` is stored.
        let result = items[self.taken % items.len()].with_mut(|item| take(unsafe { &mut *item }));
        self.taken = self.taken.wrapping_add(1);
        taken.0.store(self.taken, Ordering::Release);
        Some(result)
    }
}
