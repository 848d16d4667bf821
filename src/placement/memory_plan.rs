//! The plan of what lies on the device and what on the host, within a budget, to the byte. `docs/plan.md` explains the rules.

use super::solve::gap;
use super::{Costs, Problem, Solution, ilp, min_neurons, solve, upper_bound};
use crate::cache::{PerTier, Tier};
use crate::clock;
use crate::engine::session::CHUNK;
use crate::engine::workspace_bytes;
use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use crate::formats::rows::Quant;
use crate::model::config::{ModelConfig, Norm, Positions};
use crate::model::layer::Experts;
use crate::model::{BlockLayout, ExpertWeights, KvCache, KvType, Matrix, Model};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

/// Shape of a model and bytes of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Number of layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// What is placed of each layer: its neurons, or the experts of a mixture.
    pub ffn: usize,
    /// Of a mixture, how many experts a token uses; `None` where neurons are placed.
    pub experts_used: Option<usize>,
    /// Bytes of one neuron block, or of one expert; of the largest where they differ from layer to layer.
    pub block_bytes: u64,
    /// Bytes of the query, key, value and output matrices of all layers, with all their norms and biases, and of a mixture's shared experts,
    /// which lie beside them.
    pub attention_bytes: u64,
    /// Bytes of the embedding and learned positions; with tied embeddings of the positions alone.
    pub embeddings_bytes: u64,
    /// Bytes of the head and its norm.
    pub head_bytes: u64,
    /// Bytes of working memory for a prompt's chunk, and of the tables of slots.
    pub buffers_bytes: u64,
    /// Bytes of the keys and values of one sequence with a full context.
    pub kv_bytes: u64,
    /// Layers in which host and device wait for each other once more for attention on the host.
    pub attention_waits: usize,
    /// Bytes of what layers of linear attention keep of one sequence, however long it is; a token reads and writes all of it. 0 of every model
    /// that is run here.
    pub state_bytes: u64,
    /// Weights of one neuron block, or of one expert: each is a multiplication and an addition for a token.
    pub block_weights: u64,
}

/// Bits that a weight takes, scales included, where a model is of several types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bits {
    /// Of experts or neurons.
    pub experts: f64,
    /// Of attention.
    pub others: f64,
    /// Of embedding and head.
    pub edges: f64,
}

impl Footprint {
    /// The sizes of a packed model, with keys and values of type `kv` for `context` tokens.
    pub fn of_model(model: &Model, context: usize, kv: KvType) -> Footprint {
        let layers = model.layers.iter();
        Footprint {
            // Where types differ from layer to layer, the largest: a plan that fits has room for them all.
            block_bytes: model.layers.iter().map(|l| l.ffn.movable_bytes()).max().unwrap_or(0),
            attention_bytes: layers.flat_map(|l| l.qkv.parts().iter().chain([&l.o])).map(padded_bytes).sum::<u64>()
                + shared_bytes(model)
                + small_bytes(&model.config),
            embeddings_bytes: if model.config.tied { 0 } else { model.embed.bytes() }
                + model.positions.map_or(0, |p| p.bytes()),
            head_bytes: padded_bytes(&model.head) + norm_bytes(&model.config),
            ..Footprint::of_shape(&model.config, model.quant, context, kv)
        }
    }

    /// The sizes that a model of this shape has when `lab::pack` packs it as `quant`; its weights are not needed.
    pub fn of_shape(c: &ModelConfig, quant: Quant, context: usize, kv: KvType) -> Footprint {
        let edge = (c.vocab * quant.of_edges().row_bytes(c.hidden)) as u64;
        let positions = match c.positions {
            Positions::Learned { offset } => (c.context + offset) * Quant::F32.row_bytes(c.hidden),
            Positions::Rope { .. } => 0,
        };
        let attention = c.qkv_dim() * quant.row_bytes(c.hidden) + c.hidden * quant.row_bytes(c.q_dim());
        let shared = 2 * shared_width(c) * quant.row_bytes(c.hidden) + c.hidden * quant.row_bytes(shared_width(c));
        Footprint {
            layers: c.layers,
            hidden: c.hidden,
            ffn: c.movable(),
            experts_used: whole_experts(c).map(|experts| experts.used),
            block_bytes: (BlockLayout::new(c.ffn_kind, quant, c.hidden).bytes() * of_cluster(c)) as u64,
            attention_bytes: (c.layers * (attention + shared)) as u64 + small_bytes(c),
            embeddings_bytes: if c.tied { 0 } else { edge } + positions as u64,
            head_bytes: edge + norm_bytes(c),
            buffers_bytes: buffers_bytes(c),
            kv_bytes: KvCache::bytes_for(c, context, kv),
            attention_waits: (0..c.layers).filter(|&l| !c.layer(l).norms.parallel()).count(),
            state_bytes: 0,
            block_weights: block_weights(c) as u64,
        }
    }

    /// The sizes of a model whose weights take so many bits, about: what a row is rounded up to is left out.
    pub fn of_bits(c: &ModelConfig, bits: Bits, context: usize, kv: KvType) -> Footprint {
        let bytes = |weights: usize, bits: f64| (weights as f64 * bits / 8.0).round() as u64;
        let attention = c.layers * c.hidden * (c.qkv_dim() + c.q_dim() + 3 * shared_width(c));
        let edge = bytes(c.vocab * c.hidden, bits.edges);
        Footprint {
            block_bytes: bytes(block_weights(c), bits.experts),
            attention_bytes: bytes(attention, bits.others) + small_bytes(c),
            embeddings_bytes: if c.tied { 0 } else { edge },
            head_bytes: edge + norm_bytes(c),
            ..Footprint::of_shape(c, Quant::Q8, context, kv)
        }
    }

    /// Device memory that a model needs beside predictors and neurons, with one sequence.
    pub fn least_bytes(&self) -> u64 {
        self.attention_bytes + self.head_bytes + self.buffers_bytes + self.state_bytes
    }

    /// Bytes that the device reads or writes for every token beside predictors and neurons.
    pub fn always_bytes(&self) -> u64 {
        self.attention_bytes + self.head_bytes + 2 * self.state_bytes
    }

    /// Bytes of all neuron blocks.
    pub fn ffn_bytes(&self) -> u64 {
        self.block_bytes * (self.ffn * self.layers) as u64
    }
}

/// Neurons that are placed as one.
fn of_cluster(c: &ModelConfig) -> usize {
    if whole_experts(c).is_some() { c.ffn } else { 1 }
}

/// The experts of a mixture that are placed as a whole.
fn whole_experts(c: &ModelConfig) -> Option<Experts> {
    c.form.experts.filter(|experts| !experts.by_neuron)
}

/// Neurons of a mixture's shared expert; 0 where there is none.
fn shared_width(c: &ModelConfig) -> usize {
    c.form.experts.and_then(|experts| experts.shared).map_or(0, |shared| shared.width)
}

/// Bytes of the shared experts of all layers.
fn shared_bytes(model: &Model) -> u64 {
    model.layers.iter().filter_map(|layer| layer.ffn.experts()).map(ExpertWeights::shared_bytes).sum()
}

/// Weights of what is placed as one.
fn block_weights(c: &ModelConfig) -> usize {
    of_cluster(c) * c.ffn_kind.rows() * c.hidden
}

/// A matrix with its rows as a device has them: padded, as a file that is read in place has them not.
fn padded_bytes(matrix: &Matrix) -> u64 {
    (matrix.rows * matrix.quant.row_bytes(matrix.cols)) as u64
}

/// One norm: weight and, for LayerNorm, bias, in f32.
fn norm_bytes(c: &ModelConfig) -> u64 {
    (c.hidden * 4 * if matches!(c.norm, Norm::Layer(_)) { 2 } else { 1 }) as u64
}

/// Two norms, the biases and the router of each layer, in f32.
fn small_bytes(c: &ModelConfig) -> u64 {
    let there = |yes: bool, numbers: usize| if yes { numbers } else { 0 };
    let biases =
        there(c.attention_bias, c.qkv_dim()) + there(c.output_bias, c.hidden) + there(c.ffn_bias, c.ffn + c.hidden);
    let router = c.form.experts.filter(|experts| experts.routed()).map_or(0, |experts| experts.count * c.hidden);
    let head_norms = there(c.form.qk_norm, 2 * c.head_dim);
    c.layers as u64 * (2 * norm_bytes(c) + 4 * (biases + router + head_norms) as u64)
}

/// Experts that are copied for a prompt's chunk at once, in two halves: while those of one half are computed, the others come.
const STREAMED_EXPERTS: u64 = 8;
/// What these take at most of the room that experts have. A budget that grows by an expert gives them one more seldom enough for slots
/// never to become fewer.
const STREAMED_SHARE: u64 = 16;

/// Everything that a pass needs besides weights: the engine's workspace for as many tokens as a prompt's chunk has; room for neuron blocks
/// that are copied for a chunk; 4 bytes per neuron for `gpu_bucket` (dynamicinfer C.2), for the largest number of slots; and a second copy of
/// the biases of up, for neurons that are in no slot.
fn buffers_bytes(c: &ModelConfig) -> u64 {
    let biases = if c.ffn_bias { c.layers * c.ffn } else { 0 };
    workspace_bytes(c) + streamed_bytes(c) + 4 * (c.layers * c.movable() + biases) as u64
}

/// Bytes for blocks that are copied for a prompt's chunk: what the chunk's activations would take if all were kept. That is a few hundred
/// blocks of a 7B model in f16, which the link copies in a fraction of a millisecond. 0 of whole experts: their plan says how many
/// ([`Plan::streamed_bytes`]).
pub fn streamed_bytes(c: &ModelConfig) -> u64 {
    if whole_experts(c).is_some() {
        return 0;
    }
    4 * (CHUNK * (c.ffn_kind.rows() - 1) * c.ffn) as u64
}

/// Where keys and values are to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPlace {
    /// On the device where that makes a token faster: where they displace no neuron, or neurons that take less time on the host than
    /// attention does there.
    Auto,
    /// On the device where they displace no neuron, else on the host.
    Spare,
    /// In host memory.
    Host,
    /// On the device, even if they displace neurons.
    Device,
}

/// What the user asks of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Budget for everything on the device, bytes; `None` is as much as the neurons of `ffn_share` (or all) need.
    pub vram: Option<u64>,
    /// Budget for everything on the host, bytes; `None` is no limit.
    pub ram: Option<u64>,
    /// Share of all neuron blocks that may be on the device, above 0 and at most 1; `None` is all.
    pub ffn_share: Option<f64>,
    /// Where keys and values are to lie.
    pub kv: KvPlace,
    /// Number of sequences that may be decoded at once, each with its own keys and values; 0 counts as 1.
    pub sequences: usize,
    /// Bytes of all predictors' weights.
    pub predictor_bytes: u64,
    /// Share of the neurons, or of a mixture's experts, that a token computes, above 0 and at most 1.
    pub computed_share: f64,
    /// Also solve the placement as an integer linear programme, in at most this many seconds; `None` does not.
    pub ilp_seconds: Option<f64>,
}

/// Parts of a model, one for each line of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PartName {
    /// Attention matrices, norms and biases of all layers, and a mixture's shared experts.
    Attention,
    /// The embedding and learned positions.
    Embeddings,
    /// The head and its norm.
    Head,
    /// Weights of all predictors.
    Predictors,
    /// Keys and values of all sequences.
    Kv,
    /// Working memory of a pass, and the states of all sequences in layers of linear attention.
    Buffers,
    /// Neuron blocks in slots; the host has all of them.
    FfnSlots,
}

/// One line of the plan: where a part's bytes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanPart {
    /// The part.
    pub name: PartName,
    /// Bytes in each memory.
    pub bytes: PerTier<u64>,
}

/// As the output of `plan --json` has it: `bytes` are the device's.
impl Serialize for PlanPart {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        let mut part = to.serialize_struct("PlanPart", 3)?;
        part.serialize_field("name", &self.name)?;
        part.serialize_field("bytes", &self.bytes[Tier::Device])?;
        part.serialize_field("host_bytes", &self.bytes[Tier::Host])?;
        part.end()
    }
}

/// One layer's share of the slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerSlots {
    /// Neuron blocks of the layer that the device has room for.
    pub slots: usize,
}

/// What lies on the device and what on the host.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Device memory that the plan may use, bytes.
    pub budget_bytes: u64,
    /// Device memory that it uses, bytes: the sum over `parts`, never above the budget.
    pub total_bytes: u64,
    /// Device memory that a plan without any neuron on the device takes, bytes.
    pub min_bytes: u64,
    /// Device memory that everything would take, bytes; a larger budget is of no use.
    pub full_bytes: u64,
    /// One line for each of [`PartName`].
    pub parts: Vec<PlanPart>,
    /// Slots of each layer, `[layers]`.
    pub layers: Vec<LayerSlots>,
    /// Bytes within the buffers for experts that are copied for a prompt's chunk, whole experts; 0 where neurons are placed, where a budget
    /// has no room for them, and where all experts lie on the device.
    pub streamed_bytes: u64,
    /// Number of sequences whose keys and values lie on the device.
    pub sequences: usize,
    /// Sum of the impacts of the neurons on the device.
    pub objective: u64,
    /// (bound - objective) / bound, where no placement has more impact than the bound; 0 is optimal.
    pub gap: f64,
    /// How the plan came about.
    pub details: Details,
}

impl Plan {
    /// The line that is about `name`; every plan has each once.
    pub fn part(&self, name: PartName) -> &PlanPart {
        self.parts.iter().find(|p| p.name == name).expect("a plan has every part")
    }

    /// Slots of each layer, `[layers]`.
    pub fn slots(&self) -> Vec<usize> {
        self.layers.iter().map(|l| l.slots).collect()
    }

    /// Has the keys and values of so many sequences on the device, of `kv_bytes` each.
    pub fn keep_sequences(&mut self, sequences: usize, kv_bytes: u64) {
        let kv = self.parts.iter_mut().find(|p| p.name == PartName::Kv).expect("a plan has every part");
        let (before, now) = (kv.bytes[Tier::Device], sequences as u64 * kv_bytes);
        kv.bytes[Tier::Host] = kv.bytes[Tier::Host] + before - now;
        kv.bytes[Tier::Device] = now;
        self.details.host_bytes = self.details.host_bytes + before - now;
        self.total_bytes = self.total_bytes + now - before;
        self.sequences = sequences;
    }

    /// Leaves out the room for experts that are copied for a prompt's chunk, unless it is `room` bytes at most.
    pub fn limit_streamed(&mut self, room: u64) {
        if self.streamed_bytes > room {
            let buffers = self.parts.iter_mut().find(|p| p.name == PartName::Buffers).expect("a plan has every part");
            buffers.bytes[Tier::Device] -= self.streamed_bytes;
            self.total_bytes -= self.streamed_bytes;
            self.streamed_bytes = 0;
        }
    }
}

/// How the plan came about.
#[derive(Clone, Debug, Serialize)]
pub struct Details {
    /// Sum of the impacts of all neurons.
    pub total_impact: u64,
    /// Upper bound of the impact of any placement within the budget.
    pub bound: u64,
    /// Host memory that it uses, bytes: the sum over the parts.
    pub host_bytes: u64,
    /// Host memory that a card reads in place, bytes, and that the system is asked not to swap: every neuron block.
    pub pinned_bytes: u64,
    /// Bytes of one neuron block.
    pub block_bytes: u64,
    /// Neurons that are placed together, as one batch.
    pub batch: usize,
    /// C_l: fewest neurons of a layer that pay on the device, if any are there.
    pub min_neurons: usize,
    /// Time to read a neuron block from host memory, us ([`Costs`]).
    pub t_cpu_us: f64,
    /// Time to read a neuron block from device memory, us.
    pub t_gpu_us: f64,
    /// Time to copy a neuron block over the link, us.
    pub t_trans_us: f64,
    /// Time that splitting a layer costs for each token, us.
    pub t_sync_us: f64,
    /// Time that finding the placement took, ms.
    pub solve_ms: f64,
    /// The same problem by a general solver; `None` where that was not asked for.
    pub ilp: Option<IlpCheck>,
}

/// Result of a general solver on the same placement problem.
#[derive(Clone, Debug, Serialize)]
pub struct IlpCheck {
    /// Impact of the placement that it found.
    pub objective: u64,
    /// Whether it proved that there is no better one; if not, it ran out of time.
    pub optimal: bool,
    /// (its objective - the plan's) / its objective; negative where the plan is better.
    pub gap: f64,
    /// Time that it took, ms.
    pub solve_ms: f64,
}

/// Plans what lies on the device. What every token reads whole comes first (attention, head, predictors, buffers), then neurons, keys and
/// values, then the embedding, of which a token reads one row. Keys and values come before the neurons that are least often active where
/// the host would take longer for attention than for these. Of the room for a mixture's experts a little is for those that are copied for a
/// prompt's chunk.
///
/// `counts` is how often each neuron fired, `[layers][ffn]`.
///
/// # Errors
/// [`Error::Memory`] for a budget below `min_bytes`, naming it, one that does not hold the asked share of neurons, or a host budget that is
/// too small; [`Error::Failed`] where the placement cannot be solved.
pub fn plan(footprint: &Footprint, counts: &[Vec<u64>], machine: &MachineProfile, request: &Request) -> Result<Plan> {
    let f = footprint;
    assert_eq!((counts.len(), counts[0].len()), (f.layers, f.ffn));
    let sequences = request.sequences.max(1);
    let kv_bytes = f.kv_bytes * sequences as u64;
    let kv_first = if request.kv == KvPlace::Device { kv_bytes } else { 0 };
    let states = f.state_bytes * (sequences as u64 - 1);
    let min_bytes = f.least_bytes() + states + request.predictor_bytes + kv_first;
    let kv_later = if matches!(request.kv, KvPlace::Auto | KvPlace::Spare) { kv_bytes } else { 0 };
    let full_bytes = min_bytes + f.ffn_bytes() + kv_later + f.embeddings_bytes;

    // Rounded down, so that the share is not exceeded.
    let wanted = request.ffn_share.map_or(f.ffn_bytes(), |share| (f.ffn_bytes() as f64 * share) as u64);
    let wanted = wanted.min(f.ffn_bytes());
    let budget_bytes = request.vram.unwrap_or(min_bytes + wanted + streamed(f, request, wanted, wanted));
    let Some(room) = budget_bytes.checked_sub(min_bytes) else {
        return Err(Error::Memory(format!(
            "a budget of {budget_bytes} bytes is below the {min_bytes} that attention, head, predictors, buffers{} take on \
             the device; give --vram {min_bytes} or more, or pack the model in a smaller type (--quant q4_0)",
            if kv_first > 0 { ", keys and values" } else { "" }
        )));
    };
    if request.ffn_share.is_some() && wanted > room {
        let least = min_bytes + wanted;
        return Err(Error::Memory(format!(
            "--ffn-share takes {wanted} bytes and --vram leaves {room} for neurons; give --vram {least} or more, or a smaller share"
        )));
    }

    let costs = Costs::of(machine, f.block_bytes, f.hidden);
    let least = min_neurons(&costs, f.ffn);
    let failed = |why: String| Error::Failed(format!("the placement cannot be planned: {why}"));
    let problem = match f.experts_used {
        None => Problem::new(counts, f.block_bytes, least),
        Some(_) => Problem::in_batches(counts, f.block_bytes, least, 1),
    };
    let problem = problem.map_err(failed)?;
    let start = clock::now();
    let (sequences_there, division) = divide_room(f, &problem, (&costs, machine), request, (room, wanted));
    let Division { streamed_bytes, ffn_budget, solution: Solution { batches, impact } } = division;
    let solve_ms = start.elapsed().as_secs_f64() * 1e3;
    let bound = upper_bound(&problem, ffn_budget);
    let ilp = request.ilp_seconds.map(|seconds| ilp_check(&problem, ffn_budget, impact, seconds)).transpose()?;

    let slots: Vec<usize> = batches.iter().map(|n| n * problem.batch).collect();
    let slots_bytes = f.block_bytes * slots.iter().sum::<usize>() as u64;
    // With `vram`, bytes that neurons could still use stay free for them: nothing else displaces one.
    let rest = if request.vram.is_some() { room - streamed_bytes - ffn_budget } else { 0 };
    let (sequences, parts) = divide(f, request, [slots_bytes, streamed_bytes], rest, sequences_there);
    let [host_bytes, total_bytes] =
        [Tier::Host, Tier::Device].map(|tier| parts.iter().map(|part| part.bytes[tier]).sum::<u64>());
    if let Some(ram) = request.ram.filter(|&ram| ram < host_bytes) {
        return Err(Error::Memory(format!(
            "--ram {ram} is below the {host_bytes} bytes that stay on the host: all neurons, and what is not on the device; \
             give --ram {host_bytes} or more, or pack the model in a smaller type (--quant q4_0); `run` keeps what has no room on disk"
        )));
    }
    Ok(Plan {
        budget_bytes,
        total_bytes,
        min_bytes,
        full_bytes,
        parts,
        layers: slots.into_iter().map(|slots| LayerSlots { slots }).collect(),
        streamed_bytes,
        sequences,
        objective: impact,
        gap: gap(bound, impact),
        details: Details {
            total_impact: problem.total_impact(),
            bound,
            host_bytes,
            pinned_bytes: f.ffn_bytes(),
            block_bytes: f.block_bytes,
            batch: problem.batch,
            min_neurons: least,
            t_cpu_us: costs.t_cpu_us,
            t_gpu_us: costs.t_gpu_us,
            t_trans_us: costs.t_trans_us,
            t_sync_us: costs.t_sync_us,
            solve_ms,
            ilp,
        },
    })
}

/// How room for neurons is divided.
struct Division {
    /// Bytes for experts that are copied for a prompt's chunk.
    streamed_bytes: u64,
    /// Bytes that slots may take.
    ffn_budget: u64,
    solution: Solution,
}

/// Divides `room` between neurons, which may have `wanted` bytes of it, and keys and values, where these displace some: of how many sequences,
/// or `None` where they take what is left.
fn divide_room(
    f: &Footprint,
    problem: &Problem,
    (costs, machine): (&Costs, &MachineProfile),
    request: &Request,
    (room, wanted): (u64, u64),
) -> (Option<usize>, Division) {
    let within = |room: u64| {
        let streamed_bytes = streamed(f, request, wanted, room);
        let ffn_budget = (room - streamed_bytes).min(wanted);
        Division { streamed_bytes, ffn_budget, solution: solve(problem, ffn_budget) }
    };
    let neurons = within(room);
    // Without a budget there is as much as the neurons take, and a share is a number of neurons that somebody wants.
    if request.kv != KvPlace::Auto || request.vram.is_none() || request.ffn_share.is_some() {
        return (None, neurons);
    }
    let there = (room - neurons.streamed_bytes - neurons.ffn_budget) / f.kv_bytes.max(1);
    let displacing = |sequences: usize| {
        let left = room.checked_sub(f.kv_bytes * sequences as u64).filter(|_| there < sequences as u64)?;
        let fewer = within(left);
        let lost =
            neurons.solution.impact.saturating_sub(fewer.solution.impact) as f64 / problem.total_impact().max(1) as f64;
        let gain = attention_on_host_us(f, costs, machine, sequences);
        let loss = lost * request.computed_share * (f.ffn * f.layers) as f64 * (costs.t_cpu_us - costs.t_gpu_us);
        (gain > loss).then_some((Some(sequences), fewer))
    };
    [request.sequences.max(1), 1].into_iter().find_map(displacing).unwrap_or((None, neurons))
}

/// Bytes for experts that are copied for a prompt's chunk, where experts may have `wanted` of `room` bytes: whole ones.
fn streamed(f: &Footprint, request: &Request, wanted: u64, room: u64) -> u64 {
    let spare = match (request.ffn_share, request.vram) {
        _ if f.experts_used.is_none() => 0,
        // All of them lie there.
        (None, _) if room >= f.ffn_bytes() => 0,
        (None, _) => room,
        // Beside as many experts as the share says, and no more than all.
        (Some(_), None) => f.ffn_bytes() - wanted,
        (Some(_), Some(_)) => (f.ffn_bytes() - wanted).min(room - wanted),
    };
    spare.min(room / STREAMED_SHARE).min(STREAMED_EXPERTS * f.block_bytes) / f.block_bytes * f.block_bytes
}

/// How full a context is taken to be where keys and values are weighed against neurons: most texts end long before it does.
const FILLED: f64 = 0.25;

/// Time that attention over `sequences` contexts that are [`FILLED`] takes a token more on the host than on the device, us: queries, keys and values
/// cross the link, the result comes back, and both wait for it, but where the FFN reads the same residual.
fn attention_on_host_us(f: &Footprint, costs: &Costs, machine: &MachineProfile, sequences: usize) -> f64 {
    let read = f.kv_bytes as f64 * sequences as f64 * FILLED;
    let reading = read / (machine.dram_gb_s * 1e3) - read / (machine.device_gb_s * 1e3);
    f.attention_waits as f64 * (costs.t_sync_us + machine.call_us) + reading
}

/// Divides the parts between device and host, with so many bytes of neurons in slots and of experts that are copied for a chunk, and `rest`
/// bytes left after them. Returns also the number of sequences whose keys and values lie on the device: `kv_sequences`, else as many as there
/// is room for.
fn divide(
    f: &Footprint,
    request: &Request,
    [slots_bytes, streamed_bytes]: [u64; 2],
    mut rest: u64,
    kv_sequences: Option<usize>,
) -> (usize, Vec<PlanPart>) {
    let wanted = request.sequences.max(1);
    let sequences = match request.kv {
        KvPlace::Device => wanted,
        KvPlace::Host => 0,
        KvPlace::Auto | KvPlace::Spare => {
            kv_sequences.unwrap_or_else(|| wanted.min((rest / f.kv_bytes.max(1)) as usize))
        }
    };
    let (kv, kv_bytes) = (f.kv_bytes * sequences as u64, f.kv_bytes * wanted as u64);
    if matches!(request.kv, KvPlace::Auto | KvPlace::Spare) {
        rest -= kv;
    }
    let embeddings = if f.embeddings_bytes <= rest { (f.embeddings_bytes, 0) } else { (0, f.embeddings_bytes) };
    let part = |name, (device, host)| {
        let bytes = PerTier::from_fn(|tier| if tier == Tier::Device { device } else { host });
        PlanPart { name, bytes }
    };
    let parts = vec![
        part(PartName::Attention, (f.attention_bytes, 0)),
        part(PartName::Embeddings, embeddings),
        part(PartName::Head, (f.head_bytes, 0)),
        part(PartName::Predictors, (request.predictor_bytes, 0)),
        part(PartName::Kv, (kv, kv_bytes - kv)),
        part(PartName::Buffers, (f.buffers_bytes + f.state_bytes * wanted as u64 + streamed_bytes, 0)),
        // The host keeps every neuron (dynamicinfer C.2), so a neuron that leaves the device need not be copied back.
        part(PartName::FfnSlots, (slots_bytes, f.ffn_bytes())),
    ];
    (sequences, parts)
}

fn ilp_check(problem: &Problem, budget_bytes: u64, ours: u64, seconds: f64) -> Result<IlpCheck> {
    let start = clock::now();
    let solved = ilp::solve(problem, budget_bytes, seconds)
        .map_err(|why| Error::Failed(format!("the integer programme was not solved: {why}; give it more seconds")))?;
    let solve_ms = start.elapsed().as_secs_f64() * 1e3;
    Ok(IlpCheck { objective: solved.impact, optimal: solved.optimal, gap: gap(solved.impact, ours), solve_ms })
}
