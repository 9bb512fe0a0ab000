//! libcufile.so.0: what `include/onehop/cufile.h` declares, over the loader's engine.
//!
//! Programs written for NVIDIA's cuFile find this library in its place. Structures, pointers and handles come from C.
//! The modules that export functions check each once. Below them there are only addresses of GPU memory, which the
//! program vouches for.

mod async_io;
mod audit;
mod batch;
mod buffers;
mod config;
mod driver;
mod error;
mod executor;
mod files;
mod io;
mod log;
mod machine;
mod operation;
mod parameters;
mod report;
mod slots;
mod state;
mod stats;
mod stats_types;
mod types;

pub use error::{Code, Failure};
pub use types::{CuFileError, Description, DriverProperties, IoEvent, IoParameters};
