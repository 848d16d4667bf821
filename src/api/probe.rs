//! How a model's chat template writes calls of functions and thoughts, found by rendering some: nothing goes by names.

use super::call_format::{Body, CallFormat, ListMarks};
use super::json_scan::Keys;
use super::reader::Reader;
use super::reading::{Callable, Part, Reading, Thoughts};
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;

/// What a template is given to render.
pub struct Probe {
    /// The conversation.
    pub messages: Vec<Value>,
    /// The functions; null for none.
    pub tools: Value,
    /// Whether the assistant is to answer.
    pub prompt: bool,
}

/// Renders a probe.
pub type Render<'a> = dyn Fn(Probe) -> Result<String> + 'a;

/// How a template takes functions and their calls.
#[derive(Clone, Debug, PartialEq)]
pub struct CallHabits {
    /// How calls are written in answers.
    pub format: CallFormat,
    /// Whether it takes the arguments of earlier calls as the text that the model wrote; if not, as an object.
    pub arguments_as_text: bool,
    /// Whether it takes any id of a call; if not, one of nine letters and digits.
    pub any_id: bool,
}

/// Functions, their arguments and texts that no template has and none takes apart.
const NAMES: [&str; 2] = ["quxify_seven", "zorbla_nine"];
const KEYS: [&str; 2] = ["flimsy_key", "grunto_key"];
const VALUE: &str = "Vexlam5";
const NUMBER: u32 = 73_519;
const SAID: &str = "Krumbel8";
const THOUGHT: &str = "Wuffjam4";
const LONG_ID: &str = "call_00aa11bb22cc33dd_0_0";

/// What an unusual rendering is: nothing. Lack of memory is not the template's fault.
pub fn rendered(render: &Render<'_>, probe: Probe) -> Result<Option<String>> {
    match render(probe) {
        Err(Error::Memory(why)) => Err(Error::Memory(why)),
        text => Ok(text.ok()),
    }
}

fn asked() -> Value {
    json!({"role": "user", "content": "Please."})
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {
            KEYS[0]: {"type": "string", "description": "A text."},
            KEYS[1]: {"type": "integer", "description": "A number."},
        },
        "required": KEYS,
    });
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": "Does.", "parameters": parameters}});
    NAMES.map(tool).to_vec().into()
}

fn arguments() -> Value {
    json!({KEYS[0]: VALUE, KEYS[1]: NUMBER})
}

/// The assistant's message with the first `n` calls.
fn calling(n: usize, as_text: bool, any_id: bool) -> Value {
    let call = |i: usize| {
        let arguments = if as_text { arguments().to_string().into() } else { arguments() };
        json!({"id": id(&format!("{LONG_ID}{i}"), any_id), "type": "function", "function": {"name": NAMES[i], "arguments": arguments}})
    };
    json!({"role": "assistant", "content": "", "tool_calls": (0..n).map(call).collect::<Vec<_>>()})
}

/// An id of a call as a template takes it: the same, or nine letters and digits that are made of it.
pub fn id(id: &str, any: bool) -> String {
    if any {
        return id.to_owned();
    }
    let mut number = xxhash_rust::xxh3::xxh3_64(id.as_bytes());
    let letter = |_| {
        let letter = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[(number % 62) as usize];
        number /= 62;
        char::from(letter)
    };
    (0..9).map(letter).collect()
}

impl CallHabits {
    /// Those of a template; `None` for one that takes no functions, or writes calls in no way that is known.
    ///
    /// # Errors
    /// [`Error::Memory`] if `render` has no memory or time for it.
    pub fn of(render: &Render<'_>) -> Result<Option<CallHabits>> {
        let with = |messages: Vec<Value>| Probe { messages, tools: tools(), prompt: false };
        let told = rendered(render, Probe { messages: vec![asked()], tools: tools(), prompt: true })?;
        if !told.is_some_and(|text| NAMES.iter().all(|name| text.contains(name))) {
            return Ok(None);
        }
        let said = json!({"role": "assistant", "content": SAID});
        let Some(plain) = rendered(render, with(vec![asked(), said]))? else { return Ok(None) };
        for any_id in [true, false] {
            let one = |as_text| rendered(render, with(vec![asked(), calling(1, as_text, any_id)]));
            let Some((format, as_text)) = arguments_in(&plain, one(false)?, one(true)?) else { continue };
            let two = rendered(render, with(vec![asked(), calling(2, as_text, any_id)]))?;
            let join = two.as_ref().and_then(|two| join_of(&plain, two, &format));
            let format = CallFormat { join, ..format };
            let result = json!({
                "role": "tool", "content": SAID, "name": NAMES[0], "tool_call_id": id(&format!("{LONG_ID}0"), any_id)});
            let answered = rendered(render, with(vec![asked(), calling(1, as_text, any_id), result]))?;
            let has_id = format.marks().any(|mark| mark.contains(&id(&format!("{LONG_ID}0"), any_id)));
            if !has_id && answered.is_some_and(|text| text.contains(SAID)) {
                return Ok(Some(CallHabits { format, arguments_as_text: as_text, any_id }));
            }
        }
        Ok(None)
    }
}

/// The format of a call, of its rendering with arguments as an object and as a text; and whether a text is right.
fn arguments_in(plain: &str, object: Option<String>, text: Option<String>) -> Option<(CallFormat, bool)> {
    let format = |rendering: &Option<String>| rendering.as_ref().and_then(|one| format_of(plain, one));
    let Some(found) = format(&object) else {
        // An object that was refused, or is written as Python writes it, was to be a text.
        let is_python = |one: &String| one.contains(&format!("'{}': '{VALUE}'", KEYS[0]));
        return format(&text).filter(|_| object.as_ref().is_none_or(is_python)).map(|format| (format, true));
    };
    let same = format(&text).as_ref() == Some(&found);
    Some((found, same))
}

/// The assistant's part of a rendering and its place: what another rendering, whose text is [`SAID`], has otherwise.
fn answer_in<'a>(plain: &str, rendering: &'a str) -> Option<&'a str> {
    let at = plain.rfind(SAID)?;
    let mut begin = plain.bytes().zip(rendering.bytes()).take_while(|(a, b)| a == b).count().min(at);
    while !rendering.is_char_boundary(begin) {
        begin -= 1;
    }
    // A mark that both begin with belongs to the rest of it.
    if let Some(mark) = rendering[..begin].rfind(['<', '['])
        && !rendering[mark..begin].contains(|c: char| c.is_whitespace() || c == '>' || c == ']')
    {
        begin = mark;
    }
    let (answer, tail) = (&rendering[begin..], &plain[at + SAID.len()..]);
    if let Some(answer) = answer.strip_suffix(tail) {
        return Some(answer);
    }
    // It ends with another token than a text does.
    let answer = answer.trim_end();
    Some(answer.strip_suffix("|>").and_then(|head| Some(&answer[..head.rfind("<|")?])).unwrap_or(answer))
}

/// A call in a rendering: its format, and where its name (or object) begins and its arguments end.
struct Found {
    format: CallFormat,
    begin: usize,
    end: usize,
}

/// The format of the only call of a rendering, if it is read as what it is.
fn format_of(plain: &str, rendering: &str) -> Option<CallFormat> {
    let answer = answer_in(plain, rendering)?;
    let Found { format, .. } = found(answer, NAMES[0])?;
    let opens = !format.is_bare() || matches!(format.body, Body::Object(_));
    (opens && read(answer, &format) == [NAMES[0]]).then_some(format)
}

/// What is between two calls of a rendering, if both are read as what they are.
fn join_of(plain: &str, rendering: &str, format: &CallFormat) -> Option<String> {
    let answer = answer_in(plain, rendering)?;
    let first = found(answer, NAMES[0])?;
    let second = found(&answer[first.end..], NAMES[1])?;
    let join = answer[first.end..first.end + second.begin].to_owned();
    let joined = CallFormat { join: Some(join.clone()), ..format.clone() };
    (read(answer, &joined) == NAMES).then_some(join)
}

/// The functions that are called in an answer, where their arguments are those of the probes.
fn read(answer: &str, format: &CallFormat) -> Vec<String> {
    let schema = tools()[0]["function"]["parameters"].clone();
    let callable = NAMES.map(|name| Callable { name: name.into(), arguments: schema.clone() });
    let reading = Reading { calls: Some((format.clone(), callable.into())), ..Reading::default() };
    let mut reader = Reader::new(&Arc::new(reading));
    // Letter by letter, as an answer comes.
    let mut parts: Vec<Part> =
        answer.trim_start().chars().flat_map(|c| reader.push(c.encode_utf8(&mut [0; 4]))).collect();
    parts.extend(reader.end());
    let (mut names, mut said): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Part::Call(name) => {
                names.push(name);
                said.push(String::new());
            }
            Part::Arguments(more) => said.last_mut().into_iter().for_each(|text| text.push_str(&more)),
            Part::Text(_) | Part::Thought(_) => return Vec::new(),
        }
    }
    let right = said.iter().all(|text| serde_json::from_str(text).is_ok_and(|value: Value| value == arguments()));
    if right { names } else { Vec::new() }
}

/// The JSON object that begins at `at`, and its length.
fn object_at(text: &str, at: usize) -> Option<(Value, usize)> {
    let mut stream = serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>();
    let value = stream.next()?.ok().filter(Value::is_object)?;
    Some((value, stream.byte_offset()))
}

fn braces(text: &str) -> impl Iterator<Item = usize> {
    text.match_indices('{').map(|(at, _)| at)
}

/// Finds the call of function `name` in an answer.
fn found(answer: &str, name: &str) -> Option<Found> {
    let format = |open: usize, body: Body, close: usize| CallFormat {
        open: answer[..open].trim_start().to_owned(),
        body,
        join: None,
        close: answer[close..].trim_end().to_owned(),
    };
    for at in braces(answer) {
        let Some((object, length)) = object_at(answer, at) else { continue };
        let fields = object.as_object()?;
        let key = |is: &dyn Fn(&Value) -> bool| fields.iter().find(|(_, value)| is(value)).map(|(key, _)| key.clone());
        if let (Some(name), Some(arguments)) = (key(&|value| *value == name), key(&|value| *value == arguments())) {
            let (end, body) = (at + length, Body::Object(Keys { name, arguments }));
            return Some(Found { format: format(at, body, end), begin: at, end });
        }
    }
    let begin = answer.find(name)?;
    let behind = begin + name.len();
    for at in braces(&answer[behind..]).map(|at| behind + at) {
        if let Some((object, length)) = object_at(answer, at)
            && object == arguments()
        {
            let (end, between) = (at + length, answer[behind..at].to_owned());
            return Some(Found { format: format(begin, Body::Named { between }, end), begin, end });
        }
    }
    let number = NUMBER.to_string();
    let rest = &answer[behind..];
    let [key, value, second, last] = [KEYS[0], VALUE, KEYS[1], number.as_str()].map(|mark| rest.find(mark));
    let (key, value, second, last) = (key?, value?, second?, last?);
    let (value_end, last_end) = (value + VALUE.len(), last + number.len());
    if !(key < value && value < second && second < last) {
        return None;
    }
    let marks = Marks {
        before: &rest[..key],
        before_value: &rest[key + KEYS[0].len()..value],
        between_values: &rest[value_end..second],
        before_last: &rest[second + KEYS[1].len()..last],
        behind: &rest[last_end..],
    };
    let (body, length) = marks.parameters().or_else(|| marks.list())?;
    let end = behind + last_end + length;
    Some(Found { format: format(begin, body, end), begin, end })
}

/// What is around the names and the values of two arguments, the first of which is a text.
struct Marks<'a> {
    before: &'a str,
    before_value: &'a str,
    between_values: &'a str,
    before_last: &'a str,
    behind: &'a str,
}

impl Marks<'_> {
    /// Arguments between marks of their own, and the length of what belongs to the last one behind its value.
    fn parameters(&self) -> Option<(Body, usize)> {
        let Marks { before, before_value, between_values, before_last, behind } = self;
        let shared = before.bytes().rev().zip(between_values.bytes().rev()).take_while(|(a, b)| a == b).count();
        let mut cut = before.len() - shared;
        while !before.is_char_boundary(cut) {
            cut += 1;
        }
        cut += before[cut..].rfind('<').unwrap_or(0);
        let (between, before_key) = before.split_at(cut);
        let after_value = between_values.strip_suffix(before_key)?;
        let same = before_last == before_value && behind.starts_with(after_value);
        if !same || [*before_value, after_value, before_key].iter().any(|mark| mark.trim().is_empty()) {
            return None;
        }
        let [between, before_key, before_value, after_value] =
            [between, before_key, before_value, after_value].map(str::to_owned);
        let length = after_value.len();
        Some((Body::Parameters { between, before_key, before_value, after_value }, length))
    }

    /// Arguments in a list, and the length of its end.
    fn list(&self) -> Option<(Body, usize)> {
        let quote = self.before_value.strip_prefix(self.before_last)?;
        let join = self.between_values.strip_prefix(quote)?;
        let end = match self.before.trim_end().chars().next_back()? {
            '(' => ")",
            '{' => "}",
            _ => return None,
        };
        if quote.is_empty() || join.trim() != "," || !matches!(self.before_last.trim(), "=" | ":") {
            return None;
        }
        let length = self.behind.starts_with(end).then_some(end.len())?;
        let [begin, is, join, end, quote] = [self.before, self.before_last, join, end, quote].map(str::to_owned);
        Some((Body::List(ListMarks { begin, is, join, end, quote }), length))
    }
}

/// What is around thoughts in most models, and in Gemma 4.
const USUAL_MARKS: [[&str; 2]; 2] = [["<think>", "</think>"], ["<|channel>thought", "<channel|>"]];

/// The texts around thoughts, of a template that renders them, takes them away, or begins an answer with them.
///
/// # Errors
/// [`Error::Memory`] if `render` has no memory or time for it.
pub fn thoughts_of(render: &Render<'_>) -> Result<Option<Thoughts>> {
    let probe = |messages: Vec<Value>, prompt: bool| rendered(render, Probe { messages, tools: Value::Null, prompt });
    let told = json!({"role": "assistant", "content": SAID, "reasoning_content": THOUGHT});
    if let Some(thoughts) = probe(vec![asked(), told], false)?.and_then(|text| around_thought(&text)) {
        return Ok(Some(thoughts));
    }
    let begun = probe(vec![asked()], true)?;
    for [open, close] in USUAL_MARKS {
        let inline = format!("{open}{THOUGHT}{close}{SAID}");
        let inline = probe(vec![asked(), json!({"role": "assistant", "content": inline}), asked()], false)?;
        let taken_away = inline.is_some_and(|text| text.contains(SAID) && !text.contains(THOUGHT));
        if taken_away || begun.as_ref().is_some_and(|text| text.trim_end().ends_with(open)) {
            return Ok(Some(Thoughts { open: open.into(), close: close.into() }));
        }
    }
    Ok(None)
}

fn around_thought(text: &str) -> Option<Thoughts> {
    let at = text.find(THOUGHT)?;
    let before = text[..at].trim_end();
    let behind = text[at + THOUGHT.len()..].trim_start();
    let open = before[before.rfind(['<', '['])?..].to_owned();
    let close = behind[..=behind.find(['>', ']'])?].to_owned();
    let is_mark = |mark: &str| mark.len() > 2 && !mark.contains(char::is_whitespace) && !mark.contains(SAID);
    (is_mark(&open) && is_mark(&close) && open != close && behind.contains(SAID)).then_some(Thoughts { open, close })
}
