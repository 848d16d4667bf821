//! Simulated prompts, row by row, and what is printed of them.

use super::table::{Row as Decoded, empty};
use crate::error::{Result, human_bytes};
use crate::lab::simulate::case::Case;
use crate::lab::simulate::prompts::{ASSUMED, PromptOutcome};
use crate::scheduler::Policy;
use serde::Serialize;

/// A way to compute prompts.
#[derive(Serialize)]
pub struct Row {
    vram_bytes: Option<u64>,
    /// `None` for whole layers of experts on the device.
    policy: Option<Policy>,
    /// Of whole layers: how many, and whether the others are copied for each chunk.
    layers_on_device: Option<usize>,
    copies: bool,
    prompt: PromptOutcome,
}

/// Prompts by every row of decoding: what its policy has made of them, and whole layers with the same memory in both ways. None where no
/// prompts were asked for.
pub fn rows(case: &Case<'_>, decoded: &[Decoded]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for of in decoded {
        let vram_bytes = of.vram_bytes;
        let prompt = of.outcome.as_ref().and_then(|outcome| outcome.prompt.clone());
        let row = |copies, prompt| {
            let (policy, layers_on_device) = (of.policy, of.layers_on_device);
            Row { vram_bytes, policy, layers_on_device, copies, prompt }
        };
        rows.extend(prompt.map(|prompt| row(false, prompt)));
        if of.policy.is_none() {
            for copies in [false, true] {
                let prompt = Case { vram: vram_bytes, ..*case }.whole_layers(copies)?;
                rows.extend(prompt.map(|prompt| row(copies, prompt)));
            }
        }
    }
    Ok(rows)
}

/// The table of prompts, and what its figures take for granted; empty without prompts.
pub fn shown(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut table =
        empty(&["VRAM, policy", "chunk", "ms", "tokens/s", "times static", "in slots", "copied", "ms, none copied"]);
    for row in rows {
        let vram = row.vram_bytes.map_or("-".into(), human_bytes);
        let name = match (row.policy, row.layers_on_device, row.copies) {
            (Some(policy), _, _) => format!("{vram}, {}", policy.name()),
            (None, layers, false) => format!("{vram}, {} layers", layers.unwrap_or(0)),
            (None, layers, true) => format!("{vram}, {} layers, copies", layers.unwrap_or(0)),
        };
        let same = |other: &&Row| other.vram_bytes == row.vram_bytes && other.policy == Some(Policy::Static);
        let times = rows.iter().find(same).map_or("-".into(), |s| format!("{:.3}", s.prompt.ms / row.prompt.ms));
        let p = &row.prompt;
        table.add_row([
            name,
            p.chunk.to_string(),
            format!("{:.1} sim.", p.ms),
            format!("{:.1}", p.tokens_per_s),
            times,
            format!("{:.1} %", 100.0 * p.gpu_share),
            format!("{:.1} %", 100.0 * p.copied_share),
            p.on_cpu_ms.map_or("-".into(), |ms| format!("{ms:.1}")),
        ]);
    }
    let assumed: String = ASSUMED.iter().map(|says| format!("- {says}\n")).collect();
    format!(
        "\nSIMULATED: prompts of {} tokens, mean of {}; a chunk needs {:.1} % of a layer's experts.\n{table}\n\
         In slots, copied: of the tokens' experts, those in slots, and those copied for a chunk because that is faster than the CPU; \
         none copied: if the CPU computed all that are missing.\n\
         N layers, copies: as llama.cpp, the layers on the host copied for each chunk of 512.\nTaken for granted:\n{assumed}",
        first.prompt.tokens,
        first.prompt.each_ms.len(),
        100.0 * first.prompt.needed_share,
    )
}
