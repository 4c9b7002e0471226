//! `man`: manual pages, made from the commands themselves.

use std::{fmt::Write as _, fs, path::PathBuf};

use clap::{Arg, Args, Command};

use crate::{cli, defaults, exit::Exit, failure::Failure, output::print};

#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write one page per command into this directory instead of printing
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Whose page is printed, as in `group scale` [default: nstance-admin itself]
    #[arg(conflicts_with = "dir")]
    words: Vec<String>,
}

pub(super) fn run(args: &ManArgs) -> Result<Exit, Failure> {
    let mut root = cli::command();
    root.build();
    let mut pages = Vec::new();
    collect(&root, "nstance-admin", &mut pages);
    match &args.dir {
        None => {
            let wanted = [&["nstance-admin".to_owned()], args.words.as_slice()].concat().join("-");
            let Some((_, page)) = pages.iter().find(|(name, _)| *name == wanted) else {
                let known: Vec<String> =
                    pages.iter().skip(1).map(|(name, _)| name.replace("nstance-admin-", "")).collect();
                return Err(Failure::usage(format!("there is no command `{}`", args.words.join(" ")))
                    .next(format!("one of: {}", known.join(", "))));
            };
            print(page);
        }
        Some(dir) => {
            let failed =
                |path: &std::path::Path, error| Failure::failed(format!("write {}", path.display())).because(error);
            fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
            for (name, page) in &pages {
                let path = dir.join(format!("{name}.1"));
                fs::write(&path, page).map_err(|error| failed(&path, error))?;
            }
            eprintln!("{} pages in {}", pages.len(), dir.display());
        }
    }
    Ok(Exit::Done)
}

fn collect(command: &Command, name: &str, pages: &mut Vec<(String, String)>) {
    pages.push((name.to_owned(), page(command, name)));
    for sub in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        collect(sub, &format!("{name}-{}", sub.get_name()), pages);
    }
}

/// One page in the `man` macros.
fn page(command: &Command, name: &str) -> String {
    let words = name.replacen("nstance-admin-", "nstance-admin ", 1).replace('-', " ").replacen(
        "nstance admin",
        "nstance-admin",
        1,
    );
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut page = String::new();
    let _ = writeln!(
        page,
        ".TH {} 1 \"\" \"nstance-admin {}\" \"Nstance\"",
        name.to_uppercase(),
        env!("CARGO_PKG_VERSION")
    );
    let _ = writeln!(page, ".SH NAME\n{} \\- {}", roff(name), roff(&about));
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ = writeln!(page, ".SH SYNOPSIS\n.nf\n{}\n.fi", roff(usage));
    if let Some(long) = command.get_long_about() {
        let _ = writeln!(page, ".SH DESCRIPTION\n{}", roff(&long.to_string()));
    }
    section(&mut page, "ARGUMENTS", command.get_positionals());
    section(&mut page, "OPTIONS", command.get_opts().chain(command.get_arguments().filter(|it| is_switch(it))));
    let subs: Vec<&Command> = command.get_subcommands().filter(|it| !it.is_hide_set()).collect();
    if !subs.is_empty() {
        page.push_str(".SH COMMANDS\n");
        for sub in subs {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(page, ".TP\n.BR {} (1)\n{}", roff(&format!("{name}-{}", sub.get_name())), roff(&about));
        }
    }
    page.push_str(".SH ENVIRONMENT\nEvery option may be given as a variable: ");
    let example = command.get_opts().find_map(Arg::get_long).unwrap_or("temp-dir");
    let _ = writeln!(
        page,
        "\\-\\-{} as {}. It beats admin.yaml and is beaten by the command line.",
        roff(example),
        defaults::variable(example)
    );
    let _ = writeln!(page, ".SH EXIT STATUS\n{EXITS}");
    if words != "nstance-admin" {
        page.push_str(".SH SEE ALSO\n.BR nstance-admin (1)\n");
    }
    page
}

const EXITS: &str = "0 done, 1 failed, 2 there are changes (plan, config diff), 3 only some shards did it, 4 timed out while the \
work goes on, 5 not found, 6 not allowed, 64 wrong usage, 130 interrupted.";

fn is_switch(arg: &Arg) -> bool {
    !arg.is_positional() && !arg.get_action().takes_values()
}

fn section<'a>(page: &mut String, title: &str, args: impl Iterator<Item = &'a Arg>) {
    let args: Vec<&Arg> = args.filter(|it| !it.is_hide_set()).collect();
    if args.is_empty() {
        return;
    }
    let _ = writeln!(page, ".SH {title}");
    for arg in args {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(page, ".TP\n.B {}\n{}", roff(&arg.to_string()), roff(&help));
        let values: Vec<String> = arg.get_possible_values().iter().map(|it| it.get_name().to_owned()).collect();
        if !values.is_empty() && arg.get_action().takes_values() {
            let _ = writeln!(page, "One of: {}.", roff(&values.join(", ")));
        }
        let defaults: Vec<String> =
            arg.get_default_values().iter().map(|it| it.to_string_lossy().into_owned()).collect();
        if !defaults.is_empty() && arg.get_action().takes_values() {
            let _ = writeln!(page, "Default: {}.", roff(&defaults.join(", ")));
        }
    }
}

/// No line is taken for a request, no dash for a hyphen.
fn roff(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    let lines =
        escaped.lines().map(|line| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_that_names_its_flags() {
        let mut root = cli::command();
        root.build();
        let mut pages = Vec::new();
        collect(&root, "nstance-admin", &mut pages);
        let shards =
            pages.iter().find(|(name, _)| name == "nstance-admin-shards").map(|(_, page)| page.as_str()).unwrap();
        for part in [".TH NSTANCE-ADMIN-SHARDS 1", "\\-\\-servers", "\\-\\-all\\-shards", ".SH SYNOPSIS", "NSTANCE_"] {
            assert!(shards.contains(part), "{part} is missing:\n{shards}");
        }
        assert!(pages[0].1.contains("nstance\\-admin\\-shards (1)"), "{}", pages[0].1);
    }

    #[test]
    fn lines_are_no_requests() {
        assert_eq!(roff(".x\na-b\\c"), "\\&.x\na\\-b\\ec");
    }
}
