//! Results of a GPU thread that reads registers.

use onehop_proto::kernel::{MOST_PEEKED, PeekNotes};

use crate::{Error, Region, Result};

/// Checks the number of registers to read.
pub(crate) fn check(count: u32) -> Result<()> {
    if (1..=MOST_PEEKED).contains(&count) {
        return Ok(());
    }
    Err(Error::Launch(format!("{count} registers to read; 1 to {MOST_PEEKED} can be")))
}

/// The values read so far.
pub(crate) fn values(notes: &Region) -> Result<Vec<u32>> {
    let ended = notes.word(PeekNotes::ENDED as usize)?.min(MOST_PEEKED);
    (0..ended).map(|index| notes.word((PeekNotes::VALUES + index * 4) as usize)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use onehop_os::Registers;

    use crate::{Doorbells, Emulated, Error, Gpu, Instruments, Place};

    /// Registers that count their reads, and hold their offsets up to `ones`.
    struct CountingRegisters {
        reads: AtomicU32,
        ones: u32,
    }

    impl Registers for CountingRegisters {
        fn read32(&self, offset: u32) -> u32 {
            self.reads.fetch_add(1, Ordering::Relaxed);
            if offset < self.ones { offset } else { u32::MAX }
        }
        fn write32(&self, _offset: u32, _value: u32) {}
        fn size(&self) -> u32 {
            4096
        }
    }

    /// Registers that answer slowly.
    struct Slow;

    impl Registers for Slow {
        fn read32(&self, _offset: u32) -> u32 {
            std::thread::sleep(Duration::from_millis(60));
            0
        }
        fn write32(&self, _offset: u32, _value: u32) {}
        fn size(&self) -> u32 {
            4096
        }
    }

    #[test]
    fn none_is_begun_when_the_time_is_over() {
        let gpu = Emulated::new();
        let doorbells = gpu.map_registers(Arc::new(Slow)).unwrap();
        assert!(gpu.peek(&doorbells, 0, 16, Duration::from_millis(50)).unwrap().len() <= 1);
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_first_that_is_all_ones_is_the_last_that_is_read() {
        let gpu = Emulated::new();
        for (ones, count, want) in
            [(4096, 3, &[8, 12, 16][..]), (12, 3, &[8, u32::MAX]), (0, 16, &[u32::MAX]), (4096, 1, &[8])]
        {
            let regs = Arc::new(CountingRegisters { reads: AtomicU32::new(0), ones });
            let doorbells = gpu.map_registers(regs.clone()).unwrap();
            assert_eq!(gpu.peek(&doorbells, 8, count, SECOND).unwrap(), want);
            assert_eq!(regs.reads.load(Ordering::Relaxed) as usize, want.len());
        }
    }

    #[test]
    fn only_registers_are_read() {
        let gpu = Emulated::new();
        let memory = gpu.alloc(Place::Vram, 4096).unwrap();
        let no_registers = Doorbells::of_memory(&memory);
        assert!(matches!(gpu.peek(&no_registers, 0, 1, SECOND), Err(Error::Fault { .. })));
        assert!(
            gpu.peek(&no_registers, 0, 0, SECOND).is_err() && gpu.peek(&no_registers, 0, 17, SECOND).is_err()
        );
        let regs = Arc::new(CountingRegisters { reads: AtomicU32::new(0), ones: 4096 });
        let doorbells = gpu.map_registers(regs.clone()).unwrap();
        for (first, count) in [(4092, 2), (4096, 1), (u32::MAX - 3, 16), (6, 1)] {
            assert!(matches!(gpu.peek(&doorbells, first, count, SECOND), Err(Error::Launch(_))), "{first}");
        }
        assert_eq!(regs.reads.load(Ordering::Relaxed), 0);
    }
}
