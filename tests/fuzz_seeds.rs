//! The fuzz targets without a fuzzer: they compile, and their seeds, cut and changed a little, are taken as the targets promise. Three of them
//! did not compile any more when the library had changed, and nothing said so.

// A target is the root of a program of its own, which has what targets share as a module.
#![allow(unused_attributes, dead_code, clippy::duplicate_mod)]

#[path = "../fuzz/fuzz_targets/counts.rs"]
mod counts;
#[path = "../fuzz/fuzz_targets/gguf.rs"]
mod gguf;
#[path = "../fuzz/fuzz_targets/history.rs"]
mod history;
#[path = "../fuzz/fuzz_targets/machine.rs"]
mod machine;
#[path = "../fuzz/fuzz_targets/model.rs"]
mod model;
#[path = "../fuzz/fuzz_targets/neuron_store.rs"]
mod neuron_store;
#[path = "../fuzz/fuzz_targets/placement.rs"]
mod placement;
#[path = "../fuzz/fuzz_targets/predictor.rs"]
mod predictor;
#[path = "../fuzz/fuzz_targets/profile.rs"]
mod profile;
#[path = "../fuzz/fuzz_targets/request.rs"]
mod request;
#[path = "../fuzz/fuzz_targets/safetensors.rs"]
mod safetensors;
#[path = "../fuzz/fuzz_targets/schema.rs"]
mod schema;
#[path = "../fuzz/fuzz_targets/shard_index.rs"]
mod shard_index;
#[path = "../fuzz/fuzz_targets/tokenizer.rs"]
mod tokenizer;
#[path = "../fuzz/fuzz_targets/trace.rs"]
mod trace;

use dynamicinfer::prng::Prng;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// Gives a target its seeds as they are, cut at a place and with some bytes changed; `times` of each.
fn replay(name: &str, times: usize, target: fn(&[u8])) {
    let mut prng = Prng::new(name.len() as u64);
    let mut seeds: Vec<PathBuf> =
        std::fs::read_dir(folder().join("seeds").join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    assert!(!seeds.is_empty(), "{name} has no seeds");
    for seed in seeds {
        let bytes = std::fs::read(&seed).unwrap();
        // What a fault names.
        println!("{}", seed.display());
        target(&bytes);
        for _ in 0..times {
            target(&bytes[..prng.below(bytes.len() as u64 + 1) as usize]);
            let mut changed = bytes.clone();
            for _ in 0..1 + prng.below(3) {
                let at = prng.below(bytes.len() as u64) as usize;
                changed[at] ^= 1 << prng.below(8);
            }
            target(&changed);
        }
    }
}

macro_rules! replays {
    ($($name:ident $times:literal;)*) => {
        $(mod $name {
            #[test]
            fn takes_its_seeds_and_changes_of_them() {
                super::replay(stringify!($name), $times, super::super::$name::target);
            }
        })*
    };
}

// `counts` limits the memory of its process (`tests/counts.rs` is its law), and `schema` asks a program that is built before.
mod targets {
    use super::replay;

    replays! {
        gguf 200;
        history 100;
        machine 100;
        model 20;
        neuron_store 100;
        placement 100;
        predictor 50;
        profile 100;
        request 200;
        safetensors 200;
        shard_index 100;
        tokenizer 20;
        trace 20;
    }
}

#[test]
fn every_target_is_a_module_here() {
    let here = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz_seeds.rs")).unwrap();
    for entry in std::fs::read_dir(folder().join("fuzz_targets")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name == "support.rs" || here.contains(&format!("fuzz_targets/{name}")), "{name} is not compiled here");
    }
}
