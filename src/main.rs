#[path = "bin/carried/mod.rs"]
mod carried;

use std::process::ExitCode;

fn main() -> ExitCode {
    carried::hand_over();
    dynamicinfer::cli::main()
}
