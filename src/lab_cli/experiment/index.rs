//! One page over all experiments below a folder.

use super::page::{STYLE, page};
use super::record::{Record, read_rows};
use super::{figures, page as report};
use crate::cli::chart::escaped;
use crate::clock;
use crate::error::{Error, Result, in_address};
use crate::lab::experiment::rows::Row;
use crate::lab::experiment::{Spec, arm_name, summary};
use std::path::{Path, PathBuf};

/// Folders below each other that are searched for experiments: a wrong DIR must not become a walk over the whole disk.
const DEPTH: usize = 3;

/// Makes the page of every experiment below `root` anew from its rows, and `root/index.html`, which shows what each found. Folders that
/// cannot be read are named on it.
pub fn write(root: &Path) -> Result<PathBuf> {
    let mut folders = Vec::new();
    find(root, DEPTH, &mut folders)?;
    if folders.is_empty() {
        return Err(Error::Usage(format!(
            "there is no experiment below {}: a folder of one has run.json and rows.jsonl; give --all another folder",
            root.display()
        )));
    }
    // By name, which begins with the date: the last run comes first.
    folders.sort();
    folders.reverse();
    let entries: String =
        folders.iter().map(|dir| entry(root, dir).unwrap_or_else(|why| failed(root, dir, &why))).collect();
    let body = format!(
        "<h1>Experiments</h1>\n<p>{} folders below <code>{}</code>; each line leads to its page.</p>\n{entries}",
        folders.len(),
        escaped(&root.display().to_string())
    );
    let path = root.join("index.html");
    super::write(&path, &page("Experiments", STYLE, &body))?;
    Ok(path)
}

fn find(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    if dir.join("run.json").is_file() && dir.join("rows.jsonl").is_file() {
        found.push(dir.to_owned());
    }
    for entry in std::fs::read_dir(dir).map_err(Error::io("read", dir))? {
        let entry = entry.map_err(Error::io("read", dir))?;
        // A link may lead back to where it lies.
        if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            find(&entry.path(), depth - 1, found)?;
        }
    }
    Ok(())
}

/// The experiment as it was run: with a card or without.
fn spec_of(record: &Record, path: &Path) -> Result<Spec> {
    let spec = Spec::from_text(&record.spec, path)?;
    let without = spec.clone().on_no_card();
    Ok(if record.fixed == arm_name(&without.fixed()) { without } else { spec })
}

fn entry(root: &Path, dir: &Path) -> Result<String> {
    let record = Record::read(&dir.join("run.json"))?;
    let spec = spec_of(&record, &dir.join("run.json"))?;
    let rows: Vec<Row> = read_rows(dir)?;
    let summary = summary::summary(&spec, &rows);
    let figures = figures::figures(&spec, &summary);
    super::write(&dir.join("summary.html"), &report::html(&spec, &record, &summary, &rows, &figures))?;
    let when = record.sessions.last().map_or(String::new(), |s| format!("{}, {}; ", clock::utc_text(s.unix), s.cpu));
    let refused = rows.iter().filter(|row| row.refused.is_some()).count();
    let wanted = spec.order().len();
    let counts = match refused {
        0 => format!("{} of {wanted} rows", rows.len()),
        n => format!("{} of {wanted} rows, {n} refused", rows.len()),
    };
    let shown = figures.first().map_or("", |figure| figure.sentence.as_str());
    Ok(format!(
        "<h2><a href=\"./{}/summary.html\">{}</a></h2>\n<p>{}</p>\n<p>{}</p>\n<p><small>{}{counts}</small></p>\n",
        in_address(&below(root, dir)),
        escaped(&below(root, dir)),
        escaped(spec.question.trim()),
        escaped(shown),
        escaped(&when),
    ))
}

fn failed(root: &Path, dir: &Path, why: &Error) -> String {
    format!("<h2>{}</h2>\n<p>Cannot be shown: {}</p>\n", escaped(&below(root, dir)), escaped(&why.to_string()))
}

/// The folder's path from the index: `.` for the index's own.
fn below(root: &Path, dir: &Path) -> String {
    match dir.strip_prefix(root).unwrap_or(dir).display().to_string() {
        here if here.is_empty() => ".".into(),
        path => path,
    }
}
