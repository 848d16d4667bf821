//! What must hold between the parts of layers that few families have.

use super::config::ModelConfig;

impl ModelConfig {
    /// Checks what Gemma 4's layers have and others have not.
    pub(super) fn check_parts(&self) -> Result<(), String> {
        let form = &self.form;
        if (form.unscaled || form.value_norm) && !form.qk_norm {
            return Err("undivided queries and normed values are supported beside normed queries and keys only".into());
        }
        if form.output_scales && !form.norms.after() {
            return Err("scales of layers are supported beside norms behind attention and FFN only".into());
        }
        if let Some(experts) = form.experts
            && experts.shared.is_some_and(|shared| shared.normed)
            && (!form.norms.after() || experts.by_neuron)
        {
            return Err("a shared expert with norms is supported beside norms behind attention and FFN only".into());
        }
        match self.logit_cap {
            0.0 | 1.0..=1000.0 => Ok(()),
            cap => Err(format!("the cap of logits is {cap}; it must be 1 to 1000, or 0 for none")),
        }
    }
}
