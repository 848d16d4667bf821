//! Values as programming languages write them, and as models write the arguments of a call after them: `'text'`, `"text"` or a text between
//! marks of the model's own, numbers, `True`, `null`, `[1, 2]`, `{'key': 1}`, `{key:1}`. Read as JSON.

use super::json_scan::Place;
use serde_json::json;
use serde_json::value::RawValue;

/// Levels of lists and objects in a value, at most; a deeper one is a text.
const MAX_DEPTH: usize = 64;
/// What may follow a text, a number or a word.
const BEHIND: [char; 5] = [',', ')', ']', '}', ':'];

/// What is around texts: a mark of the model's own, in which a text stands as it is; or quotes of either kind, with escapes.
#[derive(Clone, Debug)]
pub struct Quotes(Option<Box<str>>);

impl Quotes {
    /// Those of a format whose texts begin with `quote`.
    pub fn new(quote: &str) -> Quotes {
        Quotes(Some(quote).filter(|quote| !matches!(*quote, "'" | "\"")).map(Box::from))
    }

    /// The mark; `None` for quotes.
    pub fn mark(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

/// How far a value goes.
#[derive(Clone, Debug)]
pub struct LiteralScan {
    quotes: Quotes,
    depth: usize,
    within: Within,
    /// The last characters, as far as a mark may begin in them.
    tail: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Within {
    Nothing,
    /// A text between marks.
    Marks,
    /// A text between such quotes.
    Quotes(char),
    /// The same, behind a backslash.
    Escape(char),
    /// The same, behind a quote: the text's end, if what may follow a text does; otherwise a letter of it.
    Closed(char),
}

impl LiteralScan {
    /// A value of which nothing has been read.
    pub fn new(quotes: Quotes) -> LiteralScan {
        LiteralScan { quotes, depth: 0, within: Within::Nothing, tail: String::new() }
    }

    /// Takes the next character: [`Place::Inside`], or [`Place::Behind`] where the value has ended before it.
    pub fn take(&mut self, c: char) -> Place {
        match self.within {
            Within::Closed(_) if c.is_whitespace() => return Place::Inside,
            Within::Closed(_) if BEHIND.contains(&c) => self.within = Within::Nothing,
            Within::Closed(quote) | Within::Quotes(quote) => {
                self.within = match c {
                    '\\' => Within::Escape(quote),
                    c if c == quote => Within::Closed(quote),
                    _ => Within::Quotes(quote),
                };
                return Place::Inside;
            }
            Within::Escape(quote) => {
                self.within = Within::Quotes(quote);
                return Place::Inside;
            }
            Within::Nothing | Within::Marks => {}
        }
        if let Some(mark) = &self.quotes.0 {
            self.tail.push(c);
            if self.tail.ends_with(&**mark) {
                self.tail.clear();
                self.within = if self.within == Within::Marks { Within::Nothing } else { Within::Marks };
                return Place::Inside;
            }
            while self.tail.len() >= mark.len() {
                self.tail.remove(0);
            }
        }
        match c {
            _ if self.within == Within::Marks => {}
            '"' | '\'' if self.quotes.0.is_none() => self.within = Within::Quotes(c),
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' | '}' | ',' if self.depth == 0 => return Place::Behind,
            ')' | ']' | '}' => self.depth -= 1,
            _ => {}
        }
        Place::Inside
    }
}

/// A whole value as JSON; one that is none is a text. `is_text`: a number or a word is a text, too.
pub fn json_of(value: &str, quotes: &Quotes, is_text: bool) -> String {
    let value = value.trim();
    if let Ok(json) = serde_json::from_str::<&RawValue>(value)
        && (!is_text || value.starts_with('"'))
    {
        return json.get().to_owned();
    }
    let mut reader = Values { rest: value, quotes, out: String::new() };
    let read = reader.value(0).is_some() && reader.rest.trim().is_empty();
    let is_quoted = reader.out.starts_with('"');
    if read && (is_quoted || !is_text) { reader.out } else { json!(value).to_string() }
}

/// Reads values from a text.
struct Values<'a> {
    rest: &'a str,
    quotes: &'a Quotes,
    out: String,
}

impl<'a> Values<'a> {
    fn value(&mut self, depth: usize) -> Option<()> {
        self.rest = self.rest.trim_start();
        if depth > MAX_DEPTH {
            return None;
        }
        if let Some(text) = self.text() {
            self.out.push_str(&json!(text).to_string());
            return Some(());
        }
        match self.rest.chars().next()? {
            '[' => self.several(['[', ']'], depth),
            '(' => self.several(['(', ')'], depth),
            '{' => self.several(['{', '}'], depth),
            _ => {
                let word = self.word();
                let json = match word {
                    "" => return None,
                    "True" => "true",
                    "False" => "false",
                    "None" => "null",
                    _ => word,
                };
                match serde_json::from_str::<&RawValue>(json) {
                    Ok(json) => self.out.push_str(json.get()),
                    Err(_) => self.out.push_str(&json!(word).to_string()),
                }
                Some(())
            }
        }
    }

    /// A number or a word, which may be empty.
    fn word(&mut self) -> &'a str {
        let end = self.rest.find(|c: char| c.is_whitespace() || BEHIND.contains(&c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    /// A text, if one follows.
    fn text(&mut self) -> Option<String> {
        if let Some(mark) = &self.quotes.0 {
            let (text, rest) = self.rest.strip_prefix(&**mark)?.split_once(&**mark)?;
            self.rest = rest;
            return Some(text.to_owned());
        }
        let quote = self.rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let inner = &self.rest[1..];
        let ends = |at: usize| inner[at..].trim_start().chars().next().is_none_or(|c| BEHIND.contains(&c));
        let (mut at, mut text) = (0, String::new());
        while let Some(c) = inner[at..].chars().next() {
            at += c.len_utf8();
            match c {
                '\\' => match escape(&inner[at..]) {
                    Some((c, bytes)) => {
                        text.push(c);
                        at += bytes;
                    }
                    None => text.push(c),
                },
                c if c == quote && ends(at) => {
                    self.rest = &inner[at..];
                    return Some(text);
                }
                c => text.push(c),
            }
        }
        None
    }

    /// A list, or an object in braces.
    fn several(&mut self, [open, close]: [char; 2], depth: usize) -> Option<()> {
        self.rest = self.rest.strip_prefix(open)?;
        let is_object = open == '{';
        self.out.push(if is_object { '{' } else { '[' });
        let mut first = true;
        loop {
            self.rest = self.rest.trim_start();
            if let Some(rest) = self.rest.strip_prefix(close) {
                self.rest = rest;
                self.out.push(if is_object { '}' } else { ']' });
                return Some(());
            }
            if !std::mem::take(&mut first) {
                self.rest = self.rest.strip_prefix(',')?.trim_start();
                // A comma may stand behind the last.
                if self.rest.starts_with(close) {
                    continue;
                }
                self.out.push_str(", ");
            }
            if is_object {
                let key = self.text().unwrap_or_else(|| self.word().to_owned());
                self.rest = self.rest.trim_start().strip_prefix(':')?;
                self.out.push_str(&format!("{}: ", json!(key)));
            }
            self.value(depth + 1)?;
        }
    }
}

/// The character that stands behind a backslash at the beginning of `text`, and the bytes of its escape; `None` for an escape that is none,
/// whose backslash is a letter like others, as in Python.
fn escape(text: &str) -> Option<(char, usize)> {
    let code = |from: usize, digits: usize| u32::from_str_radix(text.get(from..from + digits)?, 16).ok();
    let plain = |c| Some((c, 1));
    match text.chars().next()? {
        'n' => plain('\n'),
        't' => plain('\t'),
        'r' => plain('\r'),
        'b' => plain('\u{8}'),
        'f' => plain('\u{c}'),
        'x' => Some((char::from_u32(code(1, 2)?)?, 3)),
        'U' => Some((char::from_u32(code(1, 8)?)?, 9)),
        'u' => match code(1, 4)? {
            // Two halves of a character, as JSON writes it.
            high @ 0xd800..0xdc00 if text[5..].starts_with("\\u") => {
                let low = code(7, 4).filter(|low| (0xdc00..0xe000).contains(low))?;
                Some((char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00))?, 11))
            }
            code => Some((char::from_u32(code)?, 5)),
        },
        c if c.is_alphanumeric() => None,
        c => Some((c, c.len_utf8())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value as JSON, found letter by letter before what follows it.
    fn read(quote: &str, text: &str, is_text: bool) -> (String, String) {
        let quotes = Quotes::new(quote);
        let mut scan = LiteralScan::new(quotes.clone());
        let end = text.char_indices().find(|(_, c)| scan.take(*c) == Place::Behind).map_or(text.len(), |(at, _)| at);
        (json_of(&text[..end], &quotes, is_text), text[end..].to_owned())
    }

    #[test]
    fn values_of_programming_languages_are_read_as_json_up_to_what_follows_them() {
        for (value, json) in [
            ("'Rome'", r#""Rome""#),
            (r#""a, b) c\n\"d\" \u00e9""#, r#""a, b) c\n\"d\" \u00e9""#),
            (r"'a\x41\u00e9\n\'\d\xg'", r#""aAé\n'\\d\\xg""#),
            (r"['\ud83d\ude00', '\U0001F600', '\ud83d']", r#"["😀", "😀", "\\ud83d"]"#),
            // As a template writes it that knows no escapes.
            (r#"'Rome's "x"'"#, r#""Rome's \"x\"""#),
            ("True", "true"),
            ("null", "null"),
            ("-1.5e3", "-1.5e3"),
            ("[1, 'a', (2, None), ]", r#"[1, "a", [2, null]]"#),
            ("{'a': [True], \"b\": {c: 'd}'}}", r#"{"a": [true], "b": {"c": "d}"}}"#),
            ("{}", "{}"),
            ("Paris", r#""Paris""#),
            ("[1", r#""[1""#),
        ] {
            for behind in [", x=1)", ")"] {
                let (found, rest) = read("'", &format!("{value}{behind}"), false);
                if value != "[1" {
                    assert_eq!((found.as_str(), rest.as_str()), (json, behind), "{value}");
                }
            }
            assert_eq!(json_of(value, &Quotes::new("\""), false), json);
        }
        assert_eq!(read("'", "007)", true).0, r#""007""#);
        assert_eq!(json_of(&"[".repeat(500), &Quotes::new("'"), false), json!("[".repeat(500)).to_string());
    }

    #[test]
    fn texts_between_marks_stand_as_they_are() {
        let mark = "<|\"|>";
        for (value, json) in [
            ("<|\"|>it's \"a\", {b}\\n<|\"|>", r#""it's \"a\", {b}\\n""#),
            ("[<|\"|>a<|\"|>,<|\"|>]<|\"|>]", r#"["a", "]"]"#),
            ("{a:{b:<|\"|>}<|\"|>},<|\"|>c d<|\"|>:[]}", r#"{"a": {"b": "}"}, "c d": []}"#),
            ("true", "true"),
        ] {
            assert_eq!(read(mark, &format!("{value},x:1}}"), false), (json.to_owned(), ",x:1}".to_owned()), "{value}");
        }
        assert_eq!(read(mark, "<|\"|>a", false).0, json!("<|\"|>a").to_string());
    }
}
