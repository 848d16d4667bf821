//! The tokens of a template's tag, as Jinja2's lexer cuts them.

/// A token with the white space before it.
#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    /// The white space before it.
    pub gap: &'a str,
    /// Its kind.
    pub kind: Kind,
    /// Its text; of a string with its quotes.
    pub text: &'a str,
}

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name or keyword.
    Name,
    /// A number.
    Number,
    /// A string.
    Text,
    /// Anything else.
    Operator,
}

impl Token<'_> {
    /// The token with the white space before it.
    pub fn spaced(&self) -> String {
        format!("{}{}", self.gap, self.text)
    }
}

const OPERATORS: [&str; 10] = ["//", "**", "==", "!=", "<=", ">=", "{%", "%}", "{{", "}}"];

/// Cuts what is within a tag; `None` for what is no token.
pub fn tokens(inner: &str) -> Option<Vec<Token<'_>>> {
    let mut found = Vec::new();
    let mut rest = inner;
    loop {
        let begin = rest.len() - rest.trim_start().len();
        let (gap, token) = rest.split_at(begin);
        if token.is_empty() {
            return Some(found);
        }
        let (kind, length) = first(token)?;
        found.push(Token { gap, kind, text: &token[..length] });
        rest = &token[length..];
    }
}

/// Bytes from a tag's beginning to behind its `end`, which counts only outside of strings and brackets; `None` without it.
pub fn closing(tag: &str, end: &str) -> Option<usize> {
    let mut at = 2;
    let mut depth = 0usize;
    while at < tag.len() {
        let rest = &tag[at..];
        if depth == 0 && rest.starts_with(end) {
            return Some(at + end.len());
        }
        let c = rest.chars().next()?;
        match c {
            '\'' | '"' => {
                at += string_length(rest)?;
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        at += c.len_utf8();
    }
    None
}

/// The kind and the bytes of the token that a text begins with.
fn first(text: &str) -> Option<(Kind, usize)> {
    let c = text.chars().next()?;
    if c == '\'' || c == '"' {
        return string_length(text).map(|length| (Kind::Text, length));
    }
    if c.is_ascii_digit() {
        return Some((Kind::Number, number_length(text)));
    }
    if c.is_alphabetic() || c == '_' {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        return Some((Kind::Name, end));
    }
    // `}}` and the like are two brackets within an expression.
    let two = OPERATORS[..6].iter().any(|op| text.starts_with(op));
    match c {
        _ if two => Some((Kind::Operator, 2)),
        '+' | '-' | '*' | '/' | '%' | '~' | '<' | '>' | '=' | '.' | ':' | '|' | ',' | ';' | '(' | ')' | '[' | ']'
        | '{' | '}' => Some((Kind::Operator, 1)),
        _ => None,
    }
}

/// Bytes of the string that a text begins with, quotes included.
fn string_length(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

fn number_length(text: &str) -> usize {
    let digits = |text: &str| text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'_').count();
    let bytes = text.as_bytes();
    if bytes[0] == b'0' && bytes.get(1).is_some_and(|b| b"xXoObB".contains(b)) {
        return 2 + text[2..].bytes().take_while(|b| b.is_ascii_hexdigit() || *b == b'_').count();
    }
    let mut length = digits(text);
    if bytes.get(length) == Some(&b'.') && bytes.get(length + 1).is_some_and(u8::is_ascii_digit) {
        length += 1 + digits(&text[length + 1..]);
    }
    if bytes.get(length).is_some_and(|b| b"eE".contains(b)) {
        let sign = usize::from(bytes.get(length + 1).is_some_and(|b| b"+-".contains(b)));
        let exponent = text.get(length + 1 + sign..).map_or(0, digits);
        if exponent > 0 {
            length += 1 + sign + exponent;
        }
    }
    length
}
