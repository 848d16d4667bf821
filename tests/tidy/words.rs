//! Things are *it*: who, whoever, nobody and somebody name a person or a client program, and only in the lines listed here.

use std::fs;
use std::path::Path;

/// What is checked.
const READ: [&str; 3] = ["src", "docs", "README.md"];
/// A part of each line that may have such a word. Add a line only if it means a person or a client program.
const PERSONS: [&str; 1] = ["there was a king who had three sons"];
/// Lines that may be listed at most.
const MAX_PERSONS: usize = 15;
const WORDS: [&str; 4] = ["who", "whoever", "nobody", "somebody"];

/// Numbers and texts of the lines of a file that have one of [`WORDS`].
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let says = |line: &str| {
        let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.any(|word| WORDS.iter().any(|said| word.eq_ignore_ascii_case(said)))
    };
    text.lines().enumerate().filter(move |(_, line)| says(line)).map(|(i, line)| (i + 1, line))
}

/// Every file below `path` that is text, with its path from `root`.
fn collect(root: &Path, path: &Path, files: &mut Vec<(String, String)>) {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        entries.for_each(|entry| collect(root, &entry.unwrap().path(), files));
    } else if let Ok(text) = fs::read_to_string(path) {
        files.push((path.strip_prefix(root).unwrap().to_string_lossy().into_owned(), text));
    }
}

#[test]
fn things_are_it() {
    let (root, mut files) = (Path::new(env!("CARGO_MANIFEST_DIR")), Vec::new());
    READ.iter().for_each(|path| collect(root, &root.join(path), &mut files));
    let found: Vec<(&str, usize, &str)> =
        files.iter().flat_map(|(path, text)| lines(text).map(move |(at, line)| (path.as_str(), at, line))).collect();
    let is_listed = |line: &str| PERSONS.iter().any(|said| line.contains(said));
    let others = found.iter().filter(|(_, _, line)| !is_listed(line));
    let others: Vec<String> = others.map(|(path, at, line)| format!("{path}:{at}: {}", line.trim())).collect();
    assert!(others.is_empty(), "name the thing that acts (a thread, the caller, a neuron):\n{}", others.join("\n"));
    for said in PERSONS {
        assert!(found.iter().any(|(_, _, line)| line.contains(said)), "take '{said}' off the list: no line has it");
    }
    assert!(found.len() <= MAX_PERSONS, "{} lines say who or nobody; at most {MAX_PERSONS} may", found.len());
}

#[test]
fn such_words_are_found_alone_and_not_inside_others() {
    let text = "Who stays?\nthe whole\nNOBODY'S\nwhoever_asks\nruns/who-stays\n";
    assert_eq!(lines(text).map(|(at, _)| at).collect::<Vec<_>>(), [1, 3, 5]);
}
