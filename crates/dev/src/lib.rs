//! The development environment: the whole of Nstance on one machine, and what its tests stand on.
//!
//! `nstance-dev up` is a supervisor of real processes: an object store (this program again, as `nstance-dev s3`),
//! servers, and, through the servers, agents. Everything it knows is in files below one directory, so every other command
//! works beside it, and after it.

/// Prints a line for whoever still reads: what is done does not depend on it.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

pub mod cli;

pub mod layout;

mod shape;

mod records;

mod render;

mod ports;

mod http;

mod component;

mod link;

mod faults;

mod roles;

mod steps;

mod stored;

mod identity;

mod api;

mod feed;

mod objects;

mod kubernetes;

mod status;

mod table;

mod screen;

mod operator;

mod server;

mod up;

mod detach;

mod stop;

mod logs;

mod target;

mod recovery;

mod kill;

mod pause;

mod notice;

mod refresh;

mod admin;

mod partition;

mod bench;

mod check;

mod rebuild;

mod k8s;

mod standin;

pub mod s3;
