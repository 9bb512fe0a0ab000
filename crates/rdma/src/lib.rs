//! RDMA: a network card reads and writes memory of this machine, and another machine has it do so.
//!
//! ```text
//! verbs      libibverbs, loaded at run time: the one module with unsafe code
//! near       which devices there are, and which is nearest to a GPU
//! nic        a port of a device, and the memory registered with it
//! memory     how memory is registered: host memory; a GPU's by dma-buf, else by nvidia-peermem
//! cache      registrations that are kept
//! pool       slots of memory that was registered once
//! endpoint   what two sides tell each other to meet
//! channel    a connection: messages, and bytes put and got; pump is its thread
//! meet       how two sides come to have one, over a TCP connection
//! ```
//! A machine without RDMA runs everything else: [`Verbs::load`] says what is missing. The bindings are our own, of the twenty
//! calls that are used: the crates that there are want CMake and Clang to build, link the library, or both.
#![deny(unsafe_code)]

mod cache;
mod channel;
mod endpoint;
mod error;
mod meet;
mod memory;
mod near;
mod nic;
mod pool;
mod pump;
#[allow(unsafe_code, reason = "libibverbs is a C library")]
mod verbs;

pub use cache::{Allocation, Cache, CacheCounters, CacheLimits, HeldRegistration};
pub use channel::{Channel, ChannelSize, MOST_TRANSFER, Message, PreparedChannel};
pub use endpoint::Endpoint;
pub use error::{Error, Result};
pub use meet::{accept, connect};
pub use memory::{Access, MemoryRef, MemoryRoute, RefusedRoute, RemoteMemory};
pub use near::{Listed, by_distance, listed, nearest_first};
pub use nic::{Choice, Nic, Registered};
pub use pool::{Pool, PoolSlot};
pub use verbs::Verbs;
