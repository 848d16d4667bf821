//! The root's laws with every vector instruction in plain Rust: each kernel of each instruction set runs, whatever the machine at hand has.
//!
//! Left out is what multiplies so much that it would take minutes here: prompts of thousands of tokens, and laws with many seeds.
//!
//! Laws of kernels go through all sets by themselves. Those of the engine take the best; so this program runs them once more for each other
//! set, as `DYNAMICINFER_ISA` names it.

// What the root's laws share stands in each of them.
#![allow(clippy::duplicate_mod)]

#[path = "../../../../tests/processor/floats.rs"]
mod floats;
#[path = "../../../../tests/processor/gemm.rs"]
mod gemm;
#[path = "../../../../tests/support/gguf.rs"]
mod gguf_file;
#[path = "../../../../tests/models/gpt_oss.rs"]
mod gpt_oss;
#[path = "../../../../tests/in_place.rs"]
mod in_place;
#[path = "../../../../tests/processor/instruction_sets.rs"]
mod instruction_sets;
#[path = "../../../../tests/processor/kernels.rs"]
mod kernels;
#[path = "../../../../tests/mixtures.rs"]
mod mixtures;
#[path = "../../../../tests/planning/predictors.rs"]
mod predictors;
#[path = "../../../../tests/support/reference.rs"]
mod reference;
#[path = "../../../../tests/models/reference_models.rs"]
mod reference_models;
#[path = "../../../../tests/processor/sparse.rs"]
mod sparse;
#[path = "../../../../tests/support/mod.rs"]
mod support;

use dynamicinfer::cpu::Isa;
use std::process::Command;

/// Modules whose laws take the best kernels.
const BY_ENGINE: [&str; 3] = ["mixtures::", "reference_models::", "sparse::"];

#[test]
fn laws_of_the_engine_hold_with_every_instruction_set() {
    // Plain Rust has nothing to emulate: the root's tests run it.
    let [_best, others @ .., _portable] = Isa::ALL;
    for isa in others {
        let mut again = Command::new(std::env::current_exe().unwrap());
        // Which goes through all sets by itself.
        let said = again
            .args(BY_ENGINE)
            .args(["--skip", "every_instruction_set"])
            .env("DYNAMICINFER_ISA", isa.name())
            .output()
            .unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success(), "with {}:\n{text}", isa.name());
        assert!(BY_ENGINE.iter().all(|module| text.contains(&format!("test {module}"))), "laws of each ran:\n{text}");
    }
}
