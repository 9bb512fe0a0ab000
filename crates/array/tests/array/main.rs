//! Arrays on a simulated drive, used by the emulated GPU.
#![allow(clippy::unwrap_used)]

mod closing;
mod faults;
mod hostile;
mod reads;
mod writes;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_array::{Array, ArrayOptions, ArrayRows, MovedRows};
use onehop_drive::{Drive, Placement};
use onehop_gpu::{Emulated, EmulatedThread, Gpu, Place, Region};
use onehop_proto::GpuAddr;
use onehop_sim::{Fault, Sim};

/// Bytes of the simulated drive that have known content.
const BYTES: usize = 16 << 20;
const BLOCK: u64 = 512;

type Pages = onehop_proto::array::DriveArray<EmulatedThread>;

struct Bed {
    sim: Sim,
    drive: Drive,
    gpu: Emulated,
}

/// The word at this index of the drive.
fn word(index: u64) -> u32 {
    (index as u32).wrapping_mul(0x9e37_79b9) ^ (index >> 7) as u32
}

fn media() -> Vec<u8> {
    (0..BYTES as u64 / 4).flat_map(|i| word(i).to_le_bytes()).collect()
}

fn bed(spec: &str) -> Bed {
    let sim = onehop_sim::open(spec).unwrap();
    sim.write_media(1, 0, &media()).unwrap();
    let options = onehop_drive::Options {
        writable: true,
        timeout: Duration::from_millis(200),
        abort_wait: Duration::from_millis(40),
        admin_timeout: Duration::from_secs(2),
        ready_limit: Duration::from_secs(2),
        retries: 2,
        ..onehop_drive::Options::default()
    };
    let drive = Drive::open(sim.port(), options).unwrap();
    Bed { sim, drive, gpu: Emulated::new() }
}

/// A writable cache of so many pages.
fn options(page_bytes: u32, pages: u64) -> ArrayOptions {
    ArrayOptions {
        page_bytes,
        writable: true,
        depth: 63,
        // For a small, busy machine.
        patience: Duration::from_secs(120),
        limit: Duration::from_secs(120),
        ..ArrayOptions::new(Placement::TIER1, pages * u64::from(page_bytes))
    }
}

impl Bed {
    fn array(&self, options: ArrayOptions) -> Array {
        let ns = self.drive.namespace(1).unwrap();
        Array::open(&self.drive, Arc::new(self.gpu.clone()), ns, 0..ns.blocks, options).unwrap()
    }

    fn region(&self, bytes: usize) -> Region {
        self.gpu.alloc(Place::Vram, bytes).unwrap()
    }

    fn inject(&self, fault: &str) {
        self.sim.inject(Fault::parse(fault).unwrap());
    }

    /// Gathers rows; returns the result and the bytes.
    fn gather(&self, array: &Array, rows: ArrayRows, ids: &[u64]) -> (MovedRows, Vec<u8>) {
        let mut bytes = vec![0; ids.len() * rows.bytes as usize];
        let out = self.region(bytes.len());
        let moved = array.gather(rows, ids, &out).unwrap();
        out.read(0, &mut bytes).unwrap();
        (moved, bytes)
    }

    /// Writes rows that all succeed.
    fn scatter(&self, array: &Array, rows: ArrayRows, ids: &[u64], bytes: &[u8]) {
        let from = self.region(bytes.len());
        from.write(0, bytes).unwrap();
        assert_eq!(array.scatter(rows, ids, &from).unwrap().failed, []);
    }

    /// Runs a kernel of the test; returns each thread's result.
    fn run<R: Send + 'static>(
        &self,
        array: &Array,
        threads: u32,
        kernel: impl Fn(&EmulatedThread, &Pages, u32) -> R + Send + Sync + 'static,
    ) -> Vec<R> {
        let handle: GpuAddr = array.handle();
        let said: Arc<Mutex<Vec<(u32, R)>>> = Arc::default();
        let answers = said.clone();
        let running = self.gpu.start(threads, move |mem, index| {
            let array = Pages::open(mem, handle).unwrap();
            let answer = kernel(mem, &array, index);
            answers.lock().unwrap().push((index, answer));
        });
        running.unwrap().join().unwrap();
        let mut said = std::mem::take(&mut *said.lock().unwrap());
        said.sort_by_key(|(index, _)| *index);
        said.into_iter().map(|(_, answer)| answer).collect()
    }
}

/// The bytes of rows in the drive's initial content.
fn expected(media: &[u8], rows: ArrayRows, ids: &[u64]) -> Vec<u8> {
    let row = |id: &u64| {
        let at = *id as usize * rows.stride as usize;
        &media[at..at + rows.bytes as usize]
    };
    ids.iter().flat_map(row).copied().collect()
}

/// A pseudo-random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Runs `f`, which has to end within `limit`.
fn within<R>(limit: Duration, f: impl FnOnce() -> R) -> R {
    let begun = Instant::now();
    let result = f();
    assert!(begun.elapsed() < limit, "it took {:?}", begun.elapsed());
    result
}
