use crate::error::{Result, printable};
use crate::formats::neuron_store::NeuronStore;
use comfy_table::Table;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// List the models that are packed on this machine
#[derive(clap::Args)]
pub struct Args {
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Entry {
    name: String,
    quant: &'static str,
    bytes: u64,
    /// As text; bytes that are none are replaced.
    path: String,
    /// What is wrong with it, if it cannot be used.
    error: Option<String>,
}

pub fn run(args: Args) -> Result<()> {
    let dir = crate::config::cache_dir().map(|dir| dir.join("models"));
    let files = dir.iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten().flatten()).map(|e| e.path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == "neurons")).collect();
    files.sort();
    let entries: Vec<Entry> = files.iter().map(|path| entry(path)).collect();
    if args.json {
        return super::print_json(&entries);
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["NAME", "TYPE", "SIZE", "PATH"]);
    for e in entries {
        let name = e.error.map_or(e.name, |error| format!("unusable: {error}"));
        let path = printable(&e.path);
        table.add_row([printable(&name), e.quant.to_owned(), super::human_bytes(e.bytes), path]);
    }
    super::print(&(table.to_string() + "\ndemo and demo-silu come with the program.\n"))
}

fn entry(path: &Path) -> Entry {
    let bytes = std::fs::metadata(path).map_or(0, |meta| meta.len());
    let (opened, path) = (NeuronStore::open(path), path.to_string_lossy().into_owned());
    match opened {
        Ok(store) => {
            let name = store.header.config["name"].as_str().unwrap_or_default().to_owned();
            let quant = store.header.quant.name();
            Entry { name, quant, bytes, path, error: None }
        }
        Err(error) => Entry { name: String::new(), quant: "", bytes, path, error: Some(error.to_string()) },
    }
}
