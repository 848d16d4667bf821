//! The data of a chart: lines over a plane.

/// A figure and the range of what was measured for it; the same three times where there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub low: f64,
    pub high: f64,
}

impl Point {
    /// A figure without a range.
    pub fn at((x, y): (f64, f64)) -> Point {
        Point { x, y, low: y, high: y }
    }
}

pub struct Line {
    pub name: String,
    pub points: Vec<Point>,
    /// Drawn in grey and without a name, so that others can be seen: the layers behind the line of all layers.
    pub faint: bool,
}

impl Line {
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Line {
        Line { name: name.into(), points: points.into_iter().map(Point::at).collect(), faint: false }
    }
}

/// What is measured along an edge, and the range that is shown.
#[derive(Clone, Debug)]
pub struct Axis {
    /// In words, with the unit.
    pub text: String,
    pub from: f64,
    pub to: f64,
    /// Whole numbers only, as of layers: there is none between two.
    pub whole: bool,
}

impl Axis {
    pub fn new(text: impl Into<String>, from: f64, to: f64) -> Axis {
        Axis { text: text.into(), from, to, whole: false }
    }

    pub fn whole(self) -> Axis {
        Axis { whole: true, ..self }
    }

    /// One that shows all of `values`: from zero, unless they lie in a narrow band far from it, which the axis then says.
    pub fn around(text: &str, values: impl Iterator<Item = f64>) -> Axis {
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            return Axis::new(text, 0.0, 1.0);
        }
        if low > 0.8 * high && low > 0.0 {
            let room = 0.15 * (high - low).max(0.002 * high);
            return Axis::new(format!("{text}; does not begin at 0"), low - room, high + room);
        }
        let (from, to) = (low.min(0.0), high.max(0.0));
        let room = 0.06 * (to - from);
        let to = if to > from { to + room } else { from + 1.0 };
        Axis::new(text, if from < 0.0 { from - room } else { 0.0 }, to)
    }
}

pub struct Plot {
    pub title: String,
    /// What it was measured on: model, text, tokens. May be empty.
    pub of: String,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
    /// Points are marked: a line of one point would not be seen.
    pub dots: bool,
    /// What stands at 0, 1, 2 of x, where these are no numbers. Points are then not joined: nothing lies between two names.
    pub names: Vec<String>,
}

/// How much room there is: letters are as large in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Names stand beside the ends of their lines.
    Wide,
    /// As on a telephone: names stand below.
    Narrow,
}
