//! The router of every mixture: from its products to a token's experts and their weights. The form is the one that llama.cpp's
//! `build_moe_ffn` has for all families.

use crate::model::layer::{Experts, Groups, Scoring};

/// Adds one token's experts and their weights to `chosen`, those with the largest biased scores first, of equals the first.
///
/// - `products` are the router's, `[experts]`, finite or -inf.
/// - `selection_bias`, `[experts]`, finite, or empty, is added to the scores for choosing; weights are made of the scores without it.
/// - Where there are groups, only experts of the best ones may be chosen: of those whose best biased score, as in DeepSeek V2, or whose two best
///   have the largest sums, as in V3, of equals the first.
/// - A weight is a score, or its share of the chosen ones, times the scale; it is never NaN. Where the scores of all chosen experts are
///   0, so are the weights.
///
/// Without a router all experts have weight 1, and `products` are not read. There are no errors: [`crate::model::Description::check`] has
/// checked the counts. Only `chosen` grows.
pub fn choose(experts: Experts, products: &[f32], selection_bias: &[f32], chosen: &mut Vec<(usize, f32)>) {
    let Experts { count, used, scoring, groups, scale, .. } = experts;
    if scoring == Scoring::All {
        return chosen.extend((0..count).map(|expert| (expert, 1.0)));
    }
    let shared_out = experts.normalised || scoring == Scoring::SoftmaxOfChosen;
    // Larger products have larger scores, so no scores are needed to choose.
    let by_product = selection_bias.is_empty() && groups.is_none();
    let most = greatest(products.iter().copied());
    let of_all = match scoring {
        Scoring::Softmax if !(by_product && shared_out) => {
            divisor(products.iter().map(|&product| score(scoring, product, most)).sum())
        }
        _ => 1.0,
    };
    let biased = |expert: usize| {
        let product = products[expert];
        let score = match scoring {
            Scoring::SoftmaxOfChosen => product,
            _ => score(scoring, product, most) / of_all,
        };
        (expert, score + selection_bias.get(expert).copied().unwrap_or(0.0))
    };
    let start = chosen.len();
    match groups {
        None if by_product => pick(used, products.iter().copied().enumerate(), chosen),
        None => pick(used, (0..count).map(biased), chosen),
        Some(groups) => {
            let each = count / groups.count;
            let kept = kept_groups(groups, each, biased, chosen);
            pick(used, (0..count).filter(|expert| kept >> (expert / each) & 1 == 1).map(biased), chosen);
        }
    }
    let ours = &mut chosen[start..];
    ours.iter_mut().for_each(|(expert, weight)| *weight = products[*expert]);
    let most = if shared_out { greatest(ours.iter().map(|&(_, product)| product)) } else { most };
    ours.iter_mut().for_each(|(_, weight)| *weight = score(scoring, *weight, most));
    let sum = if shared_out { divisor(ours.iter().map(|(_, weight)| weight).sum()) } else { of_all };
    ours.iter_mut().for_each(|(_, weight)| *weight = *weight / sum * scale);
}

/// The score of a product; for a softmax its numerator, divided by that of the product `most`.
fn score(scoring: Scoring, product: f32, most: f32) -> f32 {
    match scoring {
        Scoring::Softmax | Scoring::SoftmaxOfChosen => (product - most).exp(),
        Scoring::Sigmoid => 1.0 / (1.0 + (-product).exp()),
        Scoring::All => 1.0,
    }
}

/// The largest of some products, finite even where all are -inf, so that no difference from it is NaN.
fn greatest(products: impl Iterator<Item = f32>) -> f32 {
    products.fold(f32::MIN, |most, product| if product.total_cmp(&most).is_gt() { product } else { most })
}

/// The divisor of scores that have this sum; never 0, so that scores of 0 stay 0.
fn divisor(sum: f32) -> f32 {
    if sum == 0.0 { 1.0 } else { sum }
}

/// Adds the `used` candidates with the largest numbers to `chosen`, the largest first, of equals the first.
fn pick(used: usize, candidates: impl Iterator<Item = (usize, f32)>, chosen: &mut Vec<(usize, f32)>) {
    let start = chosen.len();
    for (index, number) in candidates {
        let full = chosen.len() - start == used;
        if full && chosen.last().is_some_and(|&(_, least)| number.total_cmp(&least).is_le()) {
            continue;
        }
        if full {
            chosen.pop();
        }
        let at = chosen[start..].iter().position(|(_, other)| number.total_cmp(other).is_gt());
        chosen.insert(at.map_or(chosen.len(), |at| start + at), (index, number));
    }
}

/// A bit for each group of `each` experts that is used. `scratch` is as it was afterwards.
fn kept_groups(
    groups: Groups,
    each: usize,
    biased: impl Fn(usize) -> (usize, f32),
    scratch: &mut Vec<(usize, f32)>,
) -> u64 {
    let sum = |group: usize| {
        let members = (group * each..(group + 1) * each).map(|expert| biased(expert).1);
        let best = members
            .fold([f32::NEG_INFINITY; 2], |[first, second], score| [first.max(score), second.max(first.min(score))]);
        (group, if groups.best == 1 { best[0] } else { best[0] + best[1] })
    };
    let start = scratch.len();
    pick(groups.used, (0..groups.count).map(sum), scratch);
    scratch.drain(start..).fold(0, |kept, (group, _)| kept | 1 << group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// f32 may order numbers that are nearer than this differently: some units of its rounding in a sum of two scores and two biases.
    const NEAR: f64 = 3e-6;

    /// The numbers of the `used` largest, the first of equals; `None` where rounding may decide which they are.
    fn largest(used: usize, mut numbers: Vec<(usize, f64)>) -> Option<Vec<usize>> {
        numbers.sort_by(|a, b| b.1.total_cmp(&a.1));
        let near = |pair: &[(usize, f64)]| pair[0].1 != pair[1].1 && pair[0].1 - pair[1].1 < NEAR;
        let sure = !numbers[..numbers.len().min(used + 1)].windows(2).any(near);
        sure.then(|| numbers[..used].iter().map(|&(index, _)| index).collect())
    }

    fn share(part: f64, sum: f64) -> f64 {
        if sum == 0.0 { 0.0 } else { part / sum }
    }

    /// A token's experts and weights as the definition has them, in f64; `None` where rounding may decide which experts they are.
    fn by_definition(e: Experts, products: &[f32], bias: &[f32]) -> Option<Vec<(usize, f64)>> {
        let product = |expert: usize| f64::from(products[expert]);
        let sum_of_all = (0..e.count).map(|expert| product(expert).exp()).sum();
        let score = |expert: usize| match e.scoring {
            Scoring::Softmax => share(product(expert).exp(), sum_of_all),
            Scoring::Sigmoid => 1.0 / (1.0 + (-product(expert)).exp()),
            Scoring::SoftmaxOfChosen | Scoring::All => product(expert),
        };
        let biased = |expert: usize| score(expert) + bias.get(expert).map_or(0.0, |&bias| f64::from(bias));
        let groups = e.groups.unwrap_or(Groups { count: 1, used: 1, best: 2 });
        let each = e.count / groups.count;
        let sum = |group: usize| {
            let mut scores: Vec<f64> = (group * each..(group + 1) * each).map(biased).collect();
            scores.sort_by(|a, b| b.total_cmp(a));
            (group, scores[..groups.best].iter().sum())
        };
        let kept = largest(groups.used, (0..groups.count).map(sum).collect())?;
        let allowed = (0..e.count).filter(|expert| kept.contains(&(expert / each)));
        let chosen = largest(e.used, allowed.map(|expert| (expert, biased(expert))).collect())?;
        let weight = |expert: usize| match e.scoring {
            Scoring::SoftmaxOfChosen => product(expert).exp(),
            _ => score(expert),
        };
        let sum_of_chosen: f64 = chosen.iter().map(|&expert| weight(expert)).sum();
        let shared_out = e.normalised || e.scoring == Scoring::SoftmaxOfChosen;
        let sum = if shared_out { sum_of_chosen } else { 1.0 };
        Some(chosen.iter().map(|&expert| (expert, share(weight(expert), sum) * f64::from(e.scale))).collect())
    }

    /// A mixture, products and a bias. They are multiples of a quarter and of a sixteenth, so that there are ties; one of eight products is
    /// -inf. The offset of the products is no half of a quarter: sigmoids of opposite ones would add up to ties that rounding decides.
    fn drawn(prng: &mut Prng, scoring: Scoring) -> (Experts, Vec<f32>, Vec<f32>) {
        let mut from_1_to = |most: usize| 1 + prng.below(most as u64) as usize;
        let (count, each) = (from_1_to(8), 1 + from_1_to(7));
        let groups = Groups { count, used: from_1_to(count), best: from_1_to(2) };
        let count = groups.count * each;
        let in_groups = from_1_to(2) == 1;
        let used = from_1_to(if in_groups { groups.used * each } else { count });
        let e = Experts {
            used,
            scoring,
            normalised: from_1_to(2) == 1,
            groups: in_groups.then_some(groups),
            scale: if from_1_to(2) == 1 { 1.0 } else { 2.5 },
            ..Experts::all(count)
        };
        let biased = if from_1_to(2) == 1 { count } else { 0 };
        let mut product = |_| match from_1_to(8) {
            1 => f32::NEG_INFINITY,
            _ => 0.0625 + (from_1_to(25) as f32 - 13.0) / 4.0,
        };
        let products = (0..count).map(&mut product).collect();
        (e, products, (0..biased).map(|_| (from_1_to(33) as f32 - 17.0) / 16.0).collect())
    }

    #[test]
    fn experts_and_weights_are_those_of_the_definition() {
        let (mut prng, mut chosen, mut compared) = (Prng::new(7), Vec::new(), 0);
        let cases = 2000;
        for scoring in [Scoring::Softmax, Scoring::Sigmoid, Scoring::SoftmaxOfChosen] {
            for case in 0..cases {
                let (e, products, bias) = drawn(&mut prng, scoring);
                e.check().unwrap();
                chosen.clear();
                chosen.push((999, 0.5));
                choose(e, &products, &bias, &mut chosen);
                assert_eq!((chosen[0], chosen.len()), ((999, 0.5), 1 + e.used));
                assert!(chosen.iter().all(|(_, weight)| weight.is_finite()), "{case}: {e:?}: {chosen:?}");
                let Some(wanted) = by_definition(e, &products, &bias) else { continue };
                compared += 1;
                for (found, wanted) in chosen[1..].iter().zip(&wanted) {
                    // Each of up to 64 exponentials, and each of their sums, is rounded.
                    let near = (f64::from(found.1) - wanted.1).abs() <= 1e-5 * wanted.1;
                    assert!(found.0 == wanted.0 && near, "{case}: {e:?}: {products:?} {bias:?}: {found:?}, {wanted:?}");
                }
            }
        }
        assert!(compared * 50 >= 3 * cases * 49, "only {compared} of {} cases were compared", 3 * cases);
    }

    #[test]
    fn the_softmax_of_the_chosen_is_a_normalised_softmax_where_nothing_is_biased() {
        let mut prng = Prng::new(8);
        for _ in 0..500 {
            let (e, products, _) = drawn(&mut prng, Scoring::Softmax);
            let of = |scoring, normalised| {
                let mut chosen = Vec::new();
                choose(Experts { scoring, normalised, groups: None, ..e }, &products, &[], &mut chosen);
                chosen.iter().map(|&(expert, weight)| (expert, weight.to_bits())).collect::<Vec<_>>()
            };
            assert_eq!(of(Scoring::SoftmaxOfChosen, false), of(Scoring::Softmax, true));
        }
    }

    /// The largest product of all is so far above theirs that f32 has no shares as small as theirs are.
    #[test]
    fn experts_that_only_a_bias_chooses_have_the_shares_of_their_products() {
        for scoring in [Scoring::Softmax, Scoring::SoftmaxOfChosen] {
            let (mut chosen, e) = (Vec::new(), Experts { used: 2, scoring, normalised: true, ..Experts::all(4) });
            choose(e, &[300.0, 100.0, 100.0 + 3f32.ln(), 0.0], &[0.0, 900.0, 900.0, 0.0], &mut chosen);
            chosen.sort_by_key(|&(expert, _)| expert);
            let [(1, first), (2, second)] = chosen[..] else { panic!("{chosen:?}") };
            assert!((first - 0.25).abs() < 1e-5 && (second - 0.75).abs() < 1e-5, "{chosen:?}");
        }
    }

    #[test]
    fn scores_of_zero_have_weights_of_zero() {
        for scoring in [Scoring::Softmax, Scoring::Sigmoid, Scoring::SoftmaxOfChosen] {
            let (mut chosen, e) = (Vec::new(), Experts { used: 2, scoring, normalised: true, ..Experts::all(4) });
            choose(e, &[f32::NEG_INFINITY; 4], &[], &mut chosen);
            assert_eq!(chosen, [(0, 0.0), (1, 0.0)]);
        }
    }
}
