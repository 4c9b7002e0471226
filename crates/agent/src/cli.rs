//! The command line, read by hand: a parser would be a tenth of the binary.

use crate::boot::spool::{StageName, Word};

pub const USAGE: &str = "\
usage: nstance-agent [--debug|-v] [COMMAND]

  run                                      run until told to stop (also without a command)
  check                                    say whether this machine could join; exit 0 or 1
  status [-o json]                         what the running agent is doing
  stage NAME [--detail TEXT] [--failed]    begin a stage of the boot, or say that it failed
  fail TEXT                                the boot has failed, and why
  ready                                    the boot is finished
  unit                                     print the systemd unit

  --debug, -v    log more
  --version      print version, commit and build date
  --help, -h     print this

Settings come from the environment, NSTANCE_INSTANCE_ID and others.
";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Run { debug: bool },
    Check,
    Status { json: bool },
    Say(Word),
    Unit,
    Version,
    Help,
}

/// Reads the arguments, without the program's name. What cannot be read is named.
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Command, String> {
    let mut debug = false;
    let mut words = Vec::new();
    let mut arguments = arguments.into_iter();
    // What comes after a command is that command's; a text may begin with a dash.
    for argument in arguments.by_ref() {
        match argument.as_str() {
            "--debug" | "-v" => debug = true,
            "--version" => return Ok(Command::Version),
            "--help" | "-h" | "help" => return Ok(Command::Help),
            other if other.starts_with('-') => return Err(format!("unknown option `{other}`")),
            _ => {
                words.push(argument);
                break;
            }
        }
    }
    words.extend(arguments);
    let Some((name, rest)) = words.split_first() else { return Ok(Command::Run { debug }) };
    match name.as_str() {
        "fail" => match rest.join(" ").trim() {
            // Who asks for help does not want a boot to fail.
            "--help" | "-h" => Ok(Command::Help),
            "" => Err("fail: say why, in a TEXT".to_owned()),
            text => Ok(Command::Say(Word::Fail(text.to_owned()))),
        },
        "stage" => stage(rest),
        "status" => status(rest),
        _ if rest.iter().any(|it| it == "--help" || it == "-h") => Ok(Command::Help),
        "run" => {
            let more_debug = rest.iter().all(|it| it == "--debug" || it == "-v");
            if more_debug { Ok(Command::Run { debug: debug || !rest.is_empty() }) } else { Err(excess("run", rest)) }
        }
        "check" if rest.is_empty() => Ok(Command::Check),
        "ready" if rest.is_empty() => Ok(Command::Say(Word::Ready)),
        "unit" if rest.is_empty() => Ok(Command::Unit),
        "check" | "ready" | "unit" => Err(excess(name, rest)),
        _ => Err(format!("unknown command `{name}`")),
    }
}

fn excess(command: &str, rest: &[String]) -> String {
    format!("{command}: `{}` is too much", rest.join(" "))
}

fn stage(rest: &[String]) -> Result<Command, String> {
    let (mut name, mut detail, mut failed) = (None, None, false);
    let mut rest = rest.iter();
    while let Some(argument) = rest.next() {
        if argument == "--failed" {
            failed = true;
        } else if argument == "--detail" {
            detail = Some(rest.next().ok_or("stage: --detail needs a TEXT")?.clone());
        } else if let Some(text) = argument.strip_prefix("--detail=") {
            detail = Some(text.to_owned());
        } else if argument == "--help" || argument == "-h" {
            return Ok(Command::Help);
        } else if argument.starts_with('-') || name.is_some() {
            return Err(format!("stage: `{argument}` is neither --detail nor --failed"));
        } else {
            let rule = "use 1 to 64 letters, digits, `.`, `_` and `-`";
            name = Some(StageName::parse(argument).ok_or_else(|| format!("stage: `{argument}` is no NAME: {rule}"))?);
        }
    }
    let name = name.ok_or("stage: a NAME is missing")?;
    Ok(Command::Say(Word::Stage { name, detail: detail.unwrap_or_default(), failed }))
}

fn status(rest: &[String]) -> Result<Command, String> {
    let words: Vec<_> = rest.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => Ok(Command::Status { json: false }),
        ["-o", "json"] | ["-ojson" | "-o=json" | "--output=json"] | ["--output", "json"] => {
            Ok(Command::Status { json: true })
        }
        ["-h" | "--help"] => Ok(Command::Help),
        _ => Err(format!("status: `{}` is not `-o json`", rest.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &[&str]) -> Result<Command, String> {
        parse(line.iter().map(|it| (*it).to_owned()))
    }

    fn stage(detail: &str, failed: bool) -> Command {
        Command::Say(Word::Stage { name: StageName::parse("apt").unwrap(), detail: detail.into(), failed })
    }

    #[test]
    fn every_command_is_read() {
        for (line, expected) in [
            (&[][..], Command::Run { debug: false }),
            (&["run"], Command::Run { debug: false }),
            (&["-v"], Command::Run { debug: true }),
            (&["run", "--debug"], Command::Run { debug: true }),
            (&["--version"], Command::Version),
            (&["-h"], Command::Help),
            (&["check"], Command::Check),
            (&["unit"], Command::Unit),
            (&["ready"], Command::Say(Word::Ready)),
            (&["fail", "no", "disk"], Command::Say(Word::Fail("no disk".into()))),
            (&["fail", "--failed"], Command::Say(Word::Fail("--failed".into()))),
            (&["fail", "--help"], Command::Help),
            (&["fail", "apt --help"], Command::Say(Word::Fail("apt --help".into()))),
            (&["stage", "apt"], stage("", false)),
            (&["stage", "apt", "--detail", "-x y", "--failed"], stage("-x y", true)),
            (&["stage", "--detail=z", "apt"], stage("z", false)),
            (&["status"], Command::Status { json: false }),
            (&["status", "-o", "json"], Command::Status { json: true }),
        ] {
            assert_eq!(read(line), Ok(expected), "{line:?}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (line, named) in [
            (&["dance"][..], "`dance`"),
            (&["--fast"], "`--fast`"),
            (&["run", "check"], "`check`"),
            (&["unit", "x"], "`x`"),
            (&["fail"], "TEXT"),
            (&["stage"], "NAME"),
            (&["stage", "a b"], "`a b`"),
            (&["stage", "a", "b"], "`b`"),
            (&["stage", "a", "--detail"], "--detail"),
            (&["status", "-o", "yaml"], "`-o yaml`"),
        ] {
            let problem = read(line).unwrap_err();
            assert!(problem.contains(named), "{line:?}: {problem}");
        }
    }
}
