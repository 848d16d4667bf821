//! Sequence slots. Each has a KV cache of its own and keeps it after an answer, so that the next turn of a conversation, or another prompt
//! with the same beginning, need not run those tokens again. A text that loses its slot goes to the prompt cache.

use super::prompt_cache::{Found, MIN_SAVED, PromptCache};
use super::prompt_policy::common;
use crate::model::KvCache;

/// What a slot holds.
#[derive(Clone, Default)]
struct Text {
    /// The client whose text it is: no other's prompt is answered from it.
    owner: u64,
    /// The tokens whose keys and values are in the slot's cache.
    tokens: Vec<u32>,
    /// How many of them are the prompt that was asked last.
    asked: usize,
    /// The engine computes something else since they ran: nothing may be answered from them.
    stale: bool,
}

/// Where the tokens come from that need not run again.
#[derive(Clone, Copy)]
enum Source {
    /// An entry of the prompt cache.
    Saved(usize),
    Slot(usize),
}

/// All slots, and what each holds.
pub struct Slots {
    /// The slots' KV caches, `caches[slot]`, as the engine takes them.
    pub caches: Vec<KvCache>,
    /// Texts that lost their slot.
    pub prompts: PromptCache,
    /// By slot.
    texts: Vec<Text>,
    busy: Vec<bool>,
    /// By slot, the value of `uses` when it was given back last.
    used: Vec<u64>,
    uses: u64,
    /// Whether keys and values of earlier answers may be used.
    reuse: bool,
}

impl Slots {
    /// One slot for each cache, and up to `prompt_bytes` for texts that lose theirs. Without `reuse`, every prompt runs from its first token.
    pub fn new(caches: Vec<KvCache>, reuse: bool, prompt_bytes: u64) -> Slots {
        let n = caches.len();
        let prompts = PromptCache::new(if reuse { prompt_bytes } else { 0 });
        Slots {
            caches,
            prompts,
            texts: vec![Text::default(); n],
            busy: vec![false; n],
            used: vec![0; n],
            uses: 0,
            reuse,
        }
    }

    /// Slots that are taken.
    pub fn busy(&self) -> usize {
        self.busy.iter().filter(|b| **b).count()
    }

    /// Takes a free slot for a prompt of `owner`. Returns its number and how many of the first tokens need not run again: at most all but one,
    /// because logits come from running a token. `None` if no slot is free.
    pub fn take(&mut self, prompt: &[u32], owner: u64) -> Option<(usize, usize)> {
        let most = if self.reuse { &prompt[..prompt.len() - 1] } else { &[] };
        let same = |text: &Text| if text.owner == owner && !text.stale { common(&text.tokens, most) } else { 0 };
        let same: Vec<usize> = self.texts.iter().map(same).collect();
        let reach = |(&same, cache): (&usize, &KvCache)| {
            self.prompts.reach((most, owner), (same, cache.reach(same)), |snapshot| cache.reach_with(snapshot))
        };
        let reached: Vec<Found> = same.iter().zip(&self.caches).map(reach).collect();
        let free = |slot: &usize| !self.busy[*slot];
        // A slot is taken over if the prompt continues most of what it holds; otherwise that belongs to another conversation, and the slot
        // is taken only as the one unused for longest.
        let continues = |slot: &usize| reached[*slot].len * 2 > self.texts[*slot].tokens.len();
        let resumed =
            (0..self.caches.len()).filter(free).filter(continues).max_by_key(|&slot| (reached[slot].len, slot));
        let oldest = || (0..self.caches.len()).filter(free).min_by_key(|&slot| (self.used[slot], slot));
        let slot = resumed.or_else(oldest)?;
        // Another slot, or a saved text, may hold more of the prompt: copying keys and values is much cheaper than computing them.
        let of = |slot: usize| (Source::Slot(slot), reached[slot]);
        let donor = (0..self.caches.len()).max_by_key(|&slot| reached[slot].len).map(of);
        let saved = self.prompts.best(most, owner, &self.caches[slot]).map(|(at, found)| (Source::Saved(at), found));
        let longest =
            |best: (Source, Found), other: (Source, Found)| if other.1.len > best.1.len { other } else { best };
        let (source, found) = [donor, saved].into_iter().flatten().fold(of(slot), longest);
        let text = &self.texts[slot];
        let is_another = resumed.is_none() || same[slot] + MIN_SAVED <= text.asked.min(text.tokens.len());
        self.fill(slot, source, found, is_another && !text.stale);
        if resumed.is_none() {
            // Another text: it is not to inherit what was counted for the one before.
            self.caches[slot].renew();
        }
        self.texts[slot] = Text { owner, tokens: prompt[..found.len].to_vec(), asked: prompt.len(), stale: false };
        self.busy[slot] = true;
        // The prompt may part from the text here once more.
        self.checkpoint(slot);
        Some((slot, found.len))
    }

    /// Makes a slot's cache hold the first tokens of what is in `source`, as `found`. The slot's own text is saved before if it is another one.
    fn fill(&mut self, slot: usize, source: Source, found: Found, is_another: bool) {
        // What is restored does not make room for what is saved.
        let state = found.state.map(|at| self.prompts.take_out_state(at));
        let text = if let Source::Saved(at) = source { Some(self.prompts.take_out_text(at)) } else { None };
        if is_another {
            let text = &self.texts[slot];
            self.prompts.insert(text.owner, &text.tokens, &self.caches[slot]);
        }
        let snapshot = state.as_ref().map(|entry| &entry.kept);
        match (source, &text, snapshot) {
            (_, Some(text), Some(snapshot)) => self.caches[slot].restore_with(&text.kept, snapshot),
            (_, Some(text), None) => self.caches[slot].restore(&text.kept, found.len),
            (Source::Slot(donor), _, _) if donor != slot => {
                let [to, from] = self.caches.get_disjoint_mut([slot, donor]).expect("the donor holds more");
                match snapshot {
                    Some(snapshot) => to.copy_with(from, snapshot),
                    None => to.copy_from(from, found.len),
                }
            }
            (_, _, Some(snapshot)) => self.caches[slot].rewind_to(snapshot),
            _ => {}
        }
        let left = self.caches[slot].rewind(found.len);
        assert_eq!(left, found.len, "only what can be gone on from is counted as common");
        if text.is_some() || state.is_some() {
            self.prompts.note_restored(found.len);
        }
        text.into_iter().for_each(|text| self.prompts.put_back_text(text));
        state.into_iter().for_each(|state| self.prompts.put_back_state(state));
    }

    /// Keeps the states behind the tokens that have run on this slot's cache, where its layers have some: another prompt may part from the text
    /// here. The states that have to make room go to the prompt cache.
    pub fn checkpoint(&mut self, slot: usize) {
        let (cache, text) = (&mut self.caches[slot], &self.texts[slot]);
        if let Some(len) = cache.overflow().filter(|_| self.reuse && !text.stale) {
            self.prompts.insert_state(text.owner, &text.tokens[..len], cache);
        }
        cache.checkpoint();
    }

    /// How many of the first tokens of a prompt of `owner` need not run, whichever slot it gets.
    pub fn known(&self, prompt: &[u32], owner: u64) -> usize {
        let of = |(text, cache): (&Text, &KvCache)| match text.owner == owner && !text.stale {
            true => cache.reach(common(&text.tokens, prompt)),
            false => 0,
        };
        let held = self.texts.iter().zip(&self.caches).map(of).max().unwrap_or(0);
        let saved = self.caches.first().and_then(|cache| self.prompts.best(prompt, owner, cache));
        held.max(saved.map_or(0, |(_, found)| found.len))
    }

    /// The texts of slots that are free, each with its owner, its tokens and its cache.
    pub fn idle(&self) -> impl Iterator<Item = (u64, &[u32], &KvCache)> {
        let free = (0..self.caches.len()).filter(|&slot| !self.busy[slot] && !self.texts[slot].stale);
        free.map(|slot| (self.texts[slot].owner, &self.texts[slot].tokens[..], &self.caches[slot]))
    }

    /// Notes tokens that the engine has run on this slot's cache.
    pub fn ran(&mut self, slot: usize, tokens: &[u32]) {
        self.texts[slot].tokens.extend_from_slice(tokens);
    }

    /// The tokens that the engine has run on this slot's cache.
    pub fn tokens(&self, slot: usize) -> &[u32] {
        &self.texts[slot].tokens
    }

    /// Forgets the last tokens of a pass, but for the first `len` of all: they were not those of the text.
    pub fn cut(&mut self, slot: usize, len: usize) {
        self.texts[slot].tokens.truncate(len);
        let left = self.caches[slot].rewind(len);
        assert_eq!(left, len, "a text can be cut back within a pass");
    }

    /// Frees a slot; its keys and values stay for later prompts.
    pub fn give_back(&mut self, slot: usize) {
        self.uses += 1;
        self.used[slot] = self.uses;
        self.busy[slot] = false;
        if self.texts[slot].stale {
            self.drop_text(slot);
        }
        self.assert_invariants();
    }

    /// Frees a slot whose last pass is worth nothing: its keys and values are dropped.
    pub fn lose(&mut self, slot: usize) {
        self.drop_text(slot);
        self.give_back(slot);
    }

    /// Drops all keys and values, after a change to what the engine computes; those of answers that are being made, at their end.
    pub fn forget(&mut self) {
        self.prompts.clear();
        for slot in 0..self.caches.len() {
            match self.busy[slot] {
                true => self.texts[slot].stale = true,
                false => self.drop_text(slot),
            }
        }
    }

    fn drop_text(&mut self, slot: usize) {
        self.caches[slot].rewind(0);
        self.texts[slot] = Text::default();
    }

    /// Panics if a slot's tokens and its cache differ in length, or the prompt cache counts wrong.
    pub fn assert_invariants(&self) {
        for (text, cache) in self.texts.iter().zip(&self.caches) {
            assert_eq!(text.tokens.len(), cache.len, "a slot's tokens and its keys are not the same");
        }
        self.prompts.assert_invariants();
    }
}
