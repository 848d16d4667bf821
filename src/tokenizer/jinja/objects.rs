//! Objects of Python and Jinja2 that minijinja has not: the class `dict`, bound methods, `cycler` and `joiner`.

use super::args::split;
use super::values::{dict, items, locked, type_name, wrong};
use minijinja::value::{Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Python's `dict`, the class. Jinja2 takes `dict.name` for `dict['name']` where there is no such attribute, which Python takes for a type
/// that makes dicts: a published template calls `dict.from_keys(pairs)`.
#[derive(Debug)]
pub struct DictType;

impl Object for DictType {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (placed, named) = split(args);
        let mut all = Vec::new();
        match placed {
            [] => {}
            [map] if map.kind() == ValueKind::Map => {
                all.extend(map.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten());
            }
            [pairs] => {
                for pair in items(pairs)? {
                    match &items(&pair)?[..] {
                        [key, item] => all.push((key.clone(), item.clone())),
                        _ => return Err(wrong("dict takes pairs")),
                    }
                }
            }
            _ => return Err(wrong("dict takes at most one argument by place")),
        }
        all.extend(named.into_iter().map(|(name, value)| (Value::from(name), value)));
        Ok(dict(all))
    }

    fn call_method(self: &Arc<Self>, state: &mut State, method: &str, args: &[Value]) -> Result<Value, Error> {
        match method {
            "fromkeys" => dict([]).call_method(state, method, args),
            _ => self.call(state, args),
        }
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<class 'dict'>")
    }
}

/// A method that is named and not called: `word.upper`.
#[derive(Debug)]
pub struct BoundMethod {
    /// The value that it is a method of.
    pub of: Value,
    /// Its name.
    pub name: String,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        self.of.call_method(state, &self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {} of {} object>", self.name, type_name(&self.of))
    }
}

/// Jinja2's `cycler`.
#[derive(Debug)]
pub struct Cycler {
    items: Vec<Value>,
    at: Mutex<usize>,
}

impl Cycler {
    /// `cycler(...)`.
    ///
    /// # Errors
    /// No items.
    pub fn of(args: Rest<Value>) -> Result<Value, Error> {
        match args.is_empty() {
            true => Err(wrong("at least one item has to be provided")),
            false => Ok(Value::from_object(Cycler { items: args.0, at: Mutex::new(0) })),
        }
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.items[*locked(&self.at)].clone())
    }

    fn call_method(self: &Arc<Self>, _: &mut State, method: &str, _: &[Value]) -> Result<Value, Error> {
        let mut at = locked(&self.at);
        match method {
            "next" => {
                let item = self.items[*at].clone();
                *at = (*at + 1) % self.items.len();
                Ok(item)
            }
            "reset" => {
                *at = 0;
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// Jinja2's `joiner`.
#[derive(Debug)]
pub struct Joiner {
    separator: Value,
    used: Mutex<bool>,
}

impl Joiner {
    /// `joiner(...)`.
    pub fn of(separator: Option<Value>) -> Value {
        Value::from_object(Joiner { separator: separator.unwrap_or_else(|| ", ".into()), used: Mutex::new(false) })
    }
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        match std::mem::replace(&mut *locked(&self.used), true) {
            true => Ok(self.separator.clone()),
            false => Ok("".into()),
        }
    }
}
