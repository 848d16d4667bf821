//! Plans and what they rest on: placements, profiles, predictors, traces and simulations.

mod bounds;
mod experiments;
mod fit;
#[path = "../support/gguf.rs"]
mod gguf_file;
mod placement;
mod placement_problem;
mod predictor_verbs;
mod predictors;
mod profile;
#[path = "../support/programs.rs"]
mod programs;
mod simulate;
#[path = "../support/mod.rs"]
mod support;
mod synth;
mod traces;
mod training;
