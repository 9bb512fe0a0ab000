//! RDMA: connections over which a network card reads and writes registered memory.
//!
//! 1. [`Verbs::load`] opens libibverbs, or says what is missing.
//! 2. [`Nic::open`] opens a port of a device; [`nearest_first`] lists the devices nearest to a GPU first.
//! 3. [`Nic::register`] registers host memory, or a GPU's by dma-buf or nvidia-peermem.
//! 4. [`connect`] and [`accept`] make a [`Channel`] over a TCP connection.
//! 5. [`Channel::put`] and [`Channel::get`] move bytes, [`Channel::send`] and [`Channel::receive`] messages.
//!
//! `verbs` is the one module with unsafe code. The bindings are our own, for the twenty calls that are used: the
//! existing crates need CMake and Clang to build, or link the library.
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
