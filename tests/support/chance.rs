//! A predictor that chooses neurons by chance, others for each token.

use dynamicinfer::predictor::{Calibration, Kind, Predictor, Tools};
use dynamicinfer::prng::Prng;

pub struct Chance {
    /// About the share of the neurons that is chosen, some of them more often than others.
    pub share: f64,
    /// Neurons that are never chosen.
    pub never: fn(usize) -> bool,
    pub table: Calibration,
}

impl Chance {
    pub fn new(share: f64) -> Chance {
        Chance { share, never: |_| false, table: Calibration::new(vec![0.0, 1.0], vec![0.0, 1.0]) }
    }
}

impl Predictor for Chance {
    fn kind(&self) -> Kind {
        Kind::Sign
    }

    fn threshold(&self, _layer: usize, _ahead: usize) -> f32 {
        0.5
    }

    fn calibration(&self, _layer: usize, _ahead: usize) -> Option<&Calibration> {
        Some(&self.table)
    }

    fn score(
        &self,
        tools: &mut Tools<'_>,
        layer: usize,
        _ahead: usize,
        residual: &[f32],
        n: usize,
        scores: &mut [f32],
    ) {
        let (ffn, hidden) = (tools.model.config.widest_ffn(), tools.model.config.hidden);
        for b in 0..n {
            let mut prng = Prng::new(u64::from(residual[b * hidden].to_bits()) + layer as u64);
            let often = |neuron: usize| if neuron.is_multiple_of(5) { 2.0 } else { 0.7 };
            let mut chosen = |i: usize| prng.next_f64() < self.share * often(i) && !(self.never)(i);
            let score = |(i, s): (usize, &mut f32)| *s = if chosen(i) { 0.75 } else { 0.25 };
            scores[b * ffn..(b + 1) * ffn].iter_mut().enumerate().for_each(score);
        }
    }

    fn weight_bytes(&self, _: usize, _: usize) -> u64 {
        0
    }
}
