//! Attention's matrices of layers for which the device has no room. They stay in host memory and are copied for every pass, so that a prompt is
//! computed on the device however large its model is, and a token waits for them no longer than the link takes beside the host's part of the
//! layers between. Two layers' matrices have room at once: while one layer is computed, the next one's come.

use super::allocator::DeviceAllocator;
use super::weights::{DeviceMatrix, LayerWeights, Weights, is_streamed};
use super::workspace::pinned;
use crate::device::{Buffer, Device, Event, OutOfMemory, PinnedBuffer, Stream};
use crate::model::weights::Layer;
use crate::model::{Matrix, Model};

/// A layer comes in about so many pieces, each of [`PIECE`] bytes at least: between two of them the link brings the host's part of an FFN, for which
/// the device waits.
const PIECES: usize = 16;
const PIECE: usize = 256 << 10;

/// Bytes of a layer's matrices on the device, queries, keys and values first and the output last.
fn matrix_bytes(layer: &Layer) -> impl Iterator<Item = u64> + '_ {
    layer.qkv.parts().iter().chain([&layer.o]).map(Matrix::padded_bytes)
}

/// Bytes of attention's matrices of the layer that has the fewest, and of room for those of any one layer.
pub fn layer_bytes(model: &Model) -> [u64; 2] {
    let least = model.layers.iter().map(|layer| matrix_bytes(layer).sum()).min().unwrap_or(0);
    [least, room(model).iter().sum()]
}

/// A layer's matrices, the output last: each with which of its rows is row `r` on the device.
fn each_matrix(layer: &Layer) -> impl Iterator<Item = (&Matrix, impl Fn(usize) -> usize + '_)> {
    let mut first = 0;
    let parts = layer.qkv.parts().iter().map(move |part| {
        let here = first;
        first += part.rows;
        (part, Some(here))
    });
    let all = parts.chain([(&layer.o, None)]);
    all.map(move |(matrix, here)| {
        (matrix, move |row: usize| here.map_or(row, |here| layer.qkv.place(here + row) - here))
    })
}

/// Bytes of host memory that copying a layer takes beside the model's own, of the layer that takes the most: for matrices that lie otherwise in
/// the file than on the device.
pub fn made_bytes(model: &Model) -> u64 {
    let made = |layer| {
        let other = each_matrix(layer).filter(|(matrix, of)| !DeviceMatrix::is_as_on_device(matrix, of));
        other.map(|(matrix, _)| matrix.padded_bytes()).sum()
    };
    model.layers.iter().map(made).max().unwrap_or(0)
}

/// Bytes of each matrix in the room for those of any one layer.
fn room(model: &Model) -> Vec<u64> {
    let mut most = Vec::new();
    for layer in &model.layers {
        for (i, bytes) in matrix_bytes(layer).enumerate() {
            most.resize(most.len().max(i + 1), 0);
            most[i] = bytes.max(most[i]);
        }
    }
    most
}

/// Copies them in turns into two halves.
pub(super) struct AttentionStreaming {
    /// By half: room for each of a layer's matrices.
    halves: [Vec<Buffer>; 2],
    /// By half: its copies have arrived.
    arrived: [Event; 2],
    /// By half: it is not needed any more.
    done: [Event; 2],
    /// By half: whose matrices are there, or on their way.
    holds: [Option<usize>; 2],
    /// By half: parts of the pass that have used it.
    uses: [usize; 2],
    /// By half: the turn for which it is to be filled next.
    next: [Option<usize>; 2],
    /// The half of the first of these layers in the current pass.
    first: usize,
    /// By layer of the model: its number among these layers.
    numbers: Vec<Option<usize>>,
    /// Where the matrices of each of these layers lie in host memory, in the device's order of bytes.
    sources: Vec<Vec<Source>>,
}

/// Bytes in host memory.
pub(super) enum Source {
    /// Where the model has them.
    InPlace(Matrix),
    /// Written anew, as the device reads them: so many bytes.
    Made(PinnedBuffer, usize),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::InPlace(matrix) => matrix.all(),
            Source::Made(words, bytes) => &bytemuck::cast_slice(&words[..])[..*bytes],
        }
    }

    /// The sources of each layer of which attention's matrices are copied, if those of `streamed` layers are.
    ///
    /// # Safety
    /// The device is dropped before the model's store, and before them.
    pub unsafe fn of_layers(device: &mut dyn Device, model: &Model, streamed: usize, pins: bool) -> Vec<Vec<Source>> {
        let layers = model.layers.iter().enumerate();
        let copied = layers.filter(|(l, _)| is_streamed(*l, model.layers.len(), streamed));
        // SAFETY: the caller's promise.
        let mut source =
            |matrix: &Matrix, of: &dyn Fn(usize) -> usize| unsafe { Source::new(device, matrix, of, pins) };
        copied.map(|(_, layer)| each_matrix(layer).map(|(matrix, of)| source(matrix, &of)).collect()).collect()
    }

    /// The source of a matrix, row `r` of which on the device is row `of(r)`; what is read in place is announced to the device if it may be
    /// pinned.
    ///
    /// # Safety
    /// The device is dropped before the model's store, and before this.
    unsafe fn new(device: &mut dyn Device, matrix: &Matrix, of: impl Fn(usize) -> usize, pins: bool) -> Source {
        if DeviceMatrix::is_as_on_device(matrix, &of) {
            if pins {
                // SAFETY: the caller's promise.
                unsafe { device.pin(matrix.row_ptr(0), matrix.all().len(), false) };
            }
            return Source::InPlace(*matrix);
        }
        let (row_bytes, padded) = (matrix.row_bytes, matrix.quant.row_bytes(matrix.cols));
        let bytes = matrix.rows * padded;
        // SAFETY: the caller's promise.
        let mut words = unsafe { pinned(device, bytes.div_ceil(4), false) };
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut words[..]);
        let rows = to[..bytes].chunks_exact_mut(padded).enumerate();
        rows.for_each(|(row, to)| to[..row_bytes].copy_from_slice(matrix.row(of(row))));
        Source::Made(words, bytes)
    }
}

impl AttentionStreaming {
    /// Makes room for the matrices of the layers that have `sources`, which `weights` has not uploaded; `None` if there are none.
    ///
    /// # Errors
    /// The device has no room.
    pub fn new(
        allocator: &mut DeviceAllocator<'_>,
        model: &Model,
        weights: &mut Weights,
        sources: Vec<Vec<Source>>,
    ) -> Result<Option<AttentionStreaming>, OutOfMemory> {
        let (layers, streamed) = (model.layers.len(), sources.len());
        if streamed == 0 {
            return Ok(None);
        }
        let room = room(model);
        let mut half = || room.iter().map(|&bytes| allocator.alloc(bytes as usize)).collect::<Result<Vec<_>, _>>();
        let halves = [half()?, half()?];
        let device = &mut *allocator.device;
        let mut numbers = vec![None; layers];
        for (number, l) in (0..layers).filter(|l| is_streamed(*l, layers, streamed)).enumerate() {
            numbers[l] = Some(number);
            // Calls are prepared for one of the two.
            weights.layers[l].place(&halves[0]);
        }
        let mut two = || [device.event(), device.event()];
        let (arrived, done) = (two(), two());
        let (holds, uses, next) = ([None; 2], [0; 2], [None; 2]);
        Ok(Some(AttentionStreaming { halves, arrived, done, holds, uses, next, first: 0, numbers, sources }))
    }

    /// Layers whose matrices are copied.
    pub fn layers(&self) -> usize {
        self.sources.len()
    }

    /// Bytes that are copied for a pass: none where both halves keep what they have.
    pub fn bytes(&self) -> usize {
        let all = self.sources.iter().filter(|_| self.sources.len() > 2).flatten();
        all.map(|source| source.bytes().len()).sum()
    }

    /// Begins a pass: the first two layers' copies are on their way, if they have not come while the pass before ended.
    pub fn begin(&mut self, device: &mut dyn Device) {
        (self.uses, self.next) = ([0; 2], [None; 2]);
        self.first = usize::from(self.holds[1] == Some(0));
        (0..2).for_each(|turn| self.fill(device, turn));
    }

    /// Lets the device wait for the matrices of layer `l`, and has its calls find them in `at`. Returns whether they are copied.
    pub fn wait(&mut self, device: &mut dyn Device, l: usize, at: &mut LayerWeights) -> bool {
        let Some(number) = self.numbers[l] else { return false };
        self.go_on(device);
        let half = self.half(number);
        device.wait(Stream::Compute, self.arrived[half]);
        at.place(&self.halves[half]);
        true
    }

    /// One of the pass's `parts` has used layer `l`: after the last, the layer after the next may come, or the first of the next pass, once
    /// [`AttentionStreaming::go_on`] says so.
    pub fn used(&mut self, device: &mut dyn Device, l: usize, parts: usize) {
        let Some(number) = self.numbers[l] else { return };
        let half = self.half(number);
        self.uses[half] += 1;
        if self.uses[half] == parts {
            self.uses[half] = 0;
            device.record(Stream::Compute, self.done[half]);
            self.next[half] = Some(number + 2);
        }
    }

    /// Begins the copies for which there is room now.
    pub fn go_on(&mut self, device: &mut dyn Device) {
        // The first of both that is needed comes first.
        let mut next = self.next.map(|turn| turn.unwrap_or(usize::MAX));
        next.sort_unstable();
        self.next = [None; 2];
        next.into_iter().filter(|turn| *turn < usize::MAX).for_each(|turn| self.fill(device, turn));
    }

    fn half(&self, turn: usize) -> usize {
        (self.first + turn) % 2
    }

    /// Copies what is needed in a turn, unless it is there.
    fn fill(&mut self, device: &mut dyn Device, turn: usize) {
        let (half, number) = (self.half(turn), turn % self.sources.len());
        if self.holds[half] == Some(number) {
            return;
        }
        self.holds[half] = Some(number);
        device.wait(Stream::Copy, self.done[half]);
        let of_layer = &self.sources[number];
        let piece =
            PIECE.max(of_layer.iter().map(|source| source.bytes().len()).sum::<usize>() / PIECES).next_multiple_of(4);
        for (source, to) in of_layer.iter().zip(&self.halves[half]) {
            for (i, bytes) in source.bytes().chunks(piece).enumerate() {
                // SAFETY: the model's store and what was made of it outlive the device.
                unsafe { device.copy_in(Stream::Copy, bytes.as_ptr(), bytes.len(), *to, (i * piece) as u64) };
            }
        }
        device.record(Stream::Copy, self.arrived[half]);
    }
}
