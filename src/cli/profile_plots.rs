//! A profile's figures as SVG.

use super::chart::{self, Axis, Line, Plot};
use crate::error::Result;
use crate::formats::profile_file::AHEADS;
use crate::profile::Statistics;
use std::path::{Path, PathBuf};

/// Writes the plots into `dir` and lists the files. `of` is the model and its texts.
pub fn plot(dir: &Path, s: &Statistics, of: &str) -> Result<Vec<PathBuf>> {
    let plots = [
        ("cdf.svg", spreads(s)),
        ("sparsity.svg", sparsity(s)),
        ("similarity.svg", cosines(s)),
        ("distance.svg", distances(s)),
    ];
    let mut files = Vec::new();
    for (name, plot) in plots {
        let path = dir.join(name);
        chart::write(&path, &Plot { of: of.to_owned(), ..plot })?;
        files.push(path);
    }
    Ok(files)
}

fn spreads(s: &Statistics) -> Plot {
    let cdf = |cdf: &[f64]| -> Vec<(f64, f64)> {
        let last = (cdf.len() - 1) as f64;
        cdf.iter().enumerate().map(|(i, &y)| (100.0 * i as f64 / last, 100.0 * y)).collect()
    };
    let last = s.layers.len().saturating_sub(1);
    // Layers are close together: of many, only the first, the last and the mean are named.
    let many = s.layers.len() > 6;
    let layer = |(i, l): (usize, &crate::profile::LayerStatistics)| Line {
        faint: many && i > 0 && i < last,
        ..Line::new(format!("layer {}", l.layer), cdf(&l.spread.cdf))
    };
    let mut lines: Vec<_> = s.layers.iter().enumerate().map(layer).collect();
    lines.push(Line::new("all layers", cdf(&s.model_spread.cdf)));
    Plot {
        title: "Share of activations made by the most active neurons".into(),
        of: String::new(),
        x: Axis::new("neurons, the most active ones first, %", 0.0, 100.0),
        y: Axis::new("activations, %", 0.0, 100.0),
        lines,
        dots: false,
        names: Vec::new(),
    }
}

/// A plot over the layers of what is between 0 and `most`.
fn by_layer(s: &Statistics, title: &str, what: &str, most: f64, lines: Vec<Line>) -> Plot {
    Plot {
        title: title.into(),
        of: String::new(),
        x: Axis::new("layer", -0.3, s.layers.len() as f64 - 0.7).whole(),
        y: Axis::new(what, 0.0, most),
        lines,
        dots: true,
        names: Vec::new(),
    }
}

fn line(s: &Statistics, name: &str, value: &dyn Fn(usize) -> Option<f64>) -> Line {
    Line::new(name, (0..s.layers.len()).filter_map(|l| value(l).map(|y| (l as f64, y))))
}

fn sparsity(s: &Statistics) -> Plot {
    let lines = vec![
        line(s, "inactive", &|l| Some(100.0 * s.layers[l].spread.sparsity)),
        line(s, "make 80 % of activations", &|l| Some(100.0 * s.layers[l].spread.neurons_for_80)),
    ];
    by_layer(s, "Sparsity and hot neurons by layer", "neurons, %", 100.0, lines)
}

fn cosines(s: &Statistics) -> Plot {
    let ahead = |(i, ahead): (usize, &usize)| line(s, &format!("to layer +{ahead}"), &|l| s.layers[l].cosines[i]);
    let lines = AHEADS.iter().enumerate().map(ahead).collect();
    by_layer(s, "How much a layer's input is like that of layers ahead", "cosine (1 is the same)", 1.0, lines)
}

fn distances(s: &Statistics) -> Plot {
    let lines = vec![
        line(s, "next token", &|l| s.layers[l].neighbours),
        line(s, "top 40 % of texts", &|l| s.layers[l].texts.map(|t| t.mean)),
    ];
    by_layer(
        s,
        "How far apart the active neurons of tokens and texts are",
        "Jaccard distance (0 is the same)",
        1.0,
        lines,
    )
}
