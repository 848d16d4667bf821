//! A profile's figures as SVG.

use crate::error::{Error, Result};
use crate::formats::profile_file::AHEADS;
use crate::profile::Statistics;
use plotters::chart::ChartBuilder;
use plotters::prelude::{
    Circle, Color, IntoDrawingArea, IntoFont, LineSeries, PathElement, SVGBackend, SeriesLabelPosition,
};
use plotters::style::{BLACK, HSLColor, WHITE};
use std::ops::Range;
use std::path::{Path, PathBuf};

const SIZE: (u32, u32) = (900, 600);
/// A legend of more lines would cover the plot; further layers are drawn without a name.
const MOST_NAMES: usize = 12;
/// Numbers below an axis.
const MOST_LABELS: usize = 11;

struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

struct Plot {
    title: &'static str,
    x: (&'static str, Range<f64>),
    y: (&'static str, Range<f64>),
    lines: Vec<Line>,
    /// Points are marked: a line of one point would not be seen.
    dots: bool,
}

/// Writes the plots into `dir` and says which files they are.
pub fn plot(dir: &Path, s: &Statistics) -> Result<Vec<PathBuf>> {
    let cdf = |cdf: &[f64]| -> Vec<(f64, f64)> {
        let last = (cdf.len() - 1) as f64;
        cdf.iter().enumerate().map(|(i, &y)| (100.0 * i as f64 / last, 100.0 * y)).collect()
    };
    let of_layers = |value: &dyn Fn(usize) -> Option<f64>| -> Vec<(f64, f64)> {
        (0..s.layers.len()).filter_map(|l| value(l).map(|y| (l as f64, y))).collect()
    };
    let last = (s.layers.len() - 1).max(1) as f64;
    let mut spreads: Vec<_> =
        s.layers.iter().map(|l| Line { name: format!("layer {}", l.layer), points: cdf(&l.spread.cdf) }).collect();
    spreads.push(Line { name: "all layers".into(), points: cdf(&s.model_spread.cdf) });
    let line = |name: &str, value: &dyn Fn(usize) -> Option<f64>| Line { name: name.into(), points: of_layers(value) };
    let mut similarity: Vec<_> = AHEADS
        .iter()
        .enumerate()
        .map(|(i, ahead)| line(&format!("cosine to layer +{ahead}"), &|l| s.layers[l].cosines[i]))
        .collect();
    similarity.push(line("Jaccard distance, next token", &|l| s.layers[l].neighbours));
    similarity.push(line("Jaccard distance, top 40 % of texts", &|l| s.layers[l].texts.map(|t| t.mean)));
    let plots = [
        (
            "cdf.svg",
            Plot {
                title: "Share of activations made by the most active neurons",
                x: ("neurons, %", 0.0..100.0),
                y: ("activations, %", 0.0..100.0),
                lines: spreads,
                dots: false,
            },
        ),
        (
            "sparsity.svg",
            Plot {
                title: "Sparsity and hot neurons by layer",
                x: ("layer", 0.0..last),
                y: ("neurons, %", 0.0..100.0),
                lines: vec![
                    line("inactive", &|l| Some(100.0 * s.layers[l].spread.sparsity)),
                    line("make 80 % of activations", &|l| Some(100.0 * s.layers[l].spread.neurons_for_80)),
                ],
                dots: true,
            },
        ),
        (
            "similarity.svg",
            Plot {
                title: "Similarity of layers, tokens and texts",
                x: ("layer", 0.0..last),
                y: ("cosine, or Jaccard distance", 0.0..1.0),
                lines: similarity,
                dots: true,
            },
        ),
    ];
    let mut files = Vec::new();
    for (name, plot) in plots {
        let path = dir.join(name);
        let mut svg = String::new();
        draw(&mut svg, &plot).map_err(|e| Error::Failed(format!("cannot draw {name}: {e}")))?;
        std::fs::write(&path, svg).map_err(Error::io("write", &path))?;
        files.push(path);
    }
    Ok(files)
}

fn draw(svg: &mut String, plot: &Plot) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let least = plot.lines.iter().flat_map(|l| &l.points).map(|p| p.1).fold(plot.y.1.start, f64::min);
    let mut chart = ChartBuilder::on(&area)
        .caption(plot.title, ("sans-serif", 22).into_font())
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(60)
        .build_cartesian_2d(plot.x.1.clone(), least..plot.y.1.end)?;
    // Whole layers only: there is none between two.
    let whole = |x: &f64| format!("{x:.0}");
    let labels = if plot.dots { plot.x.1.end as usize + 1 } else { MOST_LABELS };
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(plot.x.0).y_desc(plot.y.0).x_labels(labels.min(MOST_LABELS)).x_label_formatter(&whole);
    mesh.max_light_lines(0).draw()?;
    for (i, line) in plot.lines.iter().enumerate() {
        let colour = HSLColor(i as f64 / plot.lines.len() as f64, 0.75, 0.42);
        let drawn = chart.draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?;
        // The last line stands for the whole and is always named.
        if i + 1 == plot.lines.len() || i + 1 < MOST_NAMES {
            let sample = move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], colour.stroke_width(2));
            drawn.label(line.name.as_str()).legend(sample);
        }
        if plot.dots {
            chart.draw_series(line.points.iter().map(|&at| Circle::new(at, 3, colour.filled())))?;
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.7))
        .border_style(BLACK.mix(0.4))
        .draw()?;
    area.present()?;
    Ok(())
}
