//! Values that Python has and minijinja has not (generators, views of dicts, ranges), and Python's `str` and `repr`.

use minijinja::value::{Enumerator, Object, ObjectRepr, Rest, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// An error as an operation of Python's would raise it.
pub fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Python's name of a value's type, for messages.
pub fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Bytes => "bytes",
        ValueKind::Map => "dict",
        _ if value.is_tuple() => "tuple",
        _ if value.downcast_object_ref::<Generator>().is_some() => "generator",
        _ if value.downcast_object_ref::<Range>().is_some() => "range",
        _ => value.downcast_object_ref::<View>().map_or("list", |view| view.name),
    }
}

/// The result of a filter such as `map`: it gives its items once, has no length, and is always true.
#[derive(Debug)]
pub struct Generator(Mutex<std::vec::IntoIter<Value>>);

impl Generator {
    /// The value that gives `items` once.
    pub fn of(items: Vec<Value>) -> Value {
        Value::from_object(Generator(Mutex::new(items.into_iter())))
    }

    /// Python's `next`.
    pub fn next(&self) -> Option<Value> {
        locked(&self.0).next()
    }
}

/// A generator's items that are left; loops know by their number which is the last.
struct Remaining(Arc<Generator>);

impl Iterator for Remaining {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        locked(&self.0.0).size_hint()
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Iter(Box::new(Remaining(self.clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}

/// The result of `dict.keys()` and its like: iterable, with a length, and no sequence.
#[derive(Debug)]
pub struct View {
    /// `dict_keys`, `dict_values` or `dict_items`.
    pub name: &'static str,
    /// Its items.
    pub items: Vec<Value>,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Iter(Box::new(self.items.clone().into_iter()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name, repr(&Value::from(self.items.clone())))
    }
}

/// Python's `range`.
#[derive(Debug)]
pub struct Range {
    start: i64,
    stop: i64,
    step: i64,
}

/// Numbers of a range, at most: as many as Jinja2's sandbox allows.
const MAX_RANGE: i64 = 100_000;

impl Range {
    /// `range(...)`.
    ///
    /// # Errors
    /// Anything but one to three integers, or too many numbers.
    pub fn of(args: Rest<Value>) -> Result<Value, Error> {
        let ints = args
            .iter()
            .map(|v| whole(v).ok_or_else(|| wrong("range takes integers")))
            .collect::<Result<Vec<_>, _>>()?;
        let (start, stop, step) = match ints[..] {
            [stop] => (0, stop, 1),
            [start, stop] => (start, stop, 1),
            [start, stop, step] => (start, stop, step),
            _ => return Err(wrong("range takes one to three integers")),
        };
        if step == 0 {
            return Err(wrong("range takes no step of 0"));
        }
        let range = Range { start, stop, step };
        if range.len() > MAX_RANGE {
            return Err(wrong(format!("range has too many elements; at most {MAX_RANGE} are allowed")));
        }
        Ok(Value::from_object(range))
    }

    fn len(&self) -> i64 {
        let (from, to) = if self.step > 0 { (self.start, self.stop) } else { (self.stop, self.start) };
        let apart = to.saturating_sub(from).max(0);
        let step = self.step.saturating_abs();
        apart / step + i64::from(apart % step > 0)
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = whole(key).filter(|at| (0..self.len()).contains(at))?;
        Some(Value::from(self.start + at * self.step))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len() as usize)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            1 => write!(f, "range({}, {})", self.start, self.stop),
            step => write!(f, "range({}, {}, {step})", self.start, self.stop),
        }
    }
}

/// The value in a mutex, even if a thread that held it has failed.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The integer that Python takes a value for where it wants one.
pub fn whole(value: &Value) -> Option<i64> {
    match value.kind() {
        ValueKind::Bool => Some(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i64::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// The number that a value is; a truth value is one in Python.
pub fn number(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// The items of whatever Python iterates over.
///
/// # Errors
/// A value that is not iterable.
pub fn items(value: &Value) -> Result<Vec<Value>, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Vec::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().chars().map(Value::from).collect()),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => value.try_iter()?.checked().collect(),
        _ => Err(wrong(format!("'{}' object is not iterable", type_name(value)))),
    }
}

/// Whether Jinja2 calls a value a sequence: it has a length and items by index.
pub fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::String | ValueKind::Bytes | ValueKind::Map | ValueKind::Seq | ValueKind::Undefined => true,
        ValueKind::Iterable => {
            value.downcast_object_ref::<Generator>().is_none() && value.downcast_object_ref::<View>().is_none()
        }
        _ => false,
    }
}

/// Python's `str(value)`; nothing for an undefined value.
pub fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::Undefined => String::new(),
        _ => repr(value),
    }
}

/// Python's `repr(value)`.
pub fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(value, &mut out);
    out
}

fn write_repr(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&float(f64::try_from(value.clone()).unwrap_or(f64::NAN)))
        }
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Map if value.as_object().is_some_and(|map| map.try_iter_pairs().is_some()) => {
            out.push('{');
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            for (i, (key, item)) in pairs.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(&key, out);
                out.push_str(": ");
                write_repr(&item, out);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable if is_plain_list(value) => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(item, out);
            }
            out.push_str(if items.len() == 1 && value.is_tuple() { "," } else { "" });
            out.push(close);
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Lists and tuples, and what minijinja makes of them: not generators, views and ranges, which are written otherwise.
pub fn is_plain_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
        && value.downcast_object_ref::<Generator>().is_none()
        && value.downcast_object_ref::<View>().is_none()
        && value.downcast_object_ref::<Range>().is_none()
}

/// A number as Python writes it: the shortest digits that read back as it, with an exponent from 1e16 on and below 1e-4.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
    }
    let shortest = format!("{x:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        e if x != 0.0 && !(-4..16).contains(&e) => format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
        _ => {
            let plain = x.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
    }
}

/// Python's `repr` of a string.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c if (c as u32) < 0x100 => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if (c as u32) < 0x10000 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push_str(&format!("\\U{:08x}", c as u32)),
        }
    }
    out.push(mark);
}

/// Python's `str.isprintable` of one character.
pub fn is_printable(c: char) -> bool {
    // Behind another character, because Rust also escapes a combining one that begins a text. Rust's and Python's unprintable
    // characters are the same: controls, formats, private, unassigned, and all spaces but the common one.
    (' '..='~').contains(&c) || (!c.is_ascii() && String::from_iter(['a', c]).escape_debug().nth(2).is_none())
}

/// A tuple of Python's.
pub fn tuple(items: impl IntoIterator<Item = Value>) -> Value {
    Value::from(Tuple::from(items.into_iter().collect::<Vec<_>>()))
}

/// A dict of Python's, in this order.
pub fn dict(pairs: impl IntoIterator<Item = (Value, Value)>) -> Value {
    Value::from_pairs(pairs)
}

/// A text with HTML's five characters as entities.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}
