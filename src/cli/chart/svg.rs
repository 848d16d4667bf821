//! The drawing of a chart.

use super::figures::{Line, Plot, Point, Room};
use super::labels::{apart, rows, width, wrapped};
use super::scale;
use crate::error::safe_text;
use std::fmt::Write as _;

/// Height of letters; a page shows a chart in its own size, so they are as large as the text around it.
const LETTERS: f64 = 13.0;
/// Hues that people with any kind of colour vision tell apart (Okabe and Ito, 2008), on white; yellow is left out, since it cannot be
/// seen there. Shapes repeat after another number, so that no two of the first 35 lines look alike.
const HUES: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#a8447f", "#b87400", "#3a8fc4", "#333333"];
/// The same on black.
const DARK_HUES: [&str; 7] = ["#56b4e9", "#ff8a3d", "#2ec79b", "#e39bc6", "#f0b429", "#9ad1f5", "#e6e6e6"];
const SHAPES: usize = 5;

/// The drawing's edges and the plane in it, in pixels.
struct Frame {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Frame {
    fn x(&self, plot: &Plot, x: f64) -> f64 {
        self.left + (x - plot.x.from) / (plot.x.to - plot.x.from) * (self.right - self.left)
    }

    fn y(&self, plot: &Plot, y: f64) -> f64 {
        self.bottom - (y - plot.y.from) / (plot.y.to - plot.y.from) * (self.bottom - self.top)
    }
}

/// `plot` as the text of an SVG file.
pub fn svg(plot: &Plot, room: Room) -> String {
    let (wide, tall) = match room {
        Room::Wide => (720.0, 400.0),
        Room::Narrow => (352.0, 330.0),
    };
    let mut body = String::new();
    let mut top = 8.0;
    // Bold letters are wider.
    for line in wrapped(&plot.title, 1.12 * (LETTERS + 2.0), wide - 16.0) {
        top += LETTERS + 6.0;
        text(&mut body, (8.0, top), "t", &line);
    }
    for line in wrapped(&plot.of, LETTERS, wide - 16.0) {
        top += LETTERS + 4.0;
        text(&mut body, (8.0, top), "q", &line);
    }
    for line in wrapped(&format!("↑ {}", plot.y.text), LETTERS, wide - 16.0) {
        top += LETTERS + 5.0;
        text(&mut body, (8.0, top), "", &line);
    }
    let marks = scale::ticks(&plot.y, 5);
    let left = 18.0 + marks.iter().map(|(_, text)| width(text, LETTERS)).fold(0.0, f64::max);
    let named: Vec<(usize, &Line)> = named(plot);
    let names: Vec<&str> = named.iter().map(|(_, line)| line.name.as_str()).collect();
    let longest = names.iter().map(|name| width(name, LETTERS)).fold(0.0, f64::max);
    let room = if longest > 0.3 * wide { Room::Narrow } else { room };
    let beside = if room == Room::Wide { longest + 30.0 } else { 14.0 };
    let turned = plot.names.iter().map(|name| width(name, LETTERS)).fold(0.0, f64::max)
        > 0.9 * (wide - left - beside) / plot.names.len().max(1) as f64;
    let under = if turned { 0.8 * plot.names.iter().map(|n| width(n, LETTERS)).fold(0.0, f64::max) } else { LETTERS };
    let below = wrapped(&plot.x.text, LETTERS, wide - left - 14.0);
    let bottom = top + tall * 0.68;
    let frame = Frame { width: wide, height: 0.0, left, right: wide - beside, top: top + 12.0, bottom };
    axes(&mut body, plot, &frame, &marks, turned);
    let mut end = bottom + 8.0 + under;
    for line in &below {
        end += LETTERS + 5.0;
        text(&mut body, ((frame.left + frame.right) / 2.0, end), "m", line);
    }
    for (i, line) in plot.lines.iter().enumerate() {
        draw(&mut body, plot, &frame, i, line);
    }
    if room == Room::Wide {
        names_beside(&mut body, plot, &frame, &named);
    } else {
        let places = rows(&names, LETTERS, 18.0, wide - 16.0);
        for (&(i, line), &(row, at)) in named.iter().zip(&places) {
            let y = end + 22.0 + row as f64 * (LETTERS + 6.0);
            shape(&mut body, (14.0 + at, y - 4.0), i, hue(plot, i));
            text(&mut body, (24.0 + at, y), "", &line.name);
        }
        end += places.last().map_or(0.0, |(row, _)| 22.0 + (row + 1) as f64 * (LETTERS + 6.0) - LETTERS);
    }
    let frame = Frame { height: end + 12.0, ..frame };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1:.0}\" viewBox=\"0 0 {0} {1:.0}\" role=\"img\" \
         aria-label=\"{2}\">\n<style>{3}</style>\n<rect class=\"c-back\" width=\"100%\" height=\"100%\"/>\n{body}</svg>\n",
        frame.width,
        frame.height,
        escaped(&plot.title),
        style(),
    )
}

/// Which lines have a name in the drawing, with their numbers; a line by itself is named by the axis.
fn named(plot: &Plot) -> Vec<(usize, &Line)> {
    let with_names = plot.lines.iter().enumerate().filter(|(_, line)| !line.faint && !line.points.is_empty());
    let found: Vec<_> = with_names.collect();
    if found.len() == 1 && plot.lines.len() == 1 { Vec::new() } else { found }
}

/// Number of the hue of line `i`: faint lines take none.
fn hue(plot: &Plot, i: usize) -> usize {
    plot.lines[..i].iter().filter(|line| !line.faint).count() % HUES.len()
}

fn axes(body: &mut String, plot: &Plot, frame: &Frame, marks: &[(f64, String)], turned: bool) {
    for (at, mark) in marks {
        let y = frame.y(plot, *at);
        let _ = writeln!(body, "<path class=\"c-grid\" d=\"M{:.1} {y:.1}H{:.1}\"/>", frame.left, frame.right);
        text(body, (frame.left - 8.0, y + 4.5), "e", mark);
    }
    let _ = writeln!(body, "<path class=\"c-axis\" d=\"M{:.1} {:.1}H{:.1}\"/>", frame.left, frame.bottom, frame.right);
    let below = frame.bottom + 8.0 + LETTERS - 2.0;
    for (i, name) in plot.names.iter().enumerate() {
        let x = frame.x(plot, i as f64);
        if turned {
            let (y, name) = (frame.bottom + 12.0, escaped(name));
            let _ = writeln!(
                body,
                "<text class=\"c-e\" transform=\"translate({:.1} {y:.1}) rotate(-50)\">{name}</text>",
                x + 4.0
            );
        } else {
            text(body, (x, below), "m", name);
        }
    }
    if plot.names.is_empty() {
        let about = ((frame.right - frame.left) / 52.0) as usize;
        for (at, mark) in scale::ticks(&plot.x, about.clamp(2, 11)) {
            let x = frame.x(plot, at);
            let _ = writeln!(body, "<path class=\"c-axis\" d=\"M{x:.1} {:.1}v5\"/>", frame.bottom);
            text(body, (x, below), "m", &mark);
        }
    }
}

/// One line with its band, or its points with their ranges where x has names.
fn draw(body: &mut String, plot: &Plot, frame: &Frame, i: usize, line: &Line) {
    let inside = |p: &&Point| p.x.is_finite() && p.y.is_finite();
    let points: Vec<&Point> = line.points.iter().filter(inside).collect();
    let hue = hue(plot, i);
    // Points of several lines at one name stand side by side.
    let lines = plot.lines.len() as f64;
    let aside = if plot.names.is_empty() { 0.0 } else { (i as f64 - (lines - 1.0) / 2.0) * (26.0 / lines).min(10.0) };
    let x = |p: &Point| frame.x(plot, p.x) + aside;
    let spread = points.iter().any(|p| p.low < p.high);
    if plot.names.is_empty() {
        if spread {
            let upper = points.iter().map(|p| format!("{:.1},{:.1}", x(p), frame.y(plot, p.high)));
            let lower = points.iter().rev().map(|p| format!("{:.1},{:.1}", x(p), frame.y(plot, p.low)));
            let corners: Vec<String> = upper.chain(lower).collect();
            let _ = writeln!(body, "<polygon class=\"c-band c-f{hue}\" points=\"{}\"/>", corners.join(" "));
        }
        let along: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", x(p), frame.y(plot, p.y))).collect();
        let class = if line.faint { "c-faint".to_owned() } else { format!("c-line c-s{hue}") };
        let _ = writeln!(body, "<polyline class=\"{class}\" points=\"{}\"/>", along.join(" "));
    } else if spread {
        for p in &points {
            let (high, low) = (frame.y(plot, p.high), frame.y(plot, p.low));
            let _ = writeln!(body, "<path class=\"c-line c-s{hue}\" d=\"M{:.1} {high:.1}V{low:.1}\"/>", x(p));
        }
    }
    if plot.dots && !line.faint {
        points.iter().for_each(|p| shape(body, (x(p), frame.y(plot, p.y)), i, hue));
    }
}

/// Names beside the ends of their lines, with a thin line to the end where the name had to give way.
fn names_beside(body: &mut String, plot: &Plot, frame: &Frame, named: &[(usize, &Line)]) {
    let ends: Vec<(f64, f64)> =
        named.iter().filter_map(|(_, l)| l.points.last()).map(|p| (frame.x(plot, p.x), frame.y(plot, p.y))).collect();
    let wanted: Vec<f64> = ends.iter().map(|end| end.1).collect();
    let places = apart(&wanted, LETTERS + 4.0, frame.top + 4.0, frame.bottom - 4.0);
    for ((&(i, line), end), place) in named.iter().zip(&ends).zip(places) {
        let from = if plot.names.is_empty() { end.0 + 5.0 } else { frame.right };
        let _ = writeln!(
            body,
            "<path class=\"c-lead\" d=\"M{from:.1} {:.1}L{:.1} {place:.1}\"/>",
            if plot.names.is_empty() { end.1 } else { place },
            frame.right + 4.0
        );
        shape(body, (frame.right + 10.0, place), i, hue(plot, i));
        text(body, (frame.right + 18.0, place + 4.5), "", &line.name);
    }
}

/// The mark of line `i`: hue and shape both tell it from others.
fn shape(body: &mut String, (x, y): (f64, f64), i: usize, hue: usize) {
    let path = match i % SHAPES {
        0 => format!("M{:.1} {y:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", x - 4.0),
        1 => format!("M{:.1} {:.1}h7v7h-7z", x - 3.5, y - 3.5),
        2 => format!("M{x:.1} {:.1}l4.5 8h-9z", y - 5.0),
        3 => format!("M{x:.1} {:.1}l5 5l-5 5l-5 -5z", y - 5.0),
        _ => format!("M{x:.1} {:.1}l4.5 -8h-9z", y + 5.0),
    };
    let _ = writeln!(body, "<path class=\"c-f{hue}\" d=\"{path}\"/>");
}

fn text(body: &mut String, (x, y): (f64, f64), class: &str, text: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"c-{class}\"") };
    let _ = writeln!(body, "<text{class} x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(text));
}

/// Text inside SVG or HTML, also within quotation marks. What a terminal would act on when the file is shown there is replaced.
pub fn escaped(text: &str) -> String {
    let text = safe_text(text);
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

/// Colours of both schemes. Its names begin with `c-`: on a page they hold for all of it.
fn style() -> String {
    let of = |hues: &[&str], back: &str, ink: &str, dim: &str, grid: &str| {
        let mut css = format!(
            ".c-back{{fill:{back}}}svg text{{fill:{ink}}}svg .c-q{{fill:{dim}}}.c-grid{{stroke:{grid}}}.c-axis{{stroke:{dim}}}\
             .c-lead,.c-faint{{stroke:{dim}}}"
        );
        for (i, hue) in hues.iter().enumerate() {
            let _ = write!(css, ".c-s{i}{{stroke:{hue}}}.c-f{i}{{fill:{hue}}}");
        }
        css
    };
    format!(
        "svg text{{font:{LETTERS}px sans-serif}}svg .c-t{{font-size:{}px;font-weight:bold}}.c-e{{text-anchor:end}}.c-m{{text-anchor:middle}}\
         .c-grid,.c-axis,.c-lead,.c-faint,.c-line{{fill:none}}.c-line{{stroke-width:2}}.c-faint{{stroke-width:1;opacity:.45}}\
         .c-lead{{stroke-width:.7}}.c-band{{opacity:.18;stroke:none}}{}@media(prefers-color-scheme:dark){{{}}}",
        LETTERS + 2.0,
        of(&HUES, "#fff", "#222", "#666", "#e4e4e4"),
        of(&DARK_HUES, "#16181c", "#e8e8e8", "#9aa0a6", "#33373d")
    )
}
