//! The memory that array kernels may access.

use std::time::Duration;

use onehop_gpu::cuda::{CudaGpu, DeviceKind};
use onehop_gpu::{ArrayJob, ArrayKernels, ArrayRows, Gpu, Region};
use onehop_proto::GpuAddr;
use onehop_proto::array::{ArrayHandle, counter, directory_bytes};
use onehop_proto::kernel::{Handle, signal, tally};

use crate::{Model, gpu};

const PAGES: u32 = 64;
const DATA: u64 = 64 << 12;
/// Offsets of an array's parts in one region.
const QUEUE: u64 = 4096;
const RINGS: u64 = 8192;
const CONTROL: u64 = RINGS + (64 << 10);

/// An array whose handles, rings and pages are in one region.
fn handles(at: GpuAddr) -> (ArrayHandle, Handle) {
    let place = |offset: u64| at.0 + offset;
    let queue = Handle {
        sq: place(RINGS),
        cq: place(RINGS + 4096),
        sq_door: place(RINGS + 8192),
        cq_door: place(RINGS + 8256),
        control: place(CONTROL),
        signals: place(RINGS + 12_288),
        inside: place(RINGS + 16_384),
        pages: place(RINGS + 20_480),
        lists: place(RINGS + 24_576),
        bytes: DATA,
        blocks: 1 << 20,
        sq_entries: 64,
        cq_entries: 64,
        nsid: 1,
        block_bytes: 512,
        most_blocks: 256,
        page_shift: 12,
        ..Handle::default()
    };
    let array = ArrayHandle {
        queue: place(QUEUE),
        directory: place(256 << 10),
        data: place(512 << 10),
        blocks: 1 << 20,
        limit: 1,
        counters: place(128 << 10),
        pages: PAGES,
        page_shift: 12,
        block_shift: 9,
        ..ArrayHandle::default()
    };
    (array, queue)
}

fn attach_to(
    kernels: &mut dyn ArrayKernels,
    memory: &Region,
    array: &ArrayHandle,
    queue: &Handle,
) -> onehop_gpu::Result<()> {
    let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    memory.write(0, &bytes(&array.words())).unwrap();
    memory.write(QUEUE as usize, &bytes(&queue.words())).unwrap();
    kernels.attach(memory.addr())
}

fn attach(gpu: &CudaGpu, memory: &Region, array: &ArrayHandle, queue: &Handle) -> onehop_gpu::Result<()> {
    attach_to(&mut *gpu.array_kernels().unwrap(), memory, array, queue)
}

#[test]
fn an_array_is_attached_to_memory_of_its_gpu_alone() {
    let Some(model) = Model::or_child("arrays::an_array_is_attached_to_memory_of_its_gpu_alone") else {
        return;
    };
    let gpu = gpu();
    let memory = gpu.alloc_device(DeviceKind::Plain, 1 << 20).unwrap();
    let (array, queue) = handles(memory.addr());
    attach(&gpu, &memory, &array, &queue).unwrap();

    let end = memory.addr().0 + (1 << 20);
    let behind = |bytes: u64| end - bytes + 4;
    let directory = ArrayHandle { directory: behind(directory_bytes(PAGES)), ..array };
    let arrays = [
        directory,
        ArrayHandle { data: behind(DATA), ..array },
        ArrayHandle { data: 0, ..array },
        ArrayHandle { data: array.data + 8, ..array },
        // Its directory could name any way of its one set.
        ArrayHandle { pages: 1, data: end - 4096, ..array },
        ArrayHandle { data: u64::MAX - 4095, ..array },
        ArrayHandle { counters: behind(u64::from(counter::BYTES)), ..array },
        // More pages than there is memory for, and than numbers can count.
        ArrayHandle { pages: 1 << 20, ..array },
        ArrayHandle { pages: u32::MAX, page_shift: 16, ..array },
        ArrayHandle { queue: end, ..array },
        ArrayHandle { queue: array.directory, ..array },
    ];
    for lie in arrays {
        assert!(attach(&gpu, &memory, &lie, &queue).is_err(), "{lie:?}");
    }
    let queues = [
        Handle { sq: behind(64 * 64), ..queue },
        Handle { cq: behind(64 * 16), ..queue },
        Handle { sq_entries: u32::MAX, ..queue },
        Handle { cq_entries: u32::MAX, ..queue },
        Handle { sq_door: end, ..queue },
        Handle { cq_door: 64, ..queue },
        Handle { control: end - 64, ..queue },
        Handle { signals: behind(u64::from(signal::LOST) + 4), ..queue },
        Handle { inside: behind(u64::from(tally::WRITES) + 4), ..queue },
        Handle { pages: behind(64 * 8), ..queue },
        Handle { lists: end, ..queue },
        Handle { bytes: u64::MAX, ..queue },
        Handle { page_shift: 63, ..queue },
        Handle { page_shift: 28, ..queue },
        Handle { sq: queue.sq + 4, ..queue },
        Handle { pages: queue.pages + 4, ..queue },
        Handle { page_shift: 0, ..queue },
    ];
    for lie in queues {
        assert!(attach(&gpu, &memory, &array, &lie).is_err(), "{lie:?}");
    }
    // An empty job is not launched; the model would refuse it.
    let mut kernels = gpu.array_kernels().unwrap();
    attach_to(&mut *kernels, &memory, &array, &queue).unwrap();
    let rows = ArrayRows { count: 8, bytes: 256, stride: 256 };
    let nothing = |bytes| {
        let limit = Duration::from_secs(1);
        ArrayJob::gather(ArrayRows { bytes, stride: bytes, ..rows }, &[], [&memory, &memory], limit)
    };
    assert_eq!(kernels.run(&nothing(256).unwrap(), 1, Duration::from_secs(1)).unwrap(), Duration::ZERO);
    nothing(2 << 20).unwrap_err();
    // Rows that overlap can be read, but not written.
    let overlapping = ArrayRows { stride: 16, ..rows };
    let two = [&memory, &memory];
    ArrayJob::read(overlapping, &[], two, Duration::ZERO).unwrap();
    ArrayJob::write(overlapping, &[], two, Duration::ZERO).unwrap_err();
    ArrayJob::read(ArrayRows { stride: 0, ..rows }, &[], two, Duration::ZERO).unwrap_err();
    for nothing in [GpuAddr(0), GpuAddr(end), GpuAddr(u64::MAX), memory.addr().plus(2048)] {
        assert!(kernels.attach(nothing).is_err(), "{nothing}");
    }
    drop((kernels, memory, gpu));
    model.wait_for("live", 0);
}
