//! HTTP/2 as the agent port serves it, in as little memory as it takes.
//!
//! Thousands of agents hold a connection each and say next to nothing. The library behind the other ports sets 29 KiB of
//! buffers aside for each, whatever goes over it, lets nobody choose how much, and runs every call as a task of its own:
//! half of what a server of ten thousand agents takes. Here a silent connection has no buffers at all: bytes are read
//! into a place on the stack, frames that came whole are never copied, what is written is gone when it was written, and
//! the calls of a connection are part of its one task.
//!
//! - [`frame`]: how frames look. [`huffman`], [`hpack`], [`fields`]: how fields of requests are read and checked.
//! - [`machine`]: the protocol itself, without socket, clock or task: streams, windows, limits, faults.
//! - [`body`]: what a handler reads of a call. [`conn`]: the task that joins socket, machine and handlers.
//!
//! What is not here because nobody needs it: pushes, priorities, upgrades, proxying, informational answers. Nothing in
//! here knows what is called; a connection is served by any [`tower::Service`].

mod body;
mod conn;
mod fields;
mod frame;
mod hpack;
mod huffman;
mod machine;

pub use conn::{Keepalive, serve};
