//! Expressions in a template's tags, rewritten into others of the same grouping where minijinja would compute something else.
//!
//! | Jinja2 | becomes | because |
//! |---|---|---|
//! | `x[a:b:c]` | `x.slice__(a, b, c)` | minijinja's slices are lazy, wrong at the ends and panic when reversed |
//! | `x + y - z`, `x ~ y`, `x % y` | `((x)\|fold__(['+', y, '-', z]))` | texts are formatted, escaped and repeated as in Python |
//! | `x.upper` without a call | `x.method__('upper')` | minijinja has no bound methods |
//! | `a, b` | `(a, b)` | minijinja wants the parentheses |
//! | `+x` | `x` | minijinja has no unary plus |
//! | strings with a backslash, or several in a row | one string | minijinja knows fewer escapes |
//!
//! Operands are read as Jinja2's parser reads them: a postfix binds tightest, then signs, filters and tests, `**`, then `*`, `/`, `//`, `%`,
//! then `~`, then `+` and `-`. Everything looser is copied.

use super::tokens::{Kind, Token};

/// Words that are no operand.
const KEYWORDS: [&str; 11] = ["and", "or", "not", "in", "is", "if", "else", "elif", "recursive", "ignore", "with"];

/// Methods that are values where they are not called: those of texts and dicts that no key of a message or tool is likely to be called.
/// `x.items` is the method even where a dict has such a key, as in Jinja2.
pub const METHODS: [&str; 17] = [
    "items",
    "keys",
    "values",
    "get",
    "copy",
    "upper",
    "lower",
    "strip",
    "lstrip",
    "rstrip",
    "split",
    "startswith",
    "endswith",
    "replace",
    "title",
    "capitalize",
    "join",
];

/// Brackets within each other that are looked into, at most; minijinja takes no more than 150.
const MAX_DEPTH: usize = 160;

/// A printed expression: several values are a tuple.
pub fn printed(tokens: &[Token]) -> Option<String> {
    let (out, commas) = Reader::of(tokens, 0)?.whole()?;
    let tail = if tokens.is_empty() { "" } else { " " };
    Some(if commas { format!(" ({out}){tail}") } else { format!("{out}{tail}") })
}

/// An expression, or several, as minijinja has to see it.
pub fn rewritten(tokens: &[Token]) -> Option<String> {
    within(tokens, 0)
}

/// The same of what is within so many brackets.
fn within(tokens: &[Token], depth: usize) -> Option<String> {
    Reader::of(tokens, depth)?.whole().map(|(out, _)| out)
}

/// Tokens as they are.
pub fn copied(tokens: &[Token]) -> String {
    tokens.iter().map(Token::spaced).collect()
}

/// A text as a string of minijinja's.
pub fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}

struct Reader<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn of(tokens: &'a [Token<'a>], depth: usize) -> Option<Reader<'a>> {
        (depth <= MAX_DEPTH).then_some(Reader { tokens, at: 0, depth })
    }

    fn peek(&self) -> Option<&'a Token<'a>> {
        self.tokens.get(self.at)
    }

    fn next_is(&self, text: &str) -> bool {
        self.peek().is_some_and(|t| t.kind == Kind::Operator && t.text == text)
    }

    fn next_is_word(&self, word: &str) -> bool {
        self.peek().is_some_and(|t| t.kind == Kind::Name && t.text == word)
    }

    /// All tokens, and whether there is a comma outside of brackets.
    fn whole(mut self) -> Option<(String, bool)> {
        let (mut out, mut commas) = (String::new(), false);
        while let Some(token) = self.peek() {
            if self.begins_operand(token) {
                out.push_str(&self.sum()?);
            } else {
                commas |= token.text == ",";
                out.push_str(&token.spaced());
                self.at += 1;
            }
        }
        Some((out, commas))
    }

    fn begins_operand(&self, token: &Token) -> bool {
        match token.kind {
            Kind::Name => !KEYWORDS.contains(&token.text),
            Kind::Number | Kind::Text => true,
            Kind::Operator => match token.text {
                "(" | "[" | "{" => true,
                // A sign, unless it stands behind an operand, which would have been read with it.
                "-" | "+" => self.at == 0 || self.sign_here(),
                _ => false,
            },
        }
    }

    /// Whether `+` or `-` here is a sign: the token before it ends no operand.
    fn sign_here(&self) -> bool {
        let before = &self.tokens[self.at - 1];
        match before.kind {
            Kind::Name => KEYWORDS.contains(&before.text),
            Kind::Number | Kind::Text => false,
            Kind::Operator => !matches!(before.text, ")" | "]" | "}"),
        }
    }

    /// `+`, `-`.
    fn sum(&mut self) -> Option<String> {
        self.chain(&["+", "-"], Reader::concatenation)
    }

    /// `~`.
    fn concatenation(&mut self) -> Option<String> {
        self.chain(&["~"], Reader::product)
    }

    /// `*`, `/`, `//`, `%`.
    fn product(&mut self) -> Option<String> {
        self.chain(&["*", "/", "//", "%"], Reader::power)
    }

    /// Operands with operators of the same rank between them, which are computed from the left.
    fn chain(&mut self, ranked: &[&str], operand: fn(&mut Reader<'a>) -> Option<String>) -> Option<String> {
        let first = operand(self)?;
        let mut rest = String::new();
        while let Some(token) = self.peek().filter(|t| t.kind == Kind::Operator && ranked.contains(&t.text)) {
            self.at += 1;
            let separator = if rest.is_empty() { "" } else { ", " };
            rest.push_str(&format!("{separator}'{}', {}", token.text, operand(self)?.trim_start()));
        }
        if rest.is_empty() {
            return Some(first);
        }
        let gap = first.len() - first.trim_start().len();
        Some(format!("{}(({})|fold__([{rest}]))", &first[..gap], &first[gap..]))
    }

    fn power(&mut self) -> Option<String> {
        let mut left = self.unary()?;
        while self.next_is("**") {
            let operator = self.peek()?.spaced();
            self.at += 1;
            left = format!("{left}{operator}{}", self.unary()?);
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<String> {
        let mut signs = String::new();
        while let Some(token) = self.peek().filter(|t| t.kind == Kind::Operator && matches!(t.text, "-" | "+")) {
            signs.push_str(token.gap);
            // A plus changes nothing.
            signs.push_str(token.text.trim_start_matches('+'));
            self.at += 1;
        }
        let operand = self.operand()?;
        self.filtered(format!("{signs}{operand}"))
    }

    /// A primary with what is behind it: attributes, items, slices and calls.
    fn operand(&mut self) -> Option<String> {
        let token = *self.peek()?;
        if !self.begins_operand(&token) || matches!(token.text, "-" | "+") {
            return None;
        }
        let out = match (token.kind, token.text) {
            (Kind::Text, _) => {
                let (begin, mut text) = (self.at, String::new());
                while let Some(part) = self.peek().filter(|t| t.kind == Kind::Text) {
                    text.push_str(&unescaped(&part.text[1..part.text.len() - 1])?);
                    self.at += 1;
                }
                let plain = self.at == begin + 1 && !token.text.contains('\\');
                format!("{}{}", token.gap, if plain { token.text.to_owned() } else { literal(&text) })
            }
            (Kind::Operator, _) => self.bracket()?,
            _ => {
                self.at += 1;
                token.spaced()
            }
        };
        self.postfixed(out)
    }

    fn postfixed(&mut self, mut out: String) -> Option<String> {
        loop {
            if self.next_is(".") {
                let dot = self.peek()?.spaced();
                let name = self.tokens.get(self.at + 1).filter(|t| matches!(t.kind, Kind::Name | Kind::Number))?;
                self.at += 2;
                match METHODS.contains(&name.text) && !self.next_is("(") {
                    true => out.push_str(&format!("{dot}method__('{}')", name.text)),
                    false => out.extend([&*dot, &*name.spaced()]),
                }
            } else if self.next_is("(") {
                out.push_str(&self.bracket()?);
            } else if self.next_is("[") {
                let (end, colon) = self.closing()?;
                match colon {
                    false => out.push_str(&self.bracket()?),
                    true => {
                        out.push_str(&slice(&self.tokens[self.at + 1..end], self.depth + 1)?);
                        self.at = end + 1;
                    }
                }
            } else {
                return Some(out);
            }
        }
    }

    /// Filters and tests.
    fn filtered(&mut self, mut out: String) -> Option<String> {
        loop {
            if self.next_is("|") {
                out.push_str(&self.peek()?.spaced());
                self.at += 1;
                out.push_str(&self.dotted_name()?);
                if self.next_is("(") {
                    out.push_str(&self.bracket()?);
                }
            } else if self.next_is_word("is") {
                out.push_str(&self.peek()?.spaced());
                self.at += 1;
                if self.next_is_word("not") {
                    out.push_str(&self.peek()?.spaced());
                    self.at += 1;
                }
                out.push_str(&self.dotted_name()?);
                if self.next_is("(") {
                    out.push_str(&self.bracket()?);
                } else if self.peek().is_some_and(|t| self.begins_argument(t)) {
                    out.push_str(&self.operand()?);
                }
            } else if self.next_is("(") {
                out.push_str(&self.bracket()?);
            } else {
                return Some(out);
            }
        }
    }

    /// Whether a test's argument stands here without parentheses.
    fn begins_argument(&self, token: &Token) -> bool {
        match token.kind {
            Kind::Name => !KEYWORDS.contains(&token.text),
            Kind::Number | Kind::Text => true,
            Kind::Operator => matches!(token.text, "[" | "{"),
        }
    }

    fn dotted_name(&mut self) -> Option<String> {
        let mut out = self.peek().filter(|t| t.kind == Kind::Name)?.spaced();
        self.at += 1;
        while self.next_is(".") {
            out.push_str(&copied(self.tokens.get(self.at..self.at + 2)?));
            self.at += 2;
        }
        Some(out)
    }

    /// A bracket with what is within.
    fn bracket(&mut self) -> Option<String> {
        let (begin, (end, _)) = (self.at, self.closing()?);
        self.at = end + 1;
        let inner = within(&self.tokens[begin + 1..end], self.depth + 1)?;
        Some(format!("{}{inner}{}", self.tokens[begin].spaced(), self.tokens[end].spaced()))
    }

    /// Where the bracket that begins here ends, and whether there is a colon that belongs to it.
    fn closing(&self) -> Option<(usize, bool)> {
        let (mut depth, mut colon) = (0usize, false);
        for (at, token) in self.tokens.iter().enumerate().skip(self.at) {
            match (token.kind, token.text) {
                (Kind::Operator, "(" | "[" | "{") => depth += 1,
                (Kind::Operator, ")" | "]" | "}") => depth -= 1,
                (Kind::Operator, ":") => colon |= depth == 1,
                _ => {}
            }
            if depth == 0 {
                return Some((at, colon));
            }
        }
        None
    }
}

/// The call that a slice with these bounds becomes, `inside` of so many brackets.
fn slice(bounds: &[Token], inside: usize) -> Option<String> {
    let mut parts = vec![String::new()];
    let (mut depth, mut begin) = (0usize, 0);
    for (at, token) in bounds.iter().enumerate() {
        match (token.kind, token.text) {
            (Kind::Operator, "(" | "[" | "{") => depth += 1,
            (Kind::Operator, ")" | "]" | "}") => depth = depth.checked_sub(1)?,
            (Kind::Operator, ":") if depth == 0 => {
                *parts.last_mut()? = within(&bounds[begin..at], inside)?;
                parts.push(String::new());
                begin = at + 1;
            }
            // A tuple of slices, which no list takes.
            (Kind::Operator, ",") if depth == 0 => return None,
            _ => {}
        }
    }
    *parts.last_mut()? = within(&bounds[begin..], inside)?;
    if parts.len() > 3 {
        return None;
    }
    let bound = |part: &String| if part.trim().is_empty() { "none".to_owned() } else { part.trim().to_owned() };
    Some(format!(".slice__({})", parts.iter().map(bound).collect::<Vec<_>>().join(", ")))
}

/// The text between a string's quotes; `None` for an escape that Python refuses.
fn unescaped(quoted: &str) -> Option<String> {
    let mut out = String::with_capacity(quoted.len());
    let mut chars = quoted.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.clone().next()? {
            c @ ('x' | 'u' | 'U') => {
                chars.next();
                let mut code = |digits: usize| {
                    let hex: String = chars.by_ref().take(digits).collect();
                    Some(hex).filter(|hex| hex.len() == digits).and_then(|hex| u32::from_str_radix(&hex, 16).ok())
                };
                let first = code(match c {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                })?;
                match first {
                    0xd800..0xdc00 if chars.as_str().starts_with("\\u") => {
                        let low = chars.as_str().get(2..6).and_then(|hex| u32::from_str_radix(hex, 16).ok())?;
                        chars = chars.as_str().get(6..)?.chars();
                        out.push(char::from_u32(0x10000 + ((first - 0xd800) << 10) + low.checked_sub(0xdc00)?)?);
                    }
                    first => out.push(char::from_u32(first)?),
                }
            }
            '0'..='7' => {
                let octal: String = chars.clone().take(3).take_while(|c| ('0'..='7').contains(c)).collect();
                chars = chars.as_str()[octal.len()..].chars();
                out.push(char::from_u32(u32::from_str_radix(&octal, 8).ok()?)?);
            }
            c => {
                chars.next();
                match c {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'a' => out.push('\x07'),
                    'b' => out.push('\x08'),
                    'f' => out.push('\x0c'),
                    'v' => out.push('\x0b'),
                    '\n' => {}
                    '\\' | '\'' | '"' => out.push(c),
                    other => out.extend(['\\', other]),
                }
            }
        }
    }
    Some(out)
}
