//! A target for the tests: one subsystem with namespaces, of which the first is in memory. It checks what the host sends, and violates the
//! protocol on request. It shares no code with the host except NVMe's structures.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onehop_proto::fabrics::{self, Connect, ConnectData, fctype};
use onehop_proto::format::LbaFormat;
use onehop_proto::identify::build;
use onehop_proto::regs::{Cap, Cc, Csts, Version, offset};
use onehop_proto::{Sqe, Status, admin, nvm, sgl};

pub const NQN: &str = "nqn.2026-11.org.example:models";
pub const BLOCK: usize = 512;

/// A PDU about to be sent.
pub struct Outgoing {
    /// The queue; `None` before Connect.
    pub qid: Option<u16>,
    pub kind: u8,
    /// Number of PDUs of this kind sent on I/O queues.
    pub count: u32,
    pub bytes: Vec<u8>,
}

/// What to do with it.
pub enum Act {
    Send(Vec<u8>),
    Drop,
    /// Sends these bytes and closes the connection.
    Close(Vec<u8>),
    Late(Duration, Vec<u8>),
}

type Hook = Arc<dyn Fn(Outgoing) -> Act + Send + Sync>;
/// The status that a command of a queue fails with, or success.
type Refusal = Box<dyn FnMut(u16, &Sqe) -> Status + Send>;

#[derive(Clone)]
pub struct Config {
    pub namespaces: u8,
    pub blocks: u64,
    pub digests: u8,
    pub cpda: u8,
    pub max_h2c: u32,
    /// Maximum bytes of a data PDU to the host, and of a Ready to Transfer.
    pub split: u32,
    pub success: bool,
    pub capsule: u32,
    pub mdts: u8,
    pub authreq: u16,
    /// Answers to Authentication Receive, in order; then invalid ones. The exchange's number is inserted.
    pub proofs: Vec<Vec<u8>>,
    /// Bytes between a header and its data.
    pub padding: usize,
    /// Log2 of the block size, as the namespace reports it.
    pub lbads: u8,
    /// The answer to Connect of an I/O queue.
    pub io_connect: Status,
    /// Seconds of a change of ANA states.
    pub anatt: u8,
    /// How long it may take to become ready: units of 500 ms.
    pub to: u8,
    pub hook: Hook,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            namespaces: 1,
            blocks: 4096,
            digests: 3,
            cpda: 0,
            max_h2c: 4096,
            split: 16 << 10,
            success: true,
            capsule: 4096,
            mdts: 5,
            authreq: 0,
            proofs: Vec::new(),
            padding: 0,
            lbads: 9,
            io_connect: Status::SUCCESS,
            anatt: 0,
            to: 4,
            hook: Arc::new(|out| Act::Send(out.bytes)),
        }
    }
}

/// What the target has received.
#[derive(Default)]
pub struct Seen {
    pub breaches: Vec<String>,
    /// The first block and the number of blocks of each executed write.
    pub writes: Vec<(u64, u32)>,
    pub reads: u32,
    pub connects: Vec<u16>,
    /// Messages of an authentication.
    pub proofs: Vec<Vec<u8>>,
    pub keep_alives: u32,
    pub shutdowns: u32,
}

pub struct Shared {
    pub config: Config,
    pub media: Mutex<Vec<u8>>,
    pub seen: Mutex<Seen>,
    pub is_down: AtomicBool,
    /// The last bytes of the namespace's UUID and NGUID; without one it is 0.
    pub uuid: AtomicU8,
    pub nguid: AtomicU8,
    refusal: Mutex<Option<Refusal>>,
    streams: Mutex<Vec<TcpStream>>,
    csts: AtomicU32,
    sent: Mutex<HashMap<u8, u32>>,
}

pub struct Target {
    pub shared: Arc<Shared>,
    pub port: u16,
}

impl Target {
    pub fn start(config: Config) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            media: Mutex::new(pattern(config.blocks as usize * BLOCK)),
            config,
            seen: Mutex::default(),
            is_down: AtomicBool::new(false),
            uuid: AtomicU8::new(1),
            nguid: AtomicU8::new(0),
            refusal: Mutex::default(),
            streams: Mutex::default(),
            csts: AtomicU32::new(0),
            sent: Mutex::default(),
        });
        let all = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if all.is_down.load(Ordering::Acquire) {
                    continue;
                }
                all.streams.lock().unwrap().push(stream.try_clone().unwrap());
                let shared = all.clone();
                std::thread::spawn(move || {
                    let end = stream.try_clone().unwrap();
                    let mut connection = Connection::new(stream, shared);
                    // On any end, the host sees the connection closed.
                    let _ = connection.serve();
                    let _ = end.shutdown(Shutdown::Both);
                });
            }
        });
        Self { shared, port }
    }

    pub fn name(&self) -> String {
        format!("nvme-tcp://127.0.0.1:{}/{NQN}", self.port)
    }

    /// Refuses commands from now on.
    pub fn refuse(&self, refusal: impl FnMut(u16, &Sqe) -> Status + Send + 'static) {
        *self.shared.refusal.lock().unwrap() = Some(Box::new(refusal));
    }

    /// Closes all connections.
    pub fn disconnect(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub fn breaches(&self) -> Vec<String> {
        self.shared.seen.lock().unwrap().breaches.clone()
    }
}

/// Bytes in which no two blocks are equal.
pub fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u32 / 4).flat_map(|i| (i.wrapping_mul(0x9e37_79b9) ^ 0x5bd1).to_le_bytes()).collect()
}

struct Write1 {
    sqe: Sqe,
    data: Vec<u8>,
    asked: u32,
}

struct Connection {
    stream: TcpStream,
    shared: Arc<Shared>,
    digests: u8,
    qid: Option<u16>,
    writes: HashMap<u16, Write1>,
    /// The number of an authentication, and how many answers it has had.
    transaction: [u8; 2],
    received: usize,
}

type Done = std::io::Result<()>;

fn over() -> std::io::Error {
    std::io::Error::other("over")
}

impl Connection {
    fn new(stream: TcpStream, shared: Arc<Shared>) -> Self {
        let _ = stream.set_nodelay(true);
        let (writes, transaction) = (HashMap::new(), [0; 2]);
        Self { stream, shared, digests: 0, qid: None, writes, transaction, received: 0 }
    }

    fn breach(&self, what: impl Into<String>) -> std::io::Error {
        self.shared.seen.lock().unwrap().breaches.push(what.into());
        over()
    }

    fn serve(&mut self) -> Done {
        let mut request = [0; 128];
        self.stream.read_exact(&mut request)?;
        if request[..8] != [0, 0, 128, 0, 128, 0, 0, 0] || request[8..11] != [0; 3] {
            return Err(self.breach(format!("connection request {:02x?}", &request[..16])));
        }
        self.digests = request[11] & self.shared.config.digests;
        let mut answer = vec![1, 0, 128, 0, 128, 0, 0, 0];
        answer.extend([0, 0, self.shared.config.cpda, self.digests]);
        answer.extend(self.shared.config.max_h2c.to_le_bytes());
        answer.resize(128, 0);
        self.put(answer)?;
        loop {
            self.pdu()?;
        }
    }

    fn pdu(&mut self) -> Done {
        let mut head = vec![0; 8];
        self.stream.read_exact(&mut head)?;
        let (kind, flags, hlen, pdo) = (head[0], head[1], usize::from(head[2]), usize::from(head[3]));
        let plen = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let want = match kind {
            4 => 72,
            2 | 6 => 24,
            _ => return Err(self.breach(format!("PDU of type {kind}"))),
        };
        if hlen != want || plen < hlen || plen > (8 << 20) {
            return Err(self.breach(format!("PDU {head:02x?}")));
        }
        head.resize(hlen, 0);
        self.stream.read_exact(&mut head[8..])?;
        let mut at = hlen;
        if kind == 2 {
            return Err(over());
        }
        if flags & 3 & !self.digests != 0 || (flags ^ self.digests) & 1 != 0 {
            return Err(self.breach(format!("flags {flags:#x} of type {kind}")));
        }
        if self.digests & 1 != 0 {
            let digest = self.word()?;
            if digest != crc32c::crc32c(&head) {
                return Err(self.breach("header digest"));
            }
            at += 4;
        }
        let mut data = Vec::new();
        if pdo > 0 {
            let unit = 4 * (usize::from(self.shared.config.cpda) + 1);
            if pdo < at || !pdo.is_multiple_of(unit) {
                return Err(self.breach(format!("data at {pdo} behind {at}")));
            }
            let mut padding = vec![0; pdo - at];
            self.stream.read_exact(&mut padding)?;
            let tail = if self.digests & 2 != 0 { 4 } else { 0 };
            data.resize(plen - pdo - tail, 0);
            self.stream.read_exact(&mut data)?;
            if tail > 0 && self.word()? != crc32c::crc32c(&data) {
                return Err(self.breach("data digest"));
            }
        } else if plen != at {
            return Err(self.breach(format!("length {plen} of type {kind}")));
        }
        if kind == 4 {
            let dword = |i: usize| u32::from_le_bytes(head[8 + 4 * i..][..4].try_into().unwrap());
            return self.command(Sqe { dw: std::array::from_fn(dword) }, data);
        }
        self.data(flags, &head, &data)
    }

    fn word(&mut self) -> std::io::Result<u32> {
        let mut word = [0; 4];
        self.stream.read_exact(&mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn command(&mut self, sqe: Sqe, data: Vec<u8>) -> Done {
        let (len, kind) = (sqe.dw[8], (sqe.dw[9] >> 24) as u8);
        if sqe.psdt() != 1 || sqe.qword(6) != 0 {
            return Err(self.breach(format!("data pointer of {sqe:x?}")));
        }
        if fabrics::fctype_of(&sqe).is_some() {
            return self.fabrics(&sqe, &data);
        }
        let refusal = self.shared.refusal.lock().unwrap().as_mut().map(|ask| ask(self.qid.unwrap(), &sqe));
        if let Some(status) = refusal.filter(|status| !status.is_ok()) {
            return self.answer(&sqe, [0, 0], status);
        }
        let is_write = sqe.opcode() & 3 == 1 && len > 0;
        match kind {
            fabrics::sgl::IN_CAPSULE if data.len() == len as usize && len <= self.shared.config.capsule => {
                self.finish_write(&sqe, &data)
            }
            fabrics::sgl::TRANSPORT if data.is_empty() && is_write => {
                let write = Write1 { sqe, data: Vec::new(), asked: 0 };
                self.writes.insert(sqe.cid(), write);
                self.ask(sqe.cid())
            }
            fabrics::sgl::TRANSPORT if data.is_empty() => self.read(&sqe, len),
            _ => Err(self.breach(format!("SGL {kind:#x} of {len}, {} in the capsule", data.len()))),
        }
    }

    fn ask(&mut self, cid: u16) -> Done {
        let split = self.shared.config.split;
        let write = self.writes.get_mut(&cid).ok_or_else(over)?;
        let (offset, left) = (write.asked, write.sqe.dw[8] - write.asked);
        let bytes = left.min(split);
        write.asked += bytes;
        let mut rest = cid.to_le_bytes().to_vec();
        rest.extend(77u16.to_le_bytes());
        rest.extend(offset.to_le_bytes());
        rest.extend(bytes.to_le_bytes());
        rest.extend([0; 4]);
        self.send(9, 0, &rest, None)
    }

    fn data(&mut self, flags: u8, head: &[u8], data: &[u8]) -> Done {
        let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
        let (cid, tag, offset, len) = (half(8), half(10), word(12), word(16));
        let max = self.shared.config.max_h2c;
        let Some(write) = self.writes.get_mut(&cid) else { return Err(self.breach("data of no write")) };
        let end = offset + len;
        let is_last = end == write.asked;
        let have = write.data.len() as u32;
        if tag != 77 || offset != have || len as usize != data.len() || len > max || end > write.asked {
            return Err(self.breach(format!("data {offset}+{len} of {cid}, {have} there, tag {tag}")));
        }
        if is_last != (flags & 4 != 0) {
            return Err(self.breach("LAST"));
        }
        write.data.extend(data);
        if end == write.sqe.dw[8] {
            let write = self.writes.remove(&cid).unwrap();
            return self.finish_write(&write.sqe, &write.data);
        }
        if is_last { self.ask(cid) } else { Ok(()) }
    }

    fn fabrics(&mut self, sqe: &Sqe, data: &[u8]) -> Done {
        match fabrics::fctype_of(sqe) {
            Some(fctype::CONNECT) => {
                let connect = Connect::from(sqe);
                let Ok(view) = ConnectData::parse(data) else { return Err(self.breach("connect data")) };
                if (connect.qid == 0) != (view.cntlid() == 0xffff) || view.host_id() == [0; 16] {
                    return Err(self.breach("connect parameters"));
                }
                let is_known = view.subnqn() == NQN || view.subnqn() == fabrics::DISCOVERY_NQN;
                self.shared.seen.lock().unwrap().connects.push(connect.qid);
                if !is_known {
                    return self.answer(sqe, [0x10100, 0], Status::new(1, 0x82).with_dnr());
                }
                let authreq = u32::from(self.shared.config.authreq);
                if connect.qid > 0 && !self.shared.config.io_connect.is_ok() {
                    return self.answer(sqe, [0, 0], self.shared.config.io_connect);
                }
                let answered = self.answer(sqe, [1 | authreq << 16, 0], Status::SUCCESS);
                self.qid = Some(connect.qid);
                answered
            }
            Some(fctype::AUTH_SEND) => {
                self.transaction.copy_from_slice(&data[4..6]);
                self.shared.seen.lock().unwrap().proofs.push(data.to_vec());
                self.answer(sqe, [0, 0], Status::SUCCESS)
            }
            Some(fctype::AUTH_RECEIVE) => {
                let mut data = self.shared.config.proofs.get(self.received).cloned().unwrap_or_default();
                self.received += 1;
                data.resize(sqe.dw[11] as usize, 0);
                data[4..6].copy_from_slice(&self.transaction);
                self.send_data(sqe, &data)
            }
            Some(fctype::PROPERTY_GET) => {
                let to = self.shared.config.to;
                let value = match sqe.dw[11] {
                    offset::CAP => Cap(0).with_mqes_z(127).with_to(to).with_css(1).with_cqr(true).0,
                    offset::VS => Version::new(1, 4, 0).0.into(),
                    offset::CSTS => self.shared.csts.load(Ordering::Acquire).into(),
                    _ => 0,
                };
                self.answer(sqe, [value as u32, (value >> 32) as u32], Status::SUCCESS)
            }
            Some(fctype::PROPERTY_SET) => {
                let cc = Cc(sqe.dw[12]);
                let shut = if cc.shn() != 0 { Csts::SHST_COMPLETE } else { 0 };
                self.shared.seen.lock().unwrap().shutdowns += u32::from(shut != 0);
                self.shared.csts.store(Csts(0).with_rdy(cc.en()).with_shst(shut).0, Ordering::Release);
                self.answer(sqe, [0, 0], Status::SUCCESS)
            }
            other => Err(self.breach(format!("fabrics command {other:?}"))),
        }
    }

    fn read(&mut self, sqe: &Sqe, len: u32) -> Done {
        if self.qid == Some(0) {
            let page = match sqe.opcode() {
                admin::opcode::ASYNC_EVENT => return Ok(()),
                admin::opcode::IDENTIFY => self.identify(&admin::Identify::from(sqe)),
                admin::opcode::GET_LOG_PAGE if sqe.dw[10] as u8 == fabrics::DISCOVERY_LOG => {
                    self.discovery(sqe)
                }
                admin::opcode::KEEP_ALIVE => {
                    self.shared.seen.lock().unwrap().keep_alives += 1;
                    Vec::new()
                }
                admin::opcode::SET_FEATURES if sqe.dw[10] as u8 == 7 => {
                    return self.answer(sqe, [3 | 3 << 16, 0], Status::SUCCESS);
                }
                admin::opcode::ABORT => return self.answer(sqe, [1, 0], Status::SUCCESS),
                _ => vec![0; len as usize],
            };
            return self.send_data(sqe, &page[..page.len().min(len as usize)]);
        }
        if sqe.opcode() == nvm::opcode::FLUSH {
            return self.answer(sqe, [0, 0], Status::SUCCESS);
        }
        let Some(range) = self.range(sqe, len as usize) else {
            return self.answer(sqe, [0, 0], Status::LBA_OUT_OF_RANGE.with_dnr());
        };
        self.shared.seen.lock().unwrap().reads += 1;
        let data = self.shared.media.lock().unwrap()[range].to_vec();
        self.send_data(sqe, &data)
    }

    fn range(&self, sqe: &Sqe, len: usize) -> Option<std::ops::Range<usize>> {
        let (lba, blocks) = (sqe.qword(10) as usize, (sqe.dw[12] & 0xffff) as usize + 1);
        let end = lba.checked_add(blocks)?;
        let fits = sqe.nsid() == 1 && end <= self.shared.config.blocks as usize && blocks * BLOCK == len;
        fits.then_some(lba * BLOCK..end * BLOCK)
    }

    fn finish_write(&mut self, sqe: &Sqe, data: &[u8]) -> Done {
        if self.qid == Some(0) {
            return self.answer(sqe, [0, 0], Status::SUCCESS);
        }
        let Some(range) = self.range(sqe, data.len()) else {
            return self.answer(sqe, [0, 0], Status::LBA_OUT_OF_RANGE.with_dnr());
        };
        self.shared.seen.lock().unwrap().writes.push((sqe.qword(10), (sqe.dw[12] & 0xffff) + 1));
        self.shared.media.lock().unwrap()[range].copy_from_slice(data);
        self.answer(sqe, [0, 0], Status::SUCCESS)
    }

    fn identify(&self, identify: &admin::Identify) -> Vec<u8> {
        let mut page = [0; 4096];
        match identify.cns {
            admin::cns::CONTROLLER => {
                let _ = build::Controller::new(&mut page)
                    .sn("FABRIC0001")
                    .mn("onehop test target")
                    .mdts(self.shared.config.mdts)
                    .sqes(onehop_proto::identify::EntrySizes(0x66))
                    .cqes(onehop_proto::identify::EntrySizes(0x44))
                    .aerl_z(3)
                    .sgls(sgl::Support(1 << 20 | 1))
                    .kas(1)
                    .ioccsz((64 + self.shared.config.capsule) / 16)
                    .nn(1)
                    .anatt(self.shared.config.anatt);
            }
            admin::cns::ACTIVE_NAMESPACES if identify.nsid == 0 => {
                (1..=self.shared.config.namespaces).for_each(|nsid| page[4 * usize::from(nsid - 1)] = nsid);
            }
            admin::cns::NAMESPACE => {
                let blocks = self.shared.config.blocks;
                let nguid = u128::from(self.shared.nguid.load(Ordering::Acquire)).to_be_bytes();
                let _ = build::Namespace::new(&mut page).nsze(blocks).ncap(blocks).nguid(nguid);
                page[128..132]
                    .copy_from_slice(&LbaFormat(0).with_lbads(self.shared.config.lbads).0.to_le_bytes());
            }
            admin::cns::NAMESPACE_DESCRIPTORS => {
                let uuid = self.shared.uuid.load(Ordering::Acquire);
                if uuid != 0 {
                    page[..4].copy_from_slice(&[3, 16, 0, 0]);
                    page[19] = uuid;
                }
            }
            _ => {}
        }
        page.to_vec()
    }

    fn discovery(&self, sqe: &Sqe) -> Vec<u8> {
        let log = admin::GetLogPage::from(sqe);
        let mut page = [0; 1024];
        if log.offset == 0 {
            let _ = fabrics::DiscoveryLogBuild::new(&mut page).genctr(5).numrec(1);
        } else {
            let entry = fabrics::DiscoveryEntryBuild::new(&mut page).trtype(3).adrfam(1).subtype(2).treq(1);
            let _ = entry.trsvcid("4420").subnqn(NQN).traddr("10.0.0.1");
        }
        page.to_vec()
    }

    /// Sends data to the host, and the command's completion.
    fn send_data(&mut self, sqe: &Sqe, data: &[u8]) -> Done {
        let Config { split, success, .. } = self.shared.config;
        let count = data.len().div_ceil(split as usize);
        let success = success && count > 0 && self.qid != Some(0);
        for (i, part) in data.chunks(split as usize).enumerate() {
            let mut rest = sqe.cid().to_le_bytes().to_vec();
            rest.extend([0; 2]);
            rest.extend((i as u32 * split).to_le_bytes());
            rest.extend((part.len() as u32).to_le_bytes());
            rest.extend([0; 4]);
            let is_last = i + 1 == count;
            let flags = u8::from(is_last) << 2 | u8::from(is_last && success) << 3;
            self.send(7, flags, &rest, Some(part))?;
        }
        if success { Ok(()) } else { self.answer(sqe, [0, 0], Status::SUCCESS) }
    }

    fn answer(&mut self, sqe: &Sqe, result: [u32; 2], status: Status) -> Done {
        let mut rest = Vec::new();
        for word in [result[0], result[1], 0, u32::from(sqe.cid()) | u32::from(status.0) << 17] {
            rest.extend(word.to_le_bytes());
        }
        self.send(5, 0, &rest, None)
    }

    fn send(&mut self, kind: u8, flags: u8, rest: &[u8], data: Option<&[u8]>) -> Done {
        let digest = if self.digests & 1 != 0 { 4 } else { 0 };
        let tail = if data.is_some() && self.digests & 2 != 0 { 4 } else { 0 };
        let at = 24 + digest;
        let (pdo, len) = data.map_or((0, 0), |data| (at + self.shared.config.padding, data.len()));
        let plen = at.max(pdo) + len + tail;
        let flags = flags | u8::from(digest > 0) | u8::from(tail > 0) << 1;
        let mut out = vec![kind, flags, 24, pdo as u8];
        out.extend((plen as u32).to_le_bytes());
        out.extend(rest);
        if digest > 0 {
            out.extend(crc32c::crc32c(&out).to_le_bytes());
        }
        if let Some(data) = data {
            out.resize(pdo, 0xee);
            out.extend(data);
            if tail > 0 {
                out.extend(crc32c::crc32c(data).to_le_bytes());
            }
        }
        self.put(out)
    }

    /// Sends a PDU, or what the hook makes of it.
    fn put(&mut self, bytes: Vec<u8>) -> Done {
        let kind = bytes[0];
        let count = if self.qid.is_some_and(|qid| qid > 0) {
            let mut sent = self.shared.sent.lock().unwrap();
            let count = sent.entry(kind).or_default();
            *count += 1;
            *count
        } else {
            0
        };
        match (self.shared.config.hook)(Outgoing { qid: self.qid, kind, count, bytes }) {
            Act::Send(bytes) => self.stream.write_all(&bytes),
            Act::Drop => Ok(()),
            Act::Late(time, bytes) => {
                std::thread::sleep(time);
                self.stream.write_all(&bytes)
            }
            Act::Close(bytes) => {
                self.stream.write_all(&bytes)?;
                Err(over())
            }
        }
    }
}
