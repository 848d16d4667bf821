//! The kernels of a device. Each has a file with its arguments as plain data, what it reads and writes, what it computes, and its
//! launches on a GPU. It computes with the CPU's kernels: that is what the virtual device runs, and what a GPU's results are compared
//! with.
//!
//! A new kernel is a file here, a source in `kernels/` and a line in the list below.
//!
//! Weights are rows of `formats::rows`, one after the other; everything else is f32 or u32 without gaps. `n` is the number of columns,
//! the tokens of a batch: 1 to [`MAX_COLUMNS`](crate::cpu::MAX_COLUMNS) where there are masks of columns ([`Select`], [`SparseFfn`]) or
//! sums that are split ([`Attend`], [`SignScores`]), else as many as a chunk of a prompt has. No two operands of a call overlap unless
//! its text says so.

mod add;
mod append;
mod attend;
mod copy;
mod dense_ffn;
mod expert_ffn;
mod gather;
mod host;
mod launch;
mod linear;
mod matmul;
mod norm;
mod quantize;
mod select;
mod sign_scores;
mod sparse_ffn;

pub use attend::Heads;
pub use copy::copy;
pub use dense_ffn::ColumnWeights;
pub use gather::gather;
pub use host::HostMemory;
pub use launch::{Addresses, Launch, Launches, MAX_ARGUMENTS, SCRATCH_ALIGN, Tiles};
pub use linear::Then;
pub use quantize::{coded_bytes, halved_bytes, halves, quantize, round_inputs};
pub use sparse_ffn::{Mixture, SlotBlocks};

use super::Buffer;
use crate::cpu::Kernels;

/// Calls by their file, then files of functions that calls and the device launch by the way. Every file has its source in `kernels/`.
macro_rules! kernels {
    ($($module:ident: $call:ident),* ; $($part:ident),*) => {
        $(pub use $module::$call;)*

        /// A kernel and its operands.
        #[derive(Clone, Copy, Debug)]
        pub enum Call {
            $(#[doc = concat!("See [`struct@", stringify!($call), "`].")] $call($call)),*
        }

        /// What runs on the host work in and leave, kept between runs so that nothing is allocated once it is warm.
        #[derive(Default)]
        pub struct HostScratch {
            $($module: <$call as DeviceKernel>::Scratch),*
        }

        /// The translation units of `kernels/`.
        pub const SOURCES: &[Source] = &[$(source!($module),)* $(source!($part)),*];

        impl Call {
            /// Names of all kernels that can be called.
            pub const NAMES: &[&str] = &[$(stringify!($module)),*];

            /// Its file's.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Call::$call(_) => stringify!($module)),*
                }
            }

            /// Shows what it reads and writes.
            pub fn operands(&self, see: &mut dyn FnMut(Operand)) {
                match self {
                    $(Call::$call(call) => call.operands(see)),*
                }
            }

            /// Runs it on what the memory holds now; the result stays in `scratch` until [`Call::store`].
            pub fn run(&self, at: &dyn HostMemory, kernels: &Kernels, scratch: &mut HostScratch) -> KernelWork {
                match self {
                    $(Call::$call(call) => call.run(at, kernels, &mut scratch.$module)),*
                }
            }

            /// Writes the result of the last run to memory.
            pub fn store(&self, scratch: &HostScratch, at: &mut dyn HostMemory) {
                match self {
                    $(Call::$call(call) => call.store(&scratch.$module, at)),*
                }
            }

            /// Bytes of the device's memory that its launches hand to each other in, enough for any [`Tiles`]; the next call on the stream
            /// may use the same.
            pub fn scratch_bytes(&self) -> u64 {
                match self {
                    $(Call::$call(call) => call.scratch_bytes()),*
                }
            }

            /// Bytes of weights that it reads whatever its operands hold.
            pub fn weight_bytes(&self) -> u64 {
                match self {
                    $(Call::$call(call) => call.weight_bytes()),*
                }
            }

            /// What a GPU is given, in order: the same for all calls of the same shapes and [`Tiles`]. `address` says where a buffer
            /// begins; `scratch` is [`Call::scratch_bytes`] at a multiple of [`SCRATCH_ALIGN`].
            pub fn launches(&self, address: impl Fn(Buffer) -> u64, scratch: u64, tiles: Tiles) -> Launches {
                debug_assert!(scratch.is_multiple_of(SCRATCH_ALIGN));
                let mut out = Launches::default();
                let at = Addresses::new(&address, tiles);
                match self {
                    $(Call::$call(call) => call.launch(&at, scratch, &mut out)),*
                }
                out
            }
        }
    };
}

/// A source of `kernels/` and its PTX, by the name of its file.
macro_rules! source {
    ($module:ident) => {
        Source {
            name: stringify!($module),
            text: include_str!(concat!("../../../kernels/", stringify!($module), ".cu")),
            ptx: include_bytes!(concat!("../../../kernels/ptx/", stringify!($module), ".ptx.lzma")),
            functions: $module::FUNCTIONS,
        }
    };
}

kernels! {
    norm: Norm,
    linear: Linear,
    append: Append,
    attend: Attend,
    sign_scores: SignScores,
    select: Select,
    sparse_ffn: SparseFfn,
    dense_ffn: DenseFfn,
    expert_ffn: ExpertFfn,
    add: Add;
    quantize, matmul, copy, gather
}

/// What sources include, by the names that they use.
pub const HEADERS: &[(&str, &str)] = &[
    ("activation.cuh", include_str!("../../../kernels/activation.cuh")),
    ("blocks.cuh", include_str!("../../../kernels/blocks.cuh")),
    ("common.cuh", include_str!("../../../kernels/common.cuh")),
    ("rows.cuh", include_str!("../../../kernels/rows.cuh")),
    ("tensor_tiles.cuh", include_str!("../../../kernels/tensor_tiles.cuh")),
    ("tiles.cuh", include_str!("../../../kernels/tiles.cuh")),
];

/// What a run of a kernel took, for a clock that is made of rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelWork {
    /// Bytes of weights, keys and values that it read.
    pub bytes: u64,
    /// Multiplications and additions of its products, each counted.
    pub operations: u64,
}

impl KernelWork {
    /// The products of rows of `bytes` bytes and `numbers` numbers together with `n` columns.
    fn products(bytes: u64, numbers: usize, n: usize) -> KernelWork {
        KernelWork { bytes, operations: 2 * (numbers * n) as u64 }
    }
}

impl std::ops::AddAssign for KernelWork {
    fn add_assign(&mut self, other: KernelWork) {
        self.bytes += other.bytes;
        self.operations += other.operations;
    }
}

/// One kernel: everything that a device has to know of it. Static dispatch: [`Call`] knows them all.
pub trait DeviceKernel {
    /// What a run on the host works in, and its result until it is stored.
    type Scratch: Default;

    /// Shows what it reads and writes.
    fn operands(&self, see: &mut dyn FnMut(Operand));

    /// Computes it on the host without writing to memory: the truth of every device.
    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, scratch: &mut Self::Scratch) -> KernelWork;

    /// Writes the result of the last run to memory.
    fn store(&self, scratch: &Self::Scratch, at: &mut dyn HostMemory);

    /// What a GPU is given. Pure: no driver and no memory; the same for a card and for the CPU shim of `tools/cuda_on_cpu`. How sums
    /// are split follows from shapes alone, never from the card: so do results. Nothing waits for the host between launches.
    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches);

    /// Bytes of device memory between its launches.
    fn scratch_bytes(&self) -> u64 {
        0
    }

    /// Bytes of weights that it reads whatever its operands hold.
    fn weight_bytes(&self) -> u64 {
        0
    }
}

/// Stands for no neuron in `gpu_bucket`, where a slot is free or being filled, and for no slot in the table of each neuron's slot.
pub const NONE: u32 = u32::MAX;

/// A part of a buffer: what lies there from byte `at` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: Buffer,
    /// Bytes from the beginning of the buffer; a multiple of 16.
    pub at: u64,
}

impl From<Buffer> for View {
    fn from(buffer: Buffer) -> View {
        View { buffer, at: 0 }
    }
}

/// A run of device memory that a call reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Where it begins.
    pub view: View,
    /// Its length in bytes; 0 for an operand that the call does without.
    pub bytes: u64,
    /// Whether the call writes there.
    pub written: bool,
}

impl Operand {
    fn read(view: impl Into<View>, bytes: usize) -> Operand {
        Operand { view: view.into(), bytes: bytes as u64, written: false }
    }

    /// An operand that is absent if its buffer has no bytes.
    fn optional(view: impl Into<View>, bytes: usize) -> Operand {
        let view = view.into();
        Operand::read(view, if view.buffer.bytes == 0 { 0 } else { bytes })
    }

    fn written(view: impl Into<View>, bytes: usize) -> Operand {
        Operand { written: true, ..Operand::read(view, bytes) }
    }
}

/// A translation unit of `kernels/`.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its file without `.cu`; messages and the cache of compiled kernels use it.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// PTX made by NVRTC for compute_75, the oldest cards that are supported; compressed by LZMA.
    pub ptx: &'static [u8],
    functions: &'static [&'static [&'static str]],
}

impl Source {
    /// Names of its functions, in the order of [`Function::index`].
    pub fn functions(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.functions.iter().flat_map(|family| family.iter().copied())
    }
}

/// A function of [`SOURCES`], by its number among all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Function(u16);

impl Function {
    /// The function of this name. Called while this program is compiled, so that a name that no source has is a compile error.
    const fn named(name: &str) -> Function {
        let (mut index, mut s) = (0, 0);
        while s < SOURCES.len() {
            let (families, mut f) = (SOURCES[s].functions, 0);
            while f < families.len() {
                let mut member = 0;
                while member < families[f].len() {
                    if is_same(families[f][member], name) {
                        return Function(index);
                    }
                    (index, member) = (index + 1, member + 1);
                }
                f += 1;
            }
            s += 1;
        }
        panic!("no source has a function of this name")
    }

    /// The function that stands so many entries after this one in its source's list.
    const fn next(self, members: usize) -> Function {
        Function(self.0 + members as u16)
    }

    /// Its index in a table of all functions, source by source.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// As the source names it.
    pub fn name(self) -> &'static str {
        Function::names().nth(self.index()).expect("made by `named`")
    }

    /// All functions, in the order of [`Function::index`].
    pub fn names() -> impl Iterator<Item = &'static str> {
        SOURCES.iter().flat_map(Source::functions)
    }
}

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A source that is not listed would be found missing only on a card.
    #[test]
    fn every_source_and_header_of_the_folder_is_listed_and_no_other() {
        let names = |ending: &str| -> BTreeSet<String> {
            let files = std::fs::read_dir("kernels").unwrap().map(|file| file.unwrap().file_name());
            files.map(|name| name.into_string().unwrap()).filter(|name| name.ends_with(ending)).collect()
        };
        assert_eq!(names(".cu"), SOURCES.iter().map(|source| format!("{}.cu", source.name)).collect());
        assert_eq!(names(".cuh"), HEADERS.iter().map(|(name, _)| name.to_string()).collect());
    }

    #[test]
    fn a_function_is_found_by_its_whole_name() {
        let names: Vec<&str> = Function::names().collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "a name stands twice");
        for (index, name) in names.into_iter().enumerate() {
            let found = Function::named(name);
            assert_eq!((found.index(), found.name()), (index, name));
        }
    }
}
