//! Predictors on the device.

use super::allocator::DeviceAllocator;
use super::weights::DeviceMatrix;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Buffer, Call, Device, OutOfMemory, SignScores, Then, View};
use crate::engine::sparsity::Sparsity;
use crate::model::config::ModelConfig;
use crate::predictor::{Form, Kind, Predictor};
use std::sync::Arc;

/// What scores a layer's neurons on the device.
#[derive(Clone, Copy)]
pub enum Scorer {
    /// The packed signs of the gate rows.
    Sign { bits: Buffer },
    /// A network's two matrices, and what its norm adds to the mean square.
    Mlp { inner: DeviceMatrix, outer: DeviceMatrix, epsilon: f32 },
}

/// A predictor, and how many layers before the predicted one stands the residual that it reads.
pub type Lookahead = (Arc<dyn Predictor>, usize);

/// A layer's scorer and what it was made from.
struct Loaded {
    from: Lookahead,
    scorer: Scorer,
    bytes: u64,
    /// The scorer is the one by which the engine chooses.
    shared: bool,
}

/// The predictors that are on the device, by the layer that they predict.
#[derive(Default)]
pub struct Scorers {
    /// Those by which the engine chooses neurons.
    chosen: Vec<Option<Loaded>>,
    /// Those that predict for the scheduler alone.
    ahead: Vec<Option<Loaded>>,
    /// Memory for the hidden layer of a network, `[n, rank]`, of the largest rank; `None` if no layer has a network.
    pub inner: Option<Buffer>,
    /// Scores of layers that are looked ahead to, `[places, MAX_COLUMNS, ffn]`: of layer l at place `l % places`.
    scores: Option<Buffer>,
    places: usize,
    /// Bytes of device memory that all of it takes.
    pub bytes: u64,
}

fn same(one: &Lookahead, other: &Lookahead) -> bool {
    Arc::ptr_eq(&one.0, &other.0) && one.1 == other.1
}

/// Whether one upload does for both: signs are the same however far ahead they predict.
fn shares(one: Option<&Lookahead>, other: Option<&Lookahead>) -> bool {
    one.zip(other).is_some_and(|(one, other)| Arc::ptr_eq(&one.0, &other.0) && one.0.kind() == Kind::Sign)
}

/// What predicts `layer` on the device: by which the engine chooses, and for the scheduler alone.
fn wanted(sparsity: &Sparsity, lookahead: Option<&Lookahead>, layer: usize, c: &ModelConfig) -> [Option<Lookahead>; 2] {
    if c.neurons_inside() {
        // The host routes, and so it scores.
        return [None, None];
    }
    let fits = |(predictor, ahead): &Lookahead| predictor.form(layer, *ahead).is_some();
    let chosen = sparsity.predictor(layer).map(|(predictor, ahead)| (predictor.clone(), ahead)).filter(fits);
    let is_new = |ahead: &&Lookahead| ahead.1 <= layer && !chosen.as_ref().is_some_and(|chosen| same(chosen, ahead));
    // Another prediction between would take the place of the scores by which the engine chooses.
    let is_before = |ahead: &&Lookahead| sparsity.predictor(layer).is_none_or(|(_, chosen)| chosen < ahead.1);
    let ahead = lookahead.filter(is_new).filter(is_before).cloned().filter(fits);
    [chosen, ahead]
}

/// Bytes of device memory that predicting takes: the weights of what `sparsity` and `lookahead` ask for, and the scores that are kept.
pub fn predictor_bytes(sparsity: &Sparsity, lookahead: Option<&Lookahead>, c: &ModelConfig) -> u64 {
    let weights = |l: usize| {
        let [chosen, ahead] = wanted(sparsity, lookahead, l, c);
        let ahead = ahead.filter(|ahead| !shares(chosen.as_ref(), Some(ahead)));
        chosen.into_iter().chain(ahead).map(|(predictor, ahead)| predictor.weight_bytes(l, ahead)).sum::<u64>()
    };
    (0..c.layers().len()).map(weights).sum::<u64>()
        + (places(sparsity, lookahead, c) * place_bytes(c.widest_ffn())) as u64
}

/// Layers whose scores are kept, of so many; 0 if none is looked ahead to.
fn places(sparsity: &Sparsity, lookahead: Option<&Lookahead>, c: &ModelConfig) -> usize {
    let aheads =
        (0..c.layers().len()).flat_map(|l| wanted(sparsity, lookahead, l, c)).flatten().map(|(_, ahead)| ahead);
    aheads.max().filter(|ahead| *ahead > 0).map_or(0, |ahead| ahead + 1)
}

/// Bytes of the kept scores of one layer of `ffn` neurons.
fn place_bytes(ffn: usize) -> usize {
    MAX_COLUMNS * ffn * 4
}

impl Scorers {
    /// What scores `layer` from the residual `ahead` layers before; `None` if the host has to.
    pub fn get(&self, layer: usize, ahead: usize) -> Option<Scorer> {
        let fits = |at: &[Option<Loaded>]| at.get(layer)?.as_ref().filter(|l| l.from.1 == ahead).map(|l| l.scorer);
        fits(&self.chosen).or_else(|| fits(&self.ahead))
    }

    /// What scores `layer` by this prediction and no other; `None` if the host has to.
    pub fn get_as(&self, layer: usize, from: &Lookahead) -> Option<Scorer> {
        let fits = |at: &[Option<Loaded>]| at.get(layer)?.as_ref().filter(|l| same(&l.from, from)).map(|l| l.scorer);
        fits(&self.chosen).or_else(|| fits(&self.ahead))
    }

    /// How many layers before it stands the residual by which the device chooses the neurons of `layer`; `None` if the host chooses.
    pub fn chooses(&self, layer: usize) -> Option<usize> {
        self.chosen.get(layer)?.as_ref().map(|loaded| loaded.from.1)
    }

    /// The numbers of layers that it looks ahead at most.
    pub fn aheads(&self) -> std::ops::Range<usize> {
        1..self.places.max(1)
    }

    /// Where the scores of a layer that is looked ahead to are kept, `[n, ffn]`.
    pub fn scores(&self, layer: usize, ffn: usize) -> View {
        let buffer = self.scores.expect("made before the first that looks ahead");
        View { buffer, at: (layer % self.places * place_bytes(ffn)) as u64 }
    }

    /// Uploads the predictors with which `sparsity` chooses neurons and, for the scheduler, `lookahead`, and frees those that are not used
    /// any more. Those for which there is no room run on the host.
    pub fn upload(
        &mut self,
        device: &mut dyn Device,
        sparsity: &Sparsity,
        lookahead: Option<&Lookahead>,
        c: &ModelConfig,
    ) {
        self.chosen.resize_with(c.layers().len(), || None);
        self.ahead.resize_with(c.layers().len(), || None);
        let mut allocator = DeviceAllocator { device, bytes: 0 };
        for l in 0..c.layers().len() {
            let [chosen, ahead] = wanted(sparsity, lookahead, l, c);
            // Where one upload does for both it is the first one's: an upload of the second's own would be the same bytes twice.
            let ahead = ahead.filter(|ahead| !shares(chosen.as_ref(), Some(ahead)));
            for (at, wanted) in [(&mut self.chosen[l], chosen), (&mut self.ahead[l], ahead)] {
                let stays = |at: &Loaded| !at.shared && wanted.as_ref().is_some_and(|wanted| same(wanted, &at.from));
                if let Some(old) = at.take_if(|loaded| !stays(loaded)).filter(|old| !old.shared) {
                    old.scorer.free(&mut *allocator.device);
                    self.bytes -= old.bytes;
                }
            }
        }
        self.keep_scores(&mut allocator, places(sparsity, lookahead, c), c.widest_ffn());
        // What has no place for its scores is the host's.
        let kept = self.places;
        for at in self.chosen.iter_mut().chain(&mut self.ahead) {
            let homeless = at.take_if(|loaded| loaded.from.1 > 0 && loaded.from.1 >= kept);
            if let Some(old) = homeless.filter(|old| !old.shared) {
                old.scorer.free(&mut *allocator.device);
                self.bytes -= old.bytes;
            }
        }
        for l in 0..c.layers().len() {
            let [chosen, ahead] = wanted(sparsity, lookahead, l, c);
            let kept = self.places;
            let is_new = |at: &Option<Loaded>, (_, ahead): &Lookahead| at.is_none() && (*ahead == 0 || *ahead < kept);
            if let Some(chosen) = chosen.filter(|chosen| is_new(&self.chosen[l], chosen)) {
                self.chosen[l] = load(&mut allocator, &mut self.inner, &mut self.bytes, chosen, l, c);
            }
            if let Some(ahead) = ahead.filter(|ahead| is_new(&self.ahead[l], ahead)) {
                let chosen = self.chosen[l].as_ref().filter(|chosen| shares(Some(&chosen.from), Some(&ahead)));
                self.ahead[l] = match chosen.map(|chosen| chosen.scorer) {
                    Some(scorer) => Some(Loaded { from: ahead, scorer, bytes: 0, shared: true }),
                    None => load(&mut allocator, &mut self.inner, &mut self.bytes, ahead, l, c),
                };
            }
        }
    }

    /// Makes room for the scores of so many layers, if there is none; without it nothing is looked ahead to on the device.
    fn keep_scores(&mut self, allocator: &mut DeviceAllocator<'_>, places: usize, ffn: usize) {
        if self.places >= places {
            return;
        }
        if let Some(old) = self.scores.take() {
            allocator.device.free(old);
            self.bytes -= old.bytes;
        }
        self.scores = allocator.alloc(places * place_bytes(ffn)).ok();
        self.places = if self.scores.is_some() { places } else { 0 };
        self.bytes += self.scores.map_or(0, |scores| scores.bytes);
    }
}

impl Scorer {
    fn free(self, device: &mut dyn Device) {
        let buffers = match self {
            Scorer::Sign { bits } => vec![bits],
            Scorer::Mlp { inner, outer, .. } => vec![inner.weights, inner.bias, outer.weights, outer.bias],
        };
        buffers.into_iter().for_each(|buffer| device.free(buffer));
    }
}

/// Uploads one predictor of layer `l`, and makes the hidden layer's memory as large as it needs; adds what both take to `bytes`. `None` if
/// it has nothing for a device, or there is no room.
fn load(
    allocator: &mut DeviceAllocator<'_>,
    room: &mut Option<Buffer>,
    bytes: &mut u64,
    from: Lookahead,
    l: usize,
    c: &ModelConfig,
) -> Option<Loaded> {
    let form = from.0.form(l, from.1)?;
    let left = allocator.device.memory().budget.saturating_sub(allocator.device.memory().used);
    let inner_bytes = form.rank() * MAX_COLUMNS * 4;
    if form.bytes() + inner_bytes as u64 > left {
        return None;
    }
    let before = allocator.bytes;
    let fits = room.is_some_and(|room| room.bytes >= inner_bytes as u64);
    // The old one stays until there is a larger one: networks that are loaded use it.
    let grown = if fits { Ok(None) } else { allocator.alloc(inner_bytes).map(|larger| room.replace(larger)) };
    let grown = grown.map(|old| {
        if let Some(old) = old {
            allocator.device.free(old);
            *bytes -= old.bytes;
        }
    });
    let grown_to = allocator.bytes;
    let scorer = grown.and_then(|()| scorer(allocator, form, l, c));
    *bytes += allocator.bytes - before;
    // There was room a moment ago; a device that refuses all the same leaves the layer to the host.
    scorer.ok().map(|scorer| Loaded { from, scorer, bytes: allocator.bytes - grown_to, shared: false })
}

fn scorer(
    allocator: &mut DeviceAllocator<'_>,
    form: Form<'_>,
    l: usize,
    c: &ModelConfig,
) -> Result<Scorer, OutOfMemory> {
    let (hidden, ffn, n) = (c.hidden, c.width(l), MAX_COLUMNS);
    match form {
        Form::Sign { bits } => {
            let bits = allocator.upload(bytemuck::cast_slice(bits))?;
            let x = bits.into();
            allocator.prepare(&Call::SignScores(SignScores { hidden, ffn, n, bits, x, scores: x }))?;
            Ok(Scorer::Sign { bits })
        }
        Form::Mlp { inner, outer, epsilon } => {
            let (inner, outer) = (allocator.linear(inner.0, inner.1)?, allocator.linear(outer.0, outer.1)?);
            for matrix in [inner, outer] {
                let x = matrix.weights.into();
                allocator.prepare(&Call::Linear(matrix.call(n, x, x, Then::Store)))?;
            }
            Ok(Scorer::Mlp { inner, outer, epsilon })
        }
    }
}
