//! Arguments as Python binds them: by place or by name.

use super::values::{text, type_name, whole, wrong};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, Value};

/// The values of parameters that are called `names`, in this order, from what a template wrote; `None` where it wrote nothing. `what` is
/// the function, for messages.
///
/// # Errors
/// Too many arguments, an unknown name, or a parameter that is given twice.
pub fn bind<const N: usize>(what: &str, args: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (placed, named) = split(args);
    if placed.len() > N {
        return Err(wrong(format!("{what} takes at most {N} arguments, not {}", placed.len())));
    }
    let mut bound: [Option<Value>; N] = std::array::from_fn(|i| placed.get(i).cloned());
    for (name, value) in named {
        match names.iter().position(|known| *known == name) {
            Some(at) if bound[at].is_none() => bound[at] = Some(value),
            Some(_) => return Err(wrong(format!("{what} has two values for its argument '{name}'"))),
            None => return Err(wrong(format!("{what} has no argument '{name}'"))),
        }
    }
    Ok(bound)
}

/// All arguments in one list, as methods get them: those by name are its last item.
pub fn joined(placed: Rest<Value>, named: Kwargs) -> Vec<Value> {
    let mut all = placed.0;
    if named.args().next().is_some() {
        all.push(Value::from(named));
    }
    all
}

/// The arguments by place, and those by name.
pub fn split(args: &[Value]) -> (&[Value], Vec<(String, Value)>) {
    match args.split_last() {
        Some((last, placed)) if last.is_kwargs() => {
            let named = Kwargs::try_from(last.clone()).map(|kwargs| {
                kwargs.args().filter_map(|name| Some((name.to_owned(), kwargs.peek(name).ok()?))).collect()
            });
            (placed, named.unwrap_or_default())
        }
        _ => (args, Vec::new()),
    }
}

/// The value of an argument that must be there.
///
/// # Errors
/// It is not.
pub fn needed(what: &str, argument: Option<Value>) -> Result<Value, Error> {
    argument.ok_or_else(|| wrong(format!("{what} misses an argument")))
}

/// A text, where Python wants one.
///
/// # Errors
/// Another value.
pub fn string(what: &str, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(wrong(format!("{what} takes a text, not {}", type_name(value)))),
    }
}

/// An integer, or `default` where there is none.
///
/// # Errors
/// Another value.
pub fn int(what: &str, value: Option<&Value>, default: i64) -> Result<i64, Error> {
    match value {
        None => Ok(default),
        Some(value) => whole(value).ok_or_else(|| wrong(format!("{what} takes an integer, not {}", type_name(value)))),
    }
}

/// An integer, or nothing for None and where there is none.
///
/// # Errors
/// Another value.
pub fn optional_int(what: &str, value: Option<&Value>) -> Result<Option<i64>, Error> {
    match value.filter(|value| value.kind() != ValueKind::None) {
        None => Ok(None),
        given => int(what, given, 0).map(Some),
    }
}

/// Whether a flag is set.
pub fn flag(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}

/// The text that Jinja2's text filters work on: that of any value.
pub fn soft(what: &str, value: Option<Value>) -> Result<String, Error> {
    Ok(text(&needed(what, value)?))
}
