use crate::error::{Error, Result};
use std::path::PathBuf;

/// Write the man pages, one for each verb
///
/// dynamicinfer man ~/.local/share/man/man1
#[derive(clap::Args)]
pub struct Args {
    /// Directory to write them to; it is created if missing
    dir: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    std::fs::create_dir_all(&args.dir).map_err(Error::io("create", &args.dir))?;
    clap_mangen::generate_to(super::help::for_man_pages(), &args.dir)
        .map_err(Error::io("write man pages to", &args.dir))
}
