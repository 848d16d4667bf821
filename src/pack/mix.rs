//! Mixes of types under the names that GGUF files have: most tensors get one type, and those whose errors cost most a larger one. Which
//! these are is what llama.cpp's `llama-quantize` writes into a file of that name, so that both come out alike; where a store differs
//! stands in docs/neuron_store.md.

use crate::formats::blocks::BlockType::{self, Q3_K, Q4_K, Q5_K, Q6_K, Q8_0};
use crate::formats::rows::{GROUP, Quant};
use crate::model::ModelConfig;
use crate::model::source::Role;

/// A mix of types, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mix {
    Q3KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KS,
    Q5KM,
}

/// Which of the layers.
#[derive(Clone, Copy, Debug)]
enum Layers {
    All,
    /// So many of the first.
    First(usize),
    /// The first, one in so many.
    OneIn(usize),
    /// The first and the last eighth, and every third between.
    Costly,
}
use Layers::{All, Costly, First, OneIn};

impl Layers {
    fn has(self, layer: usize, layers: usize) -> bool {
        let eighth = layers / 8;
        match self {
            All => true,
            First(count) => layer < count,
            OneIn(part) => layer < layers / part,
            Costly => layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2,
        }
    }
}

/// The types of a role by layer: that of the first line that has the layer counts, and without one the mix's main type.
type ByLayer = &'static [(Layers, BlockType)];

/// A mix, as a table.
struct Table {
    name: &'static str,
    /// The type of what nothing else is said of.
    main: BlockType,
    /// Attention's values.
    values: ByLayer,
    /// Attention's output matrix; Falcon's, whose heads share one key and value, has a column of its own, and so has its `down`.
    output: [ByLayer; 2],
    down: [ByLayer; 2],
}

static TABLES: [(Mix, Table); 7] = [
    (Mix::Q3KS, Table { name: "q3_k_s", main: Q3_K, values: &[], output: [&[]; 2], down: [&[]; 2] }),
    (
        Mix::Q3KM,
        Table {
            name: "q3_k_m",
            main: Q3_K,
            values: &[(First(2), Q5_K), (All, Q4_K)],
            output: [&[(All, Q4_K)], &[]],
            down: [&[(OneIn(16), Q5_K), (All, Q4_K)], &[(OneIn(16), Q5_K), (Costly, Q4_K)]],
        },
    ),
    (
        Mix::Q3KL,
        Table {
            name: "q3_k_l",
            main: Q3_K,
            values: &[(All, Q5_K)],
            output: [&[(All, Q5_K)], &[(All, Q4_K)]],
            down: [&[(All, Q5_K)], &[(All, Q4_K)]],
        },
    ),
    (
        Mix::Q4KS,
        Table {
            name: "q4_k_s",
            main: Q4_K,
            values: &[(First(4), Q5_K)],
            output: [&[]; 2],
            down: [&[(OneIn(8), Q5_K)], &[]],
        },
    ),
    (
        Mix::Q4KM,
        Table {
            name: "q4_k_m",
            main: Q4_K,
            values: &[(Costly, Q6_K)],
            output: [&[]; 2],
            down: [&[(Costly, Q6_K)], &[(OneIn(16), Q6_K), (Costly, Q5_K)]],
        },
    ),
    (Mix::Q5KS, Table { name: "q5_k_s", main: Q5_K, values: &[], output: [&[]; 2], down: [&[]; 2] }),
    (
        Mix::Q5KM,
        Table { name: "q5_k_m", main: Q5_K, values: &[(Costly, Q6_K)], output: [&[]; 2], down: [&[(Costly, Q6_K)]; 2] },
    ),
];

impl Mix {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Mix> {
        TABLES.iter().map(|(mix, _)| *mix)
    }

    /// The mix's name in flags, file names and messages.
    pub fn name(self) -> &'static str {
        self.table().name
    }

    fn table(self) -> &'static Table {
        &TABLES[self as usize].1
    }

    /// The type of a role's rows in a model of this shape. Embeddings have the main type; the head, which embeddings are where the two are
    /// one, has q6_k, and Falcon's q8_0. Rows that a type's blocks do not fit get one of 32 numbers that is as large or larger.
    pub fn of(self, c: &ModelConfig, role: Role, layer: usize) -> Quant {
        let table = self.table();
        let falcon = c.family == "falcon";
        let by_layer = |lines: ByLayer| {
            let found = lines.iter().find(|(layers, _)| layers.has(layer, c.layers().len()));
            found.map_or(table.main, |&(_, kind)| kind)
        };
        let values = || {
            // Models of 70 billion parameters, whose eight heads share a matrix of values that is small beside all others.
            let shared = c.layers().len() == 80 && c.attention(layer).is_some_and(|a| a.sharing() > 1);
            match by_layer(table.values) {
                Q3_K | Q4_K if shared => Q5_K,
                kind => kind,
            }
        };
        let kind = match role {
            Role::Head => head(falcon),
            Role::Embed if c.tied => head(falcon),
            Role::V => values(),
            // Falcon's three are published as one matrix.
            Role::Q | Role::K if falcon => values(),
            Role::O | Role::MixerOut => by_layer(table.output[usize::from(falcon)]),
            // What decides how much of a state stays.
            Role::DeltaBeta | Role::DeltaAlpha => Q8_0,
            Role::Down => by_layer(table.down[usize::from(falcon)]),
            _ => table.main,
        };
        let experts = c.experts(layer);
        let cols = match (role, experts.and_then(|experts| experts.shared)) {
            (Role::O | Role::MixerOut, _) => c.mixer(layer).cols(),
            (Role::SharedDown, Some(shared)) => shared.width,
            // One FFN in the place of experts.
            (Role::Down, Some(shared)) if experts.is_some_and(|experts| experts.count == 0) => shared.width,
            _ => c.hidden,
        };
        fitting(kind, cols)
    }
}

fn head(falcon: bool) -> BlockType {
    if falcon { Q8_0 } else { Q6_K }
}

/// The type itself for rows of so many numbers, else what fits them.
fn fitting(kind: BlockType, cols: usize) -> Quant {
    let quant = Quant::Block(kind).packed();
    if cols.is_multiple_of(quant.unit()) {
        return quant;
    }
    let smaller = match kind {
        Q3_K => Quant::Q4,
        Q4_K => Quant::Block(BlockType::Q5_0),
        Q5_K => Quant::Block(BlockType::Q5_1),
        _ => Quant::Q8,
    };
    if cols.is_multiple_of(GROUP) { smaller } else { Quant::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mix_stands_where_its_number_says() {
        for (i, mix) in Mix::all().enumerate() {
            assert_eq!(mix as usize, i);
        }
    }

    #[test]
    fn costly_layers_are_the_first_and_last_eighth_and_every_third_between() {
        let of = |layers: usize| (0..layers).filter(|&l| Costly.has(l, layers)).collect::<Vec<_>>();
        assert_eq!(of(32), [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
        assert_eq!(of(5), [2, 4]);
        assert_eq!(of(1), [0]);
        assert_eq!(of(2), [1]);
    }

    #[test]
    fn rows_of_other_lengths_get_types_of_smaller_blocks() {
        let of = |cols| [Q3_K, Q4_K, Q5_K, Q6_K, Q8_0].map(|kind| fitting(kind, cols).name());
        assert_eq!(of(512), ["q3_k", "q4_k", "q5_k", "q6_k", "q8_0"]);
        assert_eq!(of(96), ["q4_0", "q5_0", "q5_1", "q8_0", "q8_0"]);
        assert_eq!(of(100), ["f16"; 5]);
    }
}
