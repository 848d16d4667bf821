use super::help::for_man_pages;
use crate::error::{Error, Result};
use clap::Command;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Print a shell completion script, or write the man pages
///
/// bash: dynamicinfer completions bash > ~/.local/share/bash-completion/completions/dynamicinfer
///
/// man pages: dynamicinfer completions man ~/.local/share/man/man1
#[derive(clap::Args)]
pub struct Args {
    #[arg(value_name = "SHELL|man")]
    of: Of,
    /// Directory to write man pages to, one for each verb; it is created if missing
    #[arg(required_if_eq("of", "man"))]
    dir: Option<PathBuf>,
}

#[derive(clap::ValueEnum, Clone, Copy)]
enum Of {
    Bash,
    Elvish,
    Fish,
    Powershell,
    Zsh,
    Man,
}

/// Completes or documents a program with this command line and these examples.
pub fn run(args: Args, command: Command, examples: &'static str) -> Result<()> {
    let shell = match args.of {
        Of::Bash => Shell::Bash,
        Of::Elvish => Shell::Elvish,
        Of::Fish => Shell::Fish,
        Of::Powershell => Shell::PowerShell,
        Of::Zsh => Shell::Zsh,
        Of::Man => return pages(for_man_pages(command, examples), &args.dir.expect("clap asks for it")),
    };
    match args.dir {
        Some(dir) => {
            Err(Error::Usage(format!("{}: a script goes to stdout; a directory is for man pages", dir.display())))
        }
        None => script(command, shell),
    }
}

fn script(mut command: Command, shell: Shell) -> Result<()> {
    let mut script = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    let script = String::from_utf8(script).map_err(|e| Error::Failed(format!("the script is not text: {e}")))?;
    super::print(&script)
}

fn pages(command: Command, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    clap_mangen::generate_to(command, dir).map_err(Error::io("write man pages to", dir))
}
