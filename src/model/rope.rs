//! The frequencies of rotations, and how files scale them to longer texts.

/// RoPE scaling, as the model files describe it.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies stay as they are.
    None,
    /// Positions divided by the factor.
    Linear(f64),
    /// Llama 3.1: low frequencies divided by the factor, high ones kept, a ramp between.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Wavelengths above `original / low` positions are scaled by the whole factor.
        low: f64,
        /// Wavelengths below `original / high` positions are kept.
        high: f64,
        /// Positions that the model was trained for before it was scaled.
        original: f64,
    },
    /// A divisor per frequency, given by the file (GGUF `rope_freqs.weight`).
    Factors(Vec<f32>),
    /// YaRN: pairs that turn more than `fast` times within `original` positions are kept, those that turn less than `slow` times are divided
    /// by the factor, with a ramp by number of the pair between.
    Yarn {
        /// What low frequencies are divided by.
        factor: f64,
        /// Turns above which a pair is kept.
        fast: f64,
        /// Turns below which a pair is scaled by the whole factor.
        slow: f64,
        /// Positions that the model was trained for before it was scaled.
        original: f64,
        /// The bounds are rounded to whole pairs, away from each other, as gpt-oss has them not.
        rounded: bool,
    },
}

impl RopeScaling {
    /// What rotated queries and keys are multiplied by: of YaRN, 0.1 ln(factor) + 1.
    pub fn of_rotated(&self) -> f32 {
        match self {
            RopeScaling::Yarn { factor, .. } if *factor > 1.0 => (0.1 * factor.ln() + 1.0) as f32,
            _ => 1.0,
        }
    }
}

/// Radians per position for each rotated pair: theta^(-2i / head_dim), scaled.
pub fn rope_frequencies(head_dim: usize, theta: f64, scaling: &RopeScaling) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|i| {
            let base = theta.powf(-2.0 * i as f64 / head_dim as f64);
            let scaled = match scaling {
                RopeScaling::None => base,
                RopeScaling::Linear(factor) => base / factor,
                RopeScaling::Factors(factors) => base / factors.get(i).copied().unwrap_or(1.0) as f64,
                RopeScaling::Llama3 { factor, low, high, original } => {
                    let wavelength = std::f64::consts::TAU / base;
                    if wavelength < original / high {
                        base
                    } else if wavelength > original / low {
                        base / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * base / factor + smooth * base
                    }
                }
                RopeScaling::Yarn { factor, fast, slow, original, rounded } => {
                    let pair = |turns: f64| {
                        head_dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
                    };
                    let (low, high) = match rounded {
                        true => (pair(*fast).floor(), pair(*slow).ceil()),
                        false => (pair(*fast), pair(*slow)),
                    };
                    let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                    let scaled = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    scaled * base / factor + (1.0 - scaled) * base
                }
            };
            scaled as f32
        })
        .collect()
}
