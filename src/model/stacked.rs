//! Matrices with the same input, one below the other, such as those of queries, keys and values.

use super::matrix::Matrix;

/// One matrix in parts, each with a type of its own.
#[derive(Clone, Debug)]
pub struct Stacked {
    parts: Vec<Matrix>,
    /// For each row of the whole, its place in the parts; empty where they are the same. A GGUF has the rows of queries and keys in
    /// another order than the engine, which takes the products of a file that it reads in place through this list.
    order: Vec<u32>,
}

impl Stacked {
    /// The matrix of these parts.
    pub fn new(parts: Vec<Matrix>) -> Stacked {
        assert!(!parts.is_empty() && parts.iter().all(|part| part.cols == parts[0].cols));
        Stacked { parts, order: Vec::new() }
    }

    /// The same with its rows in another order: row `i` is row `order[i]` of the parts.
    pub fn in_order(self, order: Vec<u32>) -> Stacked {
        assert_eq!(order.len(), self.rows());
        Stacked { order, ..self }
    }

    /// The parts, first to last.
    pub fn parts(&self) -> &[Matrix] {
        &self.parts
    }

    /// The parts, to be changed for the same ones in another memory.
    pub fn parts_mut(&mut self) -> &mut [Matrix] {
        &mut self.parts
    }

    /// The one part that the whole consists of, in its own order; `None` if there are several.
    pub fn single(&self) -> Option<&Matrix> {
        (self.parts.len() == 1 && self.order.is_empty()).then(|| &self.parts[0])
    }

    /// Rows of all parts.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Numbers of a row.
    pub fn cols(&self) -> usize {
        self.parts[0].cols
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(Matrix::bytes).sum()
    }

    /// The place in the parts, counted over all of them, of row `row` of the whole.
    pub fn place(&self, row: usize) -> usize {
        self.order.get(row).map_or(row, |&place| place as usize)
    }

    /// Whether products come in another order than the engine's.
    pub fn is_in_order(&self) -> bool {
        self.order.is_empty()
    }

    /// Brings the products of one input, `[rows]`, from the order of the parts, `from`, into that of the whole.
    pub fn put_in_order(&self, from: &[f32], to: &mut [f32]) {
        to.iter_mut().zip(&self.order).for_each(|(to, &at)| *to = from[at as usize]);
    }
}
