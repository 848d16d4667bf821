//! A matrix in memory that it does not own.

use crate::formats::rows::{self, Quant, Rows};

/// A matrix whose rows lie one after the other in memory that it does not own, usually a mapped store.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// How its numbers are stored.
    pub quant: Quant,
    /// How many rows it has.
    pub rows: usize,
    /// Numbers of a row.
    pub cols: usize,
    /// Bytes from one row to the next.
    pub row_bytes: usize,
    start: *const u8,
}

// SAFETY: it points at bytes that are never written and that outlive it: the map that its `Model` keeps open, or what
// the caller of `Matrix::over` promised.
unsafe impl Send for Matrix {}
unsafe impl Sync for Matrix {}

impl Matrix {
    /// The matrix of `rows` rows of `cols` numbers whose first byte is that of `bytes`.
    ///
    /// # Safety
    /// `bytes` begins at a multiple of [`rows::ROW_ALIGN`] and outlives the matrix.
    pub unsafe fn over(bytes: &[u8], quant: Quant, rows: usize, cols: usize) -> Matrix {
        let row_bytes = quant.row_bytes(cols);
        assert!(bytes.len() >= rows * row_bytes);
        debug_assert!(rows == 0 || bytes.as_ptr().addr().is_multiple_of(rows::ROW_ALIGN));
        Matrix { quant, rows, cols, row_bytes, start: bytes.as_ptr() }
    }

    /// The matrix of `rows` rows of `cols` numbers that lie without padding from the first of `bytes` on, at any address.
    ///
    /// # Safety
    /// `bytes` outlives the matrix.
    pub unsafe fn unpadded(bytes: &[u8], quant: Quant, rows: usize, cols: usize) -> Matrix {
        let row_bytes = quant.number_bytes(cols);
        assert!(bytes.len() >= rows * row_bytes);
        Matrix { quant, rows, cols, row_bytes, start: bytes.as_ptr() }
    }

    /// The same matrix in another memory, from `at` on.
    ///
    /// # Safety
    /// The bytes there outlive what is read of it.
    pub unsafe fn placed(self, at: *const u8) -> Matrix {
        Matrix { start: at, ..self }
    }

    /// The first byte of row `r`.
    #[inline]
    pub fn row_ptr(&self, r: usize) -> *const u8 {
        debug_assert!(r < self.rows);
        self.start.wrapping_add(r * self.row_bytes)
    }

    /// The rows from row `r` on.
    #[inline]
    pub fn rows_from(&self, r: usize) -> Rows {
        Rows { first: self.row_ptr(r), stride: self.row_bytes, ahead: self.quant.ahead(self.row_bytes) }
    }

    /// The bytes of row `r`, padding included, `[row_bytes]`.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&self, r: usize) -> &[u8] {
        assert!(r < self.rows);
        // SAFETY: the section was checked to hold rows * row_bytes bytes.
        unsafe { std::slice::from_raw_parts(self.row_ptr(r), self.row_bytes) }
    }

    /// Bytes of the matrix with its rows as a device has them: padded, as a file that is read in place has them not.
    pub fn padded_bytes(&self) -> u64 {
        (self.rows * self.quant.row_bytes(self.cols)) as u64
    }

    /// The bytes of all rows.
    pub fn all(&self) -> &[u8] {
        // SAFETY: the section was checked to hold rows * row_bytes bytes.
        unsafe { std::slice::from_raw_parts(self.start, self.rows * self.row_bytes) }
    }

    /// Bytes of all rows, padding included.
    pub fn bytes(&self) -> u64 {
        (self.rows * self.row_bytes) as u64
    }
}
