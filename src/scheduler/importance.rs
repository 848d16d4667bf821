//! What a neuron is worth on the device: v = a + lambda f (DynamicInfer E.3.1).

use crate::ids::StoreId;

/// How often each neuron of a layer is active: an exponentially decaying mean over the tokens of the sequence, which starts from the mean
/// over earlier texts.
#[derive(Clone, Debug)]
pub struct Frequencies {
    /// f, `[ffn]`, 0 to 1.
    now: Vec<f32>,
    /// What a sequence starts from, `[ffn]`, 0 to 1.
    history: Vec<f32>,
}

impl Frequencies {
    /// The first sequence starts from `history`, `[ffn]`, 0 to 1.
    pub fn new(history: Vec<f32>) -> Frequencies {
        Frequencies { now: history.clone(), history }
    }

    /// f of every neuron, `[ffn]`, 0 to 1.
    pub fn now(&self) -> &[f32] {
        &self.now
    }

    /// What the next sequence starts from, `[ffn]`, 0 to 1.
    pub fn history(&self) -> &[f32] {
        &self.history
    }

    /// Counts a token at which exactly these neurons were active; `decay` is what is left of older tokens, 0 to 1.
    pub fn token(&mut self, active: &[StoreId], decay: f32) {
        self.now.iter_mut().for_each(|f| *f *= decay);
        active.iter().for_each(|&n| self.now[n.index()] += 1.0 - decay);
    }

    /// Counts a prompt of `tokens` tokens, of which neuron n was active for `counts[n]` (E.3.3: the prefill's activations): as if its
    /// tokens had come one by one, all alike.
    pub fn prompt(&mut self, counts: &[u32], tokens: usize, decay: f32) {
        let left = decay.powi(tokens.min(1 << 20) as i32);
        for (f, &count) in self.now.iter_mut().zip(counts) {
            *f = *f * left + (1.0 - left) * count as f32 / tokens.max(1) as f32;
        }
    }

    /// Ends the sequence. `share`, 0 to 1, of what the next one starts from comes from this one.
    pub fn end_sequence(&mut self, share: f32) {
        for (history, now) in self.history.iter_mut().zip(&mut self.now) {
            *history += share * (*now - *history);
            *now = *history;
        }
    }
}

/// Writes v of every neuron of a layer to `out`. `probabilities` are those of the coming token, times 255, if it was predicted; they stand
/// for the paper's a, which is 0 or 1.
pub fn importance(probabilities: Option<&[u8]>, f: &[f32], lambda: f32, out: &mut Vec<f32>) {
    out.clear();
    match probabilities {
        None => out.extend(f.iter().map(|f| lambda * f)),
        Some(p) => out.extend(p.iter().zip(f).map(|(&p, f)| f32::from(p) * (1.0 / 255.0) + lambda * f)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_as_its_tokens_one_by_one() {
        let mut one_by_one = Frequencies::new(vec![0.5, 0.5, 0.0]);
        (0..20).for_each(|_| one_by_one.token(&[StoreId(0), StoreId(2)], 0.9));
        let mut prompt = Frequencies::new(vec![0.5, 0.5, 0.0]);
        prompt.prompt(&[20, 0, 20], 20, 0.9);
        for (a, b) in one_by_one.now().iter().zip(prompt.now()) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }

    #[test]
    fn a_frequency_is_the_share_of_tokens_and_a_new_sequence_begins_with_the_history() {
        let mut f = Frequencies::new(vec![0.0; 2]);
        (0..2000).for_each(|t| f.token(if t % 4 == 0 { &[StoreId(0)] } else { &[] }, 0.99));
        assert!((f.now()[0] - 0.25).abs() < 0.02 && f.now()[1] == 0.0);
        f.end_sequence(0.5);
        assert!((f.now()[0] - 0.125).abs() < 0.01);
        assert_eq!(f.now(), f.history());
    }

    #[test]
    fn importance_is_the_probability_and_lambda_times_the_frequency() {
        let mut v = Vec::new();
        importance(Some(&[255, 0, 51]), &[0.5, 0.25, 0.0], 2.0, &mut v);
        assert_eq!(v.iter().map(|v| (v * 1000.0).round()).collect::<Vec<_>>(), [2000.0, 500.0, 200.0]);
        importance(None, &[0.5], 2.0, &mut v);
        assert_eq!(v, [1.0]);
    }
}
