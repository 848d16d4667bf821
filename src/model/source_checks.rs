//! What a published model's tensors say of its layers, and whether all are there.

use super::config::{Ffn, Norm};
use super::layer::{Norms, RouterInput};
use super::role::Role;
use super::source::{Read, Source};
use super::source_vectors::check_vector;
use crate::error::{Error, Result};
use std::collections::HashSet;
use std::path::Path;

/// Roles of vectors beside the norms that every family has.
const VECTORS: [Role; 13] = [
    Role::QNorm,
    Role::KNorm,
    Role::Sinks,
    Role::SharedRouter,
    Role::OutputScale,
    Role::RouterScale,
    Role::ExpertScales,
    Role::SharedNorm,
    Role::SharedPostNorm,
    Role::ExpertsPostNorm,
    Role::PerLayerPostNorm,
    Role::QueryLatentNorm,
    Role::LatentNorm,
];

impl Read {
    /// Tells gate and up apart where a file has them in one matrix, in models without experts. A GGUF calls that by up's name, and it has twice
    /// the rows.
    pub(super) fn tell_gates_apart(&mut self) {
        let Read { described, names, tensors, .. } = self;
        if described.ffn_kind == Ffn::Plain || described.form.experts.is_some() || !names.has(Role::Gate) {
            return;
        }
        for layer in 0..described.layers {
            let (joined, halves) = names.of_gate_and_up(layer);
            let ffn = described.form.widths.get(layer).copied().unwrap_or(described.ffn);
            let is_double = || tensors.get(&joined).is_some_and(|view| view.info.shape.first() == Some(&(2 * ffn)));
            if joined != halves[1] || is_double() {
                tensors.halve_rows(&joined, halves);
            }
        }
    }

    /// Adds to the configuration what only the tensors of layers show, such as norms of queries and keys: a model that ran without it
    /// would give wrong answers.
    pub(super) fn see_forms(&mut self, path: &Path) -> Result<()> {
        let before = format!("{}{}", self.names.outer, self.names.layer);
        let inside: HashSet<&str> = self.tensors.iter().filter_map(|t| inside(&t.info.name, &before)).collect();
        let has = |parts: &[&str]| inside.iter().any(|name| parts.iter().any(|part| name.contains(part)));
        let form = &mut self.described.form;
        form.qk_norm |= has(&["attn_q_norm.", ".q_norm.", ".q_layernorm."]);
        form.sinks |= has(&["attn_sinks", ".sinks"]);
        if form.sinks && !self.names.has(Role::Sinks) {
            return Err(Error::bad(path, "", "its attention has sinks, which is supported in a GGUF only"));
        }
        if let Some(experts) = &mut form.experts
            && has(&["exp_probs_b.", "e_score_correction_bias", "feed_forward.expert_bias"])
        {
            if !self.names.has(Role::SelectionBias) {
                let why = "its router has a selection bias, which is supported in a GGUF only; take a GGUF of it";
                return Err(Error::bad(path, "", why));
            }
            experts.selection_bias = true;
        }
        if has(&["_exps.bias", "ffn_gate_inp.bias"]) && !form.experts.is_some_and(|experts| experts.biases) {
            let why = format!("its experts have biases, which is not supported for {}", self.described.family);
            return Err(Error::bad(path, "", why));
        }
        if has(&["_shexp.", "shared_expert"]) && form.experts.is_none_or(|experts| experts.shared.is_none()) {
            let why = format!("its layers have shared experts, which is not supported for {}", self.described.family);
            return Err(Error::bad(path, "", why));
        }
        if has(&["post_ffw_norm.", "post_feedforward_layernorm."]) {
            form.norms = if has(&["attn_norm.", "input_layernorm."]) { Norms::Around } else { Norms::After };
            if !self.names.has(Role::FfnPostNorm) {
                let why = format!(
                    "its layers have norms behind attention and FFN, which is not supported for {}",
                    self.described.family
                );
                return Err(Error::bad(path, "", why));
            }
        }
        Ok(())
    }
}

impl Source {
    /// Checks that every tensor that packing will read is there with its shape, before the first byte is written.
    pub(super) fn check_all(&self) -> Result<()> {
        let c = &self.config;
        let layer_norm = matches!(c.norm, Norm::Layer(_));
        self.weight(Role::Embed, 0)?;
        check_vector(self.weight(Role::OutNorm, 0)?)?;
        if !c.tied {
            self.weight(Role::Head, 0)?;
        }
        if c.learned_positions.is_some() {
            self.weight(Role::Positions, 0)?;
        }
        if c.per_layer > 0 {
            self.weight(Role::PerLayerTable, 0)?;
            self.weight(Role::PerLayerProjection, 0)?;
            check_vector(self.weight(Role::PerLayerNorm, 0)?)?;
        }
        for layer in 0..c.layers().len() {
            let (inputs, output) = Role::of_mixer(c.mixer(layer));
            let (first, others): (Vec<Role>, Vec<Role>) = self.norms(layer).partition(|role| *role == Role::AttnNorm);
            let mut roles: Vec<Role> = first.into_iter().chain(inputs.iter().copied()).chain([output]).collect();
            roles.extend(others);
            let attention = c.attention(layer);
            self.recurrence(layer)?;
            if let Some(a) = attention.filter(|a| a.qk_norm) {
                roles.push(Role::QNorm);
                roles.extend(a.keys_of.is_none().then_some(Role::KNorm));
            }
            if c.per_layer > 0 {
                roles.extend([Role::PerLayerGate, Role::PerLayerOut, Role::PerLayerPostNorm]);
            }
            let [norms, matrices] = self.latent_roles(layer);
            roles.extend(norms.iter().chain(matrices));
            roles.extend((attention.is_some_and(|a| a.sinks)).then_some(Role::Sinks));
            roles.extend(c.layer(layer).output_scale.then_some(Role::OutputScale));
            roles.extend(self.ffn_roles(layer)?);
            for role in roles {
                let view = self.weight(role, layer)?;
                if VECTORS.contains(&role) || self.norms(layer).any(|norm| norm == role) {
                    check_vector(view)?;
                }
                let biased = match role {
                    Role::Q | Role::K | Role::V => attention.is_some_and(|a| a.bias),
                    Role::O => attention.is_some_and(|a| a.output_bias),
                    Role::AttnNorm | Role::FfnNorm => layer_norm,
                    Role::Up | Role::Down => c.ffn_bias,
                    _ => false,
                };
                if biased {
                    check_vector(self.find(role, layer, "bias", &[self.shape(role, layer)[0]])?)?;
                }
            }
        }
        if layer_norm {
            check_vector(self.find(Role::OutNorm, 0, "bias", &[c.hidden])?)?;
        }
        self.check_vocabulary()
    }

    /// The roles of a layer's FFN but its norms, the matrices of experts left out: those are checked here.
    fn ffn_roles(&self, layer: usize) -> Result<Vec<Role>> {
        let c = &self.config;
        let gate_and_up = Role::gate_and_up(c.ffn_kind).iter();
        let Some(experts) = c.experts(layer) else {
            return Ok(gate_and_up.rev().chain(&[Role::Down]).copied().filter(|_| c.has_ffn(layer)).collect());
        };
        let (inputs, down) = self.shared_roles(layer);
        let of_shared = inputs.iter().copied().chain([down]);
        let mut roles: Vec<Role> = of_shared.filter(|_| experts.shared.is_some()).collect();
        if experts.count == 0 {
            return Ok(roles);
        }
        self.weight(Role::Router, layer)?;
        if experts.selection_bias {
            check_vector(self.find(Role::SelectionBias, layer, "bias", &[experts.count])?)?;
        }
        if experts.biases {
            check_vector(self.find(Role::Router, layer, "bias", &[experts.count])?)?;
            for role in [Role::Gate, Role::Up, Role::Down] {
                check_vector(self.find_expert_biases(role, layer)?)?;
            }
        }
        roles.extend((experts.reads == RouterInput::Own).then_some(Role::RouterScale));
        roles.extend(experts.scaled.then_some(Role::ExpertScales));
        if let Some(shared) = experts.shared {
            let norms = [Role::SharedNorm, Role::SharedPostNorm, Role::ExpertsPostNorm];
            roles.extend(norms.into_iter().filter(|_| shared.normed));
            roles.extend(shared.weighted.then_some(Role::SharedRouter));
        }
        for expert in 0..experts.count {
            let mut matrices = gate_and_up.clone().chain(&[Role::Down]);
            matrices.try_for_each(|&role| self.expert(role, layer, expert).map(drop))?;
        }
        Ok(roles)
    }

    /// Checks that every token has an embedding. There may be more embeddings: they are padding.
    fn check_vocabulary(&self) -> Result<()> {
        let Some(tokenizer) = &self.tokenizer else { return Ok(()) };
        let (tokens, rows) = (tokenizer.vocab_len(&self.path)?, self.config.vocab);
        if tokens <= rows {
            return Ok(());
        }
        let why = format!(
            "the tokenizer has {tokens} tokens and the model {rows} rows of embeddings: it belongs to another model, or \
             tokens were added that the model does not know; take the tokenizer that was published with it"
        );
        Err(Error::bad(&self.path, "vocabulary", why))
    }
}

/// A tensor's name behind the number of its layer, where it begins with `before` and a number.
fn inside<'a>(name: &'a str, before: &str) -> Option<&'a str> {
    let (number, rest) = name.strip_prefix(before)?.split_once('.')?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then_some(rest)
}
