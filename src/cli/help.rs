//! The command line as help shows it: verbs and options in groups. `--help` fits a screen; `--help-all` has the rest.

use clap::builder::Resettable;
use clap::{Arg, ArgAction, Command};
use std::ffi::OsString;
use std::fmt::Write as _;

/// Verbs by purpose. A verb without a group is listed in the last one.
const VERBS: [Group; 5] = [
    ("Use a model", &["run", "chat", "serve", "pull", "ls", "rm", "show"]),
    ("Watch and steer the daemon", &["top", "ps", "load", "stop", "budget"]),
    ("This machine", &["doctor", "plan", "measure", "config", "completions"]),
    ("Prepare a model", &["pack", "train-predictor", "calibrate", "profile"]),
    ("Measure and compare", &["bench", "eval", "gpu-check"]),
];

/// A heading and its verbs.
pub type Group = (&'static str, &'static [&'static str]);

/// Options of the verbs that run a model, by subject. Others come first, under \"Options\".
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
    (
        "Experiments",
        &[
            "placement",
            "prompt_chunk",
            "lookahead",
            "lookahead_on",
            "trace",
            "ram_policy",
            "ram_without",
            "ram_lookahead",
            "isa",
        ],
    ),
];

/// The grouped options that `--help` shows; the others are shown by `--help-all` only.
const COMMON: [&str; 19] = [
    "quant",
    "threads",
    "kv",
    "ram",
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "seed",
    "stop",
    "predictor",
    "threshold",
    "calibrate",
    "device",
    "vram",
    "policy",
    "deterministic",
    "no_learn",
];

/// Verbs whose options are in groups.
const RUN_A_MODEL: [&str; 11] = [
    "run",
    "chat",
    "serve",
    "load",
    "bench",
    "eval",
    "logits-hash",
    "calibrate",
    "profile",
    "train-predictor",
    "record",
];

/// The end of the first page.
const FIRST: &str = "
  dynamicinfer run demo \"Once upon a time\"     a story from the built-in model
  dynamicinfer run --help                      the options of a verb
  dynamicinfer --help-all                      all verbs and exit statuses";

/// The product's whole command line, with these examples on the page of all verbs.
pub fn product(command: Command, examples: &str) -> Command {
    let command = with_pages(command);
    let (first, all) = (first_page(&command), verbs(&command, &VERBS));
    let options = heading("Options");
    let all = format!(
        "{all}\n{options}  -h, --help       Print the first page\n      --help-all   Print this page\n  -V, --version    Print the version\n\n{examples}"
    );
    let command = with_help(command).after_help(first).after_long_help(all);
    on_this_terminal(command.help_template("{about-with-newline}\n{usage-heading} {usage}{after-help}"))
}

/// A command line of one page with its verbs and their options in groups.
pub fn in_groups(command: Command, groups: &[Group]) -> Command {
    let command = with_help(with_pages(command)).mut_arg(HELP_ALL, |all| all.hide(true));
    let (verbs, options) = (verbs(&command, groups), heading("Options"));
    on_this_terminal(command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{verbs}\n{options}{{options}}{{after-help}}"
    )))
}

fn heading(text: &str) -> String {
    let styles = clap::builder::Styles::styled();
    format!("{}{text}:{}\n", styles.get_header().render(), styles.get_header().render_reset())
}

fn on_this_terminal(command: Command) -> Command {
    match super::wrap::columns() {
        Some(columns) => command.term_width(columns.min(110)),
        None => command,
    }
}

/// A command line as man pages show it: each verb's page has all of its options, and none is about help.
pub fn for_man_pages(command: Command, examples: &'static str) -> Command {
    let without = |verb: Command| {
        let has_two_pages = verb.get_arguments().any(|arg| arg.get_id() == HELP_ALL && !arg.is_hide_set());
        if has_two_pages { verb.after_help(Resettable::Reset).after_long_help(Resettable::Reset) } else { verb }
    };
    let command = command.mut_subcommands(|verb| without(verb).disable_help_subcommand(true));
    command.after_help(Resettable::Reset).after_long_help(examples)
}

/// What was typed, with `help VERB` as `VERB --help`.
pub fn typed(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let args: Vec<OsString> = args.collect();
    match &args[..] {
        [program, help, verbs @ ..] if help == "help" => {
            [std::slice::from_ref(program), verbs, &["--help".into()]].concat()
        }
        _ => args,
    }
}

fn under_its_heading(option: Arg) -> Arg {
    let id = option.get_id().to_string();
    match OPTIONS.iter().find(|(_, options)| options.contains(&id.as_str())) {
        Some((heading, _)) if !option.is_positional() => {
            let option = option.help_heading(*heading);
            if COMMON.contains(&id.as_str()) { option } else { option.hide(false).hide_short_help(true) }
        }
        _ => option,
    }
}

const HELP_ALL: &str = "help_all";

/// Verbs with their options in groups. [`typed`] has the verb `help`.
fn with_pages(command: Command) -> Command {
    let program = command.get_name().to_owned();
    command.disable_help_subcommand(true).mut_subcommands(|verb| match RUN_A_MODEL.contains(&verb.get_name()) {
        true => with_two_pages(&program, verb.mut_args(under_its_heading)),
        false => with_two_pages(&program, verb),
    })
}

/// A verb with options that `--help` leaves out gets `--help-all`, and says so at the end.
fn with_two_pages(program: &str, verb: Command) -> Command {
    if !verb.get_arguments().any(Arg::is_hide_short_help_set) {
        return with_one_page(verb);
    }
    let more = format!("More options: {program} {} --help-all", verb.get_name());
    with_help(verb).after_help(more).after_long_help("")
}

/// A verb, and the verbs below it, with `--help`: clap leaves it out below a command that has its own.
fn with_one_page(verb: Command) -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::Help).help("Print help");
    let all = Arg::new(HELP_ALL).long("help-all").action(ArgAction::HelpLong).hide(true);
    verb.disable_help_flag(true).args([help, all]).mut_subcommands(with_one_page)
}

/// `--help` for the short page and `--help-all` for the long one.
fn with_help(command: Command) -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).help("Print the common options");
    let all = Arg::new(HELP_ALL).long("help-all").action(ArgAction::HelpLong).hide_short_help(true);
    command.disable_help_flag(true).arg(help).arg(all.help("Print all options"))
}

/// The verbs of a group that the program has. The last group takes those without a group.
fn group<'a>(command: &'a Command, groups: &'a [Group], at: usize) -> impl Iterator<Item = &'a Command> {
    let named = groups[at].1.iter().filter_map(|name| command.get_subcommands().find(|verb| verb.get_name() == *name));
    let is_grouped = |name: &str| groups.iter().any(|(_, verbs)| verbs.contains(&name));
    let is_last = at + 1 == groups.len();
    let rest = command.get_subcommands().filter(move |verb| is_last && !is_grouped(verb.get_name()));
    named.chain(rest).filter(|verb| !verb.is_hide_set())
}

fn line_of(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    format!("  {:16} {about}\n", verb.get_name())
}

/// The first group with a line for each verb, and the names of all others.
fn first_page(command: &Command) -> String {
    let mut text = heading(VERBS[0].0);
    text.extend(group(command, &VERBS, 0).map(line_of));
    text += &format!("\n{}", heading("Other verbs"));
    for (at, (heading, _)) in VERBS.iter().enumerate().skip(1) {
        let mut line = format!("  {heading:28}");
        for verb in group(command, &VERBS, at) {
            if line.len() + 1 + verb.get_name().len() > 80 {
                let _ = writeln!(text, "{line}");
                line = " ".repeat(30);
            }
            let _ = write!(line, " {}", verb.get_name());
        }
        let _ = writeln!(text, "{line}");
    }
    text + FIRST
}

/// A heading for each group and a line for each verb.
fn verbs(command: &Command, groups: &[Group]) -> String {
    let pages = groups
        .iter()
        .enumerate()
        .map(|(at, (name, _))| heading(name) + &group(command, groups, at).map(line_of).collect::<String>());
    pages.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::verbs::command;

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
        let mut command = command().term_width(80);
        for help in [command.render_help(), command.render_long_help()] {
            let help = help.to_string();
            let long: Vec<&str> = help.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(long.is_empty(), "{long:#?}");
        }
    }

    #[test]
    fn the_first_page_is_one_screen_and_names_every_verb() {
        let mut command = command().term_width(80);
        let help = command.render_help().to_string();
        assert!(help.trim_end().lines().count() <= 24, "{help}");
        let words: Vec<&str> = help.split_whitespace().collect();
        let verbs: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        assert!(verbs.iter().all(|verb| words.contains(verb)), "{help}");
        assert!(command.render_long_help().to_string().contains("Exit status"));
    }

    /// `run --help` had 244 lines.
    #[test]
    fn help_of_run_has_25_options_and_names_the_page_with_all() {
        let mut command = command().term_width(80);
        let run = command.find_subcommand_mut("run").unwrap();
        let help = run.render_help().to_string();
        let is_option = |line: &&str| line.trim_start().starts_with('-');
        assert!(help.lines().filter(is_option).count() <= 25, "{help}");
        assert!(help.trim_end().lines().count() <= 60, "{} lines: {help}", help.lines().count());
        assert!(help.trim_end().ends_with("More options: dynamicinfer run --help-all"), "{help}");
        let all = run.render_long_help().to_string();
        for option in run.get_arguments().filter_map(Arg::get_long).filter(|long| !["socket", "timeout"].contains(long))
        {
            let named = |word: &str| word.trim_end_matches([',', ']']) == format!("--{option}");
            assert!(all.split_whitespace().any(named), "--help-all lacks --{option}");
        }
    }

    #[test]
    fn every_verb_has_both_options_of_help() {
        let command = command();
        for verb in command.get_subcommands().map(Command::get_name) {
            for option in ["--help", "--help-all"] {
                let asked = command.clone().try_get_matches_from(["dynamicinfer", verb, option]);
                assert_eq!(asked.unwrap_err().kind(), clap::error::ErrorKind::DisplayHelp, "{verb} {option}");
            }
        }
    }

    #[test]
    fn the_verb_help_is_the_option() {
        let typed = |args: &[&str]| typed(args.iter().map(OsString::from));
        assert_eq!(typed(&["x", "help", "run"]), ["x", "run", "--help"]);
        assert_eq!(typed(&["x", "help"]), ["x", "--help"]);
        assert_eq!(typed(&["x", "run", "help"]), ["x", "run", "help"]);
    }
}
