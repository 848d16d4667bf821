//! Which of a repository's files are the model that a name means.

use super::Name;
use crate::error::printable;
use crate::formats::gguf::{PartName, parts_of};

/// What of a repository's files is the model.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// All of these, as a Hugging Face directory.
    Directory(Vec<String>),
    /// A GGUF file, or all parts of one, the first one first.
    Gguf(Vec<String>),
}

/// Types that a GGUF has where a name leaves the choice, the first one first: what most people take, then what is nearest to it.
const PREFERRED: [&str; 12] =
    ["q4_k_m", "q4_k_s", "q4_k", "q4_0", "iq4_xs", "mxfp4", "q5_k_m", "q5_0", "q6_k", "q8_0", "bf16", "f16"];

/// Chooses among the files of a repository those that `name` means: the GGUF that it names, else safetensors with what belongs to
/// them, else the only GGUF, else of several the one of the type that most people take. Files beside a model (projectors of images,
/// importance matrices) are chosen only by their whole name.
///
/// # Errors
/// Why there is no choice, as a sentence for people; `None` where no file is a model's.
pub fn choose(name: &Name, files: &[String]) -> Result<Choice, Option<String>> {
    // Of a model in parts the first one stands for all; where it is missing, the first one that is there.
    let mut all: Vec<&String> = files.iter().filter(|file| file.ends_with(".gguf")).collect();
    all.sort();
    all.dedup_by_key(|file| parts_of(file).map_or_else(|| file.to_string(), |parts| parts[0].clone()));
    let models: Vec<&String> = all.iter().copied().filter(|file| !is_beside(file)).collect();
    let repository = &name.repository;
    if let Some(wanted) = &name.file {
        let found = match called(&all, wanted) {
            Some(one) => vec![one],
            None => named(&models, wanted),
        };
        return match found[..] {
            [one] => gguf(name, one, files),
            [] if models.is_empty() => Err(None),
            [] => Err(Some(format!("none of {repository}'s files is called '{wanted}': {}", list(&models)))),
            _ => Err(Some(format!("'{wanted}' fits several of {repository}'s files: {}", list(&found)))),
        };
    }
    let directory: Vec<String> = files.iter().filter(|file| belongs(file)).cloned().collect();
    if files.iter().any(|file| file == "config.json") && directory.iter().any(|file| file.ends_with(".safetensors")) {
        return Ok(Choice::Directory(directory));
    }
    let preferred = PREFERRED.iter().find_map(|kind| match named(&models, kind)[..] {
        [one] => Some(one),
        _ => None,
    });
    let one = if let [one] = models[..] { Some(one) } else { preferred };
    match (one, models.first()) {
        (Some(one), _) => gguf(name, one, files),
        (None, None) => Err(None),
        (None, Some(first)) => Err(Some(format!(
            "{repository} has several GGUF files; name one, {repository}:{first}, or a part of its name that no other has: {}",
            list(&models)
        ))),
    }
}

/// A GGUF with all its parts.
fn gguf(name: &Name, file: &str, files: &[String]) -> Result<Choice, Option<String>> {
    let Some(parts) = parts_of(file) else { return Ok(Choice::Gguf(vec![file.to_owned()])) };
    let missing: Vec<&String> = parts.iter().filter(|part| !files.contains(part)).collect();
    if missing.is_empty() {
        return Ok(Choice::Gguf(parts));
    }
    Err(Some(format!(
        "{} has {} of the {} parts of '{}'; missing are {}",
        name.repository,
        parts.len() - missing.len(),
        parts.len(),
        printable(&whole_name(file)),
        list(&missing)
    )))
}

/// What a GGUF is called without the number of its part.
fn whole_name(file: &str) -> String {
    PartName::parse(file).map_or_else(|| file.to_owned(), |part| format!("{}.gguf", part.stem))
}

/// The file that is called so, with or without its folder; of a model in parts any of these, and the name without a number.
fn called<'a>(files: &[&'a String], wanted: &str) -> Option<&'a String> {
    let wanted = wanted.to_lowercase();
    let fits = |name: &str| name == wanted || name.rsplit_once('/').is_some_and(|(_, name)| name == wanted);
    let is_called = |file: &&&String| {
        let names = parts_of(file).into_iter().flatten().chain([(**file).clone(), whole_name(file)]);
        names.into_iter().any(|name| fits(&name.to_lowercase()))
    };
    let found: Vec<&'a String> = files.iter().filter(is_called).copied().collect();
    if let [one] = found[..] { Some(one) } else { None }
}

/// Those that `part` names: with this word or folder in their names, else with these letters.
fn named<'a>(files: &[&'a String], part: &str) -> Vec<&'a String> {
    let part = part.to_lowercase();
    let those = |fits: &dyn Fn(&str) -> bool| -> Vec<&'a String> {
        files.iter().copied().filter(|file| fits(&whole_name(file).to_lowercase())).collect()
    };
    // A folder and a file in it have the same word: the file's own name comes first.
    let words = |name: &str| name.split(['.', '-']).any(|word| word == part);
    let word = those(&|file| words(file.rsplit('/').next().unwrap_or(file)));
    let folder = those(&|file| file.rsplit_once('/').is_some_and(|(folder, _)| folder.split('/').any(|f| f == part)));
    match (word.is_empty(), folder.is_empty()) {
        (false, _) => word,
        (true, false) => folder,
        (true, true) => those(&|file| file.contains(&part)),
    }
}

/// Whether a GGUF is no model but lies beside one: a projector of images or sound, or an importance matrix. A model whose name says that
/// its types were chosen by such a matrix names a type, too.
pub fn is_beside(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file).to_lowercase();
    let words: Vec<&str> = name.split(['.', '-', '_']).collect();
    let typed = words.iter().any(|word| {
        let word = word.strip_prefix('i').unwrap_or(word);
        word.strip_prefix('q').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    words.contains(&"mmproj") || words.contains(&"imatrix") && !typed
}

/// Whether a file is part of a Hugging Face directory as this program reads it.
pub(super) fn belongs(file: &str) -> bool {
    let weights = file == "model.safetensors" || file.starts_with("model-") && file.ends_with(".safetensors");
    let beside = file.ends_with(".json") || file.ends_with(".jinja") || file == "tokenizer.model";
    !file.contains('/') && (weights || beside)
}

fn list(files: &[&String]) -> String {
    const MAX_SHOWN: usize = 12;
    let mut shown: Vec<String> = files.iter().take(MAX_SHOWN).map(|file| printable(file)).collect();
    if files.len() > MAX_SHOWN {
        shown.push(format!("and {} more", files.len() - MAX_SHOWN));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap_or_else(|| panic!("{text} is a name"))
    }

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    fn one(file: &str) -> Result<Choice, Option<String>> {
        Ok(Choice::Gguf(vec![file.to_owned()]))
    }

    #[test]
    fn the_files_of_a_model_are_chosen_and_nothing_else() {
        let all = files(&[
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/config.json",
            "tokenizer.model",
            "training_args.bin",
        ]);
        let Ok(Choice::Directory(chosen)) = choose(&name("a/b"), &all) else { panic!("a directory") };
        let left_out = ["README.md", "consolidated.safetensors", "onnx/config.json", "training_args.bin"];
        assert_eq!(chosen.len(), all.len() - left_out.len());
        assert!(chosen.iter().all(|file| !left_out.contains(&&**file)), "{chosen:?}");
        assert_eq!(choose(&name("a/b"), &files(&["only.gguf"])), one("only.gguf"));
        assert_eq!(choose(&name("a/b"), &files(&["config.json", "pytorch_model.bin"])), Err(None));
    }

    #[test]
    fn of_several_ggufs_a_name_or_the_usual_type_chooses_one() {
        let ggufs = files(&["README.md", "m.Q4_0.gguf", "m.Q4_K.gguf", "m.Q4_K_M.gguf", "m.gguf"]);
        let file = |text: &str| choose(&name(text), &ggufs);
        assert_eq!(file("a/b:q4_0"), one("m.Q4_0.gguf"));
        assert_eq!(file("a/b:Q4_K"), one("m.Q4_K.gguf"), "a whole word goes before a part of one");
        assert_eq!(file("a/b:m.gguf"), one("m.gguf"));
        assert_eq!(file("a/b"), one("m.Q4_K_M.gguf"));
        assert!(file("a/b:Q4").unwrap_err().unwrap().starts_with("'Q4' fits several of a/b's files: m.Q4_0.gguf, "));
        assert!(file("a/b:f16").unwrap_err().unwrap().starts_with("none of a/b's files is called 'f16': "));
        let unknown = choose(&name("a/b"), &files(&["large.gguf", "small.gguf"])).unwrap_err().unwrap();
        assert!(unknown.contains("has several GGUF files; name one, a/b:large.gguf, or"), "{unknown}");
    }

    #[test]
    fn what_lies_beside_a_model_is_not_taken_for_it() {
        let all = files(&[
            "m-BF16.gguf",
            "m-F16.gguf",
            "m-Q4_K_M.gguf",
            "mmproj-F16.gguf",
            "mmproj-m-BF16.gguf",
            "m.imatrix.gguf",
        ]);
        let file = |text: &str| choose(&name(text), &all);
        assert_eq!(file("a/b:F16"), one("m-F16.gguf"));
        assert_eq!(file("a/b:BF16"), one("m-BF16.gguf"));
        assert_eq!(file("a/b"), one("m-Q4_K_M.gguf"));
        assert_eq!(file("a/b:mmproj-F16.gguf"), one("mmproj-F16.gguf"), "by its whole name it is meant");
        let alone = files(&["m.gguf", "mmproj-m-f16.gguf", "imatrix_unsloth.gguf"]);
        assert_eq!(choose(&name("a/b"), &alone), one("m.gguf"));
        assert_eq!(choose(&name("a/b"), &files(&["m-imatrix-Q4_K_S.gguf"])), one("m-imatrix-Q4_K_S.gguf"));
    }

    #[test]
    fn parts_and_folders_are_chosen_as_one_model() {
        let of = |folder: &str, count: usize| {
            (1..=count).map(|n| format!("{folder}m-{n:05}-of-{count:05}.gguf")).collect::<Vec<_>>()
        };
        let (q8, q4) = (of("Q8_0/", 3), of("Q4_K_M/", 2));
        let all: Vec<String> = q8.iter().rev().chain(&q4).cloned().chain(files(&["f16/m.gguf"])).collect();
        let chosen = |text: &str| choose(&name(text), &all);
        assert_eq!(chosen("a/b:q8_0"), Ok(Choice::Gguf(q8.clone())));
        assert_eq!(chosen("a/b:Q8_0/m-00002-of-00003.gguf"), Ok(Choice::Gguf(q8.clone())), "one part stands for all");
        assert_eq!(chosen("a/b"), Ok(Choice::Gguf(q4)));
        assert_eq!(chosen("a/b:f16"), one("f16/m.gguf"));
        let some: Vec<String> = vec![q8[0].clone(), q8[2].clone()];
        let why = choose(&name("a/b"), &some).unwrap_err().unwrap();
        assert_eq!(why, "a/b has 2 of the 3 parts of 'Q8_0/m.gguf'; missing are Q8_0/m-00002-of-00003.gguf");
    }
}
