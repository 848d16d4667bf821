//! Names of settings and figures as people say them, with units. In files they keep their own names and plain numbers.

use super::value::Value;

/// What a figure is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A part of a whole, 0 to 1, written as percent.
    Share,
    /// Percent as they are.
    Percent,
    /// Bytes, written in KiB, MiB or GiB.
    Bytes,
    /// Something that is written behind the number, such as `ms`; nothing where it is empty.
    Of(&'static str),
}

/// A range of figures in one unit: what to multiply a figure with, and the unit's name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Factor from the figure as it is kept to the one that is shown.
    pub factor: f64,
    /// The unit that is shown; may be empty.
    pub unit: &'static str,
}

/// A setting or a figure in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// What it is, without the unit.
    pub text: String,
    /// What it is counted in.
    pub unit: Unit,
    /// Only whole numbers of it are there, such as layers.
    pub whole: bool,
}

/// Settings and figures whose names do not say enough. What is not here is said by its name, and its unit by the name's end.
const KNOWN: [(&str, &str, Unit); 65] = [
    ("accuracy", "questions answered rightly", Unit::Share),
    ("accuracy_per_byte", "questions answered rightly, by likelihood a byte", Unit::Share),
    ("active", "active neurons of the made-up trace", Unit::Share),
    ("attention_ms", "attention, of a token", Unit::Of("ms")),
    ("bits_per_byte", "bits a byte of text", Unit::Of("bits")),
    ("bound_share", "on the device at best, had the future been known", Unit::Share),
    ("budget_bytes", "budget of the device", Unit::Bytes),
    ("chance", "questions answered rightly by chance", Unit::Share),
    ("computed_share", "neurons computed", Unit::Share),
    ("cpu_neurons_per_token", "neurons a token on the CPU", Unit::Of("")),
    ("ctx_size", "context", Unit::Of("tokens")),
    ("dense_perplexity", "perplexity of the dense model", Unit::Of("")),
    ("device_ffn_ms", "a token's FFNs on the card", Unit::Of("ms")),
    ("disk_bytes_per_token", "bytes read from disk a token", Unit::Bytes),
    ("disk_reads_per_token", "reads from disk a token", Unit::Of("")),
    ("disk_wait_ms", "waiting for reads, of a token", Unit::Of("ms")),
    ("early_share", "needed neurons that were asked for ahead", Unit::Share),
    ("ffn_ms", "FFN, of a token", Unit::Of("ms")),
    ("ffn_share", "share of the FFN's neurons that the device has room for", Unit::Share),
    ("gap_closed", "gap between static and the bound that is closed", Unit::Share),
    ("generate_ms", "time of the whole answer", Unit::Of("ms")),
    ("gpu_neurons_per_token", "neurons a token on the device", Unit::Of("")),
    ("gpu_share", "computed neurons that lie on the device", Unit::Share),
    ("head_ms", "head, of a token", Unit::Of("ms")),
    ("held_share", "neurons that memory has room for", Unit::Share),
    ("kl", "divergence from the dense model (KL)", Unit::Of("nats")),
    ("link", "part of a layer that is carried while one is computed", Unit::Percent),
    ("link_busy", "time in which the link is busy", Unit::Share),
    ("lookahead", "layers that the scheduler looks ahead", Unit::Of("")),
    ("memory_share", "needed neurons that are in memory", Unit::Share),
    ("moved_bytes_per_token", "bytes moved to the device a token", Unit::Bytes),
    ("moves_per_token", "neurons moved to the device a token", Unit::Of("")),
    ("n_gen", "length of the answer", Unit::Of("tokens")),
    ("n_prompt", "length of the prompt", Unit::Of("tokens")),
    ("nll", "negative log likelihood a token", Unit::Of("nats")),
    ("no_contention", "copies that take nothing from the CPU", Unit::Of("")),
    ("peak_device_bytes", "memory of the device, most used", Unit::Bytes),
    ("perplexity", "perplexity", Unit::Of("")),
    ("perplexity_percent", "perplexity above the dense model's", Unit::Percent),
    ("precision", "computed neurons that are active", Unit::Share),
    ("predictor_ms", "predictor, of a token", Unit::Of("ms")),
    ("prompt_ms", "time of the prompt", Unit::Of("ms")),
    ("prompt_tokens_per_s", "prompt", Unit::Of("tokens/s")),
    ("questions", "questions", Unit::Of("")),
    ("ram_lookahead", "layers ahead for which neurons are asked for", Unit::Of("")),
    ("ram_share", "memory, from the least that works to room for all neurons", Unit::Share),
    ("ram_without", "part that is done without", Unit::Of("")),
    ("read_bytes_per_token", "bytes read from memory a token", Unit::Bytes),
    ("recall", "active neurons that are computed", Unit::Share),
    ("sequences", "texts decoded together", Unit::Of("")),
    ("simulated_attention_ms", "simulated attention, of a token", Unit::Of("ms")),
    ("simulated_ffn_cpu_ms", "simulated FFN on the CPU, of a token", Unit::Of("ms")),
    ("simulated_ffn_device_ms", "simulated FFN on the device, of a token", Unit::Of("ms")),
    (
        "simulated_layer_offload_tokens_per_s",
        "simulated decoding with whole layers on the device",
        Unit::Of("tokens/s"),
    ),
    ("simulated_tokens_per_s", "simulated decoding", Unit::Of("tokens/s")),
    ("threads", "threads", Unit::Of("")),
    ("threshold", "probability from which a neuron is computed", Unit::Of("")),
    ("token_ms_p50", "time of a token, median", Unit::Of("ms")),
    ("token_ms_p95", "time of a token, 95th percentile", Unit::Of("ms")),
    ("token_ms_p99", "time of a token, 99th percentile", Unit::Of("ms")),
    ("tokens_per_s", "decoding", Unit::Of("tokens/s")),
    ("top1_agreement", "tokens that the dense model would have taken", Unit::Share),
    ("virtual_ffn_ms", "a token's FFNs by the pretended device's clock", Unit::Of("ms")),
    ("vram", "budget of the device", Unit::Bytes),
    ("vram_share", "budget, from the least that works to one that holds everything", Unit::Share),
];

/// Settings that are counted in whole numbers.
const WHOLE: [&str; 7] = ["ctx_size", "lookahead", "n_gen", "n_prompt", "sequences", "threads", "tokens"];

/// What a setting or a figure of this name is.
pub fn words(name: &str) -> Words {
    let whole = WHOLE.contains(&name);
    if let Some((_, text, unit)) = KNOWN.iter().find(|(known, ..)| *known == name) {
        return Words { text: (*text).to_owned(), unit: *unit, whole };
    }
    let ends = [
        ("_tokens_per_s", Unit::Of("tokens/s")),
        ("_bytes", Unit::Bytes),
        ("_share", Unit::Share),
        ("_percent", Unit::Percent),
        ("_ms", Unit::Of("ms")),
        ("_s", Unit::Of("s")),
    ];
    let end = ends.iter().find(|(end, _)| name.ends_with(end) && name.len() > end.len());
    let (stem, unit) = end.map_or((name, Unit::Of("")), |(end, unit)| (&name[..name.len() - end.len()], *unit));
    Words { text: stem.replace('_', " "), unit, whole }
}

impl Words {
    /// As it stands beside an axis that shows figures in this scale: `decoding, tokens/s`.
    pub fn with(&self, scale: Scale) -> String {
        if scale.unit.is_empty() { self.text.clone() } else { format!("{}, {}", self.text, scale.unit) }
    }
}

impl Unit {
    /// The scale in which figures up to `most` are shown.
    pub fn scale(self, most: f64) -> Scale {
        match self {
            Unit::Share => Scale { factor: 100.0, unit: "%" },
            Unit::Percent => Scale { factor: 1.0, unit: "%" },
            Unit::Of(unit) => Scale { factor: 1.0, unit },
            Unit::Bytes => {
                let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
                let found = units.into_iter().find(|(_, power)| most.abs() >= f64::from(1u32 << power));
                found.map_or(Scale { factor: 1.0, unit: "B" }, |(unit, power)| Scale {
                    factor: 1.0 / f64::from(1u32 << power),
                    unit,
                })
            }
        }
    }

    /// The figure with its unit: `9.53 MiB`, `31 tokens/s`, `7.22 %`. Three digits, where more would be noise; of what differs only
    /// behind those, perplexities, four.
    pub fn text(self, value: f64) -> String {
        let scale = self.scale(value);
        let number = self.number(value * scale.factor);
        if scale.unit.is_empty() || number == "-" { number } else { format!("{number} {}", scale.unit) }
    }

    /// A figure that is scaled already, without its unit.
    fn number(self, value: f64) -> String {
        match self {
            Unit::Of("") | Unit::Of("nats") | Unit::Of("bits") => short(value),
            _ if value == 0.0 || !value.is_finite() => short(value),
            _ => {
                let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 6) as usize;
                let text = format!("{value:.digits$}");
                if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
            }
        }
    }

    /// Least and largest in the scale of the figure beside which they stand: `31.2 to 31.4`. `None` if they read the same.
    pub fn range(self, beside: f64, min: f64, max: f64) -> Option<String> {
        let factor = self.scale(beside).factor;
        let (min, max) = (self.number(min * factor), self.number(max * factor));
        (min != max).then(|| format!("{min} to {max}"))
    }
}

/// A setting's value as people write it: `60 %`, `9 MB`, `2`, `yes`.
pub fn setting(name: &str, value: &Value) -> String {
    match value {
        Value::Flag(flag) => if *flag { "yes" } else { "no" }.to_owned(),
        Value::Text(text) => text.clone(),
        Value::Whole(n) => words(name).unit.text(*n as f64),
        Value::Number(n) => words(name).unit.text(*n),
    }
}

/// Bytes of a size as an experiment's file writes it: `9MB`, `1.5GiB`. `None` for what is none.
pub fn size(text: &str) -> Option<f64> {
    let units =
        [("KiB", 1024.0), ("MiB", 1_048_576.0), ("GiB", 1_073_741_824.0), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9)];
    let (number, factor) = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let number: f64 = number.trim_end().parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number * factor)
}

/// The value with four significant digits: more would be noise. `-` for what is not a finite number.
pub fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return if value == 0.0 { "0".into() } else { "-".into() };
    }
    let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_units_and_no_more_digits_than_mean_something() {
        for (name, value, text) in [
            ("peak_device_bytes", 9_996_548.0, "9.53 MiB"),
            ("tokens_per_s", 31.04, "31 tokens/s"),
            ("gpu_share", 0.072_245, "7.22 %"),
            ("gpu_share", 1.0, "100 %"),
            ("perplexity_percent", -0.011_88, "-0.0119 %"),
            ("perplexity", 33.466_5, "33.47"),
            ("moves_per_token", 0.0, "0"),
            ("virtual_ffn_ms", 3.8026, "3.8 ms"),
            ("budget_bytes", 512.0, "512 B"),
            ("read_bytes_per_token", 5_724_752.0, "5.46 MiB"),
            ("questions", 100.0, "100"),
            ("something_new_ms", 1234.0, "1234 ms"),
            ("tokens_per_s", f64::NAN, "-"),
        ] {
            assert_eq!(words(name).unit.text(value), text, "{name}");
        }
        assert_eq!(words("something_new_ms").text, "something new");
        assert_eq!(Unit::Share.range(0.5, 0.4996, 0.5004), None);
        assert_eq!(Unit::Bytes.range(9_996_548.0, 8_163_584.0, 9_996_548.0).as_deref(), Some("7.79 to 9.53"));
    }

    #[test]
    fn the_list_is_in_order_and_says_each_name_once() {
        assert!(KNOWN.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let mut texts: Vec<_> = KNOWN.iter().map(|(_, text, unit)| (text, format!("{unit:?}"))).collect();
        texts.sort_unstable();
        texts.dedup();
        assert!(
            texts.len() >= KNOWN.len() - 1,
            "two names with one text and unit, but for the budget as it was asked for and given"
        );
    }

    #[test]
    fn sizes_are_read_as_the_command_line_reads_them() {
        assert_eq!(size("8200KB"), Some(8_200_000.0));
        assert_eq!(size("1.5GiB"), Some(1.5 * 1_073_741_824.0));
        for text in ["static", "MB", "-1MB", "9", "nanMB"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
