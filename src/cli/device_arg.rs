//! `--device`, `--vram` and the other options of a device.

use super::lab_arg::{LabArgs, LabOptions, PROGRAM, thetas};
use super::settings_arg::{chosen, is_of_load};
use super::size;
use crate::device::Tiles;
use crate::error::{Error, Result};
use crate::open::{DeviceKind, DeviceOptions, LookaheadOn, Placement};
use crate::scheduler::Policy;
use crate::settings::Settings;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Clone, PartialEq)]
pub struct DeviceArgs {
    /// Device that computes besides the processor: cpu (none), cuda, auto or virtual [default: cpu]
    ///
    /// cuda is an NVIDIA GPU; auto is a GPU if a usable one exists; virtual is host memory with a budget and a clock, for tests and
    /// experiments: its results are real, its times are not.
    #[arg(long, value_name = "DEVICE", hide_possible_values = true, value_enum, ignore_case = true)]
    pub device: Option<DeviceArg>,
    /// Memory budget on the device, such as 8GiB [default for cuda: most of the free memory]
    ///
    /// It covers everything on the device, to the byte: 8GiB, 8GB, 8192MiB or bytes. `dynamicinfer plan` shows what it holds.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub vram: Option<u64>,
    /// Largest share of the neurons on the device, above 0 to 1; without --vram it sets the budget
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    pub ffn_share: Option<f64>,
    /// Neurons on the device at the start: static (the plan's), none, or a file from `plan -o`
    #[arg(long, value_name = "POLICY|FILE", default_value = "static")]
    pub placement: PathBuf,
    /// Machine that the virtual device imitates: a profile from `measure --save`, or a .toml file
    #[arg(long, value_name = "NAME")]
    pub machine: Option<PathBuf>,
    /// Migration policy during decoding: static, micro, macro, full, lru ... [default: full]
    ///
    /// It decides which neurons move to the device while a text is generated.
    #[arg(long, value_name = "POLICY", hide_possible_values = false, ignore_case = true, value_parser = super::policy_arg::names())]
    pub policy: Option<Policy>,
    /// Launch a layer's kernels and copies as CUDA graphs; on the one GPU measured, large models gain nothing
    #[arg(long, value_name = "SWITCH", value_enum, ignore_case = true, default_value_t = Switch::Off)]
    pub graphs: Switch,
    /// Use the GPU's tensor cores for prompts of more than 32 tokens
    ///
    /// auto: if they are faster on this GPU, for q8_0 and q4_0 (bit-identical) and for f16 (inputs are rounded to f16; not with --prefill
    /// exact or --deterministic). on: always.
    #[arg(long, value_name = "SWITCH", value_enum, ignore_case = true, default_value_t = TensorCores::Auto)]
    pub tensor_cores: TensorCores,
    /// Tokens of a prompt chunk: 256, 512 or 1024
    ///
    /// Weights outside the device are copied there once a chunk; larger chunks need more device memory for activations. By default the
    /// largest size whose activations take little of the budget, if anything is copied; 256 with --deterministic.
    #[arg(long, value_name = "TOKENS", hide_short_help = true)]
    pub prompt_chunk: Option<usize>,
    /// Layers ahead that the scheduler prefetches [default: 2 if the predictor was made for that, else 1]
    #[arg(long, value_name = "LAYERS")]
    pub lookahead: Option<usize>,
    /// Processor that predicts the layers ahead: the scheduler's own core, or the device, which needs memory for it. With --ahead as
    /// large as --lookahead, one prediction serves both
    #[arg(long, value_enum, default_value_t = LookaheadOnArg::Scheduler, hide_short_help = true)]
    pub lookahead_on: LookaheadOnArg,
    /// Make output independent of placement: one threshold for CPU and device
    ///
    /// The daemon also disables migration, so that results match bit for bit.
    #[arg(long)]
    pub deterministic: bool,
    /// Neither use nor update the activation counts of earlier runs
    #[arg(long, alias = "no-history")]
    pub no_learn: bool,
    /// Options of `dynamicinfer-lab` only.
    #[command(flatten)]
    pub lab: LabOptions,
}

/// The options where none is given.
impl Default for DeviceArgs {
    fn default() -> DeviceArgs {
        DeviceArgs {
            device: None,
            vram: None,
            ffn_share: None,
            placement: "static".into(),
            machine: None,
            policy: None,
            graphs: Switch::Off,
            tensor_cores: TensorCores::Auto,
            prompt_chunk: None,
            lookahead: None,
            lookahead_on: LookaheadOnArg::Scheduler,
            deterministic: false,
            no_learn: false,
            lab: LabOptions::default(),
        }
    }
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum DeviceArg {
    Cpu,
    Cuda,
    Auto,
    Virtual,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum LookaheadOnArg {
    Scheduler,
    Device,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    Off,
    On,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum TensorCores {
    Auto,
    Off,
    On,
}

impl DeviceArgs {
    /// Which neurons begin on the device.
    pub fn placement(&self) -> Placement {
        match self.placement.to_str() {
            Some("static") => Placement::Static,
            Some("random") => Placement::Random { seed: self.lab.placement_seed },
            Some("none") => Placement::Empty,
            _ => Placement::File(self.placement.clone()),
        }
    }

    /// The options given, and settings for device, budget and policy where none is given.
    ///
    /// # Errors
    /// [`Error::Usage`] for an invalid setting.
    pub fn or_settings(&self, settings: &Settings) -> Result<DeviceArgs> {
        let device = chosen(settings, "engine.device", self.device, |text| DeviceArg::from_str(text, true))?;
        let mut args = DeviceArgs { device, ..self.clone() };
        // Parsed without a device, too: every verb rejects an invalid setting.
        let vram = chosen(settings, "engine.vram", self.vram, size::parse)?;
        let policy = chosen(settings, "engine.policy", self.policy, str::parse)?;
        if device.is_none_or(|device| device == DeviceArg::Cpu) {
            if let Some(key) = ["engine.vram", "engine.policy"].into_iter().find(|key| is_of_load(settings, key)) {
                return Err(Error::Usage(format!("{key} needs a device; set engine.device, too (--device cuda)")));
            }
            // `load` may request the processor alone of a daemon that was started with a device.
            let plain = DeviceArgs { deterministic: self.deterministic, ..DeviceArgs::default() };
            return Ok(if is_of_load(settings, "engine.device") { plain } else { args });
        }
        // A share sets the budget by itself.
        if self.ffn_share.is_none() || is_of_load(settings, "engine.vram") {
            args.vram = vram;
        }
        args.policy = policy;
        Ok(args)
    }

    /// The options given; `None` for the processor alone.
    ///
    /// # Errors
    /// [`Error::Usage`] for an option about a device without a device.
    pub fn options(&self) -> Result<Option<DeviceOptions>> {
        let kind = match self.device.unwrap_or(DeviceArg::Cpu) {
            DeviceArg::Cpu => return self.check_nothing_is_about_a_device().map(|()| None),
            DeviceArg::Cuda => DeviceKind::Cuda,
            DeviceArg::Auto => DeviceKind::Auto,
            DeviceArg::Virtual => DeviceKind::Virtual,
        };
        if !self.lab.offered && matches!(self.placement(), Placement::Random { .. }) {
            return Err(Error::Usage(format!("--placement random is of {PROGRAM}: {PROGRAM} bench --help")));
        }
        Ok(Some(DeviceOptions {
            kind,
            vram: self.vram,
            vram_share: None,
            ffn_share: self.ffn_share,
            placement: self.placement(),
            machine: self.machine.clone(),
            barrier: self.lab.barrier,
            policy: self.policy.unwrap_or_default(),
            live: false,
            graphs: self.graphs == Switch::On,
            tiles: match self.tensor_cores {
                TensorCores::Auto => None,
                TensorCores::Off => Some(Tiles::Lanes),
                TensorCores::On => Some(Tiles::TensorCores),
            },
            chunk: self.prompt_chunk,
            parts: self.lab.prompt_parts,
            lookahead: self.lookahead,
            lookahead_on: match self.lookahead_on {
                LookaheadOnArg::Scheduler => LookaheadOn::Scheduler,
                LookaheadOnArg::Device => LookaheadOn::Device,
            },
            deterministic: self.deterministic,
            history: !self.no_learn,
            learn: !self.no_learn,
            fail_after: self.lab.fail_after,
            wall_clock: self.lab.wall_clock,
            printed_loss: self.lab.printed_loss,
            thetas: thetas(self.lab.theta_gpu, self.lab.theta_cpu),
        }))
    }

    /// As [`DeviceArgs::options`], for a verb that measures: it uses the activation counts and does not update them.
    ///
    /// # Errors
    /// As [`DeviceArgs::options`].
    pub fn options_to_measure(&self) -> Result<Option<DeviceOptions>> {
        Ok(self.options()?.map(|options| DeviceOptions { learn: false, ..options }))
    }

    fn check_nothing_is_about_a_device(&self) -> Result<()> {
        let said = [
            ("--vram", self.vram.is_some()),
            ("--ffn-share", self.ffn_share.is_some()),
            ("--policy", self.policy.is_some()),
            ("--vram-schedule", !self.lab.vram_schedule.is_empty()),
            ("--fail-after", self.lab.fail_after.is_some()),
            ("--machine", self.machine.is_some()),
            ("--prompt-chunk", self.prompt_chunk.is_some()),
            ("--prompt-parts", self.lab.prompt_parts.is_some()),
            ("--lookahead", self.lookahead.is_some()),
            ("--lookahead-on device", self.lookahead_on == LookaheadOnArg::Device),
            ("--placement", self.placement != DeviceArgs::default().placement),
            ("--placement-seed", self.lab.placement_seed != LabArgs::default().placement_seed),
            ("--barrier", self.lab.barrier),
            ("--wall-clock", self.lab.wall_clock),
            ("--printed-loss", self.lab.printed_loss),
            ("--theta-gpu", self.lab.theta_gpu.is_some()),
            ("--graphs on", self.graphs == Switch::On),
            ("--tensor-cores on", self.tensor_cores == TensorCores::On),
        ];
        match said.iter().find(|(_, said)| *said) {
            Some((name, _)) => Err(Error::Usage(format!("{name} needs a device; add --device cuda (or virtual)"))),
            None => Ok(()),
        }
    }

    /// Budgets that hold from generated token number `token` on.
    pub fn budgets_at(&self, token: usize) -> impl Iterator<Item = u64> {
        self.lab.vram_schedule.iter().filter(move |(at, _)| *at == token).map(|(_, vram)| *vram)
    }
}
