//! What `simulate --papers` prints beside the published figures, but for the speeds.

use crate::lab::simulate::assumption::{Held, PROMPT, Switched};
use crate::lab::simulate::calibration::{SKEW, Statistics, TEXTS, TOKEN_TO_HOT, TOKENS, furthest};

/// What DynamicInfer says of activations (section 3), and what the trace has.
pub fn alike(t: &Statistics) -> String {
    let range = |(from, to): (f64, f64)| format!("{from:.2} to {to:.2}");
    let reached = |(from, to): (f64, f64), value: f64| match (from - value).max(value - to) {
        off if off > 0.0 => format!("{value:.3}, {off:.3} outside"),
        _ => format!("{value:.3}"),
    };
    let (skew, in_text) = (100.0 * t.skew, 100.0 * t.skew_in_text);
    let gives_way = if t.skew > SKEW - 0.02 {
        String::new()
    } else if furthest(t.active) < TOKENS.0 {
        let most = furthest(t.active);
        format!(
            "The skew gives way by {:.1} points: with it independent tokens are at most {most:.3} apart.\n",
            100.0 * SKEW - skew
        )
    } else {
        format!(
            "The skew gives way by {:.1} points: with it, under a power law, tokens and texts are nearer to each other.\n",
            100.0 * SKEW - skew
        )
    };
    [
        "| activations | published | this trace |".to_owned(),
        "|---|---|---|".into(),
        format!("| active for a token | | {:.1} % |", 100.0 * t.active),
        format!("| tokens apart (figure 2c) | {} | {} |", range(TOKENS), reached(TOKENS, t.token_distance)),
        format!(
            "| texts apart (2b) | {} | {} |",
            range(TEXTS),
            t.text_distance.map_or("-".into(), |d| reached(TEXTS, d))
        ),
        format!(
            "| token and hot neurons apart | {} | {} |",
            range(TOKEN_TO_HOT),
            reached(TOKEN_TO_HOT, t.token_to_hot)
        ),
        format!(
            "| activations made by the top 40 % (2a) | about {:.0} % | {skew:.1} %, within a text {in_text:.1} % |",
            100.0 * SKEW
        ),
        String::new(),
        gives_way,
    ]
    .join("\n")
}

/// Which assumption makes `full` faster beside layer offload than the published `most`, percent. `dense` is layer offload's speed.
pub fn switched(all: &[Switched], most: f64, dense: f64) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut lines = vec![
        format!(
            "Above the published +{most:.0} % over llama.cpp. What each assumption, given up alone, does about it:\n"
        ),
        "| assumption | of it may hold | full over llama.cpp | on GPU: static, full |".into(),
        "|---|---|---|---|".into(),
    ];
    for s in all {
        let share = s.share.map_or("less than 3 %".into(), |share| format!("{:.1} %", 100.0 * share));
        let over = 100.0 * (s.tokens_per_s / dense - 1.0);
        let (fixed, full) = (100.0 * s.gpu_share.0, 100.0 * s.gpu_share.1);
        lines.push(format!("| {} | {share} | {over:+.0} % | {fixed:.1}, {full:.1} % |", s.assumption.says()));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// What the policies gain where `static` has the published percent of neurons on the device, and that with the prompt's time. `dense` is
/// layer offload's speed.
pub fn with_published_share(held: &Held, (fixed, full): (f64, f64), dense: f64) -> String {
    let first = held.outcomes[0].1.tokens_per_s;
    let mut lines = vec![
        format!(
            "With {:.1} % of the memory that neurons could have, so that static computes {fixed:.0} % of them on the GPU (5.3):\n",
            100.0 * held.share
        ),
        format!(
            "| policy | on GPU (published {fixed:.0}, {full:.0} %) | over static | over llama.cpp | with the prompt |"
        ),
        "|---|---|---|---|---|".into(),
    ];
    for (policy, o) in &held.outcomes {
        let more = |than: f64| 100.0 * (o.tokens_per_s / than - 1.0);
        lines.push(format!(
            "| {} | {:.1} % | {:+.1} % | {:+.0} % | {:+.0} % |",
            policy.name(),
            100.0 * o.gpu_share,
            more(first),
            more(dense),
            more(dense * (1.0 + PROMPT))
        ));
    }
    lines.push(String::new());
    lines.join("\n")
}
