//! The plots of an experiment, each with what it shows in words.

use super::arm::{GENERATED, TEXT, TOKENS};
use crate::cli::chart::{Axis, Line, Plot, Point};
use crate::lab::experiment::sentence::sentence;
use crate::lab::experiment::summary::{Place, Summary};
use crate::lab::experiment::words::{Scale, setting, words};
use crate::lab::experiment::{Method, PlotSpec, Spec};

/// Lines of a plot that can still be told apart; with more, each value of another axis gets a plot of its own.
const LINES: usize = 7;

pub struct Figure {
    pub plot: Plot,
    pub sentence: String,
}

/// The plots that the experiment asks for and that have a point.
pub fn figures(spec: &Spec, summary: &Summary) -> Vec<Figure> {
    spec.plots.iter().flat_map(|plot| panels(spec, plot.clone(), summary)).collect()
}

fn panels(spec: &Spec, plot: PlotSpec, summary: &Summary) -> Vec<Figure> {
    let series = summary.series(&plot.x, &plot.y).0.len();
    let Some(first) = summary.lines.first() else { return Vec::new() };
    match first.arm.iter().find(|(axis, _)| *axis != plot.x) {
        _ if series == 0 => Vec::new(),
        Some((axis, _)) if series > LINES && first.arm.len() > 2 => summary
            .by(axis)
            .into_iter()
            .flat_map(|(value, part)| {
                let title = format!("{}; {} {}", plot.title, axis.replace('_', " "), setting(axis, &value));
                panels(spec, PlotSpec { title, ..plot.clone() }, &part)
            })
            .collect(),
        _ => vec![figure(spec, &plot, summary)],
    }
}

fn figure(spec: &Spec, plot: &PlotSpec, summary: &Summary) -> Figure {
    let (series, names) = summary.series(&plot.x, &plot.y);
    let (x, y) = (words(&plot.x), words(&plot.y));
    let most = |of: &dyn Fn(&Place) -> f64| series.iter().flat_map(|s| &s.points).map(of).fold(f64::MIN, f64::max);
    let (over, up) = (x.unit.scale(most(&|p| p.x)), y.unit.scale(most(&|p| p.max)));
    let over = if names.is_empty() { over } else { Scale { factor: 1.0, unit: "" } };
    let point = |p: &Place| Point {
        x: p.x * over.factor,
        y: p.median * up.factor,
        low: p.min * up.factor,
        high: p.max * up.factor,
    };
    let lines: Vec<Line> = series
        .into_iter()
        .map(|s| Line { name: s.name, points: s.points.iter().map(point).collect(), faint: false })
        .collect();
    let points = || lines.iter().flat_map(|l| &l.points);
    let (left, right) = points().fold((f64::MAX, f64::MIN), |(l, r), p| (l.min(p.x), r.max(p.x)));
    let room = if right > left { 0.03 * (right - left) } else { 0.5 };
    let along = match names.len() {
        0 if x.whole => Axis::new(x.with(over), left - room, right + room).whole(),
        0 => Axis::new(x.with(over), left - room, right + room),
        n => Axis::new(x.text, -0.5, n as f64 - 0.5),
    };
    let upward = Axis::around(&y.with(up), points().flat_map(|p| [p.low, p.high]));
    let of = measured_on(spec);
    let drawn = Plot { title: plot.title.clone(), of, x: along, y: upward, lines, dots: true, names };
    Figure { plot: drawn, sentence: sentence(plot, summary) }
}

/// Model, text and tokens that all arms share.
fn measured_on(spec: &Spec) -> String {
    let fixed = |name: &str| spec.fixed().into_iter().find(|(known, _)| known == name).map(|(_, v)| v.to_string());
    let varied = |name: &str| spec.axes.contains_key(name);
    let mut parts = Vec::new();
    parts.extend(fixed("model").or_else(|| fixed("shape")).map(|model| {
        let quant = fixed("quant").map_or(String::new(), |quant| format!(" in {quant}"));
        format!("{model}{quant}")
    }));
    let of = |name: &str, else_: &str| fixed(name).unwrap_or_else(|| else_.to_owned());
    for method in &spec.methods {
        match method {
            Method::Evaluate if !varied("tokens") && !varied("text") => {
                parts.push(format!("{} tokens of {}", of("tokens", &TOKENS.to_string()), of("text", TEXT)));
            }
            Method::Bench if !varied("n_gen") => {
                parts.push(format!("{} tokens generated", of("n_gen", &GENERATED.to_string())));
            }
            Method::Choices => parts.extend(fixed("choices").map(|file| format!("questions of {file}"))),
            Method::Replay => parts.push("a made-up trace".into()),
            Method::Simulate => parts.extend(fixed("machine").map(|machine| format!("simulated on {machine}"))),
            Method::Evaluate | Method::Bench => (),
        }
    }
    parts.extend(fixed("threads").map(|n| if n == "1" { "1 thread".into() } else { format!("{n} threads") }));
    parts.join("; ")
}
