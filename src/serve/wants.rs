//! Models that requests wait for, and the order in which they are loaded.

use super::loader::Offered;
use crate::api::ApiError;
use crate::clock::Duration;
use crate::settings::Settings;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::watch;

/// A model that requests wait for.
pub struct Want {
    /// The model.
    pub offered: Offered,
    /// What it is loaded with.
    pub settings: Settings,
    waiting: watch::Sender<usize>,
    outcome: watch::Sender<Option<Result<(), ApiError>>>,
}

impl Want {
    /// Returns once no request waits for it.
    pub async fn is_alone(&self) {
        // The sender lives as long as `self`.
        let _ = self.waiting.subscribe().wait_for(|&waiting| waiting == 0).await;
    }
}

/// A request that waits for a model; it waits until this is dropped.
pub struct Waiter<'a> {
    want: Arc<Want>,
    wants: &'a Wants,
}

impl Waiter<'_> {
    /// Waits until the model was loaded, or is known not to be. Where it was loaded, it stays until this is dropped.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub async fn outcome(&self) -> Result<(), ApiError> {
        let mut outcome = self.want.outcome.subscribe();
        // The sender lives as long as `self.want`.
        outcome.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone()).unwrap_or(Ok(()))
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.want.waiting.send_modify(|waiting| *waiting -= 1);
        self.wants.changed.send_modify(|_| ());
    }
}

/// What is to be done for the requests that wait.
pub enum Next {
    /// None waits.
    Nothing,
    /// No model may be loaded for so long.
    Wait(Duration),
    /// This one is to be loaded.
    Load(Arc<Want>),
}

/// All models that requests wait for, in the order in which they were asked for.
pub struct Wants {
    queue: Mutex<Queue>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Queue {
    wants: Vec<Arc<Want>>,
    /// Whether a task sees to it that they are loaded.
    served: bool,
}

impl Default for Wants {
    fn default() -> Wants {
        Wants { queue: Mutex::default(), changed: watch::channel(()).0 }
    }
}

impl Wants {
    /// Has a request wait for a model; true if the caller must begin to serve the queue ([`Wants::next`]).
    ///
    /// # Errors
    /// `limit` requests wait already.
    pub fn join(&self, offered: Offered, settings: Settings, limit: usize) -> Result<(Waiter<'_>, bool), ApiError> {
        let mut queue = self.queue.lock();
        let waiting: usize = queue.wants.iter().map(|want| *want.waiting.borrow()).sum();
        if waiting >= limit {
            let message = format!("{limit} requests wait for other models; retry later, or raise serve.queue");
            return Err(ApiError::new(429, message).code("queue_full").retry_after(1));
        }
        let found = queue.wants.iter().find(|want| want.offered.origin == offered.origin).cloned();
        let want = found.unwrap_or_else(|| {
            let (waiting, outcome) = (watch::channel(0).0, watch::channel(None).0);
            let want = Arc::new(Want { offered, settings, waiting, outcome });
            queue.wants.push(want.clone());
            want
        });
        want.waiting.send_modify(|waiting| *waiting += 1);
        let begins = !std::mem::replace(&mut queue.served, true);
        drop(queue);
        self.changed.send_modify(|_| ());
        Ok((Waiter { want, wants: self }, begins))
    }

    /// Whether a request waits.
    pub fn any(&self) -> bool {
        self.queue.lock().wants.iter().any(|want| *want.waiting.borrow() > 0)
    }

    /// Sees each change of what is waited for.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// What is to be done next: the oldest model is loaded that need not wait, of which `wait` says how long. After [`Next::Nothing`] the
    /// next request that joins begins anew.
    pub fn next(&self, wait: impl Fn(&Offered) -> Duration) -> Next {
        let mut queue = self.queue.lock();
        queue.wants.retain(|want| *want.waiting.borrow() > 0);
        let times = queue.wants.iter().map(|want| (wait(&want.offered), want));
        match times.min_by_key(|(time, _)| *time) {
            None => {
                queue.served = false;
                Next::Nothing
            }
            Some((Duration::ZERO, want)) => Next::Load(want.clone()),
            Some((time, _)) => Next::Wait(time),
        }
    }

    /// Tells the requests that wait for a model what has become of it, and forgets it.
    pub fn done(&self, want: &Arc<Want>, outcome: Result<(), ApiError>) {
        self.queue.lock().wants.retain(|one| !Arc::ptr_eq(one, want));
        want.outcome.send_replace(Some(outcome));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(name: &str) -> Offered {
        Offered { name: name.into(), origin: name.into(), source: name.into(), bytes: 0, modified: 0 }
    }

    fn settings() -> Settings {
        Settings::read(&[], None, |_| None).unwrap()
    }

    #[test]
    fn models_are_loaded_in_the_order_of_their_first_requests_save_those_that_must_wait() {
        let wants = Wants::default();
        let join = |name| wants.join(offered(name), settings(), 4).map_err(|e| e.status);
        let (first, begins) = join("a").ok().unwrap();
        assert!(begins);
        let (second, again) = join("b").ok().unwrap();
        let third = join("a").ok().unwrap().0;
        assert!(!again && Arc::ptr_eq(&first.want, &third.want));
        let fourth = join("c").ok().unwrap().0;
        assert_eq!(join("a").err(), Some(429));
        let seconds =
            |a, b, c| move |one: &Offered| Duration::from_secs([a, b, c][usize::from(one.name.as_bytes()[0] - b'a')]);
        let loads = |next| match next {
            Next::Load(want) => want.offered.name.clone(),
            Next::Wait(time) => format!("{time:?}"),
            Next::Nothing => "nothing".into(),
        };
        assert_eq!(loads(wants.next(seconds(0, 0, 0))), "a");
        assert_eq!(loads(wants.next(seconds(5, 0, 0))), "b");
        assert_eq!(loads(wants.next(seconds(5, 7, 6))), "5s");
        // A request that goes takes its model with it, if it was the last one that waits for it.
        drop(first);
        drop(second);
        assert_eq!(loads(wants.next(seconds(5, 0, 6))), "5s");
        wants.done(&third.want, Ok(()));
        assert_eq!(loads(wants.next(seconds(0, 0, 6))), "6s");
        drop(fourth);
        assert_eq!(loads(wants.next(seconds(0, 0, 0))), "nothing");
        assert!(join("b").ok().unwrap().1, "the next one begins anew");
    }
}
