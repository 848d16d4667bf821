//! The report of an experiment: Markdown, and one HTML page that needs nothing else.

use super::figures::Figure;
use super::record::{Record, Session};
use crate::cli::chart::{Room, escaped, svg};
use crate::clock;
use crate::lab::experiment::rows::Row;
use crate::lab::experiment::summary::{Spread, Summary};
use crate::lab::experiment::words::{setting, words};
use crate::lab::experiment::{Method, Spec, arm_name};
use serde_json::json;

/// Pixels that a column of the table needs: below so many for each, a row becomes a block of lines.
const COLUMN: usize = 100;

/// `summary.json`
pub fn data(spec: &Spec, summary: &Summary) -> serde_json::Value {
    let lines = summary.lines.iter().map(|line| {
        let spread = |(name, s): (&String, &Option<Spread>)| {
            (name.clone(), s.map_or(json!(null), |s| json!({ "median": s.median, "min": s.min, "max": s.max })))
        };
        let metrics: serde_json::Map<_, _> = summary.metrics.iter().zip(&line.spreads).map(spread).collect();
        let arm: serde_json::Map<_, _> = line.arm.iter().map(|(axis, v)| (axis.clone(), json!(v))).collect();
        json!({ "arm": arm, "rows": line.rows, "refused": line.refused, "metrics": metrics })
    });
    json!({ "name": spec.name, "question": spec.question, "expectation": spec.expectation, "arms": lines.collect::<Vec<_>>() })
}

/// What a reader must know before the figures.
fn warnings(spec: &Spec) -> Vec<String> {
    let mut said = Vec::new();
    let fixed = |name: &str| spec.fixed.get(name).and_then(|v| v.as_str());
    if spec.methods.contains(&Method::Simulate) {
        said.push(
            "Every speed here is simulated: computed from a machine profile and a trace, not measured.".to_owned(),
        );
    }
    if spec.methods.contains(&Method::Replay) {
        said.push("A replay counts in layer-times, and no time was measured.".into());
    }
    if fixed("device") == Some("virtual") {
        said.push(
            "The device is virtual: what it computes is real, its clock is made of given rates. virtual_ffn_ms is that clock, and no speed."
                .into(),
        );
    }
    if spec.methods.contains(&Method::Bench) && fixed("device") != Some("virtual") {
        said.push("Speeds are those of the machine below, with whatever else ran on it.".into());
    }
    if fixed("model") == Some("demo") {
        said.push("The demo model is small; what large models do is not seen here.".into());
    }
    said.push(match spec.repeats {
        1 => "Each figure was measured once: nothing is known of its spread.".into(),
        n => format!("Ranges are those of {n} repeats, least and largest."),
    });
    said
}

fn sessions(record: &Record) -> Vec<String> {
    let rates = |s: &Session| {
        s.machine.as_ref().map_or(String::new(), |m| format!(", memory read at {:.1} GB/s when it began", m.dram_gb_s))
    };
    let one = |s: &Session| {
        let command = if s.command.is_empty() { String::new() } else { format!(": {}", s.command) };
        format!(
            "{}: {}, commit {}, {}, {} threads by default{}{command}",
            clock::utc_text(s.unix),
            s.program,
            s.commit,
            s.cpu,
            s.threads,
            rates(s),
        )
    };
    record.sessions.iter().map(one).collect()
}

/// Each reason once, with the arms that it refused.
fn refused(rows: &[Row]) -> Vec<String> {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for row in rows {
        let Some(why) = row.refused.as_deref() else { continue };
        let arm = arm_name(&row.settings);
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, arms)) if arms.contains(&arm) => (),
            Some((_, arms)) => arms.push(arm),
            None => reasons.push((why, vec![arm])),
        }
    }
    reasons.into_iter().map(|(why, arms)| format!("{why} ({})", arms.join("; "))).collect()
}

fn fixed(spec: &Spec) -> String {
    arm_name(&spec.fixed())
}

/// A cell of the table: what it says, and the range below it.
struct Cell {
    text: String,
    range: Option<String>,
}

impl Cell {
    fn plain(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), range: None }
    }
}

/// Heads and cells, `[columns]` and `[arms][columns]`, with units and in words.
fn table(summary: &Summary) -> (Vec<String>, Vec<Vec<Cell>>) {
    let axes = summary.lines.first().into_iter().flat_map(|l| l.arm.iter().map(|(axis, _)| words(axis).text));
    let metrics = summary.metrics.iter().map(|name| words(name).text);
    let head = axes.chain(metrics).chain(["rows that count".into()]).collect();
    let cells = |line: &crate::lab::experiment::summary::Line| {
        let arm = line.arm.iter().map(|(axis, value)| Cell::plain(setting(axis, value)));
        let spreads = summary.metrics.iter().zip(&line.spreads).map(|(name, spread)| match spread {
            None => Cell::plain("–"),
            Some(s) => {
                let unit = words(name).unit;
                Cell { text: unit.text(s.median), range: unit.range(s.median, s.min, s.max) }
            }
        });
        let rows = match line.refused {
            0 => line.rows.to_string(),
            n => format!("{} of {}", line.rows, line.rows + n),
        };
        arm.chain(spreads).chain([Cell::plain(rows)]).collect()
    };
    (head, summary.lines.iter().map(cells).collect())
}

pub fn markdown(spec: &Spec, record: &Record, summary: &Summary, rows: &[Row], figures: &[Figure]) -> String {
    let mut out = format!(
        "# {}\n\n**Question.** {}\n\n**Expected, before the run.** {}\n\n",
        spec.name,
        spec.question.trim(),
        spec.expectation.trim()
    );
    warnings(spec).iter().for_each(|w| out += &format!("**{w}**\n\n"));
    for (i, figure) in figures.iter().enumerate() {
        out += &format!("![{}](plot-{}.svg)\n\n{}\n\n", figure.plot.title, i + 1, figure.sentence);
    }
    out += &format!(
        "All arms: `{}`; {} repeats, in turns; seed {}. Median (from to).\n\n",
        fixed(spec),
        spec.repeats,
        spec.seed
    );
    out += &summary.markdown();
    let list = |title: &str, lines: Vec<String>| match lines.is_empty() {
        true => String::new(),
        false => format!("\n{title}\n\n{}", lines.iter().map(|l| format!("- {l}\n")).collect::<String>()),
    };
    out += &list("Refused rows, which do not count:", refused(rows));
    out += &list("Made by:", sessions(record));
    out
}

pub fn html(spec: &Spec, record: &Record, summary: &Summary, rows: &[Row], figures: &[Figure]) -> String {
    let tag = |name: &str, text: &str| format!("<{name}>{}</{name}>", escaped(text));
    let list = |title: &str, lines: Vec<String>| match lines.is_empty() {
        true => String::new(),
        false => format!("{}<ul>{}</ul>\n", tag("h2", title), lines.iter().map(|l| tag("li", l)).collect::<String>()),
    };
    let figure = |figure: &Figure| {
        format!(
            "<figure><div class=large>{}</div><div class=small>{}</div>\n<figcaption>{}</figcaption></figure>\n",
            svg(&figure.plot, Room::Wide),
            svg(&figure.plot, Room::Narrow),
            escaped(&figure.sentence)
        )
    };
    let (head, cells) = table(summary);
    let body = format!(
        "<header><h1>{name}</h1>\n<aside><b>What this cannot tell.</b> {limits}</aside></header>\n<p class=question>{question}</p>\n<div class=figures>{figures}</div>\n\
         <h2>All figures</h2>\n<p>Medians, and below them the range of the repeats; the numbers as they were measured are in rows.csv. All \
         arms: <code>{fixed}</code>; {repeats} repeats, in turns; seed {seed}.</p>\n{table}{refused}<h2>Expected, before the run</h2>\n\
         <p>{expectation}</p>\n{sessions}<details><summary>The experiment's file</summary><pre>{file}</pre></details>\n",
        name = escaped(&spec.name.replace('_', " ")),
        limits = escaped(&warnings(spec).join(" ")),
        question = escaped(spec.question.trim()),
        figures = figures.iter().map(figure).collect::<String>(),
        fixed = escaped(&fixed(spec)),
        repeats = spec.repeats,
        seed = spec.seed,
        table = table_html(&head, &cells),
        refused = list("Refused, and not counted", refused(rows)),
        expectation = escaped(spec.expectation.trim()),
        sessions = list("Made by", sessions(record)),
        file = escaped(&record.spec),
    );
    page(&spec.name, &format!("{STYLE}{}", stacked(head.len() * COLUMN)), &body)
}

/// A page of its own.
pub fn page(title: &str, style: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\n<meta name=color-scheme \
         content=\"light dark\">\n<title>{}</title>\n<style>{style}</style>\n{body}</html>\n",
        escaped(title)
    )
}

fn table_html(head: &[String], cells: &[Vec<Cell>]) -> String {
    let th: String = head.iter().map(|name| format!("<th>{}</th>", escaped(name))).collect();
    let cell = |(name, cell): (&String, &Cell)| {
        let range = cell.range.as_ref().map_or(String::new(), |range| format!("<small>{}</small>", escaped(range)));
        format!("<td data-is=\"{}\"><span>{}</span>{range}</td>", escaped(name), escaped(&cell.text))
    };
    let row = |cells: &Vec<Cell>| format!("<tr>{}</tr>\n", head.iter().zip(cells).map(cell).collect::<String>());
    format!(
        "<table><thead><tr>{th}</tr></thead>\n<tbody>{}</tbody></table>\n",
        cells.iter().map(row).collect::<String>()
    )
}

/// On pages narrower than the table, each row is a block, and each of its cells a line that begins with the column's name.
fn stacked(width: usize) -> String {
    format!(
        "@media(max-width:{width}px){{table,tbody,tr,td{{display:block}}thead{{display:none}}tr{{border-top:2px solid var(--dim);padding:.5em 0}}\
         td{{text-align:right;display:flex;flex-wrap:wrap;justify-content:flex-end;gap:0 .6em;border:0;padding:.15em 0}}\
         td::before{{content:attr(data-is);margin-right:auto;padding-right:1em;color:var(--dim);text-align:left;max-width:60%}}}}"
    )
}

pub const STYLE: &str = "\
:root{--back:#fff;--ink:#222;--dim:#5f6368;--line:#ddd;--soft:#f4f4f4;--warn:#fff3d6}\
@media(prefers-color-scheme:dark){:root{--back:#16181c;--ink:#e8e8e8;--dim:#9aa0a6;--line:#3a3f45;--soft:#22262b;--warn:#3a2f12}}\
*{box-sizing:border-box}body{font:16px/1.5 sans-serif;max-width:96em;margin:0 auto;padding:1em;color:var(--ink);background:var(--back);\
overflow-wrap:anywhere}header{display:flex;flex-wrap:wrap;gap:.5em 2em;align-items:flex-start}h1{margin:.2em 0;flex:1 1 6em}\
aside{flex:2 1 20em;background:var(--warn);padding:.5em 1em;border-left:4px solid #c80}.question{font-size:1.15em;max-width:50em}\
.figures{display:flex;flex-wrap:wrap;gap:1em 2.5em}figure{margin:1em 0;flex:0 1 720px;min-width:0}figure svg{display:block;max-width:100%;height:auto}figcaption{max-width:45em;margin-top:.3em}.small{display:none}\
@media(max-width:760px){.large{display:none}.small{display:block}}\
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;overflow-wrap:break-word}\
th,td{padding:.3em .5em;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}th{font-weight:600;vertical-align:bottom}\
td small{display:block;color:var(--dim)}a{color:inherit}\
pre,code{background:var(--soft);white-space:pre-wrap}pre{padding:1em}";
