//! Any bytes as an activation profile, as they are and put right: refused, or its sums are whole and its figures can be drawn up.
#![no_main]

mod support;

use dynamicinfer::formats::profile_file::{BINS, open, open_unfinished};
use dynamicinfer::profile::{Importance, Profile};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fn check(path: &Path) {
    let Some(file) = support::accepted(open_unfinished(path), "make it again with") else { return };
    let profile = Profile::read(&file).unwrap();
    let h = &profile.header;
    for text in &profile.texts {
        assert_eq!((text.counts.len(), text.sums.len()), (h.layers * h.ffn, h.layers));
        assert_eq!(text.magnitudes.len(), h.sparsity.map_or(0, |_| h.layers * BINS));
        if let Some(inputs) = &text.inputs {
            assert_eq!(inputs.squares.len(), h.layers * (2 * h.hidden + inputs.q_dim));
            assert!(inputs.squares.iter().all(|s| s.is_finite() && *s >= 0.0));
        }
    }
    if support::accepted(open(path), "make it again with").is_some() {
        profile.statistics();
        let importance = Importance::of(&profile);
        assert_eq!(importance.is_some(), profile.texts.iter().any(|text| text.inputs.is_some()));
        for layer in 0..h.layers {
            if let Some(importance) = &importance {
                let lengths =
                    [importance.qkv(layer), importance.output(layer), importance.ffn(layer)].map(<[f32]>::len);
                assert_eq!(lengths, [h.hidden, importance.shape[2], h.hidden]);
            }
            assert!(profile.counts(layer).iter().all(|&n| n <= profile.tokens()));
            assert_eq!(profile.threshold_for_sparsity(layer, 0.5).is_some(), h.sparsity.is_some());
        }
    }
}

fuzz_target!(|bytes: &[u8]| support::both(bytes, b"PROFILE\0", |_| (), check));
