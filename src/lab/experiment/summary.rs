//! Summary of an experiment's rows: median and range of every metric of every arm.

use super::rows::Row;
use super::words::{setting, short, size};
use super::{Arm, Spec, Value};
use std::collections::BTreeSet;

/// Values of one metric of one arm over the repeats that count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Median; of an even number of values the mean of the middle two.
    pub median: f64,
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
}

/// One arm's line of the table.
#[derive(Clone, Debug)]
pub struct Line {
    /// Axes and values of the arm.
    pub arm: Arm,
    /// Number of rows that count.
    pub rows: usize,
    /// Number of rows that were refused.
    pub refused: usize,
    /// One entry for each of the summary's metrics; `None` where no row that counts has it.
    pub spreads: Vec<Option<Spread>>,
}

/// The summary's table: a line per arm, a column per metric.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Names of the metrics, in the order of the columns.
    pub metrics: Vec<String>,
    /// One line for each arm, in the order of `Spec::arms`.
    pub lines: Vec<Line>,
}

/// A line of a plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The values of the axes other than x; the metric's name if there are no others.
    pub name: String,
    /// In the order of the arms.
    pub points: Vec<Place>,
}

/// A point of a plot's line: median and range of one arm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Value of the plot's axis.
    pub x: f64,
    /// Median of the metric.
    pub median: f64,
    /// Its smallest value.
    pub min: f64,
    /// Its largest value.
    pub max: f64,
}

/// Median and range of `values`; `None` if there are none.
pub fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_by(f64::total_cmp);
    let (min, max) = (*values.first()?, *values.last()?);
    let n = values.len();
    Some(Spread { median: (values[(n - 1) / 2] + values[n / 2]) / 2.0, min, max })
}

/// Summarises the rows that count: the metrics of `spec.show` that some row has, or all metrics if `show` is empty.
pub fn summary(spec: &Spec, rows: &[Row]) -> Summary {
    let there: BTreeSet<String> = rows.iter().flat_map(|r| r.metrics.keys().cloned()).collect();
    let metrics: Vec<String> = match spec.show.is_empty() {
        true => there.into_iter().collect(),
        // A card and the virtual device do not report the same metrics.
        false => spec.show.iter().filter(|name| there.contains(*name)).cloned().collect(),
    };
    let line = |(i, arm): (usize, Arm)| {
        let of_arm = || rows.iter().filter(move |r| r.arm == i);
        let counted = || of_arm().filter(|r| r.refused.is_none());
        let of = |name: &String| spread(counted().filter_map(|r| *r.metrics.get(name)?).collect());
        let spreads = metrics.iter().map(of).collect();
        Line { arm, rows: counted().count(), refused: of_arm().count() - counted().count(), spreads }
    };
    let lines = spec.arms().into_iter().enumerate().map(line).collect();
    Summary { metrics, lines }
}

impl Spread {
    /// The median, followed by the range if the values differ.
    pub fn text(&self) -> String {
        if self.min == self.max {
            return short(self.median);
        }
        format!("{} ({} to {})", short(self.median), short(self.min), short(self.max))
    }
}

impl Summary {
    /// Header and cells of the table, `[columns]` and `[arms][columns]`.
    pub fn table(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let axes = self.lines.first().into_iter().flat_map(|l| l.arm.iter().map(|(axis, _)| axis.clone()));
        let head = axes.chain(self.metrics.iter().cloned()).chain(["rows".into()]).collect();
        let cells = |line: &Line| {
            let values = line.arm.iter().map(|(_, v)| v.to_string());
            let spreads = line.spreads.iter().map(|s| s.map_or("-".into(), |s| s.text()));
            let rows = match line.refused {
                0 => line.rows.to_string(),
                n => format!("{} + {n} refused", line.rows),
            };
            values.chain(spreads).chain([rows]).collect()
        };
        (head, self.lines.iter().map(cells).collect())
    }

    /// A summary for each value of an axis, which its arms then no longer have; in the order of the arms.
    pub fn by(&self, axis: &str) -> Vec<(Value, Summary)> {
        let mut parts: Vec<(Value, Summary)> = Vec::new();
        for line in &self.lines {
            let Some((_, value)) = line.arm.iter().find(|(name, _)| name == axis) else { continue };
            let arm = line.arm.iter().filter(|(name, _)| name != axis).cloned().collect();
            let line = Line { arm, ..line.clone() };
            match parts.iter_mut().find(|(known, _)| known == value) {
                Some((_, part)) => part.lines.push(line),
                None => parts.push((value.clone(), Summary { metrics: self.metrics.clone(), lines: vec![line] })),
            }
        }
        parts
    }

    /// The table in Markdown.
    pub fn markdown(&self) -> String {
        let (head, cells) = self.table();
        let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|{}\n", "---|".repeat(head.len()));
        row(&head) + &rule + &cells.iter().map(|c| row(c)).collect::<String>()
    }

    /// Lines of a plot of the metric `y` over the axis `x`, one for each combination of the other axes. If a value of `x` is neither a
    /// number nor a size, the values stand at 0, 1, 2 and so on, and their names are returned, too.
    pub fn series(&self, x: &str, y: &str) -> (Vec<Series>, Vec<String>) {
        let mut names: Vec<String> = Vec::new();
        let of_x = |arm: &Arm| arm.iter().find(|(axis, _)| axis == x).map(|(_, v)| v.clone());
        let numeric = self.lines.iter().all(|l| of_x(&l.arm).is_some_and(|v| number(&v).is_some()));
        let Some(metric) = self.metrics.iter().position(|m| m == y) else { return (Vec::new(), names) };
        let mut series: Vec<Series> = Vec::new();
        for line in &self.lines {
            let Some(at) = of_x(&line.arm) else { continue };
            let x_value = match number(&at).filter(|_| numeric) {
                Some(x) => x,
                None => {
                    // Also of an arm without a row that counts: its place stays empty.
                    let name = setting(x, &at);
                    let place = names.iter().position(|n| *n == name).unwrap_or(names.len());
                    if place == names.len() {
                        names.push(name);
                    }
                    place as f64
                }
            };
            let Some(spread) = line.spreads[metric] else { continue };
            let point = Place { x: x_value, median: spread.median, min: spread.min, max: spread.max };
            let name = others(&line.arm, x).unwrap_or_else(|| y.to_owned());
            match series.iter_mut().find(|s| s.name == name) {
                Some(s) => s.points.push(point),
                None => series.push(Series { name, points: vec![point] }),
            }
        }
        (series, names)
    }
}

/// The axes of an arm but `x`, as people say them: the value alone where there is one axis of names, else each with what it is. `None`
/// if there is no other axis.
fn others(arm: &Arm, x: &str) -> Option<String> {
    let others: Vec<&(String, Value)> = arm.iter().filter(|(axis, _)| axis != x).collect();
    let alone = others.len() == 1;
    let name = |(axis, value): &&(String, Value)| match value {
        Value::Text(text) if alone => text.clone(),
        value => format!("{} {}", axis.replace('_', " "), setting(axis, value)),
    };
    (!others.is_empty()).then(|| others.iter().map(name).collect::<Vec<_>>().join(", "))
}

fn number(v: &Value) -> Option<f64> {
    match v {
        Value::Whole(v) => Some(*v as f64),
        Value::Number(v) => Some(*v),
        Value::Text(text) => size(text),
        Value::Flag(_) => None,
    }
}

/// All rows as CSV for spreadsheets, refused ones with the reason.
pub fn csv(spec: &Spec, rows: &[Row]) -> String {
    let metrics: BTreeSet<&String> = rows.iter().flat_map(|r| r.metrics.keys()).collect();
    let quoted = |text: &str| {
        if text.contains([',', '"', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
    };
    let axes: Vec<&String> = spec.axes.keys().collect();
    let head: Vec<String> =
        axes.iter().chain(&metrics.iter().copied().collect::<Vec<_>>()).map(|n| quoted(n)).collect();
    let mut out = format!("arm,repeat,{},refused,seconds,unix,commit\n", head.join(","));
    for row in rows {
        let settings = row.settings.iter().map(|(_, v)| quoted(&v.to_string()));
        let values =
            metrics.iter().map(|&m| row.metrics.get(m).copied().flatten().map_or(String::new(), |v| v.to_string()));
        let cells: Vec<String> = settings.chain(values).collect();
        let refused = quoted(row.refused.as_deref().unwrap_or(""));
        out += &format!(
            "{},{},{},{refused},{:.3},{},{}\n",
            row.arm,
            row.repeat,
            cells.join(","),
            row.seconds,
            row.unix,
            row.commit
        );
    }
    out
}
