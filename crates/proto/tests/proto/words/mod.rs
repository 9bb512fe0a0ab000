//! The words of `onehop-proto` against vectors computed by hand, and against properties that must always hold.

mod commands;
mod format;
mod identify;
mod log;
mod prp;
mod regs;
mod sgl;
mod status;
