mod carried;

use std::process::ExitCode;

fn main() -> ExitCode {
    carried::hand_over();
    dynamicinfer::lab_cli::main()
}
