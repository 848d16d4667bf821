//! Finding the texts of special tokens in text, and making them harmless.

use std::collections::HashMap;

/// Breaks the text of a control token apart where a user wrote it: a Unicode noncharacter, which no interchanged text may
/// hold (Unicode 16, 23.7). Encoding takes it out again after the special tokens have been found.
pub const BREAK: char = '\u{fdd0}';

/// Texts to find, as a tree over their bytes.
#[derive(Debug, Default)]
pub struct SpecialTexts {
    /// From (node, byte) to node; the root is 0.
    edges: HashMap<(u32, u8), u32>,
    /// The token whose text ends at a node. [nodes]
    ends: Vec<Option<u32>>,
    /// Bytes that begin some text: nearly every position of a text fails here, without hashing.
    first: Vec<bool>,
}

/// A piece of a text: ordinary, or the text of a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Text(&'a str),
    Token(u32),
}

impl SpecialTexts {
    /// Empty texts are left out: they would be everywhere.
    pub fn new<'a>(texts: impl IntoIterator<Item = (&'a str, u32)>) -> SpecialTexts {
        let mut tree = SpecialTexts { edges: HashMap::new(), ends: vec![None], first: vec![false; 256] };
        for (text, id) in texts.into_iter().filter(|(text, _)| !text.is_empty()) {
            tree.first[usize::from(text.as_bytes()[0])] = true;
            let mut node = 0;
            for &byte in text.as_bytes() {
                let next = tree.ends.len() as u32;
                node = *tree.edges.entry((node, byte)).or_insert(next);
                if node == next {
                    tree.ends.push(None);
                }
            }
            tree.ends[node as usize].get_or_insert(id);
        }
        tree
    }

    pub fn is_empty(&self) -> bool {
        self.ends.len() <= 1
    }

    /// The longest text that `bytes` begins with: its token and its length in bytes.
    pub fn longest_at(&self, bytes: &[u8]) -> Option<(u32, usize)> {
        if bytes.first().is_none_or(|&b| self.first.get(usize::from(b)) != Some(&true)) {
            return None;
        }
        let mut node = 0;
        let mut longest = None;
        for (i, &byte) in bytes.iter().enumerate() {
            let Some(&next) = self.edges.get(&(node, byte)) else { break };
            node = next;
            if let Some(id) = self.ends[node as usize] {
                longest = Some((id, i + 1));
            }
        }
        longest
    }

    /// The pieces of `text`, leftmost and longest first; no piece of text is empty.
    pub fn split<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let Some((id, len)) = self.longest_at(&text.as_bytes()[at..]) else {
                at += 1;
                continue;
            };
            if start < at {
                pieces.push(Piece::Text(&text[start..at]));
            }
            pieces.push(Piece::Token(id));
            at += len;
            start = at;
        }
        if start < text.len() {
            pieces.push(Piece::Text(&text[start..]));
        }
        pieces
    }

    /// `text` with every occurrence broken apart, overlapping ones too; [`BREAK`]s that were in it are taken out first,
    /// so that `<|im_<BREAK>end|>` does not become what it looks like. A text of a single character cannot be broken:
    /// U+FFFD takes its place.
    pub fn defuse(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let clean = text.replace(BREAK, "");
        for (at, c) in clean.char_indices() {
            match self.longest_at(&clean.as_bytes()[at..]) {
                None => out.push(c),
                Some((_, len)) if len == c.len_utf8() => out.push(char::REPLACEMENT_CHARACTER),
                Some(_) => out.extend([c, BREAK]),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> SpecialTexts {
        SpecialTexts::new([("<s>", 1), ("<s>>", 2), ("</s>", 3), ("§", 4), ("", 9)])
    }

    #[test]
    fn the_leftmost_and_then_the_longest_wins() {
        use Piece::{Text, Token};
        assert_eq!(texts().split("a<s>>b</s></s"), [Text("a"), Token(2), Text("b"), Token(3), Text("</s")]);
        assert_eq!(texts().split("é§"), [Text("é"), Token(4)]);
        assert_eq!(texts().split(""), []);
    }

    #[test]
    fn defused_text_holds_no_special_text() {
        for text in ["<s>", "<<s>s>", "<s>>", "x</s><s>", "<s\u{fdd0}>", "§§", "<\u{fdd0}\u{fdd0}s>"] {
            let defused = texts().defuse(text);
            assert!(texts().split(&defused).iter().all(|p| matches!(p, Piece::Text(_))), "{text:?} -> {defused:?}");
        }
        assert_eq!(texts().defuse("a<s>b").replace(BREAK, ""), "a<s>b");
    }
}
