//! The beginning of a pass, the same for host and device.

use super::attention::queries;
use super::forward::Pass;
use super::per_layer::make_layer_inputs;
use crate::ops::linear::read_row;
use crate::ops::math;

/// Writes the tokens' rows of the embedding to the residual `buffers.x`, and gives the other buffers the size of the pass.
pub(super) fn embed(pass: &mut Pass<'_, '_>) {
    let Pass { model, buffers: b, caches, .. } = pass;
    let (c, n) = (&model.config, b.positions.len());
    let h = c.hidden;
    b.x.resize(n * h, 0.0);
    b.normed.resize(n * h, 0.0);
    b.qkv.resize(n * c.most_of_mixers(|m| m.rows()), 0.0);
    b.attended.resize(n * c.most_of_mixers(|m| m.cols()), 0.0);
    b.projected.resize(n * h, 0.0);
    // Attention's scratch memory grows with the position: all that the context needs at once, for nothing is allocated later.
    let context = caches.iter().map(|kv| kv.context).max().unwrap_or(0);
    let head_dim = c.most_of_attention(|a| a.head_dim);
    b.attend.iter_mut().for_each(|room| room.reserve(queries(c), context, head_dim));
    for ((&token, at), x) in b.tokens.iter().zip(&b.positions).zip(b.x.chunks_exact_mut(h)) {
        read_row(&model.embed, token as usize, x);
        if c.embedding_scale != 1.0 {
            x.iter_mut().for_each(|x| *x *= c.embedding_scale);
        }
        if let (Some(table), Some(offset)) = (&model.positions, c.learned_positions) {
            read_row(table, at.position + offset, &mut b.projected[..h]);
            math::add(x, &b.projected[..h]);
        }
    }
    make_layer_inputs(pass);
}
