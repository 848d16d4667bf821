//! Prompts for what is missing in a text (fill in the middle, FIM).
//!
//! Models of code were trained on files whose middle stands at the end: a mark, what comes before, a mark, what comes behind, a mark, and the
//! middle. Some know other files of a repository before that, each behind a mark with its name (Qwen2.5-Coder, section 3.1).

use super::{Special, Tokenizer};
use crate::error::Result;

/// The marks of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    before: u32,
    behind: u32,
    middle: u32,
    repository: Option<u32>,
    file: Option<u32>,
    /// Tokens that end the middle, beside those that end every answer.
    pub ends: Vec<u32>,
}

/// How a family of models names the marks; what it has not is empty.
struct Names {
    before: &'static str,
    behind: &'static str,
    middle: &'static str,
    repository: &'static str,
    file: &'static str,
    pad: &'static str,
}

const FAMILIES: [Names; 4] = [
    // Qwen2.5-Coder, Qwen3-Coder, CodeGemma.
    Names {
        before: "<|fim_prefix|>",
        behind: "<|fim_suffix|>",
        middle: "<|fim_middle|>",
        repository: "<|repo_name|>",
        file: "<|file_sep|>",
        pad: "<|fim_pad|>",
    },
    // StarCoder 2, Granite.
    Names {
        before: "<fim_prefix>",
        behind: "<fim_suffix>",
        middle: "<fim_middle>",
        repository: "<repo_name>",
        file: "<file_sep>",
        pad: "<fim_pad>",
    },
    // DeepSeek-Coder.
    Names {
        before: "<｜fim▁begin｜>",
        behind: "<｜fim▁hole｜>",
        middle: "<｜fim▁end｜>",
        repository: "",
        file: "",
        pad: "",
    },
    // GLM-4.5.
    Names {
        before: "<|code_prefix|>",
        behind: "<|code_suffix|>",
        middle: "<|code_middle|>",
        repository: "",
        file: "",
        pad: "",
    },
];

/// What a repository and a file without a name are called.
const UNNAMED: [&str; 2] = ["repository\n", "file\n"];

impl Marks {
    /// Those of a vocabulary, by the ids of its tokens' texts; `None` for one that has none.
    pub fn find(id_of: impl Fn(&str) -> Option<u32>) -> Option<Marks> {
        FAMILIES.iter().find_map(|names| {
            let [before, behind, middle] = [names.before, names.behind, names.middle].map(|name| Some(id_of(name)?));
            let (before, behind, middle) = (before?, behind?, middle?);
            let [repository, file, pad] = [names.repository, names.file, names.pad].map(&id_of);
            let ends = [before, behind, middle].into_iter().chain([repository, file, pad].into_iter().flatten());
            Some(Marks { before, behind, middle, repository, file, ends: ends.collect() })
        })
    }
}

/// A prompt for what is missing, in parts.
pub struct Infill {
    marks: Marks,
    bos: Option<u32>,
    /// What comes before all files.
    head: Vec<u32>,
    /// Other files with their marks and names, in the order in which they stand.
    files: Vec<Vec<u32>>,
    /// What comes before the text itself where there are other files.
    name: Vec<u32>,
    before: Vec<u32>,
    behind: Vec<u32>,
}

impl Infill {
    /// A prompt for what is missing between two texts; `files` are others of the same repository, each with its name. `None` for a vocabulary
    /// without marks. No text becomes a control token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn new(
        tokenizer: &Tokenizer,
        files: &[(String, String)],
        before: &str,
        behind: &str,
    ) -> Result<Option<Infill>> {
        let Some(marks) = tokenizer.infill_marks().cloned() else { return Ok(None) };
        let text = |text: &str| tokenizer.encode(text, Special::AsText);
        let marked = |mark: Option<u32>, rest: &str| -> Result<Vec<u32>> {
            let Some(mark) = mark else { return Ok(Vec::new()) };
            Ok([vec![mark], text(rest)?].concat())
        };
        let file = |(name, content): &(String, String)| match marks.file {
            Some(_) => marked(marks.file, &format!("{name}\n{content}\n")),
            None => text(&format!("{name}\n{content}\n\n")),
        };
        let [head, name] = match files.is_empty() {
            true => [Vec::new(), Vec::new()],
            false => [marked(marks.repository, UNNAMED[0])?, marked(marks.file, UNNAMED[1])?],
        };
        let files = files.iter().map(file).collect::<Result<_>>()?;
        let (before, behind) = (text(before)?, text(behind)?);
        Ok(Some(Infill { bos: tokenizer.bos_if_added(), head, files, name, before, behind, marks }))
    }

    /// Its tokens.
    pub fn len(&self) -> usize {
        let files: usize = self.files.iter().map(Vec::len).sum();
        usize::from(self.bos.is_some())
            + self.head.len()
            + files
            + self.name.len()
            + 3
            + self.before.len()
            + self.behind.len()
    }

    /// Whether both texts are empty.
    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.behind.is_empty()
    }

    /// Leaves out what does not fit `room` tokens: first the files that are first, then what is farthest from the gap, where the text before it
    /// may have three quarters. Returns whether something was left out.
    pub fn fit(&mut self, room: usize) -> bool {
        let whole = self.len();
        while self.len() > room && !self.files.is_empty() {
            self.files.remove(0);
        }
        if self.files.is_empty() {
            self.head.clear();
            self.name.clear();
        }
        let both = self.before.len() + self.behind.len();
        let rest = room.saturating_sub(self.len() - both);
        if both > rest {
            let behind = self.behind.len().min((rest / 4).max(rest.saturating_sub(self.before.len())));
            self.behind.truncate(behind);
            self.before.drain(..self.before.len() - self.before.len().min(rest - behind));
        }
        self.len() < whole
    }

    /// The prompt.
    pub fn tokens(self) -> Vec<u32> {
        let Infill { marks, bos, head, files, name, before, behind } = self;
        let mut all: Vec<u32> = bos.into_iter().chain(head).collect();
        files.into_iter().for_each(|file| all.extend(file));
        all.extend(name);
        all.push(marks.before);
        all.extend(before);
        all.push(marks.behind);
        all.extend(behind);
        all.push(marks.middle);
        all
    }
}
