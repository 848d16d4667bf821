//! The laboratory's command line: one file per verb that the product does not have, and the product's verbs with options for experiments.

/// As in `cli`: what is said may hold a path, a name or an answer that is not ours ([`crate::cli::say`]).
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::cli::say(format_args!($($text)*)) };
}

mod experiment;
mod logits_hash;
mod record;
mod replay;
mod simulate;
mod synth;

use crate::cli::help::{Group, in_groups};
use crate::cli::lab_arg::{PROGRAM, SHARED, with_lab_options};
use crate::cli::progress::stoppable;
use crate::cli::{Program, bench, completions, eval, run, serve};
use crate::error::Result;
use clap::{Command, CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// The laboratory beside dynamicinfer: makes models and traces up, records, replays, simulates and runs experiments.
///
/// MODEL is what `dynamicinfer` takes. The verbs that both programs have are the same; here they have the options that only reproduce papers.
#[derive(Parser)]
#[command(name = "dynamicinfer-lab", version, max_term_width = 110, after_help = EXAMPLES, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer-lab experiment configs/experiments/vram_sweep.toml
  dynamicinfer-lab simulate --papers
  dynamicinfer-lab bench demo --device virtual --vram 16MiB --barrier";

const COMPLETIONS: &str = "\
Print a completion script for your shell, or write the man pages

bash: dynamicinfer-lab completions bash > ~/.local/share/bash-completion/completions/dynamicinfer-lab

man pages: dynamicinfer-lab completions man ~/.local/share/man/man1";

const VERBS: [Group; 3] = [
    ("Make and record", &["synth", "record"]),
    ("Replay and simulate", &["replay", "simulate", "experiment"]),
    ("Run a model", &["run", "serve", "bench", "eval", "logits-hash", "completions"]),
];

#[derive(Subcommand)]
enum Verb {
    Synth(synth::Args),
    Record(record::Args),
    Replay(replay::Args),
    Simulate(simulate::Args),
    Experiment(experiment::Args),
    LogitsHash(logits_hash::Args),
    Run(run::Args),
    Serve(serve::Args),
    Bench(bench::Args),
    Eval(eval::Args),
    Completions(completions::Args),
}

/// The program. Returns its exit status.
pub fn main() -> ExitCode {
    crate::cli::start::<Args>(&command())
}

/// The whole command line.
fn command() -> Command {
    let command = Args::command().mut_subcommands(|verb| match verb.get_name() {
        name if SHARED.contains(&name) || name == "logits-hash" => with_lab_options(verb),
        "completions" => verb.long_about(COMPLETIONS),
        _ => verb,
    });
    in_groups(command, &VERBS)
}

impl Program for Args {
    const NAME: &'static str = PROGRAM;

    fn is_daemon(&self) -> bool {
        matches!(self.verb, Verb::Serve(_))
    }

    fn computes(&self) -> bool {
        !matches!(self.verb, Verb::Completions(_))
    }

    fn run(self) -> Result<()> {
        match self.verb {
            Verb::Synth(args) => stoppable(|| (), || synth::run(args)),
            Verb::Record(args) => record::run(args),
            Verb::Replay(args) => stoppable(|| (), || replay::run(args)),
            Verb::Simulate(args) => stoppable(|| (), || simulate::run(args)),
            Verb::Experiment(args) => experiment::run(args),
            Verb::LogitsHash(args) => logits_hash::run(args),
            Verb::Run(args) => run::run(args),
            Verb::Serve(args) => serve::run(args),
            Verb::Bench(args) => bench::run(args),
            Verb::Eval(args) => eval::run(args),
            Verb::Completions(args) => completions::run(args, command(), EXAMPLES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::habits::LAB_VERBS;

    #[test]
    fn the_command_line_holds_together() {
        command().debug_assert();
    }

    #[test]
    fn a_verb_is_of_the_laboratory_alone_or_of_both_programs() {
        let product = crate::cli::command();
        for verb in command().get_subcommands().map(Command::get_name) {
            let alone = LAB_VERBS.contains(&verb);
            assert_eq!(alone, product.find_subcommand(verb).is_none(), "{verb}");
            assert!(alone || SHARED.contains(&verb) || verb == "completions", "{verb}");
            assert_eq!(VERBS.iter().filter(|(_, verbs)| verbs.contains(&verb)).count(), 1, "{verb}");
        }
        LAB_VERBS.iter().for_each(|verb| assert!(command().find_subcommand(verb).is_some(), "{verb}"));
    }

    #[test]
    fn options_for_experiments_are_of_the_laboratory_alone() {
        let has = |command: &Command, verb: &str, id: &str| {
            let verb = command.find_subcommand(verb).unwrap();
            verb.get_arguments().any(|option| option.get_id() == id)
        };
        let product = crate::cli::command();
        for verb in SHARED {
            for option in ["barrier", "placement_seed", "vram_schedule", "fail_after", "wall_clock", "printed_loss"] {
                assert!(has(&command(), verb, option), "{verb} {option}");
                assert!(!has(&product, verb, option), "{verb} {option}");
            }
        }
    }
}
