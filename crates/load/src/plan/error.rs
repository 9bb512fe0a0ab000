//! Errors of planning.

use crate::dtype::Dtype;
use crate::select::Use;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An alignment or block size that is not a power of two, or out of range.
    #[error("{what} is {value}; a power of two up to {most} is expected")]
    NoPower {
        /// The option.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The limit.
        most: u64,
    },
    /// Blocks could never be contiguous.
    #[error("whole blocks of {block} bytes cannot be contiguous at multiples of {landing}")]
    Landing {
        /// The landing alignment.
        landing: u64,
        /// The block.
        block: u64,
    },
    /// A chunk is smaller than a block.
    #[error("chunks of {bytes} bytes are smaller than a block of {block}")]
    Chunk {
        /// Its size.
        bytes: u64,
        /// The block.
        block: u64,
    },
    /// A rank that does not exist.
    #[error("there is no rank {rank} of {ranks}; they are counted from 0")]
    Rank {
        /// The rank.
        rank: u64,
        /// Number of ranks.
        ranks: u64,
    },
    /// A dimension that does not exist.
    #[error("the tensor {tensor:?} cannot be cut along dimension {dim}: it has {rank}, counted from 0")]
    Dimension {
        /// The tensor.
        tensor: String,
        /// The dimension.
        dim: usize,
        /// Number of dimensions.
        rank: usize,
    },
    /// The ranks would get unequal parts.
    #[error(
        "dimension {dim} of the tensor {tensor:?} is {length} long and cannot be cut into {ranks} equal parts"
    )]
    Uneven {
        /// The tensor.
        tensor: String,
        /// The dimension.
        dim: usize,
        /// Its length.
        length: u64,
        /// Number of ranks.
        ranks: u64,
    },
    /// A part would end within a byte or a block of a quantised type.
    #[error(
        "the tensor {tensor:?} cut into {ranks} along dimension {dim} would be cut within a block of {dtype}"
    )]
    WithinBlock {
        /// The tensor.
        tensor: String,
        /// The dimension.
        dim: usize,
        /// Number of ranks.
        ranks: u64,
        /// Its type.
        dtype: Dtype,
    },
    /// A pattern that matches no tensor.
    #[error("the pattern {pattern:?} (tensors {used}) matches no tensor of the model")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// The purpose of the pattern.
        used: Use,
    },
    /// The selection is empty.
    #[error("the requested names and types leave no tensor of the model to be loaded")]
    NothingLeft,
    /// Indices that a tensor does not have.
    #[error("the tensor {tensor:?} has the dimensions {shape:?}, which do not hold all of these indices")]
    Indices {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        shape: Vec<u64>,
    },
    /// Indices within a byte or a block of a quantised type.
    #[error("the tensor {tensor:?} would be cut within a block of {dtype}")]
    Block {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// The size exceeds any GPU and address.
    #[error("the tensors take more than 2^62 bytes")]
    TooLarge,
    /// A chunk that has already arrived.
    #[error("chunk {0} has already arrived")]
    Again(u64),
}
