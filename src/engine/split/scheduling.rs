//! The engine's side of the scheduler in a layer: shows it a layer whose neurons have been divided and begins the moves that it has decided.
//! Both run beside the host's share of the FFN: the pool has begun it before.

use super::fired::{Fired, device_fired};
use super::migrator::{DividedLayer, Migrator};
use super::scorers::Scorers;
use super::state::Split;
use crate::cache::{Frames, NeuronCache, Tier};
use crate::clock;
use crate::cpu::{Columns, Kernels, ThreadPool};
use crate::device::{Device, HostWork, Note, Stage};
use crate::engine::batch::Buffers;
use crate::engine::ffn::{CachedFfn, ExpertBuffers, FfnBuffers, Selection, Tile};
use crate::engine::forward::Pass;
use crate::engine::positions::TokenPosition;
use crate::engine::probe::Probe;
use crate::engine::routing::Routes;
use crate::engine::sparsity::{Predicted, Sparsity, Wanted};
use crate::model::Model;
use crate::scheduler::LayerTimes;

/// What showing a layer to the scheduler and applying its decisions touches: nothing that the host's FFN does.
pub(super) struct Scheduling<'a, 'p, 'o> {
    migrator: &'a mut dyn Migrator,
    device: &'a mut dyn Device,
    cache: &'a mut NeuronCache,
    cached: Option<&'a mut CachedFfn>,
    scorers: &'a Scorers,
    /// The layer whose scores came with the exchange.
    scored_ahead: Option<usize>,
    fired: &'a mut Fired,
    fired_before: &'a mut [Selection],
    fired_words: &'a [u32],
    /// By layer: neurons on the device that some token wanted.
    on_device: &'a [usize],
    sequences: &'a [u64],
    times: LayerTimes,
    sparsity: &'a mut Sparsity,
    predicted: &'a Predicted,
    positions: &'a [TokenPosition],
    residual: &'a [f32],
    probe: &'a mut Probe<'p, 'o>,
    layer: usize,
    wanted: Wanted,
    neurons_inside: bool,
}

/// What the host's share of an FFN works with, beside the pool.
pub(super) struct HostShare<'a, 'p> {
    /// The model.
    pub model: &'p Model,
    /// The CPU kernels that are used.
    pub kernels: &'p Kernels,
    /// The FFN's input, as kernels read it, and as it is, `[n, hidden]`.
    pub columns: &'a Columns,
    pub normed: &'a [f32],
    /// Working memory.
    pub tiles: &'a mut [Tile],
    pub ffn: &'a mut FfnBuffers,
    pub experts: &'a mut ExpertBuffers,
    /// All experts of the tokens, and those that are left for the host.
    pub routes: &'a Routes,
    pub on_host: &'a Routes,
    /// The neurons that are left for the host.
    pub selection: &'a Selection,
    /// Where the share's output is added, `[n, hidden]`.
    pub partial: &'a mut [f32],
    /// Where the neurons come from, if not all are in memory.
    pub cached: Option<&'a mut CachedFfn>,
}

/// Whether the scheduler is shown the layer beside the host's share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    /// It is shown a layer of which this is computed.
    Scheduling(Wanted),
    /// A prompt's chunk is not shown layer by layer.
    Nothing,
}

impl Split {
    /// Computes the host's share of layer `l` by `share`, with the scheduler beside it, and tells the device of the work: `share` returns its bytes
    /// and operations, and a result of its own. Where neurons come from disk, the scheduler copies from the same frames, and comes after the share.
    pub(super) fn host_share<R>(
        &mut self,
        pass: &mut Pass<'_, '_>,
        l: usize,
        beside: Beside,
        share: impl FnOnce(&mut ThreadPool, HostShare<'_, '_>) -> ([u64; 2], R),
    ) -> R {
        let (mut lap, before) = (clock::now(), self.device.totals().host_ns);
        let scheduler_ns = pass.probe.report.scheduler_ns;
        let from_disk = pass.cached.is_some();
        let (pool, scheduling, host) = self.sides(pass, l, beside);
        let threads = pool.threads() as u64;
        host.partial.fill(0.0);
        let ([bytes, operations], result) = match scheduling {
            Some(mut scheduling) if !from_disk => pool.beside(&mut || scheduling.run(), |pool| share(pool, host)),
            _ => share(pool, host),
        };
        // Scheduling kept one of the threads from the share.
        let scheduler_ns = pass.probe.report.scheduler_ns - scheduler_ns;
        let ns = clock::lap(&mut lap).saturating_sub(scheduler_ns / threads);
        if let Beside::Scheduling(wanted) = beside
            && from_disk
        {
            self.schedule(pass, l, wanted);
        }
        self.device.worked(HostWork { stage: Stage::Ffn, bytes, operations, ns });
        self.current[l].ffn_ns[Tier::Host] = self.device.totals().host_ns - before;
        result
    }

    /// Shows the scheduler layer `l` and applies its decisions, where there is no share of the host's beside which to do so.
    pub(super) fn schedule(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) {
        let (_, scheduling, HostShare { cached, .. }) = self.sides(pass, l, Beside::Scheduling(wanted));
        if let Some(mut scheduling) = scheduling {
            scheduling.cached = cached;
            scheduling.run();
        }
    }

    /// The scheduler's side of a layer and the host's, which touch nothing in common.
    fn sides<'a, 'p, 'o>(
        &'a mut self,
        pass: &'a mut Pass<'p, 'o>,
        l: usize,
        beside: Beside,
    ) -> (&'a mut ThreadPool, Option<Scheduling<'a, 'p, 'o>>, HostShare<'a, 'p>) {
        let Split { device, cache, migrator, scorers, fired, fired_before, host, host_selection, experts, .. } = self;
        let Pass { model, pool, kernels, sparsity, buffers, cached, probe, .. } = pass;
        let Buffers { predicted, positions, x, normed, columns, ffn, experts: of_experts, routes, tiles, .. } =
            &mut **buffers;
        let model: &'p Model = model;
        let wanted = match beside {
            Beside::Scheduling(wanted) => Some(wanted),
            Beside::Nothing => None,
        };
        let scheduling = migrator.as_deref_mut().zip(wanted).map(|(migrator, wanted)| Scheduling {
            migrator,
            device: &mut **device,
            cache,
            cached: None,
            scorers,
            scored_ahead: self.begun.ahead,
            fired,
            fired_before,
            fired_words: &host.fired,
            on_device: &self.wanted,
            sequences: &self.sequences,
            times: self.times[l],
            sparsity,
            predicted,
            positions,
            residual: x,
            probe,
            layer: l,
            wanted,
            neurons_inside: model.config.neurons_inside(),
        });
        let count = positions.len() * model.config.hidden;
        let partial: &mut [f32] = bytemuck::cast_slice_mut(&mut host.partial[..count]);
        let host = HostShare {
            model,
            kernels,
            columns,
            normed,
            tiles,
            ffn,
            experts: of_experts,
            routes,
            on_host: &experts.on_host,
            selection: host_selection,
            partial,
            cached: cached.as_deref_mut(),
        };
        (pool, scheduling, host)
    }
}

impl Scheduling<'_, '_, '_> {
    /// Begins the moves that the scheduler has decided meanwhile, and gives it the layer.
    pub fn run(&mut self) {
        let Scheduling { migrator, device, cache, cached, sparsity, predicted, positions, probe, .. } = self;
        let (l, wanted) = (self.layer, self.wanted);
        probe.lap(Stage::Ffn);
        device.note(Note::Host(Stage::Ffn));
        if l > 0 {
            device_fired(self.fired, self.fired_before, cache, self.fired_words, self.on_device);
        }
        let threshold = sparsity.threshold(l).filter(|_| wanted != Wanted::Experts);
        let threshold = threshold.filter(|_| self.scorers.are_on_host(&**migrator, sparsity, l));
        let own = threshold.map(|threshold| (threshold, predicted.scores(l)));
        let later = self.scorers.scored_for(&**migrator, sparsity, l, self.scored_ahead, cache.layers.len());
        let observer = probe.observer.as_ref().filter(|_| wanted != Wanted::Experts || self.neurons_inside);
        let at = DividedLayer {
            layer: l,
            first: positions[0].position,
            n: positions.len(),
            batch: positions.windows(2).any(|two| two[0].sequence != two[1].sequence),
            residual: self.residual,
            selection: (wanted != Wanted::All).then(|| &predicted.selections[l]),
            own,
            ahead: later.map(|later| predicted.scores(later)),
            sequences: self.sequences,
            fired: self.fired,
            missed: observer.and_then(|observer| observer.missed()),
            times: self.times,
        };
        let frames = cached.as_mut().map(|cached| &mut cached.cache as &mut dyn Frames);
        migrator.apply(l, false, &mut **device, cache, frames, sparsity);
        migrator.observe(&at, &**device, cache);
        probe.lap(Stage::Scheduler);
        device.note(Note::Host(Stage::Scheduler));
    }
}
