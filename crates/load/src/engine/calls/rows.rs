//! A file of equal rows in memory, from which calls gather.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use onehop_os::page_cache::page_size;
use onehop_os::{Guard, HostMem};

use super::file::{Filled, Room};
use super::{CallCounters, CallError, SLOT};

/// Why rows were not gathered.
#[derive(Debug, thiserror::Error)]
pub enum GatherError {
    /// There is no such row.
    #[error("row {id}, which is number {at} in the list, is not one of {count} rows")]
    NoRow {
        /// Its place in the list, from 0 on.
        at: usize,
        /// The row.
        id: u64,
        /// How many there are.
        count: u64,
    },
    /// The file or the GPU failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Where the rows of a file are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowLayout {
    /// Where the first begins.
    pub offset: u64,
    /// Bytes of a row, [`RowFile::MOST_BYTES`] at most.
    pub bytes: usize,
    /// Bytes from the start of a row to that of the next.
    pub stride: usize,
    /// How many there are.
    pub count: u64,
}

impl RowLayout {
    /// Where the last one ends; none where the numbers make no sense.
    #[must_use]
    pub fn end(&self) -> Option<u64> {
        let is_row = self.bytes > 0 && self.bytes <= RowFile::MOST_BYTES && self.stride >= self.bytes;
        let last = self.count.checked_sub(1).filter(|_| is_row)?;
        last.checked_mul(self.stride as u64)?.checked_add(self.offset)?.checked_add(self.bytes as u64)
    }
}

/// The rows of a file, mapped.
pub struct RowFile {
    file: File,
    memory: HostMem,
    guard: Guard,
    layout: RowLayout,
}

impl RowFile {
    /// The largest row: rows are not split between slots.
    pub const MOST_BYTES: usize = SLOT;

    /// Maps the file, which may be closed afterwards.
    ///
    /// # Errors
    /// When the layout is impossible, the file is shorter, or it cannot be mapped.
    pub fn open(file: &File, layout: RowLayout) -> Result<Self, CallError> {
        let invalid = |why: String| CallError::File(io::Error::new(io::ErrorKind::InvalidInput, why));
        let RowLayout { offset, bytes, stride, count } = layout;
        let end = layout.end().ok_or_else(|| {
            invalid(format!(
                "{count} rows of {bytes} bytes, one every {stride} bytes from byte {offset} on, are no table"
            ))
        })?;
        let have = file.metadata()?.len();
        if end > have {
            return Err(invalid(format!("the last row ends at byte {end}, and the file has {have}")));
        }
        let whole = usize::try_from(end.next_multiple_of(page_size() as u64)).unwrap_or(usize::MAX);
        let memory = HostMem::of_file_read_only(file, whole).map_err(CallError::of_memory)?;
        let guard = Guard::new(&memory).map_err(CallError::of_memory)?;
        Ok(Self { file: file.try_clone()?, memory, guard, layout })
    }

    /// Where its rows are.
    #[must_use]
    pub fn layout(&self) -> RowLayout {
        self.layout
    }

    fn start(&self, id: u64) -> usize {
        (self.layout.offset + id * self.layout.stride as u64) as usize
    }

    /// Checks that the file still has all rows. Of its last page, the part behind the end reads as zeroes, without a signal.
    fn check_whole(&self) -> Result<(), CallError> {
        let is_short = || Ok::<_, io::Error>(Some(self.file.metadata()?.len()) < self.layout.end());
        if self.guard.is_lost() || is_short()? {
            return Err(
                io::Error::new(io::ErrorKind::UnexpectedEof, "the file of the rows was truncated").into()
            );
        }
        Ok(())
    }
}

/// Some rows of a file, in this order. All of them exist.
pub(super) struct RowList {
    file: Arc<RowFile>,
    ids: Vec<u64>,
}

impl RowList {
    pub(super) fn new(file: &Arc<RowFile>, ids: Vec<u64>) -> Result<Self, GatherError> {
        let count = file.layout.count;
        if let Some(at) = ids.iter().position(|id| *id >= count) {
            return Err(GatherError::NoRow { at, id: ids[at], count });
        }
        Ok(Self { file: file.clone(), ids })
    }

    pub(super) fn bytes(&self) -> usize {
        self.ids.len() * self.file.layout.bytes
    }

    pub(super) fn row(&self) -> usize {
        self.file.layout.bytes
    }

    /// Packs the rows that make up these bytes of the list. A range begins and ends with a row.
    pub(super) fn fill(
        &self,
        room: Room<'_>,
        at: u64,
        bytes: usize,
        counts: &CallCounters,
    ) -> Result<Filled, CallError> {
        let row = self.row();
        let ids = &self.ids[at as usize / row..(at as usize + bytes) / row];
        let starts = ids.iter().map(|id| self.file.start(*id));
        room.memory.pack_rows(room.to, &self.file.memory, starts, row).map_err(CallError::of_memory)?;
        // What is lost reads as zeroes.
        self.file.check_whole()?;
        counts.cached.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Filled { skip: 0, bytes })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::tests::{CallFixture, byte, file};
    use super::*;

    fn rows(layout: RowLayout, bytes: usize) -> Result<Arc<RowFile>, CallError> {
        RowFile::open(&file("rows", bytes), layout).map(Arc::new)
    }

    fn expected(layout: RowLayout, ids: &[u64]) -> Vec<u8> {
        let start = |id: &u64| layout.offset + id * layout.stride as u64;
        ids.iter().flat_map(|id| start(id)..start(id) + layout.bytes as u64).map(byte).collect()
    }

    #[test]
    fn rows_arrive_in_the_order_of_the_list() {
        let bytes = 4 << 20;
        for (offset, row, stride) in [
            (0, 256, 256),
            (13, 264, 264),
            (8, 264, 512),
            (1, 1, 3),
            (0, 1 << 20, 1 << 20),
            (77, 130_000, 131_001),
        ] {
            let count = (bytes - offset - row) as u64 / stride as u64 + 1;
            let layout = RowLayout { offset: offset as u64, bytes: row, stride, count };
            let table = rows(layout, bytes).unwrap();
            for threads in [1, 4] {
                let bench = CallFixture::new(threads);
                for many in [1, 2, (110 << 10) / row as u64, (3 << 20) / row as u64] {
                    // With repetitions, and the first and last among them.
                    let ids: Vec<u64> =
                        (0..many).map(|i| if i == 1 { count - 1 } else { i * 7_919_777 % count }).collect();
                    bench.engine.gather(&table, ids.clone(), bench.to(5)).unwrap();
                    assert!(bench.get(5, ids.len() * row) == expected(layout, &ids), "{layout:?} {many}");
                }
            }
        }
        let bench = CallFixture::new(1);
        let none = rows(RowLayout { offset: 0, bytes: 8, stride: 8, count: 1 }, 8).unwrap();
        bench.engine.gather(&none, Vec::new(), bench.to(0)).unwrap();
    }

    #[test]
    fn rows_that_do_not_exist_are_refused_before_anything_is_written() {
        let bench = CallFixture::new(2);
        let layout = RowLayout { offset: 0, bytes: 256, stride: 256, count: 100 };
        let table = rows(layout, 25_600).unwrap();
        for id in [100, u64::MAX] {
            let error = bench.engine.gather(&table, vec![5, 99, id, 7], bench.to(0)).unwrap_err();
            assert!(
                matches!(error, GatherError::NoRow { at: 2, id: bad, count: 100 } if bad == id),
                "{error}"
            );
        }
        assert_eq!(bench.get(0, 1024), [0; 1024]);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let whole = RowLayout { offset: 0, bytes: 256, stride: 256, count: 100 };
        assert!(rows(whole, 25_600).is_ok());
        assert!(rows(whole, 25_599).is_err());
        for layout in [
            RowLayout { offset: 1, ..whole },
            RowLayout { bytes: 0, ..whole },
            RowLayout { stride: 255, ..whole },
            RowLayout { count: 0, ..whole },
            RowLayout { count: 101, ..whole },
            RowLayout { count: u64::MAX, ..whole },
            RowLayout { offset: u64::MAX, ..whole },
            RowLayout { bytes: RowFile::MOST_BYTES + 1, stride: RowFile::MOST_BYTES + 1, count: 1, ..whole },
        ] {
            assert!(matches!(rows(layout, 25_600), Err(CallError::File(_))), "{layout:?}");
        }
    }

    #[test]
    fn a_truncated_file_is_an_error() {
        let mut cut = file("rows-cut", 1 << 20);
        cut.flush().unwrap();
        let layout = RowLayout { offset: 0, bytes: 4096, stride: 4096, count: 256 };
        let table = Arc::new(RowFile::open(&cut, layout).unwrap());
        let bench = CallFixture::new(2);
        cut.set_len(100 * 4096).unwrap();
        let error = bench.engine.gather(&table, (0..101).collect(), bench.to(0)).unwrap_err();
        assert!(error.to_string().contains("truncated"), "{error}");

        // Within a page.
        let cut = file("rows-cut-little", 1 << 20);
        let layout = RowLayout { offset: 0, bytes: 256, stride: 256, count: 4096 };
        let table = Arc::new(RowFile::open(&cut, layout).unwrap());
        bench.engine.gather(&table, vec![4095, 4094], bench.to(0)).unwrap();
        cut.set_len((1 << 20) - 300).unwrap();
        let error = bench.engine.gather(&table, vec![4095, 4094], bench.to(0)).unwrap_err();
        assert!(error.to_string().contains("truncated"), "{error}");
    }
}
