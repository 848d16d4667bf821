//! `tojson` as transformers has it: Python's `json.dumps`.

use super::args::{bind, flag, needed};
use super::values::{float, is_plain_list, items, text, type_name, whole, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

/// Spaces of an indent, at most: deeper than any real template indents; `indent=4000000000` is an attack.
const MAX_INDENT: i64 = 16;

struct Writer {
    ascii: bool,
    indent: Option<String>,
    between: String,
    behind_key: String,
    sort: bool,
    out: String,
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
///
/// # Errors
/// A value that JSON cannot hold, or arguments that mean nothing.
pub fn to_json(args: &[Value]) -> Result<Value, Error> {
    let names = ["value", "ensure_ascii", "indent", "separators", "sort_keys"];
    let [value, ascii, indent, separators, sort] = bind("tojson", args, names)?;
    let given = |value: Option<Value>| value.filter(|value| !value.is_none());
    let indent = match given(indent) {
        None => None,
        Some(text) if text.as_str().is_some_and(|s| s.len() <= MAX_INDENT as usize) => Some(text.to_string()),
        Some(n) => match whole(&n).filter(|n| *n <= MAX_INDENT) {
            Some(n) => Some(" ".repeat(n.max(0) as usize)),
            None => return Err(wrong(format!("tojson takes an indent of at most {MAX_INDENT}"))),
        },
    };
    let (between, behind_key) = match given(separators) {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => match &items(&pair)?[..] {
            [between, behind_key] => (text(between), text(behind_key)),
            _ => return Err(wrong("tojson takes two separators")),
        },
    };
    let (ascii, sort) = (flag(ascii.as_ref()), flag(sort.as_ref()));
    let mut writer = Writer { ascii, indent, between, behind_key, sort, out: String::new() };
    writer.value(&needed("tojson", value)?, 0)?;
    Ok(Value::from(writer.out))
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&scalar(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map if !super::methods::is_namespace(value) => self.map(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable if is_plain_list(value) => {
                let items = items(value)?;
                self.all('[', ']', &items, depth, Writer::value)?;
            }
            _ => return Err(wrong(format!("Object of type {} is not JSON serializable", type_name(value)))),
        }
        Ok(())
    }

    // Apart, so that lists, which nest deepest, take little of the stack.
    #[inline(never)]
    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
        let mut pairs: Vec<(Value, Value)> = pairs.collect();
        if self.sort {
            super::operators::sort(&mut pairs, false)?;
        }
        self.all('{', '}', &pairs, depth, |writer, (key, item), depth| {
            let key = match key.kind() {
                ValueKind::String => text(key),
                ValueKind::None => "null".into(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
                ValueKind::Number => scalar(key),
                _ => return Err(wrong(format!("keys must be str, int, float, bool or None, not {}", type_name(key)))),
            };
            writer.string(&key);
            let behind_key = writer.behind_key.clone();
            writer.out.push_str(&behind_key);
            writer.value(item, depth)
        })
    }

    fn all<T>(
        &mut self,
        open: char,
        close: char,
        items: &[T],
        depth: usize,
        write: impl Fn(&mut Writer, &T, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                let between = self.between.clone();
                self.out.push_str(&between);
            }
            self.line(depth + 1);
            write(self, item, depth + 1)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\x08' => self.out.push_str("\\b"),
                '\x0c' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && (!c.is_ascii())) => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units).iter().for_each(|unit| self.out.push_str(&format!("\\u{unit:04x}")));
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn scalar(value: &Value) -> String {
    match value.is_integer() {
        true => value.to_string(),
        false => match f64::try_from(value.clone()).unwrap_or(f64::NAN) {
            x if x.is_nan() => "NaN".into(),
            x if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
            x => float(x),
        },
    }
}
