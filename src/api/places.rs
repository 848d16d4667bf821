//! Places that clients take in turn: for work that takes a core, or memory, and of which only so much is done at once.

use super::ApiError;
use crate::generation::queue::Queue;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Some places, and what waits for one. The last free place is kept for a client that holds none, so one client alone never holds all of
/// several.
#[derive(Clone)]
pub struct Places(Arc<Mutex<State>>);

struct State {
    free: usize,
    /// Places that each client holds, where it holds any.
    held: BTreeMap<u64, usize>,
    /// What waits: its client, and where it is given its place.
    waiting: Queue<(u64, oneshot::Sender<Place>)>,
    /// How many may wait.
    most: usize,
}

/// A place that is taken; it is given back when this is dropped.
pub struct Place {
    places: Places,
    client: u64,
}

impl State {
    /// Whether a client may take a place now. A single place goes to the first client.
    fn may(&self, client: u64) -> bool {
        may(self.free, &self.held, client)
    }

    fn take(&mut self, client: u64) {
        self.free -= 1;
        *self.held.entry(client).or_default() += 1;
    }
}

fn may(free: usize, held: &BTreeMap<u64, usize>, client: u64) -> bool {
    free > 1 || free == 1 && !held.contains_key(&client)
}

impl Places {
    /// `count` places, 1 or more, for which at most `most` may wait.
    pub fn new(count: usize, most: usize) -> Places {
        let state = State { free: count, held: BTreeMap::new(), waiting: Queue::default(), most };
        Places(Arc::new(Mutex::new(state)))
    }

    /// How many wait now.
    pub fn waiting(&self) -> usize {
        let mut state = self.0.lock();
        state.waiting.purge(|(_, waits)| waits.is_closed());
        state.waiting.len()
    }

    /// A place, once there is one for this client; clients that wait take turns. Dropping the future gives up the wait.
    ///
    /// # Errors
    /// As many wait already as may: that many.
    pub async fn take(&self, client: u64) -> Result<Place, usize> {
        let wait = {
            let mut state = self.0.lock();
            if state.may(client) {
                state.take(client);
                return Ok(Place { places: self.clone(), client });
            }
            state.waiting.purge(|(_, waits)| waits.is_closed());
            if state.waiting.len() >= state.most {
                return Err(state.most);
            }
            let (give, wait) = oneshot::channel();
            state.waiting.push(client, (client, give));
            wait
        };
        // Only these places have the other end, and they live as long as `self`.
        Ok(wait.await.expect("every wait ends with a place"))
    }

    /// Gives free places to what waits for them.
    fn give(&self) {
        loop {
            let (give, place) = {
                let state = &mut *self.0.lock();
                let (free, held) = (state.free, &state.held);
                let next = state.waiting.pop_of(|client, _| may(free, held, client));
                let Some((client, give)) = next else { return };
                state.take(client);
                (give, Place { places: self.clone(), client })
            };
            // What has given up its wait gives the place back, by dropping it here.
            drop(give.send(place));
        }
    }
}

impl Place {
    /// Runs `work` on a thread that may take long; it keeps the place, and so its memory, to its end, even if nothing waits for it any more.
    ///
    /// # Errors
    /// Those of `work`; 500 if it panics.
    pub async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let working = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(self);
            done
        });
        working.await.map_err(|_| ApiError::new(500, "the request could not be processed"))?
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        {
            let state = &mut *self.places.0.lock();
            state.free += 1;
            if let Some(held) = state.held.get_mut(&self.client) {
                *held -= 1;
                if *held == 0 {
                    state.held.remove(&self.client);
                }
            }
            state.waiting.purge(|(_, waits)| waits.is_closed());
        }
        self.places.give();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    type Wait = Pin<Box<dyn Future<Output = Result<Place, usize>>>>;

    fn wait(places: &Places, client: u64) -> Wait {
        let places = places.clone();
        Box::pin(async move { places.take(client).await })
    }

    fn poll(wait: &mut Wait) -> Option<Place> {
        match wait.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(place) => Some(place.expect("few enough wait")),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_client_that_asks_for_all_places_leaves_one_and_clients_that_wait_take_turns() {
        let places = Places::new(3, 8);
        let mut greedy: Vec<Wait> = (0..5).map(|_| wait(&places, 1)).collect();
        let mut held: Vec<Place> = greedy.iter_mut().filter_map(poll).collect();
        assert_eq!((held.len(), places.waiting()), (2, 3));
        let other = poll(&mut wait(&places, 2)).expect("a place was left for it");
        // Now all are taken; two more clients wait, behind three of the first one's.
        let mut third = wait(&places, 3);
        let mut second = wait(&places, 2);
        assert!(poll(&mut third).is_none() && poll(&mut second).is_none());
        drop(held.pop());
        let third = poll(&mut third).expect("it holds none, and its turn comes before the second of any");
        drop(other);
        let second = poll(&mut second).expect("it holds none any more");
        drop((held, third, second));
        // Two of the first client's, while another could always come in.
        let mut left: Vec<Wait> = greedy.drain(2..).collect();
        let given: Vec<Place> = left.drain(..2).filter_map(|mut wait| poll(&mut wait)).collect();
        assert_eq!((given.len(), places.waiting()), (2, 1));
        assert!(poll(&mut left[0]).is_none());
        drop(given);
        assert!(poll(&mut left[0]).is_some());
    }

    #[test]
    fn what_gives_up_its_wait_holds_up_nothing_and_too_many_are_refused() {
        let places = Places::new(1, 2);
        let place = poll(&mut wait(&places, 1)).unwrap();
        let (mut gone, mut waits) = (wait(&places, 2), wait(&places, 3));
        assert!(poll(&mut gone).is_none() && poll(&mut waits).is_none());
        let refused = wait(&places, 4).as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(refused, Poll::Ready(Err(2))));
        drop(gone);
        assert_eq!(places.waiting(), 1);
        drop(place);
        // It was given the place and goes before it takes it.
        drop(waits);
        assert!(poll(&mut wait(&places, 1)).is_some());
    }
}
