//! Contexts that another part of the program creates and destroys.

use std::ptr::null_mut;

use cudarc::driver::sys;
use onehop_gpu::cuda::CudaGpu;
use onehop_gpu::{BlockJob, Error, Gpu, Place, Region};
use onehop_os::DmaMemory;
use onehop_proto::GpuAddr;
use onehop_radio::Format;

use crate::raw::ok;
use crate::{Bench, bench, report};

const BYTES: usize = 1 << 20;

/// onehop's objects in a context that was destroyed.
struct Old {
    context: usize,
    gpu: CudaGpu,
    vram: Region,
    host: Region,
}

impl Old {
    /// Uses a new context of the program's, which the program then destroys.
    fn new(bench: &Bench) -> Self {
        let (mut context, mut at) = (null_mut(), 0);
        // SAFETY: both results live across the calls; the new context is current in the second.
        unsafe {
            ok("make a context", sys::cuCtxCreate_v2(&mut context, 0, 0)).unwrap();
            ok("allocate", sys::cuMemAlloc_v2(&mut at, BYTES)).unwrap();
        }
        let pointer = bench.cuda.pointer(GpuAddr(at)).unwrap().unwrap();
        assert_eq!(pointer.context, context as usize);
        // SAFETY: the memory is there, and the context is destroyed between calls.
        let gpu = unsafe { bench.cuda.open_for(&pointer) }.unwrap();
        let (vram, host) =
            (gpu.alloc(Place::Vram, BYTES).unwrap(), gpu.alloc(Place::PinnedHost, BYTES).unwrap());
        vram.fill(0, BYTES, 7).unwrap();
        assert!(!gpu.is_destroyed() && vram.word(4096).unwrap() == 0x0707_0707);
        // SAFETY: it was made above, and is current on this thread alone.
        ok("destroy the context", unsafe { sys::cuCtxDestroy_v2(context) }).unwrap();
        Self { context: context as usize, gpu, vram, host }
    }

    fn check(&self) {
        assert!(self.gpu.is_destroyed(), "{:#x} is taken for a context that is there", self.context);
        let refused = [
            self.vram.fill(0, BYTES, 8),
            self.vram.read(0, &mut [0; 64]),
            self.gpu.alloc(Place::Vram, BYTES).map(drop),
            self.gpu.adopt(Place::PinnedHost, self.host.host().unwrap().clone()).map(drop),
        ];
        for answer in refused {
            assert!(matches!(answer, Err(Error::ContextDestroyed { .. })), "{answer:?}");
        }
    }
}

/// A kernel that accessed it would destroy its own context: this one survives.
#[test]
fn kernels_do_not_reach_memory_of_another_context() {
    let Some(bench) = bench("kernels_do_not_reach_memory_of_another_context") else { return };
    let (mut context, mut at) = (null_mut(), 0);
    // SAFETY: both results live across the calls; the new context is current in the second.
    unsafe {
        ok("make a context", sys::cuCtxCreate_v2(&mut context, 0, 0)).unwrap();
        ok("allocate", sys::cuMemAlloc_v2(&mut at, BYTES)).unwrap();
    }
    let pointer = bench.cuda.pointer(GpuAddr(at)).unwrap().unwrap();
    // SAFETY: the memory is there, and the context is destroyed after the last use of both.
    let (other, all) = unsafe { (bench.cuda.open_for(&pointer).unwrap(), bench.gpu.all_memory().unwrap()) };
    let theirs = other.alloc(Place::Vram, BYTES).unwrap();
    let own = bench.gpu.alloc(Place::Vram, BYTES).unwrap();
    let rows = bench.gpu.alloc(Place::Vram, BlockJob::CHECKED_BYTES).unwrap();
    let mut kernels = bench.gpu.block_kernels().unwrap();
    let mut run =
        |from: &Region| kernels.run(&[BlockJob::check((from, Format::Ci16), &rows, 16, 0).unwrap()]);
    let start = own.addr().0 as usize;
    for from in [&theirs, &all.slice(start..start + BYTES).unwrap()] {
        assert!(matches!(run(from), Err(Error::NotSupported { .. })));
        assert!(matches!(bench.gpu.export_ipc(from), Err(Error::NotSupported { .. })));
    }
    run(&own).unwrap();
    drop(theirs);
    other.wait_for_all().unwrap();
    drop(other);
    // SAFETY: it was made above, and is current on this thread alone.
    ok("destroy the context", unsafe { sys::cuCtxDestroy_v2(context) }).unwrap();
}

/// The driver reuses the handles of destroyed contexts for new ones.
#[test]
fn a_destroyed_context_is_recognised_and_what_was_in_it_forgotten() {
    const ROUNDS: usize = 20;
    let Some(bench) = bench("a_destroyed_context_is_recognised_and_what_was_in_it_forgotten") else { return };
    let (mut all, mut again) = (Vec::<Old>::new(), 0);
    for _ in 0..ROUNDS {
        let old = Old::new(&bench);
        again += usize::from(all.iter().any(|other| other.context == old.context));
        all.push(old);
        all.iter().for_each(Old::check);
    }
    report(&format!("{again} of {ROUNDS} contexts got the handle of an earlier one"));
    // Half of the objects are dropped while another context may have the handle.
    let mut context = null_mut();
    // SAFETY: `context` lives across the call.
    ok("make a context", unsafe { sys::cuCtxCreate_v2(&mut context, 0, 0) }).unwrap();
    let refusals = bench.gpu.refusals();
    all.truncate(ROUNDS / 2);
    all.iter().for_each(Old::check);
    // SAFETY: it was made above, and is current on this thread alone.
    ok("destroy the context", unsafe { sys::cuCtxDestroy_v2(context) }).unwrap();
    drop(all);
    bench.gpu.wait_for_all().unwrap();
    assert_eq!(bench.gpu.refusals(), refusals);
    // The primary context is unaffected.
    let region = bench.gpu.alloc(Place::Vram, BYTES).unwrap();
    region.fill(0, BYTES, 9).unwrap();
    assert_eq!(region.word(0).unwrap(), 0x0909_0909);
}
