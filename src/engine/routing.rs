//! Which experts each token of a pass has, in layers that are mixtures.

use super::ffn::Selection;
use crate::cpu::{Columns, Kernels, ThreadPool};
use crate::ids::StoreId;
use crate::model::Matrix;
use crate::model::layer::Experts;
use crate::ops::linear;
use crate::ops::math;
use crate::ops::router::choose;

/// A token that an expert is computed for, and the weight of what it adds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routed {
    /// Number of the token in the pass.
    pub token: usize,
    /// What the expert's output is multiplied by.
    pub weight: f32,
}

/// An expert that some tokens of a pass have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of the expert.
    pub expert: usize,
    /// Where its tokens begin in [`Routes::tokens`].
    pub first: usize,
    /// How many tokens have it.
    pub tokens: usize,
}

/// The experts of the tokens of a pass in one layer.
#[derive(Default)]
pub struct Routes {
    /// Products of the router, `[n, experts]`.
    pub products: Vec<f32>,
    /// The experts that some token has, ascending.
    pub groups: Vec<Group>,
    /// The tokens of each group, ascending.
    pub tokens: Vec<Routed>,
    /// Experts and weights of each token, `[n, used]`.
    chosen: Vec<(usize, f32)>,
    /// For each expert, the place of its next token.
    next: Vec<usize>,
}

impl Routes {
    /// Chooses the experts of the n tokens of `x`, set for the router's type. `bias` is added to each token's products, `selection_bias` to
    /// scores for choosing only, and weights are multiplied by `scales`; all are `[experts]`, or empty where there are none.
    pub fn route(
        &mut self,
        pool: &mut ThreadPool,
        kernels: &Kernels,
        experts: Experts,
        router: &Matrix,
        [bias, selection_bias, scales]: [&[f32]; 3],
        x: &Columns,
    ) {
        self.products.resize(x.n * experts.count, 0.0);
        linear::products(pool, kernels, std::slice::from_ref(router), x, &mut self.products);
        if !bias.is_empty() {
            self.products.chunks_exact_mut(bias.len()).for_each(|products| math::add(products, bias));
        }
        self.choose(experts, selection_bias, scales);
    }

    /// All experts for each of n tokens, where there is no router.
    pub fn take_all(&mut self, experts: Experts, n: usize) {
        self.products.clear();
        self.products.resize(n * experts.count, 0.0);
        self.choose(experts, &[], &[]);
    }

    /// None for any token, where there are none to choose from.
    pub fn take_none(&mut self) {
        let Routes { products, groups, tokens, chosen, .. } = self;
        products.clear();
        groups.clear();
        tokens.clear();
        chosen.clear();
    }

    /// Chooses each token's experts by `products`.
    fn choose(&mut self, experts: Experts, selection_bias: &[f32], scales: &[f32]) {
        let Routes { products, chosen, next, groups, tokens } = self;
        chosen.clear();
        for products in products.chunks_exact(experts.count) {
            choose(experts, products, selection_bias, chosen);
        }
        if !scales.is_empty() {
            chosen.iter_mut().for_each(|(expert, weight)| *weight *= scales[*expert]);
        }
        next.clear();
        next.resize(experts.count, 0);
        chosen.iter().for_each(|&(expert, _)| next[expert] += 1);
        groups.clear();
        let mut first = 0;
        for (expert, next) in next.iter_mut().enumerate() {
            let tokens = std::mem::replace(next, first);
            if tokens > 0 {
                groups.push(Group { expert, first, tokens });
                first += tokens;
            }
        }
        tokens.resize(chosen.len(), Routed { token: 0, weight: 0.0 });
        for (i, &(expert, weight)) in chosen.iter().enumerate() {
            tokens[next[expert]] = Routed { token: i / experts.used, weight };
            next[expert] += 1;
        }
    }

    /// Becomes those groups of `other` whose expert is `wanted`.
    pub fn take(&mut self, other: &Routes, wanted: impl Fn(usize) -> bool) {
        self.groups.clear();
        self.tokens.clear();
        for group in other.groups.iter().filter(|group| wanted(group.expert)) {
            let first = self.tokens.len();
            self.tokens.extend_from_slice(&other.tokens[group.first..group.first + group.tokens]);
            self.groups.push(Group { first, ..*group });
        }
    }

    /// Lists the chosen experts in `out`, with a bit for each token, of few tokens, that has them.
    pub fn select(&self, out: &mut Selection) {
        out.neurons.clear();
        out.masks.clear();
        for group in &self.groups {
            let tokens = &self.tokens[group.first..group.first + group.tokens];
            out.neurons.push(StoreId::new(group.expert));
            out.masks.push(tokens.iter().fold(0, |mask, routed| mask | 1 << routed.token));
        }
    }

    /// How many tokens have each of the `experts`: `out` becomes `[experts]`.
    pub fn counts(&self, experts: usize, out: &mut Vec<u32>) {
        out.clear();
        out.resize(experts, 0);
        self.groups.iter().for_each(|group| out[group.expert] = group.tokens as u32);
    }

    /// The weight of each expert for each token, 0 where a token does not have it: `out` becomes `[n, experts]`.
    pub fn weights(&self, experts: Experts, out: &mut Vec<f32>) {
        out.clear();
        out.resize(self.products.len(), 0.0);
        for (i, &(expert, weight)) in self.chosen.iter().enumerate() {
            out[i / experts.used * experts.count + expert] = weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::layer::Scoring;

    fn experts(scoring: Scoring, normalised: bool) -> Experts {
        Experts { used: 2, scoring, normalised, ..Experts::all(4) }
    }

    fn routed(experts: Experts, products: &[f32]) -> (Vec<Group>, Vec<Routed>) {
        let mut routes = Routes { products: products.to_vec(), ..Routes::default() };
        routes.choose(experts, &[], &[]);
        (routes.groups, routes.tokens)
    }

    #[test]
    fn tokens_are_grouped_by_expert_in_their_order() {
        let products = [0.0, 3.0, 1.0, 2.0, 5.0, 4.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
        let (groups, tokens) = routed(experts(Scoring::Softmax, true), &products);
        let of = |group: &Group| {
            let tokens = &tokens[group.first..group.first + group.tokens];
            (group.expert, tokens.iter().map(|routed| routed.token).collect::<Vec<_>>())
        };
        let groups: Vec<_> = groups.iter().map(of).collect();
        assert_eq!(groups, [(0, vec![1, 2]), (1, vec![0, 1, 2]), (3, vec![0])]);
    }

    #[test]
    fn weights_are_a_share_of_all_experts_or_of_the_chosen_ones() {
        let products = [0.0, 2f32.ln(), 5f32.ln(), 0.0];
        let weights = |scoring, normalised| {
            let (groups, tokens) = routed(experts(scoring, normalised), &products);
            assert_eq!(groups.iter().map(|group| group.expert).collect::<Vec<_>>(), [1, 2]);
            [tokens[0].weight, tokens[1].weight]
        };
        let near = |found: [f32; 2], wanted: [f32; 2]| {
            assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} is not {wanted:?}");
        };
        near(weights(Scoring::Softmax, true), [2.0 / 7.0, 5.0 / 7.0]);
        near(weights(Scoring::Softmax, false), [2.0 / 9.0, 5.0 / 9.0]);
        near(weights(Scoring::Sigmoid, false), [2.0 / 3.0, 5.0 / 6.0]);
        near(weights(Scoring::Sigmoid, true), [4.0 / 9.0, 5.0 / 9.0]);
    }
}
