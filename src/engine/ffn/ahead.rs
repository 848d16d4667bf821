//! Asking memory for the rows of listed neurons before they are read: they are short and lie apart, so that neither the processor nor one
//! row before it does so in time.

use crate::cpu::Kernels;
use crate::model::Matrix;

/// How many rows before it a row's lines are asked for (runs/2026-11-26-predictors-inside-experts).
const ROWS: usize = 2;

/// Bytes from the row of listed neuron `i` to the one that is to be asked for meanwhile; none behind the last.
pub(super) fn bytes(neurons: &[u32], i: usize, rows: &Matrix) -> usize {
    neurons.get(i + ROWS).map_or(0, |later| (later - neurons[i]) as usize * rows.row_bytes)
}

/// Prefetches the rows of the first neurons of a list, which the loop itself does not prefetch; the list counts from row `first` on.
pub(super) fn begin(kernels: &Kernels, rows: &Matrix, neurons: &[u32], first: usize) {
    if let [one, next, ..] = *neurons {
        let (row, distance) = (rows.row_ptr(first + one as usize), (next - one) as usize * rows.row_bytes);
        // SAFETY: the row is inside the matrix; the kernel is for this machine.
        unsafe { (kernels.touch)(row, rows.row_bytes, distance) };
    }
}
