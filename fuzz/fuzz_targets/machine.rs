//! Any bytes as a machine profile: refused, or every rate is one that a machine may have, and it reads back as it was written.
#![no_main]

mod support;

use dynamicinfer::formats::machine_profile::{MachineProfile, Rate};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = support::file(bytes);
    let Some(profile) = support::accepted(MachineProfile::read(&path), "make it again with") else { return };
    assert!(Rate::ALL.iter().all(|&rate| profile.rate(rate) > 0.0 && profile.rate(rate).is_finite()));
    assert!(profile.moves.iter().all(|rate| rate.us(1 << 20, 1 << 40).is_finite()));
    profile.write(&path).unwrap();
    assert_eq!(MachineProfile::read(&path).unwrap(), profile);
});
