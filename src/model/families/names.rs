//! The names of tensors in a file, and the order of the rows of queries, keys and values in them.

use crate::formats::Tensors;
use crate::model::layer::{Attention, LinearAttention, Mixer};
use crate::model::role::Role;

/// The names of a model's tensors, without `.weight` and `.bias`.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Prefix of all names but the head's.
    pub outer: &'static str,
    /// Embedding, head, learned positions, last norm.
    pub outside: [&'static str; 4],
    /// What stands before the number of a layer, behind `outer`.
    pub layer: &'static str,
    /// Names behind the number of a layer, in the order of [`Role`]: norm of attention, q, k, v, output, norm of the FFN, gate, up, down.
    /// Empty where a family has none; q, k and v are the same where they are one tensor.
    pub inside: [&'static str; 9],
    /// The same for the roles from the norm of queries to what makes values of a latent ([`Names::with`]).
    pub more: [&'static str; 33],
    /// The same for the shared expert's gate, up, down and router row.
    pub shared: [&'static str; 4],
    /// Outside the layers, what makes each layer's own numbers of a token: table, projection, norm. Empty where a family has none.
    pub per_layer: [&'static str; 3],
    /// The experts' tensors of a layer.
    pub experts: ExpertNames,
    /// One tensor with gate and up of the FFN, `[2 ffn, hidden]`, as some files have it in the place of two.
    pub gate_and_up: &'static str,
    /// How the rows of queries, keys and values stand in these tensors.
    pub qkv: QkvRows,
    /// The same of the projections of linear attention.
    pub delta: DeltaRows,
    /// What is added to the weights of norms as they stand in the file.
    pub norm_offset: f32,
    /// A layer's FFN is numbered as a layer by itself, as is its other part.
    pub apart: bool,
}

/// What the tensors of a mixture's experts are called behind the number of a layer: gate, up, down. A file has them in one of three ways.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    /// A tensor for each expert, whose number stands between these two texts.
    pub each: [[&'static str; 2]; 3],
    /// One tensor for all experts, `[experts, rows, cols]`.
    pub all: [&'static str; 3],
    /// One tensor with each expert's gate and up, `[experts, 2 ffn, hidden]`.
    pub gate_and_up: &'static str,
}

/// How the rows of queries, keys and values are arranged in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkvRows {
    /// Three tensors.
    Apart,
    /// Three tensors; the rows of q and k in the order of interleaved RoPE, which is undone when they are read.
    Interleaved,
    /// Three tensors; of each head of q and k the first `rotated` rows are rotated, row i with row i + rotated / 2.
    Partial {
        /// Rows of a head.
        rotated: usize,
    },
    /// The same, row 2i with row 2i + 1.
    InterleavedPartial {
        /// Rows of a head.
        rotated: usize,
    },
    /// One tensor: all queries, all keys, all values.
    Joined,
    /// The same; of each head of q and k the first `rotated` rows are rotated as in [`QkvRows::Partial`].
    JoinedPartial {
        /// Rows of a head.
        rotated: usize,
    },
    /// One tensor of groups: the query heads that share a key head and a value head, then that key head, then that value head.
    Grouped,
}

/// How the rows of the projections of linear attention are arranged in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaRows {
    /// A tensor for q, k and v, one for z, one for beta, one for alpha.
    Apart,
    /// The last two are one tensor: for each head of keys the rows of its heads of values, beta's, then alpha's.
    BetaAlpha,
    /// So they are, and the others are one tensor, too: for each head of keys its q, its k, its heads' v, their z.
    Joined,
    /// One tensor for all: z, v, k, q, alpha, as Mamba-2 has them. The channels of its convolution are in the order v, k, q.
    Whole,
}

/// Hugging Face's names of Llama and its like.
pub const LLAMA: Names = Names {
    outer: "model.",
    outside: ["embed_tokens", "lm_head", "", "norm"],
    layer: "layers.",
    inside: [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ],
    more: [""; 33],
    shared: [
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
        "mlp.shared_expert_gate",
    ],
    per_layer: [""; 3],
    experts: ExpertNames {
        each: [["mlp.experts.", ".gate_proj"], ["mlp.experts.", ".up_proj"], ["mlp.experts.", ".down_proj"]],
        all: ["", "", "mlp.experts.down_proj"],
        gate_and_up: "mlp.experts.gate_up_proj",
    },
    gate_and_up: "mlp.gate_up_proj",
    qkv: QkvRows::Apart,
    delta: DeltaRows::Apart,
    norm_offset: 0.0,
    apart: false,
}
.with(Role::QNorm, "self_attn.q_norm")
.with(Role::KNorm, "self_attn.k_norm")
.with(Role::Router, "mlp.gate")
.with(Role::AttnGate, "self_attn.q_proj");

/// llama.cpp's names.
pub const GGUF: Names = Names {
    outer: "",
    outside: ["token_embd", "output", "position_embd", "output_norm"],
    layer: "blk.",
    inside: ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"],
    more: [
        "attn_q_norm",
        "attn_k_norm",
        "ffn_gate_inp",
        "attn_sinks",
        "exp_probs_b",
        "post_attention_norm",
        "post_ffw_norm",
        "shortconv.in_proj",
        "shortconv.conv",
        "shortconv.out_proj",
        "attn_q",
        "attn_gate",
        "ssm_beta",
        "ssm_alpha",
        "ssm_dt",
        "ssm_a",
        "ssm_norm",
        "ssm_d",
        "layer_output_scale",
        "ffn_gate_inp.scale",
        "ffn_down_exps.scale",
        "",
        "post_ffw_norm_1",
        "post_ffw_norm_2",
        "inp_gate",
        "proj",
        "post_norm",
        "attn_q_a_norm",
        "attn_q_b",
        "attn_kv_a_norm",
        "attn_kv_b",
        "attn_k_b",
        "attn_v_b",
    ],
    shared: ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp_shexp"],
    per_layer: ["per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"],
    experts: ExpertNames {
        each: [["ffn_gate.", ""], ["ffn_up.", ""], ["ffn_down.", ""]],
        all: ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"],
        gate_and_up: "ffn_gate_up_exps",
    },
    gate_and_up: "ffn_up",
    qkv: QkvRows::Apart,
    delta: DeltaRows::Apart,
    norm_offset: 0.0,
    apart: false,
};

/// llama.cpp's names, with the rows of q and k in the interleaved order of its architecture `llama`.
pub const GGUF_INTERLEAVED: Names = Names { qkv: QkvRows::Interleaved, ..GGUF };

/// What files put before the names of all tensors but the head's, and before the head's. A model that was saved without its head has none of
/// the first, and one that was part of a larger one, such as one that sees pictures, has its name for the text's part.
const OUTER: [&str; 7] = [
    "",
    "model.",
    "transformer.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "language_model.transformer.",
];
const HEADS: [&str; 3] = ["language_model.lm_head", "model.lm_head", "model.language_model.lm_head"];

impl Names {
    /// The same with another name for a role inside a layer, which is none of the shared expert's.
    pub const fn with(mut self, role: Role, name: &'static str) -> Names {
        let number = role as usize - Role::AttnNorm as usize;
        match number.checked_sub(self.inside.len()) {
            None => self.inside[number] = name,
            Some(number) => self.more[number] = name,
        }
        self
    }

    /// The same with names for what makes each layer's own numbers of a token.
    pub const fn with_per_layer(self, per_layer: [&'static str; 3]) -> Names {
        Names { per_layer, ..self }
    }

    /// These names with the prefix that a Hugging Face directory has; as they are where it has none of those that are known.
    pub fn with_prefix_of(mut self, tensors: &Tensors) -> Names {
        let has = |name: String| tensors.get(&format!("{name}.weight")).is_some();
        let [embedding, head, ..] = self.outside;
        if !has(format!("{}{embedding}", self.outer)) {
            self.outer = OUTER.into_iter().find(|outer| has(format!("{outer}{embedding}"))).unwrap_or(self.outer);
        }
        if !has(head.to_owned()) {
            self.outside[1] = HEADS.into_iter().find(|name| has((*name).to_owned())).unwrap_or(head);
        }
        self
    }

    /// The name of a role's tensor; `layer` is ignored for roles outside the layers.
    pub fn of(&self, role: Role, layer: usize) -> String {
        let index = role as usize;
        match index.checked_sub(self.outside.len()) {
            None if role == Role::Head => self.outside[index].into(),
            None => format!("{}{}", self.outer, self.outside[index]),
            Some(i) if i >= self.inside.len() + self.more.len() + self.shared.len() => {
                let first = self.inside.len() + self.more.len() + self.shared.len();
                format!("{}{}", self.outer, self.per_layer[i - first])
            }
            Some(i) => {
                let inside =
                    self.inside.iter().chain(&self.more).chain(&self.shared).nth(i).expect("a name for each role");
                self.inside(layer, inside)
            }
        }
    }

    /// A tensor's name inside a layer.
    fn inside(&self, layer: usize, name: &str) -> String {
        format!("{}{}{layer}.{name}", self.outer, self.layer)
    }

    /// The tensor of a layer's gate and up together, and what its halves are called by themselves, with their endings.
    pub fn of_gate_and_up(&self, layer: usize) -> (String, [String; 2]) {
        let halves = [Role::Gate, Role::Up].map(|role| format!("{}.weight", self.of(role, layer)));
        (format!("{}.weight", self.inside(layer, self.gate_and_up)), halves)
    }

    /// The names that a role's tensor of expert `expert` may have, and how many matrices of this expert and of others it then holds:
    /// 1, the experts, or twice as many, gate and up in turns.
    pub fn of_expert(&self, role: Role, layer: usize, expert: usize, experts: usize) -> Vec<(String, usize)> {
        let of = role as usize - Role::Gate as usize;
        let [before, after] = self.experts.each[of];
        let mut names = vec![(self.inside(layer, &format!("{before}{expert}{after}")), 1)];
        if !self.experts.all[of].is_empty() {
            names.push((self.inside(layer, self.experts.all[of]), experts));
        }
        if role != Role::Down {
            names.push((self.inside(layer, self.experts.gate_and_up), 2 * experts));
        }
        names
    }

    /// The name of the biases of a role, of all experts together.
    pub fn of_expert_biases(&self, role: Role, layer: usize) -> String {
        self.inside(layer, self.experts.all[role as usize - Role::Gate as usize])
    }

    /// Whether files of this kind have a name for a role's tensor of a layer.
    pub fn has(&self, role: Role) -> bool {
        !self.of(role, 0).ends_with('.')
    }

    /// Whether q, k and v are one tensor.
    pub fn fused(&self) -> bool {
        matches!(self.qkv, QkvRows::Joined | QkvRows::JoinedPartial { .. } | QkvRows::Grouped)
    }

    /// For each row of a mixer's role, in the engine's order, its row in the file's tensor; `None` where they are the same.
    pub fn row_order(&self, role: Role, mixer: Mixer) -> Option<Vec<usize>> {
        match mixer {
            Mixer::Attention(attention) => self.attention_rows(role, &attention),
            Mixer::Linear(linear) => self.linear_rows(role, &linear),
            Mixer::Convolution(_) => None,
        }
    }

    /// The same of attention. The engine's order is head after head, each head's rows in rotate-half order. A gate stands in the tensor of
    /// queries: of each head the query's rows, then the gate's.
    fn attention_rows(&self, role: Role, a: &Attention) -> Option<Vec<usize>> {
        // Of a latent they stand as they are rotated.
        if a.latent.is_some() {
            return None;
        }
        let heads = match role {
            Role::Q | Role::AttnGate => a.heads,
            Role::K | Role::V => a.kv_heads,
            _ => return None,
        };
        let (dim, shared) = (a.head_dim, a.sharing());
        let rows = 0..heads * dim;
        let (each, before) = match role {
            Role::Q if a.gated => (2 * dim, 0),
            Role::AttnGate => (2 * dim, dim),
            _ => (dim, 0),
        };
        match self.qkv {
            QkvRows::Joined | QkvRows::JoinedPartial { .. } => {
                let first = match role {
                    Role::Q => 0,
                    Role::K => a.q_dim(),
                    _ => a.q_dim() + a.kv_dim(),
                };
                let within = |r: usize| match self.qkv {
                    QkvRows::JoinedPartial { rotated } if role != Role::V => {
                        r / dim * dim + partial(dim, rotated, r % dim)
                    }
                    _ => r,
                };
                Some(rows.map(|r| first + within(r)).collect())
            }
            QkvRows::Grouped => {
                let place = |head: usize| match role {
                    Role::Q => head / shared * (shared + 2) + head % shared,
                    Role::K => head * (shared + 2) + shared,
                    _ => head * (shared + 2) + shared + 1,
                };
                Some(rows.map(|r| place(r / dim) * dim + r % dim).collect())
            }
            QkvRows::Partial { rotated } if matches!(role, Role::Q | Role::K) => {
                Some(rows.map(|r| r / dim * each + partial(dim, rotated, r % dim)).collect())
            }
            QkvRows::InterleavedPartial { rotated } if matches!(role, Role::Q | Role::K) => {
                let within = |r: usize| match r % (dim / 2) {
                    pair if pair < rotated / 2 => 2 * pair + r / (dim / 2),
                    _ => partial(dim, rotated, r),
                };
                Some(rows.map(|r| r / dim * each + within(r % dim)).collect())
            }
            QkvRows::Interleaved if matches!(role, Role::Q | Role::K) => {
                // The pair (i, i + dim / 2) of ours is (2i, 2i + 1) there.
                let within = |r: usize| if r < dim / 2 { 2 * r } else { 2 * (r - dim / 2) + 1 };
                Some(rows.map(|r| r / dim * each + within(r % dim)).collect())
            }
            _ if each > dim => Some(rows.map(|r| r / dim * each + before + r % dim).collect()),
            _ => None,
        }
    }

    /// For each channel of the convolution of linear attention, in the engine's order, its place in the file; `None` where they are the same.
    pub fn channel_order(&self, linear: &LinearAttention) -> Option<Vec<usize>> {
        if self.delta != DeltaRows::Whole {
            return None;
        }
        let (keys, values) = (linear.keys(), linear.values());
        Some((values + keys..values + 2 * keys).chain(values..values + keys).chain(0..values).collect())
    }

    /// The same of linear attention. The engine's order is that of [`DeltaRows::Apart`].
    fn linear_rows(&self, role: Role, delta: &LinearAttention) -> Option<Vec<usize>> {
        let (dim, each, values) = (delta.head_dim, delta.value_heads / delta.key_heads, delta.values());
        // Of a head of keys in the joined tensor: q, k, v and z of its heads.
        let group = 2 * (1 + each) * dim;
        let of_values =
            |first: usize| (0..delta.values()).map(move |r| r / (each * dim) * group + first + r % (each * dim));
        match (role, self.delta) {
            (Role::MixerIn, DeltaRows::Whole) => {
                self.channel_order(delta).map(|order| order.into_iter().map(|channel| values + channel).collect())
            }
            (Role::DeltaGate, DeltaRows::Whole) => Some((0..values).collect()),
            (Role::DeltaAlpha, DeltaRows::Whole) => Some((delta.rows() - delta.value_heads..delta.rows()).collect()),
            (Role::MixerIn, DeltaRows::Joined) => {
                let keys = |first: usize| (0..delta.keys()).map(move |r| r / dim * group + first + r % dim);
                Some(keys(0).chain(keys(dim)).chain(of_values(2 * dim)).collect())
            }
            (Role::DeltaGate, DeltaRows::Joined) => Some(of_values((2 + each) * dim).collect()),
            (Role::DeltaBeta | Role::DeltaAlpha, DeltaRows::Joined | DeltaRows::BetaAlpha) => {
                let first = if role == Role::DeltaBeta { 0 } else { each };
                Some((0..delta.value_heads).map(|r| r / each * 2 * each + first + r % each).collect())
            }
            _ => None,
        }
    }
}

/// Where number `r` of a head of `dim` stands in a file whose heads begin with `rotated` numbers in halves. The engine's halves are those of the
/// whole head: number i is rotated with i + dim / 2, and where i is beyond the file's half both are not.
fn partial(dim: usize, rotated: usize, r: usize) -> usize {
    let (half, pair) = (r / (dim / 2), r % (dim / 2));
    match pair < rotated / 2 {
        true => half * rotated / 2 + pair,
        false => rotated + half * (dim - rotated) / 2 + pair - rotated / 2,
    }
}

impl Names {
    /// For each number of a head's norm, in the engine's order, its place in the file; `None` where they are the same.
    pub fn head_order(&self, dim: usize) -> Option<Vec<usize>> {
        match self.qkv {
            QkvRows::Partial { rotated } | QkvRows::JoinedPartial { rotated } => {
                Some((0..dim).map(|r| partial(dim, rotated, r)).collect())
            }
            _ => None,
        }
    }
}
