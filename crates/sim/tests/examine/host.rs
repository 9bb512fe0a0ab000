//! A raw host without a driver: it builds queues by hand, so that it can also violate every rule.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use onehop_os::{ControllerBackend, HostMem, Mapped, Mapper, Registers};
use onehop_proto::admin::{self, Priority};
use onehop_proto::regs::{self, Aqa, Cap, Cc, Csts, offset};
use onehop_proto::{BusAddr, Cqe, Sqe, Status, nvm, prp};
use onehop_sim::{Rule, Sim, SimMapper, open};

pub const ADMIN_ENTRIES: u32 = 32;

/// Memory that the drive can reach.
pub struct Buf {
    pub mem: HostMem,
    pub map: Mapped,
}

impl Buf {
    pub fn addr(&self) -> u64 {
        self.map.contiguous().unwrap().0
    }

    pub fn read(&self, len: usize) -> Vec<u8> {
        self.mem.to_vec(0, len).unwrap()
    }
}

/// One queue pair, as the host sees it.
pub struct Queue {
    pub sq: Buf,
    pub cq: Buf,
    pub size: u32,
    pub tail: u32,
    pub head: u32,
    pub phase: bool,
    pub sqhd: u16,
    pub next_cid: u16,
}

impl Queue {
    pub fn put(&mut self, sqe: &Sqe) {
        for (i, dword) in sqe.dw.iter().enumerate() {
            self.sq.mem.word(self.tail as usize * 64 + i * 4).unwrap().store(*dword, Relaxed);
        }
        self.tail = (self.tail + 1) % self.size;
    }

    pub fn take(&mut self) -> Option<Cqe> {
        let at = self.head as usize * 16;
        let last = self.cq.mem.word(at + 12).unwrap().load(Acquire);
        let mut cqe = Cqe { dw: [0, 0, 0, last] };
        if cqe.phase() != self.phase {
            return None;
        }
        for i in 0..3 {
            cqe.dw[i] = self.cq.mem.word(at + i * 4).unwrap().load(Relaxed);
        }
        self.head += 1;
        if self.head == self.size {
            self.head = 0;
            self.phase = !self.phase;
        }
        self.sqhd = cqe.sqhd();
        Some(cqe)
    }
}

pub struct Host {
    pub sim: Sim,
    pub port: ControllerBackend,
    pub regs: Arc<dyn Registers>,
    pub mapper: Arc<SimMapper>,
    pub queues: HashMap<u16, Queue>,
    pub page_shift: u32,
}

impl Host {
    /// A drive in its initial state.
    pub fn raw(spec: &str) -> Self {
        Self::of(open(spec).unwrap())
    }

    pub fn of(sim: Sim) -> Self {
        let port = sim.port();
        let (regs, mapper) = (port.regs.clone(), sim.mapper());
        Self { sim, port, regs, mapper, queues: HashMap::new(), page_shift: 12 }
    }

    /// A drive that is enabled.
    pub fn enabled(spec: &str) -> Self {
        let mut host = Self::raw(spec);
        host.enable();
        host
    }

    /// A drive that is enabled, with one I/O queue pair.
    pub fn new(spec: &str) -> Self {
        Self::with_queue(spec, 32)
    }

    pub fn with_queue(spec: &str, entries: u32) -> Self {
        let mut host = Self::enabled(spec);
        host.create_pair(1, entries);
        host
    }

    pub fn cap(&self) -> Cap {
        Cap(self.regs.read64(offset::CAP))
    }

    pub fn csts(&self) -> Csts {
        Csts(self.regs.read32(offset::CSTS))
    }

    pub fn buffer(&self, bytes: usize) -> Buf {
        let mem = self.mapper.alloc(bytes).unwrap();
        let map = self.mapper.map(&mem).unwrap();
        Buf { mem, map }
    }

    pub fn queue(&self, entries: u32) -> Queue {
        let (sq, cq) = (self.buffer(entries as usize * 64), self.buffer(entries as usize * 16));
        Queue { sq, cq, size: entries, tail: 0, head: 0, phase: true, sqhd: 0, next_cid: 1 }
    }

    pub fn set_admin_queue(&mut self) {
        let queue = self.queue(ADMIN_ENTRIES);
        let z = (ADMIN_ENTRIES - 1) as u16;
        self.regs.write32(offset::AQA, Aqa(0).with_asqs_z(z).with_acqs_z(z).0);
        self.regs.write64(offset::ASQ, queue.sq.addr());
        self.regs.write64(offset::ACQ, queue.cq.addr());
        self.queues.insert(0, queue);
    }

    pub fn enable(&mut self) {
        self.set_admin_queue();
        self.regs.write32(offset::CC, Cc::enabled(self.page_shift, 0).0);
        self.wait_for(|host| host.csts().rdy());
    }

    pub fn disable(&mut self) {
        self.regs.write32(offset::CC, Cc::enabled(self.page_shift, 0).with_en(false).0);
        self.wait_for(|host| !host.csts().rdy());
        self.queues.clear();
    }

    pub fn wait_for(&self, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(5);
        while !done(self) {
            assert!(Instant::now() < end, "waited too long; violations: {:?}", self.sim.violations());
        }
    }

    pub fn ring_sq(&self, qid: u16, tail: u32) {
        self.regs.write32(regs::doorbell(qid, false, self.cap().dstrd()), tail);
    }

    pub fn ring_cq(&self, qid: u16, head: u32) {
        self.regs.write32(regs::doorbell(qid, true, self.cap().dstrd()), head);
    }

    /// Writes a command to a queue without ringing; returns its identifier.
    pub fn push(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let queue = self.queues.get_mut(&qid).unwrap();
        let cid = queue.next_cid;
        queue.next_cid = queue.next_cid.wrapping_add(1) % 0x7fff;
        queue.put(&sqe.with_cid(cid));
        cid
    }

    pub fn ring(&self, qid: u16) {
        self.ring_sq(qid, self.queues[&qid].tail);
    }

    pub fn submit(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let cid = self.push(qid, sqe);
        self.ring(qid);
        cid
    }

    /// Takes a completion, if any, and rings for it.
    pub fn poll(&mut self, qid: u16) -> Option<Cqe> {
        let cqe = self.queues.get_mut(&qid).unwrap().take()?;
        self.ring_cq(qid, self.queues[&qid].head);
        Some(cqe)
    }

    /// Takes a completion, if any, without ringing.
    pub fn poll_silently(&mut self, qid: u16) -> Option<Cqe> {
        self.queues.get_mut(&qid).unwrap().take()
    }

    pub fn wait(&mut self, qid: u16) -> Cqe {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            if let Some(cqe) = self.poll(qid) {
                return cqe;
            }
            let csts = self.csts();
            assert!(Instant::now() < end, "no completion; {csts:?}, {:?}", self.sim.violations());
        }
    }

    /// Checks that no completion comes, even after some time.
    pub fn nothing_comes(&mut self, qid: u16) {
        let end = Instant::now() + Duration::from_millis(5);
        while Instant::now() < end {
            let _ = self.csts();
            assert_eq!(self.poll(qid), None);
        }
    }

    pub fn run(&mut self, qid: u16, sqe: Sqe) -> Cqe {
        let cid = self.submit(qid, sqe);
        let cqe = self.wait(qid);
        assert_eq!((cqe.cid(), cqe.sqid()), (cid, qid));
        cqe
    }

    pub fn admin(&mut self, sqe: Sqe) -> Cqe {
        self.run(0, sqe)
    }

    pub fn admin_ok(&mut self, sqe: Sqe) -> Cqe {
        let cqe = self.admin(sqe);
        assert!(cqe.status().is_ok(), "{:?}", cqe.status());
        cqe
    }

    /// Runs an admin command that returns data.
    pub fn admin_data(&mut self, sqe: Sqe, bytes: usize) -> Result<Vec<u8>, Status> {
        let buf = self.buffer(bytes.max(8192));
        let status = self.admin(sqe.with_prps(buf.addr(), buf.addr() + 4096)).status();
        if status.is_ok() { Ok(buf.read(bytes)) } else { Err(status) }
    }

    pub fn create_pair(&mut self, qid: u16, entries: u32) {
        let queue = self.queue(entries);
        let z = (entries - 1) as u16;
        let (sq, cq) = (BusAddr(queue.sq.addr()), BusAddr(queue.cq.addr()));
        self.admin_ok(admin::create_cq(qid, z, cq, true, None));
        self.admin_ok(admin::create_sq(qid, z, sq, qid, true, Priority::Urgent));
        self.queues.insert(qid, queue);
    }

    pub fn delete_pair(&mut self, qid: u16) {
        self.admin_ok(admin::delete_sq(qid));
        self.admin_ok(admin::delete_cq(qid));
        self.queues.remove(&qid);
    }

    /// Sets a command's data pointer to a buffer, with a list if needed.
    pub fn describe(&self, sqe: Sqe, buf: &Buf, offset: u64, len: u64) -> (Sqe, Buf) {
        let shift = self.page_shift;
        let page = 1u64 << shift;
        let need = prp::layout(shift, offset & (page - 1), len, 0);
        let list = self.buffer((need.list_pages.max(1) * page) as usize);
        let first = buf.map.at(offset).unwrap().addr;
        let inner = first.0 & (page - 1);
        let page_addr = |i: u64| {
            if i == 0 { first } else { buf.map.at(offset + i * page - inner).unwrap().addr }
        };
        let put = |p: u32, i: u32, v: u64| {
            list.mem.write((u64::from(p) * page) as usize + i as usize * 8, &v.to_le_bytes()).unwrap();
        };
        let list_page = |p: u32| list.map.at(u64::from(p) * page).unwrap().addr;
        let (prp1, prp2) = prp::build(shift, page_addr, len, 0, list_page, put).unwrap();
        (sqe.with_prps(prp1, prp2), list)
    }

    pub fn write(&mut self, lba: u64, data: &[u8], block: usize) -> Status {
        let buf = self.buffer(data.len());
        buf.mem.write(0, data).unwrap();
        let sqe = nvm::write(1, lba, (data.len() / block) as u32).unwrap();
        let (sqe, _list) = self.describe(sqe, &buf, 0, data.len() as u64);
        self.run(1, sqe).status()
    }

    pub fn read(&mut self, lba: u64, blocks: u32, block: usize) -> Result<Vec<u8>, Status> {
        let len = blocks as usize * block;
        let buf = self.buffer(len);
        let (sqe, _list) = self.describe(nvm::read(1, lba, blocks).unwrap(), &buf, 0, len as u64);
        let status = self.run(1, sqe).status();
        if status.is_ok() { Ok(buf.read(len)) } else { Err(status) }
    }

    pub fn rules(&self) -> Vec<Rule> {
        self.sim.violations().iter().map(|v| v.rule).collect()
    }

    pub fn clean(&self) {
        assert_eq!(self.sim.violations(), [], "the host broke rules");
    }

    pub fn broke(&self, rule: Rule) {
        assert!(self.rules().contains(&rule), "{rule} is missing in {:?}", self.sim.violations());
    }

    /// Checks that this rule was violated once, and no other.
    pub fn broke_only(&self, rule: Rule) {
        assert_eq!(self.rules(), [rule], "{:?}", self.sim.violations());
    }
}

/// Bytes that depend on their offset and a seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word =
        |i: u64| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (0..len).map(|i| (word(i as u64 / 8) >> (i % 8 * 8)) as u8).collect()
}

/// A separate small generator, independent of the simulator's.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}
