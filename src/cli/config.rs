use super::loader_arg::LoaderArgs;
use super::settings_arg;
use crate::error::Result;
use clap::Subcommand;
use comfy_table::Table;
use serde_json::json;
use std::path::PathBuf;

/// Show the settings, and the origin of each
///
/// Flags override the environment (DYNAMICINFER_SERVE_QUEUE=8), which overrides ~/.config/dynamicinfer/config.toml, which overrides
/// /etc/dynamicinfer/config.toml, which overrides the defaults.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Show every setting with its current value
    Show {
        /// Show the origin of each value
        #[arg(long)]
        origin: bool,
        #[arg(long)]
        json: bool,
        /// Settings file to read besides the user's and the system's
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Print a settings file with every key, its meaning and its default
    Default,
}

pub fn run(args: Args) -> Result<()> {
    match args.what {
        What::Default => super::print(&crate::settings::default_file()),
        What::Show { origin, json, config } => {
            let settings = settings_arg::read(config.as_deref())?;
            // A word that only a model's opening would refuse.
            LoaderArgs::default().options("demo", &settings, false)?;
            if json {
                let row = |(key, value, origin): (&crate::settings::Key, String, &crate::settings::Origin)| json!({"key": key.name, "value": value, "origin": origin.to_string(), "about": key.about});
                return super::print_json(&settings.all().map(row).collect::<Vec<_>>());
            }
            let mut table = Table::new();
            table.load_style(comfy_table::presets::NOTHING);
            for (key, value, from) in settings.all() {
                let last = if origin { from.to_string() } else { key.about.to_owned() };
                table.add_row([key.name.to_owned(), value, last]);
            }
            super::print(&(table.to_string() + "\n"))
        }
    }
}
