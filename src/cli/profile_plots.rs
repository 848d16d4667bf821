//! A profile's figures as SVG.

use super::chart::{self, Line, Plot};
use crate::error::Result;
use crate::formats::profile_file::AHEADS;
use crate::profile::Statistics;
use std::path::{Path, PathBuf};

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
                title: "Share of activations made by the most active neurons".into(),
                x: ("neurons, %".into(), 0.0..100.0),
                y: ("activations, %".into(), 0.0..100.0),
                lines: spreads,
                dots: false,
                names: Vec::new(),
            },
        ),
        (
            "sparsity.svg",
            Plot {
                title: "Sparsity and hot neurons by layer".into(),
                x: ("layer".into(), 0.0..last),
                y: ("neurons, %".into(), 0.0..100.0),
                lines: vec![
                    line("inactive", &|l| Some(100.0 * s.layers[l].spread.sparsity)),
                    line("make 80 % of activations", &|l| Some(100.0 * s.layers[l].spread.neurons_for_80)),
                ],
                dots: true,
                names: Vec::new(),
            },
        ),
        (
            "similarity.svg",
            Plot {
                title: "Similarity of layers, tokens and texts".into(),
                x: ("layer".into(), 0.0..last),
                y: ("cosine, or Jaccard distance".into(), 0.0..1.0),
                lines: similarity,
                dots: true,
                names: Vec::new(),
            },
        ),
    ];
    let mut files = Vec::new();
    for (name, plot) in plots {
        let path = dir.join(name);
        chart::write(&path, &plot)?;
        files.push(path);
    }
    Ok(files)
}
