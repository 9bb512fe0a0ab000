//! The rig of tests and benchmarks: controllers and experiments that run on a GPU, each by a list of descriptors in memory.
//!
//! Descriptors hold addresses of memory that the kernels read and write. Each address is checked here and its memory
//! held until the kernel has ended. The kernel reads copies of the descriptors, which no other code can change.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use onehop_controller::Pair;
use onehop_controller::layout::{DataCheck, Litmus, REPORT_BYTES, Tally};
use onehop_proto::{Cqe, GpuAddr, Sqe};

use super::code::{Code, Started};
use super::gpu::CudaGpu;
use super::kernels::KernelCall;
use super::launch::Used;
use super::live::{MemoryHold, Touched};
use super::module::{Arg, Shape};
use super::stream::Stream;
use crate::{Gpu, Region, Result};

/// The rig's kernels, compiled for one GPU.
#[derive(Clone)]
pub struct RigCode(Code);

impl RigCode {
    /// Registers per thread of the kernel `name`.
    ///
    /// # Errors
    /// When there is no such kernel.
    pub fn registers(&self, name: &str) -> Result<u32> {
        self.0.registers(name)
    }
}

impl CudaGpu {
    /// Compiles the controllers and experiments that tests and benchmarks run on a GPU.
    ///
    /// # Errors
    /// As for [`Self::load_code`].
    pub fn load_rig(&self) -> Result<RigCode> {
        let code = self.servant().load_code(&onehop_device::RIG_PTX.text())?;
        // All of them now: loading a kernel while another runs may have to wait for that one's end, and kernels that
        // work together would wait for each other.
        for entry in Rig::ALL.map(Rig::entry).iter().chain([&SERVE]) {
            code.function(entry.name)?;
        }
        self.load_kernels()?;
        Ok(RigCode(code))
    }

    /// The same, compiled once.
    pub(super) fn rig(&self) -> Result<RigCode> {
        let mut rig = self.0.rig.lock().unwrap_or_else(PoisonError::into_inner);
        match &*rig {
            Some(code) => Ok(code.clone()),
            None => Ok(rig.insert(self.load_rig()?).clone()),
        }
    }

    /// Starts an entry, with a warp for each of the first `count` descriptors in `list`. They are copied, and all
    /// memory that they refer to is held until the kernel has ended.
    ///
    /// # Errors
    /// When it cannot be started, or a descriptor refers to memory that the GPU does not reach.
    pub fn start_rig(
        &self,
        code: &RigCode,
        rig: Rig,
        list: &Region,
        count: u32,
        limit: Duration,
    ) -> Result<Started> {
        if let Some(servant) = &self.0.servant {
            return servant.start_rig(code, rig, list, count, limit);
        }
        let mut descriptors = vec![0; count as usize * rig.descriptor() as usize];
        list.read(0, &mut descriptors)?;
        let words: Vec<u32> =
            descriptors.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let touched: Vec<_> =
            words.chunks_exact(rig.descriptor() as usize / 4).flat_map(|one| rig.touched(one)).collect();
        let mut held = self.0.context.hold(&touched)?;
        let copy = self.alloc_private(descriptors.len())?;
        copy.write(0, &descriptors)?;
        let at = (copy.addr(), count);
        held.push(Arc::new(copy));
        // SAFETY: what the descriptors refer to has been checked and is in `held`, and so is the copy, which only the
        // kernel uses.
        unsafe { self.start_list(code, &rig.entry(), at, limit, held) }
    }

    /// Starts an entry on a list of descriptors, and holds what it uses.
    ///
    /// # Safety
    /// The list and all memory that it refers to, now and as it changes, is in `held` or kept until the result has been
    /// dropped.
    pub(super) unsafe fn start_list(
        &self,
        code: &RigCode,
        entry: &KernelEntry,
        (at, count): (GpuAddr, u32),
        limit: Duration,
        held: Vec<MemoryHold>,
    ) -> Result<Started> {
        let &KernelEntry { name, words, warps, stays } = entry;
        let shape = Shape { blocks: count.div_ceil(warps), threads: 32 * warps, shared: warps * words * 4 };
        let args = [Arg::U64(at.0), Arg::U32(count), Arg::U32(words)];
        let function = code.0.function(name)?;
        let call = KernelCall { function: &function, shape, args: args.to_vec() };
        let context = &self.0.context;
        let stream = if stays { Stream::apart(context) } else { Stream::new(context) }?;
        let used = Used { memory: None, _held: held };
        // SAFETY: the arguments are the kernel's, and what they refer to is live until it has ended: the caller's
        // promise. It ends by the limit in its descriptors; one that does not is left to the GPU with everything that
        // it uses.
        unsafe { self.start_on(stream, name, &call, limit, used) }.map(|work| Started(Box::new(work)))
    }
}

/// The entry of a kernel that has a warp for each descriptor.
pub(super) struct KernelEntry {
    name: &'static str,
    /// Words of shared memory per warp.
    words: u32,
    /// Warps of a block. Null controllers share blocks, or many of them would leave no multiprocessor to what is
    /// measured.
    warps: u32,
    /// Whether it is a controller, which runs until its host stops it.
    stays: bool,
}

/// The controller that moves blocks.
pub(super) const SERVE: KernelEntry =
    KernelEntry { name: "onehop_serve", words: onehop_controller::SERVE_LOCAL_WORDS, warps: 1, stays: true };

/// A kernel for tests and benchmarks: see the controller crate. The controller that moves blocks is not included: its
/// descriptors change while it runs, and [`Pairs`](crate::controllers::Pairs) keeps them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rig {
    /// The null controller; descriptors are `Pair`s.
    Null,
    /// The same for submission queues behind a bus.
    NullFar,
    /// Compares memory with blocks; descriptors are `Check`s.
    Check,
    /// Litmus experiments; descriptors are `Litmus`.
    Submit,
    /// As above.
    Fetch,
    /// As above.
    Complete,
    /// As above.
    Consume,
}

impl Rig {
    const ALL: [Self; 7] =
        [Self::Null, Self::NullFar, Self::Check, Self::Submit, Self::Fetch, Self::Complete, Self::Consume];

    /// Bytes of a descriptor.
    const fn descriptor(self) -> u32 {
        match self {
            Self::Null | Self::NullFar => Pair::BYTES,
            Self::Check => DataCheck::BYTES,
            Self::Submit | Self::Fetch | Self::Complete | Self::Consume => Litmus::BYTES,
        }
    }

    const fn entry(self) -> KernelEntry {
        use onehop_controller::litmus::LITMUS_LOCAL_WORDS;
        use onehop_controller::{NULL_FAR_LOCAL_WORDS, NULL_LOCAL_WORDS};
        let (name, words) = match self {
            Self::Null => ("onehop_null", NULL_LOCAL_WORDS),
            Self::NullFar => ("onehop_null_far", NULL_FAR_LOCAL_WORDS),
            Self::Check => ("onehop_check", 0),
            Self::Submit => ("onehop_litmus_submit", LITMUS_LOCAL_WORDS),
            Self::Fetch => ("onehop_litmus_fetch", LITMUS_LOCAL_WORDS),
            Self::Complete => ("onehop_litmus_complete", LITMUS_LOCAL_WORDS),
            Self::Consume => ("onehop_litmus_consume", LITMUS_LOCAL_WORDS),
        };
        let stays = matches!(self, Self::Null | Self::NullFar);
        KernelEntry { name, words, warps: if stays { 4 } else { 1 }, stays }
    }

    /// The memory that a descriptor refers to.
    fn touched(self, words: &[u32]) -> Vec<Touched> {
        let all = match self {
            Self::Null | Self::NullFar => of_pair(&Pair::from_words(&whole(words))).to_vec(),
            Self::Check => of_check(&DataCheck::from_words(&whole(words))),
            Self::Submit | Self::Fetch => of_litmus(&Litmus::from_words(&whole(words)), false).to_vec(),
            Self::Complete | Self::Consume => of_litmus(&Litmus::from_words(&whole(words)), true).to_vec(),
        };
        all.into_iter().map(|(what, at, bytes)| Touched { what, at, bytes }).collect()
    }
}

/// The words of one descriptor.
fn whole<const N: usize>(words: &[u32]) -> [u32; N] {
    std::array::from_fn(|i| words.get(i).copied().unwrap_or(0))
}

type NamedRange = (&'static str, GpuAddr, u64);

fn of_pair(pair: &Pair) -> [NamedRange; 6] {
    [
        ("the submission queue", pair.sq, u64::from(pair.sq_entries) * Sqe::BYTES as u64),
        ("the completion queue", pair.cq, u64::from(pair.cq_entries) * Cqe::BYTES as u64),
        ("the submission queue's doorbell", pair.sq_door, 4),
        ("the completion queue's doorbell", pair.cq_door, 4),
        ("the report", pair.report, REPORT_BYTES.into()),
        ("the control word", pair.control, 4),
    ]
}

fn of_check(check: &DataCheck) -> Vec<NamedRange> {
    let items = u64::from(check.first) + u64::from(check.count);
    let bytes = items.saturating_mul(u64::from(check.block_words) * 4);
    let data = ("what is compared", check.data, bytes);
    // Of no items, or of blocks without words, the kernel reads nothing.
    let all = (bytes > 0).then_some(data).into_iter().chain([("the counters", check.result, 16)]);
    all.collect()
}

fn of_litmus(litmus: &Litmus, completes: bool) -> [NamedRange; 5] {
    // As the kernel clamps them.
    let (slots, words) = litmus.sizes();
    let (slots, bytes) = (u64::from(slots), u64::from(words) * 4);
    // Entries are written whole, regardless of the message size.
    let last = if completes { bytes } else { bytes.max(Sqe::BYTES as u64) };
    let messages = (slots - 1).saturating_mul(bytes).saturating_add(last);
    [
        ("the messages", litmus.payload, messages),
        ("the doorbell, or the completions", litmus.flags, if completes { slots * 16 } else { 4 }),
        ("the word of what was looked at", litmus.taken, 4),
        ("the tally", litmus.tally, Tally::BYTES.into()),
        ("the control word", litmus.control, 4),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels clamp invalid values to the least valid ones, and write that much.
    #[test]
    fn messages_are_as_long_as_the_kernel_takes_them_to_be() {
        for (slots, words, entries, data) in [
            (0, 1024, 4096, 4096),
            (1, 0, 64, 16),
            (0, 0, 64, 16),
            (3, 7, 96, 48),
            (2, 16, 128, 128),
            (1 << 31, 1 << 31, u64::MAX, u64::MAX),
        ] {
            let litmus = Litmus { slots, words, ..Litmus::default() };
            let bytes = |completes| of_litmus(&litmus, completes).map(|one| one.2);
            assert_eq!(bytes(false)[..2], [entries, 4], "{slots} slots of {words} words");
            assert_eq!(
                bytes(true)[..2],
                [data, u64::from(slots.max(1)) * 16],
                "{slots} slots of {words} words"
            );
        }
        let most = Litmus { slots: u32::MAX, words: u32::MAX, ..Litmus::default() };
        assert_eq!(of_litmus(&most, true)[0].2, u64::MAX);
    }

    #[test]
    fn an_empty_range_compares_nothing() {
        let check = DataCheck { count: 2, block_words: 4, ..DataCheck::default() };
        assert_eq!(of_check(&check).iter().map(|one| one.2).collect::<Vec<_>>(), [32, 16]);
        for nothing in [DataCheck { count: 0, ..check }, DataCheck { block_words: 0, ..check }] {
            assert_eq!(of_check(&nothing).iter().map(|one| one.2).collect::<Vec<_>>(), [16]);
        }
    }

    #[test]
    fn every_address_of_a_descriptor_is_among_what_it_touches() {
        let words: Vec<u32> = (0..64).map(|i| 0x0100_0000 + i).collect();
        for rig in Rig::ALL {
            let touched = rig.touched(&words);
            assert!(touched.iter().all(|one| one.bytes >= 4), "{rig:?}: {touched:?}");
            let named: Vec<u64> = touched.iter().map(|one| one.at.0).collect();
            let at = |word: usize| u64::from(words[word]) | u64::from(words[word + 1]) << 32;
            let addresses: &[usize] = match rig {
                Rig::Null | Rig::NullFar => &[0, 2, 4, 6, 20, 22],
                Rig::Check => &[0, 2],
                _ => &[0, 2, 4, 6, 8],
            };
            assert_eq!(named, addresses.iter().map(|word| at(*word)).collect::<Vec<_>>(), "{rig:?}");
        }
    }
}
