//! Kinds of memory: each side reads what the other wrote, and errors say why memory is not available.

use std::fs::File;
use std::time::Duration;

use onehop_gpu::cuda::{Arg, Cuda, DeviceKind, Need};
use onehop_gpu::{Error, Gpu, Place, Region, Rows};
use onehop_os::{DmaMemory, HostMem, Marks};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{Bench, bench, bytes_of, gpu_copy, random, report, run};

pub(crate) fn memfd(bytes: usize) -> HostMem {
    let fd = memfd_create("onehop test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    HostMem::of_file(&File::from(fd), bytes).unwrap()
}

fn every_kind(bench: &Bench, bytes: usize) -> Vec<(&'static str, Region)> {
    let gpu = &bench.gpu;
    vec![
        ("plain", gpu.alloc(Place::Vram, bytes).unwrap()),
        ("exportable", gpu.alloc_device(DeviceKind::Exportable, bytes).unwrap()),
        ("pinned", gpu.alloc(Place::PinnedHost, bytes).unwrap()),
        ("memfd", gpu.adopt(Place::PinnedHost, memfd(bytes)).unwrap()),
        ("anonymous", gpu.adopt(Place::PinnedHost, HostMem::anonymous(bytes).unwrap()).unwrap()),
        ("simulated cmb", gpu.adopt(Place::Cmb, HostMem::anonymous(bytes).unwrap()).unwrap()),
    ]
}

#[test]
fn every_kind_of_memory_keeps_its_bytes() {
    let Some(bench) = bench("every_kind_of_memory_keeps_its_bytes") else { return };
    for bytes in [4096, 3 << 20] {
        for (i, (name, region)) in every_kind(&bench, bytes).into_iter().enumerate() {
            let region = region.slice(0..bytes).unwrap();
            assert!(bytes_of(&region).iter().all(|byte| *byte == 0), "{name} is not zeroed");
            let data = random(i as u64 + 1, bytes);
            region.write(0, &data).unwrap();
            assert!(bytes_of(&region) == data, "{name}");
            let part = region.slice(1000..3001).unwrap();
            part.fill(7, 100, 0xee).unwrap();
            let mut expected = data.clone();
            expected[1007..1107].fill(0xee);
            assert!(bytes_of(&region) == expected, "{name}");
            region.signal(64, 0x1234_5678).unwrap();
            assert_eq!(region.word(64).unwrap(), 0x1234_5678);
            assert!(region.write(bytes - 1, &[0; 2]).is_err() && region.word(bytes).is_err());
            assert!(region.word(2).is_err() && region.fill(bytes, 1, 0).is_err());
            assert_eq!(region.host().is_some(), region.place() != Place::Vram, "{name}");
        }
    }
}

#[test]
fn kernels_and_the_cpu_see_the_same_bytes() {
    let Some(bench) = bench("kernels_and_the_cpu_see_the_same_bytes") else { return };
    let bytes = 1 << 20;
    let regions = every_kind(&bench, bytes);
    for (i, (from_name, from)) in regions.iter().enumerate() {
        let from = from.slice(0..bytes).unwrap();
        let data = random(100 + i as u64, bytes);
        from.write(0, &data).unwrap();
        for (to_name, to) in regions.iter().filter(|(name, _)| name != from_name) {
            let to = to.slice(0..bytes).unwrap();
            gpu_copy(&bench.gpu, &to, &from);
            assert!(bytes_of(&to) == data, "{from_name} to {to_name}");
        }
    }
    let (_, first) = &regions[0];
    run(&bench.gpu, "fill", 1024, &[Arg::U64(first.addr().0), Arg::U32(1000), Arg::U32(5)]);
    for word in [0, 1, 999] {
        assert_eq!(first.word(word * 4).unwrap(), (word as u32).wrapping_mul(0x9e37_79b1).wrapping_add(5));
    }
}

#[test]
fn pages_are_registered_once_and_unregistered() {
    let Some(bench) = bench("pages_are_registered_once_and_unregistered") else { return };
    let gpu = &bench.gpu;
    let mem = HostMem::touched(64 << 10).unwrap();
    let whole = gpu.adopt(Place::PinnedHost, mem.clone()).unwrap();
    let part = gpu.adopt(Place::PinnedHost, mem.slice(5000..9000).unwrap()).unwrap();
    assert_eq!(part.addr().0 - whole.addr().0, 5000);
    drop(whole);
    // The part keeps the whole alive.
    part.write(0, &[9; 100]).unwrap();
    let copy = gpu.alloc(Place::Vram, 4096).unwrap();
    gpu_copy(gpu, &copy, &part.slice(0..4000).unwrap());
    assert_eq!(copy.word(0).unwrap(), 0x0909_0909);
    drop(part);
    let page = gpu.adopt(Place::PinnedHost, mem.slice(8192..12288).unwrap()).unwrap();
    let error = gpu.adopt(Place::PinnedHost, mem.clone()).err().unwrap();
    assert!(error.to_string().contains("registered already"), "{error}");
    drop(page);
    gpu.adopt(Place::PinnedHost, mem).unwrap();
    for place in [Place::Vram, Place::Cmb] {
        let mem = HostMem::anonymous(4096).unwrap();
        assert_eq!(gpu.adopt(place, mem).is_ok(), place == Place::Cmb);
    }
}

/// Two parts of a program each start the driver: registered pages belong to the process.
#[test]
fn two_that_started_the_driver_share_registered_pages() {
    let Some(bench) = bench("two_that_started_the_driver_share_registered_pages") else { return };
    let second = Cuda::load().unwrap().open("0").unwrap();
    let pages = HostMem::touched(64 << 10).unwrap();
    let whole = bench.gpu.adopt(Place::PinnedHost, pages.clone()).unwrap();
    let part = second.adopt(Place::PinnedHost, pages.slice(4096..12_288).unwrap()).unwrap();
    assert_eq!(part.addr().0 - whole.addr().0, 4096);
    drop(whole);
    part.write(0, &[9; 8192]).unwrap();
    let copy = second.alloc(Place::Vram, 8192).unwrap();
    gpu_copy(&second, &copy, &part);
    assert!(bytes_of(&copy).iter().all(|byte| *byte == 9));
    drop((part, copy, second));
    bench.gpu.memory_info().unwrap();
    bench.gpu.adopt(Place::PinnedHost, pages).unwrap();
}

#[test]
fn adjacent_marks_show_what_was_not_overwritten() {
    let Some(bench) = bench("adjacent_marks_show_what_was_not_overwritten") else { return };
    const LIMIT: Duration = Duration::from_secs(10);
    let region = bench.gpu.alloc(Place::Vram, 3 << 20).unwrap();
    for (first, count) in [(0, 1), (8, 511), (64, 300_000), (4096, 100)] {
        let marks = Marks { first, count, word: 0x0123_4567_89ab_cdef };
        region.fill(0, region.len(), 0).unwrap();
        region.mark(&marks, LIMIT).unwrap();
        assert_eq!(region.marks_left(&marks, LIMIT).unwrap(), count);
        let mut all = vec![0; region.len()];
        region.read(0, &mut all).unwrap();
        assert_eq!(all.iter().filter(|byte| **byte != 0).count() as u64, 8 * count);
        assert!(all[first as usize..][..8 * count as usize].iter().all(|byte| *byte != 0));
        region.write((first + 8 * (count - 1)) as usize + 7, &[0]).unwrap();
        assert_eq!(region.marks_left(&marks, LIMIT).unwrap(), count - 1);
        region.fill(first as usize, 8 * count as usize, 1).unwrap();
        assert_eq!(region.marks_left(&marks, LIMIT).unwrap(), 0);
        assert!(region.mark(&Marks { count: 1 << 20, ..marks }, LIMIT).is_err());
    }
    let start = std::time::Instant::now();
    let marks = Marks { first: 0, count: 3 << 17, word: 1 };
    for _ in 0..20 {
        region.mark(&marks, LIMIT).unwrap();
        assert_eq!(region.marks_left(&marks, LIMIT).unwrap(), marks.count);
    }
    report(&format!("3 MiB marked and counted in {:?}", start.elapsed() / 20));
}

#[test]
fn files_are_registered_to_be_read() {
    const EXT4: u64 = 0xef53;
    let Some(bench) = bench("files_are_registered_to_be_read") else { return };
    let data = random(77, (1 << 20) + 1000);
    let path = std::env::current_dir().unwrap().join(format!("onehop-cuda-test-{}", std::process::id()));
    std::fs::write(&path, &data).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let system = rustix::fs::fstatfs(&file).unwrap().f_type as u64;

    let writable = bench.gpu.adopt(Place::PinnedHost, HostMem::of_file(&file, 1 << 20).unwrap());
    report(&format!("a writable file mapping on file system {system:#x}: {writable:?}"));
    match writable {
        Err(error) => {
            assert!(matches!(error, Error::Driver { .. }), "{error}");
            assert!(error.to_string().contains("of_file_read_only"), "{error}");
        }
        Ok(_) => assert!(system != EXT4, "ext4 registers writable mappings after all"),
    }

    let whole = data.len().next_multiple_of(4096);
    let mem = HostMem::of_file_read_only(&file, whole).unwrap();
    let region = match bench.gpu.adopt(Place::PinnedHost, mem) {
        Ok(region) => region,
        Err(error @ Error::NotSupported { .. }) if !bench.gpu.capabilities().read_only_host_register => {
            report(&format!("read-only files: {error}"));
            return;
        }
        Err(error) => panic!("{error}"),
    };
    assert!(region.write(0, &[1]).is_err() && region.signal(0, 1).is_err());
    let copy = bench.gpu.alloc(Place::Vram, whole).unwrap();
    gpu_copy(&bench.gpu, &copy, &region);
    assert!(bytes_of(&copy)[..data.len()] == data);
}

#[test]
fn too_much_memory_is_refused_in_words() {
    let Some(bench) = bench("too_much_memory_is_refused_in_words") else { return };
    let much = bench.gpu.device().memory as usize * 2;
    for kind in [DeviceKind::Plain, DeviceKind::Exportable] {
        let error = bench.gpu.alloc_device(kind, much).err().unwrap();
        report(&format!("{kind:?}: {error}"));
        assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}");
        assert!(error.to_string().contains("use less GPU memory"), "{error}");
    }
    assert!(bench.gpu.alloc(Place::Vram, usize::MAX).is_err());
    assert!(bench.gpu.alloc(Place::Cmb, 4096).is_err());
    // Memory still works afterwards.
    bench.gpu.alloc(Place::Vram, 4096).unwrap();
}

#[test]
fn other_devices_writes_can_be_flushed() {
    let Some(bench) = bench("other_devices_writes_can_be_flushed") else { return };
    let visibility = bench.gpu.capabilities().visibility;
    report(&format!("{visibility:?}"));
    bench.gpu.flush_remote_writes(Need::Nothing).unwrap();
    assert!(bench.gpu.flush_remote_writes(Need::Impossible).is_err());
    for need in [Need::FlushToOwner, Need::FlushToAllDevices] {
        let flushed = bench.gpu.flush_remote_writes(need);
        report(&format!("{need:?}: {flushed:?}"));
        assert_eq!(flushed.is_ok(), visibility.host_flush);
    }
}

#[test]
fn copies_of_one_call_land_as_single_ones() {
    let Some(bench) = bench("copies_of_one_call_land_as_single_ones") else { return };
    let (rows, bytes) = (37, 3 << 20);
    let host = bench.gpu.alloc(Place::PinnedHost, bytes).unwrap();
    let data = random(11, bytes);
    host.write(0, &data).unwrap();
    // Whole rows of unusual lengths and places, some empty, and columns between them.
    let all: Vec<Rows> = (0..rows)
        .map(|i| {
            let (at, row) = (i * 81_000 + i % 7, [0, 1, 4095, 65_537, 4096, 80_000][i % 6]);
            if i % 5 == 4 {
                Rows { from: at, to: at + 3, row: 100, rows: 9, step: 4097 }
            } else {
                Rows { from: at, to: at + 3, row, rows: 1, step: row }
            }
        })
        .collect();
    let mut expected = vec![0; bytes];
    for rows in &all {
        for row in 0..rows.rows {
            let (from, to) = (rows.from + row * rows.step, rows.to + row * rows.row);
            expected[to..to + rows.row].copy_from_slice(&data[from..from + rows.row]);
        }
    }
    let blank = [0..bytes - 1, bytes - 1..usize::MAX, bytes * 9..bytes * 10];
    let arena = bench.gpu.arena_to_fill(bytes, &blank).unwrap();
    let mut copier = bench.gpu.copier(&host, &arena).unwrap();
    copier.copy_all(&all).unwrap();
    let mark = copier.mark().unwrap();
    copier.wait(mark).unwrap();
    assert!(copier.is_over(mark).unwrap());
    assert!(bytes_of(&arena) == expected);
    let outside = Rows { from: host.len() - 1, to: 0, row: 2, rows: 1, step: 2 };
    assert!(copier.copy_all(&[all[1], outside]).is_err());
    copier.copy_all(&[]).unwrap();
}

/// The driver cuts small allocations from larger ones, next to other allocations of the process.
#[test]
fn small_allocations_of_others_leave_ours_on_whole_pages() {
    let Some(bench) = bench("small_allocations_of_others_leave_ours_on_whole_pages") else { return };
    crate::raw::enter();
    for others in [1, 256, 513, 4096] {
        let mut taken = 0;
        // SAFETY: `taken` lives across the call; the context is current.
        let answer = unsafe { cudarc::driver::sys::cuMemAlloc_v2(&mut taken, others) };
        crate::raw::ok("allocate", answer).unwrap();
        for bytes in [1, 4096, 65536, 100_000, 1 << 20, (2 << 20) - 1, 2 << 20] {
            let region = bench.gpu.alloc(Place::Vram, bytes).unwrap();
            assert!(
                region.addr().0.is_multiple_of(65536),
                "{bytes} bytes behind {others}: {}",
                region.addr()
            );
            region.write(0, &vec![0xa5; bytes]).unwrap();
            let mut got = vec![0; bytes];
            region.read(0, &mut got).unwrap();
            assert!(got.iter().all(|byte| *byte == 0xa5));
        }
    }
}
