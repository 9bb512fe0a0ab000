//! GPU memory for other devices and other processes, from the middle of an allocation.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use onehop_gpu::cuda::{Cuda, DeviceKind, Span, Ticket};
use onehop_gpu::{Error, Gpu, Place, Region};
use onehop_os::DmaMemory;

use crate::{bench, bytes_of, random, tell};

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
                tell(&format!("{kind:?} dma-buf: {error}"));
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
        tell(&format!("{kind:?}: {all:?} of {:?} bytes, {pages:?} of {:?}", size(&all.fd), size(&pages.fd)));
        assert!([Ok(all.whole), Err(rustix::io::Errno::INVAL)].contains(&size(&all.fd)));
        let pcie = gpu.export_dma_buf(&part, Span::Allocation, true).unwrap();
        tell(&format!("{kind:?}, PCIe asked for: {pcie:?}"));
        assert_eq!(pcie.pcie, pcie.why_not_pcie.is_none());
        // As a mapper of real hardware asks.
        let seam = part.dma_buf().unwrap().unwrap();
        assert_eq!((seam.offset, seam.bytes), (70_001, BYTES as u64));
    }
    let host = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    assert!(host.dma_buf().is_none());
    let error = gpu.export_dma_buf(&host, Span::Pages, false).unwrap_err();
    assert!(error.to_string().contains("udmabuf"), "{error}");
}

fn send(ticket: &Ticket, fd: Option<OwnedFd>) -> std::process::Output {
    let hex: String = ticket.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sharing::the_other_process", "--nocapture"])
        .env(CHILD, hex)
        .stdin(fd.map_or_else(Stdio::null, Stdio::from))
        .output()
        .unwrap()
}

#[test]
fn another_process_opens_the_middle_of_an_allocation() {
    let Some(bench) = bench("another_process_opens_the_middle_of_an_allocation") else { return };
    let gpu = &bench.gpu;
    for kind in [DeviceKind::Plain, DeviceKind::Exportable] {
        let whole = gpu.alloc_device(kind, 4 << 20).unwrap();
        let part = whole.slice(1_234_568..1_234_568 + BYTES).unwrap();
        let exported = match gpu.export_ipc(&part) {
            Ok(exported) => exported,
            Err(error) => {
                // Virtual machines and containers may lack one of the two ways; the error has to say so.
                tell(&format!("{kind:?} memory cannot be shared here: {error}"));
                assert!(matches!(error, Error::Driver { .. }), "{error}");
                continue;
            }
        };
        part.write(0, &random(9, BYTES)).unwrap();
        let ticket = exported.ticket;
        assert_eq!((ticket.offset, ticket.by_fd), (1_234_568, kind == DeviceKind::Exportable));
        assert!(gpu.ticket_is_current(&ticket, &part).unwrap());
        let other = gpu.alloc_device(kind, 4 << 20).unwrap();
        assert!(!gpu.ticket_is_current(&ticket, &other).unwrap());
        if ticket.by_fd {
            let error = gpu.import_ipc(&ticket, None).unwrap_err();
            assert!(error.to_string().contains("descriptor is missing"), "{error}");
        }
        let abroad = Ticket { gpu: [1; 16], ..ticket };
        assert!(matches!(gpu.import_ipc(&abroad, None), Err(Error::Foreign { .. })));
        let output = send(&ticket, exported.fd);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        tell(&format!("{kind:?}, the other process: {}", said.trim()));
        assert!(output.status.success(), "{said}");
        // It answered in the same bytes, and touched no others.
        assert!(bytes_of(&part) == random(10, BYTES), "{kind:?}");
        let before = bytes_of(&whole.slice(0..1_234_568).unwrap());
        let after = bytes_of(&whole.slice(1_234_568 + BYTES..4 << 20).unwrap());
        assert!(before.iter().chain(&after).all(|byte| *byte == 0), "{kind:?}");
    }
}

/// The other process of the test above; nothing when it runs by itself.
#[test]
fn the_other_process() {
    let Ok(hex) = std::env::var(CHILD) else { return };
    let bytes: Vec<u8> =
        (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
    let ticket = Ticket::from_bytes(&bytes).unwrap();
    let gpu = Cuda::load().unwrap().open("0").unwrap();
    let fd = ticket.by_fd.then(|| std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    // A ticket for memory of another length is noticed.
    let longer = Ticket { allocation: ticket.allocation + (2 << 20), ..ticket };
    let refused = gpu.import_ipc(&longer, fd.as_ref());
    assert!(refused.is_err(), "a ticket for a longer allocation was taken");
    tell(&format!("a wrong length: {}", refused.err().unwrap()));
    let region: Region = gpu.import_ipc(&ticket, fd.as_ref()).unwrap();
    assert_eq!(region.len(), BYTES);
    assert!(bytes_of(&region) == random(9, BYTES), "the other process's bytes are not there");
    region.write(0, &random(10, BYTES)).unwrap();
}
