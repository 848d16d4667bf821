//! Opens an engine, step by step: the model's form, what is computed, memory and device.

use super::device::DeviceSession;
use super::kernels;
use super::listener::{Listener, Quiet};
use super::model::{ModelOptions, check_context, keep_fingerprint};
use super::options::{DeviceKind, EngineOptions, Need};
use super::planned::Exchange;
use super::ram::{self, OnDisk, fits};
use crate::cpu::{Isa, Kernels, Prefill};
use crate::engine::{Engine, LiveAudit, Session};
use crate::error::{Error, Result, human_bytes};
use crate::model::{KvType, Model};
use crate::pack::{Types, can_be_cut};
use crate::tokenizer::Tokenizer;
use std::borrow::Cow;

impl EngineOptions {
    /// Opens the model in the form that the other options need. A dense GGUF of which every neuron is computed is read in place; one that does
    /// not fit into memory, or of which a device computes a part, is packed in clusters, with its own types. A mixture of experts is always read
    /// in place. Everything else is packed, if that was not done yet. Nothing is packed before it is known that the device and the predictor
    /// that it would be packed for are there.
    ///
    /// # Errors
    /// As [`ModelOptions::open`]; [`Error::Usage`] for a device or a predictor that is not there.
    pub fn open_model(&self, told: &dyn Listener) -> Result<Model> {
        let options = self.on_this_machine(&Quiet)?;
        let model = self.open_form(&options, told)?;
        // Of what is read in place: experts that stay on disk are looked at when they are first read.
        match ram::limit(&model, &options, options.device.is_some()) {
            None if fits(&model) => model.check_numbers(false)?,
            None => {}
            Some(_) => model.check_numbers(true)?,
        }
        Ok(model)
    }

    /// The model in the form that `options`, which are these on this machine, need.
    fn open_form(&self, options: &EngineOptions, told: &dyn Listener) -> Result<Model> {
        let has_device = options.device.is_some();
        if !self.sparsity.may_be_dense() {
            let model = ModelOptions { for_device: has_device, ..self.model.clone() };
            return model.open_after(&|outline| self.sparsity.check_found(outline, has_device), told);
        }
        let Some(source) = self.model.in_place()? else {
            return ModelOptions { for_device: has_device, ..self.model.clone() }.open(told);
        };
        if has_device && !source.config.is_mixture() {
            return self.model.open_for_device(told);
        }
        let clusters = can_be_cut(&source);
        let mut model = Model::in_place(source)?;
        if clusters && ram::too_large(&model, options) {
            told.note(
                "not all of this model fits into memory: its FFNs are packed in clusters, so that a part of them can stay on disk",
            );
            return ModelOptions { quant: Some(Types::Clusters), ..self.model.clone() }.open(told);
        }
        keep_fingerprint(&mut model);
        Ok(model)
    }

    /// These options on this machine: without a device where `auto` finds none, so that everything is as if none had been asked for.
    fn on_this_machine(&self, told: &dyn Listener) -> Result<Cow<'_, EngineOptions>> {
        Ok(match &self.device {
            Some(device) if !device.is_there(told)? => Cow::Owned(EngineOptions { device: None, ..self.clone() }),
            _ => Cow::Borrowed(self),
        })
    }

    pub(super) fn need(&self, model: &Model) -> Need {
        let (context, kv, sequences) = (self.context_of(model), self.kv, self.sequences);
        Need { context, kv, sequences, prompt_bytes: self.prompt_bytes, ram: self.ram, resident: true, host: None }
    }
}

/// An opened engine, and what it was opened with.
pub struct Opened {
    /// The engine, ready to run.
    pub engine: Engine,
    /// Tokens of a prompt and its answer together.
    pub context: usize,
    /// How keys and values are stored.
    pub kv: KvType,
    /// The device in use; `None` where everything runs on the processor.
    pub device: Option<DeviceSession>,
}

impl Opened {
    /// The model's tokenizer.
    ///
    /// # Errors
    /// [`Error::BadFile`] where the model has no tokenizer of a known kind.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let model = &self.engine.model;
        Tokenizer::new(model.tokenizer()?, model.path())
    }

    /// A new sequence with room for [`Opened::context`] tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] where its keys and values do not fit.
    pub fn session(&self) -> Result<Session> {
        Session::new(&self.engine, self.context, self.kv)
    }
}

/// Opens an engine; `told` gets notes and the progress of packing.
///
/// # Errors
/// [`Error::Usage`] for options that this model or machine does not allow, [`Error::BadFile`] for damaged files, [`Error::Memory`] where
/// there is too little of it.
pub fn open(options: &EngineOptions, told: &dyn Listener) -> Result<Opened> {
    open_model(options.open_model(told)?, options, told)
}

/// As [`open`], with a model that was opened already.
///
/// # Errors
/// As [`open`].
pub fn open_model(model: Model, options: &EngineOptions, told: &dyn Listener) -> Result<Opened> {
    let options = &*options.on_this_machine(told)?;
    let limit = ram::limit(&model, options, options.device.is_some());
    let mut engine = processor(model, options.threads, options.isa)?;
    engine.kernels.prefill = options.prefill;
    // A device rounds floats to f16 at most: what the processor does beside it must differ as little as can be by where neurons lie.
    engine.kernels.rounds_floats = options.prefill == Prefill::Int8 && options.device.is_none();
    // It has inputs of eight bits, too.
    engine.kernels.seven_bits = engine.kernels.rounds_floats;
    if limit.is_none() {
        read_in(&mut engine);
    }
    options.sparsity.apply(&mut engine, options.device.is_some(), told)?;
    kernels::choose(&mut engine, options);
    if options.audit > 0 && !engine.sparsity().is_dense() {
        let activation_thresholds = engine.sparsity().activation_thresholds().to_vec();
        // An audit reads every neuron of the model, from disk if they lie there.
        let every = if limit.is_some() { options.audit.saturating_mul(16) } else { options.audit };
        engine.audit = Some(LiveAudit::new(every, engine.model.config.activation, activation_thresholds));
    }
    let need = Need { resident: limit.is_none(), ..options.need(&engine.model) };
    check_context(&engine.model, need.context, need.kv, told)?;
    check_sequences(&engine.model, need)?;
    let mut part = limit.map(|limit| OnDisk::open(&engine.model, limit)).transpose()?;
    let need = Need { host: ram::room(&engine, need, part.as_ref()), ..need };
    let device = match &options.device {
        Some(device) => device.apply(&mut engine, need, options, told)?,
        None => None,
    };
    if device.is_none() && options.device.is_some() {
        // None was found, and more may be left on disk.
        let limit = ram::limit(&engine.model, options, false);
        part = limit.map(|limit| OnDisk::open(&engine.model, limit)).transpose()?;
    }
    match part {
        Some(part) => ram::keep_a_part(&mut engine, need, part, options, told)?,
        None if device.is_none() => {
            check_ram(&engine.model, need)?;
            engine.set_chunk(ram::chunk_of_all(&engine.model, options));
        }
        None => {}
    }
    Ok(Opened { engine, context: need.context, kv: need.kv, device })
}

/// Checks whether an engine can be opened, as far as its files and the plan show, without taking the memory of a model that runs meanwhile.
///
/// # Errors
/// As [`open`].
pub fn check(options: &EngineOptions, told: &dyn Listener) -> Result<()> {
    let options = &*options.on_this_machine(&Quiet)?;
    let mut engine = processor(options.open_model(told)?, options.threads, options.isa)?;
    Tokenizer::new(engine.model.tokenizer()?, engine.model.path())?;
    options.sparsity.apply(&mut engine, options.device.is_some(), told)?;
    let limit = ram::limit(&engine.model, options, options.device.is_some());
    let need = Need { resident: limit.is_none(), ..options.need(&engine.model) };
    check_context(&engine.model, need.context, need.kv, told)?;
    let part = limit.map(|limit| OnDisk::open(&engine.model, limit)).transpose()?;
    let need = Need { host: ram::room(&engine, need, part.as_ref()), ..need };
    let exchange = match &options.device {
        Some(device) => device.try_plan(&engine, need, &options.sparsity, told)?,
        None => Exchange::NONE,
    };
    // None may be found.
    let is_sure = options.device.as_ref().is_some_and(|device| device.kind != DeviceKind::Auto);
    let exchange = if is_sure { exchange } else { Exchange::NONE };
    match part {
        Some(part) => ram::check(&engine, need, &part, exchange),
        None if options.device.is_none() => check_ram(&engine.model, need),
        None => Ok(()),
    }
}

/// An engine that computes every neuron on the processor. None of its weights is read yet.
///
/// # Errors
/// [`Error::Usage`] for a number of threads outside 1 to 1024, and for an instruction set that the processor does not have.
pub fn processor(model: Model, threads: Option<usize>, isa: Option<Isa>) -> Result<Engine> {
    let threads = threads.unwrap_or_else(crate::config::default_threads);
    if threads == 0 || threads > 1024 {
        return Err(Error::Usage(format!("--threads {threads}: take 1 to 1024")));
    }
    let kernels = match isa {
        None => Kernels::best(),
        Some(isa) => {
            Kernels::of(isa).ok_or_else(|| Error::Usage(format!("--isa {}: this CPU does not have it", isa.name())))?
        }
    };
    Ok(Engine::new(model, threads, kernels))
}

/// Reads the weights into memory if they fit: a model larger than memory would displace its own beginning. Of a mixture that does not
/// fit, experts are asked for as soon as they are chosen.
pub fn read_in(engine: &mut Engine) {
    match fits(&engine.model) {
        true => engine.model.load(),
        false => engine.ask_for_experts(),
    }
}

/// Checks that there is memory for the keys and values of all sequences together, and of texts that have none.
fn check_sequences(model: &Model, need: Need) -> Result<()> {
    let bytes = ram::keys(model, need);
    if crate::config::available_memory().is_none_or(|free| free >= bytes) {
        return Ok(());
    }
    Err(Error::Memory(format!(
        "{} answers at once of {} tokens need {} of memory, and that much is not free; take a smaller --parallel, --ctx-size or \
         serve.prompt_cache_bytes",
        need.sequences,
        need.context,
        human_bytes(bytes)
    )))
}

/// Checks that weights, keys and values of all sequences fit into the memory that the user allows, without a device: a plan checks it by
/// itself.
fn check_ram(model: &Model, need: Need) -> Result<()> {
    let bytes = ram::all_bytes(model, need);
    match need.ram.filter(|&ram| ram < bytes) {
        None => Ok(()),
        Some(ram) => Err(Error::Memory(format!(
            "--ram {} is below the {} that weights, keys and values take; give more, take a smaller --ctx-size, or pack the model in a \
             smaller type (--quant q4_0)",
            human_bytes(ram),
            human_bytes(bytes)
        ))),
    }
}
