//! How much an error of a model's weights costs, as a quantising encoder takes it.

use super::counts::Profile;

/// For each column of a model's matrices the mean square of what they read there on the texts of a profile: the error that a wrong weight
/// makes in a product grows with it. Embeddings and head have none, since the one reads nothing and the other gets enough bits; `down` has
/// none in a neuron store, where a row of it is one column of the published matrix, all of whose errors count alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Importance {
    /// Fingerprint of the model.
    pub fingerprint: String,
    /// Its name, for messages.
    pub model: String,
    /// Layers, hidden size, and numbers that attention's output matrix reads.
    pub shape: [usize; 3],
    /// Tokens that it was made of.
    pub tokens: u64,
    /// `[layers, hidden + q_dim + hidden]`
    means: Vec<f32>,
}

impl Importance {
    /// That of a profile's texts, which all have the same model; `None` where no text has inputs, as before they were counted.
    pub fn of(profile: &Profile) -> Option<Importance> {
        let h = &profile.header;
        let counted = || profile.texts.iter().filter_map(|text| Some((text.info.tokens as u64, text.inputs.as_ref()?)));
        let q_dim = counted().next()?.1.q_dim;
        let mut sums = vec![0f64; h.layers * (2 * h.hidden + q_dim)];
        counted().for_each(|(_, inputs)| sums.iter_mut().zip(&inputs.squares).for_each(|(sum, s)| *sum += s));
        let tokens = counted().map(|(tokens, _)| tokens).sum();
        let means = sums.iter().map(|sum| (sum / tokens as f64) as f32).collect();
        let (fingerprint, model) = (h.fingerprint.clone(), h.model.clone());
        Some(Importance { fingerprint, model, shape: [h.layers, h.hidden, q_dim], tokens, means })
    }

    /// Of the columns of queries, keys and values in a layer, `[hidden]`.
    pub fn qkv(&self, layer: usize) -> &[f32] {
        &self.layer(layer)[..self.shape[1]]
    }

    /// Of the columns of attention's output matrix in a layer, `[q_dim]`.
    pub fn output(&self, layer: usize) -> &[f32] {
        let [_, hidden, q_dim] = self.shape;
        &self.layer(layer)[hidden..hidden + q_dim]
    }

    /// Of the columns of gate and up in a layer, `[hidden]`.
    pub fn ffn(&self, layer: usize) -> &[f32] {
        let [_, hidden, q_dim] = self.shape;
        &self.layer(layer)[hidden + q_dim..]
    }

    fn layer(&self, layer: usize) -> &[f32] {
        let [layers, ..] = self.shape;
        let width = self.means.len() / layers;
        &self.means[layer * width..(layer + 1) * width]
    }
}
