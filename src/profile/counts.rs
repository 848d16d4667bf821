//! A profile in memory: the counts of some texts, and their sums.

use super::magnitude;
use crate::error::Result;
use crate::formats::profile_file::{self, BINS, Header, Inputs, LayerSums, ProfileFile, Text, TextInfo};
use std::path::Path;

/// A profile in memory.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Model, activation thresholds and origin; its `texts` repeat the `info` of each text.
    pub header: Header,
    /// Counts and sums of each text.
    pub texts: Vec<Text>,
}

impl Profile {
    /// Reads an open profile into memory.
    ///
    /// # Errors
    /// [`crate::Error::BadFile`] for counts that cannot be.
    pub fn read(file: &ProfileFile) -> Result<Profile> {
        let texts = (0..file.header.texts.len()).map(|t| profile_file::read_text(file, t)).collect::<Result<_>>()?;
        Ok(Profile { header: Header { sections: Vec::new(), ..file.header.clone() }, texts })
    }

    /// Writes the profile to `path`.
    ///
    /// # Errors
    /// [`crate::Error::Io`] where the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        profile_file::write(path, self.header.clone(), &self.texts)
    }

    /// Tokens counted over all texts.
    pub fn tokens(&self) -> u64 {
        self.texts.iter().map(|t| t.info.tokens as u64).sum()
    }

    /// Tokens of all texts for which each neuron of a layer was active, `[ffn]`.
    pub fn counts(&self, layer: usize) -> Vec<u64> {
        let mut sum = vec![0; self.header.ffn];
        for text in &self.texts {
            sum.iter_mut().zip(text.layer_counts(layer)).for_each(|(sum, &n)| *sum += n as u64);
        }
        sum
    }

    /// Tokens of all texts for which each neuron of each expert of a layer was active, `[experts, neurons of an expert]`; `None` where not all texts
    /// say it.
    pub fn inside(&self, layer: usize) -> Option<Vec<u64>> {
        let layers = self.header.layers;
        let mut sum = vec![0; self.texts.first()?.inside.as_ref()?.len() / layers];
        for text in &self.texts {
            let inside = text.inside.as_ref().filter(|inside| inside.len() == layers * sum.len())?;
            let here = &inside[layer * sum.len()..(layer + 1) * sum.len()];
            sum.iter_mut().zip(here).for_each(|(sum, &n)| *sum += u64::from(n));
        }
        Some(sum)
    }

    /// A layer's other sums (Jaccard distances and cosines), over all texts.
    pub fn sums(&self, layer: usize) -> LayerSums {
        let mut sum = LayerSums::default();
        self.texts.iter().for_each(|text| sum.add(&text.sums[layer]));
        sum
    }

    /// The activation threshold that leaves the share `sparsity` of a layer's neurons inactive; `None` for ReLU models.
    pub fn threshold_for_sparsity(&self, layer: usize, sparsity: f64) -> Option<f32> {
        self.header.sparsity?;
        let mut bins = vec![0u64; BINS];
        for text in &self.texts {
            let here = &text.magnitudes[layer * BINS..(layer + 1) * BINS];
            bins.iter_mut().zip(here).for_each(|(sum, &n)| *sum += n);
        }
        Some(magnitude::threshold_for_sparsity(&bins, sparsity))
    }

    /// Adds the texts of a profile of the same model with the same activation thresholds; a text that is in both is taken from `other`.
    ///
    /// # Errors
    /// The difference in words, where the profiles do not belong together; nothing is added.
    pub fn merge(&mut self, other: Profile) -> Result<(), String> {
        let (ours, its) = (&self.header, &other.header);
        if ours.fingerprint != its.fingerprint {
            return Err(format!("one profile is of the model {}, the other of {}", ours.model, its.model));
        }
        if ours.activation_thresholds != its.activation_thresholds {
            return Err("the profiles have other activation thresholds, so other neurons counted as active".into());
        }
        self.texts.retain(|t| other.texts.iter().all(|o| o.info.checksum != t.info.checksum));
        self.texts.extend(other.texts);
        self.header.texts = self.texts.iter().map(|t| t.info.clone()).collect();
        Ok(())
    }
}

/// What is counted beside what every profile has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// Numbers that attention's output matrix reads, if inputs are to be counted.
    pub q_dim: Option<usize>,
    /// Neurons of an expert, if those inside experts are to be counted.
    pub inside: Option<usize>,
}

/// A text of which nothing was counted yet.
pub fn empty_text(info: TextInfo, header: &Header, Extras { q_dim, inside }: Extras) -> Text {
    Text {
        inside: inside.map(|each| vec![0; header.layers * header.ffn * each]),
        info,
        counts: vec![0; header.layers * header.ffn],
        sums: vec![LayerSums::default(); header.layers],
        magnitudes: if header.sparsity.is_some() { vec![0; header.layers * BINS] } else { Vec::new() },
        inputs: q_dim.map(|q_dim| Inputs { q_dim, squares: vec![0.0; header.layers * (2 * header.hidden + q_dim)] }),
    }
}

impl Text {
    /// Tokens of the text for which each neuron of a layer was active, `[ffn]`.
    pub fn layer_counts(&self, layer: usize) -> &[u32] {
        let ffn = self.counts.len() / self.sums.len();
        &self.counts[layer * ffn..(layer + 1) * ffn]
    }
}

impl LayerSums {
    /// Adds another text's or window's sums of the same layer.
    pub fn add(&mut self, other: &LayerSums) {
        self.pairs += other.pairs;
        self.jaccard += other.jaccard;
        self.cosines.iter_mut().zip(other.cosines).for_each(|(sum, c)| *sum += c);
    }
}
