//! A model in several GGUF files: the first has the metadata, all have tensors (the first may have none), and each says which part it is.
//!
//! ```text
//! split.no             number of the part, from 0 on
//! split.count          how many there are
//! split.tensors.count  tensors of all parts together
//! ```

use super::header::{Gguf, parse};
use super::parts::PartName;
use crate::error::{Error, Result, printable};
use crate::formats::{MappedFile, Tensors};
use std::path::{Path, PathBuf};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// What a part says of itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Split {
    /// From 0 on.
    number: usize,
    count: usize,
    tensors: Option<usize>,
}

impl Split {
    /// `None` for a whole model.
    fn of(gguf: &Gguf) -> Result<Option<Split>> {
        let number = |key: &str| Ok(gguf.metadata.u32(key)?.map(|number| number as usize));
        let Some(count) = number(COUNT)?.filter(|&count| count > 1) else { return Ok(None) };
        Ok(Some(Split { number: number(NUMBER)?.unwrap_or(0), count, tensors: number(TENSORS)? }))
    }
}

/// Opens a GGUF with all of its parts, which lie beside the first one. The header is the first part's with the tensors of all; their offsets
/// count from the beginning of each one's file.
///
/// # Errors
/// [`Error::Io`] if a file cannot be opened, [`Error::BadFile`] if one is damaged, is not the part that its name says, or belongs to another
/// model, if parts are missing, and if `path` is another part than the first.
pub fn open(path: &Path) -> Result<(Gguf, Tensors)> {
    let file = MappedFile::open(path)?;
    let mut gguf = parse(file.bytes(), path)?;
    let mut tensors = Tensors::default();
    let split = Split::of(&gguf)?;
    tensors.add(file, gguf.tensors.clone())?;
    let Some(split) = split else { return Ok((gguf, tensors)) };
    let paths = paths(path, split)?;
    let missing: Vec<String> = paths.iter().filter(|path| !path.exists()).map(|path| name_of(path)).collect();
    if !missing.is_empty() {
        let (what, them) = if missing.len() == 1 { ("part", "it") } else { ("parts", "them") };
        let why = format!(
            "the model is in {} parts, and beside this one the {what} {} cannot be found: download {them} into the same directory",
            split.count,
            missing.join(", ")
        );
        return Err(Error::bad(path, COUNT, why));
    }
    if split.number != 0 {
        let why =
            format!("this is part {} of {}: name the first, {}", split.number + 1, split.count, name_of(&paths[0]));
        return Err(Error::bad(path, NUMBER, why));
    }
    for (number, path) in paths.iter().enumerate().skip(1) {
        let file = MappedFile::open(path)?;
        let part = parse(file.bytes(), path)?;
        check_part(&gguf, split, number, &part, path)?;
        tensors.add(file, part.tensors.clone())?;
        gguf.tensors.extend(part.tensors);
    }
    match split.tensors.filter(|&said| said != gguf.tensors.len()) {
        None => Ok((gguf, tensors)),
        Some(said) => {
            let found = gguf.tensors.len();
            let why =
                format!("is {said}, and the {} parts have {found} tensors: they are not of one model", split.count);
            Err(Error::bad(path, TENSORS, why))
        }
    }
}

/// Checks that what lies in the place of part `number` of the model that `first` begins is that part.
fn check_part(first: &Gguf, split: Split, number: usize, part: &Gguf, path: &Path) -> Result<()> {
    let bad = |key: &str, why: String| Err(Error::bad(path, key, why));
    let Some(its) = Split::of(part)? else {
        return bad(COUNT, format!("missing: this is a whole model, and not part {} of {}", number + 1, split.count));
    };
    if (its.count, its.tensors) != (split.count, split.tensors) {
        let tensors =
            |split: Split| split.tensors.map_or(String::new(), |tensors| format!(" of {tensors} tensors together"));
        let why = format!(
            "this is of {} parts{}, the first part of {}{}: they belong to different models, download them again",
            its.count,
            tensors(its),
            split.count,
            tensors(split)
        );
        return bad(COUNT, why);
    }
    if its.number != number {
        let why = format!("this is part {}, and its name says part {}: download it again", its.number + 1, number + 1);
        return bad(NUMBER, why);
    }
    let key = "general.architecture";
    let (ours, its) = (first.metadata.str(key)?, part.metadata.str(key)?);
    match its {
        Some(its) if ours != Some(its) => {
            let why = format!("is {}, the first part's is {}: they belong to different models", printable(its), {
                printable(ours.unwrap_or("missing"))
            });
            bad(key, why)
        }
        _ => Ok(()),
    }
}

/// Where all parts lie, by the name of one of them.
fn paths(path: &Path, split: Split) -> Result<Vec<PathBuf>> {
    let (number, count) = (split.number + 1, split.count);
    let name = name_of(path);
    match PartName::parse(&name) {
        Some(part) if (part.number, part.count) == (number, count) => {
            Ok(part.all().iter().map(|name| path.with_file_name(name)).collect())
        }
        Some(part) => {
            let why = format!(
                "says part {number} of {count}, and the name part {} of {}: the file was renamed, or is another one",
                part.number, part.count
            );
            Err(Error::bad(path, NUMBER, why))
        }
        None => {
            let why = format!(
                "this is part {number} of {count}, and its name does not tell the names of the others: call it \
                 NAME-{number:05}-of-{count:05}.gguf, with the others beside it"
            );
            Err(Error::bad(path, NUMBER, why))
        }
    }
}

/// The first part of the model that the file at `path` is a later part of, if it is one and the first lies beside it; else the path itself.
pub fn first_part(path: &Path) -> PathBuf {
    let later = PartName::parse(&name_of(path)).filter(|part| part.number > 1);
    let first = later.map(|part| path.with_file_name(part.of(1))).filter(|first| first.exists());
    // A whole model may have such a name.
    let is_part = || {
        let file = MappedFile::open(path).ok()?;
        Split::of(&parse(file.bytes(), path).ok()?).ok()?
    };
    first.filter(|_| is_part().is_some()).unwrap_or_else(|| path.to_owned())
}

/// The files of the model whose first part, or only file, is `path`, as far as they are there: by their names alone.
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    let others = PartName::parse(&name_of(path)).filter(|part| part.number == 1);
    let others = others.into_iter().flat_map(|part| (2..=part.count).map(move |number| part.of(number)));
    let others = others.map(|name| path.with_file_name(name)).filter(|path| path.exists());
    std::iter::once(path.to_owned()).chain(others).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
