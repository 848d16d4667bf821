//! What a plot shows, in words that are made from its numbers alone.

use super::summary::{Series, Summary};
use super::words::{setting, words};
use super::{PlotSpec, Value};
use std::cmp::Ordering;

/// Series of which each is described; of more only the ends of the whole are.
const FEW: usize = 3;

/// The sentences below a plot; empty if no row that counts has its metric.
pub fn sentence(plot: &PlotSpec, summary: &Summary) -> String {
    let (series, names) = summary.series(&plot.x, &plot.y);
    let (x, y) = (words(&plot.x), words(&plot.y));
    let shown = |at: f64| match names.get(at as usize) {
        Some(name) => name.clone(),
        None => setting(&plot.x, &Value::Number(at)),
    };
    let Some(all) = ends(&series) else { return String::new() };
    let of = |i: usize, at: f64| match series.len() {
        1 => shown(at),
        _ => format!("{}, {}", series[i].name, shown(at)),
    };
    let value = |v: f64| y.unit.text(v);
    if value(all.low.1) == value(all.high.1) {
        return format!("{}: {} everywhere.", begun(&y.text), value(all.high.1));
    }
    let mut said = format!(
        "{}, by {}: highest {} ({}), lowest {} ({}).",
        begun(&y.text),
        x.text,
        value(all.high.1),
        of(all.high.2, all.high.0),
        value(all.low.1),
        of(all.low.2, all.low.0),
    );
    if names.is_empty() && series.len() <= FEW {
        let run = |s: &Series| {
            let (first, last) = (s.points.first()?, s.points.last()?);
            let subject = if series.len() == 1 { "It".to_owned() } else { begun(&s.name) };
            let (a, b) = (value(first.median), value(last.median));
            let verb = match last.median.total_cmp(&first.median) {
                _ if a == b => format!("is {a}"),
                Ordering::Less => format!("falls from {a} to {b}"),
                _ => format!("rises from {a} to {b}"),
            };
            (s.points.len() > 1).then(|| format!(" {subject} {verb} between {} and {}.", shown(first.x), shown(last.x)))
        };
        said.extend(series.iter().filter_map(run));
    }
    if let [first, second] = &series[..] {
        said += &compared(first, second, &shown, &value);
    }
    said
}

/// The highest and the lowest point: x, y and number of the series.
struct Ends {
    low: (f64, f64, usize),
    high: (f64, f64, usize),
}

fn ends(series: &[Series]) -> Option<Ends> {
    let points = || series.iter().enumerate().flat_map(|(i, s)| s.points.iter().map(move |p| (p.x, p.median, i)));
    // Of equals the first.
    let low = points().reduce(|best, p| if p.1 < best.1 { p } else { best })?;
    let high = points().reduce(|best, p| if p.1 > best.1 { p } else { best })?;
    Some(Ends { low, high })
}

/// How often the second of two series is above the first, and where most.
fn compared(a: &Series, b: &Series, shown: &dyn Fn(f64) -> String, value: &dyn Fn(f64) -> String) -> String {
    let pairs: Vec<(f64, f64, f64)> =
        a.points.iter().filter_map(|p| Some((p.x, p.median, b.points.iter().find(|q| q.x == p.x)?.median))).collect();
    // What reads the same is not called a difference.
    let differ: Vec<_> = pairs.iter().filter(|(_, a, b)| value(*a) != value(*b)).collect();
    let above = differ.iter().filter(|(_, a, b)| b > a).count();
    let Some(most) = differ.iter().max_by(|p, q| (p.2 - p.1).abs().total_cmp(&(q.2 - q.1).abs())) else {
        return String::new();
    };
    format!(
        " {} is above {} at {above} of {} places and below at {}; most apart at {}: {} and {}.",
        begun(&b.name),
        a.name,
        pairs.len(),
        differ.len() - above,
        shown(most.0),
        value(most.2),
        value(most.1),
    )
}

/// As a sentence begins: with a capital.
fn begun(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}
