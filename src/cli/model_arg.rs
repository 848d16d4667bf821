//! MODEL, and the options of how it is computed.

use super::progress::{Progress, Unit, stoppable};
use crate::cpu::{Isa, Prefill};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::layer::FfnParts;
use crate::model::{KvType, Model, NamedActivation};
use crate::open::{self, EngineOptions, Listener, ModelOptions, PackProgress, Packing, RamOptions};
use crate::pack::Types;
use crate::scheduler::Policy;
use clap::Args;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Bytes from which on packing is announced, and confirmed on a terminal.
const ASKED_FROM: u64 = 256 << 20;
/// Bytes that two cores pack in a second, for the announcement.
const PACKED_A_SECOND: u64 = 150 << 20;

/// Why a store of clusters has no use for options about neurons.
const CLUSTERS: &str =
    "this store holds clusters, which are computed whole; pack the model by neuron (without --quant clusters)";

/// Why a model that no store holds has none, either.
const WHOLE: &str = "this model has embeddings for each layer and is read in place, where no neuron stands by itself";

/// The arguments of every verb that runs a model.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// Hugging Face directory, .gguf, .neurons file, name from `ls`, or `demo`
    pub model: PathBuf,
    /// Type of the weights if the model must be packed: f16, q8_0, q4_k_m ... [default: the model's own]
    ///
    /// f32, f16, q8_0, q4_0, q4_k, q6_k, GGUF's other types, or a mix such as q4_k_m.
    #[arg(long, value_name = "TYPE")]
    pub quant: Option<Types>,
    /// Activation function of a model that names none or a wrong one: relu, fatrelu(0.01), relu2, drelu (TurboSparse, Bamboo: relu of gate
    /// and up), silu, gelu
    #[arg(long, value_name = "NAME", value_parser = parse_activation)]
    pub activation: Option<NamedActivation>,
}

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Threads to compute with [default: one per core]
    ///
    /// With a GPU, one less if the processor has no hyperthread for the scheduler.
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Type of the key/value cache [default: f16]
    #[arg(long, value_name = "TYPE", value_enum, ignore_case = true)]
    pub kv: Option<KvArg>,
    /// Precision of prompts of more than 32 tokens on the processor [default: int8]
    #[arg(long, value_name = "PRECISION", value_enum, ignore_case = true)]
    pub prefill: Option<PrefillArg>,
    /// Host memory limit, such as 32GiB; neurons that exceed it are read from disk
    ///
    /// It covers weights, keys and values. In a mixture of experts whole experts stay on disk until they are needed.
    #[arg(long, value_name = "SIZE", value_parser = super::size::parse, allow_hyphen_values = true)]
    pub ram: Option<u64>,
    /// Policy that selects the neurons to keep in memory if not all fit: two-queues, lru, lfu, sieve, static, full and others [default: full;
    /// for experts two-queues]
    #[arg(long, hide = true, value_name = "POLICY")]
    pub ram_policy: Option<Policy>,
    /// Parts of the memory cache to switch off, for comparisons: keep, together, overlap, prefetch
    #[arg(long, hide = true, value_delimiter = ',', value_enum)]
    pub ram_without: Vec<RamPart>,
    /// Layers ahead for which neurons are prefetched from disk [default: 1 if the predictor was made for that]
    #[arg(long, hide = true, value_name = "LAYERS", value_parser = clap::value_parser!(u8).range(1..=RamOptions::MAX_AHEAD as i64))]
    pub ram_lookahead: Option<u8>,
    /// Instruction set: avx512, avxvnni, avx2 or portable [default: the best of this processor]
    #[arg(long, hide = true, value_parser = parse_isa)]
    pub isa: Option<Isa>,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub enum KvArg {
    /// 2 bytes a number
    F16,
    /// 4 bytes
    F32,
    /// 1.06 bytes: about as exact as f16, and half of its memory
    #[value(name = "q8_0")]
    Q8_0,
    /// 0.56 bytes: less exact
    #[value(name = "q4_0")]
    Q4_0,
}

/// The parts of the neuron cache in memory that can be switched off.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub enum RamPart {
    /// Keeping neurons in memory
    Keep,
    /// Reading neighbouring neurons at once
    Together,
    /// Computing while reading
    Overlap,
    /// Reading before the layer's turn
    Prefetch,
}

/// How neurons or experts are kept in memory, without the parts switched off.
pub fn ram_options(policy: Option<Policy>, without: &[RamPart], lookahead: Option<usize>) -> RamOptions {
    let with = |part: RamPart| !without.contains(&part);
    RamOptions {
        policy,
        together: with(RamPart::Together),
        overlap: with(RamPart::Overlap),
        keep: with(RamPart::Keep),
        prefetch: with(RamPart::Prefetch),
        lookahead,
        share: None,
    }
}

impl KvArg {
    pub fn kv(self) -> KvType {
        match self {
            KvArg::F16 => KvType::F16,
            KvArg::F32 => KvType::F32,
            KvArg::Q8_0 => KvType::Q8_0,
            KvArg::Q4_0 => KvType::Q4_0,
        }
    }
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub enum PrefillArg {
    /// f32
    Exact,
    /// Inputs of quantised weights in int8, with a scale per 32 numbers. With AVX2 only, inputs of 8-bit weights have 7 bits; F16 and BF16
    /// weights are multiplied in 16 bits, without a visible loss
    Int8,
    /// int8 with one scale per input: less exact and no faster; for comparisons
    Int8PerTensor,
}

impl PrefillArg {
    pub fn prefill(self) -> Prefill {
        match self {
            PrefillArg::Exact => Prefill::Exact,
            PrefillArg::Int8 => Prefill::Int8,
            PrefillArg::Int8PerTensor => Prefill::Int8PerTensor,
        }
    }
}

impl EngineArgs {
    pub fn kv(&self) -> KvType {
        self.kv.unwrap_or(KvArg::F16).kv()
    }

    /// Options for this model with these arguments, and defaults for everything else.
    pub fn options(&self, model: &ModelArgs) -> EngineOptions {
        EngineOptions {
            model: model.options(),
            threads: self.threads,
            isa: self.isa,
            prefill: self.prefill.map(PrefillArg::prefill).unwrap_or_default(),
            kv: self.kv(),
            ram: self.ram,
            neurons: ram_options(self.ram_policy, &self.ram_without, self.ram_lookahead.map(usize::from)),
            ..EngineOptions::new(&model.model)
        }
    }

    /// An engine that computes every neuron on the processor, with its weights brought into memory where they fit.
    ///
    /// # Errors
    /// [`Error::Usage`] for a limit on memory, which such an engine cannot keep.
    pub fn engine(&self, model: Model) -> Result<Engine> {
        if self.ram.is_some() {
            let why = "--ram has no effect here: this verb reads every neuron from the mapped file; leave it out";
            return Err(Error::Usage(why.into()));
        }
        let mut engine = open::processor(model, self.threads, self.isa)?;
        open::read_in(&mut engine);
        Ok(engine)
    }
}

impl ModelArgs {
    pub fn options(&self) -> ModelOptions {
        ModelOptions { quant: self.quant, activation: self.activation, ..ModelOptions::new(&self.model) }
    }

    /// Opens the model, packing it first if necessary and if `check` accepts its outline.
    pub fn open(&self, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        self.options().open_after(check, &Terminal)
    }

    /// Opens the model for a verb that only observes it: a dense GGUF whose activation has no zeros is read in place.
    pub fn open_to_observe(&self, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        let options = self.options();
        match options.in_place()?.filter(|source| !source.config.is_mixture()) {
            None => self.open(check),
            Some(source) => {
                let mut model = Model::in_place(source)?;
                open::model::keep_fingerprint(&mut model);
                check(&model)?;
                model.check_numbers(false)?;
                Ok(model)
            }
        }
    }

    /// As [`ModelArgs::open`], for `verb`, which is about single neurons: a mixture of experts is refused.
    pub fn open_neurons(&self, verb: &str, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        let model = self.open(check)?;
        if model.has_neurons() {
            return Ok(model);
        }
        let why = match model.config.parts() {
            FfnParts::Clusters => CLUSTERS,
            FfnParts::Neurons => WHOLE,
            FfnParts::Experts => {
                "this model is a mixture of experts, whose routers need none; for the neurons inside its experts use train-predictor"
            }
        };
        Err(Error::Usage(format!("{verb}: {why}")))
    }

    /// As [`ModelArgs::open`], for `verb`, which is about active neurons, in dense models and inside experts.
    pub fn open_active(&self, verb: &str, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        let model = self.open(check)?;
        let activation = model.config.activation;
        match model.config.parts() {
            FfnParts::Experts if activation.is_sparse() => Ok(model),
            FfnParts::Experts => {
                let why =
                    format!("this model is a mixture of experts with {activation}, whose neurons are never inactive");
                Err(Error::Usage(format!("{verb}: {why}")))
            }
            _ if model.has_neurons() => Ok(model),
            FfnParts::Neurons => Err(Error::Usage(format!("{verb}: {WHOLE}"))),
            FfnParts::Clusters => Err(Error::Usage(format!("{verb}: {CLUSTERS}"))),
        }
    }

    /// As [`ModelArgs::open`], by neuron and in types that a device can compute with.
    pub fn open_neurons_for_device(&self) -> Result<Model> {
        ModelOptions { for_device: true, ..self.options() }.open(&Terminal)
    }

    /// As [`ModelArgs::open`], in the form in which a device computes all of it.
    pub fn open_for_device(&self) -> Result<Model> {
        self.options().open_for_device(&Terminal)
    }
}

/// Checks that the model has these positions and the machine the memory for them.
pub fn check_context(model: &Model, context: usize, kv: KvType) -> Result<()> {
    open::check_context(model, context, kv, &Terminal)
}

/// Shows notes and progress of opening an engine on stderr.
pub struct Terminal;

impl Listener for Terminal {
    fn note(&self, text: &str) {
        eprintln!("{text}");
    }

    /// Announces the file, its size and the time; asks on a terminal.
    fn may_pack(&self, packing: &Packing<'_>) -> Result<()> {
        let Packing { what, store, bytes } = packing;
        if *bytes < ASKED_FROM {
            return Ok(());
        }
        let seconds = bytes.div_ceil(PACKED_A_SECOND);
        let (size, place) = (super::human_bytes(*bytes), store.display());
        super::say(format_args!("{what}: {size} to {place}, about {seconds} s, once"));
        if !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
            return Ok(());
        }
        eprint!("Continue? [Y/n] ");
        let mut answer = String::new();
        let read = std::io::stdin().read_line(&mut answer);
        if read.is_ok_and(|bytes| bytes > 0) && !answer.trim().to_lowercase().starts_with('n') {
            return Ok(());
        }
        Err(Error::Usage("the model was not packed; to pack it elsewhere: dynamicinfer pack MODEL -o FILE".into()))
    }

    fn packing(&self, what: &str, work: &mut dyn FnMut(PackProgress<'_>) -> Result<()>) -> Result<()> {
        let progress = Progress::new(what, Unit::Bytes);
        stoppable(|| (), || work(&|done, total| progress.step(done, total)))?;
        progress.finish();
        Ok(())
    }
}

pub fn parse_activation(text: &str) -> Result<NamedActivation, String> {
    NamedActivation::by_name(text, None)
}

pub fn parse_isa(text: &str) -> Result<Isa, String> {
    let all = Isa::ALL;
    all.into_iter()
        .find(|i| i.name().eq_ignore_ascii_case(text))
        .ok_or_else(|| "it must be avx512, avxvnni, avx2 or portable".into())
}
