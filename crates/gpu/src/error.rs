//! What can go wrong with a GPU.

use onehop_proto::GpuAddr;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a GPU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its memory could not be had or reached.
    #[error(transparent)]
    Memory(#[from] onehop_os::Error),
    /// A GPU thread touched an address that is no memory of this GPU.
    #[error("a GPU thread made a {access} of {bytes} bytes at {addr}, where there is {what}")]
    Fault {
        /// What it did.
        access: &'static str,
        /// Where.
        addr: GpuAddr,
        /// How much.
        bytes: u32,
        /// What is there.
        what: &'static str,
    },
    /// A GPU thread ended in an unexpected way.
    #[error("a GPU thread panicked: {0}; this is a defect of onehop")]
    Panicked(String),
    /// A launch does not make sense.
    #[error("this launch cannot run: {0}")]
    Launch(String),
    /// The region has no host address and the GPU gave no other way to it.
    #[error("this memory cannot be reached from the CPU")]
    NoHostAccess,
}
