use crate::config;
use crate::error::{Error, Result, printable};
use crate::hub::{Cache, Fetched, Name};
use crate::open::stores::{self, Stored};
use std::path::{Path, PathBuf};

/// Remove packed copies and fetched models
///
/// Of a packed copy the source files stay, and the next use packs the model again. A fetched model is removed with the copies that were packed
/// from it. A daemon that runs a removed model is not affected.
#[derive(clap::Args)]
pub struct Args {
    /// Names that `ls` lists, or what a copy was packed from
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
    let cache = config::hub().cache.map(Cache);
    let fetched = fetched(cache.as_ref(), &args.models)?;
    let chosen = if args.unused { unused() } else { chosen(&args.models, &fetched)? };
    if chosen.is_empty() && fetched.is_empty() {
        eprintln!("nothing to remove: every packed model is usable and its source exists");
    }
    let what = if args.dry_run { "would remove" } else { "removed" };
    for one in chosen {
        if !args.dry_run {
            one.remove()?;
        }
        let path = printable(&one.path.to_string_lossy());
        eprintln!("{what} {}, {}: {path}", printable(&one.label), super::human_bytes(one.bytes));
    }
    for one in &fetched {
        if let Some(cache) = cache.as_ref().filter(|_| !args.dry_run) {
            cache.remove(one)?;
        }
        eprintln!("{what} {}, {}: {}", one.name, super::human_bytes(one.bytes), printable(&one.path.to_string_lossy()));
    }
    Ok(())
}

/// The fetched models that the arguments name as `ls` does, or as `pull` takes them.
fn fetched(cache: Option<&Cache>, models: &[PathBuf]) -> Result<Vec<Fetched>> {
    let (Some(cache), mut found) = (cache, Vec::new()) else { return Ok(Vec::new()) };
    let all = cache.all();
    for model in models.iter().filter(|model| !model.exists()) {
        let Some(name) = Name::parse(&model.to_string_lossy()) else { continue };
        let path = cache.find(&name)?;
        found.extend(all.iter().filter(|one| Some(&one.path) == path.as_ref()).cloned());
    }
    Ok(found)
}

fn unused() -> Vec<Stored> {
    stores::all().into_iter().filter(Stored::is_unused).collect()
}

/// The copies that the arguments name, each found before the first is removed.
fn chosen(models: &[PathBuf], fetched: &[Fetched]) -> Result<Vec<Stored>> {
    let mut chosen: Vec<Stored> = Vec::new();
    for model in models {
        // A fetched model may have no copy.
        let is_fetched = crate::open::model::find(model).is_ok_and(|path| fetched.iter().any(|one| one.path == path));
        for one in copies(model, is_fetched)? {
            if chosen.iter().all(|other| other.path != one.path) {
                chosen.push(one);
            }
        }
    }
    Ok(chosen)
}

/// The copy that has this name, else those that were packed from this path; where none need be, there may be none.
fn copies(model: &Path, may_be_none: bool) -> Result<Vec<Stored>> {
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
    if found.is_empty() && !may_be_none {
        let name = printable(&name);
        return Err(Error::Usage(format!(
            "no packed or fetched model is called '{name}'; `dynamicinfer ls` lists all"
        )));
    }
    Ok(found)
}
