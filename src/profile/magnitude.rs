//! Histograms of magnitudes, and activation thresholds from them: models without exact zeros are made sparse by leaving out the
//! neurons with the smallest |act(gate)| (CATS, Lee et al. 2024).

use crate::formats::profile_file::BINS;

/// Bits of an f32 below those that choose the bin: five of its mantissa remain, 32 bins per power of two.
const SHIFT: u32 = 18;
/// The first bin's own bits: 2^-14, biased exponent 113.
const FIRST: u32 = (113 << 23) >> SHIFT;

/// The bin of a magnitude, 0 to [`BINS`] - 1. Magnitudes below 2^-14 fall into the first, those of 64 or more into the last.
#[inline]
pub fn bin(magnitude: f32) -> usize {
    ((magnitude.to_bits() >> SHIFT).saturating_sub(FIRST) as usize).min(BINS - 1)
}

/// Lower edge of a bin; that of the first is 0.
pub fn edge(bin: usize) -> f32 {
    if bin == 0 { 0.0 } else { f32::from_bits((FIRST + bin as u32) << SHIFT) }
}

/// The activation threshold that leaves the share `share` (0 to 1) of the magnitudes in `bins`, `[BINS]`, at or below it; magnitudes are
/// taken as evenly spread within a bin. 0 where `bins` are empty.
pub fn threshold_for_sparsity(bins: &[u64], share: f64) -> f32 {
    let all: u64 = bins.iter().sum();
    let wanted = share * all as f64;
    let mut below = 0.0;
    for (i, &n) in bins.iter().enumerate().filter(|(_, n)| **n > 0) {
        if below + n as f64 >= wanted {
            let (from, to) = (edge(i) as f64, edge(i + 1) as f64);
            return (from + (to - from) * (wanted - below) / n as f64) as f32;
        }
        below += n as f64;
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bin_holds_what_lies_between_its_edges() {
        for i in 0..BINS {
            let (from, to) = (edge(i), edge(i + 1));
            assert!(from < to);
            assert_eq!((bin(from), bin(to.next_down())), (i, i));
            // Bins are narrow because silu's magnitudes pile up at 0.278, that of its minimum, and a threshold may fall there.
            assert!(i == 0 || to / from <= 1.0 + 1.0 / 32.0 + 1e-6);
        }
        assert_eq!((edge(1), edge(BINS)), (2f32.powi(-14) * 33.0 / 32.0, 64.0));
        assert_eq!((bin(0.0), bin(1e-30), bin(1e30), bin(f32::INFINITY)), (0, 0, BINS - 1, BINS - 1));
    }

    #[test]
    fn a_cut_of_nothing_is_zero_and_shares_rise() {
        assert_eq!(threshold_for_sparsity(&[0; BINS], 0.5), 0.0);
        let mut bins = vec![0; BINS];
        (bins[100], bins[120]) = (10, 30);
        assert_eq!(threshold_for_sparsity(&bins, 0.25), edge(101));
        assert_eq!(threshold_for_sparsity(&bins, 0.125), (edge(100) + edge(101)) / 2.0);
        assert_eq!(threshold_for_sparsity(&bins, 1.0), edge(121));
    }
}
