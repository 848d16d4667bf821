//! What a layer reads other positions with, on the host, once the projections of its input are there.

use super::attention::{self, Queries, attention};
use super::convolution::convolve;
use super::latent::{LatentRoom, latent_attention};
use super::linear_attention::{LinearRoom, Net, linear_attention};
use super::positions::{TokenPosition, runs};
use crate::cpu::attend::AttendScratch;
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Kernels, MAX_COLUMNS, ThreadPool};
use crate::model::KvCache;
use crate::model::config::{ModelConfig, Norm};
use crate::model::layer::{Attention, Mixer};
use crate::model::weights::Layer;

/// Working memory of a mixer.
pub(super) struct Room<'a> {
    /// Of attention, one per thread.
    pub attend: &'a mut [AttendScratch],
    pub linear: &'a mut LinearRoom,
    pub latent: &'a mut LatentRoom,
}

/// out[t] = what the output matrix of layer `l` reads for token t, `[n, cols]`. `projected` is `[n, rows]`; of attention its queries and keys are
/// rotated, those made of latents excepted, and its keys and values are in the caches. The tokens of a sequence follow each other.
pub(super) fn mix(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    (c, layer, l): (&ModelConfig, &Layer, usize),
    caches: &mut [KvCache],
    positions: &[TokenPosition],
    projected: &[f32],
    room: Room<'_>,
    out: &mut [f32],
) {
    match c.mixer(l) {
        Mixer::Attention(a) if let Some(latent) = a.latent => {
            let room = (room.attend, room.latent);
            latent_attention((pool, kernels), (c, layer, l), (a, latent), caches, positions, projected, room, out);
        }
        Mixer::Attention(a) => {
            let queries = Queries { numbers: projected, stride: a.qkv_dim() };
            attention((pool, kernels), a, layer, caches, l, positions, queries, room.attend, out);
            if a.gated {
                apply_gate(pool, a, projected, out);
            }
        }
        Mixer::Convolution(form) => {
            convolve(pool, (form, &layer.recurrence.taps), caches, l, positions, projected, out);
        }
        Mixer::Linear(form) => {
            let (Norm::Rms(epsilon) | Norm::Layer(epsilon)) = c.norm;
            let net = Net { layer: l, form, weights: &layer.recurrence, epsilon };
            linear_attention((pool, kernels), net, caches, positions, projected, room.linear, out);
        }
    }
}

/// Multiplies what the heads have made by the sigmoid of the gate, which stands behind the queries.
fn apply_gate(pool: &mut ThreadPool, a: Attention, projected: &[f32], out: &mut [f32]) {
    let (q_dim, rows) = (a.q_dim(), a.qkv_dim());
    let (n, out) = (out.len() / q_dim, Parts::new(out));
    pool.run(n, |_, t| {
        // SAFETY: each task has a token of its own.
        let out = unsafe { out.part(t * q_dim..(t + 1) * q_dim) };
        let gate = &projected[t * rows + q_dim..][..q_dim];
        out.iter_mut().zip(gate).for_each(|(out, &gate)| *out *= crate::exp::sigmoid(gate));
    });
}

/// Bytes that the mixer of layer `l` reads for these tokens beside its matrices, and its multiplications and additions where they are many, each
/// counted: what a clock that is made of rates takes for it.
pub(super) fn work(mixer: Mixer, positions: &[TokenPosition]) -> (u64, u64) {
    let (n, state) = (positions.len(), runs(positions).count() * 2 * size_of::<f32>() * mixer.kept());
    let (bytes, each) = match mixer {
        Mixer::Attention(a) => return attention::work(&a, positions),
        Mixer::Convolution(form) => (state, 2 * (form.taps + 2) * form.hidden),
        Mixer::Linear(form) => (state, 2 * form.taps * form.channels() + 8 * form.values() * form.key_dim),
    };
    (bytes as u64, if n > MAX_COLUMNS { (n * each) as u64 } else { 0 })
}
