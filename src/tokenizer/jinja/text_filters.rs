//! Jinja2's filters on texts, where minijinja's are missing or differ.

use super::args::{bind, flag, int, needed, optional_int, soft, split, string};
use super::methods::{capitalized, centered, lines, replaced, width};
use super::values::{dict, escaped, items, repr, text, wrong};
use crate::error::{in_address, percent_encoded};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

/// `escape` and `e`; `force` for `forceescape`.
pub fn escape(args: &[Value], force: bool) -> Result<Value, Error> {
    let [value] = bind("escape", args, ["value"])?;
    let value = needed("escape", value)?;
    match value.is_safe() && !force {
        true => Ok(value),
        false => Ok(Value::from_safe_string(escaped(&text(&value)))),
    }
}

/// `string`.
pub fn to_text(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("string", args, ["value"])?;
    let value = value.unwrap_or_default();
    Ok(if value.is_safe() { value } else { text(&value).into() })
}

/// `upper`, `lower` and `capitalize`.
pub fn cased(name: &str, args: &[Value]) -> Result<Value, Error> {
    let [value] = bind(name, args, ["s"])?;
    let text = soft(name, value)?;
    Ok(Value::from(match name {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        _ => capitalized(&text),
    }))
}

/// `title`: words begin behind white space, dashes and brackets.
pub fn title(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("title", args, ["s"])?;
    let (mut out, mut word) = (String::new(), String::new());
    for c in soft("title", value)?.chars() {
        if c == '-' || c.is_whitespace() || "({[<".contains(c) {
            out.push_str(&capitalized(&std::mem::take(&mut word)));
            out.push(c);
        } else {
            word.push(c);
        }
    }
    Ok(Value::from(out + &capitalized(&word)))
}

/// `trim`.
pub fn trim(args: &[Value]) -> Result<Value, Error> {
    let [value, chars] = bind("trim", args, ["value", "chars"])?;
    let s = soft("trim", value)?;
    Ok(match chars.filter(|chars| !chars.is_none()) {
        None => s.trim().into(),
        Some(chars) => {
            let chars: Vec<char> = string("trim", &chars)?.chars().collect();
            s.trim_matches(&chars[..]).into()
        }
    })
}

/// `replace`.
pub fn replace(args: &[Value]) -> Result<Value, Error> {
    let [value, old, new, count] = bind("replace", args, ["s", "old", "new", "count"])?;
    let (old, new) = (soft("replace", old)?, soft("replace", new)?);
    let count = optional_int("replace", count.as_ref())?.unwrap_or(-1);
    Ok(replaced(&soft("replace", value)?, &old, &new, count).into())
}

/// `join`.
pub fn join(args: &[Value]) -> Result<Value, Error> {
    let [value, between, path] = bind("join", args, ["value", "d", "attribute"])?;
    let mut all = items(&needed("join", value)?)?;
    if let Some(path) = path.filter(|path| !path.is_none()) {
        all = all.iter().map(|item| super::filters::attribute(item, &path)).collect::<Result<_, _>>()?;
    }
    let between = between.map_or(String::new(), |between| text(&between));
    Ok(all.iter().map(text).collect::<Vec<_>>().join(&between).into())
}

/// `center`.
pub fn center(args: &[Value]) -> Result<Value, Error> {
    let [value, asked] = bind("center", args, ["value", "width"])?;
    Ok(centered(&soft("center", value)?, width("center", int("center", asked.as_ref(), 80)?)?, ' ').into())
}

/// `format`: `%` on a text.
pub fn format(args: &[Value]) -> Result<Value, Error> {
    let (placed, named) = split(args);
    let form = soft("format", placed.first().cloned())?;
    let values = match (named.is_empty(), placed.len()) {
        (true, _) => super::values::tuple(placed[1.min(placed.len())..].iter().cloned()),
        (false, 1) => dict(named.into_iter().map(|(name, value)| (name.into(), value))),
        (false, _) => return Err(wrong("can't handle positional and keyword arguments at the same time")),
    };
    super::format::percent(&form, &values).map(Value::from)
}

/// `indent`.
pub fn indent(args: &[Value]) -> Result<Value, Error> {
    let [value, by, first, blank] = bind("indent", args, ["s", "width", "first", "blank"])?;
    let s = soft("indent", value)?;
    let by = match by.as_ref().and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => " ".repeat(width("indent", int("indent", by.as_ref(), 4)?)?),
    };
    // As in Jinja2, a line break is added before the text is cut, so that one at its end stays.
    let s = s + "\n";
    let blank = flag(blank.as_ref());
    let mut out = String::new();
    for (at, line) in lines(&s, false).into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
            out.push_str(if blank || !line.is_empty() { &by } else { "" });
        }
        out.push_str(line);
    }
    Ok(Value::from(if flag(first.as_ref()) { by + &out } else { out }))
}

/// `filesizeformat`.
pub fn filesize(args: &[Value]) -> Result<Value, Error> {
    let [value, binary] = bind("filesizeformat", args, ["value", "binary"])?;
    let bytes = super::filters::to_float(&[needed("filesizeformat", value)?])?;
    let bytes = f64::try_from(bytes)?;
    let (base, units) = match flag(binary.as_ref()) {
        true => (1024.0, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]),
        false => (1000.0, ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]),
    };
    if bytes == 1.0 {
        return Ok("1 Byte".into());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", bytes as i64).into());
    }
    let mut shown = bytes / base;
    let mut unit = 0;
    while shown >= base && unit + 1 < units.len() {
        shown /= base;
        unit += 1;
    }
    Ok(format!("{shown:.1} {}", units[unit]).into())
}

/// `truncate`.
pub fn truncate(args: &[Value]) -> Result<Value, Error> {
    let [value, length, kill, end, leeway] = bind("truncate", args, ["s", "length", "killwords", "end", "leeway"])?;
    let chars: Vec<char> = soft("truncate", value)?.chars().collect();
    let end = end.map_or_else(|| "...".to_owned(), |end| text(&end));
    let length = width("truncate", int("truncate", length.as_ref(), 255)?)?;
    let leeway = width("truncate", optional_int("truncate", leeway.as_ref())?.unwrap_or(5))?;
    let tail = end.chars().count();
    if length < tail {
        return Err(wrong(format!("expected length >= {tail}, got {length}")));
    }
    if chars.len() <= length + leeway {
        return Ok(chars.into_iter().collect::<String>().into());
    }
    let kept: String = chars[..length - tail].iter().collect();
    let words = if flag(kill.as_ref()) { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(words, _)| words) };
    Ok(format!("{words}{end}").into())
}

/// `wordcount`.
pub fn wordcount(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("wordcount", args, ["s"])?;
    let s = soft("wordcount", value)?;
    Ok(s.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count().into())
}

/// `wordwrap`.
pub fn wordwrap(args: &[Value]) -> Result<Value, Error> {
    let names = ["s", "width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [value, asked, long, with, hyphens] = bind("wordwrap", args, names)?;
    let wide = width("wordwrap", int("wordwrap", asked.as_ref(), 79)?)?.max(1);
    let (long, hyphens) = (long.is_none_or(|v| v.is_true()), hyphens.is_none_or(|v| v.is_true()));
    let with = with.filter(|with| !with.is_none()).map_or_else(|| "\n".to_owned(), |with| text(&with));
    let s = soft("wordwrap", value)?;
    let wrapped = lines(&s, false).into_iter().map(|line| wrapped(line, wide, long, hyphens).join(&with));
    Ok(wrapped.collect::<Vec<_>>().join(&with).into())
}

/// The lines of Python's textwrap.
fn wrapped(line: &str, wide: usize, long: bool, hyphens: bool) -> Vec<String> {
    let mut chunks: std::collections::VecDeque<String> = chunks(line, hyphens).into();
    let mut found = Vec::new();
    while !chunks.is_empty() {
        let mut current = String::new();
        let mut used = 0;
        if !found.is_empty() && chunks.front().is_some_and(|chunk| chunk.trim().is_empty()) {
            chunks.pop_front();
        }
        while let Some(chunk) = chunks.front() {
            let n = chunk.chars().count();
            if used + n > wide {
                break;
            }
            used += n;
            current.push_str(&chunks.pop_front().unwrap_or_default());
        }
        if let Some(chunk) = chunks.front_mut().filter(|chunk| chunk.chars().count() > wide) {
            if long {
                let cut = chunk.char_indices().nth(wide - used).map_or(chunk.len(), |(at, _)| at);
                current.push_str(&chunk[..cut]);
                chunk.replace_range(..cut, "");
            } else if current.is_empty() {
                current = chunks.pop_front().unwrap_or_default();
            }
        }
        let kept = current.trim_end();
        if !kept.is_empty() {
            found.push(kept.to_owned());
        }
    }
    found
}

/// Words, white space, and the parts of words that end with a dash between letters.
fn chunks(line: &str, hyphens: bool) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let chars: Vec<char> = line.chars().collect();
    for (at, &c) in chars.iter().enumerate() {
        let joins = at > 0 && chars[at - 1].is_whitespace() == c.is_whitespace();
        let behind_dash =
            hyphens && at > 1 && chars[at - 1] == '-' && chars[at - 2].is_alphabetic() && c.is_alphabetic();
        match found.last_mut().filter(|_| joins && !behind_dash) {
            Some(chunk) => chunk.push(c),
            None => found.push(c.to_string()),
        }
    }
    found
}

/// `striptags`.
pub fn striptags(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("striptags", args, ["value"])?;
    let mut s = soft("striptags", value)?;
    for (open, close) in [("<!--", "-->"), ("<", ">")] {
        let (mut out, mut rest) = (String::new(), &s[..]);
        while let Some((before, behind)) = rest.split_once(open) {
            let Some((_, after)) = behind.split_once(close) else { break };
            out.push_str(before);
            rest = after;
        }
        out.push_str(rest);
        s = out;
    }
    let plain = s.split_whitespace().collect::<Vec<_>>().join(" ");
    let entities =
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&#34;", "\""), ("&nbsp;", "\u{a0}")];
    let plain = entities.iter().fold(plain, |s, (entity, c)| s.replace(entity, c));
    Ok(plain.replace("&amp;", "&").into())
}

/// A text as part of a URL; a query's spaces are `+`, and its slashes are none.
fn quoted(text: &str, query: bool) -> String {
    match query {
        true => percent_encoded(text, |b| b.is_ascii_alphanumeric() || b"_.-~ ".contains(&b)).replace(' ', "+"),
        false => in_address(text),
    }
}

/// `urlencode`.
pub fn urlencode(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("urlencode", args, ["value"])?;
    let value = needed("urlencode", value)?;
    let pairs = match value.kind() {
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            pairs.map(|(key, item)| vec![key, item]).collect()
        }
        ValueKind::Seq | ValueKind::Iterable => items(&value)?.iter().map(items).collect::<Result<Vec<_>, _>>()?,
        _ => return Ok(quoted(&text(&value), false).into()),
    };
    let pairs = pairs.iter().map(|pair| match &pair[..] {
        [key, item] => Ok(format!("{}={}", quoted(&text(key), true), quoted(&text(item), true))),
        _ => Err(wrong("urlencode takes pairs")),
    });
    Ok(pairs.collect::<Result<Vec<_>, _>>()?.join("&").into())
}

/// `xmlattr`.
pub fn xmlattr(args: &[Value]) -> Result<Value, Error> {
    let [value, space] = bind("xmlattr", args, ["d", "autospace"])?;
    let value = needed("xmlattr", value)?;
    let mut shown = Vec::new();
    for (key, item) in value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten() {
        let key = text(&key);
        if key.contains(|c: char| c.is_whitespace() || "/>=".contains(c)) {
            return Err(wrong(format!("Invalid character in attribute name: '{key}'")));
        }
        if !item.is_none() && !item.is_undefined() {
            shown.push(format!("{}=\"{}\"", escaped(&key), escaped(&text(&item))));
        }
    }
    let space = if space.is_none_or(|v| v.is_true()) && !shown.is_empty() { " " } else { "" };
    Ok(format!("{space}{}", shown.join(" ")).into())
}

/// `pprint`.
pub fn pprint(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("pprint", args, ["value"])?;
    Ok(pretty(&needed("pprint", value)?, 0)?.into())
}

/// Python's `pformat`: on one line of at most 80 characters, or an item a line; dicts are sorted.
fn pretty(value: &Value, column: usize) -> Result<String, Error> {
    let value = match value.kind() {
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            let mut pairs: Vec<(Value, Value)> = pairs.collect();
            super::operators::sort(&mut pairs, false)?;
            dict(pairs)
        }
        _ => value.clone(),
    };
    let short = repr(&value);
    if column + short.chars().count() <= 80 {
        return Ok(short);
    }
    let between = format!(",\n{}", " ".repeat(column + 1));
    Ok(match value.kind() {
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            let shown = pairs.map(|(key, item)| {
                let key = format!("{}: ", repr(&key));
                Ok(format!("{key}{}", pretty(&item, column + 1 + key.chars().count())?))
            });
            format!("{{{}}}", shown.collect::<Result<Vec<_>, Error>>()?.join(&between))
        }
        ValueKind::Seq => {
            let shown = items(&value)?.iter().map(|item| pretty(item, column + 1)).collect::<Result<Vec<_>, _>>()?;
            format!("[{}]", shown.join(&between))
        }
        _ => short,
    })
}
