//! MODEL and how it is computed, as typed.

use super::progress::{Progress, Unit, stoppable};
use crate::cpu::{Isa, Prefill};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::{KvType, Model, NamedActivation};
use crate::open::{self, EngineOptions, Listener, ModelOptions, PackProgress, Packing, RamOptions};
use crate::pack::Types;
use crate::scheduler::Policy;
use clap::Args;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Bytes from which on a packed model is announced, and on a terminal asked for.
const ASKED_FROM: u64 = 256 << 20;
/// Bytes that two cores pack in a second, for the announcement.
const PACKED_A_SECOND: u64 = 150 << 20;

/// Why a store of clusters has no use for what is about neurons.
const CLUSTERS: &str =
    "this store holds clusters, all of which are computed; pack the model by neuron (without --quant clusters)";

/// What every verb that runs a model takes.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// A Hugging Face directory, a .gguf, a packed .neurons file, a name that `ls` lists, or `demo`
    pub model: PathBuf,
    /// Type of the weights when the model has to be packed first: f32, f16, q8_0, q4_0, q4_k, q6_k and GGUF's other types, or a mix such as q4_k_m [default: the model's own]
    #[arg(long)]
    pub quant: Option<Types>,
    /// Activation function of a model that does not say it, or says it wrong: relu, fatrelu(0.01), relu2, drelu (TurboSparse,
    /// Bamboo: relu of gate and up), silu, gelu
    #[arg(long, value_parser = parse_activation)]
    pub activation: Option<NamedActivation>,
}

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Threads to compute with [default: one per core, one less beside a card whose scheduler has no hyperthread]
    #[arg(short, long)]
    pub threads: Option<usize>,
    /// How keys and values are stored [default: f16]
    #[arg(long, value_enum, ignore_case = true)]
    pub kv: Option<KvArg>,
    /// How exact prompts of more than 32 tokens are computed [default: int8]
    #[arg(long, value_enum, ignore_case = true)]
    pub prefill: Option<PrefillArg>,
    /// Host memory that weights, keys and values may take: 32GiB, 32G or bytes; of a model that needs more, neurons or experts stay on disk until they are needed
    #[arg(long, value_name = "SIZE", value_parser = super::size::parse, allow_hyphen_values = true)]
    pub ram: Option<u64>,
    /// Which neurons stay in memory where not all fit: two-queues, lru, lfu, sieve, static, full and the other policies [default: full; for experts two-queues]
    #[arg(long, hide = true, value_name = "POLICY")]
    pub ram_policy: Option<Policy>,
    /// Parts of the cache in memory to do without, for comparisons: keep, together, overlap, prefetch
    #[arg(long, hide = true, value_delimiter = ',', value_enum)]
    pub ram_without: Vec<RamPart>,
    /// For how many layers ahead neurons are asked for from disk [default: 1 where the predictor was made for that]
    #[arg(long, hide = true, value_name = "LAYERS", value_parser = clap::value_parser!(u8).range(1..=RamOptions::MAX_AHEAD as i64))]
    pub ram_lookahead: Option<u8>,
    /// Instruction set: avx512, avxvnni, avx2 or portable [default: the best there is]
    #[arg(long, hide = true, value_parser = parse_isa)]
    pub isa: Option<Isa>,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub enum KvArg {
    F16,
    F32,
}

/// What the cache of neurons in memory can do without.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub enum RamPart {
    /// Nothing stays in memory
    Keep,
    /// No two neurons are read at once
    Together,
    /// Nothing is computed while something is read
    Overlap,
    /// Nothing is asked for before its layer's turn
    Prefetch,
}

/// How neurons or experts are kept in memory, but for parts to do without.
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
        }
    }
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub enum PrefillArg {
    /// In f32
    Exact,
    /// Inputs of quantised weights in int8, each 32 numbers with a step of their own; without a device weights of eight bits meet inputs of seven with AVX2 alone, and F16 and BF16 are multiplied in 16 bits, which loses nothing that can be seen
    Int8,
    /// The same with one step for a whole input: less exact and no faster here; to compare with
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

    /// Options with what was typed for the model and here, and defaults for everything else.
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
    /// [`Error::Usage`] for a limit on memory, which nothing keeps where every neuron is looked at.
    pub fn engine(&self, model: Model) -> Result<Engine> {
        if self.ram.is_some() {
            let why = "--ram: here every neuron is looked at, in the mapped file, and nothing is kept below a limit; leave it out";
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

    /// Opens the model, packing it first if that was not done yet and `check` has nothing against its outline.
    pub fn open(&self, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        self.options().open_after(check, &Terminal)
    }

    /// Opens the model for a verb that only looks at what it does: a dense GGUF whose activation has no zeros is read in place.
    pub fn open_to_observe(&self, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        let options = self.options();
        match options.in_place()?.filter(|source| source.config.form.experts.is_none()) {
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
        let why = match model.config.form.experts {
            Some(experts) if !experts.routed() => CLUSTERS,
            _ => {
                "this is a mixture of experts, whose routers need none; for the neurons inside its experts: train-predictor"
            }
        };
        Err(Error::Usage(format!("{verb}: {why}")))
    }

    /// As [`ModelArgs::open`], for `verb`, which is about what neurons do, in dense models and inside experts.
    pub fn open_active(&self, verb: &str, check: &dyn Fn(&Model) -> Result<()>) -> Result<Model> {
        let model = self.open(check)?;
        let activation = model.config.activation;
        match model.config.form.experts {
            Some(experts) if experts.routed() && activation.is_sparse() => Ok(model),
            Some(experts) if experts.routed() => {
                let why = format!("this is a mixture of experts with {activation}, inside which no neuron is ever off");
                Err(Error::Usage(format!("{verb}: {why}")))
            }
            _ if model.has_neurons() => Ok(model),
            _ => Err(Error::Usage(format!("{verb}: {CLUSTERS}"))),
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

/// That the model has these many positions and the machine the memory for them.
pub fn check_context(model: &Model, context: usize, kv: KvType) -> Result<()> {
    open::check_context(model, context, kv, &Terminal)
}

/// Shows on stderr what opening an engine says.
pub struct Terminal;

impl Listener for Terminal {
    fn note(&self, text: &str) {
        eprintln!("{text}");
    }

    /// Says what is written, how long it takes and where; asks on a terminal.
    fn may_pack(&self, packing: &Packing<'_>) -> Result<()> {
        let Packing { what, store, bytes } = packing;
        if *bytes < ASKED_FROM {
            return Ok(());
        }
        let seconds = bytes.div_ceil(PACKED_A_SECOND);
        let (size, place) = (super::human_bytes(*bytes), store.display());
        super::say(format_args!("{what}: {size} into {place}, about {seconds} s; it is done once"));
        if !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
            return Ok(());
        }
        eprint!("Go on? [Y/n] ");
        let mut answer = String::new();
        let read = std::io::stdin().read_line(&mut answer);
        if read.is_ok_and(|bytes| bytes > 0) && !answer.trim().to_lowercase().starts_with('n') {
            return Ok(());
        }
        Err(Error::Usage("nothing was packed; `dynamicinfer pack MODEL -o FILE` packs it elsewhere".into()))
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
        .ok_or_else(|| "take avx512, avxvnni, avx2 or portable".into())
}
