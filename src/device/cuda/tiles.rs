//! Whether the card's tensor cores are faster than its lanes for prompts, tried when it is opened.

use super::device::CudaDevice;
use crate::device::{Buffer, Call, Device, Linear, OutOfMemory, Stream, Then, Tiles, fastest_ns};
use crate::formats::rows::{self, Quant};
use crate::prng::Prng;

/// What is tried: rows for two tiles on each multiprocessor, each of several steps, as a model's matrices are.
const QUANT: Quant = Quant::Q8;
const ROWS_OF_EACH: usize = 32;
const COLS: usize = 2048;
const COLUMNS: usize = 64;
/// Different rows in it; the others repeat them, for making them would take longer than everything else.
const DIFFERENT: usize = 8;
/// Times that each way is timed; the fastest counts.
const PASSES: usize = 5;

/// What a trial has shown.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Time by lanes and by tensor cores, ns by the card's clock.
    pub ns: [u64; 2],
    /// Whether both gave the same bits.
    pub same: bool,
}

impl CudaDevice {
    /// Multiplies a small matrix of q8_0 by lanes and by tensor cores, and takes what was faster for prompts of q8_0 and q4_0, whose results
    /// are the same to the bit; what else they may multiply is the caller's to say. A card on which they are not keeps its lanes. `None` where
    /// there was nothing to try it with.
    ///
    /// Comes before the device is used: neither its budget nor its totals count what this takes and gives back.
    pub fn try_tensor_cores(&mut self) -> Option<Trial> {
        let (memory, totals, busy_ns) = (self.memory, self.totals, self.spans[Stream::Compute as usize].busy_ns);
        self.memory.budget = u64::MAX;
        let mut buffers = Vec::new();
        let tried = self.trial(&mut buffers);
        buffers.into_iter().for_each(|buffer| self.free(buffer));
        (self.memory, self.totals) = (memory, totals);
        self.spans[Stream::Compute as usize].busy_ns = busy_ns;
        let trial = tried.ok().filter(|_| self.fault.is_none());
        self.tiles = match trial {
            Some(Trial { ns: [lanes, tensor], same: true }) if tensor < lanes => Tiles::Exact,
            _ => Tiles::Lanes,
        };
        if trial.is_some_and(|trial| !trial.same) {
            tracing::warn!(
                "{}: its tensor cores give other bits than its lanes and are not used; please report it",
                self.card.name
            );
        }
        tracing::debug!("prompts of q8_0 and q4_0 are multiplied by {:?}: {trial:?}", self.tiles);
        trial
    }

    fn trial(&mut self, buffers: &mut Vec<Buffer>) -> Result<Trial, OutOfMemory> {
        let rows = ROWS_OF_EACH * self.card.multiprocessors().unwrap_or(1);
        let mut prng = Prng::new(1);
        let mut random = |count: usize| (0..count).map(|_| prng.next_f64() as f32 - 0.5).collect::<Vec<f32>>();
        let mut some = vec![0; DIFFERENT * QUANT.row_bytes(COLS)];
        some.chunks_exact_mut(QUANT.row_bytes(COLS)).for_each(|row| rows::encode(QUANT, &random(COLS), row));
        let bytes: Vec<u8> = some.iter().copied().cycle().take(rows * QUANT.row_bytes(COLS)).collect();
        let x = random(COLUMNS * COLS);
        let mut taken = |bytes: usize| {
            let buffer = self.alloc(bytes as u64)?;
            buffers.push(buffer);
            Ok(buffer)
        };
        let [weights, input, bias] = [taken(bytes.len())?, taken(x.len() * 4)?, taken(0)?];
        // One for each way, so that one that writes nothing shows.
        let outs = [taken(COLUMNS * rows * 4)?, taken(COLUMNS * rows * 4)?];
        // SAFETY: waited for.
        unsafe {
            self.copy_in(Stream::Compute, bytes.as_ptr(), bytes.len(), weights, 0);
            self.copy_in(Stream::Compute, x.as_ptr().cast(), x.len() * 4, input, 0);
        }
        self.synchronize(Stream::Compute);
        let call = |out: Buffer| {
            let (cols, n, stride, then) = (COLS, COLUMNS, rows, Then::Store);
            Linear { quant: QUANT, rows, cols, n, weights, bias, x: input.into(), out: out.into(), stride, then }
        };
        self.prepare(&Call::Linear(call(outs[0])))?;
        let (lanes, by_lanes) = self.timed(call(outs[0]), Tiles::Lanes);
        let (tensor, by_tensor) = self.timed(call(outs[1]), Tiles::Exact);
        Ok(Trial { ns: [lanes, tensor], same: by_lanes == by_tensor })
    }

    /// The time of a product by these tiles, ns, and the product.
    fn timed(&mut self, call: Linear, tiles: Tiles) -> (u64, Vec<u32>) {
        self.use_tiles(tiles);
        let best = fastest_ns(self, &Call::Linear(call), PASSES);
        let out = call.out.buffer;
        let mut found = vec![0u32; out.bytes as usize / 4];
        // SAFETY: waited for.
        unsafe { self.copy_out(Stream::Compute, out, 0, found.as_mut_ptr().cast(), out.bytes as usize) };
        self.synchronize(Stream::Compute);
        (best, found)
    }
}
