//! Arrays on the emulated GPU, and on the one that `ONEHOP_TEST_GPU` names. The drive is the simulator on CPU threads,
//! which reach host memory only, or on the GPU, which reaches its own.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use onehop_array::{Array, ArrayError, ArrayOptions, ArrayRows};
use onehop_drive::{Drive, Placement};
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_sim::Sim;

const BYTES: usize = 16 << 20;

fn gpus() -> Vec<Arc<dyn Gpu>> {
    let mut gpus: Vec<Arc<dyn Gpu>> = vec![Arc::new(Emulated::new())];
    match std::env::var("ONEHOP_TEST_GPU") {
        Ok(name) => gpus.push(Arc::new(Cuda::load().unwrap().open(&name).unwrap())),
        Err(_) => println!("skipped on a real GPU: ONEHOP_TEST_GPU names none"),
    }
    gpus
}

/// A drive, and the objects that keep it running.
struct Bed {
    gpu: Arc<dyn Gpu>,
    sim: Sim,
    drive: Drive,
    placement: Placement,
}

impl Bed {
    fn open(gpu: &Arc<dyn Gpu>, resident: bool, more: &str) -> Self {
        // Before the resident controller occupies the GPU.
        gpu.array_kernels().unwrap();
        let spec = format!("mem:16M?{more}");
        let (sim, port, placement) = if resident {
            let drive = onehop_resident::open(&spec, gpu.clone()).unwrap();
            (drive.sim().clone(), drive.port(), Placement::TIER3)
        } else {
            let sim = onehop_sim::open(&spec).unwrap();
            let port = sim.port();
            (sim, port, Placement::TIER1)
        };
        sim.write_media(1, 0, &media()).unwrap();
        let options = onehop_drive::Options { writable: true, ..onehop_drive::Options::default() };
        let drive = Drive::open(port, options).unwrap();
        println!("{}, queue and pages at {placement:?}, {more}", gpu.name());
        Self { gpu: gpu.clone(), sim, drive, placement }
    }

    fn array(&self, page_bytes: u32, pages: u64) -> Array {
        let options = ArrayOptions {
            page_bytes,
            writable: true,
            patience: Duration::from_secs(60),
            ..ArrayOptions::new(self.placement, pages * u64::from(page_bytes))
        };
        let ns = self.drive.namespace(1).unwrap();
        Array::open(&self.drive, self.gpu.clone(), ns, 0..ns.blocks, options).unwrap()
    }

    /// A larger count on a real GPU.
    fn many(&self, emulated: u64, real: u64) -> u64 {
        if self.gpu.simulated() { emulated } else { real }
    }

    fn gathers(&self, array: &Array, rows: ArrayRows, ids: &[u64], shadow: &[u8]) {
        let bytes = rows.bytes as usize;
        let out = self.gpu.alloc(Place::Vram, ids.len() * bytes).unwrap();
        let moved = array.gather(rows, ids, &out).unwrap();
        assert_eq!(moved.failed, []);
        self.same(&out, rows, ids, shadow);
    }

    fn same(&self, out: &onehop_gpu::Region, rows: ArrayRows, ids: &[u64], shadow: &[u8]) {
        let mut got = vec![0; ids.len() * rows.bytes as usize];
        out.read(0, &mut got).unwrap();
        for (id, got) in ids.iter().zip(got.chunks(rows.bytes as usize)) {
            let at = (*id * u64::from(rows.stride)) as usize;
            assert!(got == &shadow[at..at + got.len()], "row {id}");
        }
    }
}

fn media() -> Vec<u8> {
    (0..BYTES as u32 / 4).flat_map(|i| (i.wrapping_mul(0x9e37_79b9) ^ (i >> 7)).to_le_bytes()).collect()
}

fn beds(more: &str, mut test: impl FnMut(&Bed)) {
    for gpu in gpus() {
        for resident in [false, true] {
            let bed = Bed::open(&gpu, resident, more);
            test(&bed);
            assert_eq!(bed.sim.violations(), []);
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn random(count: u64, limit: u64) -> Vec<u64> {
    let mut random = Random(count);
    (0..count).map(|_| random.below(limit)).collect()
}

#[test]
fn rows_are_right_and_each_page_takes_one_command() {
    let media = media();
    beds("", |bed| {
        for (page, bytes, stride) in [(512, 264, 264), (4096, 256, 256), (65536, 4096, 4096)] {
            let array = bed.array(page, BYTES as u64 / u64::from(page));
            let rows = array.rows(bytes, stride);
            let ids = random(bed.many(500, 20_000), rows.count.min((4 << 20) / u64::from(stride)));
            bed.gathers(&array, rows, &ids, &media);
            let page = u64::from(page);
            let of = |id: &u64| {
                let first = id * u64::from(stride);
                first / page..(first + u64::from(bytes) - 1) / page + 1
            };
            let pages = ids.iter().flat_map(of).collect::<BTreeSet<_>>().len();
            assert_eq!(array.stats().unwrap().reads as usize, pages, "pages of {page}");
            bed.gathers(&array, rows, &ids, &media);
            assert_eq!(array.stats().unwrap().reads as usize, pages, "pages of {page}");
            array.close().unwrap();
        }
    });
}

/// Small enough for a sanitizer, under which no controller can be resident. `ONEHOP_GPU_UNFAIR` says that threads of a
/// warp may starve each other: then only one lane reads a page, and a whole warp copies only cached pages.
#[test]
fn every_kernel_once() {
    let mut shadow = media();
    let is_unfair = std::env::var_os("ONEHOP_GPU_UNFAIR").is_some();
    for gpu in gpus() {
        let bed = Bed::open(&gpu, false, "");
        let array = bed.array(512, 64);
        let rows = array.rows(264, 264);
        if is_unfair {
            let ids = random(20, 2000);
            ids.iter().for_each(|id| bed.gathers(&array, rows, &[*id], &shadow));
            bed.gathers(&array, rows, &ids, &shadow);
        } else {
            let ids = random(200, 2000);
            bed.gathers(&array, rows, &ids, &shadow);
            let out = bed.gpu.alloc(Place::Vram, ids.len() * 264).unwrap();
            assert_eq!(array.read(rows, &ids, &out).unwrap().failed, []);
            bed.same(&out, rows, &ids, &shadow);
            let bytes: Vec<u8> = (0..8 * 264).map(|i: u32| (i * 7 + (i >> 8)) as u8).collect();
            out.write(0, &bytes).unwrap();
            assert_eq!(array.scatter(rows, &[0, 1, 2, 3, 4, 5, 6, 7], &out).unwrap().failed, []);
            shadow[..bytes.len()].copy_from_slice(&bytes);
            array.flush().unwrap();
            bed.gathers(&array, rows, &[7, 3, 0], &shadow);
            shadow = media();
        }
        array.close().unwrap();
    }
}

#[test]
fn a_cache_of_one_page_serves_65_536_threads() {
    let media = media();
    beds("", |bed| {
        let array = bed.array(4096, 1);
        let rows = array.rows(256, 256);
        let ids = random(bed.many(200, 1 << 16), 64);
        let out = bed.gpu.alloc(Place::Vram, ids.len() * 256).unwrap();
        let moved = array.read(rows, &ids, &out).unwrap();
        assert_eq!(moved.failed, []);
        bed.same(&out, rows, &ids, &media);
        bed.gathers(&array, rows, &ids, &media);
        array.close().unwrap();
    });
}

#[test]
fn reads_and_writes_are_those_of_a_shadow_and_a_flush_is_durable() {
    beds("vwc=1", |bed| {
        let mut shadow = media();
        // A cache that is much too small.
        let array = bed.array(4096, 64);
        let rows = array.rows(264, 520);
        for round in 0..3u64 {
            let ids: BTreeSet<u64> = random(bed.many(200, 10_000) + round, rows.count).into_iter().collect();
            let ids: Vec<u64> = ids.into_iter().collect();
            let bytes: Vec<u8> =
                (0..ids.len() * 264).map(|i| (i as u64 * 7 + round * 13 + (i >> 8) as u64) as u8).collect();
            let from = bed.gpu.alloc(Place::Vram, bytes.len()).unwrap();
            from.write(0, &bytes).unwrap();
            assert_eq!(array.scatter(rows, &ids, &from).unwrap().failed, []);
            for (id, row) in ids.iter().zip(bytes.chunks(264)) {
                shadow[(*id * 520) as usize..][..264].copy_from_slice(row);
            }
            bed.gathers(&array, rows, &random(bed.many(200, 10_000), rows.count), &shadow);
            array.flush().unwrap();
        }
        array.close().unwrap();
        let mut there = vec![0; BYTES];
        bed.sim.read_media(1, 0, &mut there).unwrap();
        assert!(there == shadow);
    });
}

#[test]
fn faults_of_the_drive_change_nothing_but_what_cannot_be_read() {
    let media = media();
    for gpu in gpus() {
        for fault in
            ["late@op=read,every=40,delay=5ms", "reorder@op=read,every=3,by=4", "fail-once@op=read,every=50"]
        {
            let bed = Bed::open(&gpu, false, &format!("fault={fault}"));
            let array = bed.array(4096, 64);
            let rows = array.rows(256, 256);
            bed.gathers(&array, rows, &random(bed.many(300, 5000), rows.count), &media);
            array.close().unwrap();
        }
        let bed = Bed::open(&gpu, false, "fault=media@lba=800-807");
        let array = bed.array(4096, 64);
        let rows = array.rows(4096, 4096);
        let out = bed.gpu.alloc(Place::Vram, 200 * 4096).unwrap();
        let ids: Vec<u64> = (0..200).collect();
        let moved = array.gather(rows, &ids, &out).unwrap();
        assert!(matches!(moved.failed[..], [(100, ArrayError::Read(_))]), "{moved:?}");
        array.close().unwrap();
    }
}
