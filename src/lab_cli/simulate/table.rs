//! The tables that `simulate` prints.

use crate::lab::simulate::Outcome;
use crate::scheduler::Policy;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde::Serialize;

/// One line of the result. All of it is simulated.
#[derive(Serialize)]
pub struct Row {
    pub vram_bytes: Option<u64>,
    /// `None` for whole layers on the device and every neuron computed, as llama.cpp does.
    pub policy: Option<Policy>,
    pub tokens_per_s: f64,
    pub outcome: Option<Outcome>,
    pub layers_on_device: Option<usize>,
}

/// Columns of a table at most, also where no terminal says how many there are: a narrow one's.
const COLUMNS: u16 = 80;

/// A table whose first column is words and whose others are numbers; what is too wide goes on in the cell's next line.
pub fn empty(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(COLUMNS);
    table.set_header(head.iter().copied());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
