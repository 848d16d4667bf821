//! What the daemon needs of the code that opens models.

use crate::engine::Engine;
use crate::engine::sampler::SamplingParams;
use crate::error::Result;
use crate::model::{KvType, ModelConfig};
use crate::settings::Settings;
use crate::tokenizer::Tokenizer;

/// A model as a loader opened it.
pub struct Opened {
    /// The engine, with the model in it.
    pub engine: Engine,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// Its name in requests.
    pub name: String,
    /// As in [`Offered`].
    pub origin: String,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Positions of each sequence.
    pub context: usize,
    /// Bytes for texts that lost their slot.
    pub prompt_bytes: u64,
    /// How tokens are drawn for requests that do not say it.
    pub sampling: SamplingParams,
    /// The system message of conversations that have none.
    pub system: Option<String>,
    /// Changes the device's memory budget; `None` without a device.
    pub set_budget: Option<SetBudget>,
    /// Changes the host memory limit of the model; `None` if the whole model is in memory.
    pub set_ram: Option<SetBudget>,
    /// The rates in the machine's profile; `None` if it was never measured.
    pub limits: Option<PathLimits>,
    /// To be done before the engine is dropped; `None` for nothing.
    pub at_end: Option<AtEnd>,
}

/// How fast neurons can be read on each path, as the machine's profile has it, GB/s.
#[derive(Clone, Copy, Debug)]
pub struct PathLimits {
    /// Host memory, read by the CPU.
    pub cpu_gb_s: f64,
    /// Device memory, read by the device.
    pub device_gb_s: f64,
    /// The link, from host to device memory.
    pub link_gb_s: f64,
}

/// Saves what an engine has learnt.
pub type AtEnd = Box<dyn FnOnce(&mut Engine) + Send>;

/// Gives a running engine another budget of one of its memories, in bytes.
pub type SetBudget = Box<dyn Fn(&mut Engine, u64) -> Result<()> + Send + Sync>;

/// A model that requests may name.
#[derive(Clone, Debug, PartialEq)]
pub struct Offered {
    /// Its name in requests.
    pub name: String,
    /// What is the same for all names of one model, and differs between two: its path, or a preset's name.
    pub origin: String,
    /// What [`Load::open`] takes for it.
    pub source: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// When its files were changed last, or when it was loaded, in seconds since 1970.
    pub modified: u64,
}

/// Opens the model that a user named; called on a thread that may wait.
pub trait Load: Send + Sync {
    /// The models that requests may name, sorted by name.
    fn offered(&self, settings: &Settings) -> Vec<Offered>;

    /// The one of them that `name` means; a name may be shorter than the listed one.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::error::Error::Usage) where it fits several.
    fn named(&self, name: &str, settings: &Settings) -> Result<Option<Offered>>;

    /// The shape of `model` and its chat template, as its files say; its weights are not read.
    ///
    /// # Errors
    /// As [`Load::open`].
    fn outline(&self, model: &str, settings: &Settings) -> Result<(ModelConfig, String)>;

    /// Checks whether `model` can be opened, as far as its files and the plan of its placement tell, and packs it if it must and `may_pack`.
    /// Called while another model answers, whose memory it must leave alone.
    ///
    /// # Errors
    /// As [`Load::open`]; [`Error::Usage`](crate::error::Error::Usage) for a model that must be packed and may not.
    fn check(&self, model: &str, settings: &Settings, may_pack: bool) -> Result<()>;

    /// Opens `model`: a name or path.
    ///
    /// # Errors
    /// What is wrong with its files or the settings, or that memory is too small.
    fn open(&self, model: &str, settings: &Settings) -> Result<Opened>;
}
