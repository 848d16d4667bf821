//! How a model writes calls of functions: the texts around a call's name and arguments.

use super::json_scan::Keys;

/// How calls are written in an answer. White space between words of these texts is optional when an answer is read.
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, PartialEq)]
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
}

impl CallFormat {
    /// What a model is told to write that was not trained for calls: nothing but `{"name": ..., "arguments": {...}}`.
    pub fn told() -> CallFormat {
        let keys = Keys { name: "name".into(), arguments: "arguments".into() };
        CallFormat { open: String::new(), body: Body::Object(keys), join: None, close: String::new() }
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
        };
        [self.open.as_str(), self.close.as_str()].into_iter().chain(self.join.as_deref()).chain(within)
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

/// Where `text` has `word`, or where its end may be the beginning of `word`; `None` if nowhere.
pub fn find(text: &str, word: &str) -> Option<(usize, bool)> {
    if let Some(at) = text.find(word) {
        return Some((at, true));
    }
    let from = text.len().saturating_sub(word.len().saturating_sub(1));
    let mut ends = text.char_indices().map(|(at, _)| at).filter(|at| *at >= from);
    ends.find(|at| word.starts_with(&text[*at..])).map(|at| (at, false))
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
    fn a_word_is_found_whole_or_begun_at_the_end() {
        assert_eq!(find("x<tool>y", "<tool>"), Some((1, true)));
        assert_eq!(find("é<to", "<tool>"), Some((2, false)));
        assert_eq!(find("<to x", "<tool>"), None);
        assert_eq!(find("", "<tool>"), None);
    }
}
