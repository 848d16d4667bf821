//! What the scheduler considers: policies are settings of one path, each of the first four adding to the one before (the
//! ablation of DynamicInfer, figure 10).

/// The settings' names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The plan's placement; nothing moves (PowerInfer).
    Static,
    /// The current token: a.
    Micro,
    /// And the sequence: a + lambda f, the most frequent pinned.
    Macro,
    /// And thresholds of their own for device and CPU.
    #[default]
    Full,
    /// What is needed and missing replaces what was not used for longest.
    Lru,
    /// What is needed and missing replaces anything.
    Random,
}

impl Policy {
    pub const ALL: [Policy; 6] =
        [Policy::Static, Policy::Micro, Policy::Macro, Policy::Full, Policy::Lru, Policy::Random];

    pub const fn name(self) -> &'static str {
        match self {
            Policy::Static => "static",
            Policy::Micro => "micro",
            Policy::Macro => "macro",
            Policy::Full => "full",
            Policy::Lru => "lru",
            Policy::Random => "random",
        }
    }

    pub fn rules(self) -> Rules {
        let paper = Rules::default();
        match self {
            Policy::Static => Rules { order: Order::Importance, moves: false, thresholds: false, ..paper },
            Policy::Micro => Rules { lambda: 0.0, pinned: f32::INFINITY, thresholds: false, ..paper },
            Policy::Macro => Rules { thresholds: false, ..paper },
            Policy::Full => paper,
            Policy::Lru => Rules { order: Order::Recency, thresholds: false, ..paper },
            Policy::Random => Rules { order: Order::Chance, thresholds: false, ..paper },
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = String;
    fn from_str(text: &str) -> Result<Policy, String> {
        let found = Policy::ALL.into_iter().find(|p| p.name() == text);
        found.ok_or_else(|| format!("'{text}' is not a policy; take static, micro, macro, full, lru or random"))
    }
}

/// Whom a newcomer replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The least important.
    Importance,
    /// The one that was active longest ago.
    Recency,
    /// Any.
    Chance,
}

/// A policy, spelled out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    pub moves: bool,
    pub order: Order,
    /// Weight of a neuron's frequency beside its current activation (DynamicInfer E.3.1).
    pub lambda: f32,
    /// phi_high: the frequency from which on a resident stays (E.3.3); infinite for never.
    pub pinned: f32,
    /// How much of a sequence's frequency is still there a token later.
    pub decay: f32,
    /// How much more important a newcomer must be than what it replaces.
    pub margin: f32,
    /// Whether moving stops where it does not pay.
    pub gain: bool,
    /// Whether device and CPU have thresholds of their own (E.4).
    pub thresholds: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            moves: true,
            order: Order::Importance,
            lambda: 2.0,
            pinned: 0.7,
            decay: 0.96,
            margin: 0.1,
            gain: true,
            thresholds: true,
        }
    }
}
