//! What a neuron is worth on the device: v = a + lambda f (DynamicInfer E.3.1).

/// Writes v of every neuron of a layer to `out`. `probabilities` are those of the coming token, times 255, if it was predicted; they stand
/// for the paper's a, which is 0 or 1.
pub fn importance(probabilities: Option<&[u8]>, f: &[f32], lambda: f32, out: &mut Vec<f32>) {
    out.clear();
    match probabilities {
        None => out.extend(f.iter().map(|f| lambda * f)),
        Some(p) => out.extend(p.iter().zip(f).map(|(&p, f)| f32::from(p) * (1.0 / 255.0) + lambda * f)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn importance_is_the_probability_and_lambda_times_the_frequency() {
        let mut v = Vec::new();
        importance(Some(&[255, 0, 51]), &[0.5, 0.25, 0.0], 2.0, &mut v);
        assert_eq!(v.iter().map(|v| (v * 1000.0).round()).collect::<Vec<_>>(), [2000.0, 500.0, 200.0]);
        importance(None, &[0.5], 2.0, &mut v);
        assert_eq!(v, [1.0]);
    }
}
