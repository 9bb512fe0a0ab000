//! The shape of a launch, as both sides need it.

/// Threads of a warp, and of a block in owner mode.
pub const LANES: u32 = 32;

/// Words of shared memory for the addresses of a warp's two doorbells.
pub(crate) const DOOR_WORDS: u32 = 4;

/// Bytes of dynamic shared memory for each block in owner mode: the warp's tables, and the addresses of two doorbells.
pub const OWNER_SHARED_BYTES: u32 = (onehop_proto::kernel::LOCAL_WORDS + DOOR_WORDS) * 4;

/// The same for queues that have one command in flight.
pub const SINGLE_SHARED_BYTES: u32 = (onehop_proto::kernel::SINGLE_WORDS + DOOR_WORDS) * 4;

/// Bytes of dynamic shared memory in shared mode, for each warp of a block.
pub const GROUP_SHARED_BYTES: u32 = (onehop_proto::kernel::GROUP_WORDS + DOOR_WORDS) * 4;

/// Bytes of dynamic shared memory of the first half of a gather from an array, for each warp of a block.
pub const HITS_SHARED_BYTES: u32 = (onehop_proto::array::HIT_WORDS + DOOR_WORDS) * 4;

/// The same of the second half.
pub const MISSES_SHARED_BYTES: u32 = (onehop_proto::array::MISS_WORDS + DOOR_WORDS) * 4;
