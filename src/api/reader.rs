//! Reads an answer while it comes: thoughts, text, and calls of functions in the model's own format.

mod arguments;

use super::call_format::{Body, CallFormat, ListMarks, Match, begins, find, words};
use super::json_scan::{CallScan, Goes, ValueScan};
use super::literals::LiteralScan;
use super::reading::{Part, Reading, Thoughts};
use serde_json::json;
use std::sync::Arc;

/// Where an answer is.
#[derive(Clone, Debug)]
enum State {
    /// Before anything but white space; thoughts may come first if `true`.
    Begin(bool),
    Thought,
    Text,
    Object(CallScan),
    Name,
    Json(ValueScan),
    /// Before the next argument.
    Parameter,
    Key,
    Value {
        is_text: bool,
    },
    /// In a list of arguments, before the next one.
    Item,
    /// In a value of the list, of which so many bytes were looked at.
    Literal {
        scan: LiteralScan,
        looked: usize,
        is_text: bool,
    },
    /// Behind a call's arguments.
    Behind,
}

/// What a step did.
#[derive(PartialEq)]
enum Step {
    /// The rest may be more than it was.
    Again,
    /// More text is needed.
    Wait,
}

/// Reads one answer.
pub struct Reader {
    reading: Arc<Reading>,
    state: State,
    /// What was not read yet.
    rest: String,
    /// Bytes of it in which no mark begins that is looked for.
    searched: usize,
    /// Whether thoughts have begun that are not over.
    thinks: bool,
    /// What was read of a call before its name: text, if there is no such function.
    held: String,
    /// The function that is being called.
    called: Option<String>,
    /// Arguments of the call so far.
    arguments: usize,
    calls: usize,
    parts: Vec<Part>,
}

impl Reader {
    /// Before the answer's first piece.
    pub fn new(reading: &Arc<Reading>) -> Reader {
        let state = match (reading.is_plain(), reading.thinking) {
            (true, _) => State::Text,
            (false, true) => State::Thought,
            (false, false) => State::Begin(reading.thoughts.is_some()),
        };
        Reader {
            reading: reading.clone(),
            state,
            rest: String::new(),
            searched: 0,
            thinks: false,
            held: String::new(),
            called: None,
            arguments: 0,
            calls: 0,
            parts: Vec::new(),
        }
    }

    /// Takes the answer's next piece.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.rest.push_str(text);
        while self.step() == Step::Again {}
        std::mem::take(&mut self.parts)
    }

    /// The answer has ended.
    pub fn end(&mut self) -> Vec<Part> {
        let reading = self.reading.clone();
        if let (State::Value { is_text }, Some((format, _))) = (&self.state, &reading.calls) {
            let is_text = *is_text;
            self.last_value(format, is_text);
        }
        let unclosed = reading.calls.as_ref().is_some_and(|(format, _)| format.close.trim().is_empty());
        let rest = std::mem::take(&mut self.rest);
        match self.state {
            State::Thought => self.say(Part::Thought, rest.trim_end()),
            State::Begin(_) | State::Text if self.calls > 0 && rest.trim().is_empty() => {}
            State::Begin(_) | State::Text => self.say(Part::Text, &rest),
            _ if self.called.is_none() && !matches!(self.state, State::Behind) => {
                let held = std::mem::take(&mut self.held);
                self.say(Part::Text, &(held + &rest));
            }
            State::Value { is_text: true } => self.say(Part::Arguments, &quoted(&rest)),
            // Nothing else ends such a call.
            State::Parameter if unclosed => self.say(Part::Arguments, if self.arguments > 0 { "}" } else { "{}" }),
            _ => {}
        }
        std::mem::take(&mut self.parts)
    }

    fn say(&mut self, part: impl Fn(String) -> Part, text: &str) {
        if !text.is_empty() {
            self.parts.push(part(text.to_owned()));
        }
    }

    /// Goes on reading in another state.
    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::Again
    }

    /// Takes the first bytes of what was not read yet.
    fn take(&mut self, bytes: usize) -> String {
        self.searched = 0;
        self.rest.drain(..bytes).collect()
    }

    /// Looks for words in what was not read yet, but not again where there were none.
    fn find(&mut self, words: &[String]) -> (usize, Match) {
        let found = find(&self.rest, self.searched, words);
        self.searched = found.0;
        found
    }

    fn step(&mut self) -> Step {
        let reading = self.reading.clone();
        match (&mut self.state, &reading.calls) {
            (State::Begin(thoughts), calls) => {
                let thoughts = *thoughts;
                self.begin(thoughts, calls.as_ref().map(|(format, _)| format))
            }
            (State::Thought, _) => self.thought(&reading),
            (State::Text, None) => self.text(None),
            (State::Text, Some((format, _))) => self.text(Some(format).filter(|format| !format.is_bare())),
            (State::Object(_), Some((format, _))) => self.object(&reading, format),
            (State::Name, Some((format, _))) => self.name(&reading, format),
            (State::Json(_), _) => self.json(),
            (State::Parameter, Some((format, _))) => self.parameter(format),
            (State::Key, Some((format, _))) => self.key(&reading, format),
            (State::Value { is_text }, Some((format, _))) => {
                let is_text = *is_text;
                self.value(format, is_text)
            }
            (State::Item, Some((format, _))) => self.item(&reading, format),
            (State::Literal { .. }, Some((format, _))) => self.literal(format),
            (State::Behind, Some((format, _))) => self.behind(format),
            _ => Step::Wait,
        }
    }

    fn begin(&mut self, thoughts: bool, format: Option<&CallFormat>) -> Step {
        if let Some(marks) = self.reading.thoughts.clone() {
            match begins(&self.rest, &[marks.open]) {
                // White space behind thoughts is no text.
                _ if !thoughts => _ = self.take(self.rest.len() - self.rest.trim_start().len()),
                Match::Begun => return Step::Wait,
                Match::Whole(bytes) => {
                    self.take(bytes);
                    return self.go(State::Thought);
                }
                Match::None => {}
            }
        }
        if self.rest.is_empty() {
            return Step::Wait;
        }
        let Some(format) = format.filter(|format| format.is_bare()) else { return self.go(State::Text) };
        let mut opening = format.opening();
        if matches!(format.body, Body::Object(_)) {
            opening.push("{".into());
        }
        match begins(&self.rest, &opening) {
            Match::Begun => Step::Wait,
            Match::None => self.go(State::Text),
            Match::Whole(bytes) => {
                // The brace is the object's.
                let brace = usize::from(matches!(format.body, Body::Object(_)));
                self.held = self.take(bytes - brace);
                self.call(format)
            }
        }
    }

    fn thought(&mut self, reading: &Reading) -> Step {
        let Some(Thoughts { close, .. }) = &reading.thoughts else { return self.go(State::Text) };
        if !self.thinks {
            self.take(self.rest.len() - self.rest.trim_start().len());
        }
        let (at, found) = self.find(std::slice::from_ref(close));
        let thought = self.rest[..at].trim_end().to_owned();
        self.thinks |= !thought.is_empty();
        self.say(Part::Thought, &thought);
        let Match::Whole(bytes) = found else {
            self.take(thought.len());
            return Step::Wait;
        };
        self.take(at + bytes);
        self.thinks = false;
        self.go(State::Begin(false))
    }

    /// Text up to the next call, without the white space before that.
    fn text(&mut self, format: Option<&CallFormat>) -> Step {
        let Some(format) = format else {
            if self.calls > 0 && self.rest.trim().is_empty() {
                return Step::Wait;
            }
            let rest = std::mem::take(&mut self.rest);
            self.say(Part::Text, &rest);
            return Step::Wait;
        };
        let (at, found) = self.find(&format.opening());
        let text = self.rest[..at].trim_end().to_owned();
        self.say(Part::Text, &text);
        self.take(text.len());
        let Match::Whole(bytes) = found else { return Step::Wait };
        self.held = self.take(at - text.len() + bytes);
        self.call(format)
    }

    /// A call's body follows.
    fn call(&mut self, format: &CallFormat) -> Step {
        (self.called, self.arguments) = (None, 0);
        self.go(match &format.body {
            Body::Object(keys) => State::Object(CallScan::new(keys)),
            Body::Named { .. } | Body::Parameters { .. } | Body::List(_) => State::Name,
        })
    }

    /// The function's name is known. Whether there is such a function.
    fn announce(&mut self, reading: &Reading, name: &str) -> bool {
        let known = reading.callable(name).is_some();
        if known {
            self.held.clear();
            self.calls += 1;
            self.called = Some(name.to_owned());
            self.parts.push(Part::Call(name.to_owned()));
        }
        known
    }

    /// It was no call.
    fn back_out(&mut self) -> Step {
        let held = std::mem::take(&mut self.held);
        self.say(Part::Text, &held);
        self.go(State::Text)
    }

    fn object(&mut self, reading: &Reading, format: &CallFormat) -> Step {
        let State::Object(mut scan) = std::mem::replace(&mut self.state, State::Text) else { return Step::Wait };
        let (mut goes, mut taken, mut arguments) = (Goes::On, 0, String::new());
        for c in self.rest.chars() {
            taken += c.len_utf8();
            goes = scan.take(c);
            // Nothing marks a call, so what begins otherwise is text.
            if goes == Goes::On && format.is_bare() && !scan.may_be_call() {
                goes = Goes::Wrong;
            }
            if goes != Goes::On {
                break;
            }
        }
        let read = self.take(taken);
        if self.called.is_none() {
            self.held.push_str(&read);
            match scan.name.clone() {
                None if goes == Goes::On => {}
                Some(name) if goes != Goes::Wrong && self.announce(reading, &name) => {}
                _ => return self.back_out(),
            }
        }
        if self.called.is_some() {
            arguments.push_str(&std::mem::take(&mut scan.arguments));
            self.arguments += arguments.len();
            self.say(Part::Arguments, &arguments);
        }
        match goes {
            Goes::On => {
                self.state = State::Object(scan);
                Step::Wait
            }
            Goes::Wrong => self.go(State::Text),
            Goes::Ended => self.ended(),
        }
    }

    /// A call is complete.
    fn ended(&mut self) -> Step {
        if self.arguments == 0 {
            self.say(Part::Arguments, "{}");
        }
        self.go(State::Behind)
    }

    fn name(&mut self, reading: &Reading, format: &CallFormat) -> Step {
        let begin = self.rest.len() - self.rest.trim_start().len();
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let Some(length) = self.rest[begin..].find(|c| !is_part(c)) else {
            let may_be = reading.may_call(&self.rest[begin..]);
            return if may_be { Step::Wait } else { self.back_out() };
        };
        let (name, behind) = self.rest[begin..].split_at(length);
        let name = name.to_owned();
        if reading.callable(&name).is_none() {
            return self.back_out();
        }
        let (between, next) = match &format.body {
            Body::Parameters { between, .. } => (between, State::Parameter),
            Body::Named { between } => (between, State::Json(ValueScan::default())),
            Body::List(ListMarks { begin, .. }) => (begin, State::Item),
            Body::Object(_) => return self.back_out(),
        };
        match begins(behind, &words(between)) {
            Match::Begun => Step::Wait,
            Match::None => self.back_out(),
            Match::Whole(bytes) => {
                self.take(begin + length + bytes);
                self.announce(reading, &name);
                self.go(next)
            }
        }
    }

    fn behind(&mut self, format: &CallFormat) -> Step {
        let close = match words(&format.close) {
            none if none.is_empty() => Match::None,
            close => begins(&self.rest, &close),
        };
        let join = match format.join.as_deref().map(words) {
            None => Match::None,
            // White space alone is between two calls where something else is behind the last one.
            Some(join) if join.is_empty() && self.rest.trim_start().is_empty() => Match::Begun,
            Some(join) if join.is_empty() && (close != Match::None || format.close.trim().is_empty()) => Match::None,
            Some(join) => begins(&self.rest, &join),
        };
        match (close, join) {
            (Match::Whole(bytes), _) => {
                self.take(bytes);
                self.go(State::Text)
            }
            (_, Match::Whole(bytes)) => {
                self.held = self.take(bytes);
                self.call(format)
            }
            (Match::Begun, _) | (_, Match::Begun) => Step::Wait,
            (Match::None, Match::None) => self.go(State::Text),
        }
    }
}

/// A text as JSON writes it within quotes.
fn quoted(text: &str) -> String {
    let json = json!(text).to_string();
    json[1..json.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::json_scan::Keys;
    use crate::api::reading::Callable;

    fn format(open: &str, body: Body, join: Option<&str>, close: &str) -> CallFormat {
        CallFormat { open: open.into(), body, join: join.map(str::to_owned), close: close.into() }
    }

    fn object(name: &str, arguments: &str) -> Body {
        Body::Object(Keys { name: name.into(), arguments: arguments.into() })
    }

    fn parameters(between: &str, before_key: &str, before_value: &str, after_value: &str) -> Body {
        let [between, before_key, before_value, after_value] =
            [between, before_key, before_value, after_value].map(str::to_owned);
        Body::Parameters { between, before_key, before_value, after_value }
    }

    /// What is read of an answer: its thoughts, its text, and its calls with their arguments; whole and letter by letter.
    fn read(
        format: Option<CallFormat>,
        thoughts: bool,
        thinking: bool,
        text: &str,
    ) -> (String, String, Vec<(String, String)>) {
        let schema = json!({"properties": {"place": {"type": "string"}, "days": {"type": "integer"}}});
        let callable = ["weather", "clock"].map(|name| Callable { name: name.into(), arguments: schema.clone() });
        let marks = Thoughts { open: "<think>".into(), close: "</think>".into() };
        let reading = Arc::new(Reading {
            calls: format.map(|format| (format, callable.into())),
            thoughts: thoughts.then_some(marks),
            thinking,
        });
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let [whole, letters] = [vec![text.to_owned()], letters].map(|pieces| {
            let mut reader = Reader::new(&reading);
            let mut said = (String::new(), String::new(), Vec::<(String, String)>::new());
            let mut parts: Vec<Part> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
            parts.extend(reader.end());
            for part in parts {
                match part {
                    Part::Thought(more) => said.0 += &more,
                    Part::Text(more) => said.1 += &more,
                    Part::Call(name) => said.2.push((name, String::new())),
                    Part::Arguments(more) => said.2.last_mut().unwrap().1 += &more,
                }
            }
            said
        });
        assert_eq!(whole, letters, "{text}");
        whole
    }

    fn calls(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string())).collect()
    }

    #[test]
    fn calls_are_read_in_every_format_with_text_around_them() {
        let rome = r#"{"place": "Ro\"me\n<x>", "days": 2}"#;
        let both = calls(&[("weather", rome), ("clock", "{}")]);
        let hermes = format(
            "<tool_call>\n",
            object("name", "arguments"),
            Some("\n</tool_call>\n<tool_call>\n"),
            "\n</tool_call>",
        );
        for text in [
            format!(
                "Hi.\n<tool_call>\n{{\"name\": \"weather\", \"arguments\": {rome}}}\n</tool_call>\n<tool_call>\n{{\"name\": \"clock\", \"arguments\": {{}}}}\n</tool_call>"
            ),
            format!(
                "Hi. <tool_call>{{\"arguments\":{rome},\"name\":\"weather\"}}</tool_call><tool_call>{{\"name\":\"clock\"}}</tool_call>\n"
            ),
        ] {
            assert_eq!(read(Some(hermes.clone()), false, false, &text), (String::new(), "Hi.".into(), both.clone()));
        }
        let xml = format(
            "<tool_call>\n<function=",
            parameters(">\n", "<parameter=", ">\n", "\n</parameter>\n"),
            None,
            "</function>\n</tool_call>",
        );
        for text in [
            "<tool_call>\n<function=weather>\n<parameter=place>\nRo\"me\n<x>\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
            "<tool_call><function=weather><parameter=place>Ro\"me\n<x></parameter><parameter=days>2</parameter></function></tool_call><tool_call><function=clock></function></tool_call>",
        ] {
            assert_eq!(read(Some(xml.clone()), false, false, text), (String::new(), String::new(), both.clone()));
        }
        let mistral = format("[TOOL_CALLS]", Body::Named { between: "[ARGS]".into() }, Some("[TOOL_CALLS]"), "");
        let text = format!("[TOOL_CALLS]weather[ARGS]{rome}[TOOL_CALLS]clock[ARGS]{{}}");
        assert_eq!(read(Some(mistral), false, false, &text).2, both);
        let list = format("[TOOL_CALLS] [", object("name", "arguments"), Some(", "), "]");
        let text = format!(
            "[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {rome}, \"id\": \"x\"}}, {{\"name\": \"clock\", \"arguments\": {{}}}}]"
        );
        assert_eq!(read(Some(list), false, false, &text), (String::new(), String::new(), both.clone()));
        let glm = format(
            "<tool_call>",
            parameters("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            None,
            "</tool_call>",
        );
        let text = "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Ro\"me\n<x></arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>";
        assert_eq!(read(Some(glm), false, false, text).2, both);
        let llama = format("", object("name", "parameters"), None, "");
        let text = format!("{{\"name\": \"weather\", \"parameters\": {rome}}}\n");
        assert_eq!(read(Some(llama), false, false, &text), (String::new(), String::new(), calls(&[("weather", rome)])));
    }

    fn xml(close: &str) -> CallFormat {
        let body = parameters(">\n", "<parameter=", ">\n", "\n</parameter>\n");
        format("<tool_call>\n<function=", body, None, close)
    }

    #[test]
    fn a_value_has_all_before_the_mark_that_ends_it() {
        let close = "</function>\n</tool_call>";
        for place in [
            "a</parameter>b",
            "</parameter>",
            "a\n</parameter> b",
            "\n\n",
            "",
            "<parameter=days>",
            "a</parameter>\n\n</param",
        ] {
            let text = format!(
                "<tool_call>\n<function=weather>\n<parameter=place>\n{place}\n</parameter>\n<parameter=days>\n2\n</parameter>\n{close} Well."
            );
            let arguments =
                json!({"place": place, "days": 2}).to_string().replace("\":", "\": ").replace(",\"", ", \"");
            assert_eq!(
                read(Some(xml(close)), false, false, &text),
                (String::new(), " Well.".into(), calls(&[("weather", &arguments)]))
            );
        }
        // The second word of a mark need not follow the first.
        let body = parameters("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n<end>\n");
        let glm = format("<tool_call>", body, None, "</tool_call>");
        let text = "<tool_call>weather\n<arg_key>a</arg_key>b</arg_key>\n<arg_value>x</arg_value>\ny</arg_value>\n<end>\n</tool_call>";
        let wanted = calls(&[("weather", r#"{"a</arg_key>b": "x</arg_value>\ny"}"#)]);
        assert_eq!(read(Some(glm), false, false, text).2, wanted);
    }

    #[test]
    fn a_call_without_a_closing_mark_ends_with_the_answer() {
        let two =
            "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>";
        let wanted = calls(&[("weather", r#"{"place": "Rome", "days": 2}"#)]);
        for end in ["", "\n", "\n\n"] {
            assert_eq!(read(Some(xml("")), false, false, &format!("{two}{end}")).2, wanted, "{end:?}");
        }
        assert_eq!(read(Some(xml("")), false, false, "<tool_call>\n<function=clock>\n").2, calls(&[("clock", "{}")]));
        let more = read(Some(xml("")), false, false, &format!("{two}\nWell."));
        assert_eq!((more.1.trim(), more.2), ("Well.", wanted));
    }

    /// Each piece had the whole value searched again: a value of 256 KiB took minutes.
    #[test]
    fn a_long_value_is_searched_once() {
        let schema = json!({"properties": {"list": {"type": "array"}}});
        let callable = vec![Callable { name: "f".into(), arguments: schema }];
        let reading = Reading { calls: Some((xml("</function>\n</tool_call>"), callable)), ..Reading::default() };
        let mut reader = Reader::new(&Arc::new(reading));
        reader.push("<tool_call>\n<function=f>\n<parameter=list>\n[");
        for _ in 0..10_000 {
            reader.push("é<");
            assert!(reader.rest.len() - reader.searched < 16);
        }
    }

    #[test]
    fn what_is_no_call_is_text() {
        let hermes = || Some(format("<tool_call>\n", object("name", "arguments"), None, "\n</tool_call>"));
        for text in [
            "a <tool_call> b",
            "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"weather",
            "<tool_",
            "<tool_call>\n{\"a\": 1}",
            "x\n ",
            "{\"name\": \"weather\", \"arguments\": {}}",
        ] {
            assert_eq!(read(hermes(), false, false, text), (String::new(), text.into(), vec![]));
        }
        let told = || Some(CallFormat::told());
        for text in
            ["Say {\"name\": \"weather\", \"arguments\": {}}", "{\"verdict\": 1}", "{\"name\": \"x\"}", " {", "{}"]
        {
            assert_eq!(read(told(), false, false, text), (String::new(), text.into(), vec![]));
        }
        // One that was cut off behind its name is a call as far as it goes.
        let cut = read(hermes(), false, false, "<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Ro");
        assert_eq!(cut.2, calls(&[("weather", "{\"place\": \"Ro")]));
    }

    #[test]
    fn thoughts_are_read_apart_from_what_follows_them() {
        let said = |thought: &str, text: &str| (thought.to_owned(), text.to_owned(), vec![]);
        assert_eq!(read(None, true, false, "<think>\nHm. \n</think>\n\nYes"), said("Hm.", "Yes"));
        assert_eq!(read(None, true, true, "\nHm.\n\nWell</think>Yes"), said("Hm.\n\nWell", "Yes"));
        assert_eq!(read(None, true, true, "Hm. </thi"), said("Hm. </thi", ""));
        assert_eq!(read(None, true, false, " Yes <think>"), said("", " Yes <think>"));
        assert_eq!(read(None, true, false, "<think></think>Yes"), said("", "Yes"));
        let call = "Hm.</think>\n\n{\"name\": \"clock\", \"arguments\": {}}";
        let wanted = ("Hm.".to_owned(), String::new(), calls(&[("clock", "{}")]));
        assert_eq!(read(Some(CallFormat::told()), true, true, call), wanted);
    }
}
