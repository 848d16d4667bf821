//! dots.llm1: a mixture of DeepSeek's kind with normed queries and keys.

use super::leading::{self, Router};
use super::names::{GGUF, LLAMA, Names};
use super::{Family, qwen2};
use crate::model::layer::Scoring;
use crate::model::role::Role;

pub(super) const FAMILY: Family = Family {
    name: "dots1",
    known_as: "dots1",
    config_json: |c| qwen2::windowed(c, leading::config_json(c, "dots1", Router::usually(Scoring::Sigmoid))?),
    gguf: Some(|k| leading::gguf(k, Router::usually(Scoring::Sigmoid), None)),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF,
};

const NAMES: Names = {
    let names = LLAMA.with(Role::SelectionBias, "mlp.gate.e_score_correction");
    Names { shared: leading::SHARED, ..names }
};
