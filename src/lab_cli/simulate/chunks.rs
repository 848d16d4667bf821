//! The table of `simulate --chunks`.

use crate::error::Result;
use crate::lab::simulate::chunks::{ORDERS, table};
use comfy_table::Table;

/// Prints it.
pub fn print(json: bool) -> Result<()> {
    let rows = table();
    if json {
        return crate::cli::print_json(&rows);
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["prompt", "chunk", "in order", "earliest chunk", "largest C", "saved"]);
    for row in rows {
        let cell = |i: usize| format!("{:.0} ms, {:.0} % idle", row.ms[i], 100.0 * row.idle[i]);
        let saved = format!("{:.0} %", 100.0 * (1.0 - row.ms[ORDERS.len() - 1] / row.ms[0]));
        table.add_row([row.prompt.to_string(), row.chunk.to_string(), cell(0), cell(1), cell(2), saved]);
    }
    crate::cli::print(&format!("{table}\nsimulated, from assumed rates; idle is the integer unit\n"))
}
