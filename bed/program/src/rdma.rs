//! RDMA between two network namespaces of a guest: `far` does what it is told in messages, `near` tells it and looks.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{Deadline, DmaBuf, DmaMemory, HostMem, Udmabuf};
use onehop_pci::Root;
use onehop_proto::GpuAddr;
use onehop_rdma::{
    Access, CacheLimits, Channel, ChannelSize, Choice, Error, MemoryRef, MemoryRoute, Nic, Pool, Registered,
    RemoteMemory, Verbs,
};

use crate::report::{Failed, check, ensure, expect, noise};

const BYTES: usize = 1 << 20;
/// Everything ends by then, on a machine with much else to do.
const LIMIT: Duration = Duration::from_secs(20);
/// Part of the VRAM that is written.
const AT: usize = 5 << 20;

fn nic(name: &str) -> Result<Arc<Nic>, Failed> {
    Ok(Nic::open(&Verbs::load()?, &Choice::device(name), CacheLimits::default())?)
}

fn registered(nic: &Nic, mem: &HostMem) -> Result<Registered, Failed> {
    with(nic, mem, Access::Exposed)
}

fn with(nic: &Nic, mem: &HostMem, access: Access) -> Result<Registered, Failed> {
    let memory: MemoryRef = Arc::new(mem.clone());
    Ok(nic.register(&memory, access)?)
}

fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

fn say(channel: &Channel, bytes: &[u8]) -> Result<(), Failed> {
    Ok(channel.send(bytes.len(), soon(), |mem, at| Ok(mem.write(at, bytes)?))?)
}

fn hear(channel: &Channel) -> Result<Vec<u8>, Failed> {
    match channel.receive(soon())? {
        Some(message) => Ok(message.to_vec()?),
        None => Err("no message came in time".into()),
    }
}

/// What `far` is told: what to do, where, and the seed of the bytes.
fn order(what: u8, to: &RemoteMemory, seed: u64) -> Vec<u8> {
    let mut bytes = vec![what];
    for number in [to.addr, to.len, to.rkey.into(), seed] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes
}

fn read_order(bytes: &[u8]) -> Option<(RemoteMemory, u64)> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(1 + at * 8..9 + at * 8)?.try_into().ok()?));
    Some((RemoteMemory { addr: number(0)?, len: number(1)?, rkey: number(2)? as u32 }, number(3)?))
}

/// Serves until it is killed: `e` comes back as it is, `p` puts bytes, `g` gets and compares them, `w` says where this side's own
/// memory is, `k` kills this side.
pub(crate) fn far(device: &str, address: &str) -> Result<(), Failed> {
    let nic = nic(device)?;
    let listener = TcpListener::bind(address)?;
    println!("far: {} on {}", nic.address(), nic.name());
    for stream in listener.incoming() {
        let (stream, nic) = (stream?, nic.clone());
        std::thread::spawn(move || {
            if let Err(Failed(why)) = serve(&nic, stream) {
                println!("far: {why}");
            }
        });
    }
    Ok(())
}

fn serve(nic: &Arc<Nic>, stream: TcpStream) -> Result<(), Failed> {
    let channel = onehop_rdma::accept(|_| nic, ChannelSize::default(), stream, soon())?;
    let mem = HostMem::anonymous(BYTES)?;
    let own = with(nic, &mem, Access::Own)?;
    loop {
        let message = hear(&channel)?;
        let answer = match (message.first(), read_order(&message)) {
            (Some(b'p'), Some((to, seed))) => {
                mem.write(0, &noise(seed, to.len as usize))?;
                channel.put(&own, 0, to, soon())?;
                b"done".to_vec()
            }
            (Some(b'g'), Some((from, seed))) => {
                channel.get(&own, 0, from, soon())?;
                let same = mem.to_vec(0, from.len as usize)? == noise(seed, from.len as usize);
                if same { b"done".to_vec() } else { b"other bytes".to_vec() }
            }
            (Some(b'w'), _) => order(b'w', &own.remote(0, 4096)?, 0),
            (Some(b'k'), _) => std::process::exit(0),
            _ => message,
        };
        say(&channel, &answer)?;
    }
}

fn told(channel: &Channel, what: u8, to: &RemoteMemory, seed: u64) -> Result<(), Failed> {
    say(channel, &order(what, to, seed))?;
    let answer = hear(channel)?;
    ensure(answer == b"done", || format!("far says {}", String::from_utf8_lossy(&answer)))
}

fn meet(nic: &Arc<Nic>, address: &str) -> Result<Channel, Failed> {
    let channel = meet_a_stranger(nic, address)?;
    channel.let_in()?;
    Ok(channel)
}

/// The same, and the far side is not let in.
fn meet_a_stranger(nic: &Arc<Nic>, address: &str) -> Result<Channel, Failed> {
    let stream = TcpStream::connect_timeout(&address.parse()?, LIMIT)?;
    Ok(onehop_rdma::connect(nic, ChannelSize::default(), stream, soon())?)
}

/// The tests; `vram` is the file of memory that stands for a GPU's and has pages, `bar` the same memory without.
pub(crate) fn near(device: &str, address: &str, vram: &str, bar: &str) -> Result<(), Failed> {
    let nic = nic(device)?.for_exposing()?;
    println!("near: {} on {}", nic.address(), nic.name());
    check("messages of all lengths come back, many under way at once", || messages(&nic, address));
    check("the far side puts into host memory, and gets from it", || host_memory(&nic, address));
    check("a range that is not whole pages is not left", || ragged(&nic, address));
    check("registrations are kept, and forgotten with their memory", || kept(&nic, address));
    check("memory that was not exposed is not reached, and the next connection works", || {
        refused(&nic, address)
    });
    check("a far side that was not let in reaches no memory", || stranger(&nic, address));
    check("a far side that was let in reaches nothing of another one's", || of_another(&nic, address));
    check("the far side's own memory is reached by nobody", || of_far(&nic, address));
    if vram != "-" {
        check("the far side puts into VRAM, and gets from it", || in_vram(&nic, address, vram));
    }
    check("dma-bufs and addresses of device memory are refused; bytes bounce", || bounce(&nic, address, bar));
    check("what is under way fails when the far side goes, and at once", || killed(&nic, address));
    Ok(())
}

fn messages(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let channel = meet(nic, address)?;
    let lengths: Vec<usize> = (0..300).map(|i| 1 + i * 977 % channel.most()).collect();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            for (i, len) in lengths.iter().enumerate() {
                say(&channel, &[&b"e"[..], &noise(i as u64, len - 1)].concat())?;
            }
            Ok(())
        });
        for (i, len) in lengths.iter().enumerate() {
            let came = hear(&channel)?;
            ensure(came[1..] == noise(i as u64, len - 1), || format!("message {i} came back as another"))?;
        }
        sender.join().map_err(|_| Failed("the sender panicked".into()))?
    })
}

fn host_memory(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let channel = meet(nic, address)?;
    let mem = HostMem::anonymous(BYTES)?;
    let own = registered(nic, &mem)?;
    ensure(own.way() == MemoryRoute::Host && own.why_not_better().is_empty(), || format!("{own:?}"))?;
    let whole = own.remote(0, BYTES as u64)?;
    let start = Instant::now();
    told(&channel, b'p', &whole, 1)?;
    let put = start.elapsed();
    ensure(mem.to_vec(0, BYTES)? == noise(1, BYTES), || "other bytes came".into())?;
    mem.write(0, &noise(2, BYTES))?;
    told(&channel, b'g', &whole, 2)?;
    println!("    a put of 1 MiB and its messages took {put:?}");
    Ok(())
}

fn ragged(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let channel = meet(nic, address)?;
    let mem = HostMem::anonymous(BYTES)?;
    mem.fill(0, BYTES, 0xee)?;
    let own = registered(nic, &mem)?;
    for (i, (at, len)) in [(1, 1), (4095, 2), (8191, 100_001), (500_003, 70_007)].into_iter().enumerate() {
        told(&channel, b'p', &own.remote(at, len)?, i as u64)?;
        let (at, len) = (at as usize, len as usize);
        let around = mem.to_vec(at - 1, len + 2)?;
        let sound = around[1..=len] == noise(i as u64, len) && around[0] == 0xee && around[len + 1] == 0xee;
        ensure(sound, || format!("{len} bytes at {at}"))?;
        told(&channel, b'g', &own.remote(at as u64, len as u64)?, i as u64)?;
        mem.fill(at, len, 0xee)?;
    }
    Ok(())
}

fn kept(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let channel = meet(nic, address)?;
    let mem = HostMem::anonymous(BYTES)?;
    let memory: MemoryRef = Arc::new(mem.clone());
    let before = nic.account();
    for seed in 0..3 {
        let held = nic.cached_whole(&memory)?;
        told(&channel, b'p', &held.remote(0, 4096)?, seed)?;
        ensure(mem.to_vec(0, 4096)? == noise(seed, 4096), || format!("seed {seed}"))?;
    }
    let after = nic.account();
    let hits = (after.misses - before.misses, after.hits - before.hits);
    ensure(hits == (1, 2), || format!("{hits:?}"))
}

fn refused(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    for wrong in [Wrong::Key, Wrong::Beyond] {
        let channel = meet(nic, address)?;
        let mem = HostMem::anonymous(8192)?;
        let own = registered(nic, &mem)?;
        let good = own.remote(0, 4096)?;
        let bad = match wrong {
            Wrong::Key => RemoteMemory { rkey: good.rkey ^ 0x5500, ..good },
            Wrong::Beyond => RemoteMemory { addr: good.addr + 4097, len: 4096, ..good },
        };
        say(&channel, &order(b'p', &bad, 1))?;
        let start = Instant::now();
        let ended = hear(&channel);
        ensure(ended.is_err() && channel.is_broken(), || "the connection goes on".into())?;
        ensure(start.elapsed() < LIMIT / 2, || format!("it took {:?}", start.elapsed()))?;
        ensure(mem.to_vec(0, 8192)?.iter().all(|byte| *byte == 0), || "bytes came".into())?;
        let again = meet(nic, address)?;
        told(&again, b'p', &good, 3)?;
        ensure(mem.to_vec(0, 4096)? == noise(3, 4096), || "the next connection brings other bytes".into())?;
    }
    Ok(())
}

/// Has the far side try what has to fail, and looks that it has broken the connection and done nothing.
fn in_vain(channel: &Channel, what: u8, to: &RemoteMemory, mem: &HostMem) -> Result<(), Failed> {
    let before = mem.to_vec(0, mem.len())?;
    say(channel, &order(what, to, 5))?;
    let answer = hear(channel);
    ensure(answer.is_err() && channel.is_broken(), || format!("the connection goes on: {:?}", answer.ok()))?;
    ensure(mem.to_vec(0, mem.len())? == before, || "bytes came".into())
}

fn stranger(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let mem = HostMem::anonymous(4096)?;
    let own = registered(nic, &mem)?;
    let whole = own.remote(0, 4096)?;
    for what in [b'p', b'g'] {
        let channel = meet_a_stranger(nic, address)?;
        say(&channel, b"e")?;
        ensure(hear(&channel)? == b"e", || "messages do not go".into())?;
        in_vain(&channel, what, &whole, &mem)?;
    }
    let channel = meet(nic, address)?;
    told(&channel, b'p', &whole, 6)?;
    ensure(mem.to_vec(0, 4096)? == noise(6, 4096), || "who is let in brings other bytes".into())?;
    told(&channel, b'g', &whole, 6)
}

fn of_another(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let mem = HostMem::anonymous(4096)?;
    let own = registered(nic, &mem)?;
    let other = nic.for_exposing()?;
    for what in [b'p', b'g'] {
        in_vain(&meet(&other, address)?, what, &own.remote(0, 4096)?, &mem)?;
    }
    told(&meet(nic, address)?, b'p', &own.remote(0, 4096)?, 6)
}

fn of_far(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let mem = HostMem::anonymous(4096)?;
    mem.write(0, &noise(1, 4096))?;
    let own = registered(nic, &mem)?;
    for reads in [false, true] {
        let channel = meet(nic, address)?;
        say(&channel, b"w")?;
        let (there, _) = read_order(&hear(&channel)?).ok_or("far does not say where its memory is")?;
        let ended =
            if reads { channel.get(&own, 0, there, soon()) } else { channel.put(&own, 0, there, soon()) };
        ensure(ended.is_err() && channel.is_broken(), || "its memory was reached".into())?;
        ensure(mem.to_vec(0, 4096)? == noise(1, 4096), || "bytes came".into())?;
    }
    Ok(())
}

enum Wrong {
    Key,
    Beyond,
}

fn in_vram(nic: &Arc<Nic>, address: &str, vram: &str) -> Result<(), Failed> {
    let channel = meet(nic, address)?;
    let file = std::fs::File::options().read(true).write(true).open(vram)?;
    let mem = HostMem::of_device(&file, AT as u64, BYTES)?;
    let own = registered(nic, &mem)?;
    let whole = own.remote(0, BYTES as u64)?;
    told(&channel, b'p', &whole, 7)?;
    ensure(mem.to_vec(0, BYTES)? == noise(7, BYTES), || "other bytes are in VRAM".into())?;
    expect("vram", AT as u64, &noise(7, BYTES));
    let part = mem.slice(4096..BYTES / 2)?;
    part.write(0, &noise(8, part.len()))?;
    told(&channel, b'g', &own.remote(4096, part.len() as u64)?, 8)?;
    // What the host is to find is what was put.
    mem.write(0, &noise(7, BYTES))?;
    Ok(())
}

/// Memory of a device that this side has no pages of, as a GPU's is.
struct OnDevice {
    bar: HostMem,
    buf: Option<OwnedFd>,
}

impl DmaMemory for OnDevice {
    fn bytes(&self) -> usize {
        self.bar.len()
    }
    fn host(&self) -> Option<&HostMem> {
        None
    }
    fn gpu_addr(&self) -> Option<GpuAddr> {
        Some(GpuAddr(self.bar.host_ptr() as u64))
    }
    fn dma_buf(&self) -> Option<onehop_os::Result<DmaBuf>> {
        let fd = self.buf.as_ref()?.try_clone().ok()?;
        Some(Ok(DmaBuf { fd, offset: 0, bytes: self.bar.len() as u64 }))
    }
}

fn bounce(nic: &Arc<Nic>, address: &str, bar: &str) -> Result<(), Failed> {
    let whole = onehop_pci::bar_memory(&Root::here(), bar.parse()?, None)?;
    let exported = Udmabuf::new(BYTES)?;
    let buf = exported.export(exported.memory())?.fd;
    let memory: MemoryRef = Arc::new(OnDevice { bar: whole.slice(0..BYTES)?, buf: Some(buf) });
    let refused = nic.register(&memory, Access::Exposed);
    let Err(Error::NotRegistered { refusals, .. }) = refused else {
        return Err(Failed(format!("it was registered, or failed otherwise: {refused:?}")));
    };
    for one in &refusals {
        println!("    {}: {}", one.way.name(), one.why);
    }
    let ways: Vec<MemoryRoute> = refusals.iter().map(|one| one.way).collect();
    ensure(ways == [MemoryRoute::DmaBuf, MemoryRoute::Peermem], || format!("{ways:?}"))?;
    ensure(refusals[0].why.contains("ibv_reg_dmabuf_mr"), || "the dma-buf was not tried".into())?;
    // Safe code cannot vouch for an address.
    ensure(refusals[1].why.contains("not known to be a GPU's"), || refusals[1].why.clone())?;

    let channel = meet(nic, address)?;
    let (slots, mem) = (4, HostMem::anonymous(4 << 16)?);
    let pool = Pool::new(Arc::new(registered(nic, &mem)?), (4 << 16) / slots)?;
    for seed in 20..26 {
        let slot = pool.take(soon())?;
        told(&channel, b'p', &slot.remote(pool.slot_bytes())?, seed)?;
        let bytes = mem.to_vec(slot.offset() as usize, 1 << 16)?;
        whole.write((seed as usize) << 16, &bytes)?;
        expect("vram", seed << 16, &noise(seed, 1 << 16));
    }
    Ok(())
}

fn killed(nic: &Arc<Nic>, address: &str) -> Result<(), Failed> {
    let channel = meet(nic, address)?;
    let mem = HostMem::anonymous(4096)?;
    let own = registered(nic, &mem)?;
    say(&channel, &order(b'k', &own.remote(0, 4096)?, 0))?;
    let start = Instant::now();
    let ended = hear(&channel).err().map(|Failed(why)| why).unwrap_or_default();
    ensure(ended.contains("has closed it"), || format!("it ended with: {ended}"))?;
    ensure(start.elapsed() < Duration::from_secs(5), || format!("it took {:?}", start.elapsed()))?;
    let next = say(&channel, b"e");
    ensure(next.is_err(), || "a broken connection takes messages".into())
}

/// Puts bytes of its own into `far`'s answers until the net fails under it, and says how long that took to be noticed; then
/// connects again. `signs` is a folder: it makes `ready` there, and `broken` when it has noticed, and waits for `again`.
pub(crate) fn unplugged(device: &str, address: &str, signs: &str) -> Result<(), Failed> {
    let sign = |name| std::path::Path::new(signs).join(name);
    let nic = nic(device)?.for_exposing()?;
    check("a link that goes down is noticed, and the connection is made again", || {
        let channel = meet(&nic, address)?;
        let mem = HostMem::anonymous(4096)?;
        let own = registered(&nic, &mem)?;
        told(&channel, b'p', &own.remote(0, 4096)?, 1)?;
        std::fs::write(sign("ready"), "")?;
        let start = Instant::now();
        let why = loop {
            ensure(start.elapsed() < 3 * LIMIT, || "the link never went down".into())?;
            if let Err(Failed(why)) = told(&channel, b'p', &own.remote(0, 4096)?, 2) {
                break why;
            }
        };
        std::fs::write(sign("broken"), "")?;
        println!("    {why}");
        ensure(channel.is_broken(), || format!("not broken, though {why}"))?;
        let deadline = Deadline::after(3 * LIMIT);
        while !sign("again").exists() && !deadline.passed() {
            std::thread::sleep(Duration::from_millis(20));
        }
        // The device's own address may have gone with the link, and come back.
        let next = loop {
            let met = crate::rdma::nic(device).and_then(|nic| meet(&nic, address));
            match met {
                Ok(channel) => break channel,
                Err(Failed(why)) if deadline.passed() => return Err(Failed(why)),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        let own = registered(next.nic(), &mem)?;
        told(&next, b'p', &own.remote(0, 4096)?, 9)?;
        ensure(mem.to_vec(0, 4096)? == noise(9, 4096), || "other bytes came".into())
    });
    Ok(())
}
