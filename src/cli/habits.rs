//! Flags that other programs of this kind have, and what to type here instead.

use super::lab_arg::{self, PROGRAM};
use clap::Command;

/// Verbs that the laboratory's program alone has.
pub const LAB_VERBS: [&str; 6] = ["synth", "record", "replay", "simulate", "experiment", "logits-hash"];

/// Flags as llama.cpp and its like have them, and the answer to each.
const ANSWERS: [(&[&str], &str); 7] = [
    (&["-m", "--model"], "the model needs no flag: dynamicinfer run MODEL \"Once upon a time\""),
    (&["-p", "--prompt"], "the prompt follows the model, without a flag: dynamicinfer run MODEL \"Once upon a time\""),
    (&["-f", "--file"], "a prompt in a file is read from stdin: dynamicinfer run MODEL < FILE"),
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers"],
        "the GPU holds neurons, not layers, as many as fit: use --device cuda, with --vram 8GiB to limit its \
         memory; `dynamicinfer plan MODEL --vram 8GiB` shows what fits",
    ),
    (&["-cnv", "--conversation", "-i", "--interactive"], "a conversation is another verb: dynamicinfer chat MODEL"),
    (&["-sys", "--system-prompt"], "the system message is --system TEXT"),
    (&["--host", "--port"], "an address is one option: dynamicinfer serve MODEL --listen 127.0.0.1:8080"),
];

/// The answer to a verb or an option that the other of the two programs has; `None` if neither was typed.
pub fn elsewhere(command: &Command, args: &[String]) -> Option<String> {
    let is_lab = command.get_name() == PROGRAM;
    let verb = args.iter().find(|arg| !arg.starts_with('-') && *arg != "help")?;
    if command.find_subcommand(verb).is_none() {
        if verb == "man" {
            return Some(format!("'man' is a part of completions: {} completions man DIR", command.get_name()));
        }
        let there = match is_lab {
            true => super::verbs::command().find_subcommand(verb).is_some(),
            false => LAB_VERBS.contains(&verb.as_str()),
        };
        let other = if is_lab { "dynamicinfer" } else { PROGRAM };
        return there.then(|| format!("'{verb}' is a verb of {other}: {other} {verb} --help"));
    }
    let name = |arg: &str| arg.split_once('=').map_or(arg, |(name, _)| name).to_owned();
    let option = args.iter().map(|arg| name(arg)).find(|name| !is_lab && lab_arg::is_option(name))?;
    let verb = lab_arg::SHARED.iter().find(|shared| *shared == verb).unwrap_or(&"bench");
    Some(format!("{option} is an option of {PROGRAM}: {PROGRAM} {verb} --help"))
}

/// The answer to the first of the refused arguments that is another program's flag and none of the verb's own; `None` if there is none.
pub fn answer(command: &Command, args: &[String]) -> Option<String> {
    let verb = args.iter().find_map(|arg| command.find_subcommand(arg));
    let typed = args.iter().take_while(|arg| *arg != "--");
    typed.into_iter().find_map(|arg| {
        let name = arg.split_once('=').map_or(arg.as_str(), |(name, _)| name);
        // `-ngl99` and `-ngl 99` are one habit, and begin with a flag that there is.
        let name = if name.starts_with("-ngl") { "-ngl" } else { name };
        let (_, answer) = ANSWERS.iter().find(|(flags, _)| flags.contains(&name))?;
        let own = |arg: &clap::Arg| match name.strip_prefix("--") {
            Some(long) => arg.get_long() == Some(long),
            None => name.len() == 2 && arg.get_short() == name.chars().nth(1),
        };
        // Of a verb that takes no prompt `-f` is thought to be `--force`.
        if matches!(name, "-f" | "--file") && verb.is_none_or(|verb| !matches!(verb.get_name(), "run" | "chat")) {
            return None;
        }
        let is_own = verb.is_some_and(|verb| verb.get_arguments().any(own));
        (!is_own).then(|| format!("unknown option {name}: {answer}"))
    })
}
