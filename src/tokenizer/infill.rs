//! Prompts for the middle of a text whose prefix and suffix are given ([`super::fim`]).

use super::fim::FimTokens;
use super::{MAX_BYTES_PER_TOKEN, Special, Tokenizer};
use crate::error::Result;

/// What a repository and a file without a name are called.
const UNNAMED: [&str; 2] = ["repository\n", "file\n"];
/// A prompt that does not fit loses this share of its room at a time, so that the next one, which is a few characters longer, begins with the
/// same tokens.
const STEPS: usize = 8;

/// A prompt for a middle, in parts.
pub struct Infill {
    fim: FimTokens,
    bos: Option<u32>,
    /// Other files with their names, behind the repository's.
    files: Vec<u32>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

impl Infill {
    /// A prompt for the middle between two texts; `None` for a vocabulary without FIM tokens. No text becomes a control token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn new(tokenizer: &Tokenizer, prefix: &str, suffix: &str) -> Result<Option<Infill>> {
        let Some(fim) = tokenizer.fim_tokens().cloned() else { return Ok(None) };
        let [prefix, suffix] = [prefix, suffix].map(|text| tokenizer.encode(text, Special::AsText));
        let (prefix, suffix, bos) = (prefix?, suffix?, tokenizer.bos_if_added());
        Ok(Some(Infill { fim, bos, files: Vec::new(), prefix, suffix }))
    }

    /// Puts other files of the repository, each with its name, before the texts: as many of the last ones as `room` tokens hold. Returns whether
    /// all have room.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn add_files(&mut self, tokenizer: &Tokenizer, files: &[(String, String)], room: usize) -> Result<bool> {
        let text = |text: &str| tokenizer.encode(text, Special::AsText);
        let marked = |token: Option<u32>, name: &str| -> Result<Vec<u32>> {
            let Some(token) = token else { return Ok(Vec::new()) };
            Ok([vec![token], text(name)?].concat())
        };
        let [head, last] = [marked(self.fim.repository, UNNAMED[0])?, marked(self.fim.file, UNNAMED[1])?];
        let mut left = room.saturating_sub(head.len() + last.len());
        let mut chosen = Vec::new();
        for (name, content) in files.iter().rev() {
            // No token has as many bytes on the average.
            if content.len() / MAX_BYTES_PER_TOKEN > left {
                break;
            }
            let file = self.fim.file.into_iter().chain(text(&format!("{name}\n{content}\n"))?);
            let file: Vec<u32> = file.collect();
            let Some(rest) = left.checked_sub(file.len()) else { break };
            left = rest;
            chosen.push(file);
        }
        let all = chosen.len() == files.len();
        if !chosen.is_empty() {
            chosen.reverse();
            self.files = [head, chosen.concat(), last].concat();
        }
        Ok(all)
    }

    /// Tokens of the whole prompt.
    pub fn count(&self) -> usize {
        self.least() + self.prefix.len() + self.suffix.len()
    }

    /// Tokens of the prompt without the two texts.
    pub fn least(&self) -> usize {
        2 + usize::from(self.bos.is_some()) + usize::from(self.fim.middle.is_some()) + self.files.len()
    }

    /// Cuts the texts to what `room` tokens hold: what is farthest from the middle goes, and a long prefix keeps three quarters. Returns whether
    /// everything fitted.
    pub fn fit(&mut self, room: usize) -> bool {
        if self.count() <= room {
            return true;
        }
        let rest = room.saturating_sub(self.least());
        let suffix = self.suffix.len().min((rest / 4).max(rest.saturating_sub(self.prefix.len())));
        self.suffix.truncate(suffix);
        let too_many = (self.prefix.len() + suffix).saturating_sub(rest);
        let step = (rest / STEPS).max(1);
        self.prefix.drain(..too_many.next_multiple_of(step).min(self.prefix.len()));
        false
    }

    /// The prompt.
    pub fn tokens(self) -> Vec<u32> {
        let Infill { fim, bos, files, prefix, suffix } = self;
        let (prefix, suffix) = ([vec![fim.prefix], prefix].concat(), [vec![fim.suffix], suffix].concat());
        let [first, second] = if fim.suffix_first { [suffix, prefix] } else { [prefix, suffix] };
        bos.into_iter().chain(files).chain(first).chain(second).chain(fim.middle).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::fim::is_name;

    /// The order of a prompt of one token on each side, by the names of its tokens.
    fn order(names: &[&str]) -> Vec<String> {
        let fim = FimTokens::find(|name| names.iter().position(|known| *known == name).map(|at| at as u32)).unwrap();
        let infill = Infill { fim, bos: Some(90), files: vec![91], prefix: vec![92], suffix: vec![93] };
        let name = |id: u32| match id {
            90 => "BOS",
            91 => "FILES",
            92 => "P",
            93 => "S",
            id => names[id as usize],
        };
        let count = infill.count();
        let tokens = infill.tokens();
        assert_eq!(tokens.len(), count);
        tokens.into_iter().map(|id| name(id).to_owned()).collect()
    }

    #[test]
    fn every_family_has_its_own_order() {
        for (names, wanted) in [
            (
                &["<|fim_middle|>", "<|fim_suffix|>", "<|fim_prefix|>", "x"][..],
                &["BOS", "FILES", "<|fim_prefix|>", "P", "<|fim_suffix|>", "S", "<|fim_middle|>"][..],
            ),
            (
                &["<｜fim▁end｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>"],
                &["BOS", "FILES", "<｜fim▁begin｜>", "P", "<｜fim▁hole｜>", "S", "<｜fim▁end｜>"],
            ),
            (
                &["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
                &["BOS", "FILES", "<|code_prefix|>", "P", "<|code_suffix|>", "S", "<|code_middle|>"],
            ),
            (
                &["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
                &["BOS", "FILES", "<fim_prefix>", "P", "<fim_suffix>", "S", "<fim_middle>"],
            ),
            (&["▁<PRE>", "▁<MID>", "▁<SUF>"], &["BOS", "FILES", "▁<PRE>", "P", "▁<SUF>", "S", "▁<MID>"]),
            (
                &["<[fim-suffix]>", "<[fim-middle]>", "<[fim-prefix]>"],
                &["BOS", "FILES", "<[fim-suffix]>", "S", "<[fim-prefix]>", "P", "<[fim-middle]>"],
            ),
            (&["[SUFFIX]", "[PREFIX]", "[MIDDLE]"], &["BOS", "FILES", "[SUFFIX]", "S", "[PREFIX]", "P"]),
        ] {
            assert_eq!(order(names), wanted);
            assert!(names.iter().filter(|name| !["x", "[MIDDLE]"].contains(name)).all(|name| is_name(name)));
        }
        assert_eq!(FimTokens::find(|name| (name == "<|fim_prefix|>").then_some(1)), None);
        assert_eq!(FimTokens::find(|_| None), None);
        let all = FimTokens::find(|name| Some(name.len() as u32)).unwrap();
        assert_eq!(all.ends.len(), 6);
    }

    #[test]
    fn what_is_cut_is_farthest_from_the_middle_and_a_longer_prefix_begins_where_it_did() {
        let fim = FimTokens::find(|name| Some(name.len() as u32)).unwrap();
        let long = |prefix: u32, suffix: u32| Infill {
            fim: fim.clone(),
            bos: None,
            files: Vec::new(),
            prefix: (0..prefix).collect(),
            suffix: (0..suffix).collect(),
        };
        for (prefix, suffix, room, whole) in [
            (10, 10, 23, true),
            (10, 10, 22, false),
            (1000, 1000, 400, false),
            (1000, 3, 400, false),
            (3, 1000, 400, false),
        ] {
            let mut infill = long(prefix, suffix);
            assert_eq!(infill.fit(room), whole);
            assert!(
                infill.count() <= room && infill.count() + room / STEPS + 1 >= room.min(3 + (prefix + suffix) as usize)
            );
            assert!(
                infill.prefix.ends_with(&[prefix - 1]) && infill.suffix.starts_with(&[0]),
                "{prefix} {suffix} {room}"
            );
        }
        let begins: std::collections::BTreeSet<u32> = (1000..1100)
            .map(|n| {
                let mut infill = long(n, 5);
                infill.fit(400);
                infill.prefix[0]
            })
            .collect();
        assert!(begins.len() <= 3, "{begins:?}");
    }
}
