//! The program, for the tests of this package.

fn main() -> std::process::ExitCode {
    dynamicinfer::lab_cli::main()
}
