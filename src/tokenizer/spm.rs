//! SentencePiece's BPE as Llama 1 and 2 use it: merges by score, no merge list, no word boundaries.
//!
//! Source: sentencepiece 0.2 `bpe_model.cc` and llama.cpp `llm_tokenizer_spm`. The two agree but for tokens the user
//! defined: sentencepiece keeps them whole inside the text (done here), llama.cpp puts a space after them.

use super::byte_tokens::byte_of;
use super::spec::{SpmSpec, TokenKind};
use super::special::{BREAK, SpecialTexts};
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// SentencePiece's character for a space.
pub const SPACE: char = '▁';

/// An encoder for SentencePiece BPE.
#[derive(Debug)]
pub struct Spm {
    /// Tokens that text can become: normal, user-defined and unused ones.
    by_text: HashMap<Box<str>, u32>,
    scores: Vec<f32>,
    unused: Vec<bool>,
    user_defined: SpecialTexts,
    /// The token of each byte value; `NONE` where the vocabulary has none, such as for a tab that is a token itself.
    bytes: Box<[u32; 256]>,
    unknown: Option<u32>,
    /// Bytes of the longest token: longer pieces are not looked up.
    longest: usize,
    add_space_prefix: bool,
    remove_extra_whitespaces: bool,
}

/// A piece of the text, in a doubly linked list with [`NONE`] at its ends. A piece that was merged into another has length 0.
#[derive(Clone, Copy)]
struct Symbol {
    start: u32,
    len: u32,
    prev: u32,
    next: u32,
    /// A user-defined token: never merged.
    frozen: bool,
}

const NONE: u32 = u32::MAX;

/// Two neighbours that together are a token.
struct Pair {
    score: f32,
    left: u32,
    right: u32,
    /// Their length in bytes together: differs from the symbols' once one of them was merged.
    len: u32,
}

impl Ord for Pair {
    /// The largest score is the greatest; the leftmost of equals.
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Pair) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

impl Spm {
    /// From a checked spec ([`check`](super::spec::check)); `unknown` is its unknown token. Text never becomes a token that is `control`,
    /// whatever kind the file gives it.
    pub fn new(spec: &SpmSpec, unknown: Option<u32>, control: &dyn Fn(u32, &str) -> bool) -> Spm {
        let mut by_text: HashMap<Box<str>, u32> = HashMap::with_capacity(spec.tokens.len());
        let mut bytes = Box::new([NONE; 256]);
        let mut user_defined = Vec::new();
        for ((text, &kind), id) in spec.tokens.iter().zip(&spec.kinds).zip(0u32..) {
            match kind {
                TokenKind::UserDefined if control(id, text) => {}
                TokenKind::UserDefined => {
                    // Converters write Gemma's runs of spaces as spaces.
                    let text = text.replace(' ', SPACE.encode_utf8(&mut [0; 4]));
                    by_text.entry(text.as_str().into()).or_insert(id);
                    user_defined.push((text, id));
                }
                TokenKind::Normal | TokenKind::Unused => {
                    by_text.entry(text.as_str().into()).or_insert(id);
                }
                TokenKind::Byte => {
                    if let Some(byte) = byte_of(text) {
                        bytes[usize::from(byte)] = id;
                    }
                }
                TokenKind::Unknown | TokenKind::Control => {}
            }
        }
        Spm {
            longest: by_text.keys().map(|t| t.len()).max().unwrap_or(0),
            by_text,
            // -0.0 and 0.0 are equal scores; `total_cmp` alone would not have it so.
            scores: spec.scores.iter().map(|s| s + 0.0).collect(),
            unused: spec.kinds.iter().map(|&k| k == TokenKind::Unused).collect(),
            user_defined: SpecialTexts::new(user_defined.iter().map(|(text, id)| (text.as_str(), *id))),
            bytes,
            unknown,
            add_space_prefix: spec.add_space_prefix,
            remove_extra_whitespaces: spec.remove_extra_whitespaces,
        }
    }

    /// Appends the tokens of one piece of text without special tokens. `first`: it begins the text, or follows
    /// a special token.
    pub fn encode(&self, text: &str, first: bool, out: &mut Vec<u32>) {
        let text = self.normalise(text, first && self.add_space_prefix);
        let mut symbols = self.symbols(&text);
        let split_of = self.merge(&text, &mut symbols);
        let mut last_unknown = false;
        let mut at = if symbols.is_empty() { NONE } else { 0 };
        let mut stack = Vec::new();
        while at != NONE {
            let Symbol { start, len, next, .. } = symbols[at as usize];
            stack.push(&text[start as usize..(start + len) as usize]);
            while let Some(piece) = stack.pop() {
                match (self.by_text.get(piece), split_of.get(piece)) {
                    // An unused token is a step on the way to longer ones; as a result it is taken apart again.
                    (Some(&id), Some(&left)) if self.unused[id as usize] => {
                        stack.push(&piece[left as usize..]);
                        stack.push(&piece[..left as usize]);
                    }
                    (Some(&id), _) => {
                        out.push(id);
                        last_unknown = false;
                    }
                    (None, _) => last_unknown = self.push_unknown(piece, last_unknown, out),
                }
            }
            at = next;
        }
    }

    /// The tokens of the piece's bytes; if one of these is missing, one unknown token for a run of unknown pieces. Returns whether it was the
    /// latter.
    fn push_unknown(&self, piece: &str, last_unknown: bool, out: &mut Vec<u32>) -> bool {
        let bytes = piece.bytes().map(|b| self.bytes[usize::from(b)]);
        if !bytes.clone().any(|id| id == NONE) {
            out.extend(bytes);
            return false;
        }
        if !last_unknown {
            out.extend(self.unknown);
        }
        true
    }

    fn normalise(&self, text: &str, prefix: bool) -> String {
        let mut out = String::with_capacity(text.len() + 3);
        let text = text.chars().filter(|&c| c != BREAK).map(|c| if c == ' ' { SPACE } else { c });
        if self.remove_extra_whitespaces {
            for c in text {
                if c != SPACE || !(out.is_empty() || out.ends_with(SPACE)) {
                    out.push(c);
                }
            }
            out.truncate(out.trim_end_matches(SPACE).len());
        } else {
            out.extend(text);
        }
        if prefix && !out.is_empty() {
            out.insert(0, SPACE);
        }
        out
    }

    fn symbols(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            let user_defined = self.user_defined.longest_at(&text.as_bytes()[at..]);
            let len = match user_defined {
                Some((_, len)) => len,
                None => text[at..].chars().next().map_or(1, char::len_utf8),
            };
            let index = symbols.len() as u32;
            symbols.push(Symbol {
                start: at as u32,
                len: len as u32,
                prev: index.wrapping_sub(1),
                next: index + 1,
                frozen: user_defined.is_some(),
            });
            at += len;
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        symbols
    }

    /// Merges neighbours, best score first, until no two make a token. Returns for every unused token met where its left
    /// part ended.
    fn merge<'t>(&self, text: &'t str, symbols: &mut [Symbol]) -> HashMap<&'t str, u32> {
        let mut split_of = HashMap::new();
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        for left in 1..symbols.len() as u32 {
            self.propose(text, symbols, left - 1, left, &mut queue, &mut split_of);
        }
        while let Some(Pair { left, right, len, .. }) = queue.pop() {
            let (l, r) = (symbols[left as usize], symbols[right as usize]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue;
            }
            symbols[left as usize].len = len;
            symbols[left as usize].next = r.next;
            symbols[right as usize].len = 0;
            if r.next != NONE {
                symbols[r.next as usize].prev = left;
                self.propose(text, symbols, left, r.next, &mut queue, &mut split_of);
            }
            if l.prev != NONE {
                self.propose(text, symbols, l.prev, left, &mut queue, &mut split_of);
            }
        }
        split_of
    }

    fn propose<'t>(
        &self,
        text: &'t str,
        symbols: &[Symbol],
        left: u32,
        right: u32,
        queue: &mut BinaryHeap<Pair>,
        split_of: &mut HashMap<&'t str, u32>,
    ) {
        let (l, r) = (symbols[left as usize], symbols[right as usize]);
        let len = l.len + r.len;
        if l.frozen || r.frozen || len as usize > self.longest {
            return;
        }
        let piece = &text[l.start as usize..(l.start + len) as usize];
        if let Some(&id) = self.by_text.get(piece) {
            queue.push(Pair { score: self.scores[id as usize], left, right, len });
            if self.unused[id as usize] {
                split_of.insert(piece, l.len);
            }
        }
    }
}
