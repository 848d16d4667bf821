//! Jinja2's filters on lists, dicts and numbers, where minijinja's are missing or differ.

use super::args::{bind, flag, int, needed, split};
use super::methods::is_namespace;
use super::objects::BoundMethod;
use super::operators::{order, sort};
use super::values::{Generator, items, text, tuple, type_name, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};
use std::cmp::Ordering;

/// How an item is looked up by a filter's `attribute`: `a.b.0`.
///
/// # Errors
/// An attribute of something that is undefined.
pub fn attribute(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return item(value, path) };
    let mut found = value.clone();
    for part in path.split('.') {
        let key = part.parse::<i64>().map_or_else(|_| Value::from(part), Value::from);
        found = item(&found, &key)?;
    }
    Ok(found)
}

fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Err(wrong("undefined value")),
        ValueKind::None => Ok(Value::UNDEFINED),
        _ => Ok(value.get_item(key).unwrap_or_default()),
    }
}

/// The same for text that differs only in case, unless case counts.
fn folded(value: Value, case_sensitive: bool) -> Value {
    match value.as_str().filter(|_| !case_sensitive) {
        Some(text) => Value::from(text.to_lowercase()),
        None => value,
    }
}

/// The key that an item is compared by.
fn key(value: &Value, path: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    let found = match path {
        Some(path) => attribute(value, path)?,
        None => value.clone(),
    };
    Ok(folded(found, case_sensitive))
}

/// `length` and `count`.
pub fn length(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("length", args, ["value"])?;
    let value = needed("length", value)?;
    let none = || wrong(format!("object of type '{}' has no len()", type_name(&value)));
    match value.kind() {
        ValueKind::Undefined => Ok(0.into()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().chars().count().into()),
        _ if value.downcast_object_ref::<Generator>().is_some() => Err(none()),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => match value.len() {
            Some(n) => Ok(n.into()),
            None => Ok(items(&value)?.len().into()),
        },
        _ => Err(none()),
    }
}

/// `list`.
pub fn list(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("list", args, ["value"])?;
    items(&needed("list", value)?).map(Value::from)
}

/// `last`.
pub fn last(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("last", args, ["seq"])?;
    let value = needed("last", value)?;
    if value.downcast_object_ref::<Generator>().is_some() {
        return Err(wrong("'generator' object is not reversible"));
    }
    Ok(items(&value)?.pop().unwrap_or_default())
}

/// `first`.
pub fn first(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("first", args, ["seq"])?;
    let value = needed("first", value)?;
    if let Some(generator) = value.downcast_object_ref::<Generator>() {
        return Ok(generator.next().unwrap_or_default());
    }
    Ok(items(&value)?.into_iter().next().unwrap_or_default())
}

/// `reverse`.
pub fn reverse(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("reverse", args, ["value"])?;
    let value = needed("reverse", value)?;
    if let Some(text) = value.as_str() {
        return Ok(text.chars().rev().collect::<String>().into());
    }
    let mut all = items(&value)?;
    all.reverse();
    Ok(Generator::of(all))
}

/// `items`.
pub fn pairs(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("items", args, ["value"])?;
    let value = needed("items", value)?;
    match value.kind() {
        ValueKind::Undefined => Ok(Generator::of(Vec::new())),
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            Ok(Generator::of(pairs.map(|(key, item)| tuple([key, item])).collect()))
        }
        _ => Err(wrong("Can only get item pairs from a mapping.")),
    }
}

/// `default` and `d`.
pub fn default(args: &[Value]) -> Result<Value, Error> {
    let [value, default, boolean] = bind("default", args, ["value", "default_value", "boolean"])?;
    let value = value.unwrap_or_default();
    let replaced = value.is_undefined() || (flag(boolean.as_ref()) && !value.is_true());
    Ok(if replaced { default.unwrap_or_else(|| "".into()) } else { value })
}

/// `attr`: an attribute, never a key.
pub fn attr(args: &[Value]) -> Result<Value, Error> {
    let [value, name] = bind("attr", args, ["obj", "name"])?;
    let (value, name) = (needed("attr", value)?, text(&needed("attr", name)?));
    let plain = matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) && !is_namespace(&value);
    let method = super::expression::METHODS.contains(&&*name) && (plain || value.kind() == ValueKind::String);
    match (method, plain) {
        (true, _) => Ok(Value::from_object(BoundMethod { of: value, name })),
        (false, true) => Ok(Value::UNDEFINED),
        (false, false) => value.get_attr(&name),
    }
}

/// `dictsort`.
pub fn dictsort(args: &[Value]) -> Result<Value, Error> {
    let [value, case_sensitive, by, reverse] = bind("dictsort", args, ["value", "case_sensitive", "by", "reverse"])?;
    let value = needed("dictsort", value)?;
    let by_value = match by.as_ref().map(text).as_deref() {
        None | Some("key") => false,
        Some("value") => true,
        Some(_) => return Err(wrong("You can only sort by either \"key\" or \"value\"")),
    };
    if value.kind() != ValueKind::Map {
        return Err(wrong(format!("dictsort takes a dict, not {}", type_name(&value))));
    }
    let case_sensitive = flag(case_sensitive.as_ref());
    let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
    let mut keyed: Vec<(Value, Value)> = pairs
        .map(|(key, item)| {
            (folded(if by_value { item.clone() } else { key.clone() }, case_sensitive), tuple([key, item]))
        })
        .collect();
    sort(&mut keyed, flag(reverse.as_ref()))?;
    Ok(Value::from(keyed.into_iter().map(|(_, pair)| pair).collect::<Vec<_>>()))
}

/// `sort`.
pub fn sorted(args: &[Value]) -> Result<Value, Error> {
    let [value, reverse, case_sensitive, path] =
        bind("sort", args, ["value", "reverse", "case_sensitive", "attribute"])?;
    let case_sensitive = flag(case_sensitive.as_ref());
    let keys = |item: &Value| match path.as_ref().filter(|path| !path.is_none()) {
        None => key(item, None, case_sensitive),
        Some(path) => match path.as_str() {
            // Several attributes are compared one after the other.
            Some(paths) => {
                let keys = paths.split(',').map(|path| key(item, Some(&path.into()), case_sensitive));
                Ok(tuple(keys.collect::<Result<Vec<_>, _>>()?))
            }
            None => key(item, Some(path), case_sensitive),
        },
    };
    let all = items(&needed("sort", value)?)?;
    let mut keyed = all.into_iter().map(|item| Ok((keys(&item)?, item))).collect::<Result<Vec<_>, Error>>()?;
    sort(&mut keyed, flag(reverse.as_ref()))?;
    Ok(Value::from(keyed.into_iter().map(|(_, item)| item).collect::<Vec<_>>()))
}

/// `min` and `max`: the first of those that are equal.
pub fn extreme(name: &str, args: &[Value]) -> Result<Value, Error> {
    let [value, case_sensitive, path] = bind(name, args, ["value", "case_sensitive", "attribute"])?;
    let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
    let mut best: Option<(Value, Value)> = None;
    for item in items(&needed(name, value)?)? {
        let key = key(&item, path.as_ref(), flag(case_sensitive.as_ref()))?;
        let better = match &best {
            None => true,
            Some((so_far, _)) => order(&key, so_far)? == wanted,
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

/// `unique`.
pub fn unique(args: &[Value]) -> Result<Value, Error> {
    let [value, case_sensitive, path] = bind("unique", args, ["value", "case_sensitive", "attribute"])?;
    let mut seen = std::collections::HashSet::new();
    let mut kept = Vec::new();
    for item in items(&needed("unique", value)?)? {
        if seen.insert(key(&item, path.as_ref(), flag(case_sensitive.as_ref()))?) {
            kept.push(item);
        }
    }
    Ok(Generator::of(kept))
}

/// The items that `map`, `select` and their like go through: as in Jinja2 none of a false value, even of None.
fn filtered(args: &[Value]) -> Result<Vec<Value>, Error> {
    let value = needed("a filter", args.first().cloned())?;
    if value.is_true() { items(&value) } else { Ok(Vec::new()) }
}

/// `map`: a filter on every item, or an attribute of each.
pub fn map(state: &mut State, args: &[Value]) -> Result<Value, Error> {
    let (placed, named) = split(args);
    let all = filtered(placed)?;
    let option = |name: &str| named.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
    if placed.len() == 1
        && let Some(path) = option("attribute")
    {
        if let Some((name, _)) = named.iter().find(|(name, _)| !matches!(name.as_str(), "attribute" | "default")) {
            return Err(wrong(format!("Unexpected keyword argument '{name}'")));
        }
        let default = option("default");
        let found = all.iter().map(|item| {
            let found = attribute(item, &path)?;
            Ok(default.clone().filter(|_| found.is_undefined()).unwrap_or(found))
        });
        return found.collect::<Result<_, Error>>().map(Generator::of);
    }
    let filter = placed.get(1).map(text).ok_or_else(|| wrong("map requires a filter argument"))?;
    let mut mapped = Vec::with_capacity(all.len());
    for item in all {
        let mut all_args = vec![item];
        all_args.extend_from_slice(&args[2..]);
        mapped.push(state.apply_filter(&filter, &all_args)?);
    }
    Ok(Generator::of(mapped))
}

/// `select`, `reject`, `selectattr` and `rejectattr`.
pub fn select(state: &mut State, args: &[Value], keeps: bool, by_attribute: bool) -> Result<Value, Error> {
    let all = filtered(args)?;
    let path = args.get(1).filter(|_| by_attribute);
    if by_attribute && path.is_none() {
        return Err(wrong("Missing parameter for attribute name"));
    }
    let rest = &args[if by_attribute { 2 } else { 1 }.min(args.len())..];
    let mut kept = Vec::new();
    for item in all {
        let value = match path {
            Some(path) => attribute(&item, path)?,
            None => item.clone(),
        };
        let passes = match rest.split_first() {
            None => value.is_true(),
            Some((test, more)) => {
                let mut all_args = vec![value];
                all_args.extend_from_slice(more);
                state.perform_test(&text(test), &all_args)?
            }
        };
        if passes == keeps {
            kept.push(item);
        }
    }
    Ok(Generator::of(kept))
}

/// `random`: chosen by the clock, because a prompt needs no better chance.
pub fn random(args: &[Value], now: i64) -> Result<Value, Error> {
    let [value] = bind("random", args, ["seq"])?;
    let all = items(&needed("random", value)?)?;
    let at = now.unsigned_abs() as usize % all.len().max(1);
    Ok(all.get(at).cloned().unwrap_or_default())
}

/// `int`.
pub fn to_int(args: &[Value]) -> Result<Value, Error> {
    let [value, default, base] = bind("int", args, ["value", "default", "base"])?;
    let value = needed("int", value)?;
    let default = default.unwrap_or_else(|| 0.into());
    let base = int("int", base.as_ref(), 10)?;
    let whole = |x: f64| if x.is_finite() { Value::from(x.trunc() as i128) } else { default.clone() };
    Ok(match value.kind() {
        ValueKind::Undefined => return Err(wrong("undefined value")),
        ValueKind::Bool => i64::from(value.is_true()).into(),
        ValueKind::Number if value.is_integer() => value,
        ValueKind::Number => narrow(whole(f64::try_from(value)?)),
        ValueKind::String => {
            let s = value.as_str().unwrap_or_default();
            match parsed(s, base) {
                Some(n) => narrow(Value::from(n)),
                None => narrow(float_of(s).map_or(default.clone(), whole)),
            }
        }
        _ => default,
    })
}

/// The same number as 64 bits if it fits, because minijinja treats wider ones apart.
fn narrow(value: Value) -> Value {
    i64::try_from(value.clone()).map_or(value, Value::from)
}

/// Python's `int(text, base)`.
fn parsed(s: &str, base: i64) -> Option<i128> {
    let s = s.trim();
    let (negative, digits) = match s.strip_prefix(['-', '+']) {
        Some(digits) => (s.starts_with('-'), digits),
        None => (false, s),
    };
    let lower = digits.to_lowercase();
    let prefixed =
        |prefix: &str, n: i64| (base == n || base == 0).then(|| lower.strip_prefix(prefix)).flatten().map(|d| (d, n));
    let (digits, base) = prefixed("0x", 16)
        .or_else(|| prefixed("0o", 8))
        .or_else(|| prefixed("0b", 2))
        .unwrap_or((&lower, if base == 0 { 10 } else { base }));
    let plain =
        !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__") && !digits.starts_with(['+', '-']);
    let base = u32::try_from(base).ok().filter(|base| plain && (2..=36).contains(base))?;
    let n = i128::from_str_radix(&digits.replace('_', ""), base).ok()?;
    Some(if negative { -n } else { n })
}

/// Python's `float(text)`.
fn float_of(s: &str) -> Option<f64> {
    let s = s.trim().to_lowercase();
    let plain =
        s.bytes().all(|b| b.is_ascii_digit() || b"+-.e_".contains(&b)) && !s.starts_with('_') && !s.ends_with('_');
    match s.trim_start_matches(['+', '-']) {
        "inf" | "infinity" | "nan" => s.parse().ok(),
        _ if plain => s.replace('_', "").parse().ok(),
        _ => None,
    }
}

/// `float`.
pub fn to_float(args: &[Value]) -> Result<Value, Error> {
    let [value, default] = bind("float", args, ["value", "default"])?;
    let value = needed("float", value)?;
    let default = default.unwrap_or_else(|| 0.0.into());
    Ok(match value.kind() {
        ValueKind::Undefined => return Err(wrong("undefined value")),
        ValueKind::String => float_of(value.as_str().unwrap_or_default()).map_or(default, Value::from),
        _ => super::values::number(&value).map_or(default, Value::from),
    })
}

/// Whether a value can be called: functions, macros and methods.
pub fn is_callable(value: &Value) -> bool {
    const CALLABLE: [&str; 5] = ["Macro", "BoxedFunction", "BoundMethod", "DictType", "Joiner"];
    value.as_object().is_some_and(|object| CALLABLE.iter().any(|name| object.type_name().ends_with(name)))
}
