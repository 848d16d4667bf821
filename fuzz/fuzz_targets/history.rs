//! Any bytes as a scheduler's history, as they are and put right: refused, or each layer has a frequency for each neuron.
#![no_main]

mod support;

use dynamicinfer::formats::history_file::{open, read};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fn check(path: &Path) {
    let Some(file) = support::accepted(open(path), "delete it; it is written anew") else { return };
    for layer in 0..file.header.layers {
        let frequencies = read(&file, layer).unwrap();
        assert_eq!(frequencies.len(), file.header.ffn);
        assert!(frequencies.iter().all(|f| (0.0..=1.0).contains(f)));
    }
}

fuzz_target!(|bytes: &[u8]| support::both(bytes, b"HISTORY\0", |_| (), check));
