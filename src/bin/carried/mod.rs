//! What stands in both programs.

use dynamicinfer::cli::{File, carry};

/// Files of the checkout that stand in the program.
macro_rules! files {
    ($($path:literal)*) => {
        [$(($path, include_bytes!(concat!("../../../", $path)).as_slice())),*]
    };
}

/// The demo model, and what was made for it.
static DEMO: [File; 9] = files!(
    "assets/demo/MODEL_CARD.md" "assets/demo/config.json" "assets/demo/generation_config.json" "assets/demo/model.safetensors"
    "assets/demo/tokenizer.json" "assets/demo/tokenizer_config.json" "profiles/models/demo/activation.profile"
    "profiles/models/demo/mlp.predictor" "profiles/models/demo/sign.predictor"
);

/// Hands it to the library.
pub fn hand_over() {
    carry(&DEMO);
}
