//! The purposes that tensors of a model have.

use super::config::Ffn;
use super::layer::Mixer;

/// What a tensor is for, by one name for all families. Tensors of a layer are asked for with the layer's number. The order is that of
/// the lists in [`Names`](super::families::names::Names).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The embedding of tokens, `[vocab, hidden]`.
    Embed,
    /// The matrix that makes logits of the last residual, `[vocab, hidden]`; absent where it is the embedding.
    Head,
    /// Learned positions, `[context + offset, hidden]` ([`super::Positions::Learned`]).
    Positions,
    /// The norm before the head, `[hidden]`.
    OutNorm,
    /// Attention's norm of a layer, `[hidden]`.
    AttnNorm,
    /// Queries of a layer, `[heads * head_dim, hidden]`.
    Q,
    /// Keys of a layer, `[kv_heads * head_dim, hidden]`.
    K,
    /// Values of a layer, `[kv_heads * head_dim, hidden]`.
    V,
    /// Attention's output projection of a layer, `[hidden, heads * head_dim]`.
    O,
    /// The FFN's norm of a layer, `[hidden]`; absent where attention's serves both.
    FfnNorm,
    /// The FFN's gate of a layer, `[ffn, hidden]`, or an expert's; absent where there is none.
    Gate,
    /// The FFN's up of a layer, `[ffn, hidden]`, or an expert's.
    Up,
    /// The FFN's down of a layer, `[hidden, ffn]`, or an expert's.
    Down,
    /// The norm of each head's queries of a layer, `[head_dim]`; absent where they are not normed.
    QNorm,
    /// The norm of each head's keys of a layer, `[head_dim]`; absent where they are not normed.
    KNorm,
    /// The router of a mixture of experts, `[experts, hidden]`; absent where the FFN is one.
    Router,
    /// A score of each query head that takes part in its softmax, `[heads]`; absent where there are none.
    Sinks,
    /// Numbers that are added to a router's scores for choosing only, `[experts]`; absent where there are none.
    SelectionBias,
    /// The norm of attention's output, `[hidden]`; absent, as the next, where outputs are added as they are.
    AttnPostNorm,
    /// The norm of the FFN's output, `[hidden]`.
    FfnPostNorm,
    /// The projections of a mixer that is no attention: b, c and x of a convolution, `[3 hidden, hidden]`; q, k and v of linear attention,
    /// `[channels, hidden]`. Absent, as the next two, where a layer has attention.
    MixerIn,
    /// The taps of its convolution, the oldest position's first, `[channels, taps]`.
    Taps,
    /// Its output projection, `[hidden, cols]`.
    MixerOut,
    /// The gate of attention's output, `[heads * head_dim, hidden]`; absent where there is none.
    AttnGate,
    /// The gate z of linear attention, `[values, hidden]`; absent, as the next ones, in other layers.
    DeltaGate,
    /// What beta is the sigmoid of, `[value_heads, hidden]`.
    DeltaBeta,
    /// What the decay is made of, `[value_heads, hidden]`.
    DeltaAlpha,
    /// What is added to alpha, `[value_heads]`.
    StepBias,
    /// What the softplus of alpha is multiplied by to be the logarithm of the decay, or the logarithm of its negative, `[value_heads]`.
    Decay,
    /// The norm of what heads make, `[head_dim]` or `[value_heads * head_dim]`.
    StateNorm,
    /// What a head's values are multiplied by to be added to its output, `[value_heads]`; absent in a delta net.
    Skip,
    /// A number that the residual behind a layer is multiplied by, `[1]`; absent where there is none.
    OutputScale,
    /// The weights of the norm of what a router reads, `[hidden]`; absent, as the next four, where it reads what the experts read.
    RouterScale,
    /// Numbers that the experts' weights are multiplied by, `[experts]`.
    ExpertScales,
    /// The norm of what a shared expert reads, `[hidden]`.
    SharedNorm,
    /// The norm of what it makes, `[hidden]`.
    SharedPostNorm,
    /// The norm of what the other experts make, `[hidden]`.
    ExpertsPostNorm,
    /// What makes the gate of a layer's own numbers of a token, `[their count, hidden]`; absent, as the next two, where there are none.
    PerLayerGate,
    /// What makes their part of the residual, `[hidden, their count]`.
    PerLayerOut,
    /// The norm of that part, `[hidden]`.
    PerLayerPostNorm,
    /// The norm of the latent that queries are made of, `[its numbers]`; absent, as the next, where there is none.
    QueryLatentNorm,
    /// What makes queries of it, `[heads * query, its numbers]`.
    QueryUp,
    /// The norm of the latent of keys and values, `[rank]`; absent, as the next, in layers without one.
    LatentNorm,
    /// What makes keys and values of it, of each head the rows of both, `[heads * (plain + values), rank]`; absent where these are apart.
    KeysAndValues,
    /// What makes keys of it, turned, `[heads, rank, plain]`; absent, as the next, where these are one.
    KeysTurned,
    /// What makes values of it, `[heads, values, rank]`.
    Values,
    /// The gate of a mixture's shared expert, `[its neurons, hidden]`; absent, as the next two, where there is none.
    SharedGate,
    /// The shared expert's up, `[its neurons, hidden]`.
    SharedUp,
    /// The shared expert's down, `[hidden, its neurons]`.
    SharedDown,
    /// The shared expert's row of a router, `[1, hidden]` or `[hidden]`; absent where its weight is 1.
    SharedRouter,
    /// Of each token the numbers that the layers get beside the residual, `[vocab, layers * their count]`; absent, as the next two, where there are
    /// none.
    PerLayerTable,
    /// What makes others of the embedding, `[layers * their count, hidden]`.
    PerLayerProjection,
    /// The norm of these, `[their count]`.
    PerLayerNorm,
}

impl Role {
    /// The roles of the matrices that an FFN's or an expert's input is multiplied with.
    pub fn gate_and_up(kind: Ffn) -> &'static [Role] {
        if kind == Ffn::Plain { &[Role::Up] } else { &[Role::Gate, Role::Up] }
    }

    /// Whether it is of a layer's FFN, its norms included.
    pub fn is_of_ffn(self) -> bool {
        use Role::*;
        matches!(
            self,
            FfnNorm
                | Gate
                | Up
                | Down
                | Router
                | RouterScale
                | ExpertScales
                | SelectionBias
                | FfnPostNorm
                | SharedNorm
                | SharedPostNorm
                | ExpertsPostNorm
                | SharedGate
                | SharedUp
                | SharedDown
                | SharedRouter
        )
    }

    /// The roles of the matrices of a mixer's input, as [`Mixer::inputs`] lists them, and of the one of its output.
    pub fn of_mixer(mixer: Mixer) -> (&'static [Role], Role) {
        match mixer {
            Mixer::Attention(a) if a.gated && a.keys_of.is_some() => (&[Role::Q, Role::AttnGate], Role::O),
            Mixer::Attention(a) if a.keys_of.is_some() => (&[Role::Q], Role::O),
            Mixer::Attention(a) if a.gated && a.values_from_keys => (&[Role::Q, Role::AttnGate, Role::K], Role::O),
            Mixer::Attention(attention) if attention.gated => (&[Role::Q, Role::AttnGate, Role::K, Role::V], Role::O),
            Mixer::Attention(attention) if attention.values_from_keys => (&[Role::Q, Role::K], Role::O),
            Mixer::Attention(_) => (&[Role::Q, Role::K, Role::V], Role::O),
            Mixer::Convolution(_) => (&[Role::MixerIn], Role::MixerOut),
            Mixer::Linear(linear) if linear.is_mamba() => {
                (&[Role::MixerIn, Role::DeltaGate, Role::DeltaAlpha], Role::MixerOut)
            }
            Mixer::Linear(_) => (&[Role::MixerIn, Role::DeltaGate, Role::DeltaBeta, Role::DeltaAlpha], Role::MixerOut),
        }
    }
}
