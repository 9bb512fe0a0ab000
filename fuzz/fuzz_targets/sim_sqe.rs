//! The simulated drive under an arbitrary host: any command, register write, doorbell and memory contents. It neither
//! panics nor hangs, and works after a power cycle.
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_os::{HostMem, Mapped, Mapper, Registers};
use onehop_proto::admin::{self, Priority};
use onehop_proto::regs::{self, Aqa, Cc, Csts, offset};
use onehop_proto::{BusAddr, Cqe, Sqe};
use onehop_sim::{Config, Fault, FaultKind, Sim};

/// Drives of every kind: 1 MiB of media, and all work done within the calls.
const DRIVES: &[&str] = &[
    "mem:1M?workers=0",
    "mem:1M?workers=0&lba=4096&ms=8&sgl=1&mdts=0&version=2.0&crto=3",
    "mem:1M?workers=0&ms=16&ext=1&sgl=1&scatter=1&cqr=0&dstrd=2",
    "mem:1M?workers=0&cmb=64K&dbbuf=1&hmb=4&nssrs=1&ns=3&mqes=7&queues=2",
    "mem:1M?workers=0&null=1&dbbuf=1",
    "mem:1M?workers=0&null=reverse&latency=5us&bandwidth=1M&vwc=0&mpsmin=1&mpsmax=2",
];

/// Memory that the drive can reach: the admin queues, a pair of I/O queues, and room for data and lists.
const MEMORY: usize = 1 << 20;
const ADMIN: [usize; 2] = [0, 0x2000];
const IO: [usize; 2] = [0x4000, 0x6000];
const QUEUES: usize = 0x8000;
const ENTRIES: u32 = 8;

#[derive(Arbitrary, Debug)]
struct Input {
    drive: u8,
    bring_up: bool,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Command { io: bool, dw: [u32; 16], prp1: Option<u32>, prp2: Option<u32> },
    ReadWrite { opcode: u8, lba: u8, blocks: u16, prp1: u32, prp2: u32, more: u16 },
    Take { io: bool },
    Doorbell { qid: u8, is_cq: bool, value: u16 },
    Register { at: u16, value: u32 },
    Read { at: u16 },
    Memory { at: u32, bytes: [u8; 16] },
    Pointer { at: u32, to: u32, kind: u8 },
    Step(u8),
    Fault { kind: u8, every: u8, count: u8 },
    PowerCycle,
    Reset,
    Temperature(u16),
    NamespaceChanged(u32),
    Spoil { lba: u8, blocks: u8 },
    BringUp,
}

struct Host {
    sim: Sim,
    regs: Arc<dyn Registers>,
    mem: HostMem,
    map: Mapped,
    tails: [u32; 2],
    heads: [u32; 2],
    phases: [bool; 2],
}

fuzz_target!(|input: Input| {
    let spec = DRIVES[usize::from(input.drive) % DRIVES.len()];
    let sim = Sim::new(Config::parse(spec).expect(spec)).expect(spec);
    let (regs, mapper) = (sim.registers(), sim.mapper());
    let mem = mapper.alloc(MEMORY).expect("memory");
    let map = mapper.map(&mem).expect("a mapping");
    let mut host = Host { sim, regs, mem, map, tails: [0; 2], heads: [0; 2], phases: [true; 2] };
    if input.bring_up {
        host.bring_up();
    }
    let mut has_faults = false;
    for step in input.steps.iter().take(64) {
        has_faults |= matches!(step, Step::Fault { .. });
        host.step(step);
    }
    let _ = (host.sim.stats(), host.sim.violations());
    host.sim.power_cycle();
    host.bring_up();
    assert!(
        has_faults || host.heads[0] == 2,
        "it does not work after a power cycle: {:?}",
        host.sim.violations()
    );
});

impl Host {
    fn step(&mut self, step: &Step) {
        match *step {
            Step::Command { io, dw, prp1, prp2 } => {
                let mut sqe = Sqe { dw };
                sqe = prp1.map_or(sqe, |at| sqe.with_qword(6, self.bus(at)));
                sqe = prp2.map_or(sqe, |at| sqe.with_qword(8, self.bus(at)));
                self.submit(io, sqe);
            }
            Step::ReadWrite { opcode, lba, blocks, prp1, prp2, more } => {
                let sqe = Sqe::new(opcode % 12, 1)
                    .with_cid(more)
                    .with_prps(self.bus(prp1 & !3), self.bus(prp2 & !0xfff))
                    .with_dw(10, lba.into())
                    .with_dw(12, u32::from(blocks) % 64 | u32::from(more) << 16);
                self.submit(true, sqe);
            }
            Step::Take { io } => _ = self.take(io),
            Step::Doorbell { qid, is_cq, value } => self.ring(qid.into(), is_cq, value.into()),
            Step::Register { at, value } => self.regs.write32(u32::from(at) % 0x1200, value),
            Step::Read { at } => _ = self.regs.read32(at.into()),
            Step::Memory { at, bytes } => self.write(at, &bytes),
            Step::Pointer { at, to, kind } => {
                let high = u64::from(kind) << 56 | 0x40;
                self.write(at & !7, &[self.bus(to).to_le_bytes(), high.to_le_bytes()].concat());
            }
            Step::Step(count) => _ = (0..count % 32).take_while(|_| self.sim.step()).count(),
            Step::Fault { kind, every, count } => self.inject(kind, every, count),
            Step::PowerCycle => self.sim.power_cycle(),
            Step::Reset => _ = self.sim.port().reset.map(|reset| reset.function_reset()),
            Step::Temperature(kelvins) => self.sim.set_temperature(kelvins),
            Step::NamespaceChanged(nsid) => self.sim.namespace_changed(nsid),
            Step::Spoil { lba, blocks } => _ = self.sim.spoil(1, lba.into(), blocks.into()),
            Step::BringUp => self.bring_up(),
        }
    }

    /// The bus address of an offset in memory; `None` past the end.
    fn bus(&self, offset: u32) -> u64 {
        let offset = u64::from(offset) % (MEMORY as u64 + 4096);
        self.map.at(offset).map_or(offset, |run| run.addr.0)
    }

    fn write(&self, at: u32, bytes: &[u8]) {
        let at = at as usize % (MEMORY - bytes.len() + 1);
        self.mem.write(at, bytes).expect("within memory");
    }

    fn inject(&self, kind: u8, every: u8, count: u8) {
        let mut fault = Fault::new(FaultKind::ALL[usize::from(kind) % FaultKind::ALL.len()]);
        fault.when.every = Some(u64::from(every) + 1);
        fault.when.lba = Some(0..=7);
        fault.count = Some(count.into());
        self.sim.inject(fault);
    }

    fn ring(&self, qid: u16, is_cq: bool, value: u32) {
        self.regs.write32(regs::doorbell(qid, is_cq, self.sim.config().dstrd), value);
    }

    /// Enables the controller with one pair of I/O queues; gives up if it does not respond.
    fn bring_up(&mut self) {
        (self.tails, self.heads, self.phases) = ([0; 2], [0; 2], [true; 2]);
        let shift = 12 + u32::from(self.sim.config().mpsmin);
        self.regs.write32(offset::CC, Cc::enabled(shift, 0).with_en(false).0);
        self.mem.fill(0, QUEUES, 0).expect("within memory");
        let z = (ENTRIES - 1) as u16;
        self.regs.write32(offset::AQA, Aqa(0).with_asqs_z(z).with_acqs_z(z).0);
        self.regs.write64(offset::ASQ, self.bus(ADMIN[0] as u32));
        self.regs.write64(offset::ACQ, self.bus(ADMIN[1] as u32));
        self.regs.write32(offset::CC, Cc::enabled(shift, 0).0);
        while !Csts(self.regs.read32(offset::CSTS)).rdy() && self.sim.step() {}
        let io = IO.map(|at| BusAddr(self.bus(at as u32)));
        self.submit(false, admin::create_cq(1, z, io[1], true, None));
        self.take(false);
        self.submit(false, admin::create_sq(1, z, io[0], 1, true, Priority::Urgent));
        self.take(false);
    }

    fn submit(&mut self, io: bool, sqe: Sqe) {
        let (i, at) = (usize::from(io), if io { IO[0] } else { ADMIN[0] });
        for (n, dword) in sqe.dw.iter().enumerate() {
            self.write((at + self.tails[i] as usize * 64 + n * 4) as u32, &dword.to_le_bytes());
        }
        self.tails[i] = (self.tails[i] + 1) % ENTRIES;
        self.ring(i as u16, false, self.tails[i]);
    }

    /// Takes a completion, if there is one, and rings for it.
    fn take(&mut self, io: bool) -> Option<Cqe> {
        let (i, at) = (usize::from(io), if io { IO[1] } else { ADMIN[1] });
        let mut cqe = Cqe::default();
        for (n, dword) in cqe.dw.iter_mut().enumerate() {
            let bytes = self.mem.to_vec(at + self.heads[i] as usize * 16 + n * 4, 4).expect("within memory");
            *dword = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        if cqe.phase() != self.phases[i] {
            return None;
        }
        self.heads[i] = (self.heads[i] + 1) % ENTRIES;
        self.phases[i] ^= self.heads[i] == 0;
        self.ring(i as u16, true, self.heads[i]);
        Some(cqe)
    }
}
