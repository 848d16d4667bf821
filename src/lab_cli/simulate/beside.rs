//! What `simulate --papers` prints beside the published figures, but for the speeds.

use super::table::empty;
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
    let mut table = empty(&["activations", "published", "this trace"]);
    let mut line = |what: &str, published: String, found: String| {
        table.add_row([what, &published, &found]);
    };
    line("active for a token", String::new(), format!("{:.1} %", 100.0 * t.active));
    line("tokens apart (figure 2c)", range(TOKENS), reached(TOKENS, t.token_distance));
    line("texts apart (2b)", range(TEXTS), t.text_distance.map_or("-".into(), |d| reached(TEXTS, d)));
    line("token and hot neurons apart", range(TOKEN_TO_HOT), reached(TOKEN_TO_HOT, t.token_to_hot));
    let made = format!("{skew:.1} %, in a text {in_text:.1} %");
    line("made by the top 40 % (2a)", format!("about {:.0} %", 100.0 * SKEW), made);
    format!("{table}\n\n{gives_way}")
}

/// Which assumption makes `full` faster beside layer offload than the published `most`, percent. `dense` is layer offload's speed.
pub fn switched(all: &[Switched], most: f64, dense: f64) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut table = empty(&["assumption", "of it may hold", "full over llama.cpp", "on GPU: static, full"]);
    for s in all {
        let share = s.share.map_or("less than 3 %".into(), |share| format!("{:.1} %", 100.0 * share));
        let over = 100.0 * (s.tokens_per_s / dense - 1.0);
        let (fixed, full) = (100.0 * s.gpu_share.0, 100.0 * s.gpu_share.1);
        table.add_row([s.assumption.says(), &share, &format!("{over:+.0} %"), &format!("{fixed:.1}, {full:.1} %")]);
    }
    format!(
        "Above the published +{most:.0} % over llama.cpp. What each assumption, given up alone, does about it:\n\n{table}\n"
    )
}

/// What the policies gain where `static` has the published percent of neurons on the device, and that with the prompt's time. `dense` is
/// layer offload's speed.
pub fn with_published_share(held: &Held, (fixed, full): (f64, f64), dense: f64) -> String {
    let first = held.outcomes[0].1.tokens_per_s;
    let on_gpu = format!("on GPU (published {fixed:.0}, {full:.0} %)");
    let mut table = empty(&["policy", &on_gpu, "over static", "over llama.cpp", "with the prompt"]);
    for (policy, o) in &held.outcomes {
        let more = |than: f64| 100.0 * (o.tokens_per_s / than - 1.0);
        table.add_row([
            policy.name().to_owned(),
            format!("{:.1} %", 100.0 * o.gpu_share),
            format!("{:+.1} %", more(first)),
            format!("{:+.0} %", more(dense)),
            format!("{:+.0} %", more(dense * (1.0 + PROMPT))),
        ]);
    }
    format!(
        "With {:.1} % of the memory that neurons could have, so that static computes {fixed:.0} % of them on the GPU (5.3):\n\n{table}\n",
        100.0 * held.share
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::simulate::assumption::Assumption;

    /// The line of the longest assumption had 150 columns.
    #[test]
    fn the_assumptions_fit_a_terminal_with_all_their_words() {
        let switched_by =
            |assumption| Switched { assumption, share: None, tokens_per_s: 1234.5, gpu_share: (1.0, 1.0) };
        let table = switched(&Assumption::ALL.map(switched_by), 202.0, 1.0);
        for line in table.lines().filter(|line| line.starts_with('|')) {
            assert!(line.chars().count() <= 80, "{line}");
        }
        for word in Assumption::ALL.iter().flat_map(|assumption| assumption.says().split(' ')) {
            assert!(table.contains(word), "{word}");
        }
        assert_eq!(table.matches("+123350 %").count(), Assumption::ALL.len());
    }
}
