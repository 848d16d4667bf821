//! The program itself, so that the tests here have it as it stands, built with them.

fn main() -> std::process::ExitCode {
    dynamicinfer::cli::main()
}
