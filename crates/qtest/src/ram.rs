//! The guest's RAM: a file that QEMU and this process map. A bus address is an offset in it.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use onehop_os::{BusRange, DmaMemory, Heap, HostMem, Mapped, Mapper};
use onehop_proto::BusAddr;

use crate::{Error, Result};

const PAGE: usize = 4096;

/// First usable byte: below are real-mode memory, the VGA hole and the firmware's copy.
pub(crate) const FIRST: usize = 2 << 20;

/// Up to this size, q35 always places RAM contiguously from address 0; more may go above 4 GiB.
const MOST: u64 = 2 << 30;

/// Guest RAM, allocated by pages.
pub(crate) struct Ram {
    name: String,
    whole: HostMem,
    heap: Arc<Mutex<Heap>>,
}

impl Ram {
    /// Maps the file; `name` is the mapper's.
    pub(crate) fn open(file: &Path, name: String) -> Result<Self> {
        let refused = |why: String| Error::Memory { file: file.into(), why };
        let opened = File::options().read(true).write(true).open(file).map_err(|e| {
            refused(format!(
                "{e}; it is what QEMU was started on with memory-backend-file,mem-path=…,share=on"
            ))
        })?;
        let len = opened.metadata().map_err(|e| refused(e.to_string()))?.len();
        if len > MOST {
            return Err(refused(format!("it has {len} bytes; start QEMU with at most 2 GiB of RAM")));
        }
        let len = len as usize;
        if len < FIRST + PAGE || !len.is_multiple_of(PAGE) {
            return Err(refused(format!(
                "{len} bytes are not valid guest memory, which has whole pages and more than 2 MiB"
            )));
        }
        let whole = HostMem::of_file(&opened, len)?;
        Ok(Self { name, whole, heap: Arc::new(Mutex::new(Heap::new(FIRST, len))) })
    }

    /// All of it, from guest physical address 0.
    pub(crate) fn whole(&self) -> &HostMem {
        &self.whole
    }

    fn cannot(&self, why: &str) -> onehop_os::Error {
        onehop_os::Error::CannotMap { mapper: self.name.clone(), why: why.into() }
    }
}

impl Mapper for Ram {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        let none = || onehop_os::Error::NoMemory { mapper: self.name.clone(), bytes };
        let len = bytes.max(1).checked_next_multiple_of(PAGE).ok_or_else(none)?;
        let at = self.heap.lock().unwrap_or_else(PoisonError::into_inner).take(len).ok_or_else(none)?;
        let heap = self.heap.clone();
        let release = move || heap.lock().unwrap_or_else(PoisonError::into_inner).free(at, len);
        let memory = self.whole.slice(at..at + len)?.on_last_drop(release);
        memory.fill(0, len, 0)?;
        Ok(memory)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let host = memory.host().ok_or_else(|| {
            self.cannot(
                "QEMU's drive reaches the guest's RAM only; use the emulated GPU and memory of this mapper",
            )
        })?;
        if host.is_empty() {
            return Err(self.cannot("it has no bytes"));
        }
        let at = (host.host_ptr() as usize)
            .checked_sub(self.whole.host_ptr() as usize)
            .filter(|at| *at < self.whole.len() && host.len() <= self.whole.len() - at)
            .ok_or_else(|| {
                self.cannot(
                    "it is not part of the guest's RAM; QEMU's drive reaches only what this mapper allocated",
                )
            })?;
        let run = BusRange { addr: BusAddr(at as u64), len: host.len() as u64 };
        // The clone keeps the pages allocated while the drive may still access them.
        Ok(Mapped::new(vec![run], Box::new(host.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoHost;

    impl DmaMemory for NoHost {
        fn bytes(&self) -> usize {
            PAGE
        }
        fn host(&self) -> Option<&HostMem> {
            None
        }
    }

    /// RAM in a file that is already unlinked.
    fn ram(test: &str, bytes: u64) -> Result<Ram> {
        let path = std::env::temp_dir().join(format!("onehop-ram-{}-{test}", std::process::id()));
        File::create(&path).unwrap().set_len(bytes).unwrap();
        let ram = Ram::open(&path, "qtest:here".into());
        std::fs::remove_file(&path).unwrap();
        ram
    }

    #[test]
    fn allocates_zeroed_pages_and_frees_them() {
        let ram = ram("allocates", 4 << 20).unwrap();
        let first = ram.alloc(PAGE + 1).unwrap();
        assert_eq!(first.len(), 2 * PAGE);
        first.fill(0, 2 * PAGE, 0xee).unwrap();
        let second = ram.alloc(1).unwrap();
        assert_eq!(ram.map(&first).unwrap().contiguous().unwrap().0, FIRST as u64);
        assert_eq!(ram.map(&second).unwrap().contiguous().unwrap().0, (FIRST + 2 * PAGE) as u64);
        assert!(ram.alloc(2 << 20).is_err());
        drop(first);
        let again = ram.alloc(2 * PAGE).unwrap();
        assert_eq!(ram.map(&again).unwrap().contiguous().unwrap().0, FIRST as u64);
        assert!(again.to_vec(0, 2 * PAGE).unwrap().iter().all(|byte| *byte == 0));
        drop((again, second));
        assert!(ram.alloc(2 << 20).is_ok());
        assert!(ram.alloc(usize::MAX).is_err());
    }

    #[test]
    fn mapped_pages_are_not_reallocated() {
        let ram = ram("mapped", 4 << 20).unwrap();
        let part = ram.alloc(2 << 20).unwrap().slice(100..200).unwrap();
        let mapped = ram.map(&part).unwrap();
        assert_eq!(mapped.runs(), [BusRange { addr: BusAddr(FIRST as u64 + 100), len: 100 }]);
        drop(part);
        assert!(ram.alloc(1).is_err());
        drop(mapped);
        assert!(ram.alloc(2 << 20).is_ok());
    }

    #[test]
    fn foreign_memory_is_refused_with_the_reason() {
        let ram = ram("foreign", 4 << 20).unwrap();
        let why = |memory: &dyn DmaMemory| ram.map(memory).unwrap_err().to_string();
        assert!(why(&HostMem::anonymous(PAGE).unwrap()).contains("not part of the guest's RAM"));
        assert!(why(&NoHost).contains("emulated GPU"));
        assert!(why(&ram.alloc(1).unwrap().slice(4..4).unwrap()).contains("no bytes"));
    }

    #[test]
    fn files_other_than_guest_memory_are_refused() {
        for (bytes, why) in [
            (0, "not valid guest memory"),
            (2 << 20, "not valid guest memory"),
            ((4 << 20) + 1, "not valid guest memory"),
        ] {
            assert!(ram("small", bytes).err().unwrap().to_string().contains(why));
        }
        assert!(ram("big", (2 << 30) + 4096).err().unwrap().to_string().contains("at most 2 GiB"));
        assert!(ram("most", 2 << 30).is_ok());
        let absent = Ram::open(Path::new("/nowhere/ram"), String::new()).err().unwrap().to_string();
        assert!(absent.contains("mem-path"), "{absent}");
    }

    #[test]
    fn threads_never_get_the_same_page() {
        let ram = ram("threads", 4 << 20).unwrap();
        std::thread::scope(|scope| {
            for id in 1..=4_u8 {
                let ram = &ram;
                scope.spawn(move || {
                    for round in 1..200 {
                        let Ok(memory) = ram.alloc(PAGE * (round % 5 + 1)) else { continue };
                        assert!(memory.to_vec(0, memory.len()).unwrap().iter().all(|byte| *byte == 0));
                        memory.fill(0, memory.len(), id).unwrap();
                        std::thread::yield_now();
                        assert!(memory.to_vec(0, memory.len()).unwrap().iter().all(|byte| *byte == id));
                    }
                });
            }
        });
        assert!(ram.alloc(2 << 20).is_ok());
    }
}
