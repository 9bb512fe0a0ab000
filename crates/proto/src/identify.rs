//! What Identify returns: views over the 4096 bytes, and builders that write the same fields.
//!
//! Views never fail on content, only on length; what a value means is checked where it is used.

mod controller;
mod lists;
mod namespace;

pub use crate::wire::{Text, TooShort};
pub use controller::{Controller, EntrySizes, NvmController, Oacs, Oncs, PowerState, Vwc};
pub use lists::{
    ActiveNamespaces, DescriptorError, Descriptors, NamespaceId, active_namespaces, descriptors,
};
pub use namespace::{ExtendedFormat, IndependentNamespace, Namespace, NvmNamespace, Pic};

/// Bytes that Identify returns.
pub const BYTES: usize = 4096;

/// Builders, for the simulator: each starts from bytes that the caller has zeroed.
pub mod build {
    pub use super::controller::{ControllerBuilder as Controller, NvmControllerBuilder as NvmController};
    pub use super::controller::{PowerStateBuilder as PowerState, put_power_state};
    pub use super::lists::{put_active, put_descriptors};
    pub use super::namespace::{
        IndependentNamespaceBuilder as IndependentNamespace, NamespaceBuilder as Namespace,
        NvmNamespaceBuilder as NvmNamespace,
    };
}
