//! Reads JSON while it is written: how far a value goes, and a call's name and arguments in an object.

use serde::{Deserialize, Serialize};

/// The names under which an object has a call's name and arguments.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Keys {
    /// The function's name.
    pub name: String,
    /// Its arguments.
    pub arguments: String,
}

/// How far a JSON value goes.
#[derive(Clone, Debug, Default)]
pub struct ValueScan {
    depth: usize,
    quoted: bool,
    escaped: bool,
    begun: bool,
}

/// What a character is to a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// White space before it.
    Before,
    /// A part of it.
    Inside,
    /// Its last character.
    Last,
    /// It ended before this character: a number or a word.
    Behind,
    /// It makes the text no value.
    Bad,
}

impl ValueScan {
    /// Whether a text that is a value so far ends within a string.
    pub fn ends_quoted(text: &str) -> bool {
        let mut scan = ValueScan::default();
        text.chars().all(|c| matches!(scan.take(c), Place::Before | Place::Inside)) && scan.quoted
    }

    /// Takes the value's next character.
    pub fn take(&mut self, c: char) -> Place {
        if !self.begun && c.is_ascii_whitespace() {
            return Place::Before;
        }
        let first = !std::mem::replace(&mut self.begun, true);
        if self.quoted {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.quoted = false;
                    return if self.depth == 0 { Place::Last } else { Place::Inside };
                }
                _ => {}
            }
            return Place::Inside;
        }
        match c {
            '"' if first || self.depth > 0 => self.quoted = true,
            '{' | '[' if first || self.depth > 0 => self.depth += 1,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                return if self.depth == 0 { Place::Last } else { Place::Inside };
            }
            _ if self.depth > 0 => {}
            ',' | '}' | ']' if !first => return Place::Behind,
            c if c.is_ascii_whitespace() => return Place::Behind,
            c if c.is_ascii_alphanumeric() || "+-.".contains(c) => {}
            _ => return Place::Bad,
        }
        Place::Inside
    }
}

/// A call's object while it is written.
#[derive(Clone, Debug)]
pub struct CallScan {
    keys: Keys,
    at: At,
    /// The key or value that is being written.
    text: String,
    key: String,
    value: ValueScan,
    /// The name, once it is there.
    pub name: Option<String>,
    /// Characters of the arguments that were not taken yet.
    pub arguments: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Brace,
    Key,
    Colon,
    Value,
    Comma,
}

/// How an object goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goes {
    /// More is to come.
    On,
    /// It is complete.
    Ended,
    /// It is no call.
    Wrong,
}

impl CallScan {
    /// An object of which nothing has been read.
    pub fn new(keys: &Keys) -> CallScan {
        CallScan {
            keys: keys.clone(),
            at: At::Brace,
            text: String::new(),
            key: String::new(),
            value: ValueScan::default(),
            name: None,
            arguments: String::new(),
        }
    }

    /// Whether it has the name first, as far as it goes.
    pub fn may_be_call(&self) -> bool {
        let begun = self.text.strip_prefix('"').is_none_or(|key| self.keys.name.starts_with(key.trim_end_matches('"')));
        self.name.is_some()
            || if self.at == At::Key { begun } else { self.at == At::Brace || self.key == self.keys.name }
    }

    /// Takes the next character.
    pub fn take(&mut self, c: char) -> Goes {
        match self.at {
            At::Value => return self.in_value(c),
            At::Key => match self.value.take(c) {
                Place::Before => {}
                Place::Inside if !self.text.is_empty() || c == '"' => self.text.push(c),
                Place::Last => {
                    self.text.push(c);
                    self.key = serde_json::from_str(&std::mem::take(&mut self.text)).unwrap_or_default();
                    self.at = At::Colon;
                }
                // An empty object is no call.
                _ => return Goes::Wrong,
            },
            _ if c.is_ascii_whitespace() => {}
            At::Brace if c == '{' => self.begin(At::Key),
            At::Colon if c == ':' => self.begin(At::Value),
            At::Comma if c == ',' => self.begin(At::Key),
            At::Comma if c == '}' => return if self.name.is_some() { Goes::Ended } else { Goes::Wrong },
            _ => return Goes::Wrong,
        }
        Goes::On
    }

    fn begin(&mut self, at: At) {
        (self.at, self.value) = (at, ValueScan::default());
    }

    fn in_value(&mut self, c: char) -> Goes {
        let place = self.value.take(c);
        let is_arguments = self.key == self.keys.arguments;
        if matches!(place, Place::Inside | Place::Last) {
            // Arguments that are a text with JSON in it are told once they are whole.
            match is_arguments && !self.text.starts_with('"') && !(self.text.is_empty() && c == '"') {
                true => {
                    if self.text.is_empty() {
                        self.text.push(c);
                    }
                    self.arguments.push(c);
                }
                false => self.text.push(c),
            }
        }
        match place {
            Place::Before | Place::Inside => return Goes::On,
            Place::Bad => return Goes::Wrong,
            Place::Last | Place::Behind => {}
        }
        let text = std::mem::take(&mut self.text);
        if is_arguments && text.starts_with('"') {
            self.arguments.push_str(&serde_json::from_str::<String>(&text).unwrap_or_default());
        } else if self.key == self.keys.name {
            match serde_json::from_str(&text) {
                Ok(name) => self.name = Some(name),
                Err(_) => return Goes::Wrong,
            }
        }
        self.at = At::Comma;
        if place == Place::Behind { self.take(c) } else { Goes::On }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys { name: "name".into(), arguments: "arguments".into() }
    }

    #[test]
    fn a_call_is_read_in_any_order_with_whatever_else_and_letter_by_letter() {
        for (text, arguments) in [
            (r#"{"name": "f", "arguments": {"a": [1, "}\"{"], "b": 1E400}}"#, r#"{"a": [1, "}\"{"], "b": 1E400}"#),
            (r#"{"id": 7, "arguments":{}, "x": {"name": "g"}, "name":"f" }"#, "{}"),
            (r#"{"name": "f", "arguments": "{\"a\": 1}", "n": null}"#, r#"{"a": 1}"#),
            (r#"{"name": "f"}"#, ""),
        ] {
            let mut scan = CallScan::new(&keys());
            let goes: Vec<Goes> = text.chars().map(|c| scan.take(c)).collect();
            assert!(goes[..goes.len() - 1].iter().all(|goes| *goes == Goes::On), "{text}: {goes:?}");
            assert_eq!(goes.last(), Some(&Goes::Ended), "{text}");
            assert_eq!((scan.name.as_deref(), scan.arguments.as_str()), (Some("f"), arguments));
        }
        for wrong in ["x", "[", "{}", "{1", r#"{"a" 1"#, r#"{"name": 5,"#, r#"{"a": 1}"#, r#"{"a": }"#] {
            let mut scan = CallScan::new(&keys());
            assert!(wrong.chars().any(|c| scan.take(c) == Goes::Wrong), "{wrong}");
        }
    }
}
