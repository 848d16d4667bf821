//! Figures over a plane, as SVG: lines with bands of their spread, or points where x has names. They need nothing else to be shown, in
//! light and dark, on a page or as a file.

mod figures;
mod labels;
mod scale;
mod svg;

use crate::error::{Error, Result};
pub use figures::{Axis, Line, Plot, Point, Room};
use std::path::Path;
pub use svg::{escaped, svg};

/// Draws `plot` into a file.
pub fn write(path: &Path, plot: &Plot) -> Result<()> {
    std::fs::write(path, svg(plot, Room::Wide)).map_err(Error::io("write", path))
}
