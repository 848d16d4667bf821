//! Attention of a pass on host and device, between the projections and the FFN: over keys and values on the device, or in host memory where
//! there is no room for them.

use super::parts::Rows;
use super::state::Split;
use crate::clock;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Append, Attend, Call, Heads, HostWork, Stage, Stream, Then, View};
use crate::engine::attention;
use crate::engine::batch::Buffers;
use crate::engine::forward::Pass;
use crate::engine::mixer::{self, Room};
use crate::engine::positions::TokenPosition;
use crate::model::config::{ModelConfig, Norm};

/// What a layer has whose keys and values lie on the device.
const ATTENDS: &str = "a layer with attention";

impl Split {
    /// Whether the device computes the attention of layer `l` in the current pass: not what is no attention, nor one with a gate.
    pub(super) fn attends_at(&self, c: &ModelConfig, l: usize) -> bool {
        self.attends && c.mixer(l).on_device().is_some()
    }

    /// The shape of a layer's attention and its keys and values on the device.
    fn heads(&self, l: usize) -> Heads {
        self.kv.as_ref().expect("looked at when the pass began").layers[l]
    }

    /// Whether there is room on the device for the keys and values of a pass.
    pub(super) fn can_attend(&self, pass: &Pass<'_, '_>) -> bool {
        self.kv.as_ref().is_some_and(|kv| kv.takes(&pass.buffers.positions, pass.caches))
    }

    /// Multiplies attention's output by the output matrix and adds it to the residual: the last that needs the layer's matrices. Of a chunk the
    /// neurons that are copied for this layer come before the next matrices, which then come while the device computes the next layer's attention.
    pub(super) fn add_attention(&mut self, c: &ModelConfig, l: usize) {
        let (attended, sum) = (self.rows_of(self.workspace.attended, c.mixer(l).cols()), self.sum(c));
        let post_norm = self.weights.layers[l].post_norms.map(|[attention, _]| attention);
        let then = if post_norm.is_some() { Then::Store } else { Then::Add };
        self.launch(Call::Linear(self.weights.layers[l].o.call(self.rows.n, attended, sum, then)));
        self.add_sum(c, post_norm.map(|norm| (norm, 1.0)));
        if let Some(streaming) = &mut self.attention_streaming {
            streaming.used(&mut *self.device, l, self.parts.count);
        }
        if self.records {
            self.stream_attention();
        }
    }

    /// Begins the copies of matrices for which there is room now.
    pub(super) fn stream_attention(&mut self) {
        if let Some(streaming) = &mut self.attention_streaming {
            streaming.go_on(&mut *self.device);
        }
    }

    /// Rotates queries and keys, and adds keys and values to those on the device.
    pub(super) fn append(&mut self, c: &ModelConfig, l: usize) {
        let (heads, a) = (self.heads(l), c.attention(l).expect(ATTENDS));
        let angles = match self.weights.layers[l].rotation {
            None => self.weights.plain[0].into(),
            Some(number) => {
                let View { buffer, at } = self.rows_of(self.workspace.angles, a.head_dim);
                View { buffer, at: at + 4 * (number * self.angles_of_rotation) as u64 }
            }
        };
        let (qkv, positions) =
            (self.rows_of(self.workspace.qkv, a.qkv_dim()), self.rows_of(self.workspace.positions, 2));
        let (Norm::Rms(epsilon) | Norm::Layer(epsilon)) = c.norm;
        let (n, norms) = (self.rows.n, self.weights.layers[l].qk_norm);
        let value_norm = a.value_norm;
        self.launch(Call::Append(Append { heads, n, qkv, angles, positions, norms, epsilon, value_norm }));
    }

    /// Attention over keys and values on the device.
    pub(super) fn attend(&mut self, pass: &Pass<'_, '_>, l: usize) {
        let (c, rows) = (&pass.model.config, self.rows);
        let (heads, a) = (self.heads(l), c.attention(l).expect(ATTENDS));
        let (qkv, attended, positions) = (self.workspace.qkv, self.workspace.attended, self.workspace.positions);
        for (i, group) in pass.buffers.positions[rows.range()].chunks(MAX_COLUMNS).enumerate() {
            let most = group.iter().map(|p| p.position + 1).max().unwrap_or(1);
            let first = rows.first + i * MAX_COLUMNS;
            let part = |buffer, each: usize| View { buffer, at: (first * each * 4) as u64 };
            self.launch(Call::Attend(Attend {
                heads,
                n: group.len(),
                window: a.window,
                most,
                qkv: part(qkv, a.qkv_dim()),
                positions: part(positions, 2),
                sinks: self.weights.layers[l].sinks,
                out: part(attended, a.q_dim()),
            }));
        }
        // The host's caches get the same keys and values, once the device has made them.
        let (range, from) = (self.qkv_range(c, l), self.rows_of(qkv, a.qkv_dim()));
        let made = &mut self.host.qkv_read_back[range];
        let (to, bytes) = (made.as_mut_ptr().cast(), size_of_val(made));
        unsafe { self.device.copy_out(Stream::Compute, from.buffer, from.at, to, bytes) };
    }

    /// Puts the copy out of queries, keys and values on the stream, for attention on the host.
    pub(super) fn fetch_qkv(&mut self, c: &ModelConfig, l: usize) {
        let qkv_dim = c.mixer(l).rows();
        let (rows, from) = (self.rows, self.rows_of(self.workspace.qkv, qkv_dim));
        let qkv = &mut self.host.qkv[rows.first * qkv_dim..][..rows.n * qkv_dim];
        let (to, bytes) = (qkv.as_mut_ptr().cast(), size_of_val(qkv));
        unsafe { self.device.copy_out(Stream::Compute, from.buffer, from.at, to, bytes) };
        self.device.record(Stream::Compute, self.parts.marks().projected);
    }

    /// Attention over keys and values in host memory, once queries, keys and values have come: needs a copy more each way. It also needs a
    /// wait more, since the FFN's input depends on its output; not where both read the same residual, and one event covers what both need. The
    /// keys and values of all parts before are put into the caches first.
    pub(super) fn attend_on_host(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let Pass { model, pool, kernels, buffers, caches, .. } = pass;
        let (c, layer, number) = (&model.config, &model.layers[l], self.parts.number);
        let (q_dim, qkv_dim) = (c.mixer(l).cols(), c.mixer(l).rows());
        let Buffers { positions, cos_sin, attend, linear_room, latent_room, .. } = &mut **buffers;
        for part in 0..=number {
            self.set_part(part);
            if self.parts.put[part] > l {
                continue;
            }
            self.parts.put[part] = l + 1;
            if !self.attends_late {
                self.device.synchronize_event(self.parts.marks().projected);
            }
            let rows = self.rows;
            let qkv = &mut self.host.qkv[rows.first * qkv_dim..][..rows.n * qkv_dim];
            let qkv = bytemuck::cast_slice_mut(qkv);
            if let Some(a) = c.attention(l) {
                attention::rotate_and_put((c, a), layer, caches, l, &positions[rows.range()], qkv, cos_sin);
            }
        }
        let (rows, to) = (self.rows, self.rows_of(self.workspace.attended, q_dim));
        let Split { device, host, .. } = self;
        let qkv: &[f32] = bytemuck::cast_slice(&host.qkv[rows.first * qkv_dim..][..rows.n * qkv_dim]);
        let attended = &mut host.attended[rows.first * q_dim..][..rows.n * q_dim];
        let attended: &mut [f32] = bytemuck::cast_slice_mut(attended);
        let (positions, mut lap) = (&positions[rows.range()], clock::now());
        mixer::mix(
            (pool, kernels),
            (c, layer, l),
            caches,
            positions,
            qkv,
            Room { attend, linear: linear_room, latent: latent_room },
            attended,
        );
        let (bytes, operations) = mixer::work(c.mixer(l), positions);
        device.worked(HostWork { stage: Stage::Attention, bytes, operations, ns: clock::lap(&mut lap) });
        let bytes = size_of_val(attended);
        unsafe { device.copy_in(Stream::Compute, attended.as_ptr().cast(), bytes, to.buffer, to.at) };
    }

    /// Where a layer's queries, keys and values of the current part are read back to; for a chunk two layers take turns.
    pub(super) fn qkv_range(&self, c: &ModelConfig, l: usize) -> std::ops::Range<usize> {
        let Rows { first, n, all } = self.rows;
        let (turn, most) = (if all > MAX_COLUMNS { l % 2 } else { l }, self.workspace.widest_qkv);
        let numbers = c.mixer(l).rows();
        let start = turn * all * most + first * numbers;
        start..start + n * numbers
    }

    /// The host's caches get the keys and values of a pass of few tokens, of all layers.
    pub(super) fn read_back_all(&mut self, pass: &mut Pass<'_, '_>) {
        if self.attends {
            (0..pass.model.layers.len()).for_each(|l| self.read_back_kv(pass, l));
        }
    }

    /// The host's caches get the keys and values of a layer, which have come.
    pub(super) fn read_back_kv(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (c, positions) = (&pass.model.config, &pass.buffers.positions[self.rows.range()]);
        let Some(a) = c.mixer(l).on_device() else { return };
        let range = self.qkv_range(c, l);
        let made: &[f32] = bytemuck::cast_slice(&self.host.qkv_read_back[range]);
        for (&TokenPosition { sequence, position }, qkv) in positions.iter().zip(made.chunks_exact(a.qkv_dim())) {
            let (k, v) = qkv[a.q_dim()..].split_at(a.kv_dim());
            pass.caches[sequence].put(l, 0, position, k);
            pass.caches[sequence].put(l, 1, position, v);
        }
    }
}
