//! Options of `serve` and `chat` for opening a model; the settings give the others.

use super::device_arg::DeviceArgs;
use super::model_arg::{KvArg, PrefillArg, parse_activation};
use super::settings_arg::chosen;
use super::size;
use super::sparsity_arg::SparsityArgs;
use crate::error::{Error, Result};
use crate::model::NamedActivation;
use crate::open::{DeviceOptions, EngineOptions, ModelOptions, Placement, RamOptions};
use crate::pack::Types;
use crate::settings::Settings;
use clap::{Args, ValueEnum};

/// Texts that lost their slot take at most one of so many parts of the memory that there is.
const PROMPTS: u64 = 8;

#[derive(Args, Clone, Default, PartialEq)]
pub struct LoaderArgs {
    /// Tokens of a prompt and its answer together [default: the model's, less where memory is short]
    ///
    /// Without it the keys and values of all answers at once take at most a quarter of the memory that is free beside the model; with a
    /// GPU the default is 4096 at most.
    #[arg(short, long = "ctx-size", value_name = "N")]
    pub context: Option<u64>,
    /// Type of the weights if a model must be packed: f16, q8_0, q4_k_m ... [default: the model's own]
    ///
    /// f32, f16, q8_0, q4_0, q4_k, q6_k, GGUF's other types, or a mix such as q4_k_m.
    #[arg(long, value_name = "TYPE")]
    pub quant: Option<Types>,
    /// Activation function of a model that names none or a wrong one: relu, fatrelu(0.01), drelu, silu and others
    #[arg(long, value_name = "NAME", value_parser = parse_activation)]
    pub activation: Option<NamedActivation>,
    /// Threads to compute with [default: one per core]
    ///
    /// With a GPU, one less if the processor has no hyperthread for the scheduler.
    #[arg(short, long, value_name = "N")]
    pub threads: Option<u64>,
    /// Type of the key/value cache [default: f16]
    #[arg(long, value_name = "TYPE", value_enum, ignore_case = true)]
    pub kv: Option<KvArg>,
    /// Precision of prompts of more than 32 tokens on the processor [default: int8]
    #[arg(long, value_name = "PRECISION", value_enum, ignore_case = true)]
    pub prefill: Option<PrefillArg>,
    /// Host memory limit, such as 32GiB; neurons that exceed it are read from disk
    ///
    /// It covers weights, keys and values. In a mixture of experts whole experts stay on disk until they are needed.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub ram: Option<u64>,
    #[command(flatten)]
    pub sparsity: SparsityArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

impl LoaderArgs {
    /// The options for another model: without those that refer to one model's files. Also returns the flags that are left out.
    pub fn for_another_model(&self) -> (LoaderArgs, Vec<&'static str>) {
        let (sparsity, mut left) = self.sparsity.for_another_model();
        let mut args = LoaderArgs { sparsity, activation: None, ..self.clone() };
        left.extend(self.activation.is_some().then_some("--activation"));
        left.extend(args.device.lookahead.take().map(|_| "--lookahead"));
        if matches!(args.device.placement(), Placement::File(_)) {
            args.device.placement = DeviceArgs::default().placement;
            left.push("--placement");
        }
        (args, left)
    }

    /// The options that are also settings, so that a reload keeps them: key, flag and value.
    pub fn flags(&self) -> Vec<(&'static str, &'static str, String)> {
        let number = |n: Option<u64>| n.map(|n| n.to_string());
        let kv = self.kv.and_then(|kv| Some(kv.to_possible_value()?.get_name().to_owned()));
        let prefill = self.prefill.map(|prefill| prefill.prefill().name().to_owned());
        let values = [
            ("serve.context", "--ctx-size", number(self.context)),
            ("serve.deterministic", "--deterministic", self.device.deterministic.then(|| "true".into())),
            ("engine.threads", "--threads", number(self.threads)),
            ("engine.kv", "--kv", kv),
            ("engine.prefill", "--prefill", prefill),
        ];
        values.into_iter().filter_map(|(key, flag, value)| Some((key, flag, value?))).collect()
    }

    /// How to open `model`, traced or not.
    ///
    /// # Errors
    /// [`Error::Usage`] for an invalid setting, and for an option about a device without a device.
    pub fn options(&self, model: &str, settings: &Settings, traced: bool) -> Result<EngineOptions> {
        let kv = KvArg::from_str(settings.text("engine.kv").unwrap_or("f16"), true).map_err(|_| {
            Error::Usage(format!("engine.kv ({}) must be f16, f32, q8_0 or q4_0", settings.origin("engine.kv")))
        })?;
        let prefill = PrefillArg::from_str(settings.text("engine.prefill").unwrap_or("int8"), true).map_err(|_| {
            let origin = settings.origin("engine.prefill");
            Error::Usage(format!("engine.prefill ({origin}) must be exact, int8 or int8-per-tensor"))
        })?;
        // Zero stands for a setting that is not set.
        let set = |key: &str| Some(settings.whole(key) as usize).filter(|&n| n > 0);
        let deterministic = self.device.deterministic || settings.switch("serve.deterministic");
        let device = self.device.or_settings(settings)?.options()?;
        let ram = chosen(settings, "engine.ram", self.ram, size::parse)?;
        // A model that fits is not refused for the texts that lost their slot.
        let memory = ram.or_else(crate::config::available_memory).map_or(u64::MAX, |bytes| bytes / PROMPTS);
        let prompt_bytes = settings.whole("serve.prompt_cache_bytes").min(memory);
        Ok(EngineOptions {
            model: ModelOptions {
                quant: chosen(settings, "engine.quant", self.quant, str::parse)?,
                activation: chosen(settings, "engine.activation", self.activation, parse_activation)?,
                ..ModelOptions::new(model)
            },
            threads: set("engine.threads"),
            isa: None,
            prefill: prefill.prefill(),
            kv: kv.kv(),
            context: set("serve.context"),
            sequences: settings.whole("serve.parallel") as usize,
            prompt_bytes: if deterministic { 0 } else { prompt_bytes },
            ram,
            neurons: RamOptions::default(),
            sparsity: self.sparsity.options_or_setting(settings)?,
            audit: settings.whole("engine.audit"),
            traced,
            device: device.map(|device| DeviceOptions { live: true, deterministic, ..device }),
        })
    }
}
