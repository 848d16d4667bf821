//! How a model writes calls of functions: the texts around a call's name and arguments.

use super::json_scan::Keys;
use crate::tokenizer::channels;
use serde::{Deserialize, Serialize};

/// How calls are written in an answer. White space between words of these texts is optional when an answer is read.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CallFormat {
    /// Before the first call. Empty, or `[`: only an answer that begins with a call has any.
    pub open: String,
    /// A call's name and arguments.
    pub body: Body,
    /// From the end of one call to the next one. `None`: an answer has one call at most.
    pub join: Option<String>,
    /// Behind the last call.
    pub close: String,
}

/// A call's name and arguments.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum Body {
    /// A JSON object that has both.
    Object(Keys),
    /// The name, a text, and the arguments as a JSON object.
    Named {
        /// Between name and arguments.
        between: String,
    },
    /// The name, a text, and each argument between texts of its own.
    Parameters {
        /// Behind the name.
        between: String,
        /// Before an argument's name.
        before_key: String,
        /// Between an argument's name and its value. A text's value stands there as it is, any other as JSON.
        before_value: String,
        /// Behind a value.
        after_value: String,
    },
    /// The name, a text, and the arguments with their names as programming languages write them.
    List(ListMarks),
}

/// The texts around arguments in a list: `(a="x", b=1)`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ListMarks {
    /// Between the function's name and its arguments.
    pub begin: String,
    /// Between an argument's name and its value.
    pub is: String,
    /// Between two arguments; without white space a comma.
    pub join: String,
    /// Behind the last argument.
    pub end: String,
    /// Before and behind a text: quotes, or a mark between which it stands as it is.
    pub quote: String,
}

impl CallFormat {
    /// What a model is told to write that was not trained for calls: nothing but `{"name": ..., "arguments": {...}}`.
    pub fn told() -> CallFormat {
        let keys = Keys { name: "name".into(), arguments: "arguments".into() };
        CallFormat { open: String::new(), body: Body::Object(keys), join: None, close: String::new() }
    }

    /// Calls as messages of OpenAI's harmony format ([`channels`]), in the form in which a reader gets them.
    pub fn in_channels() -> CallFormat {
        let body = Body::Named { between: channels::ARGUMENTS.into() };
        CallFormat { open: channels::CALL.into(), body, join: None, close: String::new() }
    }

    /// The words of [`CallFormat::open`].
    pub fn opening(&self) -> Vec<String> {
        match &self.body {
            // White space may come before the bracket of a list.
            Body::Object(_) if self.open.trim_end().ends_with('[') => {
                let marker = self.open.trim_end().trim_end_matches('[');
                words(marker).into_iter().chain(["[".to_owned()]).collect()
            }
            _ => words(&self.open),
        }
    }

    /// The texts that mark calls.
    pub fn marks(&self) -> impl Iterator<Item = &str> {
        let within: Vec<&str> = match &self.body {
            Body::Object(_) => Vec::new(),
            Body::Named { between } => vec![between],
            Body::Parameters { between, before_key, before_value, after_value } => {
                vec![between, before_key, before_value, after_value]
            }
            Body::List(ListMarks { begin, is, join, end, quote }) => vec![begin, is, join, end, quote],
        };
        [self.open.as_str(), self.close.as_str()].into_iter().chain(self.join.as_deref()).chain(within)
    }

    /// Whether `text`, behind an argument, ends the call: what follows the last call begins, or what comes between two.
    pub fn ends(&self, text: &str) -> Match {
        let ends = [Some(&self.close), self.join.as_ref()].into_iter().flatten().map(|end| words(end));
        any(ends.filter(|end| !end.is_empty()).map(|end| begins(text, &end)))
    }

    /// Whether the mark behind a value, of so many bytes at byte `at` of `text`, is one: it is written exactly as it should be, or another
    /// argument or the call's end follows. A value may have the mark in it. With the bytes of the mark and its white space.
    pub fn ends_value(&self, text: &str, at: usize, bytes: usize) -> Match {
        let Body::Parameters { before_key, after_value, .. } = &self.body else { return Match::None };
        let mark = after_value.trim_start();
        let exact = text[..at].ends_with(&after_value[..after_value.len() - mark.len()]);
        match &text[at..] {
            there if exact && there.starts_with(mark) => return Match::Whole(mark.len()),
            there if exact && mark.starts_with(there) => return Match::Begun,
            _ => {}
        }
        let behind = &text[at + bytes..];
        match any([begins(behind, &words(before_key)), self.ends(behind)].into_iter()) {
            Match::Whole(_) => Match::Whole(bytes),
            other => other,
        }
    }

    /// Whether only an answer that begins with a call has any: nothing marks a call within a text.
    pub fn is_bare(&self) -> bool {
        matches!(&self.opening()[..], [] | [_]) && matches!(self.open.trim(), "" | "[")
    }
}

/// The words of a text.
pub fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// What a text that is still growing has of a sequence of words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Match {
    /// All, in so many bytes.
    Whole(usize),
    /// It may become one.
    Begun,
    /// Nothing.
    None,
}

/// The most that any of these is.
fn any(found: impl Iterator<Item = Match>) -> Match {
    found.fold(Match::None, |most, one| match (most, one) {
        (Match::Whole(bytes), _) | (_, Match::Whole(bytes)) => Match::Whole(bytes),
        (Match::Begun, _) | (_, Match::Begun) => Match::Begun,
        _ => Match::None,
    })
}

/// Looks for `words` at the beginning of `text`, with any white space before each.
pub fn begins(text: &str, words: &[String]) -> Match {
    let mut at = 0;
    for word in words {
        at += text[at..].len() - text[at..].trim_start().len();
        let rest = &text[at..];
        match rest.strip_prefix(word.as_str()) {
            Some(_) => at += word.len(),
            None if word.starts_with(rest) => return Match::Begun,
            None => return Match::None,
        }
    }
    Match::Whole(at)
}

/// The first place at or behind byte `from` where `text` has `words` in sequence, and how many bytes they take; or where they may be once it
/// goes on ([`Match::Begun`]). Without either, its end.
pub fn find(text: &str, from: usize, words: &[String]) -> (usize, Match) {
    let Some(first) = words.first() else { return (text.len(), Match::None) };
    let mut at = from;
    loop {
        // What may be the beginning of the first word is at the end of the text.
        let end = text.len().saturating_sub(first.len() - 1).max(at);
        let begun = || {
            (text.ceil_char_boundary(end)..text.len())
                .find(|i| text.is_char_boundary(*i) && first.starts_with(&text[*i..]))
        };
        let Some(next) = text[at..].find(first.as_str()).map(|i| at + i).or_else(begun) else {
            return (text.len(), Match::None);
        };
        match begins(&text[next..], words) {
            Match::None => at = next + text[next..].chars().next().map_or(1, char::len_utf8),
            found => return (next, found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_with_any_white_space_before_each() {
        let words = words("<a>\n<b=");
        assert_eq!(begins("<a><b=x", &words), Match::Whole(6));
        assert_eq!(begins(" <a>\n\n <b=x", &words), Match::Whole(10));
        for begun in ["", " ", "<", "<a>", "<a> \n", "<a>\n<"] {
            assert_eq!(begins(begun, &words), Match::Begun, "{begun:?}");
        }
        for other in ["x", "<a>x", "<a>\n<c"] {
            assert_eq!(begins(other, &words), Match::None, "{other:?}");
        }
    }

    #[test]
    fn words_are_found_whole_or_begun_at_the_end_and_not_where_the_second_does_not_follow() {
        let words = words("</a>\n<b>");
        let found = |text: &str| find(text, 0, &words);
        assert_eq!(found("x</a> <b>y"), (1, Match::Whole(8)));
        assert_eq!(found("x</a>y</a><b>"), (6, Match::Whole(7)));
        assert_eq!(found("é</"), (2, Match::Begun));
        assert_eq!(found("</a>x</a>\n"), (5, Match::Begun));
        assert_eq!(found("</a>x é"), ("</a>x é".len(), Match::None));
        assert_eq!(find("</a><b></a><b>", 1, &words), (7, Match::Whole(7)));
        assert_eq!(found(""), (0, Match::None));
    }
}
