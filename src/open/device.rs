//! Opens the device that was asked for: plans what lies there, opens the device itself, places its first neurons, and starts the scheduler.

use super::activity::{Activity, Source};
use super::learning::{ENOUGH, learner};
use super::listener::{Listener, Quiet};
use super::options::{DeviceKind, DeviceOptions, EngineOptions, LookaheadOn, Need, Placement};
use super::place::{out_of_memory, place};
use super::planned::{Exchange, computed_share, nothing_fits, placed_by_file};
use super::sparsity::SparsityOptions;
use super::vram_budget::VramBudget;
use super::{cuda, machine, sparsity};
use crate::background::{Background, BackgroundOptions, Latency};
use crate::clock::Duration;
use crate::config;
use crate::cpu::{MAX_COLUMNS, Prefill};
use crate::device::{Device, Rates, Timeline, Traced, VirtualDevice};
use crate::engine::session::CHUNK;
use crate::engine::split::parts::PartsSetting;
use crate::engine::{Engine, Lookahead, Migrator, pinned_bytes, predictor_bytes};
use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use crate::ids::PublishedId;
use crate::model::Model;
use crate::placement::memory_plan::{Footprint, KvPlace, Plan, Request, plan};
use crate::placement::policy::{self, PlacementPolicy};
use crate::predictor::{Predictor, Router};
use crate::scheduler::thresholds::LossWeight;
use crate::scheduler::{Policy as Migration, Rules};
use std::sync::Arc;

/// What an observation takes the scheduler on a virtual clock, ns, beside reading the predictor's weights: copying it and choosing among
/// some thousand neurons.
const OBSERVATION_NS: f64 = 20e3;

/// A device that is in use.
pub struct DeviceSession {
    /// Changes its memory budget while it runs.
    pub budget: VramBudget,
}

impl DeviceSession {
    /// Stops the scheduler and saves what it has learnt. A failure to save is only a warning: the text is complete.
    pub fn finish(&self, engine: &mut Engine) {
        let migrator = engine.split.as_mut().and_then(|split| split.migrator.take());
        // Its own frequencies are those of the latest texts; what the next start begins with is written.
        let _ = migrator.and_then(Migrator::finish);
    }
}

/// A device that was found, before its budget is known. This is the only list of devices.
enum Found {
    Virtual,
    Cuda(Box<cuda::Card>),
}

/// What is told where `auto` finds no card.
pub(super) fn without_card(why: impl std::fmt::Display) -> String {
    format!("everything runs on the processor: {why}")
}

impl Found {
    fn of(kind: DeviceKind, told: &dyn Listener) -> Result<Option<Found>> {
        let card = |card| Found::Cuda(Box::new(card));
        match kind {
            DeviceKind::Virtual => Ok(Some(Found::Virtual)),
            DeviceKind::Cuda => cuda::Card::open().map(|found| Some(card(found))).map_err(cuda::error),
            DeviceKind::Auto => Ok(match cuda::Card::open() {
                Ok(found) => Some(card(found)),
                Err(why) => {
                    told.note(&without_card(why));
                    None
                }
            }),
        }
    }

    /// Default budget, bytes; `None` where one has to be given.
    fn most(&self, layers: usize) -> Option<u64> {
        match self {
            Found::Virtual => None,
            Found::Cuda(card) => Some(cuda::most(card, layers)),
        }
    }

    fn open(
        self,
        options: &DeviceOptions,
        rounds: bool,
        budget: u64,
        machine: &MachineProfile,
        told: &dyn Listener,
    ) -> Result<Box<dyn Device>> {
        Ok(match self {
            Found::Virtual => Box::new(virtual_device(budget, machine, options.fail_after)),
            Found::Cuda(card) => Box::new(cuda::device(*card, budget, (options.graphs, options.tiles, rounds), told)?),
        })
    }
}

/// How long the pool's threads wait for work before they sleep, beside a card: for as long as a card takes for most layers, so that they
/// are there when the processor's part of the next one comes.
const SPIN: Duration = Duration::from_millis(1);

/// What looks ahead for the scheduler, `None` if only frequencies do, and how many layers.
type LooksAhead = (Option<Lookahead>, usize);

/// What is planned to lie on a device.
struct Planned {
    plan: Plan,
    /// Neurons of each layer that are there at the beginning.
    neurons: Vec<Vec<PublishedId>>,
    /// What the plan was made by.
    activity: Activity,
    budget: VramBudget,
}

impl Planned {
    /// Whether all neurons are on the device from the beginning.
    fn holds_all(&self, model: &Model) -> bool {
        let mut layers = self.neurons.iter().enumerate();
        layers.all(|(layer, neurons)| neurons.len() == model.config.movable_of(layer))
    }
}

impl DeviceOptions {
    /// Opens the device and gives it to the engine; `None` where `Auto` found none. Comes after the predictors, whose bytes the plan
    /// counts.
    pub(super) fn apply(
        &self,
        engine: &mut Engine,
        need: Need,
        options: &EngineOptions,
        told: &dyn Listener,
    ) -> Result<Option<DeviceSession>> {
        let layers = engine.model.config.layers().len();
        self.check(&engine.model)?;
        let Some(found) = Found::of(self.kind, told)? else { return Ok(None) };
        if options.traced && self.graphs {
            told.note("--trace times every kernel by itself: --graphs on has no effect");
        }
        let vram = if self.has_budget() { self.vram } else { found.most(layers) };
        let lookahead = self.lookahead(engine, &options.sparsity, told)?;
        let planned = self.plan(engine, need, vram, self.on_device(&lookahead), told)?;
        let (plan, machine) = (&planned.plan, &planned.budget.machine);
        if let Some(note) = nothing_fits(plan, layers).filter(|_| !matches!(self.placement, Placement::Empty)) {
            told.note(&note);
        } else if let Some(note) = self.unprofiled(engine, &planned) {
            told.note(&note);
        }
        if matches!(found, Found::Cuda(_)) {
            if options.threads.is_none() && self.schedules(engine) {
                engine.use_threads(config::threads_beside_a_scheduler());
            }
            engine.spin(SPIN);
        }
        let rounds = options.prefill != Prefill::Exact && !self.deterministic;
        let device = found.open(self, rounds, plan.budget_bytes, machine, told)?;
        let device = match options.traced {
            true => Box::new(Traced::new(device, Timeline::new(layers, MAX_COLUMNS))),
            false => device,
        };
        place(engine, device, plan, machine, &planned.neurons, need.resident)?;
        let split = engine.split.as_mut().expect("placed");
        split.set_parts(PartsSetting { parts: self.parts, ..PartsSetting::default() });
        let split = engine.split.as_mut().expect("placed");
        split.cache.barrier = self.barrier;
        split.cache.set_moves(&mut *split.device, &machine.moves);
        self.schedule(engine, need, &planned, lookahead)?;
        Ok(Some(DeviceSession { budget: planned.budget }))
    }

    /// Checks whether [`DeviceOptions::apply`] would be refused, as far as that can be told without opening a device: another model may
    /// occupy a card, so its free memory says nothing. Returns what host and device will exchange, at least.
    pub(super) fn try_plan(
        &self,
        engine: &Engine,
        need: Need,
        options: &SparsityOptions,
        told: &dyn Listener,
    ) -> Result<Exchange> {
        self.check(&engine.model)?;
        let exchange =
            |chunk: usize, attends: bool| Exchange { bytes: pinned_bytes(&engine.model.config, chunk, attends), chunk };
        if !self.has_budget() {
            return Ok(exchange(self.chunk.unwrap_or(CHUNK), false));
        }
        let lookahead = self.lookahead(engine, options, &Quiet)?;
        let plan = self.plan(engine, need, self.vram, self.on_device(&lookahead), told)?.plan;
        Ok(exchange(plan.chunk, plan.sequences > 0))
    }

    /// Plans what lies where, with `vram` bytes on the device.
    fn plan(
        &self,
        engine: &Engine,
        need: Need,
        vram: Option<u64>,
        lookahead: Option<&Lookahead>,
        told: &dyn Listener,
    ) -> Result<Planned> {
        let model = &engine.model;
        let layers = model.config.layers().len();
        let by_gates = engine.sparsity().inside(0).is_none();
        let activity = Activity::find(model, by_gates, self.history && !self.is_fixed(), told);
        let counts = &activity.counts;
        let machine = match &self.machine {
            None if self.deterministic => machine::fixed(told),
            named => machine::find(named.as_deref(), told)?,
        };
        let mut request = Request {
            vram,
            // What is on disk takes no memory.
            ram: need.ram.filter(|_| need.resident),
            ffn_share: self.ffn_share,
            kv: match (need.kv.on_device(), self.deterministic) {
                // Attention of host and device differs in its last bits, so here it changes sides only where every neuron fits.
                (true, true) => KvPlace::Spare,
                (true, false) => KvPlace::Auto,
                (false, _) => KvPlace::Host,
            },
            sequences: need.sequences,
            predictor_bytes: predictor_bytes(engine.sparsity(), lookahead, &model.config),
            computed_share: computed_share(engine, counts, activity.tokens),
            ilp_seconds: None,
            // Sums over other numbers of tokens are rounded otherwise.
            chunk: self.chunk.or(self.deterministic.then_some(CHUNK)),
            host: need.host,
            // Of a store that lies on disk in part, copies come from frames alone.
            streamed_layers: (!need.resident).then_some(0),
            skips_host: self.places_whole_layers(engine, &activity),
        };
        let footprint = Footprint::of_model(model, need.context, need.kv);
        if let Some(share) = self.vram_share {
            let ends = plan(&footprint, counts, &machine, &Request { vram: None, ffn_share: None, ..request })?;
            let room = (ends.full_bytes - ends.without_neurons_bytes) as f64 * share;
            request.vram = Some(ends.without_neurons_bytes + room.ceil() as u64);
        }
        let mut plan = plan(&footprint, counts, &machine, &request)?;
        let slots = plan.slots();
        let neurons = match &self.placement {
            Placement::Static => policy::neurons(PlacementPolicy::Static, counts, &slots, 0),
            Placement::Random { seed } => policy::neurons(PlacementPolicy::Random, counts, &slots, *seed),
            Placement::Empty => vec![Vec::new(); layers],
            Placement::File(path) => placed_by_file(path, model, &mut plan, (&request, &footprint))?,
        };
        // Its working memory stays as it is when the budget changes.
        request.chunk = Some(plan.chunk);
        request.streamed_layers = Some(plan.streamed_layers);
        let budget = VramBudget { footprint, counts: counts.clone(), machine, request };
        Ok(Planned { plan, neurons, activity, budget })
    }

    /// Whether a scheduler is started.
    fn schedules(&self, engine: &Engine) -> bool {
        (self.policy != Migration::Static || self.live) && chooses(engine)
    }

    /// Whether whole layers are worth the host's fixed part. Where nothing is known of the neurons, they would be any layers; where neurons move,
    /// few slots in the others cost more than whole layers save; and where a scheduler or a learner observes, the host stays in every layer.
    fn places_whole_layers(&self, engine: &Engine, activity: &Activity) -> bool {
        let known = match activity.source {
            Source::Profile(_) => true,
            Source::Learnt { tokens, .. } => !self.learn || tokens >= ENOUGH,
            Source::Nothing => false,
        };
        self.policy == Migration::Static && known && !self.schedules(engine) && engine.skips_host()
    }

    /// Whether the same text is to come from every start: then nothing moves, and nothing is learnt.
    fn is_fixed(&self) -> bool {
        self.deterministic && self.live
    }

    /// Whether this run learns for the next start.
    fn learns(&self, engine: &Engine, planned: &Planned) -> bool {
        let wanted = self.learn && !self.is_fixed() && chooses(engine);
        wanted
            && match planned.activity.source {
                Source::Profile(_) => false,
                _ if self.schedules(engine) => true,
                // Nothing moves, and observing costs a little.
                Source::Learnt { tokens, .. } => tokens < ENOUGH && !planned.holds_all(&engine.model),
                Source::Nothing => !planned.holds_all(&engine.model),
            }
    }

    /// What to say where neurons are placed without knowing which are active.
    fn unprofiled(&self, engine: &Engine, planned: &Planned) -> Option<String> {
        let known = planned.activity.source != Source::Nothing || planned.holds_all(&engine.model);
        if known || !chooses(engine) || self.placement != Placement::Static {
            return None;
        }
        let noun = if engine.model.config.has_whole_experts() { "experts" } else { "neurons" };
        let learns = if self.learns(engine, planned) { "; this run learns for the next start" } else { "" };
        Some(format!(
            "note: this model has no activation profile, so it is not known which {noun} belong on the device; make one: dynamicinfer profile \
             MODEL --text FILE{learns}"
        ))
    }

    /// The part of a look-ahead that the device does for the scheduler.
    fn on_device<'a>(&self, (predictor, _): &'a LooksAhead) -> Option<&'a Lookahead> {
        predictor.as_ref().filter(|_| self.lookahead_on == LookaheadOn::Device)
    }

    /// The predictor that looks ahead, and how many layers: the one that the user has chosen for the layers themselves, or the model's
    /// best. Without one that was made to look ahead, neurons move by how often they are active.
    fn lookahead(&self, engine: &Engine, options: &SparsityOptions, told: &dyn Listener) -> Result<LooksAhead> {
        let layers = engine.model.config.layers().len();
        if !self.schedules(engine) {
            return Ok((None, 1));
        }
        // A look-ahead of two gives a copy a whole layer's time to arrive. It finds 0.68 to 0.73 of the next but one layer's active neurons where
        // one of one finds 0.76 to 0.79 of the next layer's (two published models, runs/2026-11-27-real-traces/recall.csv).
        let wanted = self.lookahead.map_or(vec![2, 1], |ahead| vec![ahead]);
        if engine.model.config.neurons_inside() {
            // Routers foresee experts, and nothing yet which of their neurons.
            return match self.lookahead {
                None => Ok((None, 1)),
                Some(ahead) => Err(Error::Usage(format!(
                    "--lookahead {ahead}: the neurons inside this mixture's experts move by how often they are active; leave it out"
                ))),
            };
        }
        let routers = Router::of(&engine.model).map(|routers| Arc::new(routers) as Arc<dyn Predictor>);
        let predictor = if routers.is_some() { routers } else { sparsity::ahead(engine, options)? };
        let Some(predictor) = predictor else {
            return Ok((None, wanted[0].min(layers - 1).max(1)));
        };
        let looks = |&ahead: &usize| (ahead..layers).all(|l| predictor.calibration(l, ahead).is_some());
        match (wanted.iter().copied().filter(|&ahead| ahead < layers).find(looks), self.lookahead) {
            (Some(ahead), _) => Ok((Some((predictor, ahead)), ahead)),
            (None, Some(ahead)) => Err(Error::Usage(format!(
                "the {} predictor has no tables from {ahead} layers before; take a --lookahead that it was made for, make one \
                 (train-predictor, calibrate), or take --policy static",
                predictor.kind().name(),
            ))),
            (None, None) => {
                told.note(&format!(
                    "note: the {} predictor was not made to look ahead, so neurons move by how often they are active only; make one \
                     that does with train-predictor or calibrate",
                    predictor.kind().name()
                ));
                Ok((None, 1))
            }
        }
    }

    /// Starts the scheduler, unless nothing can move.
    fn schedule(&self, engine: &mut Engine, need: Need, planned: &Planned, lookahead: LooksAhead) -> Result<()> {
        let Planned { neurons: placed, activity, budget, .. } = planned;
        let (policy, learns) = (self.policy, self.learns(engine, planned));
        if !self.schedules(engine) && !learns {
            return Ok(());
        }
        let model = engine.model.clone();
        let layers = model.config.layers().len();
        let on_device = self.on_device(&lookahead).cloned();
        let (predictor, ahead) = lookahead;
        let history = (0..layers).map(|l| model.layers[l].order.into_store(activity.frequencies(l)));
        let positions = |(l, neurons): (usize, &Vec<PublishedId>)| model.layers[l].order.positions(neurons);
        // Inside experts both sides have the same threshold.
        let balanced = !model.config.neurons_inside();
        let own = |l| Some((engine.sparsity().threshold(l)?, engine.sparsity().calibration(l)?.clone()));
        let clusters = model.config.has_whole_experts();
        let tune: fn(Rules) -> Rules = match (self.deterministic, self.live, clusters) {
            (false, _, false) => |rules| rules,
            (false, _, true) => Rules::for_clusters,
            (true, false, false) => |rules| Rules { thresholds: false, ..rules },
            (true, false, true) => |rules| Rules { thresholds: false, ..rules.for_clusters() },
            // Other clients' prompts would decide where neurons lie, and CPU and device add up in different orders.
            (true, true, _) => |rules| Rules { thresholds: false, moves: false, ..rules },
        };
        let pair = self.thetas;
        let setting = BackgroundOptions {
            policy,
            tune: Arc::new(move |rules| Rules { pair, ..tune(rules) }),
            weight: if self.printed_loss { LossWeight::Complement } else { LossWeight::Probability },
            ahead,
            sequences: need.sequences,
            predictor: predictor.map(|(predictor, _)| predictor),
            thresholds: (0..layers).map(|l| own(l).filter(|_| balanced)).collect(),
            history: history.collect(),
            placed: placed.iter().enumerate().map(positions).collect(),
            kernels: engine.kernels,
            threads: engine.threads(),
            link_gb_s: budget.machine.link_gb_s,
            latency: (self.kind == DeviceKind::Virtual && !self.wall_clock)
                .then_some(Latency { observation_ns: OBSERVATION_NS, gb_s: budget.machine.dram_gb_s }),
        };
        let block_bytes = budget.footprint.block_bytes as usize;
        let learner = learns.then(|| learner(&model, activity));
        let background = Background::start_learning(model, block_bytes, setting, learner)
            .map_err(|e| Error::Failed(format!("the scheduler's thread cannot be started: {e}")))?;
        let split = engine.split.as_mut().expect("placed");
        split.migrator = Some(Box::new(background));
        if on_device.is_none() {
            return Ok(());
        }
        split.lookahead = on_device;
        engine.upload_predictors().map_err(out_of_memory)
    }
}

/// Whether a token needs only some neurons or experts of a layer: of a dense model it needs all, so there is nothing to choose.
fn chooses(engine: &Engine) -> bool {
    let routed = engine.model.config.is_routed();
    routed || !engine.sparsity().is_dense()
}

fn virtual_device(budget: u64, machine: &MachineProfile, fail_after: Option<u64>) -> VirtualDevice {
    let rates = Rates {
        device_gb_s: machine.device_gb_s,
        device_gflops: machine.device_gflops,
        link_gb_s: machine.link_gb_s,
        host_gb_s: machine.dram_gb_s,
        host_gflops: machine.host_gflops,
        call_us: machine.call_us,
        copy_us: machine.copy_us,
        sync_us: machine.sync_us,
    };
    // Copies, and the wait for them, take their own time on the virtual clock.
    let share_us = machine.stage.map_or(0.0, |stage| stage.split_us - 2.0 * machine.copy_us - machine.sync_us);
    let device = VirtualDevice::new(budget, rates).with_host_share(share_us.max(0.0));
    if let Some(kernels) = fail_after { device.failing_at(kernels + 1) } else { device }
}
