//! Commands, flags and arguments of every program, with their values and variables. Their texts are free to change.

use clap::{ArgAction, Command, CommandFactory as _};

use super::hold;

/// A line for the command itself, one for each of its arguments, and those of its commands.
fn lines(command: &Command, above: &str, found: &mut Vec<String>) {
    let path = format!("{above}{}", command.get_name());
    found.push(path.clone());
    found.extend(command.get_all_aliases().map(|alias| format!("{path} alias {alias}")));
    for argument in command.get_arguments() {
        let mut names = Vec::new();
        names.extend(argument.get_short().map(|it| format!("-{it}")));
        names.extend(argument.get_long().map(|it| format!("--{it}")));
        names.extend(argument.get_all_aliases().unwrap_or_default().iter().map(|it| format!("--{it}")));
        let value = match argument.get_action() {
            ArgAction::Set | ArgAction::Append => {
                let values = argument.get_value_names().unwrap_or_default().iter().map(|it| format!("<{it}>"));
                values.collect::<Vec<_>>().join(" ")
            }
            _ => String::new(),
        };
        // A flag that gains a short name, a variable or a word loses nothing of what it had: a line for each.
        let name = match argument.get_long() {
            Some(long) => format!("--{long}"),
            None => names.first().cloned().unwrap_or_default(),
        };
        let mut here = vec![format!("{path} {name} {value}")];
        here.extend(names.iter().filter(|it| **it != name).map(|it| format!("{path} {name} also {it}")));
        here.extend(argument.get_env().map(|it| format!("{path} {name} env {}", it.display())));
        let words = argument.get_possible_values();
        let words = words.iter().filter(|_| argument.get_action().takes_values());
        here.extend(words.map(|it| format!("{path} {name} {value} word {}", it.get_name())));
        if argument.is_global_set() {
            here.push(format!("{path} {name} {value} at every command"));
        }
        if matches!(argument.get_action(), ArgAction::Append) {
            here.push(format!("{path} {name} {value} repeatable"));
        }
        found.extend(here.into_iter().map(|it| it.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
    for command in command.get_subcommands() {
        lines(command, &format!("{path} "), found);
    }
}

fn hold_flags(name: &str, command: Command) {
    let mut found = Vec::new();
    lines(&command, "", &mut found);
    hold(name, found);
}

#[test]
fn of_the_server() {
    hold_flags("flags-server", nstance_server::args::Args::command());
}

#[test]
fn of_the_admin_tool() {
    hold_flags("flags-admin", nstance_admin::cli::command());
}

#[test]
fn of_the_development_environment() {
    hold_flags("flags-dev", nstance_dev::cli::Cli::command());
}

#[test]
fn of_the_operator() {
    hold_flags("flags-operator", nstance_operator::args::Args::command());
}

/// Its usage is written by hand: two columns, of which the first is held.
#[test]
fn of_the_agent() {
    let usage = nstance_agent::cli::USAGE.lines();
    let synopses = usage.filter_map(|line| line.strip_prefix("  ")).filter_map(|line| line.split("   ").next());
    hold("flags-agent", synopses.map(|it| format!("nstance-agent {}", it.trim())));
}

/// The agent has no config file: these variables are its settings.
#[test]
fn variables_of_the_agent() {
    hold("variables-agent", variables());
}

/// Every variable that reading the settings asks for.
fn variables() -> Vec<String> {
    let asked = std::cell::RefCell::new(Vec::new());
    let _ = nstance_agent::settings::Settings::read(|name| {
        asked.borrow_mut().push(name.to_owned());
        None
    });
    asked.into_inner()
}
