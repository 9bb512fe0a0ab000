//! A program that is killed while its drive works: the drive stops before the memory is anybody else's, and goes back to the
//! kernel's driver.

use std::fs::File;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Io, Op, Options};
use onehop_os::HostMem;
use onehop_pci::Root;

use crate::report::{Failed, check, ensure};

/// What the drive writes to, in VRAM and in shared memory: a page that it must leave alone, its target, another such page.
const GUARD: usize = 4096;
const TARGET: usize = 256 << 10;
const WHOLE: usize = TARGET + 2 * GUARD;
/// Bytes of a command.
const BLOCK: usize = 4096;
const ON_GUARD: u8 = 0x5a;
const AFTER: u8 = 0xc3;
/// How long a late write is waited for.
const QUIET: Duration = Duration::from_millis(30);
/// How long the drive may take to be the kernel's again.
const BACK_WITHIN: Duration = Duration::from_secs(15);

/// Kills a victim so many times, at random moments.
pub(crate) fn run(drive: &str, vram: &str, count: &str, serial: &str) -> Result<(), Failed> {
    let count: u32 = count.parse()?;
    let (name, at): (_, &str) = (drive, drive.split('?').next().unwrap_or(drive));
    let memory = crate::vram(vram)?.slice(0..WHOLE)?;
    let shared_path = "/tmp/shared";
    let file = File::options().read(true).write(true).create(true).truncate(true).open(shared_path)?;
    file.set_len(WHOLE as u64)?;
    let shared = HostMem::of_file(&file, WHOLE)?;
    let mut rng = crate::suite::Rng(count.into());
    let mut working = 0;
    check(
        &format!("killed {count} times, {name}: no late write, untouched guards, back with the kernel"),
        || {
            for round in 0..count {
                let told = |Failed(why): Failed| Failed(format!("after kill {}: {why}", round + 1));
                for mem in [&memory, &shared] {
                    mem.fill(0, WHOLE, ON_GUARD)?;
                }
                let mut victim = Victim::start(name, vram, shared_path)?;
                // Half of them while the drive is being brought up, half of them while it works.
                let at_work = round % 2 == 0;
                if at_work {
                    victim.wait_until_it_works()?;
                    working += 1;
                }
                std::thread::sleep(Duration::from_micros(rng.below(if at_work { 60_000 } else { 400_000 })));
                victim.kill()?;
                let both = [("VRAM", &memory), ("shared memory", &shared)];
                // By VFIO the kernel has stopped the drive when a killed process has gone; otherwise the guardian does it, or
                // has the module do it.
                if !name.ends_with("vfio") {
                    stopped(at)?;
                }
                quiet(&both).map_err(told)?;
                back_with_the_kernel(at, serial).map_err(told)?;
                quiet(&both).map_err(told)?;
            }
            ensure(working > 0, || "no victim ever worked".into())
        },
    );
    Ok(())
}

struct Victim(Child);

impl Victim {
    fn start(drive: &str, vram: &str, shared: &str) -> Result<Self, Failed> {
        let mut command = Command::new("/proc/self/exe");
        Ok(Self(command.args(["victim", drive, vram, shared]).stdout(Stdio::piped()).spawn()?))
    }

    fn wait_until_it_works(&mut self) -> Result<(), Failed> {
        let mut said = [0; 5];
        let out = self.0.stdout.as_mut().ok_or("no pipe from the victim")?;
        out.read_exact(&mut said).map_err(|e| Failed(format!("the victim ended before it worked: {e}")))?;
        ensure(&said == b"works", || format!("the victim said {:?}", String::from_utf8_lossy(&said)))
    }

    fn kill(&mut self) -> Result<(), Failed> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

/// The drive has been reset: the guardian lets go of its reservation after that. Without bus mastering alone QEMU's model still
/// carries out what it was working on.
fn stopped(address: &str) -> Result<(), Failed> {
    let (root, path) = (Root::here(), format!("/sys/bus/pci/devices/{address}/driver_override"));
    let begun = Instant::now();
    while root.text(&path)?.starts_with("onehop") {
        ensure(begun.elapsed() < BACK_WITHIN, || format!("{address} was not reset"))?;
    }
    Ok(())
}

/// The kernel's driver has the drive, and it is the same one.
fn back_with_the_kernel(address: &str, serial: &str) -> Result<(), Failed> {
    let root = Root::here();
    let folder = format!("/sys/bus/pci/devices/{address}");
    let begun = Instant::now();
    loop {
        let driver = root.link_name(&format!("{folder}/driver"));
        let controllers = root.list(&format!("{folder}/nvme")).unwrap_or_default();
        let read = |name: &String| root.text(&format!("{folder}/nvme/{name}/serial")).ok();
        let found = controllers.iter().find_map(read);
        if driver.as_deref() == Some("nvme") && found.as_deref() == Some(serial) {
            return Ok(());
        }
        if begun.elapsed() >= BACK_WITHIN {
            return Err(Failed(format!(
                "{address} has the driver {driver:?} and the serial number {found:?}"
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Nothing is written there any more, and nothing was ever written beside the targets.
fn quiet(memories: &[(&str, &HostMem)]) -> Result<(), Failed> {
    for (_, mem) in memories {
        mem.fill(GUARD, TARGET, AFTER)?;
    }
    std::thread::sleep(QUIET);
    for (what, mem) in memories {
        let bytes = mem.to_vec(0, WHOLE)?;
        let (front, rest) = bytes.split_at(GUARD);
        let (target, back) = rest.split_at(TARGET);
        let untouched = front.iter().chain(back).all(|byte| *byte == ON_GUARD);
        ensure(untouched, || format!("a guard page in {what} was written"))?;
        ensure(target.iter().all(|byte| *byte == AFTER), || {
            format!("{what} was written after the drive was given back")
        })?;
    }
    Ok(())
}

/// Reads into VRAM and shared memory until it is killed.
pub(crate) fn victim(drive: &str, vram: &str, shared: &str) -> Result<(), Failed> {
    let memory = crate::vram(vram)?.slice(GUARD..GUARD + TARGET)?;
    let file = File::options().read(true).write(true).open(shared)?;
    let shared = HostMem::of_file(&file, WHOLE)?.slice(GUARD..GUARD + TARGET)?;
    let drive = Drive::open(crate::port(drive)?, Options { depth: 64, ..Options::default() })?;
    let (ns, queue) = (drive.namespace(1)?, drive.queue()?);
    let buffers = [drive.map(memory)?, drive.map(shared)?];
    let blocks = (BLOCK as u64 / ns.format.lba_bytes()) as u32;
    let (mut tokens, mut said) = (std::collections::VecDeque::new(), false);
    for round in 0_u64.. {
        let offset = round / 2 * BLOCK as u64 % TARGET as u64;
        let io =
            Io::new(Op::Read, offset / ns.format.lba_bytes(), blocks, &buffers[round as usize % 2], offset);
        match queue.submit(ns, &io) {
            Ok(token) => tokens.push_back(token),
            Err(Error::Full(_)) => {
                if !said {
                    print!("works");
                    std::io::Write::flush(&mut std::io::stdout())?;
                    said = true;
                }
                if let Some(token) = tokens.pop_front() {
                    queue.wait(token)?;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
