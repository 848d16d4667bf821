//! Python's `%` on texts and its `str.format`.

use super::values::{float, items, number, repr, text, type_name, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

/// Width and precision of a field, at most: Rust's own formatting panics beyond 65,535 digits.
const MAX_SIZE: usize = 1 << 15;

/// How a value is written.
#[derive(Debug, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    group: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

/// `form % value`.
///
/// # Errors
/// Values that do not fit the format.
pub fn percent(form: &str, value: &Value) -> Result<String, Error> {
    let placed = if value.is_tuple() { items(value)? } else { vec![value.clone()] };
    let mut next = placed.iter();
    let mut named = false;
    let mut take = || next.next().cloned().ok_or_else(|| wrong("not enough arguments for format string"));
    let mut out = String::new();
    let mut rest = form;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let mut keyed = None;
        if let Some(inner) = rest.strip_prefix('(') {
            let end = inner.find(')').ok_or_else(|| wrong("incomplete format key"))?;
            if value.kind() != ValueKind::Map {
                return Err(wrong("format requires a mapping"));
            }
            keyed = Some(value.get_item(&Value::from(&inner[..end]))?);
            if keyed.as_ref().is_some_and(Value::is_undefined) {
                return Err(wrong(format!("there is no '{}' to format", &inner[..end])));
            }
            named = true;
            rest = &inner[end + 1..];
        }
        let mut spec = Spec::default();
        while let Some(c) = rest.chars().next().filter(|c| "#0- +".contains(*c)) {
            match c {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.align = Some('<'),
                sign => spec.sign = if spec.sign == Some('+') { spec.sign } else { Some(sign) },
            }
            rest = &rest[1..];
        }
        let mut size = |rest: &mut &str| -> Result<usize, Error> {
            if let Some(behind) = rest.strip_prefix('*') {
                *rest = behind;
                let n = super::args::int("%", Some(&take()?), 0)?;
                return limited(usize::try_from(n).unwrap_or(0));
            }
            digits(rest)
        };
        spec.width = size(&mut rest)?;
        if let Some(behind) = rest.strip_prefix('.') {
            rest = behind;
            spec.precision = Some(size(&mut rest)?);
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let kind = rest.chars().next().ok_or_else(|| wrong("incomplete format"))?;
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let item = match keyed {
            Some(item) => item,
            None => take()?,
        };
        out.push_str(&percent_field(&mut spec, kind, &item)?);
    }
    out.push_str(rest);
    let all_used =
        named || next.len() == 0 || (!value.is_tuple() && matches!(value.kind(), ValueKind::Map | ValueKind::Seq));
    if all_used { Ok(out) } else { Err(wrong("not all arguments converted during string formatting")) }
}

fn percent_field(spec: &mut Spec, kind: char, item: &Value) -> Result<String, Error> {
    spec.kind = Some(kind);
    match kind {
        's' | 'r' | 'a' => {
            let shown = if kind == 's' { text(item) } else { repr(item) };
            spec.zero = false;
            spec.align = spec.align.or(Some('>'));
            Ok(spec.padded("", &spec.cut(&shown)))
        }
        'c' => {
            spec.align = spec.align.or(Some('>'));
            let shown = match item.as_str() {
                Some(one) if one.chars().count() == 1 => one.to_owned(),
                _ => code_point(item)?.to_string(),
            };
            Ok(spec.padded("", &shown))
        }
        'd' | 'i' | 'u' => {
            let Some(x) = number(item) else { return Err(needs_number(kind, item)) };
            let whole = if is_whole(item) { item.clone() } else { Value::from(x.trunc() as i64) };
            spec.kind = Some('d');
            spec.number(&whole)
        }
        'x' | 'X' | 'o' if !is_whole(item) => Err(needs_number(kind, item)),
        'x' | 'X' | 'o' => spec.number(item),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => match number(item) {
            Some(x) => spec.number(&Value::from(x)),
            None => Err(needs_number(kind, item)),
        },
        kind => Err(wrong(format!("unsupported format character '{kind}'"))),
    }
}

fn needs_number(kind: char, item: &Value) -> Error {
    wrong(format!("%{kind} format: a number is required, not {}", type_name(item)))
}

fn is_whole(value: &Value) -> bool {
    value.kind() == ValueKind::Bool || value.is_integer()
}

fn code_point(value: &Value) -> Result<char, Error> {
    let code = super::args::int("%c", Some(value), 0)?;
    u32::try_from(code).ok().and_then(char::from_u32).ok_or_else(|| wrong("%c takes a character or its code"))
}

/// The number that a text begins with, and the rest of the text; 0 without one.
fn digits(rest: &mut &str) -> Result<usize, Error> {
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (n, behind) = rest.split_at(end);
    *rest = behind;
    limited(if n.is_empty() { 0 } else { n.parse().unwrap_or(usize::MAX) })
}

fn limited(n: usize) -> Result<usize, Error> {
    if n > MAX_SIZE { Err(wrong(format!("a width of {n}; at most {MAX_SIZE} is allowed"))) } else { Ok(n) }
}

/// `form.format(...)`.
///
/// # Errors
/// Values that are missing or do not fit the format.
pub fn braces(form: &str, placed: &[Value], named: &dyn Fn(&str) -> Option<Value>) -> Result<String, Error> {
    let mut counted = 0;
    fields(form, placed, named, &mut counted, 2)
}

fn fields(
    form: &str,
    placed: &[Value],
    named: &dyn Fn(&str) -> Option<Value>,
    counted: &mut usize,
    depth: usize,
) -> Result<String, Error> {
    if depth == 0 {
        return Err(wrong("Max string recursion exceeded"));
    }
    let mut out = String::new();
    let mut rest = form;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let twice = rest[at..].starts_with("{{") || rest[at..].starts_with("}}");
        if twice {
            out.push_str(&rest[at..=at]);
            rest = &rest[at + 2..];
            continue;
        }
        if rest[at..].starts_with('}') {
            return Err(wrong("Single '}' encountered in format string"));
        }
        let field = &rest[at + 1..];
        let mut open = 1;
        let end = field.find(|c| {
            open += i32::from(c == '{') - i32::from(c == '}');
            open == 0
        });
        let end = end.ok_or_else(|| wrong("expected '}' before end of string"))?;
        rest = &field[end + 1..];
        let field = &field[..end];
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = name.split_once('!').unwrap_or((name, ""));
        let value = looked_up(name, placed, named, counted)?;
        let spec = fields(spec, placed, named, counted, depth - 1)?;
        let value = match conversion {
            "" => value,
            "s" => text(&value).into(),
            "r" | "a" => repr(&value).into(),
            other => return Err(wrong(format!("Unknown conversion specifier '{other}'"))),
        };
        out.push_str(&Spec::read(&spec)?.formatted(&value)?);
    }
    out.push_str(rest);
    Ok(out)
}

/// The value of a field's name: `0`, `name`, `name.attribute`, `name[key]`, or nothing for the next one.
fn looked_up(
    name: &str,
    placed: &[Value],
    named: &dyn Fn(&str) -> Option<Value>,
    counted: &mut usize,
) -> Result<Value, Error> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut path) = name.split_at(end);
    let index = if first.is_empty() {
        *counted += 1;
        Some(*counted - 1)
    } else {
        first.parse().ok()
    };
    let found = match index {
        Some(index) => placed.get(index).cloned(),
        None => named(first),
    };
    let mut value = found.ok_or_else(|| wrong(format!("there is no argument '{first}' to format")))?;
    while !path.is_empty() {
        path = if let Some(inner) = path.strip_prefix('[') {
            let (key, behind) = inner.split_once(']').ok_or_else(|| wrong("Missing ']' in format string"))?;
            value = value.get_item(&key.parse::<i64>().map_or_else(|_| Value::from(key), Value::from))?;
            behind
        } else if let Some(attribute) = path.strip_prefix('.') {
            // An attribute of a dict is none of its keys.
            value = Value::UNDEFINED;
            &attribute[attribute.find(['.', '[']).unwrap_or(attribute.len())..]
        } else {
            return Err(wrong("Only '.' or '[' may follow ']' in format field specifier"));
        };
    }
    Ok(value)
}

impl Spec {
    /// `[[fill]align][sign][#][0][width][,][.precision][type]`.
    fn read(spec: &str) -> Result<Spec, Error> {
        let mut found = Spec::default();
        let mut rest = spec;
        let mut chars = spec.chars();
        let (first, second) = (chars.next(), chars.next());
        let is_align = |c: Option<char>| c.is_some_and(|c| "<>=^".contains(c));
        if is_align(second) {
            (found.fill, found.align) = (first, second);
            rest = chars.as_str();
        } else if is_align(first) {
            found.align = first;
            rest = &rest[1..];
        }
        let mut flag = |wanted: &str| {
            let c = rest.chars().next().filter(|c| wanted.contains(*c))?;
            rest = &rest[1..];
            Some(c)
        };
        found.sign = flag("+- ");
        found.alternate = flag("#").is_some();
        found.zero = flag("0").is_some();
        found.width = digits(&mut rest)?;
        if let Some(c) = rest.chars().next().filter(|c| ",_".contains(*c)) {
            found.group = Some(c);
            rest = &rest[1..];
        }
        if let Some(behind) = rest.strip_prefix('.') {
            rest = behind;
            found.precision = Some(digits(&mut rest)?);
        }
        let mut chars = rest.chars();
        found.kind = chars.next();
        match chars.next() {
            None => Ok(found),
            Some(_) => Err(wrong(format!("Invalid format specifier '{spec}'"))),
        }
    }

    fn formatted(mut self, value: &Value) -> Result<String, Error> {
        match (value.kind(), self.kind) {
            (ValueKind::Number, Some('c')) => Ok(self.padded("", &code_point(value)?.to_string())),
            (ValueKind::Number | ValueKind::Bool, kind)
                if kind != Some('s') && (kind.is_some() || value.kind() == ValueKind::Number) =>
            {
                self.align = self.align.or(Some(if self.zero { '=' } else { '>' }));
                self.number(value)
            }
            (_, None | Some('s')) => {
                self.zero = false;
                let shown = self.cut(&text(value));
                Ok(self.padded("", &shown))
            }
            (_, Some(kind)) => {
                Err(wrong(format!("Unknown format code '{kind}' for object of type '{}'", type_name(value))))
            }
        }
    }

    fn cut(&self, shown: &str) -> String {
        self.precision.map_or_else(|| shown.to_owned(), |n| shown.chars().take(n).collect())
    }

    fn number(&self, value: &Value) -> Result<String, Error> {
        let integer = is_whole(value).then(|| super::values::whole(value)).flatten();
        let kind = self.kind.unwrap_or(if integer.is_some() { 'd' } else { 'r' });
        let (negative, prefix, body) = match (integer, kind) {
            (Some(n), 'd' | 'n') => (n < 0, "", n.unsigned_abs().to_string()),
            (Some(n), 'x') => (n < 0, "0x", format!("{:x}", n.unsigned_abs())),
            (Some(n), 'X') => (n < 0, "0X", format!("{:X}", n.unsigned_abs())),
            (Some(n), 'o') => (n < 0, "0o", format!("{:o}", n.unsigned_abs())),
            (Some(n), 'b') => (n < 0, "0b", format!("{:b}", n.unsigned_abs())),
            // Integers of more than 64 bits are only written as they are.
            (None, 'd') if is_whole(value) => {
                (text(value).starts_with('-'), "", text(value).trim_start_matches('-').to_owned())
            }
            (_, 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%' | 'r') => {
                let x = number(value).ok_or_else(|| needs_number(kind, value))?;
                (x.is_sign_negative(), "", self.float(x.abs(), kind))
            }
            _ => return Err(wrong(format!("Unknown format code '{kind}' for object of type '{}'", type_name(value)))),
        };
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        let body = self.group.map_or(body.clone(), |separator| grouped(&body, separator));
        let prefix = if self.alternate { prefix } else { "" };
        Ok(self.padded(&format!("{sign}{prefix}"), &body))
    }

    fn float(&self, x: f64, kind: char) -> String {
        let precision = self.precision.unwrap_or(6);
        if !x.is_finite() {
            return if x.is_nan() { "nan" } else { "inf" }.to_owned();
        }
        match kind {
            'f' | 'F' => format!("{x:.precision$}"),
            '%' => format!("{:.precision$}%", x * 100.0),
            'e' => exponential(x, precision),
            'E' => exponential(x, precision).to_uppercase(),
            'r' if self.precision.is_none() => float(x),
            _ => {
                let shown = self.general(x, precision.max(1));
                if kind == 'G' { shown.to_uppercase() } else { shown }
            }
        }
    }

    fn general(&self, x: f64, precision: usize) -> String {
        let scientific = exponential(x, precision - 1);
        let exponent = scientific.split_once('e').and_then(|(_, e)| e.parse::<i64>().ok()).unwrap_or(0);
        let plain = (-4..precision as i64).contains(&exponent);
        let (digits, tail) = match plain {
            true => (format!("{x:.*}", (precision as i64 - 1 - exponent).max(0) as usize), String::new()),
            false => {
                let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, ""));
                (digits.to_owned(), format!("e{exponent}"))
            }
        };
        let short = match digits.contains('.') && !self.alternate {
            true => digits.trim_end_matches('0').trim_end_matches('.'),
            false => &digits,
        };
        format!("{short}{tail}")
    }

    /// Filled up to the width; zeros go behind the sign.
    fn padded(&self, sign: &str, body: &str) -> String {
        let spare = self.width.saturating_sub(sign.chars().count() + body.chars().count());
        let fill = self.fill.unwrap_or(if self.zero { '0' } else { ' ' });
        let pad = |n: usize| String::from_iter(std::iter::repeat_n(fill, n));
        match self.align.unwrap_or(if sign.is_empty() && !self.is_number() { '<' } else { '>' }) {
            '<' if self.zero && self.fill.is_none() => format!("{sign}{body}{}", " ".repeat(spare)),
            '<' => format!("{sign}{body}{}", pad(spare)),
            '^' => format!("{}{sign}{body}{}", pad(spare / 2), pad(spare - spare / 2)),
            '=' => format!("{sign}{}{body}", pad(spare)),
            _ if self.zero => format!("{sign}{}{body}", pad(spare)),
            _ => format!("{}{sign}{body}", pad(spare)),
        }
    }

    fn is_number(&self) -> bool {
        self.kind.is_some_and(|kind| kind != 's')
    }
}

/// Digits with a separator between each three of those before the point.
fn grouped(body: &str, separator: char) -> String {
    let end = body.find(|c: char| !c.is_ascii_digit()).unwrap_or(body.len());
    let mut out = String::new();
    for (at, c) in body[..end].chars().enumerate() {
        if at > 0 && (end - at) % 3 == 0 {
            out.push(separator);
        }
        out.push(c);
    }
    out + &body[end..]
}

/// Scientific form with a sign and two digits in the exponent.
fn exponential(x: f64, precision: usize) -> String {
    let shown = format!("{x:.precision$e}");
    let (digits, exponent) = shown.split_once('e').unwrap_or((&shown, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
