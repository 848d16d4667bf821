//! Research: synthetic models and traces, recording, replay, simulation, experiments.

pub mod bound;
pub mod clusters;
pub mod experiment;
pub mod link;
pub mod logits_hash;
pub mod record;
pub mod replay;
pub mod simulate;
pub mod synth;
pub mod trace_run;
