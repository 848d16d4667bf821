//! What `chat` does for lines that begin with a slash.

use super::chat_session::ChatSession;
use super::daemon_verbs::{Asked, budget_line, budget_words};
use crate::api::chat::{CHAT_FIELDS, ChatRequest};
use crate::api::parse;
use crate::error::{Error, Result, printable};
use crate::settings::nearest;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub enum Next {
    Go,
    Exit,
}

const HELP: &str = "\
/system TEXT     set the system message; without TEXT show it, /system - for none
/set FIELD VALUE set a field of the request: temperature, top_p, seed, max_tokens, stop ...; /set FIELD - restores the default
/show            the model, the settings and the length of this chat
/stats           tokens and time of the last answer
/regen           discard the last answer and repeat the question
/clear           discard the conversation
/save FILE       write the conversation to a file; /load FILE reads one
/budget [SIZE]   show or set the memory budget of the device (also: get, set SIZE; --ram SIZE for host memory)
/policy [NAME]   show or set the policy that moves neurons to the device
/multi           a message over several lines: begin it with \"\"\" and end it so
/exit            also /bye, /quit, Ctrl-D
";
const COMMANDS: [&str; 15] = [
    "help", "exit", "bye", "quit", "clear", "system", "set", "show", "stats", "budget", "policy", "regen", "save",
    "load", "multi",
];
/// Set by the talk itself.
const NOT_SET: [&str; 9] = [
    "messages",
    "stream",
    "stream_options",
    "n",
    "model",
    // An answer here is text.
    "tools",
    "tool_choice",
    "logprobs",
    "top_logprobs",
];

pub fn run(talk: &mut ChatSession, line: &str) -> Result<Next> {
    let (command, rest) = line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
    let rest = rest.trim();
    match command {
        "exit" | "bye" | "quit" => return Ok(Next::Exit),
        "help" | "?" | "" => super::print(HELP)?,
        "multi" => super::print("begin the message with \"\"\" and end it so; it may have any number of lines\n")?,
        "clear" => {
            let turns = talk.turns.len();
            talk.restart(Vec::new());
            super::print(&format!("{turns} turns are discarded\n"))?;
        }
        "system" => system(talk, rest)?,
        "set" => set(talk, rest)?,
        "show" => show(talk)?,
        "stats" => stats(talk)?,
        "regen" => {
            let question = talk.take_back().ok_or_else(|| usage("no answer exists yet"))?;
            talk.ask(&question)?;
        }
        "save" => save(talk, rest)?,
        "load" => load(talk, rest)?,
        "budget" => budget(talk, rest)?,
        "policy" => policy(talk, rest)?,
        other => {
            let hint =
                nearest(other, COMMANDS.into_iter()).map_or(String::new(), |near| format!("; did you mean /{near}?"));
            return Err(usage(format!("unknown command /{}{hint} /help lists all", crate::error::excerpt(other))));
        }
    }
    Ok(Next::Go)
}

fn usage(message: impl Into<String>) -> Error {
    Error::Usage(message.into())
}

fn system(talk: &mut ChatSession, text: &str) -> Result<()> {
    match text {
        "" => super::print(&format!("{}\n", talk.system.as_deref().unwrap_or("there is none"))),
        "-" => {
            talk.system = None;
            super::print("the system message is removed\n")
        }
        text => {
            talk.system = Some(text.to_owned());
            super::print("the system message is set, from the next answer on\n")
        }
    }
}

fn set(talk: &mut ChatSession, rest: &str) -> Result<()> {
    let (field, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    if !CHAT_FIELDS.contains(&field) || NOT_SET.contains(&field) {
        let hint = nearest(field, CHAT_FIELDS.iter().copied().filter(|f| !NOT_SET.contains(f)));
        let hint = hint.map_or("; temperature, say".into(), |near| format!("; did you mean {near}?"));
        return Err(usage(format!("'{}' cannot be set{hint}", crate::error::excerpt(field))));
    }
    match value.trim() {
        "" => Err(usage(format!("/set {field} VALUE, or /set {field} - for the default"))),
        "-" => {
            talk.set.remove(field);
            super::print(&format!("{field} is the default again\n"))
        }
        text => {
            // What is no JSON is meant as text.
            let value: Value = serde_json::from_str(text).unwrap_or_else(|_| text.into());
            check(field, &value).map_err(usage)?;
            super::print(&format!("{field} is {}\n", printable(&value.to_string())))?;
            talk.set.insert(field.into(), value);
            Ok(())
        }
    }
}

/// Checks a value of a field as the server does when it is asked.
///
/// # Errors
/// What is wrong with it.
fn check(field: &str, value: &Value) -> std::result::Result<(), String> {
    let mut request = Map::new();
    request.insert(field.to_owned(), value.clone());
    let request: ChatRequest = parse(Value::from(request).to_string().as_bytes(), CHAT_FIELDS)
        .map_err(|e| format!("{field}: {}", e.message.trim_start_matches("invalid request: ")))?;
    request.check_values().map_err(|e| e.message)
}

fn show(talk: &ChatSession) -> Result<()> {
    let card = talk.backend.card()?;
    let set: Vec<String> = talk.set.iter().map(|(field, value)| format!("{field} {value}")).collect();
    let set = if set.is_empty() { "defaults".into() } else { printable(&set.join(", ")) };
    super::print(&format!(
        "model    {}, {} tokens of context\nset      {set}\nsystem   {}\nturns    {}\n",
        talk.name,
        card["context_length"],
        printable(talk.system.as_deref().unwrap_or("none")),
        talk.turns.len()
    ))
}

fn stats(talk: &ChatSession) -> Result<()> {
    let (taken, seconds) = talk.last.ok_or_else(|| usage("no answer is complete yet"))?;
    super::print(&format!(
        "prompt {} tokens, {} of them from before; answer {} tokens; {seconds:.2} s, {:.1} tokens/s\n",
        taken.prompt_tokens,
        taken.cached_tokens,
        taken.generated_tokens,
        taken.generated_tokens as f64 / seconds
    ))
}

fn save(talk: &ChatSession, path: &str) -> Result<()> {
    if path.is_empty() {
        return Err(usage("/save FILE"));
    }
    let turns: Vec<Value> = talk.turns.iter().map(|(user, assistant)| json!([user, assistant])).collect();
    let text = json!({"model": talk.name, "system": talk.system, "set": talk.set, "turns": turns}).to_string();
    // A conversation is private to its user.
    let path = Path::new(path);
    let mut options = std::fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    // A pipe without a reader is an error, and not waited for.
    let file = options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(Error::io("write", path))?;
    super::print(&format!("{} turns are in {}\n", talk.turns.len(), printable(&path.to_string_lossy())))
}

fn load(talk: &mut ChatSession, path: &str) -> Result<()> {
    let path = Path::new(path);
    let text = crate::formats::read_text(path)?;
    let bad = || Error::bad(path, "talk", "is not a file of /save");
    let value: Value = serde_json::from_str(&text).map_err(|_| bad())?;
    let turn = |turn: &Value| Some((turn[0].as_str()?.to_owned(), turn[1].as_str()?.to_owned()));
    let turns: Option<Vec<_>> = value["turns"].as_array().ok_or_else(bad)?.iter().map(turn).collect();
    talk.restart(turns.ok_or_else(bad)?);
    talk.system = value["system"].as_str().map(str::to_owned);
    talk.set = value["set"].as_object().cloned().unwrap_or_default();
    super::print(&format!("{} turns\n", talk.turns.len()))
}

const HERE: &str = "no device: the model runs in this process, on the processor alone; start with --device cuda (or virtual) and \
     --vram 8GiB\n";

const HERE_WHOLE: &str = "the whole model is in memory, without a limit to change; start with --ram below its size\n";

fn budget(talk: &ChatSession, size: &str) -> Result<()> {
    let asked = budget_words(size).map_err(usage)?;
    match talk.backend.budget(asked)? {
        Some(budget) => super::print(&(budget_line(&budget) + "\n")),
        None if matches!(asked, Asked::Ram(_)) => super::print(HERE_WHOLE),
        None => super::print(HERE),
    }
}

fn policy(talk: &ChatSession, name: &str) -> Result<()> {
    let body = (!name.is_empty()).then(|| json!({"policy": name}));
    let method = if body.is_some() { "PUT" } else { "GET" };
    match talk.backend.ask(method, "/v1/x/policy", body.as_ref())? {
        Some(policy) => super::print(&format!("{}\n", printable(policy["policy"].as_str().unwrap_or_default()))),
        None => super::print("the model runs in this process, whose policy is fixed at the start: --policy NAME\n"),
    }
}
