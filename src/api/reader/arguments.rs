//! The arguments of a call while they are written: as JSON, between marks, in a list.

use super::{Reader, State, Step, quoted};
use crate::api::arguments::{argument, is_text};
use crate::api::call_format::{Body, CallFormat, Match, begins, words};
use crate::api::json_scan::{Place, ValueScan};
use crate::api::literals::{LiteralScan, Quotes, json_of};
use crate::api::reading::{Part, Reading};
use serde_json::json;
use serde_json::value::RawValue;

impl Reader {
    pub(super) fn json(&mut self) -> Step {
        let State::Json(scan) = &mut self.state else { return Step::Wait };
        let (mut arguments, mut taken, mut over) = (String::new(), 0, false);
        for c in self.rest.chars() {
            let place = scan.take(c);
            over = !matches!(place, Place::Before | Place::Inside);
            if matches!(place, Place::Inside | Place::Last) {
                arguments.push(c);
            }
            taken += if matches!(place, Place::Behind | Place::Bad) { 0 } else { c.len_utf8() };
            if over {
                break;
            }
        }
        self.take(taken);
        self.arguments += arguments.len();
        self.say(Part::Arguments, &arguments);
        if over { self.ended() } else { Step::Wait }
    }

    pub(super) fn parameter(&mut self, format: &CallFormat) -> Step {
        let Body::Parameters { before_key, .. } = &format.body else { return Step::Wait };
        let key = begins(&self.rest, &words(before_key));
        if let Match::Whole(bytes) = key {
            self.take(bytes);
            return self.go(State::Key);
        }
        let end = format.ends(&self.rest);
        if !matches!(end, Match::Whole(_)) && (key == Match::Begun || end == Match::Begun) {
            return Step::Wait;
        }
        if self.arguments > 0 {
            self.say(Part::Arguments, "}");
        }
        self.ended()
    }

    pub(super) fn key(&mut self, reading: &Reading, format: &CallFormat) -> Step {
        let Body::Parameters { before_value, .. } = &format.body else { return Step::Wait };
        let (at, Match::Whole(bytes)) = self.find(&words(before_value)) else { return Step::Wait };
        // The line break belongs to the mark, which shows once something follows.
        let breaks = before_value.ends_with('\n');
        if breaks && self.rest.len() == at + bytes {
            return Step::Wait;
        }
        let key = self.rest[..at].trim().to_owned();
        let line_break = usize::from(breaks && self.rest[at + bytes..].starts_with('\n'));
        self.take(at + bytes + line_break);
        let is_text = self.say_key(reading, &key);
        self.say(Part::Arguments, if is_text { "\"" } else { "" });
        self.go(State::Value { is_text })
    }

    /// Tells an argument's name. Whether its value is a text.
    fn say_key(&mut self, reading: &Reading, key: &str) -> bool {
        let called = self.called.as_deref().and_then(|name| reading.callable(name));
        let is_text = called.and_then(|function| argument(&function.arguments, key)).is_some_and(is_text);
        let before = if self.arguments == 0 { "{" } else { ", " };
        self.arguments += 1;
        self.say(Part::Arguments, &format!("{before}{}: ", json!(key)));
        is_text
    }

    /// The name of the next argument of a list, or the list's end.
    pub(super) fn item(&mut self, reading: &Reading, format: &CallFormat) -> Step {
        let Body::List(marks) = &format.body else { return Step::Wait };
        let from = self.searched;
        let (at, is) = self.find(&words(&marks.is));
        // Behind the last argument, or behind values without names, which belong to none.
        if let Some(end) = self.rest[from..at].find(&marks.end) {
            self.take(from + end + marks.end.len());
            if self.arguments > 0 {
                self.say(Part::Arguments, "}");
            }
            return self.ended();
        }
        let Match::Whole(bytes) = is else { return Step::Wait };
        let around = |c: char| c.is_whitespace() || matches!(c, ',' | '"' | '\'');
        let key = self.rest[..at].trim_matches(around).to_owned();
        self.take(at + bytes);
        let is_text = self.say_key(reading, &key);
        self.go(State::Literal { scan: LiteralScan::new(Quotes::new(&marks.quote)), looked: 0, is_text })
    }

    /// A value of a list, told once it is whole.
    pub(super) fn literal(&mut self, format: &CallFormat) -> Step {
        let (Body::List(marks), State::Literal { scan, looked, is_text }) = (&format.body, &mut self.state) else {
            return Step::Wait;
        };
        let end = self.rest[*looked..].char_indices().find(|(_, c)| scan.take(*c) == Place::Behind);
        let Some((at, _)) = end else {
            *looked = self.rest.len();
            return Step::Wait;
        };
        let (at, is_text) = (*looked + at, *is_text);
        let value = self.take(at);
        self.say(Part::Arguments, &json_of(&value, &Quotes::new(&marks.quote), is_text));
        self.go(State::Item)
    }

    pub(super) fn value(&mut self, format: &CallFormat, is_text: bool) -> Step {
        let Body::Parameters { after_value, .. } = &format.body else { return Step::Wait };
        let (at, found) = self.find(&words(after_value));
        let end = match found {
            // A string may have the mark in it.
            Match::Whole(_) if !is_text && ValueScan::ends_quoted(&self.rest[..at]) => Match::None,
            Match::Whole(bytes) => format.ends_value(&self.rest, at, bytes),
            _ => Match::Begun,
        };
        match end {
            Match::Whole(bytes) => {
                self.end_value(format, is_text, at, bytes);
                self.go(State::Parameter)
            }
            // It is a part of the value.
            Match::None => {
                self.searched = at + self.rest[at..].chars().next().map_or(0, char::len_utf8);
                Step::Again
            }
            Match::Begun => {
                // A text goes on as it comes; anything else is told once it is whole.
                if is_text {
                    let space = &after_value[..after_value.len() - after_value.trim_start().len()];
                    let held = (0..=space.len()).rev().find(|n| self.rest[..at].ends_with(&space[..*n]));
                    let text = self.take(at - held.unwrap_or(0));
                    self.say(Part::Arguments, &quoted(&text));
                }
                Step::Wait
            }
        }
    }

    /// Tells a value that ends at byte `at`, before a mark of so many bytes.
    pub(super) fn end_value(&mut self, format: &CallFormat, is_text: bool, at: usize, bytes: usize) {
        let Body::Parameters { after_value, .. } = &format.body else { return };
        let space = &after_value[..after_value.len() - after_value.trim_start().len()];
        let value = self.rest[..at].strip_suffix(space).unwrap_or(&self.rest[..at]);
        let told = match is_text {
            true => format!("{}\"", quoted(value)),
            false => match serde_json::from_str::<&RawValue>(value.trim()) {
                Ok(json) => json.get().to_owned(),
                Err(_) => json!(value).to_string(),
            },
        };
        self.say(Part::Arguments, &told);
        self.take(at + bytes);
    }

    /// The answer has ended within a value: a mark that nothing follows ends it.
    pub(super) fn last_value(&mut self, format: &CallFormat, is_text: bool) {
        let Body::Parameters { after_value, .. } = &format.body else { return };
        if let (at, Match::Whole(bytes)) = self.find(&words(after_value)) {
            self.end_value(format, is_text, at, bytes);
            self.state = State::Parameter;
        }
    }
}
