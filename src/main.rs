use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else: the child that renders a chat template has little memory and no business elsewhere.
    if std::env::args_os().nth(1).is_some_and(|a| a == dynamicinfer::tokenizer::chat_template::CHILD_ARGUMENT) {
        return dynamicinfer::tokenizer::chat_template::child_main();
    }
    ExitCode::SUCCESS
}
