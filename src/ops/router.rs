//! From a router's products to a token's experts and their weights.

use crate::model::layer::{Experts, Scoring};

/// Adds one token's experts, those with the largest products (of equals the first), and their weights to `chosen`. Where all are computed
/// nothing is looked at.
pub fn choose(experts: Experts, products: &[f32], chosen: &mut Vec<(usize, f32)>) {
    if experts.scoring == Scoring::All {
        return chosen.extend((0..experts.count).map(|expert| (expert, 1.0)));
    }
    let start = chosen.len();
    for (expert, &product) in products.iter().enumerate() {
        let full = chosen.len() - start == experts.used;
        if full && chosen.last().is_some_and(|&(_, least)| product.total_cmp(&least).is_le()) {
            continue;
        }
        if full {
            chosen.pop();
        }
        let at = chosen[start..].iter().position(|(_, other)| product.total_cmp(other).is_gt());
        chosen.insert(at.map_or(chosen.len(), |at| start + at), (expert, product));
    }
    let ours = &mut chosen[start..];
    let most = ours[0].1;
    let score = |product: f32| match experts.scoring {
        Scoring::Softmax => (product - most).exp(),
        Scoring::Sigmoid => 1.0 / (1.0 + (-product).exp()),
        Scoring::All => 1.0,
    };
    ours.iter_mut().for_each(|(_, weight)| *weight = score(*weight));
    let sum = match (experts.normalised, experts.scoring) {
        (true, _) => ours.iter().map(|(_, weight)| weight).sum(),
        (false, Scoring::Softmax) => products.iter().map(|&product| score(product)).sum(),
        (false, Scoring::Sigmoid | Scoring::All) => 1.0,
    };
    ours.iter_mut().for_each(|(_, weight)| *weight /= sum);
}
