//! Jobs beside inference: packing, measuring, evaluating, profiling, training predictors, traces and their replay, simulation, experiments,
//! synthetic models.

pub mod audit;
pub mod bench;
pub mod clusters;
pub mod evaluate;
pub mod experiment;
pub mod fit;
pub mod histogram;
pub mod kernel_check;
pub mod kernel_choice;
pub mod link;
pub mod logits_hash;
pub mod measure;
#[cfg(feature = "cuda")]
pub mod measure_card;
pub mod network;
pub mod pack;
pub mod profile;
pub mod record;
pub mod replay;
pub mod samples;
pub mod simulate;
pub mod synth;
pub mod timeline;
pub mod trace_run;
pub mod train;
