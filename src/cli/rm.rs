use crate::error::{Error, Result, printable};
use crate::open::stores::{self, Stored};
use std::path::{Path, PathBuf};

/// Remove packed models from the cache
///
/// The source files stay, and the next use packs the model again. A daemon that runs a removed copy is not affected.
#[derive(clap::Args)]
pub struct Args {
    /// Names that `ls` lists, or what they were packed from
    #[arg(required_unless_present = "unused")]
    models: Vec<PathBuf>,
    /// Remove every copy that is unusable or whose source no longer exists
    #[arg(long, conflicts_with = "models")]
    unused: bool,
    /// Only list what would be removed
    #[arg(short = 'n', long)]
    dry_run: bool,
}

pub fn run(args: Args) -> Result<()> {
    let chosen = if args.unused { unused() } else { chosen(&args.models)? };
    if chosen.is_empty() {
        eprintln!("nothing to remove: every packed model is usable and its source exists");
    }
    for one in chosen {
        let what = if args.dry_run { "would remove" } else { "removed" };
        if !args.dry_run {
            one.remove()?;
        }
        let path = printable(&one.path.to_string_lossy());
        eprintln!("{what} {}, {}: {path}", printable(&one.label), super::human_bytes(one.bytes));
    }
    Ok(())
}

fn unused() -> Vec<Stored> {
    stores::all().into_iter().filter(Stored::is_unused).collect()
}

/// The copies that the arguments name, each found before the first is removed.
fn chosen(models: &[PathBuf]) -> Result<Vec<Stored>> {
    let mut chosen: Vec<Stored> = Vec::new();
    for model in models {
        for one in copies(model)? {
            if chosen.iter().all(|other| other.path != one.path) {
                chosen.push(one);
            }
        }
    }
    Ok(chosen)
}

/// The copy that has this name, else those that were packed from this path.
fn copies(model: &Path) -> Result<Vec<Stored>> {
    let name = model.to_string_lossy();
    if let Some(one) = stores::named(&name)? {
        return Ok(vec![one]);
    }
    let real =
        crate::open::model::find(model).and_then(|path| path.canonicalize().map_err(Error::io("resolve", model)));
    let found = match real {
        Ok(real) => {
            let is_it = |one: &Stored| one.path == real || one.source.as_ref() == Some(&real);
            stores::all().into_iter().filter(is_it).collect()
        }
        Err(_) => Vec::new(),
    };
    if found.is_empty() {
        let name = printable(&name);
        return Err(Error::Usage(format!("no packed model is called '{name}'; `dynamicinfer ls` lists all")));
    }
    Ok(found)
}
