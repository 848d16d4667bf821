//! What of the model lies on the device beside the neurons: attention, head and predictors, and the room for a pass.

use super::decode::Place;
use super::session::CHUNK;
use super::sparsity::Sparsity;
use crate::cpu::MAX_COLUMNS;
use crate::device::{
    Attend, Buffer, Call, DenseFfn, Device, Heads, HostRoom, Linear, Norm, OutOfMemory, SignScores, SparseFfn, Stream,
    Then, View,
};
use crate::formats::rows::Quant;
use crate::model::config::{ModelConfig, Norm as NormKind, Positions};
use crate::model::weights::{Matrix, NormWeights};
use crate::model::{KvCache, KvType, Model};
use crate::predictor::{Form, Predictor};
use std::sync::Arc;

/// Takes memory of a device and counts it.
pub struct Taker<'a> {
    pub device: &'a mut dyn Device,
    pub bytes: u64,
}

impl Taker<'_> {
    fn room(&mut self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        let buffer = self.device.alloc(bytes as u64)?;
        self.bytes += bytes as u64;
        Ok(buffer)
    }

    /// Waits until the bytes are there.
    fn bring(&mut self, bytes: &[u8]) -> Result<Buffer, OutOfMemory> {
        let buffer = self.room(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: the copy is done before anything else can happen to `bytes`.
            unsafe { self.device.copy_in(Stream::Compute, bytes.as_ptr(), bytes.len(), buffer, 0) };
            self.device.synchronize(Stream::Compute);
        }
        Ok(buffer)
    }

    /// Takes what a call needs beside its operands.
    pub fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        let before = self.device.memory().used;
        self.device.prepare(call)?;
        self.bytes += self.device.memory().used - before;
        Ok(())
    }

    /// Takes, once and for all, what the calls of passes need beside their operands; `ffns` are those of the FFNs.
    pub fn prepare_all(
        &mut self,
        c: &ModelConfig,
        weights: &Weights,
        rooms: &Rooms,
        kv: Option<&DeviceKv>,
        ffns: &[Call],
    ) -> Result<(), OutOfMemory> {
        let (x, qkv, mixed) = (rooms.front.into(), rooms.qkv.into(), rooms.mixed.into());
        let at = &weights.layers[0];
        for n in 1..=MAX_COLUMNS {
            self.prepare(&Call::Linear(at.qkv.call(n, x, qkv, Then::Store)))?;
            self.prepare(&Call::Linear(at.o.call(n, mixed, x, Then::Add)))?;
            self.prepare(&Call::Linear(weights.head.call(n, x, rooms.logits.into(), Then::Store)))?;
            if let Some(kv) = kv {
                let (heads, places) = (kv.heads, rooms.places.into());
                let (window, most) = (c.window, heads.context);
                self.prepare(&Call::Attend(Attend { heads, layer: 0, n, window, most, qkv, places, out: mixed }))?;
            }
        }
        let n = CHUNK;
        self.prepare(&Call::Linear(at.qkv.call(n, x, qkv, Then::Store)))?;
        self.prepare(&Call::Linear(at.o.call(n, mixed, x, Then::Add)))?;
        ffns.iter().try_for_each(|call| self.prepare(call))
    }

    fn numbers(&mut self, numbers: &[f32]) -> Result<Buffer, OutOfMemory> {
        self.bring(bytemuck::cast_slice(numbers))
    }

    fn linear(&mut self, matrix: &Matrix, bias: &[f32]) -> Result<OnDevice, OutOfMemory> {
        let (weights, bias) = (self.bring(matrix.all())?, self.numbers(bias)?);
        Ok(OnDevice { quant: matrix.quant, rows: matrix.rows, cols: matrix.cols, weights, bias })
    }

    fn norm(&mut self, weights: &NormWeights) -> Result<[Buffer; 2], OutOfMemory> {
        Ok([self.numbers(&weights.weight)?, self.numbers(&weights.bias)?])
    }
}

/// A matrix on the device, with its bias.
#[derive(Clone, Copy)]
pub struct OnDevice {
    quant: Quant,
    rows: usize,
    cols: usize,
    weights: Buffer,
    bias: Buffer,
}

impl OnDevice {
    pub fn call(&self, n: usize, x: View, out: View, then: Then) -> Linear {
        let OnDevice { quant, rows, cols, weights, bias } = *self;
        Linear { quant, rows, cols, n, weights, bias, x, out, then }
    }
}

pub fn norm(kind: NormKind, [weight, bias]: [Buffer; 2], hidden: usize, n: usize, x: View, out: View) -> Norm {
    Norm { kind, hidden, n, weight, bias, x, out }
}

pub struct LayerWeights {
    pub attn_norm: [Buffer; 2],
    pub qkv: OnDevice,
    pub o: OnDevice,
    pub ffn_norm: [Buffer; 2],
    /// `[ffn]`, or no bytes.
    pub up_bias: Buffer,
}

/// What scores a layer's neurons on the device, from its own residual.
pub enum Scorer {
    Sign { bits: Buffer },
    Mlp { inner: OnDevice, outer: OnDevice, epsilon: f32 },
}

/// A layer's scorer and the predictor that it was made of.
struct Brought {
    from: Arc<dyn Predictor>,
    scorer: Scorer,
    bytes: u64,
}

pub struct Weights {
    pub layers: Vec<LayerWeights>,
    pub out_norm: [Buffer; 2],
    pub head: OnDevice,
    /// Ones and zeros for a norm without weights.
    pub plain: [Buffer; 2],
}

impl Weights {
    pub fn new(taker: &mut Taker<'_>, model: &Model) -> Result<Weights, OutOfMemory> {
        let layer = |layer: &crate::model::weights::Layer| {
            Ok(LayerWeights {
                attn_norm: taker.norm(&layer.attn_norm)?,
                qkv: taker.linear(&layer.qkv, &layer.qkv_bias)?,
                o: taker.linear(&layer.o, &layer.o_bias)?,
                ffn_norm: taker.norm(&layer.ffn_norm)?,
                up_bias: taker.numbers(&layer.up_bias)?,
            })
        };
        let layers = model.layers.iter().map(layer).collect::<Result<_, _>>()?;
        let none = taker.room(0)?;
        let (out_norm, head) = (taker.norm(&model.out_norm)?, taker.linear(&model.head, &[])?);
        Ok(Weights { layers, out_norm, head, plain: [none; 2] })
    }
}

/// The predictors that are on the device, by layer.
#[derive(Default)]
pub struct Scorers {
    layers: Vec<Option<Brought>>,
    /// Room for the hidden layer of a network, `[n, rank]`, of the largest rank.
    pub inner: Option<Buffer>,
    pub bytes: u64,
}

impl Scorers {
    pub fn get(&self, layer: usize) -> Option<&Scorer> {
        self.layers.get(layer)?.as_ref().map(|brought| &brought.scorer)
    }

    /// Brings what `sparsity` scores its layers with from their own residuals, and gives back what it does not use any more.
    /// What there is no room for stays on the host.
    pub fn bring(&mut self, device: &mut dyn Device, sparsity: &Sparsity, c: &ModelConfig) {
        let (hidden, ffn) = (c.hidden, c.ffn);
        self.layers.resize_with(c.layers, || None);
        for (l, at) in self.layers.iter_mut().enumerate() {
            let wanted = sparsity.own_predictor(l);
            let same = |brought: &Brought| wanted.is_some_and(|wanted| Arc::ptr_eq(wanted, &brought.from));
            if let Some(old) = at.take_if(|brought| !same(brought)) {
                let buffers = match old.scorer {
                    Scorer::Sign { bits } => vec![bits],
                    Scorer::Mlp { inner, outer, .. } => vec![inner.weights, inner.bias, outer.weights, outer.bias],
                };
                buffers.into_iter().for_each(|buffer| device.free(buffer));
                self.bytes -= old.bytes;
            }
            let Some((wanted, form)) = wanted.filter(|_| at.is_none()).and_then(|w| Some((w, w.form(l, 0)?))) else {
                continue;
            };
            let left = device.memory().budget - device.memory().used;
            let room = form.rank() * MAX_COLUMNS * 4;
            if form.bytes() + room as u64 > left {
                continue;
            }
            let mut taker = Taker { device: &mut *device, bytes: 0 };
            let grown = match self.inner {
                Some(inner) if inner.bytes >= room as u64 => Ok(()),
                old => {
                    if let Some(old) = old {
                        taker.device.free(old);
                        self.bytes -= old.bytes;
                    }
                    taker.room(room).map(|inner| self.inner = Some(inner))
                }
            };
            self.bytes += taker.bytes;
            taker.bytes = 0;
            let scorer = grown.and_then(|()| match form {
                Form::Sign { bits } => {
                    let bits = taker.bring(bytemuck::cast_slice(bits))?;
                    let (x, n) = (bits.into(), MAX_COLUMNS);
                    taker.prepare(&Call::SignScores(SignScores { hidden, ffn, n, bits, x, scores: x }))?;
                    Ok(Scorer::Sign { bits })
                }
                Form::Mlp { inner, outer, epsilon } => {
                    let (inner, outer) = (taker.linear(inner.0, inner.1)?, taker.linear(outer.0, outer.1)?);
                    for matrix in [inner, outer] {
                        let x = matrix.weights.into();
                        taker.prepare(&Call::Linear(matrix.call(MAX_COLUMNS, x, x, Then::Store)))?;
                    }
                    Ok(Scorer::Mlp { inner, outer, epsilon })
                }
            });
            self.bytes += taker.bytes;
            // There was room a moment ago; a device that refuses all the same leaves the layer to the host.
            if let Ok(scorer) = scorer {
                *at = Some(Brought { from: wanted.clone(), scorer, bytes: taker.bytes });
            }
        }
    }
}

/// Slots whose products a chunk's FFN makes at a time: enough tiles for a large card, and a few megabytes.
pub const SLOTS_AT_ONCE: usize = 4096;
/// Parts of a chunk's counts at most ([`DenseFfn::parts`]).
pub const MAX_PARTS: usize = DenseFfn::parts(Quant::Q8, CHUNK);

/// Room on the device for a pass of up to [`CHUNK`] columns.
pub struct Rooms {
    /// What host and device both look at, one copy: see [`Front`].
    pub front: Buffer,
    /// `[n, qkv_dim]`
    pub qkv: Buffer,
    /// `[n, q_dim]`
    pub mixed: Buffer,
    /// The device's half of an FFN's output, `[n, hidden]`, then a count; up to [`MAX_COLUMNS`] columns.
    pub output: Buffer,
    /// The host's half, `[n, hidden]`; before that, a predictor's input.
    pub half: Buffer,
    /// `[n, vocab]`, up to [`MAX_COLUMNS`] columns.
    pub logits: Buffer,
    /// Of a chunk: products `[n, SLOTS_AT_ONCE]`, in how many columns each neuron is active `[MAX_PARTS, ffn]`, and the neurons whose
    /// blocks are copied for it, `[ffn]`.
    pub products: Buffer,
    pub counts: Buffer,
    pub names: Buffer,
    /// Where the columns of a pass stand, `[n, 2]` u32, and their angles, `[n, head_dim]`.
    pub places: Buffer,
    pub angles: Buffer,
}

impl Rooms {
    /// Bytes of each, in their order.
    fn sizes(c: &ModelConfig) -> [usize; 11] {
        let rotates = matches!(c.positions, Positions::Rope { .. });
        [
            Front::new(MAX_COLUMNS, c).bytes().max(Front::new(CHUNK, c).scores() * 4),
            CHUNK * c.qkv_dim() * 4,
            CHUNK * c.q_dim() * 4,
            SparseFfn::output_bytes(MAX_COLUMNS, c.hidden),
            CHUNK * c.hidden * 4,
            MAX_COLUMNS * c.vocab * 4,
            CHUNK * c.ffn.min(SLOTS_AT_ONCE) * 4,
            MAX_PARTS * c.ffn * 4,
            c.ffn * 4,
            CHUNK * 8,
            if rotates { CHUNK * c.head_dim * 4 } else { 0 },
        ]
    }

    pub fn new(taker: &mut Taker<'_>, c: &ModelConfig) -> Result<Rooms, OutOfMemory> {
        let mut sizes = Rooms::sizes(c).into_iter();
        let mut next = || taker.room(sizes.next().expect("one for each"));
        Ok(Rooms {
            front: next()?,
            qkv: next()?,
            mixed: next()?,
            output: next()?,
            half: next()?,
            logits: next()?,
            products: next()?,
            counts: next()?,
            names: next()?,
            places: next()?,
            angles: next()?,
        })
    }
}

/// Bytes that a device's part of an engine takes for its passes, whatever it holds of the model.
pub fn room_bytes(c: &ModelConfig) -> u64 {
    Rooms::sizes(c).iter().sum::<usize>() as u64
}

/// What host and device hand each other in a pass, in pages that the device may pin.
pub struct HostRooms {
    /// Host side of the front: what came out, and the masks that go in.
    pub received: HostRoom,
    pub masks: HostRoom,
    /// Masks of every neuron, for dense layers.
    pub all_masks: HostRoom,
    /// The CPU's half, `[n, hidden]`.
    pub half: HostRoom,
    /// Active neurons times columns of each layer's device half.
    pub active: HostRoom,
    /// Queries, keys and values that the device made, `[layers, n, qkv_dim]`, of a chunk for two layers in turns: the host's caches get
    /// the last two.
    pub made: HostRoom,
    /// What attention reads and makes, `[n, qkv_dim]` and `[n, q_dim]`, where it is the CPU's.
    pub qkv: HostRoom,
    pub mixed: HostRoom,
    /// Places and angles of a pass, as the device reads them.
    pub places: HostRoom,
    pub angles: HostRoom,
    /// Of a chunk: counts of active columns for two layers in turns, `[2, MAX_PARTS, ffn]`, and the neurons that are copied for it,
    /// `[layers, ffn]`.
    pub counts: HostRoom,
    pub names: HostRoom,
}

impl HostRooms {
    /// # Safety
    /// The device is dropped before they are.
    pub unsafe fn new(device: &mut dyn Device, c: &ModelConfig) -> HostRooms {
        let mut room = |words: usize, written: bool| {
            let room = HostRoom::new(words);
            // SAFETY: rooms stay where they are, and the caller's promise.
            unsafe { device.pin(room.as_ptr().cast(), words * 4, written) };
            room
        };
        HostRooms {
            received: room((Front::new(MAX_COLUMNS, c).bytes() / 4).max(CHUNK * c.hidden), true),
            masks: room(c.ffn, false),
            all_masks: room(c.ffn, false),
            half: room(CHUNK * c.hidden, false),
            active: room(c.layers, true),
            made: HostRoom::new(0),
            qkv: room(CHUNK * c.qkv_dim(), true),
            mixed: room(CHUNK * c.q_dim(), false),
            places: room(CHUNK * 2, false),
            angles: room(CHUNK * c.head_dim, false),
            counts: room(2 * MAX_PARTS * c.ffn, true),
            names: room(c.layers * c.ffn, false),
        }
    }

    /// Takes room for the keys and values that the device makes, if there is none.
    ///
    /// # Safety
    /// The device is dropped before they are.
    pub unsafe fn attend(&mut self, device: &mut dyn Device, c: &ModelConfig) {
        if self.made.is_empty() {
            self.made = HostRoom::new((c.layers * MAX_COLUMNS).max(2 * CHUNK) * c.qkv_dim());
            // SAFETY: rooms stay where they are, and the caller's promise.
            unsafe { device.pin(self.made.as_ptr().cast(), size_of_val(&self.made[..]), true) };
        }
    }
}

/// How the bytes that host and device both look at lie, for n columns: normalised input `[n, hidden]`, masks `[ffn]`, residual
/// `[n, hidden]`, scores `[n, ffn]`. The first two are what [`SparseFfn`] reads.
#[derive(Clone, Copy)]
pub struct Front {
    pub n: usize,
    pub hidden: usize,
    pub ffn: usize,
}

impl Front {
    pub fn new(n: usize, c: &ModelConfig) -> Front {
        Front { n, hidden: c.hidden, ffn: c.ffn }
    }

    /// Where each part begins, in numbers: a multiple of four.
    pub const fn masks(&self) -> usize {
        self.n * self.hidden
    }

    pub const fn residual(&self) -> usize {
        (self.masks() + self.ffn).next_multiple_of(4)
    }

    pub const fn scores(&self) -> usize {
        (self.residual() + self.n * self.hidden).next_multiple_of(4)
    }

    pub const fn bytes(&self) -> usize {
        (self.scores() + self.n * self.ffn) * 4
    }
}

/// Keys and values on the device: a copy of what the host's caches hold, for the timelines that were used last.
pub struct DeviceKv {
    pub heads: Heads,
    held: Vec<Held>,
    /// Passes so far.
    passes: u64,
}

/// Whose keys and values lie in a place on the device.
#[derive(Clone, Copy, Default)]
struct Held {
    /// Of a cache; 0 for none.
    id: u64,
    /// Positions that are there.
    len: usize,
    used: u64,
}

impl DeviceKv {
    /// Timelines that there is room for.
    pub fn timelines(&self) -> usize {
        self.held.len()
    }

    /// Gives its room back; bytes.
    pub fn release(self, device: &mut dyn Device) -> u64 {
        device.free(self.heads.cache);
        self.heads.cache.bytes
    }

    pub fn new(
        taker: &mut Taker<'_>,
        c: &ModelConfig,
        context: usize,
        timelines: usize,
    ) -> Result<DeviceKv, OutOfMemory> {
        let bytes = KvCache::bytes_for(c, context, KvType::F16) as usize * timelines;
        let ModelConfig { heads, kv_heads, head_dim, layers, .. } = *c;
        let heads = Heads { heads, kv_heads, head_dim, layers, context, cache: taker.room(bytes)? };
        Ok(DeviceKv { heads, held: vec![Held::default(); timelines], passes: 0 })
    }

    /// Whether there is room for all timelines of a pass.
    pub fn takes(&self, places: &[Place], caches: &[KvCache]) -> bool {
        let timelines = (0..caches.len()).filter(|&i| places.iter().any(|p| p.cache == i)).count();
        let fits = |p: &Place| caches[p.cache].kind == KvType::F16 && p.position < self.heads.context;
        timelines <= self.held.len() && places.iter().all(fits)
    }

    /// Where the keys and values of a cache lie that a pass has brought.
    pub fn place_of(&self, kv: &KvCache) -> usize {
        self.held.iter().position(|held| held.id == kv.id()).expect("brought at the beginning of the pass")
    }

    /// Gives each timeline of a pass a place, and brings what the host has put there since.
    pub fn bring(&mut self, device: &mut dyn Device, places: &[Place], caches: &[KvCache]) {
        self.passes += 1;
        for Place { cache, .. } in places {
            let kv = &caches[*cache];
            if self.held.iter().any(|held| held.id == kv.id() && held.used == self.passes) {
                continue;
            }
            let known = self.held.iter().position(|held| held.id == kv.id());
            let oldest = || (0..self.held.len()).min_by_key(|&i| self.held[i].used).expect("there are timelines");
            let place = known.unwrap_or_else(oldest);
            let old = known.map_or(0, |place| self.held[place].len);
            let (from, dim) = (old.min(kv.untouched()).min(kv.len), self.heads.head_dim);
            self.held[place] = Held { id: kv.id(), len: kv.len, used: self.passes };
            if from == kv.len {
                continue;
            }
            for run in 0..self.heads.layers * 2 * self.heads.kv_heads {
                let (layer, head) = (run / (2 * self.heads.kv_heads), run % (2 * self.heads.kv_heads));
                let to = self.heads.start(place, layer, head) + from * dim;
                let numbers = kv.run(run, from);
                // SAFETY: done before anything else can happen to the cache.
                unsafe {
                    let (from, bytes) = (numbers.as_ptr().cast(), size_of_val(numbers));
                    device.copy_in(Stream::Compute, from, bytes, self.heads.cache, to as u64 * 2);
                }
            }
            device.synchronize(Stream::Compute);
        }
    }

    /// The host's caches have what the device's kernels put in a pass.
    pub fn agree(&mut self, places: &[Place], caches: &mut [KvCache]) {
        for &Place { cache, position } in places {
            let place = self.place_of(&caches[cache]);
            self.held[place].len = self.held[place].len.max(position + 1);
            caches[cache].agree();
        }
    }
}
