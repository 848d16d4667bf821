//! What must hold between the parts of layers that few families have.

use super::described::Description;
use super::form::OwnForm;
use super::layer::Attention;

/// Numbers of a token that each layer may have beside the residual: more than any published model.
const MAX_PER_LAYER: usize = 1 << 12;

impl Description {
    /// Checks what Gemma 4's layers have and others have not.
    pub(super) fn check_parts(&self) -> Result<(), String> {
        let form = &self.form;
        if (form.unscaled || form.value_norm) && !form.qk_norm {
            return Err("undivided queries and normed values are supported beside normed queries and keys only".into());
        }
        if form.qk_norm_joined && form.value_norm {
            return Err("values normed by head beside queries that are normed together are not supported".into());
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
        if form.per_layer > MAX_PER_LAYER || form.per_layer > 0 && form.experts.is_some() {
            return Err(format!(
                "each layer has {} numbers of a token; it must be 0 to {MAX_PER_LAYER}, and none in a mixture",
                form.per_layer
            ));
        }
        if form.widths.contains(&0) {
            return Err("a layer has an FFN of 0 neurons".into());
        }
        form.own.iter().try_for_each(|own| self.check_keys_of(own))?;
        match self.logit_cap {
            0.0 | 1.0..=1000.0 => Ok(()),
            cap => Err(format!("the cap of logits is {cap}; it must be 1 to 1000, or 0 for none")),
        }
    }

    /// Checks that layers without keys of their own read those of an earlier layer of the same shape.
    fn check_keys_of(&self, own: &OwnForm) -> Result<(), String> {
        let (Some(of), Some(&first)) = (own.keys_of, own.layers.first()) else { return Ok(()) };
        if of >= first {
            return Err(format!("layer {first} reads the keys of layer {of}, which does not come before it"));
        }
        let Some(owner) = self.attention(of).filter(|owner| owner.keys_of.is_none() && owner.latent.is_none()) else {
            return Err(format!("layer {first} reads the keys of layer {of}, which has none of its own"));
        };
        let shape = |a: &Attention| (a.kv_heads, a.head_dim, a.window);
        let differs = |&&layer: &&usize| self.attention(layer).is_none_or(|reader| shape(&reader) != shape(&owner));
        match own.layers.iter().find(differs) {
            Some(other) => Err(format!("layer {other} reads the keys of layer {of}, whose heads or window are others")),
            None => Ok(()),
        }
    }
}
