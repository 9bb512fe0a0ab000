//! Contexts that a program creates and destroys. The driver crashes if a destroyed one is used, and reuses its handle
//! for the next one.

use onehop_gpu::ControllerHost;
use onehop_gpu::cuda::Pointer;

use super::*;

impl Model {
    /// Makes a context of GPU 0: its handle.
    fn make_context(&self) -> usize {
        // SAFETY: the model's function of this signature.
        unsafe {
            let make = self.0.get::<unsafe extern "C" fn(c_int) -> usize>(b"model_make_context\0").unwrap();
            make(0)
        }
    }

    fn destroy_context(&self, context: usize) {
        // SAFETY: the model's function of this signature, and a context that it made.
        unsafe {
            let destroy = self.0.get::<unsafe extern "C" fn(usize)>(b"model_destroy_context\0").unwrap();
            destroy(context);
        }
    }
}

fn open(context: usize) -> CudaGpu {
    let pointer = Pointer { ordinal: 0, id: 0, context, is_managed: false };
    // SAFETY: the tests destroy no context during a call.
    unsafe { Cuda::load().unwrap().open_for(&pointer) }.unwrap()
}

fn is_destroyed(error: &Error) -> bool {
    matches!(error, Error::ContextDestroyed { .. }) && !error.is_under_way()
}

#[test]
fn what_was_in_a_destroyed_context_is_forgotten() {
    let Some(model) = Model::or_child("contexts::what_was_in_a_destroyed_context_is_forgotten") else {
        return;
    };
    let keeps_the_driver = gpu();
    for is_handle_used_again in [false, true] {
        let context = model.make_context();
        let gpu = open(context);
        let [plain, arena, ring, adopted] = one_of_each(&gpu);
        plain.write(0, &[7; 4096]).unwrap();
        let mut copier = gpu.copier(&ring, &arena).unwrap();
        copier.copy(&Rows { from: 0, to: 0, row: 4096, rows: 1, step: 4096 }).unwrap();
        let mark = copier.mark().unwrap();
        assert!(!gpu.is_destroyed());
        model.destroy_context(context);
        if is_handle_used_again {
            assert_eq!(model.make_context(), context);
        }
        assert!(gpu.is_destroyed());
        assert!(is_destroyed(&plain.write(0, &[7; 4096]).unwrap_err()));
        assert!(is_destroyed(&gpu.alloc(Place::Vram, 4096).err().unwrap()));
        assert!(is_destroyed(&copier.is_over(mark).unwrap_err()), "its copies have ended");
        // The driver is not asked to free what may belong to another context by now.
        let live = model.get("live");
        drop((copier, plain, arena, ring, adopted, gpu));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(model.get("live"), live);
    }
    assert_eq!(keeps_the_driver.refusals().0, 0);
}

#[test]
fn pages_registered_in_a_destroyed_context_are_registered_again() {
    let test = "contexts::pages_registered_in_a_destroyed_context_are_registered_again";
    let Some(model) = Model::or_child(test) else { return };
    let gpu = gpu();
    let pages = HostMem::anonymous(64 << 10).unwrap();
    let context = model.make_context();
    let of_program = open(context);
    let old = of_program.adopt(Place::PinnedHost, pages.clone()).unwrap();
    let joined = gpu.adopt(Place::PinnedHost, pages.clone()).unwrap();
    model.destroy_context(context);
    let live = model.get("live");
    let new = gpu.adopt(Place::PinnedHost, pages).unwrap();
    assert_eq!(model.get("live"), live + 1, "the pages are not registered any more");
    // Dropping the old regions keeps the new registration.
    drop((old, joined, of_program));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(model.get("live"), live + 1);
    drop(new);
    model.wait_for("live", live);
}

#[test]
fn copies_go_to_memory_of_their_own_context() {
    let test = "contexts::copies_go_to_memory_of_their_own_context";
    let Some(model) = Model::or_child(test) else { return };
    let gpu = gpu();
    let other = open(model.make_context());
    let plain = |gpu: &CudaGpu| gpu.alloc_device(DeviceKind::Plain, 4096).unwrap();
    // SAFETY: all ranges used below are allocated.
    let all = unsafe { gpu.all_memory() }.unwrap();
    let own = plain(&gpu);
    let at = own.addr().0 as usize;
    let ring = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let mut copier = gpu.copier(&ring, &all).unwrap();
    ring.fill(0, 4096, 9).unwrap();
    copier.copy(&Rows { from: 0, to: at, row: 4096, rows: 1, step: 4096 }).unwrap();
    let mark = copier.mark().unwrap();
    while !copier.is_over(mark).unwrap() {}
    assert_eq!(own.word(4092).unwrap(), 0x0909_0909);
    assert!(other.copier(&ring, &all).is_err() && gpu.copier(&ring, &plain(&other)).is_err());
}

#[test]
fn peers_reach_only_plain_allocations() {
    let test = "contexts::peers_reach_only_plain_allocations";
    let Some(_model) = Model::or_child(test) else { return };
    let cuda = Cuda::load().unwrap();
    let (gpu, peer) = (cuda.open("0").unwrap(), cuda.open("1").unwrap());
    let _served = gpu.served_by(&peer).unwrap();
    let ring = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    for (kind, is_reached) in [(DeviceKind::Plain, true), (DeviceKind::Exportable, false)] {
        let memory = gpu.alloc_device(kind, 4096).unwrap();
        let reaches = |gpu: &CudaGpu| {
            [gpu.hold("memory", memory.addr(), 8).is_ok(), gpu.copier(&ring, &memory).is_ok()]
        };
        assert_eq!([reaches(&gpu), reaches(&peer)], [[true; 2], [is_reached; 2]], "{kind:?}");
    }
}

#[test]
fn memory_that_kernels_trust_is_out_of_their_reach() {
    let test = "contexts::memory_that_kernels_trust_is_out_of_their_reach";
    let Some(_model) = Model::or_child(test) else { return };
    let gpu = gpu();
    let held = |region: &Region| gpu.hold("memory", region.addr(), 8).is_ok();
    assert!(held(&gpu.alloc(Place::Vram, 4096).unwrap()));
    let private = gpu.alloc_private(4096).unwrap();
    assert!(!held(&private));
    private.write(0, &[5; 8]).unwrap();
    assert_eq!(private.word(4).unwrap(), 0x0505_0505);
}
