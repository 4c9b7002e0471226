//! `command | head`: whoever reads our output may go away before we are done, and that is no fault of ours.

/// The exit code of a program that SIGPIPE ends, as a shell shows it.
const ENDED_BY_PIPE: i32 = 141;

/// Lets a print to a closed pipe end the process quietly instead of with a panic. Only for
/// commands that do nothing but print: one that is amid stopping things must go on. Other panics go their usual way.
pub fn end_quietly_when_closed() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or_default();
        if message.starts_with("failed printing to std") && message.contains("Broken pipe") {
            std::process::exit(ENDED_BY_PIPE);
        }
        usual(panic);
    }));
}
