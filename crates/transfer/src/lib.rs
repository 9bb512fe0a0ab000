//! Reads files and blocks of a drive into GPU memory by the best route that works, and reports what each transfer did.
//!
//! The command line, the Python package and the C library all load through this crate. A load makes five calls in order:
//!
//! 1. [`controllers::find`] turns a drive's name (`sim:IMAGE`, `vfio-user:SOCKET`, `0000:0b:00.0`) into a controller.
//! 2. [`Drive::open`](onehop_drive::Drive::open) brings it up, with the driver's settings from [`RouteOptions::drive_options`].
//! 3. [`ModelOnDrive::open`] finds the model's files in the drive's file system, or in an extent map.
//! 4. [`ModelOnDrive::plan`] decides what is read, and where each tensor lies in one arena.
//! 5. [`ModelOnDrive::load`] makes a route ready, fills the arena and returns it with a [`TransferOutcome`].
//!
//! [`FileOnDrive::read`] and [`read_blocks`] replace steps 3 to 5 for one file and for a range of blocks. [`Engine`] is
//! one route made ready, for callers that move blocks themselves. [`open_array`] gives blocks to GPU threads as memory,
//! and a [`DriveTable`] gathers rows of a file in this way. A caller follows and cancels a transfer through [`Progress`].
#![forbid(unsafe_code)]

pub mod arena;
mod array;
mod chunk;
pub mod controllers;
pub mod copy;
mod engine;
mod error;
mod file;
mod lanes;
mod memory;
mod model;
mod options;
mod outcome;
mod progress;
mod route;
mod table;
pub mod volume;

pub use arena::Landed;
pub use array::{RoutedArray, open_array};
pub use engine::{Chosen, Engine, Memory, TransferSetup, block_bytes};
pub use error::{Conflict, Error, ErrorKind, Result, was_stopped};
pub use file::{BlocksRead, FileOnDrive, FileRead, bytes_of, read_blocks, verify_blocks};
pub use model::{Loaded, ModelOnDrive, ModelPlace, plan_options};
pub use options::{Mode, RouteOptions};
pub use outcome::{QueueUse, Recovered, TransferOutcome};
pub use progress::Progress;
pub use route::{BetterRoute, Places, Route, RouteRequest};
pub use table::{DriveTable, TableBytes};
