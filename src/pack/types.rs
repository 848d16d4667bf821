//! The types of a store's rows, tensor by tensor.

use crate::error::Result;
use crate::formats::blocks::BlockType;
use crate::formats::rows::Quant;
use crate::model::Model;
use crate::model::block::{self, BlockLayout};
use crate::model::config::Ffn;
use crate::model::source::{Role, Source};
use crate::pack::mix::Mix;

/// The types of a store's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Types {
    /// One for attention and FFN; embeddings and head get at least q8_0, or q6_k.
    One(Quant),
    /// Every tensor's own, its blocks untouched. Only `down` is coded again, because GGUF codes it along the neurons and a store has it by
    /// neuron.
    Own {
        /// The type of `down`.
        down: Quant,
    },
    /// Those of a mix, by tensor and layer.
    Mix(Mix),
    /// Every tensor's own, `down` among them: the FFN is cut into clusters of neighbouring neurons, whose bytes are the source's. All of
    /// them are computed for every token.
    Clusters,
}

impl From<Quant> for Types {
    fn from(quant: Quant) -> Types {
        Types::One(quant)
    }
}

impl std::fmt::Display for Types {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Types::One(quant) => f.write_str(quant.name()),
            Types::Own { down } => write!(f, "its own types with down as {}", down.name()),
            Types::Mix(mix) => f.write_str(mix.name()),
            Types::Clusters => f.write_str("clusters in its own types"),
        }
    }
}

impl std::str::FromStr for Types {
    type Err = String;

    /// One type, a mix or `clusters`, by its name in any case.
    fn from_str(text: &str) -> Result<Types, String> {
        if text.eq_ignore_ascii_case("clusters") {
            return Ok(Types::Clusters);
        }
        if let Some(mix) = Mix::all().find(|mix| mix.name().eq_ignore_ascii_case(text)) {
            return Ok(Types::Mix(mix));
        }
        let mixes = || Mix::all().map(Mix::name).collect::<Vec<_>>().join(", ");
        text.parse().map(Types::One).map_err(|why: String| format!("{why}, a mix of them: {}, or clusters", mixes()))
    }
}

impl Types {
    /// What a store of this source is made of if nothing else is said. Floats become f16, which rounds F32 weights (`f32` keeps them);
    /// Q8_0 and Q4_0 stay what they are; the types of a mix stay, and `down` becomes [`DOWN`].
    ///
    /// # Errors
    /// [`crate::Error::BadFile`] where the source lacks the first layer's up matrix.
    pub fn natural(source: &Source) -> Result<Types> {
        Ok(match of_source(source, Role::Up)?.packed() {
            Quant::Block(_) if source.config.hidden.is_multiple_of(DOWN.unit()) => Types::Own { down: DOWN },
            Quant::Block(_) => Types::Own { down: Quant::Q8 },
            Quant::F32 => Types::One(Quant::F16),
            quant => Types::One(quant),
        })
    }

    /// The natural types, if a device can compute with them, else q8_0 for all.
    ///
    /// # Errors
    /// As [`Types::natural`].
    pub fn for_device(source: &Source) -> Result<Types> {
        let natural = Types::natural(source)?;
        if source.config.is_mixture() {
            return Ok(natural);
        }
        let layouts = (0..source.config.layers().len())
            .filter(|&l| source.config.has_ffn(l))
            .map(|l| layout(source, natural, l))
            .collect::<Result<Vec<_>>>()?;
        Ok(match block::not_on_device(layouts, source.config.hidden) {
            Some(_) => Types::One(Quant::Q8),
            None => natural,
        })
    }

    /// The type of a role's rows.
    ///
    /// # Errors
    /// [`crate::Error::BadFile`] where the source lacks the tensor.
    pub fn of(self, source: &Source, role: Role, layer: usize) -> Result<Quant> {
        Ok(match (self, role) {
            (_, Role::Positions | Role::Router) => Quant::F32,
            (Types::One(quant), Role::Embed | Role::Head | Role::DeltaBeta | Role::DeltaAlpha) => quant.of_edges(),
            (Types::One(quant), _) => quant,
            (Types::Mix(mix), _) => mix.of(&source.config, role, layer),
            (Types::Own { down }, Role::Down)
                if source.config.experts(layer).is_none_or(|experts| experts.count > 0) =>
            {
                down
            }
            (Types::Clusters, Role::Gate | Role::Up | Role::Down) => {
                Quant::of_source(source.weight(role, layer)?.info.dtype)
            }
            (Types::Clusters, _) => match Quant::of_source(source.weight(role, layer)?.info.dtype) {
                Quant::Block(BlockType::BF16) => Quant::Block(BlockType::BF16),
                own => own.packed(),
            },
            (Types::Own { .. }, _) => own(Quant::of_source(source.weight(role, layer)?.info.dtype)),
        })
    }

    /// Whether a packed model is of these types.
    pub fn are_of(self, model: &Model) -> bool {
        let clusters = model.config.has_clusters();
        if clusters || self == Types::Clusters {
            return self == Types::Clusters && clusters;
        }
        let Types::Mix(mix) = self else { return self.one() == Some(model.quant) };
        if model.config.is_mixture() {
            return false;
        }
        model.layers.iter().enumerate().all(|(l, layer)| {
            let (inputs, output) = Role::of_mixer(model.config.mixer(l));
            let parts = layer.qkv.parts().iter().map(|part| part.quant).rev();
            let inputs = inputs.iter().copied().rev().zip(parts);
            let block = layer.block();
            let of_ffn = [(Role::Down, block.down().quant), (Role::Up, block.up().quant)];
            let of_ffn = of_ffn.into_iter().filter(|_| model.config.has_ffn(l));
            inputs
                .chain([(output, layer.o.quant)])
                .chain(of_ffn)
                .all(|(role, quant)| mix.of(&model.config, role, l) == quant)
        })
    }

    /// The one type that was asked for; `None` where tensors differ.
    pub fn one(self) -> Option<Quant> {
        match self {
            Types::One(quant) => Some(quant),
            Types::Own { .. } | Types::Mix(_) | Types::Clusters => None,
        }
    }

    /// The types as text, for people and file names.
    pub fn name(self, source: &Source) -> Result<String> {
        Ok(match self {
            Types::One(quant) => quant.name().into(),
            Types::Mix(mix) => mix.name().into(),
            Types::Clusters => "clusters".into(),
            Types::Own { down } => {
                let up = of_up(source, self)?;
                if up == down { up.name().into() } else { format!("{}-{}", up.name(), down.name()) }
            }
        })
    }
}

/// The type that a tensor keeps where a store has the source's own types.
pub(super) fn own(of_source: Quant) -> Quant {
    match of_source.packed() {
        Quant::F32 => Quant::F16,
        own => own,
    }
}

/// The type of the first layer's matrix, or of its first expert's, in the source.
fn of_source(source: &Source, role: Role) -> Result<Quant> {
    let experts = (0..source.config.layers().len()).find(|&layer| source.config.movable_of(layer) > 0);
    let view = match experts.filter(|_| source.config.is_mixture()) {
        Some(layer) => source.expert(role, layer, 0)?.view,
        None => source.weight(role, source.config.ffn_like(0))?,
    };
    Ok(Quant::of_source(view.info.dtype))
}

/// The type of the first layer's up matrix, by which a store calls itself.
///
/// # Errors
/// [`crate::Error::BadFile`] where the source lacks it.
pub(super) fn of_up(source: &Source, types: Types) -> Result<Quant> {
    match (types, source.config.is_mixture()) {
        (Types::Own { .. }, true) => of_source(source, Role::Up).map(own),
        _ => types.of(source, Role::Up, source.config.ffn_like(0)),
    }
}

/// The type of `down` in a store of a mix: the smallest that changes perplexity by less than 0.1 % (runs/2026-11-23-mixed-types).
pub const DOWN: Quant = Quant::Block(BlockType::Q5_K);

/// The layout of a layer's neuron blocks.
///
/// # Errors
/// [`crate::Error::BadFile`] where the source lacks a tensor.
pub fn layout(source: &Source, types: Types, layer: usize) -> Result<BlockLayout> {
    let roles: &[Role] = match source.config.ffn_kind {
        Ffn::Plain => &[Role::Up, Role::Down],
        _ => &[Role::Gate, Role::Up, Role::Down],
    };
    let quants: Vec<Quant> = roles.iter().map(|&role| types.of(source, role, layer)).collect::<Result<_>>()?;
    Ok(BlockLayout::mixed(&quants, source.config.hidden))
}
