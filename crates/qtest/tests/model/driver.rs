//! A minimal driver that shows that commands, completions and data use the same addresses.

use std::sync::atomic::Ordering;
use std::time::Duration;

use onehop_os::{ControllerBackend, Deadline, HostMem, Mapped};

const ENTRIES: u32 = 16;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const AQA: u32 = 0x24;
const ASQ: u32 = 0x28;
const ACQ: u32 = 0x30;
const DOORBELLS: u32 = 0x1000;

/// A queue pair.
pub struct Queue {
    id: u32,
    sq: HostMem,
    cq: HostMem,
    mapped: (Mapped, Mapped),
    next: u32,
}

impl Queue {
    fn new(port: &ControllerBackend, id: u32) -> Self {
        let (sq, cq) = (port.mapper.alloc(4096).unwrap(), port.mapper.alloc(4096).unwrap());
        let mapped = (port.mapper.map(&sq).unwrap(), port.mapper.map(&cq).unwrap());
        Self { id, sq, cq, mapped, next: 0 }
    }

    fn addrs(&self) -> (u64, u64) {
        (self.mapped.0.contiguous().unwrap().0, self.mapped.1.contiguous().unwrap().0)
    }

    /// Runs one command: opcode, namespace, data of up to two pages, dwords 10 to 12. Returns the status without the
    /// phase.
    pub fn run(
        &mut self,
        port: &ControllerBackend,
        opcode: u32,
        nsid: u32,
        data: u64,
        dwords: [u32; 3],
    ) -> u32 {
        let at = (self.next % ENTRIES) as usize;
        let phase = 1 - (self.next / ENTRIES) % 2;
        let mut entry = [0; 64];
        // RAM ends below 4 GiB, and the data is contiguous: the second page follows the first.
        let (prp1, prp2) = (data as u32, (data as u32 & !0xfff) + 0x1000);
        for (word, value) in [(0, opcode | self.next << 16), (1, nsid), (6, prp1), (8, prp2)] {
            entry[word * 4..word * 4 + 4].copy_from_slice(&value.to_le_bytes());
        }
        for (i, value) in dwords.iter().enumerate() {
            entry[40 + 4 * i..44 + 4 * i].copy_from_slice(&value.to_le_bytes());
        }
        self.sq.write(at * 64, &entry).unwrap();
        self.next += 1;
        port.regs.write32(DOORBELLS + 8 * self.id, self.next % ENTRIES);
        let until = Deadline::after(Duration::from_secs(10));
        let status = loop {
            let word = self.cq.word(at * 16 + 12).unwrap().load(Ordering::Acquire) >> 16;
            if word & 1 == phase {
                break word >> 1;
            }
            assert!(!until.passed(), "no completion");
            std::thread::yield_now();
        };
        port.regs.write32(DOORBELLS + 8 * self.id + 4, self.next % ENTRIES);
        status
    }
}

/// Resets and enables the controller.
pub fn enable(port: &ControllerBackend) -> Queue {
    let wait_ready = |wanted: u32| {
        let until = Deadline::after(Duration::from_secs(10));
        while port.regs.read32(CSTS) & 1 != wanted {
            assert!(!until.passed(), "CSTS.RDY is not {wanted}");
        }
    };
    port.regs.write32(CC, 0);
    wait_ready(0);
    let admin = Queue::new(port, 0);
    port.regs.write32(AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
    port.regs.write64(ASQ, admin.addrs().0);
    port.regs.write64(ACQ, admin.addrs().1);
    port.regs.write32(CC, 4 << 20 | 6 << 16 | 1);
    wait_ready(1);
    admin
}

/// Creates I/O queue pair 1.
pub fn io_queue(port: &ControllerBackend, admin: &mut Queue) -> Queue {
    let queue = Queue::new(port, 1);
    let size = (ENTRIES - 1) << 16 | 1;
    assert_eq!(admin.run(port, 0x05, 0, queue.addrs().1, [size, 1, 0]), 0);
    assert_eq!(admin.run(port, 0x01, 0, queue.addrs().0, [size, 1 << 16 | 1, 0]), 0);
    queue
}

/// Identify data of a controller (`cns` 1) or namespace (`cns` 0).
pub fn identify(port: &ControllerBackend, admin: &mut Queue, nsid: u32, cns: u32) -> Vec<u8> {
    let memory = port.mapper.alloc(4096).unwrap();
    let mapped = port.mapper.map(&memory).unwrap();
    assert_eq!(admin.run(port, 0x06, nsid, mapped.contiguous().unwrap().0, [cns, 0, 0]), 0);
    memory.to_vec(0, 4096).unwrap()
}
