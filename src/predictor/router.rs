//! The predictor of a mixture of experts, which needs no training: the router of a later layer, applied to an earlier residual
//! (PowerInfer-2 4.1.2 has predictors for neurons inside experts; the experts themselves are their router's choice).

use super::{Calibration, Kind, Predictor, Tools};
use crate::model::layer::RouterInput;
use crate::model::{ExpertWeights, Model};
use crate::ops::linear::linear;
use crate::ops::math;
use crate::ops::router::choose;

/// The routers of a model. Its scores are 1 for the experts that a router would choose and 0 for the others, which is also how likely it
/// takes them to be.
pub struct Router {
    calibration: Calibration,
    /// Bytes of each layer's router.
    bytes: Vec<u64>,
}

impl Router {
    /// The routers of a mixture of experts; `None` for another model.
    pub fn of(model: &Model) -> Option<Router> {
        if !model.config.is_mixture() {
            return None;
        }
        let bytes = (0..model.config.layers().len()).map(|layer| weights(model, layer).router_bytes()).collect();
        Some(Router { calibration: Calibration::new(vec![0.0, 1.0], vec![0.0, 1.0]), bytes })
    }
}

/// The experts of a layer.
fn weights(model: &Model, layer: usize) -> &ExpertWeights {
    model.layers[layer].ffn.experts().expect("every layer of a mixture is one, of no experts perhaps")
}

impl Predictor for Router {
    fn kind(&self) -> Kind {
        Kind::Router
    }

    fn threshold(&self, _layer: usize, _ahead: usize) -> f32 {
        0.5
    }

    fn calibration(&self, _layer: usize, _ahead: usize) -> Option<&Calibration> {
        Some(&self.calibration)
    }

    fn score(&self, tools: &mut Tools<'_>, layer: usize, _: usize, residual: &[f32], n: usize, scores: &mut [f32]) {
        let Tools { model, pool, kernels, scratch } = tools;
        let c = &model.config;
        let weights = weights(model, layer);
        let Some(router) = &weights.router else {
            return scores.fill(if weights.experts.is_empty() { 0.0 } else { 1.0 });
        };
        let experts = c.experts(layer).expect("a layer with a router has experts");
        scratch.normed.clear();
        scratch.normed.extend_from_slice(residual);
        if experts.reads != RouterInput::Layer {
            let norm = match experts.reads {
                RouterInput::Own => &weights.router_norm,
                _ => &model.layers[layer].ffn_norm,
            };
            let normed = scratch.normed.chunks_exact_mut(c.hidden);
            for (residual, normed) in residual.chunks_exact(c.hidden).zip(normed) {
                math::norm(c.norm, norm, residual, normed);
            }
        }
        scratch.inner.resize(n * experts.count, 0.0);
        let (input, products) = (&scratch.normed, &mut scratch.inner);
        linear(pool, kernels, router, input, n, &mut scratch.columns, products);
        if !weights.router_bias().is_empty() {
            let tokens = products.chunks_exact_mut(experts.count);
            tokens.for_each(|products| math::add(products, weights.router_bias()));
        }
        scores.fill(0.0);
        let tokens = products.chunks_exact(experts.count).zip(scores.chunks_exact_mut(c.clusters()));
        for (products, scores) in tokens {
            scratch.experts.clear();
            choose(experts, products, &weights.selection_bias, &mut scratch.experts);
            scratch.experts.iter().for_each(|&(expert, _)| scores[expert] = 1.0);
        }
    }

    fn weight_bytes(&self, layer: usize, _ahead: usize) -> u64 {
        self.bytes[layer]
    }
}
