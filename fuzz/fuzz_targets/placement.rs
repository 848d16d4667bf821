//! Any bytes as a placement: refused, or it names neurons that are there, each once, and reads back as it was written.
#![no_main]

mod support;

use dynamicinfer::formats::placement_file::PlacementFile;
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;

fuzz_target!(|bytes: &[u8]| {
    let path = support::file(bytes);
    let Some(placement) = support::accepted(PlacementFile::read(&path), "make it again with") else { return };
    for layer in &placement.layers {
        assert!(layer.neurons.len() <= layer.slots && layer.slots <= placement.ffn);
        let mut seen = HashSet::new();
        assert!(layer.neurons.iter().all(|&n| (n as usize) < placement.ffn && seen.insert(n)));
    }
    placement.write(&path).unwrap();
    assert_eq!(PlacementFile::read(&path).unwrap(), placement);
});
