//! No file of `src` depends on itself by way of others.
//!
//! A file depends on every file whose items it names, by `use` or by a path in its code. A name that a folder's `mod.rs` hands on is the
//! file's that it comes from. A `mod.rs` that declares and hands on depends on the files below it, and they do not depend on it. What they
//! share is in a file beside them.

use super::{code_of, source_files};
use std::collections::{BTreeMap, BTreeSet};

/// Folders whose `mod.rs` still has items of its own that the files below it use: nothing is counted between them. In `device/kernel` and
/// `formats/blocks` they are a list and what each entry has of it, its number or type. Take a folder off when its `mod.rs` only declares and
/// hands on.
const SHARES_ITEMS: [&str; 10] = [
    "cpu",
    "cpu/avx2",
    "cpu/avx2/blocks",
    "cpu/avx2/gemm",
    "cpu/avx512",
    "cpu/avx512/blocks",
    "cpu/avx512/gemm",
    "device/kernel",
    "formats",
    "formats/blocks",
];

/// Segments of a path from the crate's root: of a module, or of an item in one.
type Path = Vec<String>;

/// Files that use each other, as a chain that ends where it began; `None` without a cycle. Between the `mod.rs` of one of the folders `left_out`
/// and the files below it nothing is counted.
fn cycle(files: &[(String, String)], left_out: &[&str]) -> Option<String> {
    let modules: BTreeMap<Path, Module> =
        files.iter().map(|(path, text)| (module_path(path), Module::of(text))).collect();
    let names: BTreeMap<Path, &str> = files.iter().map(|(path, _)| (module_path(path), path.as_str())).collect();
    let mut uses: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (at, module) in &modules {
        let targets =
            module.paths.iter().filter_map(|path| absolute(at, path, &modules)).map(|p| resolve(p, &modules, 0));
        let counts = |other: &Path| {
            let (folder, below) = if at.len() < other.len() { (at, other) } else { (other, at) };
            at != other && !(below.starts_with(folder) && left_out.contains(&folder.join("/").as_str()))
        };
        let files = targets.filter(counts).filter(|target| !target.is_empty()).map(|target| names[&target]);
        uses.insert(names[at], files.collect());
    }
    // What uses nothing that is left, or is used by nothing that is left, is in no cycle.
    loop {
        let used: BTreeSet<&str> = uses.values().flatten().copied().collect();
        let before = uses.len();
        uses.retain(|file, targets| !targets.is_empty() && used.contains(file));
        let left: BTreeSet<&str> = uses.keys().copied().collect();
        uses.values_mut().for_each(|targets| targets.retain(|target| left.contains(target)));
        if uses.len() == before {
            break;
        }
    }
    let mut chain = vec![*uses.keys().next()?];
    loop {
        let next = *uses[chain.last().expect("it has one")].first().expect("only those that use something are left");
        let seen = chain.iter().position(|file| *file == next);
        chain.push(next);
        if let Some(from) = seen {
            return Some(chain[from..].join(" uses "));
        }
    }
}

struct Module {
    /// As written, from `crate`, `super`, `self` or a module below.
    paths: Vec<Path>,
    /// What `use` brings into it, by the name that it has there.
    imports: BTreeMap<String, Path>,
}

impl Module {
    fn of(text: &str) -> Module {
        let text = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
        let code: String = text.lines().map(|line| code_of(line).to_owned() + "\n").collect();
        // How far an item is visible is no use of the module that is named.
        let starts = |at: usize| {
            !code[..at].ends_with(|c: char| c.is_alphanumeric() || "_:".contains(c)) && !code[..at].ends_with("pub(in ")
        };
        let mut module = Module { paths: Vec::new(), imports: BTreeMap::new() };
        for (at, c) in code.char_indices() {
            if (c.is_alphabetic() || c == '_') && starts(at) {
                let mut found = Vec::new();
                tree(&code[at..], &Path::new(), &mut found);
                module.paths.extend(found.into_iter().map(|(path, _)| path).filter(|path| path.len() > 1));
            }
        }
        for (at, _) in code.match_indices("use ").filter(|(at, _)| starts(*at)) {
            let mut found = Vec::new();
            tree(&code[at + 4..], &Path::new(), &mut found);
            module.imports.extend(found.into_iter().map(|(path, name)| (name, path)));
        }
        module
    }
}

/// Reads `a::b::{c, d as e}` and adds each path with the name that it gets; returns what is left of the text.
fn tree<'t>(mut text: &'t str, before: &Path, found: &mut Vec<(Path, String)>) -> &'t str {
    let mut path = before.clone();
    loop {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        path.extend((end > 0).then(|| text[..end].to_owned()));
        text = &text[end..];
        match text.strip_prefix("::") {
            Some(rest) if !rest.starts_with('{') => text = rest,
            Some(group) => {
                text = &group[1..];
                loop {
                    text = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
                    if text.is_empty() || text.starts_with('}') {
                        return text.get(1..).unwrap_or_default();
                    }
                    let rest = tree(text, &path, found);
                    // What is no name, as `*`, is passed over.
                    text = if rest.len() == text.len() {
                        rest.split_at(rest.chars().next().map_or(0, char::len_utf8)).1
                    } else {
                        rest
                    };
                }
            }
            None => break,
        }
        if !text.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            break;
        }
    }
    let mut name = path.last().cloned().unwrap_or_default();
    if let Some(rest) = text.strip_prefix(" as ") {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        (name, text) = (rest[..end].to_owned(), &rest[end..]);
    }
    if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
        path.pop();
        name = path.last().cloned().unwrap_or_default();
    }
    found.push((path, name));
    text
}

fn module_path(file: &str) -> Path {
    let inner = file.trim_start_matches("src/").trim_end_matches(".rs");
    let inner = inner.strip_suffix("/mod").unwrap_or(inner);
    if inner == "lib" { Path::new() } else { inner.split('/').map(str::to_owned).collect() }
}

/// A path from the crate's root; `None` for another crate's.
fn absolute(at: &Path, path: &Path, modules: &BTreeMap<Path, Module>) -> Option<Path> {
    let below = |path: &[String]| [at, path].concat();
    match path[0].as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some(below(&path[1..])),
        "super" => Some([at.split_last()?.1, &path[1..]].concat()),
        _ => modules.contains_key(&below(&path[..1])).then(|| below(path)),
    }
}

/// The module in which the item of this path is written.
fn resolve(path: Path, modules: &BTreeMap<Path, Module>, depth: usize) -> Path {
    let length = (0..=path.len()).rev().find(|&n| modules.contains_key(&path[..n])).unwrap_or(0);
    let at = path[..length].to_vec();
    let handed_on = path.get(length).and_then(|name| modules.get(&at)?.imports.get(name));
    match handed_on.and_then(|import| absolute(&at, import, modules)) {
        // A chain of names that is longer than this leads in a circle.
        Some(from) if depth < 8 => resolve([&from, &path[length + 1..]].concat(), modules, depth + 1),
        _ => at,
    }
}

fn sources() -> Vec<(String, String)> {
    source_files()
        .into_iter()
        .filter(|(path, _)| path.starts_with("src/") && path != "src/main.rs" && !path.starts_with("src/bin/"))
        .collect()
}

#[test]
fn no_file_depends_on_itself_by_way_of_others() {
    assert_eq!(cycle(&sources(), &SHARES_ITEMS), None, "move what both need into a file of its own");
}

/// A folder that is left out without need would let the next cycle through.
#[test]
fn every_folder_that_is_left_out_needs_it() {
    let files = sources();
    for folder in SHARES_ITEMS {
        let others: Vec<&str> = SHARES_ITEMS.into_iter().filter(|other| *other != folder).collect();
        assert!(
            cycle(&files, &others).is_some(),
            "take {folder} off SHARES_ITEMS: its mod.rs only declares and hands on"
        );
    }
}

#[test]
fn a_planted_cycle_of_imports_is_found() {
    let found_in = |files: &[(&str, &str)], left_out: &[&str]| -> Option<String> {
        let files: Vec<_> = files.iter().map(|(path, text)| (format!("src/{path}"), (*text).to_owned())).collect();
        cycle(&files, left_out)
    };
    let files = |files: &[(&str, &str)]| found_in(files, &[]);
    let found = "src/a/x.rs uses src/a/y.rs uses src/a/x.rs";
    let x = ("a/x.rs", "use super::y::{self, Y};\n");
    for y in ["use super::x::X;\n", "fn f() {\n    crate::a::x::f();\n}\n", "use crate::{b::B, a::{x::{X as Z}, z}};\n"]
    {
        assert_eq!(files(&[("a/mod.rs", ""), x, ("a/y.rs", y)]).as_deref(), Some(found), "{y}");
    }
    // By way of the folder's module, and of the crate's.
    let handed_on = [("lib.rs", "pub use a::X;\n"), ("a/mod.rs", "mod x;\nmod y;\npub use x::X;\n"), x];
    for y in ["use super::X;\n", "use crate::a::X;\n", "use crate::X;\n"] {
        assert_eq!(files(&[&handed_on[..], &[("a/y.rs", y)]].concat()).as_deref(), Some(found), "{y}");
    }
    // By way of an item of the folder's own module, which has to be in a file beside the two.
    let shared = [("a/mod.rs", "pub use x::X;\npub struct Other;\n"), x, ("a/y.rs", "use super::Other;\n")];
    let by_the_module = "src/a/mod.rs uses src/a/x.rs uses src/a/y.rs uses src/a/mod.rs";
    assert_eq!(files(&shared).as_deref(), Some(by_the_module));
    assert_eq!(found_in(&shared, &["a"]), None);
    for y in [
        "",
        "pub(in super::super::a) struct Y;\n",
        "use std::x::X;\n",
        "// crate::a::x\n",
        "\n#[cfg(test)]\nmod tests {\n    use super::super::x::X;\n}\n",
    ] {
        assert_eq!(files(&[("a/mod.rs", "pub use x::X;\n"), x, ("a/y.rs", y)]), None, "{y}");
    }
}
