//! The plan of what lies on the device and what on the host, within a budget, to the byte. `docs/memory.md` explains the rules.

pub use super::footprint::{Bits, Footprint, streamed_bytes};
use super::solve::gap;

use super::details::slots_of;
pub use super::details::{Details, IlpCheck, LayerSlots};
use super::problem::Prices;
use super::{Costs, Problem, Solution, min_neurons, prompt_chunk, solve};
use crate::cache::{PerTier, Tier};
use crate::clock;
use crate::engine::session::CHUNK;
use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

/// Experts that are copied for a prompt's chunk at once, in two halves: while those of one half are computed, the others come.
const STREAMED_EXPERTS: u64 = 8;
/// What these take at most of the room that experts have. A budget that grows by an expert gives them one more seldom enough for slots
/// never to become fewer.
const STREAMED_SHARE: u64 = 16;

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
    /// Tokens of a prompt's chunk, one of [`session::CHUNKS`](crate::engine::session::CHUNKS), whose working memory comes before everything
    /// else; `None` takes what [`prompt_chunk::longest`] chooses.
    pub chunk: Option<usize>,
    /// Bytes of host memory for [`Footprint::on_host`]: chunks are no longer than fits, and keys and values stay on the host where what comes of
    /// them on the device does not; `None` is no limit.
    pub host: Option<u64>,
    /// Layers whose attention's matrices stay in host memory and are copied to the device for every pass; `None` takes none where all of
    /// them have room on the device, and else as few as the budget asks for.
    pub streamed_layers: Option<usize>,
    /// Whether the host has no part in a layer whose neurons are all on the device. Then placements are compared by time, with what such a
    /// layer saves, else by impact.
    pub skips_host: bool,
}

impl Request {
    /// The same with keys and values on the host, if it has no room for what host and device exchange where they are on the device.
    fn within_host(self, f: &Footprint) -> Request {
        let fits = self.host_holds(f, self.chunk.unwrap_or(CHUNK), true);
        let may = matches!(self.kv, KvPlace::Auto | KvPlace::Spare);
        Request { kv: if may && !fits { KvPlace::Host } else { self.kv }, ..self }
    }

    /// Whether keys and values may come before neurons: not where neurons are asked for, and not where a budget is to change no bits.
    fn may_displace(&self) -> bool {
        self.kv == KvPlace::Auto && self.ffn_share.is_none()
    }

    fn host_holds(&self, f: &Footprint, tokens: usize, attends: bool) -> bool {
        self.host.is_none_or(|host| f.on_host(tokens, attends) <= host)
    }
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
    /// Working memory of a pass.
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

/// What lies on the device and what on the host.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Device memory that the plan may use, bytes.
    pub budget_bytes: u64,
    /// Device memory that it uses, bytes: the sum over `parts`, never above the budget.
    pub total_bytes: u64,
    /// The smallest budget that is accepted, bytes: attention's matrices of as many layers as possible are copied for every pass.
    pub min_bytes: u64,
    /// Device memory that this plan takes without its neurons, bytes: with as many [`Plan::streamed_layers`]. A budget from here to
    /// [`Plan::full_bytes`] changes the number of neurons.
    pub without_neurons_bytes: u64,
    /// Device memory that everything would take, bytes; a larger budget is of no use.
    pub full_bytes: u64,
    /// One line for each of [`PartName`].
    pub parts: Vec<PlanPart>,
    /// Slots of each layer, `[layers]`.
    pub layers: Vec<LayerSlots>,
    /// Bytes within the buffers for experts that are copied for a prompt's chunk, whole experts; 0 where neurons are placed, where a budget
    /// has no room for them, and where all experts lie on the device.
    pub streamed_bytes: u64,
    /// Layers whose attention's matrices stay in host memory and are copied to the device for every pass.
    pub streamed_layers: usize,
    /// Tokens of a prompt's chunk.
    pub chunk: usize,
    /// Number of sequences whose keys and values lie on the device.
    pub sequences: usize,
    /// Sum of the impacts of the neurons on the device.
    pub objective: u64,
    /// (bound - value) / bound, where no placement within the budget is worth more than the bound; 0 is optimal.
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

    /// Has the keys and values of so many sequences on the device.
    pub fn keep_sequences(&mut self, sequences: usize, f: &Footprint) {
        let kv = self.parts.iter_mut().find(|p| p.name == PartName::Kv).expect("a plan has every part");
        let on_host = |bytes: u64| bytes + self.sequences as u64 * f.host_kv_bytes - sequences as u64 * f.host_kv_bytes;
        kv.bytes[Tier::Host] = on_host(kv.bytes[Tier::Host]);
        self.details.host_bytes = on_host(self.details.host_bytes);
        let (before, now) = (kv.bytes[Tier::Device], sequences as u64 * f.kv_bytes);
        kv.bytes[Tier::Device] = now;
        self.total_bytes = self.total_bytes + now - before;
        self.sequences = sequences;
    }

    /// Keeps to chunks of [`CHUNK`] tokens, unless the `bytes` that longer ones take are `room` at most. Returns the room that is left.
    pub fn limit_chunk(&mut self, bytes: u64, room: u64) -> u64 {
        if let Some(left) = room.checked_sub(bytes) {
            return left;
        }
        self.without_buffers(bytes);
        self.chunk = CHUNK;
        room
    }

    /// Leaves out the room for experts that are copied for a prompt's chunk, unless it is `room` bytes at most.
    pub fn limit_streamed(&mut self, room: u64) {
        if self.streamed_bytes > room {
            self.without_buffers(self.streamed_bytes);
            self.streamed_bytes = 0;
        }
    }

    fn without_buffers(&mut self, bytes: u64) {
        let buffers = self.parts.iter_mut().find(|p| p.name == PartName::Buffers).expect("a plan has every part");
        buffers.bytes[Tier::Device] -= bytes;
        self.total_bytes -= bytes;
    }
}

/// Plans what lies on the device. What every token reads whole comes first (attention, head, predictors, buffers), then neurons, keys and
/// values, then the embedding, of which a token reads one row. Keys and values come before the neurons that are least often active where
/// the host would take longer for attention than for these. Of the room for a mixture's experts a little is for those that are copied for a
/// prompt's chunk.
///
/// Where attention has no room, the matrices of some layers stay in host memory and are copied for every pass; then keys and values, and longer
/// chunks of prompts, come before neurons.
///
/// `counts` is how often each neuron fired, `[layers][ffn]`; a layer of which nothing is placed has none.
///
/// # Errors
/// [`Error::Memory`] for a budget below `min_bytes`, naming it, one that does not hold the asked share of neurons, or a host budget that is
/// too small; [`Error::Failed`] where the placement cannot be solved.
pub fn plan(footprint: &Footprint, counts: &[Vec<u64>], machine: &MachineProfile, request: &Request) -> Result<Plan> {
    let (f, request) = (footprint, &request.within_host(footprint));
    assert!(counts.len() == f.layers && counts.iter().all(|of| of.len() == f.ffn || of.is_empty()));
    if request.kv == KvPlace::Device && f.kv_bytes == 0 {
        return Err(Error::Usage(
            "no attention of this model is computed on a device, which therefore holds no keys and values: take --kv-place host"
                .into(),
        ));
    }
    let sequences = request.sequences.max(1);
    let kv_bytes = f.kv_bytes * sequences as u64;
    let kv_first = if request.kv == KvPlace::Device { kv_bytes } else { 0 };
    let asked = request.chunk.map_or(0, |tokens| f.for_chunks(tokens));
    let least_bytes = |streamed_layers: usize| {
        f.least_bytes() - f.saved_by_streaming(streamed_layers) + request.predictor_bytes + kv_first + asked
    };
    let attention = streamed_attention(f, machine, request, &least_bytes);
    let (without_neurons_bytes, min_bytes) = (least_bytes(attention.layers), least_bytes(most_streamed(f, request)));
    let kv_later = if matches!(request.kv, KvPlace::Auto | KvPlace::Spare) { kv_bytes } else { 0 };
    let full_bytes = least_bytes(0) + f.ffn_bytes() + kv_later + f.embeddings_bytes;

    // Rounded down, so that the share is not exceeded.
    let wanted = request.ffn_share.map_or(f.ffn_bytes(), |share| (f.ffn_bytes() as f64 * share) as u64);
    let wanted = wanted.min(f.ffn_bytes());
    let beside = || streamed(f, request, wanted, wanted) + longer(f, request, wanted, wanted).1;
    let budget_bytes = request.vram.unwrap_or_else(|| without_neurons_bytes + wanted + beside());
    let Some(mut room) = budget_bytes.checked_sub(without_neurons_bytes) else {
        return Err(too_small(budget_bytes, min_bytes, (attention.layers, f.layers), kv_first > 0));
    };
    if request.ffn_share.is_some() && wanted > room {
        let least = least_bytes(0) + wanted;
        return Err(Error::Memory(format!(
            "--ffn-share takes {wanted} bytes and --vram leaves {room} for neurons; give --vram {least} or more, or a smaller share"
        )));
    }
    let (chunk, longer) = match attention.layers {
        0 => longer(f, request, wanted, room),
        _ => (attention.chunk, if request.chunk.is_some() { 0 } else { f.for_chunks(attention.chunk) }),
    };
    room -= longer;
    let costs = Costs::of(machine, f.block_bytes, f.hidden);
    let least = min_neurons(&costs, f.ffn);
    let problem = match f.experts_used {
        None => Problem::new(counts, f.block_bytes, least),
        Some(_) => Problem::in_batches(counts, f.block_bytes, least, 1),
    };
    let failed = |why| Error::Failed(format!("the placement cannot be planned: {why}"));
    let by_impact = problem.map_err(failed)?;
    let prices = Prices::new(&by_impact, costs.stage(request.skips_host), request.computed_share);
    let by_time = request.skips_host.then(|| by_impact.clone().by_time(&prices)).transpose().map_err(failed)?;
    let problem = by_time.as_ref().unwrap_or(&by_impact);
    let start = clock::now();
    let (sequences_there, division) =
        divide_room(f, (problem, &prices), (&costs, machine), request, (room, wanted), attention.layers);
    let Division { streamed_bytes, ffn_budget, solution } = division;
    let found = (&solution, ffn_budget, start.elapsed().as_secs_f64() * 1e3);
    let figures = (&costs, f.block_bytes, least);
    let details = Details::new((problem, &by_impact, &prices), found, figures, request.ilp_seconds)?;

    let layers = slots_of(problem, &solution.batches);
    let slots_bytes = f.block_bytes * layers.iter().map(|layer| layer.slots).sum::<usize>() as u64;
    // With `vram`, bytes that neurons could still use stay free for them: nothing else displaces one.
    let rest = if request.vram.is_some() { room - streamed_bytes - ffn_budget } else { 0 };
    let for_chunks = [streamed_bytes, f.for_chunks(chunk)];
    let (sequences, parts) = divide(f, request, (slots_bytes, for_chunks), rest, (sequences_there, attention.layers));
    let [host_bytes, total_bytes] =
        [Tier::Host, Tier::Device].map(|tier| parts.iter().map(|part| part.bytes[tier]).sum::<u64>());
    host_has_room(request, host_bytes)?;
    Ok(Plan {
        budget_bytes,
        total_bytes,
        min_bytes,
        without_neurons_bytes,
        full_bytes,
        parts,
        layers,
        streamed_bytes,
        streamed_layers: attention.layers,
        chunk,
        sequences,
        objective: solution.impact,
        gap: gap(details.bound, solution.value),
        details: Details { host_bytes, pinned_bytes: f.ffn_bytes() + f.streamed_on_host(attention.layers), ..details },
    })
}

/// That a budget is below the least, with attention of so many of so many layers copied, and perhaps with keys and values.
fn too_small(budget_bytes: u64, min_bytes: u64, (streamed, layers): (usize, usize), keys: bool) -> Error {
    let there = match streamed {
        0 => "attention",
        streamed if streamed == layers => "the attention of two layers",
        _ => "the attention of the layers that are not copied",
    };
    Error::Memory(format!(
        "a budget of {budget_bytes} bytes is below the {min_bytes} that {there}, head, predictors, buffers{} take on the device; \
         give --vram {min_bytes} or more, or pack the model in a smaller type (--quant q4_0)",
        if keys { ", keys and values" } else { "" }
    ))
}

fn host_has_room(request: &Request, host_bytes: u64) -> Result<()> {
    match request.ram {
        Some(ram) if ram < host_bytes => Err(Error::Memory(format!(
            "--ram {ram} is below the {host_bytes} bytes that stay on the host: all neurons, and what is not on the device; \
             give --ram {host_bytes} or more, or pack the model in a smaller type (--quant q4_0)"
        ))),
        _ => Ok(()),
    }
}

/// Of how many layers attention's matrices are copied for every pass, and the tokens of a prompt's chunk if it is any.
struct StreamedAttention {
    layers: usize,
    chunk: usize,
}

/// What longer chunks may take of a budget that has no room for attention: one part in so many.
const CHUNK_SHARE: u64 = 16;

/// Most layers whose attention's matrices a plan copies for every pass: all, where that saves memory.
fn most_streamed(f: &Footprint, request: &Request) -> usize {
    let all = if f.saved_by_streaming(f.layers) > 0 { f.layers } else { 0 };
    request.streamed_layers.unwrap_or(all)
}

/// As few layers as the budget asks for: none, where all of attention has room. Else some more, so that keys and values lie on the device and
/// chunks are longer, as far as the link brings them while the host computes its part of a token. All, where even that is too little.
fn streamed_attention(
    f: &Footprint,
    machine: &MachineProfile,
    request: &Request,
    least_bytes: &impl Fn(usize) -> u64,
) -> StreamedAttention {
    let asked = request.chunk.unwrap_or(CHUNK);
    let with = |layers| StreamedAttention { layers, chunk: asked };
    let Some(vram) = request.vram.filter(|_| request.streamed_layers.is_none()) else {
        return with(request.streamed_layers.unwrap_or(0));
    };
    let useful = |layers: &usize| *layers == 0 || f.saved_by_streaming(*layers) > 0;
    let fewest = |more: u64| (0..=f.layers).filter(useful).find(|&layers| least_bytes(layers) + more <= vram);
    let least = match fewest(0) {
        Some(0) => return with(0),
        Some(layers) => layers,
        None => return with(most_streamed(f, request)),
    };
    let host_us = f.ffn_bytes() as f64 * request.computed_share / (machine.dram_gb_s * 1e3);
    let link_us = |layers: usize| layers as f64 * f.attention_layer_bytes[0] as f64 / (machine.link_gb_s * 1e3);
    let beyond = |tokens| if request.host_holds(f, tokens, true) { f.for_chunks(tokens) } else { u64::MAX };
    let (longest, longer) = match request.chunk {
        Some(tokens) => (tokens, 0),
        None if request.ffn_share.is_some() => (CHUNK, 0),
        None => prompt_chunk::within(beyond, vram / CHUNK_SHARE),
    };
    let kv = if request.may_displace() { f.kv_bytes * request.sequences.max(1) as u64 } else { 0 };
    let ways = [(longest, longer + kv), (asked, kv), (longest, longer)];
    let more = |(chunk, bytes)| {
        let layers = fewest(bytes)?;
        (link_us(layers) <= host_us).then_some(StreamedAttention { layers, chunk })
    };
    ways.into_iter().find_map(more).unwrap_or(with(least))
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
/// or `None` where they take what is left. They come first where attention's matrices of some layers are copied.
fn divide_room(
    f: &Footprint,
    (problem, prices): (&Problem, &Prices),
    (costs, machine): (&Costs, &MachineProfile),
    request: &Request,
    (room, wanted): (u64, u64),
    streamed_layers: usize,
) -> (Option<usize>, Division) {
    let within = |room: u64| {
        let streamed_bytes = streamed(f, request, wanted, room);
        let ffn_budget = (room - streamed_bytes).min(wanted);
        Division { streamed_bytes, ffn_budget, solution: solve(problem, ffn_budget) }
    };
    if streamed_layers > 0 && request.may_displace() {
        let sequences = request.sequences.max(1).min(f.sequences_in(room));
        return (Some(sequences), within(room - f.kv_bytes * sequences as u64));
    }
    let neurons = within(room);
    // Without a budget there is as much as the neurons take, and a share is a number of neurons that was asked for.
    if request.kv != KvPlace::Auto || request.vram.is_none() || request.ffn_share.is_some() || f.kv_bytes == 0 {
        return (None, neurons);
    }
    let there = f.sequences_in(room - neurons.streamed_bytes - neurons.ffn_budget);
    let displacing = |sequences: usize| {
        let left = room.checked_sub(f.kv_bytes * sequences as u64).filter(|_| there < sequences)?;
        let fewer = within(left);
        let gain = attention_on_host_us(f, costs, machine, sequences);
        let ffn_us = |division: &Division| prices.token_ns(problem, &division.solution.batches) / 1e3;
        let loss = ffn_us(&fewer) - ffn_us(&neurons);
        (gain > loss).then_some((Some(sequences), fewer))
    };
    [request.sequences.max(1), 1].into_iter().find_map(displacing).unwrap_or((None, neurons))
}

/// Tokens of a prompt's chunk, and the bytes that they take of `room` bytes, of which neurons may have `wanted`.
fn longer(f: &Footprint, request: &Request, wanted: u64, room: u64) -> (usize, u64) {
    if let Some(tokens) = request.chunk {
        return (tokens, 0);
    }
    let there = wanted.min(room);
    // A share and a budget beside it leave no room but what the share's neurons do not take.
    let free = if request.ffn_share.is_some() && request.vram.is_some() { room - wanted } else { u64::MAX };
    // Whether keys and values lie there is decided later.
    let fits = |tokens| f.for_chunks(tokens) <= free && request.host_holds(f, tokens, request.kv != KvPlace::Host);
    let beyond = |tokens| if fits(tokens) { f.for_chunks(tokens) } else { u64::MAX };
    prompt_chunk::longest(beyond, there, f.ffn_bytes() - there)
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
    let read = f.host_kv_bytes as f64 * sequences as f64 * FILLED;
    let reading = read / (machine.dram_gb_s * 1e3) - read / (machine.device_gb_s * 1e3);
    f.attention_waits as f64 * (costs.t_sync_us + machine.call_us) + reading
}

/// Divides the parts between device and host, with so many bytes of neurons in slots, of experts that are copied for a chunk and of longer
/// chunks than [`CHUNK`], and `rest` bytes left after them; attention's matrices of `streamed_layers` layers stay on the host. Returns also the
/// number of sequences whose keys and values lie on the device: `kv_sequences`, else as many as there is room for.
fn divide(
    f: &Footprint,
    request: &Request,
    (slots_bytes, for_chunks): (u64, [u64; 2]),
    mut rest: u64,
    (kv_sequences, streamed_layers): (Option<usize>, usize),
) -> (usize, Vec<PlanPart>) {
    let wanted = request.sequences.max(1);
    let sequences = match request.kv {
        KvPlace::Device => wanted,
        KvPlace::Host => 0,
        KvPlace::Auto | KvPlace::Spare => kv_sequences.unwrap_or_else(|| wanted.min(f.sequences_in(rest))),
    };
    let (kv, on_host) = (f.kv_bytes * sequences as u64, f.host_kv_bytes * (wanted - sequences) as u64);
    if matches!(request.kv, KvPlace::Auto | KvPlace::Spare) {
        rest -= kv;
    }
    let embeddings = if f.embeddings_bytes <= rest { (f.embeddings_bytes, 0) } else { (0, f.embeddings_bytes) };
    let part = |name, (device, host)| {
        let bytes = PerTier::from_fn(|tier| if tier == Tier::Device { device } else { host });
        PlanPart { name, bytes }
    };
    let copied = f.streamed_on_host(streamed_layers);
    let attention = (f.attention_bytes - f.saved_by_streaming(streamed_layers), copied);
    let parts = vec![
        part(PartName::Attention, attention),
        part(PartName::Embeddings, embeddings),
        part(PartName::Head, (f.head_bytes, 0)),
        part(PartName::Predictors, (request.predictor_bytes, 0)),
        part(PartName::Kv, (kv, on_host)),
        part(PartName::Buffers, (f.buffers_bytes + for_chunks.iter().sum::<u64>(), 0)),
        // The host keeps every neuron (dynamicinfer C.2), so a neuron that leaves the device need not be copied back.
        part(PartName::FfnSlots, (slots_bytes, f.ffn_bytes())),
    ];
    (sequences, parts)
}
