use super::progress::{Progress, Unit};
use crate::config;
use crate::error::{Error, Result, human_bytes, printable};
use crate::hub::fetch::{Hub, HubFile, Listing};
use crate::hub::{Cache, Name};
use crate::interrupt;
use crate::open::model::free_bytes;
use std::path::Path;

/// Fetch a model from the Hugging Face hub
///
/// NAME is OWNER/MODEL, or OWNER/MODEL:FILE for one GGUF of several, where FILE may be a part of the file's name (Q4_0), or the address of
/// the model's page or file. Without FILE, the GGUF of the most common type (Q4_K_M) is fetched. A GGUF in parts is fetched whole. Every
/// verb then accepts NAME as its MODEL. The files are stored where the hub's own tools keep theirs ($HF_HOME/hub, else
/// ~/.cache/huggingface/hub); existing files are not fetched again. Their checksums are compared with the hub's. After an interruption the
/// same command resumes. No other verb of this program connects to another machine.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// OWNER/MODEL, OWNER/MODEL:FILE, or an address at huggingface.co
    name: String,
}

const EXAMPLES: &str = "Examples:
  dynamicinfer pull OWNER/MODEL                     safetensors with their \
     configuration, or a GGUF
  dynamicinfer pull OWNER/MODEL-GGUF:Q4_0           one GGUF of several
  \
     dynamicinfer run OWNER/MODEL-GGUF:Q4_0 \"Once\"     the same name runs it

Environment: HF_ENDPOINT (another \
     hub, or a mirror), HF_HOME, HF_HUB_CACHE, HF_TOKEN (for gated models),
HF_HUB_OFFLINE=1 (refuse to fetch).";

pub fn run(args: Args) -> Result<()> {
    let name = Name::parse(&args.name).ok_or_else(|| {
        Error::Usage(format!(
            "'{}' is not a name on the hub: give OWNER/MODEL, OWNER/MODEL:FILE for one GGUF of several, or the \
             address of its page or of a file of its branch main",
            printable(&args.name)
        ))
    })?;
    let settings = config::hub();
    if settings.offline {
        return Err(Error::Failed(
            "HF_HUB_OFFLINE is set, which forbids fetching: unset it, or fetch the files elsewhere and give their \
             directory or .gguf as MODEL (docs/start.md)"
                .into(),
        ));
    }
    let cache = Cache(
        settings
            .cache
            .ok_or_else(|| Error::Usage("no directory to fetch into: set HOME, HF_HOME or HF_HUB_CACHE".into()))?,
    );
    let hub = Hub::new(&settings.endpoint, cache.clone(), settings.token);
    // A blocking wait cannot be stopped: the first Ctrl-C ends the program, and the fetched part is on disk.
    let listing = interrupt::at_prompt(|| (), || hub.list(&name))??;
    announce(&hub, &name, &listing, &cache.0)?;
    for file in &listing.files {
        pull(&hub, &name, &listing, file)?;
    }
    hub.finish(&name, &listing)?;
    let path = cache.find(&name)?.unwrap_or_else(|| cache.folder(&name));
    eprintln!("{name} is complete; every verb accepts it as MODEL: dynamicinfer run {name} \"Once upon a time\"");
    super::print(&format!("{}\n", path.display()))
}

/// Announces the size and the folder, and fails if the disk has no room.
fn announce(hub: &Hub, name: &Name, listing: &Listing, cache: &Path) -> Result<()> {
    let all: u64 = listing.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    let here: u64 = listing.files.iter().map(|file| hub.here(name, file)).fold(0, u64::saturating_add);
    let there = cache.ancestors().find(|dir| dir.exists()).unwrap_or(cache);
    let free = free_bytes(there).unwrap_or(u64::MAX);
    let missing = all - here;
    eprintln!(
        "{name}: {} files, {}; {} to fetch into {}, {} free",
        listing.files.len(),
        human_bytes(all),
        human_bytes(missing),
        cache.display(),
        human_bytes(free)
    );
    if free < missing {
        return Err(Error::Failed(format!(
            "{} has {} free and {} are missing; free some space, or set HF_HOME to a larger disk",
            cache.display(),
            human_bytes(free),
            human_bytes(missing)
        )));
    }
    Ok(())
}

/// Fetches and checks one file. A file that already exists is checked, too: another program may have fetched it without.
fn pull(hub: &Hub, name: &Name, listing: &Listing, file: &HubFile) -> Result<()> {
    let shown = printable(&file.name);
    let progress = Progress::new(format!("fetching {shown}"), Unit::Bytes);
    let note = || super::say(format_args!("\nstopped; the fetched part is kept, and the same command resumes"));
    let held = interrupt::at_prompt(note, || hub.fetch(name, listing, file, &|done, all| progress.step(done, all)))??;
    progress.finish();
    let progress = Progress::new(format!("checking {shown}"), Unit::Bytes);
    hub.keep(name, listing, file, &held, &|done, all| progress.step(done, all))?;
    progress.finish();
    Ok(())
}
