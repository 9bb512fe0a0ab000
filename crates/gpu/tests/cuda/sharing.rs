//! GPU memory for other devices and other processes, from the middle of an allocation.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use onehop_gpu::cuda::{Cuda, CudaGpu, DeviceKind, Exported, Span, Ticket};
use onehop_gpu::{Error, Gpu, Place, Region};
use onehop_os::DmaMemory;

use crate::{bench, bytes_of, random, report};

const CHILD: &str = "ONEHOP_TEST_TICKET";
const BYTES: usize = 200_000;

#[test]
fn dma_bufs_know_where_the_memory_starts() {
    let Some(bench) = bench("dma_bufs_know_where_the_memory_starts") else { return };
    let gpu = &bench.gpu;
    for kind in [DeviceKind::Plain, DeviceKind::Exportable] {
        let whole = gpu.alloc_device(kind, 4 << 20).unwrap();
        let part = whole.slice(70_001..70_001 + BYTES).unwrap();
        let all = match gpu.export_dma_buf(&part, Span::Allocation, false) {
            Ok(all) => all,
            Err(error) => {
                report(&format!("{kind:?} dma-buf: {error}"));
                assert!(!gpu.capabilities().dma_buf, "{error}");
                assert!(error.to_string().contains("pinned host memory"), "{error}");
                continue;
            }
        };
        assert_eq!((all.offset, all.bytes, all.pcie), (70_001, BYTES as u64, false));
        assert!(all.whole >= 4 << 20 && all.whole.is_multiple_of(4096));
        let pages = gpu.export_dma_buf(&part, Span::Pages, false).unwrap();
        assert_eq!((pages.offset, pages.bytes), (70_001 % 4096, BYTES as u64));
        assert_eq!(pages.whole, (70_001 % 4096 + BYTES as u64).next_multiple_of(4096));
        let size = |fd: &OwnedFd| rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0));
        report(&format!(
            "{kind:?}: {all:?} of {:?} bytes, {pages:?} of {:?}",
            size(&all.fd),
            size(&pages.fd)
        ));
        assert!([Ok(all.whole), Err(rustix::io::Errno::INVAL)].contains(&size(&all.fd)));
        let pcie = gpu.export_dma_buf(&part, Span::Allocation, true).unwrap();
        report(&format!("{kind:?}, PCIe asked for: {pcie:?}"));
        assert_eq!(pcie.pcie, pcie.why_not_pcie.is_none());
        // As a mapper for real hardware does.
        let seam = part.dma_buf().unwrap().unwrap();
        assert_eq!((seam.offset, seam.bytes), (70_001, BYTES as u64));
    }
    let host = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    assert!(host.dma_buf().is_none());
    let error = gpu.export_dma_buf(&host, Span::Pages, false).unwrap_err();
    assert!(error.to_string().contains("udmabuf"), "{error}");
}

/// Starts another process with a ticket, which runs one of the tests here.
fn other(test: &str, ticket: &Ticket, fd: Option<OwnedFd>) -> Command {
    let hex: String = ticket.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, hex);
    command.stdin(fd.map_or_else(Stdio::null, Stdio::from)).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// The GPU and the ticket of such a process, with the descriptor that came with it; `None` in all others.
fn received() -> Option<(CudaGpu, Ticket, Option<OwnedFd>)> {
    let hex = std::env::var(CHILD).ok()?;
    let bytes: Vec<u8> =
        (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
    let ticket = Ticket::from_bytes(&bytes).unwrap();
    let fd = ticket.by_fd.then(|| std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    Some((Cuda::load().unwrap().open("0").unwrap(), ticket, fd))
}

/// Exports memory; if this system cannot share it, says why.
fn exported(gpu: &CudaGpu, kind: DeviceKind, region: &Region) -> Option<Exported> {
    match gpu.export_ipc(region) {
        Ok(exported) => Some(exported),
        Err(error) => {
            // Virtual machines and containers may lack one of the two methods; the error has to say so.
            report(&format!("{kind:?} memory cannot be shared here: {error}"));
            assert!(matches!(error, Error::Driver { .. }), "{error}");
            None
        }
    }
}

#[test]
fn another_process_opens_the_middle_of_an_allocation() {
    let Some(bench) = bench("another_process_opens_the_middle_of_an_allocation") else { return };
    let gpu = &bench.gpu;
    for kind in [DeviceKind::Plain, DeviceKind::Exportable] {
        let whole = gpu.alloc_device(kind, 4 << 20).unwrap();
        let part = whole.slice(1_234_568..1_234_568 + BYTES).unwrap();
        let Some(exported) = exported(gpu, kind, &part) else { continue };
        part.write(0, &random(9, BYTES)).unwrap();
        let ticket = exported.ticket;
        assert_eq!((ticket.offset, ticket.by_fd), (1_234_568, kind == DeviceKind::Exportable));
        assert!(gpu.ticket_is_current(&ticket, &part).unwrap());
        let another = gpu.alloc_device(kind, 4 << 20).unwrap();
        assert!(!gpu.ticket_is_current(&ticket, &another).unwrap());
        if ticket.by_fd {
            let error = gpu.import_ipc(&ticket, None).unwrap_err();
            assert!(error.to_string().contains("descriptor is missing"), "{error}");
        }
        let abroad = Ticket { gpu: [1; 16], ..ticket };
        assert!(matches!(gpu.import_ipc(&abroad, None), Err(Error::Foreign { .. })));
        let output = other("sharing::the_other_process", &ticket, exported.fd).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        report(&format!("{kind:?}, the other process: {}", said.trim()));
        assert!(output.status.success(), "{said}");
        // It answered in the same bytes, and changed no others.
        assert!(bytes_of(&part) == random(10, BYTES), "{kind:?}");
        let before = bytes_of(&whole.slice(0..1_234_568).unwrap());
        let after = bytes_of(&whole.slice(1_234_568 + BYTES..4 << 20).unwrap());
        assert!(before.iter().chain(&after).all(|byte| *byte == 0), "{kind:?}");
    }
}

/// The other process of the test above; nothing when it runs by itself.
#[test]
fn the_other_process() {
    let Some((gpu, ticket, fd)) = received() else { return };
    // A ticket with another length is refused.
    let longer = Ticket { allocation: ticket.allocation + (2 << 20), ..ticket };
    let refused = gpu.import_ipc(&longer, fd.as_ref());
    assert!(refused.is_err(), "a ticket for a longer allocation was taken");
    report(&format!("a wrong length: {}", refused.err().unwrap()));
    let region: Region = gpu.import_ipc(&ticket, fd.as_ref()).unwrap();
    assert_eq!(region.len(), BYTES);
    assert!(bytes_of(&region) == random(9, BYTES), "the other process's bytes are not there");
    region.write(0, &random(10, BYTES)).unwrap();
}

/// The variable with the later process's deadline, and the file where the two meet.
const MEETING: &str = "ONEHOP_TEST_MEETING";
const LONGEST: Duration = Duration::from_secs(30);

fn wait_for(file: &std::path::Path) {
    let start = Instant::now();
    while !file.exists() {
        assert!(start.elapsed() < LONGEST, "{} does not come", file.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A program may free memory that a daemon has opened, and allocate new memory. The daemon's writes must not reach it.
#[test]
fn freed_memory_does_not_reach_new_allocations() {
    let Some(bench) = bench("freed_memory_does_not_reach_new_allocations") else { return };
    let gpu = &bench.gpu;
    for kind in [DeviceKind::Plain, DeviceKind::Exportable] {
        let region = gpu.alloc_device(kind, 4 << 20).unwrap();
        let Some(exported) = exported(gpu, kind, &region) else { continue };
        let meeting = std::env::temp_dir().join(format!("onehop-freed-{}-{kind:?}", std::process::id()));
        std::fs::create_dir_all(&meeting).unwrap();
        let mut command =
            other("sharing::the_process_that_outlives_the_memory", &exported.ticket, exported.fd);
        let child = command.env(MEETING, &meeting).spawn().unwrap();
        drop(command);
        wait_for(&meeting.join("opened"));
        drop(region);
        gpu.memory_info().unwrap();
        let next: Vec<_> = (0..16).map(|_| gpu.alloc_device(kind, 4 << 20).unwrap()).collect();
        for one in &next {
            one.fill(0, one.len(), 0x11).unwrap();
        }
        File::create(meeting.join("freed")).unwrap();
        let output = child.wait_with_output().unwrap();
        std::fs::remove_dir_all(&meeting).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        report(&format!("{kind:?}, memory freed by its maker: {}", said.trim()));
        assert!(output.status.success(), "{said}");
        assert!(next.iter().all(|one| bytes_of(one).iter().all(|byte| *byte == 0x11)), "{kind:?}");
        assert_eq!(gpu.refusals(), (0, None));
    }
}

/// The other process of the test above; nothing when it runs by itself.
#[test]
fn the_process_that_outlives_the_memory() {
    let Some(meeting) = std::env::var_os(MEETING).map(PathBuf::from) else { return };
    let (gpu, ticket, fd) = received().unwrap();
    let region = gpu.import_ipc(&ticket, fd.as_ref()).unwrap();
    File::create(meeting.join("opened")).unwrap();
    wait_for(&meeting.join("freed"));
    let written = region.write(0, &random(11, BYTES));
    let mut bytes = vec![0; BYTES];
    let read = region.read(0, &mut bytes);
    drop(region);
    // The memory may have gone, but this process keeps working.
    gpu.alloc_device(DeviceKind::Plain, 4096).unwrap().write(0, &[1; 4096]).unwrap();
    let (same, refused) = (bytes == random(11, BYTES), gpu.refusals());
    report(&format!("write {written:?}, read {read:?}, the same bytes: {same}, frees refused: {refused:?}"));
}

/// A daemon gets handles and descriptors from programs: invalid ones are errors, and it keeps working.
#[test]
fn invalid_handles_and_descriptors_are_refused() {
    let Some(bench) = bench("invalid_handles_and_descriptors_are_refused") else { return };
    let gpu = &bench.gpu;
    let region = gpu.alloc_device(DeviceKind::Plain, 4 << 20).unwrap();
    if let Some(exported) = exported(gpu, DeviceKind::Plain, &region) {
        let mut command = other("sharing::the_process_that_gets_broken_handles", &exported.ticket, None);
        let output = command.env(MEETING, "").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        report(&format!("broken handles: {}", said.trim()));
        assert!(output.status.success(), "{said}");
    }
    if !gpu.capabilities().vmm {
        return;
    }
    let pipe = rustix::pipe::pipe().unwrap().0;
    let memfd = rustix::fs::memfd_create("no GPU's", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, 4 << 20).unwrap();
    let [null, gpus] = ["/dev/null", "/dev/nvidiactl"].map(|path| File::open(path).ok().map(OwnedFd::from));
    let ticket = Ticket {
        by_fd: true,
        gpu: gpu.device().uuid,
        allocation: 4 << 20,
        offset: 0,
        bytes: 4096,
        buffer: 1,
        handle: [0; 64],
    };
    for fd in [Some(pipe), Some(memfd), null, gpus].into_iter().flatten() {
        let start = Instant::now();
        let refused = gpu.import_ipc(&ticket, Some(&fd));
        report(&format!("{fd:?}: {:?} after {:?}", refused.as_ref().err(), start.elapsed()));
        assert!(refused.is_err() && start.elapsed() < Duration::from_secs(5));
    }
    // The right descriptor, with false tickets.
    let region = gpu.alloc_device(DeviceKind::Exportable, 4 << 20).unwrap();
    let Some(exported) = exported(gpu, DeviceKind::Exportable, &region) else { return };
    for allocation in [4096, 2 << 20, (4 << 20) + 1, 6 << 20, 1 << 45, u64::MAX] {
        let lie = Ticket { allocation, bytes: 4096, offset: 0, ..exported.ticket };
        let opened = gpu.import_ipc(&lie, exported.fd.as_ref());
        report(&format!("{allocation} bytes of 4 MiB: {:?}", opened.as_ref().err()));
        // A part of it belongs to the owner as well.
        assert!(opened.is_err() || allocation == 2 << 20, "{allocation}");
    }
    region.write(0, &[1; 4096]).unwrap();
    assert_eq!(gpu.refusals(), (0, None));
}

/// The other process of the test above; nothing when it runs by itself.
#[test]
fn the_process_that_gets_broken_handles() {
    if std::env::var_os(MEETING).is_none_or(|meeting| !meeting.is_empty()) {
        return;
    }
    let (gpu, ticket, _) = received().unwrap();
    let noise = (0..64).map(|seed| random(seed, 64).try_into().unwrap());
    let broken = (0..64).map(|at| {
        let mut handle = ticket.handle;
        handle[at] ^= 0x15;
        handle
    });
    let (mut refused, mut taken) = (0, 0);
    for handle in [[0; 64], [0xff; 64]].into_iter().chain(noise).chain(broken) {
        match gpu.import_ipc(&Ticket { handle, ..ticket }, None) {
            Ok(region) => {
                // Invalid bytes, or a place in the same allocation: memory of this length all the same.
                assert_eq!(region.len(), ticket.bytes as usize);
                taken += 1;
            }
            Err(error) => {
                assert!(matches!(error, Error::Driver { .. } | Error::Foreign { .. }), "{error}");
                refused += 1;
            }
        }
    }
    report(&format!("{refused} handles refused, {taken} taken"));
    assert!(refused > 64, "{refused} handles refused, {taken} taken");
    // The GPU still works after all of them.
    let region = gpu.import_ipc(&ticket, None).unwrap();
    region.write(0, &[7; 4096]).unwrap();
    assert_eq!(gpu.refusals(), (0, None));
}

/// Exports of another GPU's memory would describe that GPU's memory as this one's.
#[test]
fn a_gpu_exports_only_its_own_memory() {
    let Some(bench) = bench("a_gpu_exports_only_its_own_memory") else { return };
    if bench.cuda.devices().unwrap().len() < 2 {
        report("SKIPPED: cuda a_gpu_exports_only_its_own_memory: there is one GPU here, and two are needed");
        return;
    }
    let (gpu, other) = (&bench.gpu, bench.cuda.open("1").unwrap());
    let theirs = other.alloc_device(DeviceKind::Plain, 4 << 20).unwrap();
    let ring = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let of_another = |error: Error| {
        assert!(matches!(&error, Error::NotSupported { why, .. } if why.contains("another GPU")), "{error}");
    };
    let check = || {
        of_another(gpu.export_ipc(&theirs).unwrap_err());
        of_another(gpu.export_dma_buf(&theirs, Span::Allocation, false).unwrap_err());
        // SAFETY: the memory lives until the end of the test.
        of_another(unsafe { gpu.borrow(theirs.addr(), 4096, ()) }.err().unwrap());
    };
    check();
    of_another(gpu.copier(&ring, &theirs).err().unwrap());
    // SAFETY: as above.
    assert_eq!(unsafe { other.borrow(theirs.addr(), 4096, ()) }.unwrap().addr(), theirs.addr());
    // Even if kernels of the first reach it.
    match other.served_by(gpu) {
        Ok(_reached) => {
            check();
            assert!(gpu.copier(&ring, &theirs).is_ok());
        }
        Err(error) => report(&format!("the second GPU's memory is not reached: {error}")),
    }
}
