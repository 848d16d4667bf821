use crate::error::{Result, printable};
use crate::open::offered::{self, Offered};
use crate::open::stores::{self, Stored};
use comfy_table::Table;
use serde::Serialize;

/// List the models of this machine: packed and fetched ones
///
/// Every verb accepts a listed name as MODEL. Packed copies that are unusable or whose source no longer exists are marked;
/// `rm --unused` removes them.
#[derive(clap::Args)]
pub struct Args {
    /// Machine-readable
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Entry {
    /// What MODEL may be to mean it.
    name: String,
    /// `packed`, or `fetched` from the hub.
    kind: &'static str,
    quant: &'static str,
    bytes: u64,
    /// As text; bytes that are none are replaced.
    path: String,
    /// What it was packed from, if that is known.
    source: Option<String>,
    /// Whether that is still there.
    source_exists: Option<bool>,
    /// What is wrong with it, if it cannot be used.
    error: Option<String>,
}

pub fn run(args: Args) -> Result<()> {
    let (stored, fetched) = (stores::all(), offered::fetched());
    if args.json {
        let all = stored.into_iter().map(packed).chain(fetched.into_iter().map(of_hub));
        return super::print_json(&all.collect::<Vec<_>>());
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["NAME", "TYPE", "SIZE", "PACKED FROM, OR FETCHED"]);
    for one in &stored {
        let from = one.source.as_ref().map_or("-".into(), |source| printable(&source.to_string_lossy()));
        let from = match &one.error {
            Some(error) => format!("unusable: {}", printable(error)),
            None if one.is_orphan() => format!("gone: {from}"),
            None => from,
        };
        let quant = one.quant.map_or("", |quant| quant.name());
        table.add_row([printable(&one.label), quant.to_owned(), super::human_bytes(one.bytes), from]);
    }
    for one in &fetched {
        table.add_row([printable(&one.name), String::new(), super::human_bytes(one.bytes), "fetched".to_owned()]);
    }
    let unused = match stored.iter().filter(|one| one.is_unused()).count() {
        0 => String::new(),
        n => format!("{n} can be removed: dynamicinfer rm --unused\n"),
    };
    super::print(&format!(
        "{table}\n{unused}demo is built in; a checkout also has demo-silu and demo-moe (a mixture of experts).\n"
    ))
}

fn of_hub(one: Offered) -> Entry {
    let path = one.path.to_string_lossy().into_owned();
    Entry {
        name: one.name,
        kind: "fetched",
        quant: "",
        bytes: one.bytes,
        path,
        source: None,
        source_exists: None,
        error: None,
    }
}

fn packed(one: Stored) -> Entry {
    let source_exists = one.source.as_ref().map(|source| source.exists());
    Entry {
        kind: "packed",
        quant: one.quant.map_or("", |quant| quant.name()),
        bytes: one.bytes,
        path: one.path.to_string_lossy().into_owned(),
        source: one.source.map(|source| source.to_string_lossy().into_owned()),
        source_exists,
        error: one.error,
        name: one.label,
    }
}
