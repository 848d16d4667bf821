//! Where neurons and experts lie in their file, and how their bytes lie in a frame.

use crate::formats::DType;
use std::sync::Arc;

/// Units per layer at most. Their buffers are written and added once per token: 32 of them are below 1 % of the weights.
pub const MAX_UNITS: usize = 32;
/// Block bytes per unit at least, so that a small model does not drown in buffers.
const MIN_UNIT_BYTES: usize = 128 << 10;

/// Neurons of a strip are a multiple of this where columns are many: as many as the matrix product takes at a time.
pub const STRIP: usize = 256;

/// Bytes of a read of a strip: the disk's rate no longer grows with larger ones, and several are under way at once.
pub const STRIP_READ: usize = 512 << 10;

/// Reads of a layer's strips, at most, for blocks of so many bytes together: each strip ends with one that is shorter.
fn strip_reads(bytes: usize, neurons: usize) -> usize {
    // There are no more strips than neurons.
    bytes.div_ceil(STRIP_READ) + 2 * neurons
}

/// Units into which the FFN cuts a list of `neurons` neurons: unit u has those from u * neurons / units on.
pub fn units_of(neurons: usize, block_bytes: usize) -> usize {
    (neurons * block_bytes / MIN_UNIT_BYTES).clamp(1, MAX_UNITS)
}

/// The most neurons of a unit of a layer of `neurons`.
fn longest_unit(neurons: usize, block_bytes: usize) -> usize {
    neurons.div_ceil(MAX_UNITS).max(2 * MIN_UNIT_BYTES / block_bytes + 1).min(neurons)
}

/// Where pieces of equal length lie, one of each of a layer's neurons or experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Bytes of each.
    bytes: usize,
    /// The [`crate::disk::place`] of the first, and bytes from one to the next.
    first: u64,
    stride: usize,
    /// Where each lies, if they do not lie at equal distances.
    each: Vec<u64>,
}

/// Where a layer's neurons or experts lie in their file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerBlocks {
    runs: Vec<Run>,
    experts: bool,
    /// Of each piece of each neuron or expert, one neuron after the other; none where the file has none.
    checksums: Arc<[u32]>,
    /// The type of each piece of an expert, if its numbers are looked at when it is first read.
    types: Arc<[DType]>,
    /// Nothing of the layer is ever asked for.
    idle: bool,
}

impl Run {
    /// Of pieces of so many bytes each, at these places ([`crate::disk::place`]).
    ///
    /// # Panics
    /// If there is none.
    pub fn new(places: Vec<u64>, bytes: usize) -> Run {
        let (first, second) = (places[0], places.get(1).copied().unwrap_or_default());
        let stride = second.saturating_sub(first) as usize;
        let equal = (0u64..).zip(&places).all(|(n, &at)| at == first + n * stride as u64);
        Run { bytes, first, stride, each: if equal { Vec::new() } else { places } }
    }

    /// Bytes of each piece.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the piece of a neuron begins.
    #[inline]
    pub fn at(&self, neuron: usize) -> u64 {
        match self.each.is_empty() {
            true => self.first + (neuron * self.stride) as u64,
            false => self.each[neuron],
        }
    }
}

impl LayerBlocks {
    /// Of neuron blocks of so many bytes, one after the other from `offset` on.
    pub fn of_neurons(offset: u64, bytes: usize) -> LayerBlocks {
        let run = Run { bytes, first: offset, stride: bytes, each: Vec::new() };
        LayerBlocks { runs: vec![run], experts: false, checksums: Arc::default(), types: Arc::default(), idle: false }
    }

    /// Of experts: a run for each of their matrices.
    ///
    /// # Panics
    /// If there is no run.
    pub fn of_experts(runs: Vec<Run>) -> LayerBlocks {
        assert!(!runs.is_empty(), "experts have matrices");
        LayerBlocks { runs, experts: true, checksums: Arc::default(), types: Arc::default(), idle: false }
    }

    /// The blocks of a layer of which nothing is ever asked for, such as one without experts in a mixture: it gets no memory. It is described by
    /// those of another.
    pub fn idle(self) -> LayerBlocks {
        LayerBlocks { idle: true, ..self }
    }

    /// Whether nothing is ever asked for.
    pub(super) fn is_idle(&self) -> bool {
        self.idle
    }

    /// The same with checksums of all pieces, neuron by neuron, with which they are compared when they are first read; with none, nothing is.
    pub fn with_checksums(self, checksums: Vec<u32>) -> LayerBlocks {
        LayerBlocks { checksums: checksums.into(), ..self }
    }

    /// The same with the types of an expert's pieces: where there are no checksums, every number of a piece (of quantised blocks every scale)
    /// has to be finite when it is first read.
    pub fn with_types(self, types: Vec<DType>) -> LayerBlocks {
        assert_eq!(types.len(), self.runs.len(), "a type for each piece");
        LayerBlocks { types: types.into(), ..self }
    }

    pub(super) fn checksums(&self) -> Arc<[u32]> {
        self.checksums.clone()
    }

    pub(super) fn types(&self) -> Arc<[DType]> {
        self.types.clone()
    }

    /// The pieces that each neuron or expert consists of.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Where the first neuron or expert begins.
    pub fn offset(&self) -> u64 {
        self.runs[0].at(0)
    }

    /// Bytes of a neuron or an expert, all its pieces together.
    pub fn block_bytes(&self) -> usize {
        self.runs.iter().map(|run| run.bytes).sum()
    }

    /// Bytes of memory for one of a layer's `neurons`, read from a disk whose reads are multiples of `align`.
    pub fn frame_bytes(&self, neurons: usize, align: usize) -> usize {
        Pieces::new(self, neurons, align).frame_bytes
    }

    /// Units into which a list of so many is cut: an expert is one by itself.
    pub fn units(&self, listed: usize) -> usize {
        if self.experts { listed.max(1) } else { units_of(listed, self.block_bytes()) }
    }

    /// The longest run of unwanted bytes with which the largest unit fits into so many bytes.
    pub(super) fn longest_gap(&self, neurons: usize, align: usize, half: usize) -> usize {
        if self.experts {
            return usize::MAX;
        }
        let bytes = self.block_bytes();
        (half / longest_unit(neurons, bytes).max(1)).saturating_sub(bytes + 2 * align)
    }

    /// Bytes of a half of the landing, at least: the largest unit and the shortest strip.
    pub(super) fn least_half(&self, neurons: usize, align: usize, gap: usize) -> usize {
        if self.experts {
            return self.runs.iter().map(|run| run.bytes + 2 * align).sum();
        }
        let bytes = self.block_bytes();
        let unit = longest_unit(neurons, bytes) * (bytes + 2 * align + gap);
        unit.max(STRIP.min(neurons) * bytes + 2 * align)
    }

    /// Reads of one use of a layer of `neurons`, at most: one for each piece, or for each piece of each strip.
    pub(super) fn most_reads(&self, neurons: usize) -> usize {
        match self.experts {
            true => neurons * self.runs.len(),
            false => neurons + strip_reads(self.block_bytes() * neurons, neurons),
        }
    }
}

/// How the pieces of a neuron or an expert lie in a frame: each as in the file, from the multiple of the disk's alignment before it to that
/// behind it.
pub(super) struct Pieces {
    /// Where each begins in the frame.
    pub starts: Vec<usize>,
    /// Bytes from one frame to the next.
    pub frame_bytes: usize,
}

impl Pieces {
    /// For a layer of `neurons`.
    pub fn new(layer: &LayerBlocks, neurons: usize, align: usize) -> Pieces {
        let (mut starts, mut frame_bytes) = (Vec::new(), 0);
        for run in layer.runs() {
            let covered = |neuron: usize| {
                let begin = run.at(neuron) as usize;
                (begin + run.bytes).next_multiple_of(align) - begin / align * align
            };
            starts.push(frame_bytes);
            // At equal distances, where pieces begin repeats after `align` of them at the latest.
            let distinct = if run.each.is_empty() { neurons.min(align) } else { neurons };
            frame_bytes += (0..distinct).map(covered).max().unwrap_or(align);
        }
        Pieces { starts, frame_bytes }
    }
}
