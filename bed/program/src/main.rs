//! The driver's tests on real PCI devices, for the guests of `bed/run`. Each line that starts with PASS or FAIL is a test;
//! a line that starts with CHECK says what the host has to find in the file behind the drive or the emulated VRAM.
#![forbid(unsafe_code)]

mod compare;
mod edu;
mod exported;
mod kills;
mod placements;
mod rdma;
mod report;
mod sdr;
#[path = "../../../crates/drive/tests/suite/mod.rs"]
mod suite;

use std::process::ExitCode;

use onehop_drive::{Drive, Options};
use onehop_os::{ControllerBackend, HostMem};
use onehop_pci::Root;

use report::{Failed, check};

const USAGE: &str = "onehop-bed placements|suite DRIVE VRAM
onehop-bed edu DEVICE
onehop-bed kills DRIVE VRAM COUNT SERIAL
onehop-bed victim DRIVE VRAM SHARED-FILE
onehop-bed rdma-far NIC ADDRESS:PORT
onehop-bed rdma-near NIC ADDRESS:PORT VRAM-FILE VRAM
onehop-bed rdma-unplugged NIC ADDRESS:PORT FOLDER
onehop-bed compare LOG VRAM-FILE DISK-FILE
onehop-bed sdr ...
  DRIVE: 0000:00:01.0?via=vfio   VRAM: the address of the device whose BAR stands for a GPU's memory,
  or - for memory that comes by standard input as a dma-buf (kmod-test export): -memory, if no file of
  the host is behind it, -view, if the drive is to be given its pages all the same";

fn main() -> ExitCode {
    // Shown with the test that fails by it.
    std::panic::set_hook(Box::new(|panic| println!("    {panic}")));
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let ran = match args[..] {
        ["placements", drive, vram] => placements::run(drive, vram),
        ["suite", drive, _] => driver_suite(drive),
        ["edu", device] => edu::run(device),
        ["kills", drive, vram, count, serial] => kills::run(drive, vram, count, serial),
        ["victim", drive, vram, shared] => kills::victim(drive, vram, shared),
        ["rdma-far", nic, address] => rdma::far(nic, address),
        ["rdma-near", nic, address, vram, bar] => rdma::near(nic, address, vram, bar),
        ["rdma-unplugged", nic, address, signs] => rdma::unplugged(nic, address, signs),
        ["sdr", ref more @ ..] => sdr::run(more),
        ["compare", log, vram, disk] => compare::run(log, vram, disk),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed(why)) => {
            println!("FAIL {}: {why}", args.first().unwrap_or(&"onehop-bed"));
            ExitCode::FAILURE
        }
    }
}

/// A drive by its name.
fn port(drive: &str) -> Result<ControllerBackend, Failed> {
    Ok(onehop_pci::open(&Root::here(), drive.parse()?)?)
}

/// The memory that stands for a GPU's.
fn vram(name: &str) -> Result<HostMem, Failed> {
    Ok(onehop_pci::bar_memory(&Root::here(), name.parse()?, None)?)
}

/// The suite that every controller has to pass, with the format that the drive has.
fn driver_suite(drive: &str) -> Result<(), Failed> {
    let format = Drive::open(port(drive)?, Options::default())?.namespace(1)?.format;
    let plain = suite::Case {
        lba: format.lba_bytes() as u32,
        ms: format.metadata,
        ext: format.extended,
        loses_metadata: format.metadata > 0,
        ..suite::PLAIN
    };
    for case in [
        plain,
        suite::Case { depth: 1, queues: 1, sgl: false, ..plain },
        suite::Case { depth: 63, queues: 4, ..plain },
    ] {
        let port = port(drive)?;
        let what = format!("the driver's suite, {} queues, {} deep, {drive}", case.queues, case.depth);
        check(&what, || {
            // The suite's tests panic where they fail.
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| suite::run(port, case)));
            ran.map_err(|_| Failed("a test of it panicked; what it said stands above".into()))
        });
    }
    Ok(())
}
