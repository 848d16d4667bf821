//! Texts that lost their slot, and states behind parts of texts, within a budget of bytes: a prompt that begins as one of them need not run
//! from its first token.

use super::prompt_policy::{Held, common, victim};
use crate::model::{KvCache, Saved, Snapshot};
use std::sync::Arc;

/// Tokens that are worth a copy: fewer run again in less time than it takes to look after them.
pub const MIN_SAVED: usize = 32;

/// What is kept of some tokens.
pub struct Entry<T> {
    owner: u64,
    tokens: Vec<u32>,
    /// What a KV cache remembered of them.
    pub kept: T,
    /// Bytes that it takes.
    bytes: u64,
    /// The value of [`PromptCache::uses`] when it was used last.
    used: u64,
    /// Whether it was given to what writes it to disk, or has come from there.
    written: bool,
}

/// Where a prompt can go on, if what is kept is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Tokens of the prompt that need not run.
    pub len: usize,
    /// The states that are needed for it; `None` where the text has its own.
    pub state: Option<usize>,
}

/// What the cache counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptCounts {
    /// Bytes that it takes.
    pub bytes: u64,
    /// Bytes that it may take.
    pub budget: u64,
    /// Texts that it holds.
    pub texts: u64,
    /// Parts of texts whose states it holds.
    pub states: u64,
    /// Tokens of prompts that were restored from it, since the start as the next two.
    pub restored_tokens: u64,
    /// Texts and states that were saved.
    pub saved: u64,
    /// Texts and states that were evicted to make room for others.
    pub evicted: u64,
}

/// Texts that lost their slot, and states behind parts of texts.
pub struct PromptCache {
    texts: Vec<Entry<Arc<Saved>>>,
    states: Vec<Entry<Snapshot>>,
    /// Bytes of all entries.
    bytes: u64,
    budget: u64,
    /// How often an entry was added or used.
    uses: u64,
    counts: PromptCounts,
}

/// Bytes of an entry beside what a KV cache remembers.
fn bytes_beside<T>(tokens: usize) -> u64 {
    (size_of::<Entry<T>>() + tokens * size_of::<u32>()) as u64
}

impl PromptCache {
    /// Without any text; it will take up to `budget` bytes.
    pub fn new(budget: u64) -> PromptCache {
        let (texts, states, counts) = (Vec::new(), Vec::new(), PromptCounts::default());
        PromptCache { texts, states, bytes: 0, budget, uses: 0, counts }
    }

    /// What it holds and has done.
    pub fn counts(&self) -> PromptCounts {
        let (texts, states) = (self.texts.len() as u64, self.states.len() as u64);
        PromptCounts { bytes: self.bytes, budget: self.budget, texts, states, ..self.counts }
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.texts.clear();
        self.states.clear();
        self.bytes = 0;
    }

    /// Where `prompt` can go on from a text that begins with its first `same` tokens, which has states of its own for the first `own` of them:
    /// there, or further behind states that are kept here and that `fits` the text.
    pub fn reach(
        &self,
        (prompt, owner): (&[u32], u64),
        (same, own): (usize, usize),
        fits: impl Fn(&Snapshot) -> bool,
    ) -> Found {
        let fits = |entry: &Entry<Snapshot>| {
            let len = entry.tokens.len();
            len > own && len <= same && entry.owner == owner && entry.tokens == prompt[..len] && fits(&entry.kept)
        };
        let states = self.states.iter().enumerate().filter(|(_, entry)| fits(entry));
        let further = states.map(|(at, entry)| Found { len: entry.tokens.len(), state: Some(at) });
        further.max_by_key(|found| found.len).unwrap_or(Found { len: own, state: None })
    }

    /// The text here from which most of `prompt` can be restored in `cache`, and where the prompt goes on then; `None` where no text has any.
    pub fn best(&self, prompt: &[u32], owner: u64, cache: &KvCache) -> Option<(usize, Found)> {
        let of = |(at, entry): (usize, &Entry<Arc<Saved>>)| {
            let (saved, same) = (&*entry.kept, common(&entry.tokens, prompt));
            let fits = |snapshot: &Snapshot| saved.reach_with(snapshot) && cache.fits(saved, snapshot.len);
            let own = Some(saved.reach(same)).filter(|&len| cache.fits(saved, len)).unwrap_or(0);
            let found = self.reach((prompt, owner), (same, own), fits);
            (found.len > 0).then_some((at, found))
        };
        let mine = self.texts.iter().enumerate().filter(|(_, entry)| entry.owner == owner);
        mine.filter_map(of).max_by_key(|(_, found)| found.len)
    }

    /// Takes a text out, so that it cannot be evicted while it is restored; it is [`PromptCache::put_back_text`].
    pub fn take_out_text(&mut self, at: usize) -> Entry<Arc<Saved>> {
        let entry = self.texts.swap_remove(at);
        self.bytes -= entry.bytes;
        entry
    }

    /// Takes states out, as [`PromptCache::take_out_text`].
    pub fn take_out_state(&mut self, at: usize) -> Entry<Snapshot> {
        let entry = self.states.swap_remove(at);
        self.bytes -= entry.bytes;
        entry
    }

    /// Puts a restored text back, if there is room: what was restored is in a slot now.
    pub fn put_back_text(&mut self, entry: Entry<Arc<Saved>>) {
        self.texts.extend(back(entry, (&mut self.bytes, self.budget), &mut self.uses, &mut self.counts));
    }

    /// Puts states back, as [`PromptCache::put_back_text`].
    pub fn put_back_state(&mut self, entry: Entry<Snapshot>) {
        self.states.extend(back(entry, (&mut self.bytes, self.budget), &mut self.uses, &mut self.counts));
    }

    /// Notes that so many tokens of a prompt need not run because of what was kept here.
    pub fn note_restored(&mut self, tokens: usize) {
        self.counts.restored_tokens += tokens as u64;
    }

    /// Saves the text of a cache, unless most of it is here or it takes more than the budget. Texts and states that it covers, and those that
    /// have to make room, are dropped first. Where there is no room for all its states, the last ones are saved.
    pub fn insert(&mut self, owner: u64, tokens: &[u32], cache: &KvCache) {
        let known = self.texts.iter().enumerate().filter(|(_, entry)| entry.owner == owner);
        let known = known.map(|(at, entry)| (entry.kept.reach(common(&entry.tokens, tokens)), at)).max();
        let (known, same) = known.unwrap_or_default();
        if tokens.len() < known + MIN_SAVED {
            if known > 0 {
                self.uses += 1;
                self.texts[same].used = self.uses;
            }
            return;
        }
        let bytes = |states| bytes_beside::<Arc<Saved>>(tokens.len()) + cache.saved_bytes(states);
        let Some(states) = (1..=cache.states()).rev().find(|&states| bytes(states) <= self.budget) else { return };
        if states == cache.states() {
            self.drop_covered(owner, tokens, cache);
        }
        self.make_room(bytes(states));
        let Some(kept) = cache.save(states) else { return };
        self.counts.saved += 1;
        self.push_text(owner, tokens.into(), Arc::new(kept), false);
    }

    /// Adds a text that was read from disk, unless it takes more than the budget.
    pub fn insert_read(&mut self, owner: u64, tokens: Vec<u32>, saved: Saved) {
        let bytes = bytes_beside::<Arc<Saved>>(tokens.len()) + saved.bytes();
        if bytes <= self.budget {
            self.make_room(bytes);
            self.push_text(owner, tokens, Arc::new(saved), true);
        }
    }

    fn push_text(&mut self, owner: u64, tokens: Vec<u32>, kept: Arc<Saved>, written: bool) {
        let bytes = bytes_beside::<Arc<Saved>>(tokens.len()) + kept.bytes();
        self.bytes += bytes;
        self.uses += 1;
        self.texts.push(Entry { owner, tokens, kept, bytes, used: self.uses, written });
    }

    /// The text that was saved last of those that nothing has written yet; it counts as written from now on.
    pub fn take_unwritten(&mut self) -> Option<(u64, &[u32], Arc<Saved>)> {
        let entry = self.texts.iter_mut().filter(|entry| !entry.written).max_by_key(|entry| entry.used)?;
        entry.written = true;
        Some((entry.owner, &entry.tokens, entry.kept.clone()))
    }

    /// Saves the states that a cache keeps behind its first tokens, which are `tokens`, unless they are here or take more than the budget.
    pub fn insert_state(&mut self, owner: u64, tokens: &[u32], cache: &KvCache) {
        let bytes = bytes_beside::<Snapshot>(tokens.len()) + cache.snapshot_bytes();
        if bytes > self.budget {
            return;
        }
        self.uses += 1;
        if let Some(same) = self.states.iter_mut().find(|entry| entry.owner == owner && entry.tokens == tokens) {
            same.used = self.uses;
            return;
        }
        self.make_room(bytes);
        let Some(kept) = cache.snapshot(tokens.len()) else { return };
        self.bytes += bytes;
        self.counts.saved += 1;
        self.uses += 1;
        self.states.push(Entry { owner, tokens: tokens.into(), kept, bytes, used: self.uses, written: true });
    }

    /// Evicts until there is room for so many bytes, at most the budget.
    fn make_room(&mut self, bytes: u64) {
        while self.bytes + bytes > self.budget {
            let texts = self.texts.iter().map(|entry| (entry.bytes, entry.used));
            let states = self.states.iter().map(|entry| (entry.bytes, entry.used));
            let held = texts.chain(states).map(|(bytes, used)| Held { bytes, age: self.uses - used });
            let Some(at) = victim(&held.collect::<Vec<_>>()) else { return };
            match at.checked_sub(self.texts.len()) {
                None => drop(self.take_out_text(at)),
                Some(at) => drop(self.take_out_state(at)),
            }
            self.counts.evicted += 1;
        }
    }

    /// Drops the beginnings of a text from which it can be gone on all the same.
    fn drop_covered(&mut self, owner: u64, tokens: &[u32], cache: &KvCache) {
        let covers =
            |(of, old): (u64, &[u32])| of == owner && tokens.starts_with(old) && cache.reach(old.len()) == old.len();
        for at in (0..self.texts.len()).rev() {
            if covers((self.texts[at].owner, &self.texts[at].tokens)) {
                self.take_out_text(at);
            }
        }
        for at in (0..self.states.len()).rev() {
            if covers((self.states[at].owner, &self.states[at].tokens)) {
                self.take_out_state(at);
            }
        }
    }

    /// Panics if it takes more than its budget, or counts other bytes than it has.
    pub fn assert_invariants(&self) {
        let beside = |tokens: &[u32]| size_of_val(tokens) as u64;
        let of = |entry: &Entry<Arc<Saved>>| bytes_beside::<Arc<Saved>>(0) + beside(&entry.tokens) + entry.kept.bytes();
        let of_states =
            |entry: &Entry<Snapshot>| bytes_beside::<Snapshot>(0) + beside(&entry.tokens) + entry.kept.bytes();
        let bytes = self.texts.iter().map(of).sum::<u64>() + self.states.iter().map(of_states).sum::<u64>();
        assert_eq!(self.bytes, bytes, "the prompt cache counts other bytes than it has");
        assert!(self.bytes <= self.budget, "the prompt cache takes more than its budget");
    }
}

/// The entry, used now, if there is room for it.
fn back<T>(
    mut entry: Entry<T>,
    (bytes, budget): (&mut u64, u64),
    uses: &mut u64,
    counts: &mut PromptCounts,
) -> Option<Entry<T>> {
    *uses += 1;
    entry.used = *uses;
    if *bytes + entry.bytes > budget {
        counts.evicted += 1;
        return None;
    }
    *bytes += entry.bytes;
    Some(entry)
}
