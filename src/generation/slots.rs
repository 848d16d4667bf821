//! Sequence slots. Each has a KV cache of its own and keeps it after an answer, so that the next turn of a conversation, or another prompt
//! with the same beginning, need not run those tokens again.

use crate::model::KvCache;

/// All slots, and what each holds.
pub struct Slots {
    /// The slots' KV caches, `caches[slot]`, as the engine takes them.
    pub caches: Vec<KvCache>,
    /// By slot, the tokens whose keys and values are in its cache.
    held: Vec<Vec<u32>>,
    busy: Vec<bool>,
    /// By slot, the value of `uses` when it was given back last.
    used: Vec<u64>,
    uses: u64,
    /// Whether keys and values of earlier answers may be used.
    reuse: bool,
}

impl Slots {
    /// One slot for each cache. Without `reuse`, every prompt runs from its first token.
    pub fn new(caches: Vec<KvCache>, reuse: bool) -> Slots {
        let n = caches.len();
        Slots { caches, held: vec![Vec::new(); n], busy: vec![false; n], used: vec![0; n], uses: 0, reuse }
    }

    /// Slots that are taken.
    pub fn busy(&self) -> usize {
        self.busy.iter().filter(|b| **b).count()
    }

    /// Takes a free slot for `prompt`. Returns its number and how many of the first tokens need not run again: at most all but one, because
    /// logits come from running a token. `None` if no slot is free.
    pub fn take(&mut self, prompt: &[u32]) -> Option<(usize, usize)> {
        let most = if self.reuse { prompt.len() - 1 } else { 0 };
        let common = |held: &[u32]| held.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count();
        let common = |(held, cache): (&Vec<u32>, &KvCache)| cache.reach(common(held));
        let common: Vec<usize> = self.held.iter().zip(&self.caches).map(common).collect();
        let free = |slot: &usize| !self.busy[*slot];
        // A slot is taken over if the prompt continues most of what it holds; otherwise that belongs to another conversation, and the slot
        // is taken only as the one unused for longest.
        let continues = |slot: &usize| common[*slot] * 2 > self.held[*slot].len();
        // Another slot may hold more of the prompt: copying keys and values is much cheaper than computing them.
        let resumed = (0..self.caches.len()).filter(free).filter(continues).max_by_key(|&slot| (common[slot], slot));
        let oldest = || (0..self.caches.len()).filter(free).min_by_key(|&slot| (self.used[slot], slot));
        let slot = resumed.or_else(oldest)?;
        if resumed.is_none() {
            // Another text: it is not to inherit what was counted for the one before.
            self.caches[slot].renew();
        }
        let donor = (0..self.caches.len()).max_by_key(|&slot| common[slot])?;
        let mut reused = common[slot];
        if common[donor] > reused {
            reused = common[donor];
            let [to, from] = self.caches.get_disjoint_mut([slot, donor]).expect("the donor holds more");
            to.copy_from(from, reused);
            self.held[slot] = prompt[..reused].to_vec();
        }
        assert_eq!(self.caches[slot].rewind(reused), reused, "only what can be gone on from is counted as common");
        self.held[slot].truncate(reused);
        self.busy[slot] = true;
        Some((slot, reused))
    }

    /// Notes tokens that the engine has run on this slot's cache.
    pub fn ran(&mut self, slot: usize, tokens: &[u32]) {
        self.held[slot].extend_from_slice(tokens);
    }

    /// Frees a slot; its keys and values stay for later prompts.
    pub fn give_back(&mut self, slot: usize) {
        self.uses += 1;
        self.used[slot] = self.uses;
        self.busy[slot] = false;
        self.assert_invariants();
    }

    /// Frees a slot whose last pass is worth nothing: its keys and values are dropped.
    pub fn lose(&mut self, slot: usize) {
        self.caches[slot].rewind(0);
        self.held[slot].clear();
        self.give_back(slot);
    }

    /// Drops the keys and values of all free slots, after a change to what the engine computes.
    pub fn forget(&mut self) {
        for slot in 0..self.caches.len() {
            if !self.busy[slot] {
                self.caches[slot].rewind(0);
                self.held[slot].clear();
            }
        }
    }

    /// Panics if a slot's tokens and its cache differ in length.
    pub fn assert_invariants(&self) {
        for (held, cache) in self.held.iter().zip(&self.caches) {
            assert_eq!(held.len(), cache.len, "a slot's tokens and its keys are not the same");
        }
    }
}
