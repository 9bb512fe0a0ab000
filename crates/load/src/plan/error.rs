//! Why there is no plan.

use crate::dtype::Dtype;
use crate::select::Use;

/// What cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An alignment or a block is no power of two, or an absurd one.
    #[error("{what} is {value}; a power of two up to {most} is expected")]
    NoPower {
        /// Which option.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The limit.
        most: u64,
    },
    /// Blocks could never be put one behind the other.
    #[error("whole blocks of {block} bytes cannot be put at multiples of {landing} one behind the other")]
    Landing {
        /// The landing alignment.
        landing: u64,
        /// The block.
        block: u64,
    },
    /// A chunk holds no block.
    #[error("chunks of {bytes} bytes hold no block of {block}")]
    Chunk {
        /// What was asked for.
        bytes: u64,
        /// The block.
        block: u64,
    },
    /// No such rank.
    #[error("there is no rank {rank} of {ranks}; they are counted from 0")]
    Rank {
        /// Which was asked for.
        rank: u64,
        /// How many there are.
        ranks: u64,
    },
    /// No such dimension.
    #[error("the tensor {tensor:?} cannot be cut along dimension {dim}: it has {rank}, counted from 0")]
    Dimension {
        /// Which tensor.
        tensor: String,
        /// Which dimension was asked for.
        dim: usize,
        /// How many it has.
        rank: usize,
    },
    /// The ranks would get unequal parts.
    #[error(
        "dimension {dim} of the tensor {tensor:?} is {length} long and cannot be cut into {ranks} equal parts"
    )]
    Uneven {
        /// Which tensor.
        tensor: String,
        /// Which dimension.
        dim: usize,
        /// Its length.
        length: u64,
        /// How many parts.
        ranks: u64,
    },
    /// A part would end within a byte or a block of a quantised type.
    #[error(
        "the tensor {tensor:?} cut into {ranks} along dimension {dim} would be cut within a block of {dtype}"
    )]
    WithinBlock {
        /// Which tensor.
        tensor: String,
        /// Which dimension.
        dim: usize,
        /// How many parts.
        ranks: u64,
        /// Its type.
        dtype: Dtype,
    },
    /// A name or a pattern that the model knows nothing of.
    #[error("no tensor of the model matches {pattern:?}, which is {used}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// What its tensors are named for.
        used: Use,
    },
    /// The patterns and types together exclude every tensor.
    #[error("the names and types that are asked for leave no tensor of the model to be loaded")]
    NothingLeft,
    /// Indices that a tensor does not have.
    #[error("the tensor {tensor:?} has the dimensions {shape:?}, which do not hold all of these indices")]
    Indices {
        /// Which tensor.
        tensor: String,
        /// Its dimensions.
        shape: Vec<u64>,
    },
    /// Indices within a byte or a block of a quantised type.
    #[error("the tensor {tensor:?} would be cut within a block of {dtype}")]
    Block {
        /// Which tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// More than any GPU or address has.
    #[error("the tensors take more than 2^62 bytes")]
    TooLarge,
    /// A chunk that has come before.
    #[error("chunk {0} has already arrived")]
    Again(u64),
}
