//! Methods of Python's texts, lists, dicts and numbers, as far as Jinja2's sandbox allows them: nothing that changes a value.

use super::args::{bind, flag, int, needed, optional_int, split, string};
use super::format;
use super::objects::BoundMethod;
use super::values::{View, dict, is_plain_list, is_printable, items, text, tuple, type_name, whole, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Methods that change what they are called on, which the sandbox refuses.
const UNSAFE: [&str; 12] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "__setitem__",
];

/// Calls a method: minijinja knows none itself. Slices and methods without a call were rewritten into methods, too
/// ([`super::expression`]).
///
/// # Errors
/// [`ErrorKind::UnknownMethod`], and what the method raises.
pub fn call(_: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (method, value.kind()) {
        ("slice__", _) => super::operators::slice(value, args),
        ("method__", _) => named(value, args),
        (_, ValueKind::String) => of_text(value.as_str().unwrap_or_default(), method, args),
        (_, ValueKind::Map) if !is_namespace(value) => of_dict(value, method, args),
        (_, ValueKind::Seq | ValueKind::Iterable) if is_plain_list(value) => of_list(value, method, args),
        (_, ValueKind::Number) => of_number(value, method),
        _ => Err(unknown()),
    }
}

fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

/// Whether a value is a `namespace(...)`, whose attributes are no dict's.
pub fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace"))
}

/// `value.name` where it is not called: the method if there is one, else the attribute.
fn named(value: &Value, args: &[Value]) -> Result<Value, Error> {
    let name = args.first().and_then(Value::as_str).unwrap_or_default();
    let of_dict = ["items", "keys", "values", "get", "copy"].contains(&name);
    let method = match value.kind() {
        ValueKind::Undefined => return Err(wrong("undefined value")),
        ValueKind::String => !of_dict,
        ValueKind::Map => of_dict && !is_namespace(value),
        ValueKind::Seq => name == "copy",
        _ => false,
    };
    match method {
        true => Ok(Value::from_object(BoundMethod { of: value.clone(), name: name.to_owned() })),
        false => value.get_attr(name),
    }
}

fn of_dict(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let object = value.as_object().ok_or_else(unknown)?;
    let pairs = || object.try_iter_pairs().into_iter().flatten();
    let view = |name, items| Ok(Value::from_object(View { name, items }));
    match method {
        "keys" => view("dict_keys", pairs().map(|(key, _)| key).collect()),
        "values" => view("dict_values", pairs().map(|(_, item)| item).collect()),
        "items" => view("dict_items", pairs().map(|(key, item)| tuple([key, item])).collect()),
        "copy" => Ok(dict(pairs())),
        "get" => {
            let [key, default] = bind(method, args, ["key", "default"])?;
            let found = object.get_value(&needed(method, key)?);
            Ok(found.unwrap_or_else(|| default.unwrap_or_else(|| Value::from(()))))
        }
        "fromkeys" => {
            let [keys, item] = bind(method, args, ["iterable", "value"])?;
            let item = item.unwrap_or_else(|| Value::from(()));
            let keys = items(&needed(method, keys)?)?;
            Ok(dict(keys.into_iter().map(|key| (key, item.clone()))))
        }
        name if UNSAFE.contains(&name) => Err(wrong(format!("a template may not call dict.{name}"))),
        _ => Err(unknown()),
    }
}

fn of_list(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let all = items(value)?;
    match method {
        "count" => {
            let [what] = bind(method, args, ["value"])?;
            let what = needed(method, what)?;
            Ok(Value::from(all.iter().filter(|item| **item == what).count()))
        }
        "index" => {
            let [what, from, to] = bind(method, args, ["value", "start", "stop"])?;
            let what = needed(method, what)?;
            let (from, to) = bounds(method, from.as_ref(), to.as_ref(), all.len())?;
            match (from..to).find(|&at| all[at] == what) {
                Some(at) => Ok(Value::from(at)),
                None => Err(wrong(format!("{} is not in list", super::values::repr(&what)))),
            }
        }
        "copy" if !value.is_tuple() => Ok(Value::from(all)),
        name if UNSAFE.contains(&name) => Err(wrong(format!("a template may not call list.{name}"))),
        _ => Err(unknown()),
    }
}

fn of_number(value: &Value, method: &str) -> Result<Value, Error> {
    match (method, whole(value)) {
        ("bit_length", Some(n)) => Ok(Value::from(64 - n.unsigned_abs().leading_zeros())),
        ("is_integer", None) => Ok(Value::from(f64::try_from(value.clone()).is_ok_and(|x| x.fract() == 0.0))),
        ("is_integer", Some(_)) => Ok(Value::from(true)),
        _ => Err(unknown()),
    }
}

/// Python's way to take two optional positions in something of `len` items.
fn bounds(what: &str, from: Option<&Value>, to: Option<&Value>, len: usize) -> Result<(usize, usize), Error> {
    let place = |at: Option<i64>, default: usize| match at {
        None => default,
        Some(at) if at < 0 => (len as i64).saturating_add(at).max(0) as usize,
        Some(at) => (at as usize).min(len),
    };
    Ok((place(optional_int(what, from)?, 0), place(optional_int(what, to)?, len)))
}

fn of_text(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let all = |test: &dyn Fn(char) -> bool| Ok(Value::from(!s.is_empty() && s.chars().all(test)));
    match method {
        "upper" => Ok(s.to_uppercase().into()),
        "lower" => Ok(s.to_lowercase().into()),
        "casefold" => Ok(s.to_lowercase().replace('ß', "ss").into()),
        "swapcase" => Ok(s.chars().map(swapped).collect::<String>().into()),
        "capitalize" => Ok(capitalized(s).into()),
        "title" => Ok(titled(s).into()),
        "isalpha" => all(&char::is_alphabetic),
        "isalnum" => all(&char::is_alphanumeric),
        "isdecimal" => all(&|c| c.is_numeric() && is_digit(c) && !is_super(c)),
        "isdigit" => all(&is_digit),
        "isnumeric" => all(&char::is_numeric),
        "isspace" => all(&char::is_whitespace),
        "isascii" => Ok(s.is_ascii().into()),
        "isprintable" => Ok(s.chars().all(is_printable).into()),
        "isidentifier" => {
            let first = s.starts_with(|c: char| c.is_alphabetic() || c == '_');
            Ok((first && s.chars().all(|c| c.is_alphanumeric() || c == '_')).into())
        }
        "islower" => Ok((s.chars().any(char::is_lowercase) && !s.chars().any(char::is_uppercase)).into()),
        "isupper" => Ok((s.chars().any(char::is_uppercase) && !s.chars().any(char::is_lowercase)).into()),
        "istitle" => Ok((s.chars().any(char::is_alphabetic) && titled(s) == s).into()),
        "strip" | "lstrip" | "rstrip" => stripped(s, method, args),
        "split" | "rsplit" => divided(s, method, args),
        "splitlines" => {
            let [keep] = bind(method, args, ["keepends"])?;
            Ok(lines(s, flag(keep.as_ref())).into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => {
            let [at] = bind(method, args, ["sep"])?;
            let at = separator(method, at)?;
            Ok(match (method == "partition", s.split_once(&at), s.rsplit_once(&at)) {
                (true, Some((before, after)), _) | (false, _, Some((before, after))) => {
                    tuple([before.into(), at.as_str().into(), after.into()])
                }
                (true, ..) => tuple([s.into(), "".into(), "".into()]),
                (false, ..) => tuple(["".into(), "".into(), s.into()]),
            })
        }
        "removeprefix" | "removesuffix" => {
            let [part] = bind(method, args, ["part"])?;
            let part = string(method, &needed(method, part)?)?;
            let left = if method == "removeprefix" { s.strip_prefix(&part) } else { s.strip_suffix(&part) };
            Ok(left.unwrap_or(s).into())
        }
        "startswith" | "endswith" => begins(s, method, args),
        "find" | "rfind" | "index" | "rindex" | "count" => searched(s, method, args),
        "replace" => {
            let [old, new, count] = bind(method, args, ["old", "new", "count"])?;
            let (old, new) = (string(method, &needed(method, old)?)?, string(method, &needed(method, new)?)?);
            Ok(replaced(s, &old, &new, int(method, count.as_ref(), -1)?).into())
        }
        "join" => {
            let [list] = bind(method, args, ["iterable"])?;
            let parts = items(&needed(method, list)?)?;
            let parts = parts.iter().map(|part| string("join", part)).collect::<Result<Vec<_>, _>>()?;
            Ok(parts.join(s).into())
        }
        "zfill" | "center" | "ljust" | "rjust" => padded(s, method, args),
        "expandtabs" => {
            let [size] = bind(method, args, ["tabsize"])?;
            Ok(untabbed(s, int(method, size.as_ref(), 8)?).into())
        }
        "format" => {
            let (placed, named) = split(args);
            format::braces(s, placed, &|name| named.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()))
                .map(Value::from)
        }
        "format_map" => {
            let map = args.first().cloned().unwrap_or_default();
            format::braces(s, &[], &|name| map.get_attr(name).ok().filter(|v| !v.is_undefined())).map(Value::from)
        }
        _ => Err(unknown()),
    }
}

/// Digits of any script, and raised ones.
fn is_digit(c: char) -> bool {
    c.is_ascii_digit() || is_super(c) || (c.is_numeric() && !c.is_alphabetic() && decimal_block(c))
}

/// Whether a character is one of the raised or lowered digits, which Python calls digits and no decimals.
fn is_super(c: char) -> bool {
    matches!(c, '²' | '³' | '¹' | '\u{2070}' | '\u{2074}'..='\u{2079}' | '\u{2080}'..='\u{2089}' | '\u{2460}'..='\u{2468}')
}

/// Whether a numeric character is in one of the runs of ten decimals of the scripts in use.
fn decimal_block(c: char) -> bool {
    const ZEROS: [u32; 21] = [
        0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50, 0xed0, 0xf20,
        0x1040, 0x17e0, 0x1810, 0xa620, 0xff10,
    ];
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&(c as u32)))
}

fn swapped(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() }
}

/// Python's `str.capitalize`.
pub fn capitalized(s: &str) -> String {
    let mut chars = s.chars();
    chars.next().map_or(String::new(), |first| upper_first(first) + &chars.as_str().to_lowercase())
}

/// A character as the first of a word: of letters that are two, only the first is large.
fn upper_first(c: char) -> String {
    let upper = c.to_uppercase().to_string();
    let mut chars = upper.chars();
    chars.next().map_or(String::new(), |first| first.to_string() + &chars.as_str().to_lowercase())
}

/// Python's `str.title`: every letter behind a character that is none begins a word.
fn titled(s: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => out.push_str(&upper_first(c)),
        }
        inside = c.is_alphabetic();
    }
    out
}

fn stripped(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [chars] = bind(method, args, ["chars"])?;
    let chars: Option<Vec<char>> = match chars.filter(|c| !c.is_none()) {
        None => None,
        Some(chars) => Some(string(method, &chars)?.chars().collect()),
    };
    let drop = |c: char| chars.as_ref().map_or_else(|| c.is_whitespace(), |chars| chars.contains(&c));
    Ok(Value::from(match method {
        "strip" => s.trim_matches(drop),
        "lstrip" => s.trim_start_matches(drop),
        _ => s.trim_end_matches(drop),
    }))
}

fn separator(method: &str, value: Option<Value>) -> Result<String, Error> {
    match string(method, &needed(method, value)?)? {
        empty if empty.is_empty() => Err(wrong("empty separator")),
        separator => Ok(separator),
    }
}

fn divided(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [at, most] = bind(method, args, ["sep", "maxsplit"])?;
    let most = usize::try_from(int(method, most.as_ref(), -1)?).unwrap_or(usize::MAX);
    let from_left = method == "split";
    let mut parts: Vec<&str> = match at.filter(|at| !at.is_none()) {
        Some(at) => {
            let at = separator(method, Some(at))?;
            let n = most.saturating_add(1);
            if from_left { s.splitn(n, &at).collect() } else { s.rsplitn(n, &at).collect() }
        }
        None => {
            let (mut parts, mut rest) = (Vec::new(), s);
            loop {
                rest = if from_left { rest.trim_start() } else { rest.trim_end() };
                if rest.is_empty() {
                    break parts;
                }
                let cut = match from_left {
                    _ if parts.len() == most => None,
                    true => rest.split_once(char::is_whitespace),
                    false => rest.rsplit_once(char::is_whitespace).map(|(before, after)| (after, before)),
                };
                let (part, left) = cut.unwrap_or((rest, ""));
                parts.push(part);
                rest = left;
            }
        }
    };
    if !from_left {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Python's `str.splitlines`.
pub fn lines(s: &str, keep: bool) -> Vec<&str> {
    let ends =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut found, mut rest) = (Vec::new(), s);
    while let Some(at) = rest.find(ends) {
        let length =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        found.push(&rest[..if keep { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    found.extend(Some(rest).filter(|rest| !rest.is_empty()));
    found
}

/// The part of a text between two positions, counted in characters as Python counts them.
fn part<'a>(
    s: &'a str,
    method: &str,
    from: Option<&Value>,
    to: Option<&Value>,
) -> Result<(usize, Option<&'a str>), Error> {
    if from.is_none() && to.is_none() {
        return Ok((0, Some(s)));
    }
    let len = s.chars().count();
    let beyond = optional_int(method, from)?.is_some_and(|from| from > len as i64);
    let (from, to) = bounds(method, from, to, len)?;
    let byte = |at: usize| s.char_indices().nth(at).map_or(s.len(), |(byte, _)| byte);
    Ok((from, (from <= to && !beyond).then(|| &s[byte(from)..byte(to)])))
}

fn begins(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [what, from, to] = bind(method, args, ["prefix", "start", "end"])?;
    let (_, part) = part(s, method, from.as_ref(), to.as_ref())?;
    let what = needed(method, what)?;
    let one = |what: &Value| {
        let what = string(method, what)?;
        Ok(part.is_some_and(|s| if method == "startswith" { s.starts_with(&what) } else { s.ends_with(&what) }))
    };
    if !what.is_tuple() {
        return one(&what).map(Value::from);
    }
    for what in items(&what)? {
        if one(&what)? {
            return Ok(true.into());
        }
    }
    Ok(false.into())
}

fn searched(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [what, from, to] = bind(method, args, ["sub", "start", "end"])?;
    let (from, part) = part(s, method, from.as_ref(), to.as_ref())?;
    let what = string(method, &needed(method, what)?)?;
    if method == "count" {
        return Ok(Value::from(part.map_or(0, |part| part.matches(&what).count())));
    }
    let found = part.and_then(|part| {
        let at = if method.starts_with('r') { part.rfind(&what) } else { part.find(&what) }?;
        Some((from + part[..at].chars().count()) as i64)
    });
    match found {
        Some(at) => Ok(at.into()),
        None if method.ends_with("index") => Err(wrong("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

/// Python's `str.replace`; a negative count is all.
pub fn replaced(s: &str, old: &str, new: &str, count: i64) -> String {
    match usize::try_from(count) {
        Ok(count) => s.replacen(old, new, count),
        Err(_) => s.replace(old, new),
    }
}

/// Characters of a padded text, at most: more than any prompt holds, and few enough to fit memory.
const MAX_WIDTH: i64 = 1 << 20;

/// A width that a template asked for.
///
/// # Errors
/// One of more than a million characters.
pub fn width(what: &str, asked: i64) -> Result<usize, Error> {
    match asked {
        n if n > MAX_WIDTH => Err(wrong(format!("{what} takes a width of at most {MAX_WIDTH}"))),
        n => Ok(n.max(0) as usize),
    }
}

/// A text in the middle of `width` characters, the odd one where Python puts it.
pub fn centered(s: &str, width: usize, fill: char) -> String {
    let len = s.chars().count();
    let spare = width.saturating_sub(len);
    let left = spare / 2 + (spare & width & 1);
    let pad = |n: usize| String::from_iter(std::iter::repeat_n(fill, n));
    format!("{}{s}{}", pad(left), pad(spare - left))
}

fn padded(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [asked, fill] = bind(method, args, ["width", "fillchar"])?;
    let width = width(method, int(method, Some(&needed(method, asked)?), 0)?)?;
    let fill = match fill {
        None => ' ',
        Some(fill) => match *text(&fill).chars().collect::<Vec<_>>() {
            [one] => one,
            _ => return Err(wrong(format!("{method} fills with one character, not {}", type_name(&fill)))),
        },
    };
    let spare = width.saturating_sub(s.chars().count());
    let pad = |c: char| String::from_iter(std::iter::repeat_n(c, spare));
    Ok(Value::from(match method {
        "center" => centered(s, width, fill),
        "ljust" => format!("{s}{}", pad(fill)),
        "rjust" => format!("{}{s}", pad(fill)),
        _ => {
            let sign = if s.starts_with(['+', '-']) { 1 } else { 0 };
            format!("{}{}{}", &s[..sign], pad('0'), &s[sign..])
        }
    }))
}

fn untabbed(s: &str, size: i64) -> String {
    let size = size.clamp(0, 64) as usize;
    let (mut out, mut column) = (String::new(), 0);
    for c in s.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let n = size - column % size;
                out.extend(std::iter::repeat_n(' ', n));
                column += n;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}
