//! Python's operators where minijinja's differ: slices, `%`, `*`, order, and what `for` takes.

use super::format;
use super::values::{Generator, View, escaped, items, number, text, tuple, type_name, whole, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use std::cmp::Ordering;

/// Bytes of a repeated text and items of a repeated list, at most.
const MAX_REPEATED: usize = 100_000_000;

/// `value[start:stop:step]`.
///
/// # Errors
/// A step of 0, a bound that is no integer, an undefined value.
pub fn slice(value: &Value, bounds: &[Value]) -> Result<Value, Error> {
    let bound = |at: usize| match bounds.get(at).filter(|b| !b.is_none()) {
        None => Ok(None),
        Some(b) => whole(b).map(Some).ok_or_else(|| wrong("slice indices must be integers or None")),
    };
    let (start, stop, step) = (bound(0)?, bound(1)?, bound(2)?.unwrap_or(1));
    if step == 0 {
        return Err(wrong("slice step cannot be zero"));
    }
    match value.kind() {
        ValueKind::String => {
            let chars: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            Ok(places(chars.len(), start, stop, step).map(|at| chars[at]).collect::<String>().into())
        }
        ValueKind::Seq | ValueKind::Iterable
            if value.downcast_object_ref::<Generator>().is_none() && value.downcast_object_ref::<View>().is_none() =>
        {
            let all = items(value)?;
            let part = places(all.len(), start, stop, step).map(|at| all[at].clone());
            Ok(if value.is_tuple() { tuple(part) } else { Value::from(part.collect::<Vec<_>>()) })
        }
        ValueKind::Undefined => Err(wrong("undefined value")),
        ValueKind::Map => Err(wrong("unhashable type: 'slice'")),
        _ => Ok(Value::UNDEFINED),
    }
}

/// The indices that a slice takes of `len` items, in order.
fn places(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let n = len as i64;
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let place = |at: Option<i64>, default: i64| match at {
        None => default,
        Some(at) if at < 0 => at.saturating_add(n).max(low),
        Some(at) => at.min(high),
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let (from, to) = (place(start, first), place(stop, last));
    let mut at = Some(from);
    std::iter::from_fn(move || {
        let here = at.filter(|&here| if step > 0 { here < to } else { here > to })?;
        at = here.checked_add(step);
        Some(here as usize)
    })
}

/// `first + second - third` and so on, from the left: behind the first operand is a list of operators, as texts, and operands in turn.
///
/// # Errors
/// Operands that an operator does not take.
pub fn fold(args: &[Value]) -> Result<Value, Error> {
    let [first, rest] = args else { return Err(wrong("an operator without operands")) };
    let mut left = first.clone();
    for step in items(rest)?.chunks_exact(2) {
        let right = &step[1];
        left = match step[0].as_str().unwrap_or_default() {
            "+" => plus(&left, right),
            "-" => minus(&left, right),
            "*" => times(&left, right),
            "/" => divided(&left, right),
            "//" => floored(&left, right),
            "%" => modulo(&left, right),
            _ => Ok((text(&left) + &text(right)).into()),
        }?;
    }
    Ok(left)
}

/// `left - right`.
fn minus(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (big(left), big(right)) {
        return a.checked_sub(b).map(small).ok_or_else(|| wrong("the difference is too large"));
    }
    match (number(left), number(right)) {
        (Some(a), Some(b)) => Ok(Value::from(a - b)),
        _ => Err(unsupported("-", left, right)),
    }
}

/// `left / right`, which is never an integer.
fn divided(left: &Value, right: &Value) -> Result<Value, Error> {
    match (number(left), number(right)) {
        (Some(_), Some(0.0)) => Err(wrong("division by zero")),
        (Some(a), Some(b)) => Ok(Value::from(a / b)),
        _ => Err(unsupported("/", left, right)),
    }
}

/// `left // right`: rounded down.
fn floored(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (big(left), big(right)) {
        let quotient = a.checked_div(b).ok_or_else(|| wrong("integer division or modulo by zero"))?;
        return Ok(small(quotient - i128::from(a % b != 0 && (a < 0) != (b < 0))));
    }
    match (number(left), number(right)) {
        (Some(_), Some(0.0)) => Err(wrong("float floor division by zero")),
        (Some(a), Some(b)) => Ok(Value::from((a / b).floor())),
        _ => Err(unsupported("//", left, right)),
    }
}

/// `left % right`: a text is formatted, of numbers it is the remainder with the divisor's sign.
///
/// # Errors
/// Values that have no remainder; a format and values that do not fit.
fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(form) = left.as_str() {
        return format::percent(form, right).map(Value::from);
    }
    match (big(left), big(right)) {
        (Some(_), Some(0)) => Err(wrong("integer modulo by zero")),
        (Some(a), Some(b)) => {
            Ok(small(a.checked_rem(b).map_or(0, |r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r })))
        }
        _ => match (number(left), number(right)) {
            (Some(_), Some(0.0)) => Err(wrong("float modulo")),
            (Some(a), Some(b)) => {
                let r = a % b;
                Ok(Value::from(if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r.abs().copysign(b) }))
            }
            _ => Err(unsupported("%", left, right)),
        },
    }
}

/// `left * right`: numbers, or a text or list several times.
///
/// # Errors
/// Values that cannot be multiplied, or too much of them.
fn times(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (big(left), big(right)) {
        return a.checked_mul(b).map(small).ok_or_else(|| wrong("the product is too large"));
    }
    if let (Some(a), Some(b)) = (number(left), number(right)) {
        return Ok(Value::from(a * b));
    }
    let (what, n) = match (whole(left), whole(right)) {
        (Some(n), None) => (right, n),
        (None, Some(n)) => (left, n),
        _ => return Err(unsupported("*", left, right)),
    };
    let n = usize::try_from(n).unwrap_or(0);
    let fits = |len: usize| len.checked_mul(n).is_some_and(|len| len <= MAX_REPEATED);
    match what.kind() {
        ValueKind::String => match what.as_str().filter(|s| fits(s.len())) {
            Some(s) => Ok(s.repeat(n).into()),
            None => Err(wrong("repeated string is too large")),
        },
        ValueKind::Seq | ValueKind::Iterable if type_name(what) == "list" || what.is_tuple() => {
            let all = items(what)?;
            if !fits(all.len()) {
                return Err(wrong("repeated sequence is too large"));
            }
            let repeated = (0..n).flat_map(|_| all.iter().cloned());
            Ok(if what.is_tuple() { tuple(repeated) } else { Value::from(repeated.collect::<Vec<_>>()) })
        }
        _ => Err(unsupported("*", left, right)),
    }
}

/// `left + right`: numbers, two texts or two lists.
///
/// # Errors
/// Anything else.
fn plus(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        return Ok(if left.is_safe() || right.is_safe() { escaped_sum(left, right) } else { [a, b].concat().into() });
    }
    if let (Some(a), Some(b)) = (big(left), big(right)) {
        return a.checked_add(b).map(small).ok_or_else(|| wrong("the sum is too large"));
    }
    if let (Some(a), Some(b)) = (number(left), number(right)) {
        return Ok(Value::from(a + b));
    }
    match (type_name(left), type_name(right)) {
        ("list", "list") if left.kind() != ValueKind::Plain && right.kind() != ValueKind::Plain => {
            let mut all = items(left)?;
            all.extend(items(right)?);
            Ok(Value::from(all))
        }
        ("tuple", "tuple") => Ok(tuple(items(left)?.into_iter().chain(items(right)?))),
        _ => Err(unsupported("+", left, right)),
    }
}

/// Two texts of which one is escaped, so that both are.
fn escaped_sum(left: &Value, right: &Value) -> Value {
    let safe = |value: &Value| if value.is_safe() { text(value) } else { escaped(&text(value)) };
    Value::from_safe_string(safe(left) + &safe(right))
}

fn unsupported(operator: &str, left: &Value, right: &Value) -> Error {
    let undefined = if left.is_undefined() || right.is_undefined() { "undefined value: " } else { "" };
    wrong(format!("{undefined}'{operator}' does not take {} and {}", type_name(left), type_name(right)))
}

/// The integer that a value is; a truth value is one in Python.
fn big(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

fn small(n: i128) -> Value {
    i64::try_from(n).map_or_else(|_| Value::from(n), Value::from)
}

/// The value that `for` goes through.
///
/// # Errors
/// A value that is not iterable.
pub fn iterated(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(wrong(format!("'{}' object is not iterable", type_name(&value))))
        }
        _ => Ok(value),
    }
}

/// Which of two values Python sorts first.
///
/// # Errors
/// Values of kinds that Python does not compare.
pub fn order(a: &Value, b: &Value) -> Result<Ordering, Error> {
    if let (Some(x), Some(y)) = (big(a), big(b)) {
        return Ok(x.cmp(&y));
    }
    if let (Some(x), Some(y)) = (number(a), number(b)) {
        return Ok(x.total_cmp(&y));
    }
    if let (Some(x), Some(y)) = (a.as_str(), b.as_str()) {
        return Ok(x.cmp(y));
    }
    let list = |value: &Value| matches!(type_name(value), "list" | "tuple").then(|| items(value));
    match (list(a), list(b)) {
        (Some(x), Some(y)) if a.is_tuple() == b.is_tuple() => {
            let (x, y) = (x?, y?);
            for (x, y) in x.iter().zip(&y) {
                if x != y {
                    return order(x, y);
                }
            }
            Ok(x.len().cmp(&y.len()))
        }
        _ => Err(unsupported("<", a, b)),
    }
}

/// Sorts what has a key each, stably, and by the keys in the order that Python has.
///
/// # Errors
/// Keys that Python does not compare.
pub fn sort(pairs: &mut [(Value, Value)], reverse: bool) -> Result<(), Error> {
    let mut failed = None;
    pairs.sort_by(|(a, _), (b, _)| {
        let found = order(a, b).unwrap_or_else(|error| {
            failed.get_or_insert(error);
            // Any total order will do, because the result is not used.
            type_name(a).cmp(type_name(b)).then_with(|| text(a).cmp(&text(b)))
        });
        if reverse { found.reverse() } else { found }
    });
    failed.map_or(Ok(()), Err)
}
