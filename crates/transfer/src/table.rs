//! Tables on a drive: rows of equal size, which GPU threads read through a cache.

use std::sync::Arc;

use onehop_array::{Array, ArrayOptions, ArrayStats};
use onehop_drive::{Drive, Namespace, Placement};
use onehop_files::{Blocks, Extent, Place, read_extents};
use onehop_gpu::{Gpu, Region};
use onehop_load::engine::calls::RowLayout;

use crate::array::{RoutedArray, open_array};
use crate::engine::block_bytes;
use crate::error::{Error, Result};
use crate::file::FileOnDrive;
use crate::model::ModelOnDrive;
use crate::route::{BetterRoute, RouteRequest};
use crate::volume;

/// Bytes of a page of the cache, unless the drive's blocks are larger. Rows longer than a page take several commands.
const LEAST_PAGE: u64 = 4096;
const MOST_PAGE: u64 = 1 << 16;

/// Rows that one kernel gathers, and their bytes: its time and its memory are limited.
const MOST_ROWS: usize = 1 << 18;
const MOST_BYTES: usize = 1 << 30;

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
        (drive, ns, place): (&Drive, &Namespace, TableBytes),
        layout: RowLayout,
        gpu: &Arc<dyn Gpu>,
        request: &RouteRequest,
        cache_bytes: u64,
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
        let options = ArrayOptions { page_bytes, ..ArrayOptions::new(Placement::TIER1, cache_bytes) };
        let blocks = first / block..last.div_ceil(block);
        let RoutedArray { array, route, why_not_better, .. } =
            open_array((drive, ns, blocks), gpu, request, &options)?;
        Ok(Self { array, place, layout, start: first / block * block, unit, route, why_not_better })
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
    /// [`Error::NoRow`] before anything is written; when rows cannot be read, `out` is too short, or the kernel failed.
    pub fn gather(&self, ids: &[u64], out: &Region) -> Result<()> {
        let RowLayout { bytes, count, .. } = self.layout;
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id >= count) {
            return Err(Error::NoRow { at, id: *id, count });
        }
        let most = (MOST_BYTES / bytes).clamp(1, MOST_ROWS);
        for (ids, first) in ids.chunks(most).zip((0..).step_by(most)) {
            self.gather_some(ids, &out.slice(first * bytes..(first + ids.len()) * bytes)?)?;
        }
        Ok(())
    }

    fn gather_some(&self, ids: &[u64], out: &Region) -> Result<()> {
        let RowLayout { offset, bytes, stride, .. } = self.layout;
        let byte = |id: u64| offset + id * stride as u64;
        let mut by_cpu = Vec::new();
        // The kernel's rows. At the places of those that the CPU reads, it writes another one.
        let mut rows = Vec::with_capacity(ids.len());
        for (to, id) in ids.iter().enumerate() {
            match self.place.on_drive(byte(*id), bytes as u64) {
                Some(at) => rows.push((at - self.start) / self.unit),
                None => {
                    by_cpu.push(to);
                    rows.push(rows.last().copied().unwrap_or(0));
                }
            }
        }
        let moved = self.array.gather(self.array.rows(bytes as u32, self.unit as u32), &rows, out)?;
        let mut failed = moved.failed;
        failed.retain(|(place, _)| by_cpu.binary_search(place).is_err());
        if let Some((place, why)) = failed.first() {
            // If the drive is gone, this says why.
            self.array.check()?;
            let row = ids.get(*place).copied().unwrap_or_default();
            return Err(Error::Rows { failed: failed.len(), of: ids.len(), row, why: *why });
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

    #[test]
    fn rows_of_scattered_files_are_right() {
        let found = controllers::find("sim:mem:4M", &StopSignal::default()).unwrap();
        let drive = Drive::open(found.backend, RouteOptions::default().drive_options(true)).unwrap();
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
            table.gather(&ids, &out).unwrap();
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
            assert!(matches!(table.gather(&[0, count], &out), Err(Error::NoRow { at: 1, .. })));
            assert!(table.gather(&ids, &out.slice(0..bytes).unwrap()).is_err());
            assert!(open(RowLayout { count: count + 1, ..layout }, 1 << 20).is_err());
            assert!(open(RowLayout { offset: offset + 2, count: count - 1, ..layout }, 1 << 20).is_err());
        }
    }
}
