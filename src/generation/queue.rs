//! The queue of waiting jobs: clients take turns, and each client's own jobs keep their order.

use std::collections::{BTreeMap, VecDeque};

/// Waiting entries by client. It has no limit of its own: [`Handle::submit`](super::Handle::submit) refuses what is too many.
pub struct Queue<T> {
    clients: BTreeMap<u64, VecDeque<T>>,
    /// The client whose entry was taken last.
    last: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Queue<T> {
        Queue { clients: BTreeMap::new(), last: 0 }
    }
}

impl<T> Queue<T> {
    /// Waiting entries of all clients.
    pub fn len(&self) -> usize {
        self.clients.values().map(VecDeque::len).sum()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// Whether some client's oldest entry is as `wanted`.
    pub fn has_oldest(&self, wanted: impl Fn(&T) -> bool) -> bool {
        self.clients.values().any(|waiting| waiting.front().is_some_and(&wanted))
    }

    /// All entries, of one client after the other.
    pub fn entries_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.clients.values_mut().flatten()
    }

    /// Adds an entry behind the others of its client.
    pub fn push(&mut self, client: u64, entry: T) {
        self.clients.entry(client).or_default().push_back(entry);
    }

    /// Clients that have an entry.
    pub fn clients(&self) -> usize {
        self.clients.len()
    }

    /// The oldest entry of this client.
    pub fn oldest(&self, client: u64) -> Option<&T> {
        self.clients.get(&client)?.front()
    }

    /// Takes the oldest entry of the client whose turn is next; `None` if nothing waits.
    pub fn pop(&mut self) -> Option<T> {
        self.pop_of(|_, _| true)
    }

    /// The same of those clients that `may` have a turn, by their oldest entry.
    pub fn pop_of(&mut self, may: impl Fn(u64, &T) -> bool) -> Option<T> {
        let after = self.last.checked_add(1).map(|next| self.clients.range(next..)).into_iter().flatten();
        let mut next = after.chain(&self.clients);
        let may =
            |(client, waiting): &(&u64, &VecDeque<T>)| waiting.front().is_some_and(|oldest| may(**client, oldest));
        let client = *next.find(may)?.0;
        let waiting = self.clients.get_mut(&client)?;
        let entry = waiting.pop_front();
        if waiting.is_empty() {
            self.clients.remove(&client);
        }
        self.last = client;
        entry
    }

    /// Removes every entry for which `gone` is true. Returns how many those were.
    pub fn purge(&mut self, mut gone: impl FnMut(&T) -> bool) -> usize {
        let before = self.len();
        self.clients.values_mut().for_each(|waiting| waiting.retain(|entry| !gone(entry)));
        self.clients.retain(|_, waiting| !waiting.is_empty());
        before - self.len()
    }

    /// Takes all entries, in the order in which they would be served.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        std::iter::from_fn(|| self.pop())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_with_many_jobs_does_not_hold_back_one_with_one() {
        let mut queue = Queue::default();
        (0..4).for_each(|i| queue.push(7, ("seven", i)));
        queue.push(9, ("nine", 0));
        queue.push(3, ("three", 0));
        assert_eq!(queue.pop(), Some(("three", 0)));
        assert_eq!(queue.pop(), Some(("seven", 0)));
        queue.push(3, ("three", 1));
        let rest: Vec<_> = queue.drain().collect();
        assert_eq!(rest, [("nine", 0), ("three", 1), ("seven", 1), ("seven", 2), ("seven", 3)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_client_that_may_not_is_passed_over_and_keeps_its_entries() {
        let mut queue = Queue::default();
        [u64::MAX, 3, 7].into_iter().for_each(|client| queue.push(client, client));
        assert_eq!((queue.clients(), queue.oldest(7), queue.oldest(4)), (3, Some(&7), None));
        assert_eq!(queue.pop_of(|client, _| client == u64::MAX), Some(u64::MAX));
        assert_eq!(queue.pop_of(|client, _| client != 3), Some(7));
        assert_eq!(queue.pop_of(|client, _| client != 3), None);
        assert_eq!(queue.pop(), Some(3));
    }

    #[test]
    fn what_is_gone_is_taken_out_wherever_it_stands() {
        let mut queue = Queue::default();
        (0..10u64).for_each(|i| queue.push(i % 3, i));
        assert_eq!(queue.purge(|i| i % 2 == 0), 5);
        assert_eq!(queue.len(), 5);
        assert!(queue.drain().all(|i| i % 2 == 1));
    }
}
