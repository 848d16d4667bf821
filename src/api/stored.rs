//! Answers of `/v1/responses` that are kept for a while, so that a conversation goes on from `previous_response_id`.

use super::items::InputItem;
use crate::clock::{Duration, Instant};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a value or an item takes beside its texts, bytes: a guess that is not below the truth for short ones.
const BESIDE: u64 = 256;

/// One request and its answer, and the turn that it followed. It is held by those that follow it, too.
pub struct Turn {
    before: Option<Arc<Turn>>,
    /// The request's items, then the answer's.
    items: Vec<InputItem>,
    bytes: u64,
    all: Arc<AtomicU64>,
}

impl Turn {
    /// The items of the conversation up to here, in order.
    pub fn conversation(&self) -> Vec<InputItem> {
        let mut turns = vec![self];
        while let Some(before) = turns.last().and_then(|turn| turn.before.as_deref()) {
            turns.push(before);
        }
        turns.into_iter().rev().flat_map(|turn| turn.items.iter().cloned()).collect()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
        // One after the other: a conversation of many turns is a long chain.
        let mut before = self.before.take();
        while let Some(mut turn) = before.and_then(Arc::into_inner) {
            before = turn.before.take();
        }
    }
}

struct Kept {
    owner: u64,
    turn: Arc<Turn>,
    /// The response object.
    text: Arc<str>,
    until: Instant,
    /// When it was made or asked for last, as a number that rises.
    used: u64,
}

#[derive(Default)]
struct Answers {
    by_id: HashMap<String, Kept>,
    uses: u64,
}

/// The answers that are kept, within a number of bytes and a time.
pub struct StoredResponses {
    answers: Mutex<Answers>,
    all: Arc<AtomicU64>,
    max_bytes: u64,
    keep: Duration,
}

impl StoredResponses {
    /// None yet; each is kept for `keep` after it was made, and fewer where they would take more than `max_bytes`. 0 bytes keep none.
    pub fn new(max_bytes: u64, keep: Duration) -> StoredResponses {
        StoredResponses { answers: Mutex::default(), all: Arc::default(), max_bytes, keep }
    }

    /// Keeps none.
    pub fn none() -> StoredResponses {
        StoredResponses::new(0, Duration::ZERO)
    }

    /// Whether any are kept.
    pub fn keeps(&self) -> bool {
        self.max_bytes > 0
    }

    /// Bytes that the kept conversations take, about.
    pub fn bytes(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    /// The turn that ended with the answer `id`; `None` if `owner` has none that is kept at `now`.
    pub fn turn(&self, id: &str, owner: u64, now: Instant) -> Option<Arc<Turn>> {
        self.with(id, owner, now, |kept| kept.turn.clone())
    }

    /// The response object `id`; `None` as for [`StoredResponses::turn`].
    pub fn object(&self, id: &str, owner: u64, now: Instant) -> Option<Arc<str>> {
        self.with(id, owner, now, |kept| kept.text.clone())
    }

    fn with<T>(&self, id: &str, owner: u64, now: Instant, read: impl FnOnce(&Kept) -> T) -> Option<T> {
        let mut answers = self.answers.lock();
        answers.uses += 1;
        let used = answers.uses;
        answers.by_id.retain(|_, kept| now < kept.until);
        let kept = answers.by_id.get_mut(id).filter(|kept| kept.owner == owner)?;
        kept.used = used;
        Some(read(kept))
    }

    /// Forgets the answer `id` of `owner`; whether it was kept. Conversations that went on from it keep what they need of it.
    pub fn forget(&self, id: &str, owner: u64) -> bool {
        let mut answers = self.answers.lock();
        let is_theirs = answers.by_id.get(id).is_some_and(|kept| kept.owner == owner);
        is_theirs && answers.by_id.remove(id).is_some()
    }

    /// Keeps an answer, made at `now` of `asked` behind `before`; those that were not used for longest make room.
    pub fn put(&self, object: &Value, owner: u64, asked: Vec<InputItem>, before: Option<Arc<Turn>>, now: Instant) {
        let (Some(id), Some(output)) = (object["id"].as_str(), object["output"].as_array()) else { return };
        let answered = output.iter().filter_map(|item| serde_json::from_value::<InputItem>(item.clone()).ok());
        let items: Vec<InputItem> = asked.into_iter().chain(answered).collect();
        // The object holds the answer a second time.
        let text: Arc<str> = object.to_string().into();
        let bytes = items.iter().map(InputItem::bytes).sum::<u64>() + text.len() as u64 + BESIDE;
        if bytes > self.max_bytes {
            return;
        }
        self.all.fetch_add(bytes, Ordering::Relaxed);
        let turn = Arc::new(Turn { before, items, bytes, all: self.all.clone() });
        let mut answers = self.answers.lock();
        answers.uses += 1;
        let used = answers.uses;
        answers.by_id.retain(|_, kept| now < kept.until);
        answers.by_id.insert(id.to_owned(), Kept { owner, turn, text, until: now + self.keep, used });
        // A turn frees its bytes only where none follows it.
        while self.bytes() > self.max_bytes {
            let Some((oldest, _)) = answers.by_id.iter().min_by_key(|(_, kept)| kept.used) else { break };
            let oldest = oldest.clone();
            answers.by_id.remove(&oldest);
        }
    }
}

/// Where an answer is kept once it is complete.
pub struct Keep {
    /// Those that are kept.
    pub stored: Arc<StoredResponses>,
    /// Whose answer it is.
    pub owner: u64,
    /// The request's items.
    pub asked: Vec<InputItem>,
    /// The turn that they follow.
    pub before: Option<Arc<Turn>>,
}

impl Keep {
    /// Keeps the complete response object.
    pub fn put(&self, object: &Value) {
        self.stored.put(object, self.owner, self.asked.clone(), self.before.clone(), crate::clock::now());
    }
}

impl InputItem {
    /// What it takes in memory, about.
    fn bytes(&self) -> u64 {
        format!("{self:?}").len() as u64 + BESIDE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use serde_json::json;

    fn item(text: &str) -> InputItem {
        serde_json::from_value(json!({"role": "user", "content": text})).unwrap()
    }

    fn answer(id: &str, text: &str) -> Value {
        json!({"id": id, "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]})
    }

    fn texts(turn: &Turn) -> String {
        format!("{:?}", turn.conversation())
    }

    #[test]
    fn a_conversation_goes_on_from_any_of_its_answers() {
        let (stored, now) = (StoredResponses::new(1 << 20, Duration::from_secs(60)), clock::now());
        stored.put(&answer("a", "first answer"), 1, vec![item("first")], None, now);
        let a = stored.turn("a", 1, now);
        stored.put(&answer("b", "second answer"), 1, vec![item("second")], a.clone(), now);
        stored.put(&answer("c", "another answer"), 1, vec![item("another")], a, now);
        let (b, c) = (stored.turn("b", 1, now).unwrap(), stored.turn("c", 1, now).unwrap());
        let order = |text: &str, words: &[&str]| {
            let at: Vec<usize> =
                words.iter().map(|word| text.find(word).unwrap_or_else(|| panic!("{word}: {text}"))).collect();
            assert!(at.is_sorted(), "{text}");
        };
        order(&texts(&b), &["first\"", "first answer", "second\"", "second answer"]);
        order(&texts(&c), &["first\"", "first answer", "another\"", "another answer"]);
        assert!(!texts(&b).contains("another") && !texts(&c).contains("second"));
        // Others' are not there.
        assert!(stored.turn("b", 2, now).is_none() && stored.object("b", 2, now).is_none() && !stored.forget("b", 2));
        // What it went on from may be forgotten.
        assert!(stored.forget("a", 1) && !stored.forget("a", 1) && stored.turn("a", 1, now).is_none());
        order(&texts(&stored.turn("b", 1, now).unwrap()), &["first answer", "second answer"]);
        assert_eq!(*stored.object("b", 1, now).unwrap(), *answer("b", "second answer").to_string());
        assert!(stored.object("b", 1, now + Duration::from_secs(59)).is_some());
        drop((b, c));
        assert!(stored.bytes() > 0 && stored.turn("b", 1, now + Duration::from_secs(60)).is_none());
        assert_eq!(stored.bytes(), 0, "what is too old takes memory");
    }

    #[test]
    fn whatever_is_kept_takes_no_more_than_it_may_and_all_of_it_is_given_back() {
        let (stored, start) = (StoredResponses::new(40_000, Duration::from_secs(500)), clock::now());
        let mut number = 7u64;
        let mut below = |n: u64| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (number >> 33) % n
        };
        let mut ids: Vec<String> = Vec::new();
        for step in 0..2000u64 {
            let now = start + Duration::from_secs(step);
            let before = ids.get(below(ids.len() as u64 + 1) as usize).and_then(|id| stored.turn(id, 1, now));
            let id = format!("r{step}");
            let text = "x".repeat(below(6000) as usize);
            stored.put(&answer(&id, &text), 1, vec![item(&text)], before, now);
            assert!(stored.bytes() <= 40_000, "{step}: {}", stored.bytes());
            ids.push(id);
            if ids.len() > 20 {
                let at = below(20) as usize;
                stored.forget(&ids.swap_remove(at), 1);
            }
        }
        stored.answers.lock().by_id.clear();
        assert_eq!(stored.bytes(), 0);
        // A chain of many turns is dropped without a deep recursion.
        let stored = StoredResponses::new(1 << 30, Duration::from_secs(500));
        for step in 0..100_000u64 {
            let before = step.checked_sub(1).and_then(|last| stored.turn(&format!("r{last}"), 1, start));
            stored.put(&answer(&format!("r{step}"), ""), 1, vec![item("")], before, start);
            if let Some(last) = step.checked_sub(1) {
                stored.forget(&format!("r{last}"), 1);
            }
        }
        assert!(stored.bytes() > 0);
        stored.answers.lock().by_id.clear();
        assert_eq!(stored.bytes(), 0);
    }
}
