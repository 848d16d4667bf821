//! Places for timelines: each has its own keys and values and keeps them after an answer, so that the next turn of a
//! conversation, or another prompt that begins alike, begins where they end.

use crate::model::KvCache;

pub struct Slots {
    /// The engine's view: `caches[slot]`.
    pub caches: Vec<KvCache>,
    /// Tokens whose keys and values are in the slot's cache.
    held: Vec<Vec<u32>>,
    busy: Vec<bool>,
    /// When each was given back, by a counter.
    used: Vec<u64>,
    uses: u64,
    /// Whether what is there may be used again.
    reuse: bool,
}

impl Slots {
    pub fn new(caches: Vec<KvCache>, reuse: bool) -> Slots {
        let n = caches.len();
        Slots { caches, held: vec![Vec::new(); n], busy: vec![false; n], used: vec![0; n], uses: 0, reuse }
    }

    pub fn busy(&self) -> usize {
        self.busy.iter().filter(|b| **b).count()
    }

    /// A free slot for `prompt`, and how many of its tokens need not be run again; at most all but one, for logits come
    /// from running one.
    pub fn take(&mut self, prompt: &[u32]) -> Option<(usize, usize)> {
        let most = if self.reuse { prompt.len() - 1 } else { 0 };
        let common = |held: &[u32]| held.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count();
        let common: Vec<usize> = self.held.iter().map(|held| common(held)).collect();
        let free = |slot: &usize| !self.busy[*slot];
        // One that holds the beginning of this very conversation goes on; a slot of which little would stay is another's,
        // and is only taken when its turn has come.
        let continues = |slot: &usize| common[*slot] * 2 > self.held[*slot].len();
        // Copying keys is much cheaper than computing them.
        let slot = (0..self.caches.len()).filter(free).filter(continues).max_by_key(|&slot| (common[slot], slot));
        let oldest = || (0..self.caches.len()).filter(free).min_by_key(|&slot| (self.used[slot], slot));
        let slot = slot.or_else(oldest)?;
        let donor = (0..self.caches.len()).max_by_key(|&slot| common[slot])?;
        let mut reused = common[slot];
        if common[donor] > reused {
            reused = common[donor];
            let [to, from] = self.caches.get_disjoint_mut([slot, donor]).expect("the donor holds more");
            to.copy_from(from, reused);
            self.held[slot] = prompt[..reused].to_vec();
        }
        self.caches[slot].truncate(reused);
        self.held[slot].truncate(reused);
        self.busy[slot] = true;
        Some((slot, reused))
    }

    /// Notes tokens that went through the engine on this slot's cache.
    pub fn ran(&mut self, slot: usize, tokens: &[u32]) {
        self.held[slot].extend_from_slice(tokens);
    }

    pub fn give_back(&mut self, slot: usize) {
        self.uses += 1;
        self.used[slot] = self.uses;
        self.busy[slot] = false;
        self.assert_invariants();
    }

    /// Forgets everything that is not in use: what was computed before is not what would be computed now.
    pub fn forget(&mut self) {
        for slot in 0..self.caches.len() {
            if !self.busy[slot] {
                self.caches[slot].truncate(0);
                self.held[slot].clear();
            }
        }
    }

    pub fn assert_invariants(&self) {
        for (held, cache) in self.held.iter().zip(&self.caches) {
            assert_eq!(held.len(), cache.len, "a slot's tokens and its keys are not the same");
        }
    }
}
