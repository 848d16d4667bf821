//! The drawing of a chart.

use super::Plot;
use crate::error::{Error, Result};
use plotters::chart::ChartBuilder;
use plotters::prelude::{
    Circle, Color, IntoDrawingArea, IntoFont, LineSeries, PathElement, SVGBackend, SeriesLabelPosition,
};
use plotters::style::{BLACK, HSLColor, WHITE};

const SIZE: (u32, u32) = (900, 600);
/// A legend of more lines would cover the plot; further layers are drawn without a name.
const MAX_NAMES: usize = 12;
/// Numbers below an axis.
const MAX_LABELS: usize = 11;

/// `plot` as the text of an SVG file.
pub fn svg(plot: &Plot) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, plot).map_err(|e| Error::Failed(format!("cannot draw '{}': {e}", plot.title)))?;
    Ok(svg)
}

fn draw(svg: &mut String, plot: &Plot) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let least = plot.lines.iter().flat_map(|l| &l.points).map(|p| p.1).fold(plot.y.1.start, f64::min);
    let mut chart = ChartBuilder::on(&area)
        .caption(&plot.title, ("sans-serif", 22).into_font())
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(60)
        .build_cartesian_2d(plot.x.1.clone(), least..plot.y.1.end)?;
    // Whole layers only: there is none between two.
    let close = plot.x.1.end - plot.x.1.start < MAX_LABELS as f64 / 2.0;
    let whole = |x: &f64| match plot.names.get(x.round().max(0.0) as usize) {
        Some(name) if (x - x.round()).abs() < 1e-6 => name.clone(),
        _ if !plot.names.is_empty() => String::new(),
        _ if close && plot.dots => format!("{x:.2}"),
        _ => format!("{x:.0}"),
    };
    let labels = match plot.names.len() {
        0 if plot.dots && !close => plot.x.1.end as usize + 1,
        0 => MAX_LABELS,
        // Half a step is left free on either side.
        names => 2 * names + 1,
    };
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(&plot.x.0)
        .y_desc(&plot.y.0)
        .x_labels(labels.min(if plot.names.is_empty() { MAX_LABELS } else { labels }))
        .x_label_formatter(&whole);
    mesh.max_light_lines(0).draw()?;
    for (i, line) in plot.lines.iter().enumerate() {
        let colour = HSLColor(i as f64 / plot.lines.len() as f64, 0.75, 0.42);
        let drawn = chart.draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?;
        // The last line stands for the whole and is always named.
        if i + 1 == plot.lines.len() || i + 1 < MAX_NAMES {
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
