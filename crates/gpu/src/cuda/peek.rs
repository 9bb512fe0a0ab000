//! Reads a device's registers by a kernel that may never end.

use std::time::{Duration, Instant};

use onehop_proto::kernel::PeekNotes;

use super::gpu::CudaGpu;
use super::kernels::KernelCall;
use super::launch::Used;
use super::module::{Arg, Module, Shape};
use crate::{Doorbells, Error, Gpu, Place, Result, peek};

const WHAT: &str = "the kernel that reads registers";

/// See [`Instruments::peek`](crate::Instruments::peek).
pub(super) fn run(
    gpu: &CudaGpu,
    registers: &Doorbells,
    (first, count): (u32, u32),
    limit: Duration,
) -> Result<Vec<u32>> {
    peek::check(count)?;
    let first = registers.words(first, count)?;
    if !gpu.0.context.reaches(registers.space) {
        let why = "the registers are mapped for another GPU, or for an emulated one".into();
        return Err(Error::NotSupported { what: WHAT.into(), why });
    }
    let function = Module::load(&gpu.0.context, onehop_device::PEEK_PTX)?.function("onehop_peek")?;
    let notes = gpu.alloc(Place::PinnedHost, PeekNotes::BYTES)?;
    let nanos = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let call = KernelCall {
        function: &function,
        shape: Shape { blocks: 1, threads: 1, shared: 0 },
        args: vec![Arg::U64(first.0), Arg::U32(count), Arg::U64(notes.addr().0), Arg::U64(nanos)],
    };
    let begun = Instant::now();
    let used = Used { memory: Some(notes.clone()), _held: vec![registers.hold.clone()] };
    // SAFETY: the arguments are those of peek.rs in the device crate; notes and registers are held until the kernel has ended.
    let mut work = unsafe { gpu.start(WHAT, &call, limit, used) }?;
    match work.wait() {
        Ok(_) => peek::values(&notes),
        Err(Error::Unended { .. }) => {
            let what = match notes.word(PeekNotes::BEGUN as usize)? {
                0 => format!("starting {WHAT}"),
                which => format!("the GPU's read of register {which} of {count}"),
            };
            Err(Error::Silent { what, seconds: begun.elapsed().as_secs() })
        }
        Err(error) => Err(error),
    }
}
