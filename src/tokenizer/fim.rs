//! The tokens by which a model of code writes the middle of a text (fill in the middle, FIM: Bavarian et al. 2022).
//!
//! Such a model was trained on texts whose middle stands at the end, behind tokens that say where prefix, suffix and middle begin. Some models
//! know other files of a repository before that, each behind a token and its name (Hui et al. 2024, "Qwen2.5-Coder", section 3.1).

/// How a family of models names its FIM tokens; what it lacks is empty.
struct Names {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    /// The one of these that a vocabulary has.
    repository: &'static [&'static str],
    file: &'static [&'static str],
    /// Further tokens that end a middle.
    ends: &'static [&'static str],
    /// The suffix stands before the prefix.
    suffix_first: bool,
}

const FAMILIES: [Names; 7] = [
    // Qwen2.5-Coder, Qwen3-Coder.
    Names {
        prefix: "<|fim_prefix|>",
        suffix: "<|fim_suffix|>",
        middle: "<|fim_middle|>",
        repository: &["<|repo_name|>"],
        file: &["<|file_sep|>"],
        ends: &["<|fim_pad|>"],
        suffix_first: false,
    },
    // DeepSeek-Coder.
    Names {
        prefix: "<｜fim▁begin｜>",
        suffix: "<｜fim▁hole｜>",
        middle: "<｜fim▁end｜>",
        repository: &[],
        file: &[],
        ends: &[],
        suffix_first: false,
    },
    // GLM-4.5.
    Names {
        prefix: "<|code_prefix|>",
        suffix: "<|code_suffix|>",
        middle: "<|code_middle|>",
        repository: &[],
        file: &[],
        ends: &[],
        suffix_first: false,
    },
    // StarCoder2; Granite Code, whose architecture is Llama's.
    Names {
        prefix: "<fim_prefix>",
        suffix: "<fim_suffix>",
        middle: "<fim_middle>",
        repository: &["<repo_name>", "<reponame>"],
        file: &["<file_sep>", "<filename>"],
        ends: &["<fim_pad>"],
        suffix_first: false,
    },
    // Code Llama.
    Names {
        prefix: "▁<PRE>",
        suffix: "▁<SUF>",
        middle: "▁<MID>",
        repository: &[],
        file: &[],
        ends: &["▁<EOT>"],
        suffix_first: false,
    },
    // Seed-Coder.
    Names {
        prefix: "<[fim-prefix]>",
        suffix: "<[fim-suffix]>",
        middle: "<[fim-middle]>",
        repository: &[],
        file: &[],
        ends: &[],
        suffix_first: true,
    },
    // Codestral.
    Names {
        prefix: "[PREFIX]",
        suffix: "[SUFFIX]",
        middle: "",
        repository: &[],
        file: &[],
        ends: &[],
        suffix_first: true,
    },
];

/// Whether a token of this text is one of them, which no text of a user may become.
pub fn is_name(text: &str) -> bool {
    let is_in = |names: &Names| {
        let lists = [&[names.prefix, names.suffix, names.middle][..], names.repository, names.file, names.ends];
        lists.into_iter().any(|list| list.contains(&text))
    };
    text.starts_with(['<', '[', '▁']) && FAMILIES.iter().any(is_in)
}

/// The FIM tokens of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FimTokens {
    /// Begins the prefix.
    pub prefix: u32,
    /// Begins the suffix.
    pub suffix: u32,
    /// Begins the middle.
    pub middle: Option<u32>,
    /// Begins the name of a repository.
    pub repository: Option<u32>,
    /// Begins the name of a file.
    pub file: Option<u32>,
    /// The suffix stands before the prefix.
    pub suffix_first: bool,
    /// Tokens that end a middle, beside those that end every answer.
    pub ends: Vec<u32>,
}

impl FimTokens {
    /// Those of a vocabulary, by the ids of its tokens' texts; `None` for one that has none.
    pub fn find(id_of: impl Fn(&str) -> Option<u32>) -> Option<FimTokens> {
        FAMILIES.iter().find_map(|names| {
            let known = |name: &str| if name.is_empty() { None } else { id_of(name) };
            let (prefix, suffix, middle) = (known(names.prefix)?, known(names.suffix)?, known(names.middle));
            if middle.is_none() && !names.middle.is_empty() {
                return None;
            }
            let [repository, file] =
                [names.repository, names.file].map(|list| list.iter().find_map(|name| known(name)));
            let own = [Some(prefix), Some(suffix), middle, repository, file];
            let ends = own.into_iter().chain(names.ends.iter().map(|name| known(name))).flatten().collect();
            Some(FimTokens { prefix, suffix, middle, repository, file, suffix_first: names.suffix_first, ends })
        })
    }
}
