//! Turns the bytes of tokens into text while they come.
//!
//! Two things are held back: the bytes of a character that is not complete yet, and text that may be the beginning of a stop string.
//! Everything else is released at once. However the text is divided into tokens, the released pieces together are the whole text decoded at
//! once (`String::from_utf8_lossy`: one U+FFFD for every longest piece that cannot become a character), cut where a search in that text
//! finds the earliest stop string.
//!
//! A model also produces text that no reader sees: control tokens, and the channels in which it thinks. A stop string is searched for in
//! all that is produced as well ([`TextStream::pass`]); one that begins in hidden text cuts the shown text where that hidden text stands.
//!
//! The leading space: a SentencePiece token `▁word` stands for " word". llama.cpp and transformers drop that one space where a *whole text*
//! begins, because encoding put it there, and keep it in a continuation after a prompt, where it separates words. So does this module:
//! [`TextStream::continuation`] keeps every byte, [`TextStream::whole`] drops the first space if the tokenizer says so.

use crate::error::{Error, Result};
use std::collections::VecDeque;

/// Stop strings of an answer, at most. OpenAI's API takes 4; some clients send every role marker of a template.
pub const MAX_STOPS: usize = 16;
/// Bytes of a stop string, at most: text that may be its beginning is held back, which costs memory and delay.
pub const MAX_STOP: usize = 4096;

/// The text that one push released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// The released text; may be empty.
    pub text: String,
    /// A stop string ended the text: generation is over and nothing more will be released.
    pub stopped: bool,
}

/// The text of one answer while it is generated.
#[derive(Debug)]
pub struct TextStream {
    stops: Vec<Stop>,
    /// The first bytes of a character that is not complete, 3 at most.
    partial: Vec<u8>,
    /// Text that is held back because a stop string may have begun in it.
    held: String,
    /// Bytes of text released so far.
    out: usize,
    /// Where the earliest complete stop string so far begins, in bytes from the start of the shown text. One that began even
    /// earlier may still complete; until that is settled the text goes on.
    cut: Option<Cut>,
    stopped: bool,
    drop_space: bool,
    /// Bytes of hidden text so far.
    hidden: usize,
    /// Hidden text in which a stop string may have begun, oldest first: where it stands in the shown text, and its bytes.
    gaps: VecDeque<(usize, usize)>,
}

/// Where a stop string cuts the shown text, and which one.
#[derive(Clone, Copy, Debug)]
struct Cut {
    at: usize,
    stop: usize,
}

impl Cut {
    /// The earlier of two cuts.
    fn earlier(self, other: Option<Cut>) -> Cut {
        other.filter(|other| other.at <= self.at).unwrap_or(self)
    }
}

/// One stop string and how much of it the text ends with: Knuth, Morris and Pratt's automaton, so that a text of
/// n bytes costs n steps whatever repeats in it.
#[derive(Debug)]
struct Stop {
    text: Box<[u8]>,
    /// `fallback[i]`: the longest proper prefix of `text` that is a suffix of `text[..=i]`. [text.len()]
    fallback: Box<[u32]>,
    /// Bytes of it that the shown text ends with.
    matched: usize,
    /// Bytes of it that all produced text ends with, shown and hidden; the same until there is hidden text.
    matched_in_all: usize,
    /// Once found, only an earlier find of another stop string can matter.
    found: bool,
}

impl TextStream {
    /// Text that follows a prompt: every byte counts.
    ///
    /// # Errors
    /// [`Error::Usage`] for an empty stop string, one of more than [`MAX_STOP`] bytes, or more than [`MAX_STOPS`].
    pub fn continuation(stops: &[String]) -> Result<TextStream> {
        TextStream::new(stops, false)
    }

    /// A whole text; `drop_space` is [`super::Tokenizer::drops_leading_space`].
    ///
    /// # Errors
    /// As [`TextStream::continuation`].
    pub fn whole(stops: &[String], drop_space: bool) -> Result<TextStream> {
        TextStream::new(stops, drop_space)
    }

    fn new(stops: &[String], drop_space: bool) -> Result<TextStream> {
        if stops.len() > MAX_STOPS {
            return Err(Error::Usage(format!("{} stop strings; at most {MAX_STOPS} are taken", stops.len())));
        }
        let stops = stops.iter().map(|s| Stop::new(s)).collect::<Result<_>>()?;
        Ok(TextStream {
            stops,
            partial: Vec::with_capacity(4),
            held: String::new(),
            out: 0,
            cut: None,
            stopped: false,
            drop_space,
            hidden: 0,
            gaps: VecDeque::new(),
        })
    }

    /// Takes the bytes of the next token. After the end it does nothing.
    pub fn push(&mut self, token: &[u8]) -> Delta {
        if self.stopped || token.is_empty() {
            return Delta { text: String::new(), stopped: self.stopped };
        }
        let mut token = token;
        if std::mem::take(&mut self.drop_space) {
            token = token.strip_prefix(b" ").unwrap_or(token);
        }
        let before = self.held.len();
        decode_into(&mut self.partial, token, &mut self.held);
        let settled = self.search(before);
        self.release(settled)
    }

    /// Takes text that the model produced and no reader sees, such as a control token's: only stop strings look at it. Of a character whose
    /// bytes come before and behind it, it counts as standing before.
    pub fn pass(&mut self, produced: &[u8]) -> Delta {
        if self.stopped || produced.is_empty() || self.stops.is_empty() {
            return Delta { text: String::new(), stopped: self.stopped };
        }
        if self.hidden == 0 {
            self.stops.iter_mut().for_each(|stop| stop.matched_in_all = stop.matched);
        }
        let end = self.out + self.held.len();
        let mut settled = false;
        for &byte in produced {
            self.hidden += 1;
            match self.gaps.back_mut() {
                Some((at, bytes)) if *at == end => *bytes += 1,
                _ => self.gaps.push_back((end, 1)),
            }
            for (index, stop) in self.stops.iter_mut().enumerate().filter(|(_, stop)| !stop.found) {
                if step(&stop.text, &stop.fallback, &mut stop.matched_in_all, byte) {
                    stop.found = true;
                    let at = shown_before(&self.gaps, end, stop.text.len());
                    self.cut = Some(Cut { at, stop: index }.earlier(self.cut));
                }
            }
            settled = self.settled(end);
            if settled {
                break;
            }
        }
        self.release(settled)
    }

    /// The end of generation: what was held back, with an incomplete character as U+FFFD.
    pub fn finish(&mut self) -> Delta {
        if self.stopped {
            return Delta { text: String::new(), stopped: true };
        }
        if !std::mem::take(&mut self.partial).is_empty() {
            let before = self.held.len();
            self.held.push(char::REPLACEMENT_CHARACTER);
            self.search(before);
        }
        let found = self.cut.is_some();
        if let Some(cut) = self.cut {
            self.held.truncate(cut.at - self.out);
        }
        self.stopped = true;
        self.out += self.held.len();
        Delta { text: std::mem::take(&mut self.held), stopped: found }
    }

    /// The stop string that ended the text, by its number; `None` if none did.
    pub fn stopped_by(&self) -> Option<usize> {
        self.cut.filter(|_| self.stopped).map(|cut| cut.stop)
    }

    /// Runs the stop strings over `held[from..]`; whether the cut is there and final.
    fn search(&mut self, from: usize) -> bool {
        for i in from..self.held.len() {
            let (byte, end) = (self.held.as_bytes()[i], self.out + i + 1);
            for (index, stop) in self.stops.iter_mut().enumerate().filter(|(_, stop)| !stop.found) {
                let shown = step(&stop.text, &stop.fallback, &mut stop.matched, byte);
                let all = self.hidden > 0 && step(&stop.text, &stop.fallback, &mut stop.matched_in_all, byte);
                if shown || all {
                    stop.found = true;
                    // Hidden text can only have it begin later in the shown text.
                    let length = stop.text.len();
                    let at = if shown { end - length } else { shown_before(&self.gaps, end, length) };
                    self.cut = Some(Cut { at, stop: index }.earlier(self.cut));
                }
            }
            if self.settled(end) {
                return true;
            }
        }
        false
    }

    /// Where the earliest beginning of a stop string that is under way stands in the shown text, which ends at `end`.
    fn under_way(&self, end: usize) -> usize {
        let begins = |stop: &Stop| {
            let in_all = if self.hidden > 0 { shown_before(&self.gaps, end, stop.matched_in_all) } else { end };
            in_all.min(end - stop.matched)
        };
        self.stops.iter().filter(|stop| !stop.found).map(begins).min().unwrap_or(end)
    }

    /// Whether the cut is there and no stop string that is under way at `end` began before it.
    fn settled(&self, end: usize) -> bool {
        self.cut.is_some_and(|cut| self.under_way(end) >= cut.at)
    }

    /// Lets out what no stop string can take back.
    fn release(&mut self, settled: bool) -> Delta {
        let end = self.out + self.held.len();
        let keep = match self.cut {
            Some(cut) if settled => {
                self.held.truncate(cut.at - self.out);
                self.stopped = true;
                cut.at
            }
            // A stop string is under way that began before the cut, so before the cut is early enough.
            _ => self.under_way(end),
        };
        while self.gaps.front().is_some_and(|(at, _)| *at < keep) {
            self.gaps.pop_front();
        }
        let rest = self.held.split_off(keep - self.out);
        let text = std::mem::replace(&mut self.held, rest);
        self.out += text.len();
        Delta { text, stopped: self.stopped }
    }
}

impl Stop {
    fn new(text: &str) -> Result<Stop> {
        if text.is_empty() {
            return Err(Error::Usage("a stop string is empty; leave it out to generate without one".into()));
        }
        if text.len() > MAX_STOP {
            let n = text.len();
            return Err(Error::Usage(format!("a stop string has {n} bytes; at most {MAX_STOP} are taken")));
        }
        let text: Box<[u8]> = text.as_bytes().into();
        let mut fallback = vec![0u32; text.len()];
        let mut matched = 0;
        for i in 1..text.len() {
            while matched > 0 && text[i] != text[matched] {
                matched = fallback[matched - 1] as usize;
            }
            matched += usize::from(text[i] == text[matched]);
            fallback[i] = matched as u32;
        }
        Ok(Stop { text, fallback: fallback.into(), matched: 0, matched_in_all: 0, found: false })
    }
}

/// Takes the next byte of a text that ends with the first `matched` bytes of `stop`; whether all of it is there now.
fn step(stop: &[u8], fallback: &[u32], matched: &mut usize, byte: u8) -> bool {
    while *matched > 0 && stop[*matched] != byte {
        *matched = fallback[*matched - 1] as usize;
    }
    *matched += usize::from(stop[*matched] == byte);
    *matched == stop.len()
}

/// Where the last `bytes` of all produced text begin in the shown text, which ends at `end`.
fn shown_before(gaps: &VecDeque<(usize, usize)>, end: usize, bytes: usize) -> usize {
    let (mut at, mut left) = (end, bytes);
    for &(gap, hidden) in gaps.iter().rev() {
        let shown = left.min(at - gap);
        (at, left) = (at - shown, left - shown);
        if left == 0 {
            break;
        }
        left = left.saturating_sub(hidden);
    }
    at - left
}

/// Appends to `text` what `partial` and `bytes` decode to; what may still become a character stays in `partial`.
fn decode_into(partial: &mut Vec<u8>, bytes: &[u8], text: &mut String) {
    partial.extend_from_slice(bytes);
    let mut rest = &partial[..];
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                partial.clear();
                return;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                // `valid_up_to` says so.
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                match error.error_len() {
                    Some(wrong) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &after[wrong..];
                    }
                    None => {
                        let keep = after.len();
                        partial.drain(..partial.len() - keep);
                        return;
                    }
                }
            }
        }
    }
}
