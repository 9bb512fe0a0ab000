//! A GPU that is full of somebody else's kernel, which waits for a transfer of ours.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuSetup, Options, Placement};
use onehop_gpu::cuda::{Arg, Shape};
use onehop_gpu::{Gpu, Place};

use crate::{bench, random, tell};

/// Waits on all threads for a word that is not zero, 20 seconds at most.
const SPIN: &str = r"
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p<3>;
    .reg .u32 %word;
    .reg .u64 %flag, %now, %end;
    ld.param.u64 %flag, [flag];
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, 20000000000;
AGAIN:
    ld.volatile.global.u32 %word, [%flag];
    setp.ne.u32 %p1, %word, 0;
    mov.u64 %now, %globaltimer;
    setp.gt.u64 %p2, %now, %end;
    @%p1 bra DONE;
    @%p2 bra DONE;
    bra AGAIN;
DONE:
    ret;
}
";

#[test]
fn a_transfer_that_finds_no_room_ends_with_an_error() {
    let Some(bench) = bench("a_transfer_that_finds_no_room_ends_with_an_error") else { return };
    let gpu: Arc<dyn Gpu> = Arc::new(bench.gpu.clone());
    let sim = onehop_sim::open("mem:1M").unwrap();
    let data = random(7, 4096);
    sim.write_media(1, 0, &data).unwrap();
    let drive = Drive::open(sim.port(), Options::default()).unwrap();
    let ns = drive.namespace(1).unwrap();
    let stall = Duration::from_millis(500);
    let setup =
        GpuSetup { queues: 1, stall, limit: Duration::from_secs(1), ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
    queues.read(ns, &job, &buffer).unwrap();

    let flag = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let blocks = 2 * bench.gpu.capabilities().multiprocessors as u32;
    std::thread::scope(|scope| {
        let (args, spinner) = ([Arg::U64(flag.addr().0)], &bench.gpu);
        let spin = scope.spawn(move || {
            let shape = Shape { blocks, threads: 1024, shared: 0 };
            // SAFETY: the argument is the kernel's, and it writes nothing.
            unsafe { spinner.run_ptx(SPIN, "spin", shape, &args, Duration::from_secs(30)) }
        });
        std::thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        let end = queues.read(ns, &job, &buffer);
        let took = start.elapsed();
        // The CPU goes on driving the drive, resets included, while the kernel is there.
        drive.reset().unwrap();
        let host = drive.buffer(4096).unwrap();
        drive.queue().unwrap().read(ns, 0, 8, &host, 0).unwrap();
        flag.write(0, &1u32.to_le_bytes()).unwrap();
        spin.join().unwrap().unwrap();
        assert!(matches!(&end, Err(Error::Gpu(why)) if why.contains("occupy")), "{end:?}");
        assert!(took < Duration::from_secs(8), "{took:?}");
        tell(&format!(
            "beside a kernel that fills the GPU a read ended after {took:?}: {}",
            end.unwrap_err()
        ));
    });
    // The kernel that was left behind finds its poison word set, and its memory where it was.
    std::thread::sleep(Duration::from_secs(1));
    assert!(queues.read(ns, &job, &buffer).is_err());
    drop(queues);
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    region.write(0, &[0; 4096]).unwrap();
    queues.read(ns, &job, &buffer).unwrap();
    let mut got = vec![0; 4096];
    region.read(0, &mut got).unwrap();
    assert!(got == data);
}
