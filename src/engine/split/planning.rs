//! How a pass goes in parts on host and device, and which rows the current part has.

use super::attention_streaming::AttentionStreaming;
use super::parts::{ALIGN, Cut, LayerCosts, MAX_PARTS, PartsSetting, Rows, steps};
use super::state::Split;
use super::streaming::{Beside, ChunkCosts};
use super::workspace::ExchangeLayout;
use crate::device::{Buffer, View};
use crate::engine::forward::Pass;
use crate::model::Model;
use crate::model::config::ModelConfig;

impl Split {
    /// How chunks go in parts from now on.
    pub fn set_parts(&mut self, setting: PartsSetting) {
        self.parts.setting = setting;
    }

    /// Plans a pass: all of it at once, or a chunk in parts.
    pub(super) fn plan_parts(&mut self, pass: &mut Pass<'_, '_>) {
        let (n, c) = (pass.n(), &pass.model.config);
        self.rows = Rows::whole(n);
        self.parts.begin(Cut::WHOLE, Beside { parts: 1, copies: 1, ..Beside::default() });
        let PartsSetting { parts, shared, order } = self.parts.setting;
        let unknown = parts.is_none() && self.parts.costs.is_none();
        if !pass.is_chunk() || c.is_mixture() || c.recurs() || unknown {
            return;
        }
        let costs = self.layer_costs(pass);
        let cut = match parts {
            Some(1) => Cut::WHOLE,
            parts => costs.cut(parts.map(|parts| parts.min(MAX_PARTS).min(n / ALIGN).max(1)), shared),
        };
        self.parts.begin(cut, costs.beside(cut));
        if cut.parts > 1 {
            steps(&costs.order(cut, c.layers().len(), order), c.layers().len(), cut.shared, pass.steps);
        }
    }

    /// What the link takes for a layer's attention in the mean, at the rate of the neurons' blocks, us.
    fn attention_link_us(&self, model: &Model) -> f64 {
        let bytes = self.attention_streaming.as_ref().map_or(0, AttentionStreaming::bytes);
        match self.parts.costs.filter(|_| bytes > 0 && model.has_neurons()) {
            Some(costs) => {
                bytes as f64 / model.layers.len() as f64 * costs.link_us / model.layers[0].block().bytes() as f64
            }
            None => 0.0,
        }
    }

    fn layer_costs(&self, pass: &Pass<'_, '_>) -> LayerCosts {
        let c = &pass.model.config;
        let weights = (c.ffn_kind.rows() * c.hidden) as f64;
        let slots = self.residents() / c.layers().len();
        let mean = |sum: usize| sum as f64 / c.layers().len() as f64;
        let (qkv, q) = c.mixers().fold((0, 0), |(qkv, q), m| (qkv + m.rows(), q + m.cols()));
        let (qkv, q) = (mean(qkv), mean(q));
        let windows = || (0..c.layers().len()).filter_map(|l| c.attention(l)?.window);
        LayerCosts {
            costs: self.parts.costs.unwrap_or(ChunkCosts::ONES),
            project: qkv * c.hidden as f64 / weights,
            output: q * c.hidden as f64 / weights,
            position: 2.0 * q / weights,
            crossing: (qkv + q) / (2 * c.hidden) as f64,
            slots,
            missing: c.widest_ffn() - slots,
            copies: self.streaming.is_some(),
            attention_link_us: self.attention_link_us(pass.model),
            host_attends: !self.can_attend(pass) || c.mixers().all(|mixer| mixer.on_device().is_none()),
            windowed: windows().count() as f64 / c.layers().len() as f64,
            window: windows().sum::<usize>() / windows().count().max(1),
            first: pass.buffers.positions[0].position,
            n: pass.n(),
        }
    }

    /// The next steps are those of this part.
    pub(super) fn set_part(&mut self, number: usize) {
        self.parts.number = number;
        self.rows = Rows::part(self.rows.all, self.parts.count, number);
    }

    /// The part of a buffer that has `numbers` numbers for each token which the current part's tokens have.
    pub(super) fn rows_of(&self, buffer: Buffer, numbers: usize) -> View {
        View { buffer, at: (self.rows.first * numbers * 4) as u64 }
    }

    /// The current part's normalised input on the device.
    pub(super) fn input(&self, c: &ModelConfig) -> View {
        self.at(self.rows.first * c.hidden)
    }

    /// The current part's residual on the device.
    pub(super) fn residual(&self, c: &ModelConfig) -> View {
        self.at(ExchangeLayout::new(self.rows.all, c).residual() + self.rows.first * c.hidden)
    }

    /// Where the current part's outputs of attention and FFN are added up: the residual, or by themselves where they are normed first.
    pub(super) fn sum(&self, c: &ModelConfig) -> View {
        match c.norms_outputs() {
            true => self.rows_of(self.workspace.output_sum, c.hidden),
            false => self.residual(c),
        }
    }
}
