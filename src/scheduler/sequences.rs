//! How often each neuron fires, in each sequence that was decoded of late (DynamicInfer E.3.1: f).
//!
//! Two clients with different texts need different neurons, so each sequence has frequencies of its own, which a conversation finds again
//! when it is resumed. Neurons are placed for those that are decoded together now: by the mean of their frequencies. Below these lies the
//! history over all texts, from which a new sequence starts.

use crate::ids::StoreId;
use dashmap::DashMap;
use std::sync::Arc;

/// The most sequences whose frequencies are kept, twice what a pass can carry; the one not decoded for longest is dropped first.
pub const MAX_SEQUENCES: usize = 64;
/// Bytes that their frequencies take at most: 47 sequences of a 7B model. Twice the sequences of a pass are kept in any case, or those that
/// wait for their next turn would forget while others are decoded.
const MAX_BYTES: usize = 64 << 20;
/// Share that a sequence has in the history with which the next one starts.
const HISTORY_SHARE: f32 = 0.2;
/// Weight of an audited token in how often a neuron is active and left out.
const AUDIT_SHARE: f32 = 0.1;

/// The neurons of a layer that were active in one pass: computed, and not zero.
#[derive(Clone, Copy, Debug)]
pub struct Fired<'a> {
    /// The layer, from 0.
    pub layer: usize,
    /// The active neurons, in any order.
    pub neurons: &'a [StoreId],
    /// For each of them, bit b: for token b of the pass.
    pub masks: &'a [u32],
    /// The sequence of each token.
    pub sequences: &'a [u64],
}

/// The frequencies of one sequence.
#[derive(Debug)]
pub struct Frequencies {
    /// How often each neuron was active of late, 0 to 1, `[layers][ffn]`.
    f: Vec<Vec<f32>>,
    /// When it was decoded last, counted in passes of all sequences.
    used: u64,
    /// Whether the history has all of it.
    in_history: bool,
}

/// The frequencies of all sequences. The map can be read from other threads while the scheduler's adds to it.
pub type Known = Arc<DashMap<u64, Frequencies>>;

/// The frequencies of all sequences, and what they leave behind.
pub struct Sequences {
    known: Known,
    /// What a new sequence starts from, 0 to 1, `[layers][ffn]`.
    history: Vec<Vec<f32>>,
    /// How often each neuron is active and left out, as audits have found it, 0 to 1, `[layers][ffn]`.
    missed: Vec<Vec<f32>>,
    passes: u64,
    /// Most sequences that one pass has had.
    widest: usize,
    /// The frequencies of one layer for the sequences that are decoded now, `[ffn]`.
    now: Vec<f32>,
}

impl Sequences {
    /// The first sequence starts from `history`, 0 to 1, `[layers][ffn]`.
    pub fn new(history: Vec<Vec<f32>>) -> Sequences {
        let missed = history.iter().map(|layer| vec![0.0; layer.len()]).collect();
        let now = Vec::with_capacity(history.first().map_or(0, Vec::len));
        Sequences { known: Known::default(), history, missed, passes: 0, widest: 1, now }
    }

    /// The map of all sequences.
    pub fn known(&self) -> Known {
        self.known.clone()
    }

    /// A sequence begins anew: what all have shown goes into the history, and this one starts from it.
    pub fn begin(&mut self, sequence: u64) {
        self.update_history();
        self.known.remove(&sequence);
        self.touch(&[sequence]);
    }

    /// Sequences whose frequencies are kept now, at most.
    fn most(&self) -> usize {
        let bytes: usize = self.history.iter().map(|layer| size_of_val(&layer[..])).sum();
        (MAX_BYTES / bytes.max(1)).clamp(2 * self.widest, MAX_SEQUENCES.max(2 * self.widest))
    }

    /// A pass over these sequences, one for each token, begins. Those that are not known start from the history, to which is added before
    /// what the others have shown.
    pub fn touch(&mut self, sequences: &[u64]) {
        self.passes += 1;
        // A batch has one token of each sequence; a chunk is all of one.
        self.widest = self.widest.max(1 + sequences.windows(2).filter(|two| two[0] != two[1]).count());
        let mut are_known = true;
        for sequence in sequences {
            match self.known.get_mut(sequence) {
                Some(mut known) => known.used = self.passes,
                None => are_known = false,
            }
        }
        if are_known {
            return;
        }
        self.update_history();
        for &sequence in sequences {
            if self.known.contains_key(&sequence) {
                continue;
            }
            while self.known.len() >= self.most() {
                let oldest = self.known.iter().min_by_key(|known| (known.used, *known.key())).map(|known| *known.key());
                oldest.and_then(|oldest| self.known.remove(&oldest));
            }
            let new = Frequencies { f: self.history.clone(), used: self.passes, in_history: true };
            self.known.insert(sequence, new);
        }
    }

    /// Counts the tokens of a pass: exactly these neurons were active; `decay` is what is left of older tokens, 0 to 1.
    pub fn tokens(&mut self, fired: Fired<'_>, decay: f32) {
        for (token, sequence) in fired.sequences.iter().enumerate() {
            let Some(mut known) = self.known.get_mut(sequence) else { continue };
            known.in_history = false;
            let f = &mut known.f[fired.layer];
            f.iter_mut().for_each(|f| *f *= decay);
            for (neuron, _) in fired.neurons.iter().zip(fired.masks).filter(|(_, mask)| *mask >> token & 1 == 1) {
                f[neuron.index()] += 1.0 - decay;
            }
        }
    }

    /// Counts a prompt's chunk of `tokens` tokens, of which neuron n was active for `counts[n]` (E.3.3: the prefill's activations): as if
    /// its tokens had come one by one, all alike.
    pub fn prompt(&mut self, sequence: u64, layer: usize, counts: &[u32], tokens: usize, decay: f32) {
        let Some(mut known) = self.known.get_mut(&sequence) else { return };
        known.in_history = false;
        let left = decay.powi(tokens.min(1 << 20) as i32);
        for (f, &count) in known.f[layer].iter_mut().zip(counts) {
            *f = *f * left + (1.0 - left) * count as f32 / tokens.max(1) as f32;
        }
    }

    /// Counts an audited pass: these neurons were active for some token and not computed.
    pub fn audited(&mut self, layer: usize, missed: &[StoreId]) {
        let now = &mut self.missed[layer];
        now.iter_mut().for_each(|f| *f *= 1.0 - AUDIT_SHARE);
        missed.iter().for_each(|n| now[n.index()] += AUDIT_SHARE);
    }

    /// How often each neuron of a layer is active in these sequences, 0 to 1, `[ffn]`; what the predictor leaves out is added as far as
    /// audits have found it.
    pub fn frequencies(&mut self, layer: usize, sequences: &[u64]) -> &[f32] {
        let Sequences { known, history, missed, now, .. } = self;
        now.clear();
        now.extend_from_slice(&missed[layer]);
        let share = 1.0 / sequences.len().max(1) as f32;
        let mut add = |f: &[f32]| now.iter_mut().zip(f).for_each(|(now, f)| *now += share * f);
        for sequence in sequences {
            match known.get(sequence) {
                Some(known) => add(&known.f[layer]),
                None => add(&history[layer]),
            }
        }
        now
    }

    /// Ends all sequences. Returns the history, `[layers][ffn]`.
    pub fn finish(mut self) -> Vec<Vec<f32>> {
        self.update_history();
        self.history
    }

    /// Adds what the history does not have yet, the sequence that was decoded last at last.
    fn update_history(&mut self) {
        let mut new: Vec<_> = self.known.iter_mut().filter(|known| !known.in_history).collect();
        new.sort_unstable_by_key(|known| (known.used, *known.key()));
        for known in &mut new {
            known.in_history = true;
            for (history, f) in self.history.iter_mut().flatten().zip(known.f.iter().flatten()) {
                *history += HISTORY_SHARE * (*f - *history);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(neurons: &[u32]) -> Vec<StoreId> {
        neurons.iter().map(|&n| StoreId(n)).collect()
    }

    fn token(s: &mut Sequences, sequence: u64, neurons: &[u32], decay: f32) {
        let masks = vec![1; neurons.len()];
        s.touch(&[sequence]);
        s.tokens(Fired { layer: 0, neurons: &one(neurons), masks: &masks, sequences: &[sequence] }, decay);
    }

    #[test]
    fn a_prompt_counts_as_its_tokens_one_by_one() {
        let mut s = Sequences::new(vec![vec![0.5, 0.5, 0.0]]);
        (0..20).for_each(|_| token(&mut s, 1, &[0, 2], 0.9));
        s.touch(&[2]);
        s.known.get_mut(&2).unwrap().f = vec![vec![0.5, 0.5, 0.0]];
        s.prompt(2, 0, &[20, 0, 20], 20, 0.9);
        let by_token = s.frequencies(0, &[1]).to_vec();
        for (a, b) in by_token.iter().zip(s.frequencies(0, &[2])) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }

    #[test]
    fn a_frequency_is_the_share_of_tokens_and_a_new_sequence_begins_with_the_history() {
        let mut s = Sequences::new(vec![vec![0.0; 2]]);
        (0..2000).for_each(|t| token(&mut s, 7, if t % 4 == 0 { &[0] } else { &[] }, 0.99));
        let f = s.frequencies(0, &[7]).to_vec();
        assert!((f[0] - 0.25).abs() < 0.02 && f[1] == 0.0, "{f:?}");
        s.begin(7);
        let begun = s.frequencies(0, &[7]).to_vec();
        assert!((begun[0] - HISTORY_SHARE * f[0]).abs() < 1e-6);
        assert_eq!(s.finish()[0], begun);
    }

    #[test]
    fn sequences_do_not_disturb_each_other_and_those_of_a_batch_are_averaged() {
        let mut s = Sequences::new(vec![vec![0.0; 3]]);
        for _ in 0..400 {
            s.touch(&[1, 2]);
            let (neurons, masks) = (one(&[0, 1, 2]), [0b01, 0b10, 0b11]);
            s.tokens(Fired { layer: 0, neurons: &neurons, masks: &masks, sequences: &[1, 2] }, 0.95);
        }
        let near = |f: &[f32], expected: [f32; 3]| f.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-3);
        assert!(near(s.frequencies(0, &[1]), [1.0, 0.0, 1.0]));
        assert!(near(s.frequencies(0, &[2]), [0.0, 1.0, 1.0]));
        assert!(near(s.frequencies(0, &[1, 2]), [0.5, 0.5, 1.0]));
        // A resumed conversation finds its own, however many others were decoded meanwhile.
        (10..10 + MAX_SEQUENCES as u64 - 2).for_each(|other| token(&mut s, other, &[1], 0.5));
        assert!(near(s.frequencies(0, &[1]), [1.0, 0.0, 1.0]));
        // The oldest goes when there are too many.
        token(&mut s, 1, &[0, 2], 0.95);
        token(&mut s, 1000, &[1], 0.5);
        assert!(!s.known.contains_key(&2) && s.known.contains_key(&1) && s.known.len() == MAX_SEQUENCES);
    }

    /// Only a sequence that began at position 0 used to; a conversation whose first words another had said before begins later.
    #[test]
    fn a_sequence_that_is_not_known_starts_from_what_the_others_have_shown() {
        let mut s = Sequences::new(vec![vec![0.0; 2]]);
        (0..200).for_each(|_| token(&mut s, 1, &[0], 0.9));
        s.touch(&[2]);
        let begun = s.frequencies(0, &[2]).to_vec();
        assert!((begun[0] - HISTORY_SHARE).abs() < 1e-3 && begun[1] == 0.0, "{begun:?}");
    }

    #[test]
    fn frequencies_of_a_large_model_take_64_mib_and_those_of_two_passes_are_kept() {
        // 8 MiB a sequence.
        let mut s = Sequences::new(vec![vec![0.0; 1 << 21]]);
        (0..20).for_each(|sequence| s.touch(&[sequence]));
        assert_eq!(s.known.len(), 8);
        let batch: Vec<u64> = (100..105).collect();
        s.touch(&batch);
        (20..30).for_each(|sequence| s.touch(&[sequence]));
        assert_eq!(s.known.len(), 10);
        // Five of the latest ten are still the batch's, whatever came in between.
        s.touch(&batch);
        (30..35).for_each(|sequence| s.touch(&[sequence]));
        assert!(batch.iter().all(|sequence| s.known.contains_key(sequence)));
    }

    #[test]
    fn what_audits_find_to_be_left_out_is_added() {
        let mut s = Sequences::new(vec![vec![0.25; 2]]);
        (0..100).for_each(|t| s.audited(0, &one(if t % 2 == 0 { &[1] } else { &[] })));
        let f = s.frequencies(0, &[]).to_vec();
        assert!(f[0] == 0.0 && (f[1] - 0.5).abs() < 0.06, "{f:?}");
    }
}
