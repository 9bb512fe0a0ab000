//! Tables on a drive: rows of equal size, which GPU threads read through a cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onehop_array::{Array, ArrayError, ArrayOptions, ArrayStats, GatherItem};
use onehop_drive::{Drive, Namespace, Placement};
use onehop_files::{Blocks, Extent, Place, read_extents};
use onehop_gpu::{Gpu, Region};
use onehop_load::engine::calls::RowLayout;

use crate::array::{RoutedArray, open_array};
use crate::engine::block_bytes;
use crate::error::{Error, Result};
use crate::file::FileOnDrive;
use crate::model::ModelOnDrive;
use crate::progress::{Progress, check};
use crate::route::{BetterRoute, RouteRequest};
use crate::volume;

/// Bytes of a page of the cache, unless the drive's blocks are larger. Rows longer than a page take several commands.
const LEAST_PAGE: u64 = 4096;
const MOST_PAGE: u64 = 1 << 16;

/// Rows that one kernel gathers, and their bytes: its time and its memory are limited.
const MOST_ROWS: usize = 1 << 18;
const MOST_BYTES: usize = 1 << 30;

/// Rows of a table's first kernel. Later ones get more or fewer, so that each takes a part of a second: the caller may
/// cancel between them.
const FIRST_ROWS: usize = 1 << 14;
const LEAST_ROWS: usize = 1 << 6;
const SHORT_KERNEL: Duration = Duration::from_millis(100);
const LONG_KERNEL: Duration = Duration::from_millis(500);

/// The distance of the rows that GPU threads know: all rows of a table begin at a multiple of one of these, wherever on
/// the drive they are. Kernels copy by 16 bytes where they can.
const UNITS: [u64; 2] = [16, 4];

/// Where the bytes of a table are on a drive.
pub struct TableBytes {
    extents: Vec<Extent>,
    blocks: Arc<dyn Blocks>,
    bytes: u64,
}

impl TableBytes {
    /// All bytes of a namespace.
    ///
    /// # Errors
    /// As for [`volume::blocks`].
    pub fn of_drive(drive: &Drive, ns: &Namespace) -> Result<Self> {
        let blocks = volume::blocks(drive, ns)?;
        let bytes = ns.blocks.saturating_mul(block_bytes(ns));
        let extents = vec![Extent { offset: 0, len: bytes, place: Place::Drive(0) }];
        Ok(Self { extents, blocks, bytes })
    }

    /// The bytes of a file.
    #[must_use]
    pub fn of_file(file: FileOnDrive) -> Self {
        let FileOnDrive { extents, blocks, bytes, .. } = file;
        Self { extents, blocks, bytes }
    }

    /// The bytes of a model's file, by its index in [`Model::files`](onehop_load::Model::files).
    ///
    /// # Errors
    /// When the model has no such file.
    pub fn of_model(model: &ModelOnDrive, file: usize) -> Result<Self> {
        let source = model.model.files.get(file);
        let Some((source, extents)) = source.and_then(|source| Some((source, source.extents()?))) else {
            return Err(Error::Defect("a tensor of a file that the model does not have"));
        };
        let (extents, blocks) = (extents.to_vec(), model.blocks.clone());
        Ok(Self { extents, blocks, bytes: source.bytes() })
    }

    /// How many there are.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The place of `len` bytes on the drive, if they are there in one piece.
    fn on_drive(&self, offset: u64, len: u64) -> Option<u64> {
        let extent = self.extents.get(self.extents.partition_point(|e| e.offset + e.len <= offset))?;
        match extent.place {
            Place::Drive(start) if extent.offset <= offset && offset + len <= extent.offset + extent.len => {
                Some(start + (offset - extent.offset))
            }
            _ => None,
        }
    }

    /// The bytes of the drive from the first that belong to the table to the last.
    fn span(&self) -> Option<(u64, u64)> {
        let places = self.extents.iter().filter_map(|extent| match extent.place {
            Place::Drive(start) => Some((start, start + extent.len)),
            _ => None,
        });
        places.reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)))
    }

    /// The largest unit that all rows consist of.
    fn unit(&self, layout: &RowLayout) -> Option<u64> {
        UNITS.into_iter().find(|unit| {
            let mut numbers = [layout.bytes as u64, layout.stride as u64, layout.offset].into_iter();
            numbers.all(|number| number.is_multiple_of(*unit))
                && self.extents.iter().all(|extent| match extent.place {
                    Place::Drive(start) => start.is_multiple_of(*unit) && extent.offset.is_multiple_of(*unit),
                    _ => true,
                })
        })
    }
}

/// An open table.
pub struct DriveTable {
    array: Array,
    place: TableBytes,
    layout: RowLayout,
    /// The drive's byte where the array begins.
    start: u64,
    /// See [`UNITS`].
    unit: u64,
    /// Rows of the next kernel.
    most_rows: AtomicUsize,
    /// The route's name.
    pub route: &'static str,
    /// Better routes that were tried, and why they failed.
    pub why_not_better: Vec<BetterRoute>,
}

impl DriveTable {
    /// Opens rows of a drive for a GPU, with `cache_bytes` bytes of memory for pages, by the requested route or the best
    /// that works.
    ///
    /// # Errors
    /// When there are no such rows, and as for [`open_array`].
    pub fn open(
        on: (&Drive, &Namespace, TableBytes),
        layout: RowLayout,
        gpu: &Arc<dyn Gpu>,
        request: &RouteRequest,
        cache_bytes: u64,
    ) -> Result<Self> {
        Self::with_options(on, layout, gpu, request, ArrayOptions::new(Placement::TIER1, cache_bytes))
    }

    /// With these options, but for the size of a page.
    fn with_options(
        (drive, ns, place): (&Drive, &Namespace, TableBytes),
        layout: RowLayout,
        gpu: &Arc<dyn Gpu>,
        request: &RouteRequest,
        options: ArrayOptions,
    ) -> Result<Self> {
        let RowLayout { offset, bytes, stride, count } = layout;
        if count == 0 {
            return Err(Error::NoSuchRows("a table has at least one row".into()));
        }
        if layout.end().is_none_or(|end| end > place.bytes) {
            return Err(Error::NoSuchRows(format!(
                "{count} rows of {bytes} bytes, one every {stride} from byte {offset} on, do not fit into {} bytes",
                place.bytes
            )));
        }
        let Some((first, last)) = place.span() else {
            return Err(Error::NoSuchRows("no block of the drive holds bytes of the file".into()));
        };
        let Some(unit) = place.unit(&layout) else {
            return Err(Error::NoSuchRows(format!(
                "GPU threads read words of 4 bytes, and rows of {bytes} bytes, one every {stride} from byte {offset} on, do \
                 not all consist of them"
            )));
        };
        let block = block_bytes(ns);
        let page = (bytes as u64).next_power_of_two().clamp(LEAST_PAGE, MOST_PAGE).max(block);
        let page_bytes = page.min(drive.identity().max_transfer) as u32;
        let options = ArrayOptions { page_bytes, ..options };
        let blocks = first / block..last.div_ceil(block);
        let RoutedArray { array, route, why_not_better, .. } =
            open_array((drive, ns, blocks), gpu, request, &options)?;
        let most_rows = AtomicUsize::new(FIRST_ROWS);
        Ok(Self {
            array,
            place,
            layout,
            start: first / block * block,
            unit,
            most_rows,
            route,
            why_not_better,
        })
    }

    /// The rows.
    #[must_use]
    pub fn layout(&self) -> RowLayout {
        self.layout
    }

    /// Gathers rows into `out`, in the order of `ids`. Rows that the drive does not have in one extent are read by the
    /// CPU.
    ///
    /// # Errors
    /// [`Error::NoRow`] before anything is written; when rows cannot be read, `out` is too short, the kernel failed, or the
    /// caller cancels.
    pub fn gather(&self, ids: &[u64], out: &Region, progress: &dyn Progress) -> Result<()> {
        let RowLayout { bytes, count, .. } = self.layout;
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id >= count) {
            return Err(Error::NoRow { at, id: *id, count });
        }
        let mut done = 0;
        while done < ids.len() {
            if done > 0 {
                check(progress)?;
            }
            let most = self.most_rows.load(Ordering::Relaxed).min(MOST_BYTES / bytes).max(1);
            let (count, begun) = (most.min(ids.len() - done), Instant::now());
            let (some, end) = (ids.get(done..done + count).unwrap_or_default(), done + count);
            self.gather_some(some, &out.slice(done * bytes..end * bytes)?, progress)?;
            match begun.elapsed() {
                took if took > LONG_KERNEL => self.set_most_rows(count / 2),
                took if took < SHORT_KERNEL && count == most => self.set_most_rows(count * 4),
                _ => {}
            }
            done = end;
        }
        Ok(())
    }

    fn set_most_rows(&self, rows: usize) {
        self.most_rows.store(rows.clamp(LEAST_ROWS, MOST_ROWS), Ordering::Relaxed);
    }

    fn gather_some(&self, ids: &[u64], out: &Region, progress: &dyn Progress) -> Result<()> {
        let RowLayout { offset, bytes, stride, .. } = self.layout;
        let byte = |id: u64| offset + id * stride as u64;
        let mut by_cpu = Vec::new();
        let mut items = Vec::with_capacity(ids.len());
        for (to, id) in (0..).zip(ids) {
            match self.place.on_drive(byte(*id), bytes as u64) {
                Some(at) => items.push(GatherItem { row: (at - self.start) / self.unit, to, pad: 0 }),
                None => by_cpu.push(to as usize),
            }
        }
        let rows = self.array.rows(bytes as u32, self.unit as u32);
        while !items.is_empty() {
            let failed = self.array.gather_items(rows, items.clone(), out)?.failed;
            // A slow drive, or one that is being recovered, keeps pages longer than threads wait for them.
            let has_come_late = |why: &ArrayError| matches!(why, ArrayError::NoRoom | ArrayError::TimedOut);
            if let Some((place, why)) = failed.first()
                && (failed.len() == items.len() || !failed.iter().all(|(_, why)| has_come_late(why)))
            {
                // If the drive is gone, this says why.
                self.array.check()?;
                let row = ids.get(*place).copied().unwrap_or_default();
                return Err(Error::Rows { failed: failed.len(), of: ids.len(), row, why: *why });
            }
            items
                .retain(|item| failed.binary_search_by_key(&(item.to as usize), |(place, _)| *place).is_ok());
            if !items.is_empty() {
                check(progress)?;
            }
        }
        let mut row = vec![0; bytes];
        for to in by_cpu {
            let at = byte(ids.get(to).copied().unwrap_or_default());
            let read = read_extents(&*self.place.blocks, &self.place.extents, at, &mut row)?;
            if read < bytes {
                return Err(Error::Offset { offset: at + read as u64, bytes: self.place.bytes });
            }
            out.write(to * bytes, &row)?;
        }
        Ok(())
    }

    /// The cache's statistics.
    ///
    /// # Errors
    /// When the GPU's memory cannot be read.
    pub fn stats(&self) -> Result<ArrayStats> {
        Ok(self.array.stats()?)
    }
}

#[cfg(test)]
mod tests {
    use onehop_gpu::{Emulated, Place as Memory};
    use onehop_os::StopSignal;

    use super::*;
    use crate::{RouteOptions, controllers};

    const BYTES: u64 = 4 << 20;

    /// A file in pieces of 4 KiB blocks, in any order on the drive, with holes and bytes of its own.
    fn scattered(seed: u64) -> Vec<Extent> {
        let mut random = seed;
        let mut next = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % most
        };
        let mut extents = Vec::new();
        let mut offset = 0;
        while offset < 600_000 {
            let len = (1 + next(8)) * 4096;
            let place = match next(6) {
                0 => Place::Zeros,
                1 => Place::Inline((0..len).map(|byte| byte as u8).collect()),
                _ => Place::Drive(next(BYTES / 4096 - 8) * 4096),
            };
            extents.push(Extent { offset, len, place });
            offset += len;
        }
        extents
    }

    fn open_drive(name: &str) -> Drive {
        let found = controllers::find(name, &StopSignal::default()).unwrap();
        Drive::open(found.backend, RouteOptions::default().drive_options(true)).unwrap()
    }

    /// Cancels when it is asked for the second time.
    struct Twice(AtomicUsize);

    impl Progress for Twice {
        fn is_cancelled(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) > 0
        }
    }

    #[test]
    fn slow_drives_get_as_long_as_they_need_unless_the_caller_cancels() {
        let drive = open_drive("sim:mem:1M?latency=4ms");
        let (ns, gpu): (_, Arc<dyn Gpu>) = (drive.namespace(1).unwrap(), Arc::new(Emulated::new()));
        let place = TableBytes::of_drive(&drive, ns).unwrap();
        let layout = RowLayout { offset: 0, bytes: 4096, stride: 4096, count: 256 };
        // One page of cache: rows wait for each other, longer than a thread waits.
        let options = ArrayOptions {
            patience: Duration::from_millis(100),
            ..ArrayOptions::new(Placement::TIER1, 4096)
        };
        let table = DriveTable::with_options((&drive, ns, place), layout, &gpu, &RouteRequest::Auto, options)
            .unwrap();
        let ids: Vec<_> = (0..100).collect();
        let out = gpu.alloc(Memory::Vram, 100 * 4096).unwrap();
        table.gather(&ids, &out, &()).unwrap();
        let cancelled = table.gather(&ids, &out, &Twice(AtomicUsize::new(0)));
        assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
        // Shorter kernels from now on.
        table.set_most_rows(10);
        table.gather(&ids, &out, &()).unwrap();
        assert_eq!(table.most_rows.load(Ordering::Relaxed), LEAST_ROWS);
    }

    #[test]
    fn rows_of_scattered_files_are_right() {
        let drive = open_drive("sim:mem:4M");
        let ns = drive.namespace(1).unwrap();
        let queue = drive.queue().unwrap();
        let data: Vec<u8> = (0..BYTES).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29) as u8).collect();
        let buffer = drive.buffer(data.len()).unwrap();
        buffer.host().unwrap().write(0, &data).unwrap();
        assert_eq!(queue.write(ns, 0, BYTES / 512, &buffer, 0).unwrap().bytes, BYTES);
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        for (seed, (bytes, stride, offset)) in (1..).zip([
            (264, 264, 0),
            (256, 256, 16),
            (4, 20, 12),
            (5000, 5000, 8),
            (40_000, 60_000, 4),
            (512, 4096, 0),
        ]) {
            let extents = scattered(seed);
            let end = extents.iter().map(|extent| extent.len).sum();
            let place = || {
                let TableBytes { blocks, .. } = TableBytes::of_drive(&drive, ns).unwrap();
                TableBytes { extents: extents.clone(), blocks, bytes: end }
            };
            let count = (end - offset - bytes as u64) / stride as u64 + 1;
            let layout = RowLayout { offset, bytes, stride, count };
            let open = |layout, cache| {
                DriveTable::open((&drive, ns, place()), layout, &gpu, &RouteRequest::Auto, cache)
            };
            let table = open(layout, 256 << 10).unwrap();
            let ids: Vec<_> = (0..count).chain([count - 1, 0, 0]).collect();
            let out = gpu.alloc(Memory::Vram, ids.len() * bytes).unwrap();
            table.gather(&ids, &out, &()).unwrap();
            let (mut got, mut want) = (vec![0; bytes], vec![0; bytes]);
            for (place, id) in ids.iter().enumerate() {
                out.read(place * bytes, &mut got).unwrap();
                let at = offset + id * stride as u64;
                read_extents(&*table.place.blocks, &extents, at, &mut want).unwrap();
                assert!(
                    got == want,
                    "seed {seed}: row {id} of {bytes} bytes every {stride} from {offset} on"
                );
            }
            assert!(matches!(table.gather(&[0, count], &out, &()), Err(Error::NoRow { at: 1, .. })));
            assert!(table.gather(&ids, &out.slice(0..bytes).unwrap(), &()).is_err());
            assert!(open(RowLayout { count: count + 1, ..layout }, 1 << 20).is_err());
            assert!(open(RowLayout { offset: offset + 2, count: count - 1, ..layout }, 1 << 20).is_err());
        }
    }
}
