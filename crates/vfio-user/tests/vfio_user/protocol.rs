//! What a client may do to a served drive, and what happens to a client that violates the protocol.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Options};
use onehop_vfio_user::wire::{HEADER, MAX_FDS, MessageHeader, command};
use onehop_vfio_user::{Function, Nvme};
use rustix::event::{EventfdFlags, eventfd};

use crate::client::{CONFIG, Client, Served, memfd, raised, send};

const EINVAL: u32 = 22;
const EEXIST: u32 = 17;
const EOPNOTSUPP: u32 = 95;
const PATIENCE: Duration = Duration::from_secs(10);

fn connected(spec: &str) -> (Served, std::sync::Arc<Client>) {
    let (served, stream) = Served::start(spec);
    (served, Client::connect(stream))
}

/// For drives that do not respond.
fn impatient() -> Options {
    let short = Duration::from_millis(300);
    Options { admin_timeout: short, abort_wait: short, ready_limit: short, ..Options::default() }
}

fn word(client: &Client, region: u32, offset: u64) -> u32 {
    u32::from_le_bytes(client.read(region, offset, 4).try_into().unwrap())
}

#[test]
fn the_function_is_an_nvme_drive() {
    let (_served, client) = connected("mem:1M?queues=3");
    assert_eq!(word(&client, CONFIG, 8) >> 8, 0x01_0802);
    assert_eq!(client.read(CONFIG, 0x52, 2), [3, 0]);
    assert_eq!(word(&client, 0, 8), 0x0001_0400);
    let info =
        client.request(command::IRQ_INFO, &[16u32, 0, 2, 0].map(u32::to_le_bytes).concat(), &[]).unwrap();
    assert_eq!(info[12..], 4u32.to_le_bytes());
    let info = client.request(command::DEVICE_INFO, &[0; 16], &[]).unwrap();
    assert_eq!(info[8..], [9, 0, 0, 0, 5, 0, 0, 0]);
}

#[test]
fn without_memory_space_nothing_answers() {
    let (served, client) = connected("mem:1M");
    client.write(CONFIG, 4, &[4]);
    assert_eq!(word(&client, 0, 8), u32::MAX);
    client.write(CONFIG, 4, &[6]);
    client.write(CONFIG, 0x44, &[3]);
    assert_eq!(word(&client, 0, 8), u32::MAX);
    client.write(CONFIG, 0x44, &[0]);
    assert_eq!(word(&client, 0, 8), 0x0001_0400);
    assert!(served.sim.violations().is_empty());
}

#[test]
fn a_client_may_be_forgiven_that_memory_space_is_off() {
    let sim = onehop_sim::open("mem:1M").unwrap();
    let function = Function::new(Box::new(Nvme::new(sim.clone()).unwrap())).forgiving_memory_space();
    let (_served, stream) = Served::serve(sim, function);
    let client = Client::connect(stream);
    // As SPDK: bus mastering, no INTx.
    client.write(CONFIG, 4, &[4, 4]);
    assert_eq!(word(&client, 0, 8), 0x0001_0400);
    Drive::open(client.port(), Options::default()).unwrap();
    client.write(CONFIG, 0x44, &[3]);
    assert_eq!(word(&client, 0, 8), u32::MAX, "a suspended function does not respond");
}

#[test]
fn a_region_query_has_room_for_the_answer() {
    let (_served, client) = connected("mem:1M");
    let short = [32u32, 0, 0, 0].map(u32::to_le_bytes).concat();
    assert_eq!(client.request(command::REGION_INFO, &short, &[]), Err(EINVAL));
    assert_eq!(client.region_info(0, 31), Err(EINVAL));
    let info = client.region_info(0, 4096).unwrap();
    // Flags: readable and writable, nothing to map.
    assert_eq!((info.len(), &info[..8]), (32, [32, 0, 0, 0, 3, 0, 0, 0].as_slice()));
}

#[test]
fn doorbells_can_be_mapped_where_the_server_was_asked() {
    let sim = onehop_sim::open("mem:1M?dstrd=3&cmb=1M").unwrap();
    let nvme = Nvme::new(sim.clone()).unwrap().with_mapped_doorbells().unwrap();
    let (_served, stream) = Served::serve(sim, Function::new(Box::new(nvme)));
    let client = Client::connect(stream);
    // Too little room: only the size. Flags: readable, writable, mappable, capabilities.
    let info = client.region_info(0, 32).unwrap();
    assert_eq!(
        (info.len(), &info[..16]),
        (32, [64, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].as_slice())
    );
    let info = client.region_info(0, 64).unwrap();
    assert_eq!((info.len(), info[12]), (64, 32));
    let area: Vec<u64> =
        info[48..].chunks(8).map(|raw| u64::from_le_bytes(raw.try_into().unwrap())).collect();
    assert_eq!(area, [0x1000, 0x2000], "65 queue pairs, 32 bytes apart, and none of the buffer behind them");
    assert_eq!(client.region_info(4, 64).unwrap()[4..8], [3, 0, 0, 0]);
}

#[test]
fn without_bus_mastering_no_memory_is_reached() {
    let (served, client) = connected("mem:1M");
    let short = Duration::from_millis(300);
    let options =
        Options { admin_timeout: short, abort_wait: short, ready_limit: short, ..Options::default() };
    let drive = Drive::open(client.port(), options).unwrap();
    client.write(CONFIG, 4, &[2]);
    assert!(drive.log_page(2, u32::MAX, 512).is_err());
    let breaches = served.sim.violations();
    assert!(breaches.iter().any(|b| b.rule.name() == "bus-master"), "{breaches:?}");
}

#[test]
fn function_level_reset_by_the_configuration_space() {
    let (_served, client) = connected("mem:1M");
    let drive = Drive::open(client.port(), Options::default()).unwrap();
    drop(drive);
    client.write(0, 0x24, &[1, 0, 1, 0]);
    client.write(CONFIG, 0x68, &0x8000u16.to_le_bytes());
    assert_eq!(client.read(CONFIG, 4, 2), [0, 0]);
    assert_eq!(word(&client, 0, 0x24), u32::MAX);
    client.turn_on();
    assert_eq!((word(&client, 0, 0x24), word(&client, 0, 0x14)), (0, 0));
}

#[test]
fn interrupts_come_by_event_fds() {
    let (_served, client) = connected("mem:1M?queues=2");
    let events: Vec<_> = (0..3).map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
    let fds: Vec<_> = events.iter().map(|event| event.as_fd()).collect();
    assert_eq!(client.set_irqs(0x24, 0, 1, &[]), Ok(()));
    assert_eq!(client.set_irqs(0x24, 0, 3, &fds), Ok(()));
    assert_eq!(client.set_irqs(0x24, 0, 4, &fds), Err(EINVAL));
    assert_eq!(client.set_irqs(0x24, 0, 2, &fds), Err(EINVAL));
    assert_eq!(client.set_irqs(0x24, u32::MAX, 2, &fds), Err(EINVAL));
    let (pipe, _other) = std::io::pipe().unwrap();
    assert_eq!(client.set_irqs(0x24, 0, 1, &[pipe.as_fd()]), Err(EINVAL));
    // The admin queue's vector, raised by the driver's commands.
    let drive = Drive::open(client.port(), Options::default()).unwrap();
    assert!(raised(&events[0], PATIENCE) > 0);
    // Masked: pending, and raised when unmasked.
    client.write(CONFIG, 0x52, &0x8000u16.to_le_bytes());
    assert_eq!(client.set_irqs(0x09, 0, 1, &[]), Ok(()));
    while raised(&events[0], Duration::ZERO) > 0 {}
    drive.log_page(2, u32::MAX, 512).unwrap();
    let pending = || client.read(4, 0x1000, 8)[0];
    let until = Instant::now() + PATIENCE;
    while pending() != 1 && Instant::now() < until {}
    assert_eq!((pending(), raised(&events[0], Duration::ZERO)), (1, 0));
    assert_eq!(client.set_irqs(0x11, 0, 1, &[]), Ok(()));
    assert_eq!((raised(&events[0], PATIENCE), pending()), (1, 0));
    // Raised by the client, then all disconnected.
    assert_eq!(client.set_irqs(0x21, 2, 1, &[]), Ok(()));
    assert_eq!(raised(&events[2], PATIENCE), 1);
    assert_eq!(client.set_irqs(0x21, 0, 0, &[]), Ok(()));
    assert_eq!(client.set_irqs(0x21, 2, 1, &[]), Ok(()));
    assert_eq!(raised(&events[2], Duration::from_millis(20)), 0);
}

#[test]
fn memory_comes_and_goes() {
    let (_served, client) = connected("mem:1M");
    let file = memfd(0x4000);
    assert_eq!(client.share(0x10000, 0x4000, &file, 0, 3), Ok(()));
    assert_eq!(client.share(0x13000, 0x1000, &file, 0, 3), Err(EEXIST));
    assert_eq!(client.share(0x20000, 0x4000, &file, 0x1000, 3), Err(EINVAL));
    assert_eq!(client.share(0x20800, 0x1000, &file, 0, 3), Err(EINVAL));
    assert_eq!(client.share(u64::MAX - 0xfff, 0x1000, &file, 0, 3), Err(EINVAL));
    assert_eq!(client.share(0x20000, 0x1000, &file, 0, 4), Err(EINVAL));
    assert_eq!(client.share(0x20000, 1 << 62, &file, 0, 3), Err(EINVAL));
    assert_eq!(client.unshare(0x11000, 0x1000), Err(EINVAL));
    assert_eq!(client.unshare(0x10000, 0x3000), Err(EINVAL));
    // More than was ever shared, as in QEMU.
    assert_eq!(client.unshare(0, u64::MAX - 0xfff), Ok(()));
    assert_eq!(client.unshare(0x10000, 0x4000), Ok(()));
    assert_eq!(client.share(0x13000, 0x1000, &file, 0, 1), Ok(()));
    // A range without a file descriptor, and one with two.
    let ask = [32 | 3 << 32, 0, 0x40000, 0x1000].map(u64::to_le_bytes).concat();
    assert_eq!(client.request(command::DMA_MAP, &ask, &[file.as_fd(), file.as_fd()]), Err(EINVAL));
    assert_eq!(client.request(command::DMA_MAP, &ask, &[]), Ok(Vec::new()));
    // A pipe cannot be memory.
    let (pipe, _other) = std::io::pipe().unwrap();
    let ask = [32 | 3 << 32, 0, 0x50000, 0x1000].map(u64::to_le_bytes).concat();
    assert_eq!(client.request(command::DMA_MAP, &ask, &[pipe.as_fd()]), Err(EINVAL));
}

#[test]
fn invalid_requests_are_refused_and_the_session_continues() {
    let (served, client) = connected("mem:1M");
    for number in [0, 6, 11, 12, 14, 999, u16::MAX] {
        assert_eq!(client.request(number, &[0; 64], &[]), Err(EOPNOTSUPP), "command {number}");
    }
    for number in 1..=10 {
        assert!(client.request(number, &[], &[]).is_err(), "command {number}");
        // Only the query about the device needs no further fields.
        let refused = client.request(number, &[0xff; 64], &[]).is_err();
        assert_eq!(refused, number != command::DEVICE_INFO, "command {number}");
    }
    let read = |region: u32, offset: u64, count: u32| {
        let ask = [offset.to_le_bytes().as_slice(), &region.to_le_bytes(), &count.to_le_bytes()].concat();
        client.request(command::REGION_READ, &ask, &[])
    };
    for (region, offset, count) in
        [(0, 0x4000, 4), (0, u64::MAX, 4), (1, 0, 1), (7, 4095, 2), (9, 0, 1), (0, 0, 0), (0, 0, u32::MAX)]
    {
        assert_eq!(read(region, offset, count), Err(EINVAL), "{region} {offset:#x} {count}");
    }
    // The drive decides about unusual register accesses.
    assert_eq!(read(0, 1, 3).unwrap()[16..], [0xff; 3]);
    assert_eq!(served.sim.violations().len(), 1);
    assert_eq!(word(&client, 0, 8), 0x0001_0400);
}

/// How a session ends whose client has sent these bytes and closed.
fn ends(bytes: &[u8], fds: usize) -> Option<String> {
    let (served, mut stream) = Served::start("mem:1M");
    let file = memfd(4096);
    send(&stream, bytes, &vec![file.as_fd(); fds]);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
    served.end()
}

#[test]
fn a_stream_that_cannot_be_followed_ends_the_session() {
    let header = MessageHeader::request(1, command::VERSION, 4);
    let whole = [header.encode().as_slice(), &[0; 4]].concat();
    assert_eq!(ends(&whole, 0), None);
    assert_eq!(ends(&[], 0), None);
    for bytes in [0, 15, u32::MAX, (1 << 20) + 33] {
        let why = ends(&MessageHeader { bytes, ..header }.encode(), 0).unwrap();
        assert!(why.contains("violated the protocol: a message of"), "{why}");
    }
    assert!(ends(&whole[..HEADER + 1], 0).unwrap().contains("in the middle of a message"));
    assert!(ends(&whole[..3], 0).unwrap().contains("in the middle of a message"));
    assert!(ends(&header.reply(0).encode(), 0).unwrap().contains("never sent"));
    assert_eq!(ends(&whole, MAX_FDS), None);
    assert!(ends(&whole, MAX_FDS + 1).unwrap().contains("file descriptors"));
}

#[test]
fn posted_writes_are_never_answered() {
    let (served, mut stream) = Served::start("mem:1M");
    let bad = MessageHeader { flags: 1 << 4, ..MessageHeader::request(7, command::REGION_WRITE, 3) };
    stream.write_all(&[bad.encode().as_slice(), &[0; 3]].concat()).unwrap();
    let client = Client::connect(stream);
    assert_eq!(word(&client, 0, 8), 0x0001_0400);
    assert_eq!(served.refused.lock().unwrap().len(), 1);
}

#[test]
fn a_drive_that_is_gone_reads_as_ones() {
    let (_served, client) = connected("mem:1M?fault=gone@after=2s");
    // The fault's clock starts when the controller is ready.
    let drive = Drive::open(client.port(), impatient()).unwrap();
    let until = Instant::now() + PATIENCE;
    while word(&client, CONFIG, 0) != u32::MAX && Instant::now() < until {}
    assert_eq!((word(&client, CONFIG, 0), word(&client, 0, 8)), (u32::MAX, u32::MAX));
    assert!(drive.log_page(2, u32::MAX, 512).is_err());
}
