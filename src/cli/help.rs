//! The command line as `--help` shows it: verbs and options in groups, the common ones first.

use clap::{Arg, Command, CommandFactory};
use std::fmt::Write as _;

/// Verbs by what they are for. One that is in no group stands in the last.
const VERBS: [Group; 5] = [
    ("Use a model", &["run", "chat", "serve", "pull", "ls", "rm", "show"]),
    ("Watch and steer the daemon", &["top", "ps", "load", "stop", "budget"]),
    ("This machine", &["doctor", "plan", "measure", "config", "completions"]),
    ("Prepare a model", &["pack", "train-predictor", "calibrate", "profile"]),
    ("Measure and compare", &["bench", "eval", "gpu-check"]),
];

/// A heading and its verbs.
pub type Group = (&'static str, &'static [&'static str]);

/// Options of the verbs that run a model, by what they are about. Others stand first, under \"Options\".
const OPTIONS: [(&str, &[&str]); 5] = [
    ("Model", &["quant", "activation", "threads", "kv", "prefill", "ram"]),
    (
        "Sampling",
        &[
            "temp",
            "top_k",
            "top_p",
            "min_p",
            "repeat_penalty",
            "repeat_last_n",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop",
            "ignore_eos",
        ],
    ),
    ("Sparsity", &["predictor", "threshold", "ahead", "sparsity", "predictor_file", "calibrate", "audit"]),
    (
        "Device",
        &["device", "vram", "ffn_share", "policy", "machine", "graphs", "tensor_cores", "deterministic", "no_learn"],
    ),
    ("Experiments", &["placement", "prompt_chunk", "lookahead", "trace"]),
];

const RUN_A_MODEL: [&str; 7] = ["run", "chat", "serve", "load", "bench", "eval", "logits-hash"];

/// The product's whole command line.
pub fn command() -> Command {
    in_groups(super::Args::command(), &VERBS)
}

/// A command line with its verbs and options in groups.
pub fn in_groups(command: Command, groups: &[Group]) -> Command {
    let command = command.mut_subcommands(|verb| match RUN_A_MODEL.contains(&verb.get_name()) {
        true => verb.mut_args(under_its_heading),
        false => verb,
    });
    let styles = clap::builder::Styles::styled();
    let (on, off) = (styles.get_header().render(), styles.get_header().render_reset());
    let heading = |text: &str| format!("\n{on}{text}:{off}\n");
    let (verbs, options) = (verbs(&command, groups, heading), heading("Options"));
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{verbs}{options}{{options}}{{after-help}}"
    ))
}

/// A command line without the verb `help`, at any depth: each verb's page says the same.
pub fn without_help_verbs(command: Command) -> Command {
    command.mut_subcommands(|verb| verb.disable_help_subcommand(true))
}

fn under_its_heading(option: Arg) -> Arg {
    let of = |(_, options): &&(&str, &[&str])| options.contains(&option.get_id().as_str());
    match OPTIONS.iter().find(of) {
        Some((heading, _)) if !option.is_positional() => option.help_heading(*heading),
        _ => option,
    }
}

/// A heading and a line for each verb.
fn verbs(command: &Command, groups: &[Group], line: impl Fn(&str) -> String) -> String {
    let all: Vec<&Command> = command.get_subcommands().filter(|verb| !verb.is_hide_set()).collect();
    let grouped = |name: &str| groups.iter().any(|(_, verbs)| verbs.contains(&name));
    let mut text = String::new();
    for (at, (heading, names)) in groups.iter().enumerate() {
        text += &line(heading);
        let named = names.iter().filter_map(|name| all.iter().find(|verb| verb.get_name() == *name));
        let rest = all.iter().filter(|verb| at + 1 == groups.len() && !grouped(verb.get_name()));
        for verb in named.chain(rest) {
            let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {:16} {about}", verb.get_name());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_holds_together() {
        command().debug_assert();
    }

    #[test]
    fn every_verb_is_in_one_group_and_every_heading_has_its_options() {
        let command = command();
        for verb in command.get_subcommands() {
            let groups = VERBS.iter().filter(|(_, verbs)| verbs.contains(&verb.get_name())).count();
            assert_eq!(groups, 1, "{} is in {groups} groups", verb.get_name());
        }
        let run = command.find_subcommand("run").unwrap();
        for (heading, options) in OPTIONS {
            for option in options {
                let found = run.get_arguments().find(|arg| arg.get_id() == option);
                assert_eq!(
                    found.unwrap_or_else(|| panic!("no --{option}")).get_help_heading(),
                    Some(heading),
                    "{option}"
                );
            }
        }
    }

    #[test]
    fn help_fits_a_terminal_of_80_columns() {
        let help = command().term_width(80).render_long_help().to_string();
        let long: Vec<&str> = help.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(long.is_empty(), "{long:#?}");
    }
}
