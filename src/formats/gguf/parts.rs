//! The names of a model's parts, where a GGUF is split over several files: `NAME-00001-of-00003.gguf` and so on, as llama.cpp's
//! `gguf-split` writes them.

/// Most parts of a model. The largest published ones have below 200.
pub const MAX_PARTS: usize = 1024;
/// Digits of both numbers in a part's name.
const DIGITS: usize = 5;
const ENDING: &str = ".gguf";

/// What the name of one part of a split GGUF says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartName {
    /// All before the numbers, folders included: `llama-Q4_K_M` of `llama-Q4_K_M-00002-of-00003.gguf`.
    pub stem: String,
    /// The part's number, 1 to `count`.
    pub number: usize,
    /// How many parts there are, 1 to [`MAX_PARTS`].
    pub count: usize,
}

impl PartName {
    /// Reads the name of a part; `None` for any other name.
    pub fn parse(name: &str) -> Option<PartName> {
        let (rest, count) = number_behind(name.strip_suffix(ENDING)?, "-of-")?;
        let (stem, number) = number_behind(rest, "-")?;
        let is_named = !stem.is_empty() && !stem.ends_with('/');
        let is_part = is_named && (1..=count).contains(&number) && count <= MAX_PARTS;
        is_part.then(|| PartName { stem: stem.to_owned(), number, count })
    }

    /// The name of part `number`, 1 to `count`, of the same model.
    pub fn of(&self, number: usize) -> String {
        format!("{}-{number:0DIGITS$}-of-{:0DIGITS$}{ENDING}", self.stem, self.count)
    }

    /// The names of all parts of the model, the first one first.
    pub fn all(&self) -> Vec<String> {
        (1..=self.count).map(|number| self.of(number)).collect()
    }
}

/// The names of all parts of the model that the file `name` is a part of, the first one first; `None` where the name is not that of a
/// part. Folders in front of the name are kept.
pub fn parts_of(name: &str) -> Option<Vec<String>> {
    PartName::parse(name).map(|part| part.all())
}

/// The number of five digits that `text` ends with behind `mark`, and what stands before the mark.
fn number_behind<'a>(text: &'a str, mark: &str) -> Option<(&'a str, usize)> {
    let (rest, digits) = text.rsplit_once(mark)?;
    let is_number = digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
    Some((rest, digits.parse().ok().filter(|_| is_number)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parts_name_tells_all_parts() {
        let all = parts_of("Q4_K_M/m-of-x-00002-of-00003.gguf").unwrap();
        let expected = ["00001", "00002", "00003"].map(|n| format!("Q4_K_M/m-of-x-{n}-of-00003.gguf"));
        assert_eq!(all, expected);
        // Each of them tells the same.
        assert!(all.iter().all(|name| parts_of(name).as_ref() == Some(&all)));
        assert_eq!(parts_of("m-00001-of-00001.gguf").unwrap(), ["m-00001-of-00001.gguf"]);
    }

    #[test]
    fn other_names_are_of_no_part() {
        for name in [
            "m.gguf",
            "m-1-of-3.gguf",
            "m-00001-of-00003.safetensors",
            "m-00001-of-00003",
            "m-00000-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "m-00001-of-99999.gguf",
            "m-+0001-of-00003.gguf",
            "m-00001-of-+0003.gguf",
            "m00001-of-00003.gguf",
            "m-00001-of-000003.gguf",
            "-00001-of-00003.gguf",
            "folder/-00001-of-00003.gguf",
            "m-00001-of-00000.gguf",
            "",
        ] {
            assert_eq!(PartName::parse(name), None, "{name}");
        }
    }
}
