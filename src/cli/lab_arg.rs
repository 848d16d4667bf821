//! Options of the laboratory's program alone: what reproduces papers, and what breaks a device on purpose. They are part of the same
//! [`DeviceArgs`](super::device_arg::DeviceArgs); the laboratory adds them to its verbs ([`with_lab_options`]), the product does not.

use super::size;
use crate::cache::{PerTier, Tier};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use std::ops::Deref;

/// The laboratory's program.
pub const PROGRAM: &str = "dynamicinfer-lab";

/// Verbs of both programs that take [`LabArgs`] in the laboratory's.
pub const SHARED: [&str; 4] = ["run", "serve", "bench", "eval"];

#[derive(Args, Clone, PartialEq)]
#[command(next_help_heading = "Experiments")]
pub struct LabArgs {
    /// Seed of --placement random
    #[arg(long, default_value_t = 1)]
    pub placement_seed: u64,
    /// Wait for a layer's copies before it is used (DynamicInfer C.3), instead of computing on the CPU what has not landed
    #[arg(long)]
    pub barrier: bool,
    /// Parts of a prompt's chunk (--prompt-chunk) that take turns between processor and device, 1 to 4, so that neither waits for the other [default: as many as
    /// take the least time by the machine's rates; a mixture's chunk is one]
    #[arg(long, value_name = "PARTS", hide_short_help = true)]
    pub prompt_parts: Option<usize>,
    /// Budgets from some generated token on: 50=4MiB,100=8MiB
    #[arg(long, value_name = "TOKEN=SIZE,...", value_delimiter = ',', value_parser = parse_step)]
    pub vram_schedule: Vec<(usize, u64)>,
    /// Let the virtual device fail for good after so many kernels, as a GPU does after an illegal address
    #[arg(long, value_name = "KERNELS")]
    pub fail_after: Option<u64>,
    /// On the virtual device, let the scheduler run on a thread for as long as it takes; without it, it takes a stated time on the device's
    /// clock, and the same command decides the same again
    #[arg(long)]
    pub wall_clock: bool,
    /// Balance thresholds by 1 - p, as the paper prints the loss of a neuron left out, to see what that does
    #[arg(long)]
    pub printed_loss: bool,
    /// Under a policy that balances thresholds, set the device's instead: the probability from which on it computes a neuron
    #[arg(long, value_name = "PROBABILITY", requires = "theta_cpu", value_parser = parse_theta, allow_hyphen_values = true)]
    pub theta_gpu: Option<f32>,
    /// The same for the CPU
    #[arg(long, value_name = "PROBABILITY", requires = "theta_gpu", value_parser = parse_theta, allow_hyphen_values = true)]
    pub theta_cpu: Option<f32>,
}

/// As nothing was typed.
impl Default for LabArgs {
    fn default() -> LabArgs {
        LabArgs {
            placement_seed: 1,
            barrier: false,
            prompt_parts: None,
            vram_schedule: Vec::new(),
            fail_after: None,
            wall_clock: false,
            printed_loss: false,
            theta_gpu: None,
            theta_cpu: None,
        }
    }
}

/// A probability as a threshold; below 0, as the paper's -1, every neuron reaches it.
pub fn parse_theta(text: &str) -> Result<f32, String> {
    let theta: f32 = text.parse().map_err(|_| format!("'{text}' is no number"))?;
    if theta <= 1.0 { Ok(theta.max(0.0)) } else { Err("take a probability, at most 1".into()) }
}

/// The pair of thresholds that was typed.
pub fn thetas(device: Option<f32>, cpu: Option<f32>) -> Option<PerTier<f32>> {
    Some(PerTier::all(cpu?).with(Tier::Device, device?))
}

fn parse_step(text: &str) -> Result<(usize, u64), String> {
    let (token, bytes) = text.split_once('=').ok_or("take TOKEN=SIZE, as 50=4MiB")?;
    let token = token.parse().map_err(|_| format!("'{token}' is no number of tokens"))?;
    Ok((token, size::parse(bytes)?))
}

/// The laboratory's options of a verb: as typed where the verb has them, else none.
#[derive(Clone, Default, PartialEq)]
pub struct LabOptions {
    typed: LabArgs,
    /// Whether the program is the laboratory's.
    pub offered: bool,
}

impl LabOptions {
    /// Those of an experiment, which is always the laboratory's.
    pub fn of(typed: LabArgs) -> LabOptions {
        LabOptions { typed, offered: true }
    }
}

impl Deref for LabOptions {
    type Target = LabArgs;

    fn deref(&self) -> &LabArgs {
        &self.typed
    }
}

/// Adds nothing: [`with_lab_options`] does, in one of the two programs.
impl Args for LabOptions {
    fn augment_args(verb: Command) -> Command {
        verb
    }

    fn augment_args_for_update(verb: Command) -> Command {
        verb
    }
}

impl FromArgMatches for LabOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<LabOptions, clap::Error> {
        // It has a default, so it is always there where the options are.
        match matches.try_contains_id("placement_seed") {
            Ok(true) => LabArgs::from_arg_matches(matches).map(LabOptions::of),
            Ok(false) | Err(_) => Ok(LabOptions::default()),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = LabOptions::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A verb that has [`DeviceArgs`](super::device_arg::DeviceArgs), with the laboratory's options.
pub fn with_lab_options(verb: Command) -> Command {
    let placement = "Neurons that begin on the device: static (the plan's), random, none, or a file of `plan -o`";
    LabArgs::augment_args(verb).mut_arg("placement", |option| option.help(placement))
}

/// Whether the laboratory alone has this option, named with its dashes.
pub fn is_option(name: &str) -> bool {
    let options = LabArgs::augment_args(Command::new("options"));
    options.get_arguments().any(|option| option.get_long().is_some_and(|long| name.strip_prefix("--") == Some(long)))
}
