use std::process::ExitCode;

fn main() -> ExitCode {
    dynamicinfer::cli::main()
}
