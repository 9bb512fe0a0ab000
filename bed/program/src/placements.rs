//! Every placement of queues and data: written from there, read back by another way, read into there, and told to the host.
//! One queue pair of the drive is enough for it.

use std::sync::{Arc, Mutex, PoisonError};

use onehop_drive::{Drive, GpuJob, GpuMode, GpuSetup, Namespace, Options, Placement};
use onehop_gpu::{Emulated, Gpu, Place, Region};
use onehop_os::{ControllerBackend, DmaMemory, Heap, HostMem, Mapped, Mapper};

use crate::exported::Exported;
use crate::report::{Failed, check, ensure, expect, noise, offset_in};

/// Bytes of each transfer: several commands, each with a list of pages.
const BYTES: usize = 384 << 10;
/// Most bytes of a command.
const COMMAND: u64 = 64 << 10;
/// What the GPU gets of the VRAM for its own, and the last test as much. Both lie at the VRAM's end, which may be beyond
/// what 32 bits reach.
const SHARE: usize = 24 << 20;

/// What all tests need.
struct Test {
    drive: Drive,
    ns: Namespace,
    gpu: Arc<dyn Gpu>,
    vram: HostMem,
    /// What the host looks at must not be given out again.
    kept: Vec<Region>,
    lba: u64,
}

/// All placements on one drive.
pub(crate) fn run(drive: &str, vram: &str) -> Result<(), Failed> {
    let mut port = crate::port(drive)?;
    // Memory of this machine lies in no file of the host's.
    let host_sees = vram != "-memory";
    let vram = match vram {
        // Mapped by whoever exports it, and by nobody else.
        "-view" => Exported::receive()?.memory,
        "-" | "-memory" => {
            let exported = Exported::receive()?;
            let memory = exported.memory.clone();
            port.mapper = Arc::new(exported.mapper(port.mapper));
            memory
        }
        name => crate::vram(name)?,
    };
    placements(port.clone(), &vram, host_sees, drive)?;
    let (whole, rest) = (vram.clone(), vram.slice(vram.len() - SHARE..vram.len())?);
    let inside = ControllerBackend { mapper: Arc::new(Inside::new(port.mapper.clone(), rest)), ..port };
    check(&format!("all of the driver's memory in VRAM, PRP lists and admin queues too, {drive}"), || {
        everything_inside(inside, &whole)
    });
    Ok(())
}

fn options() -> Options {
    Options { writable: true, queues: 4, max_transfer: COMMAND, ..Options::default() }
}

fn placements(port: ControllerBackend, vram: &HostMem, host_sees: bool, name: &str) -> Result<(), Failed> {
    let drive = Drive::open(port, options())?;
    let ns = drive.namespace(1)?.clone();
    let own = vram.slice(vram.len() - 2 * SHARE..vram.len() - SHARE)?;
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::with_vram(own));
    let mut test = Test { drive, ns, gpu, vram: vram.clone(), kept: Vec::new(), lba: 2048 };
    let (owner, shared) = (GpuMode::Owner, GpuMode::Shared { threads: 32 });
    for (what, placement, mode) in [
        ("gpu/tier1: all in host memory", Placement::TIER1, owner),
        ("gpu/tier2: data in VRAM", Placement::TIER2, owner),
        ("gpu/posted: data and CQ in VRAM", Placement::POSTED, owner),
        ("gpu/posted: data and CQ in VRAM, SQ in the drive's CMB", Placement::POSTED_CMB, owner),
        ("gpu/tier3: data, CQ and SQ in VRAM", Placement::TIER3, owner),
        ("gpu/tier3: the same, the queue shared by threads", Placement::TIER3, shared),
    ] {
        check(&format!("{what}, {name}"), || test.by_gpu(placement, mode));
    }
    check(&format!("cpu/direct: data in VRAM, {name}"), || test.by_cpu(Place::Vram));
    check(&format!("cpu/pinned: data in host memory, {name}"), || test.by_cpu(Place::PinnedHost));
    check(&format!("what was read into VRAM lies there for the host, {name}"), || test.tell(host_sees));
    Ok(())
}

impl Test {
    /// Blocks that no other test uses, and what will be in them.
    fn blocks(&mut self) -> (GpuJob, Vec<u8>) {
        let blocks = BYTES as u64 / self.ns.format.lba_bytes();
        let job = GpuJob { lba: self.lba, blocks, offset: 0 };
        self.lba += blocks;
        (job, noise(job.lba, BYTES))
    }

    fn by_gpu(&mut self, placement: Placement, mode: GpuMode) -> Result<(), Failed> {
        let (job, data) = self.blocks();
        let queues = if mode == GpuMode::Owner { self.drive.identity().queues.min(2) as u16 } else { 1 };
        let setup = GpuSetup { mode, queues, depth: 16, ..GpuSetup::new(placement) };
        let (from, source) = self.memory(placement.data)?;
        from.write(0, &data)?;
        self.drive.gpu_queues(self.gpu.clone(), setup)?.write(&self.ns, &[job], &source)?;
        self.compare_with_drive(&job, &data)?;
        let (into, target) = self.memory(placement.data)?;
        self.drive.gpu_queues(self.gpu.clone(), setup)?.read(&self.ns, &[job], &target)?;
        self.arrived(into, &data)
    }

    fn by_cpu(&mut self, place: Place) -> Result<(), Failed> {
        let (job, data) = self.blocks();
        let (from, source) = self.memory(place)?;
        from.write(0, &data)?;
        self.drive.queue()?.write(&self.ns, job.lba, job.blocks, &source, 0)?;
        self.compare_with_drive(&job, &data)?;
        let (into, target) = self.memory(place)?;
        self.drive.queue()?.read(&self.ns, job.lba, job.blocks, &target, 0)?;
        self.arrived(into, &data)
    }

    fn memory(&self, place: Place) -> Result<(Region, onehop_drive::Buffer), Failed> {
        Ok(self.drive.gpu_buffer(&*self.gpu, place, BYTES)?)
    }

    /// By the CPU, through host memory.
    fn compare_with_drive(&self, job: &GpuJob, data: &[u8]) -> Result<(), Failed> {
        let buffer = self.drive.buffer(BYTES)?;
        self.drive.queue()?.read(&self.ns, job.lba, job.blocks, &buffer, 0)?;
        let same = buffer.host()?.to_vec(0, BYTES)? == data;
        expect("disk", job.lba * self.ns.format.lba_bytes(), data);
        ensure(same, || "the drive holds other bytes than were written".into())
    }

    fn arrived(&mut self, region: Region, data: &[u8]) -> Result<(), Failed> {
        let mut got = vec![0; data.len()];
        region.read(0, &mut got)?;
        self.kept.push(region);
        ensure(got == data, || "other bytes arrived than were written".into())
    }

    /// Has the host compare what was read into VRAM.
    fn tell(&self, host_sees: bool) -> Result<(), Failed> {
        let in_vram: Vec<_> = self.kept.iter().filter(|region| region.place() == Place::Vram).collect();
        for region in in_vram.iter().filter(|_| host_sees) {
            let host = region.host().ok_or("VRAM that is no BAR")?;
            let mut bytes = vec![0; region.len()];
            region.read(0, &mut bytes)?;
            expect("vram", offset_in(&self.vram, host)?, &bytes);
        }
        self.drive.queue()?.flush(&self.ns)?;
        ensure(in_vram.len() == 6, || {
            format!("{} placements had their data in VRAM, and not 6", in_vram.len())
        })
    }
}

/// A mapper whose host memory is a device's.
struct Inside {
    inner: Arc<dyn Mapper>,
    memory: HostMem,
    free: Arc<Mutex<Heap>>,
}

impl Inside {
    fn new(inner: Arc<dyn Mapper>, memory: HostMem) -> Self {
        let free = Arc::new(Mutex::new(Heap::new(0, memory.len())));
        Self { inner, memory, free }
    }
}

impl Mapper for Inside {
    fn name(&self) -> &str {
        "memory of a BAR"
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        let len = bytes.next_multiple_of(4096);
        let none = || onehop_os::Error::NoMemory { mapper: "the BAR".into(), bytes };
        let at = self.free.lock().unwrap_or_else(PoisonError::into_inner).take(len).ok_or_else(none)?;
        let free = self.free.clone();
        let give = move || free.lock().unwrap_or_else(PoisonError::into_inner).free(at, len);
        let part = self.memory.slice(at..at + len)?.on_last_drop(give);
        part.fill(0, len, 0)?;
        Ok(part)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        self.inner.map(memory)
    }
}

/// Admin queues, I/O queues, PRP lists, identify data: the drive reads and writes nothing but the BAR.
fn everything_inside(port: ControllerBackend, vram: &HostMem) -> Result<(), Failed> {
    let drive = Drive::open(port, options())?;
    let ns = drive.namespace(1)?.clone();
    let (queue, lba) = (drive.queue()?, 1024);
    let blocks = BYTES as u64 / ns.format.lba_bytes();
    let (data, buffer) = (noise(7, BYTES), drive.buffer(BYTES)?);
    buffer.host()?.write(0, &data)?;
    queue.write(&ns, lba, blocks, &buffer, 0)?;
    buffer.host()?.fill(0, BYTES, 0)?;
    queue.read(&ns, lba, blocks, &buffer, 0)?;
    offset_in(vram, buffer.host()?)?;
    expect("disk", lba * ns.format.lba_bytes(), &data);
    ensure(buffer.host()?.to_vec(0, BYTES)? == data, || "other bytes came back than were written".into())
}
