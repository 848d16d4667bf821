use crate::error::{Error, Result};
use clap_complete::Shell;

/// Print a completion script for your shell
///
/// bash: dynamicinfer completions bash > ~/.local/share/bash-completion/completions/dynamicinfer
#[derive(clap::Args)]
pub struct Args {
    shell: Shell,
}

pub fn run(args: Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::help::command(), "dynamicinfer", &mut script);
    let script = String::from_utf8(script).map_err(|e| Error::Failed(format!("the script is not text: {e}")))?;
    super::print(&script)
}
