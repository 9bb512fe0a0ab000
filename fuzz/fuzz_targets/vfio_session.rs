//! A served drive under an arbitrary client: valid and invalid messages, any access to any region, memory that is
//! shared and unshared while the controller uses it. The server neither panics nor hangs, and serves the next client.
#![no_main]

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_sim::{Config, Sim};
use onehop_vfio_user::wire::{MessageHeader, command};
use onehop_vfio_user::{Function, Nvme, serve};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Bytes of the memory that the client shares.
const MEMORY: u64 = 1 << 20;

#[derive(Arbitrary, Debug)]
enum Step {
    Raw(Vec<u8>),
    Message { command: u8, flags: u8, payload: Vec<u8>, fds: u8 },
    Read { region: u8, offset: u16, count: u16 },
    Write { region: u8, offset: u16, data: Vec<u8> },
    Config { at: u8, value: u32 },
    Map { at: u16, pages: u8, offset: u8, flags: u8, what: u8 },
    Unmap { at: u16, pages: u8, flags: u8 },
    Irqs { flags: u8, start: u16, count: u16, fds: u8 },
    BringUp,
    Doorbell { at: u8, value: u16 },
    Memory { at: u16, bytes: [u8; 16] },
    Reset,
}

/// The kind of the message's file descriptors.
struct Fds {
    memory: File,
    event: OwnedFd,
    pipe: OwnedFd,
}

static FDS: LazyLock<Fds> = LazyLock::new(|| {
    let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let memory = File::from(memory);
    memory.set_len(MEMORY).expect("a length");
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an event fd");
    // Only the write end, so that writes fail.
    let (_, pipe) = std::io::pipe().expect("a pipe");
    Fds { memory, event, pipe: pipe.into() }
});

static FUNCTION: LazyLock<Function> = LazyLock::new(|| {
    let sim = Sim::new(Config::parse("mem:1M?queues=4&cmb=64K").expect("a drive")).expect("a drive");
    Function::new(Box::new(Nvme::new(sim).expect("a drive that can be served")))
});

fuzz_target!(|steps: Vec<Step>| {
    let (mine, yours) = UnixStream::pair().expect("sockets");
    let mut reader = mine.try_clone().expect("a socket");
    std::thread::scope(|scope| {
        // Replies must be received, or the server blocks.
        scope.spawn(move || _ = std::io::copy(&mut reader, &mut std::io::sink()));
        scope.spawn(move || {
            let version = [0, 0, 1, 0];
            message(&mine, command::VERSION, 0, &version, &[]);
            for step in steps.iter().take(64) {
                send_step(&mine, step);
            }
            let _ = mine.shutdown(std::net::Shutdown::Write);
        });
        serve(yours, &FUNCTION, &|| false, &|_| {});
    });
    answers_the_next();
});

/// The function works for the next client.
fn answers_the_next() {
    let (mut mine, yours) = UnixStream::pair().expect("sockets");
    message(&mine, command::VERSION, 0, &[0, 0, 1, 0], &[]);
    message(&mine, command::REGION_READ, 0, &access(7, 0, 4), &[]);
    mine.shutdown(std::net::Shutdown::Write).expect("a socket");
    assert_eq!(serve(yours, &FUNCTION, &|| false, &|_| {}), None);
    let mut said = Vec::new();
    mine.read_to_end(&mut said).expect("replies");
    assert_eq!(said[said.len() - 4..], [0x34, 0x12, 0x0e, 0x0a], "not the drive's identity");
}

fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    [offset.to_le_bytes().as_slice(), &region.to_le_bytes(), &count.to_le_bytes()].concat()
}

fn write(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    [access(region, offset, data.len() as u32).as_slice(), data].concat()
}

fn send_step(stream: &UnixStream, step: &Step) {
    let fds = &*FDS;
    let all = [fds.memory.as_fd(), fds.event.as_fd(), fds.pipe.as_fd()];
    let page = |n: u64| n << 12;
    match step {
        Step::Raw(bytes) => send(stream, bytes, &[]),
        Step::Message { command, flags, payload, fds } => {
            message(
                stream,
                u16::from(*command),
                u32::from(*flags) & !15,
                payload,
                &all[..usize::from(*fds) % 4],
            );
        }
        Step::Read { region, offset, count } => {
            let read = access(u32::from(*region), u64::from(*offset), u32::from(*count));
            message(stream, command::REGION_READ, 0, &read, &[]);
        }
        Step::Write { region, offset, data } => {
            message(stream, command::REGION_WRITE, 16, &write((*region).into(), (*offset).into(), data), &[]);
        }
        Step::Config { at, value } => {
            message(
                stream,
                command::REGION_WRITE,
                0,
                &write(7, u64::from(*at) & !3, &value.to_le_bytes()),
                &[],
            );
        }
        Step::Map { at, pages, offset, flags, what } => {
            let words = [
                32 | u64::from(*flags) << 32,
                page((*offset).into()),
                page((*at).into()),
                page((*pages).into()),
            ];
            let at = usize::from(*what) % 4;
            message(
                stream,
                command::DMA_MAP,
                0,
                &words.map(u64::to_le_bytes).concat(),
                all.get(at..=at).unwrap_or(&[]),
            );
        }
        Step::Unmap { at, pages, flags } => {
            let words = [24 | u64::from(*flags) << 32, page((*at).into()), page((*pages).into())];
            message(stream, command::DMA_UNMAP, 0, &words.map(u64::to_le_bytes).concat(), &[]);
        }
        Step::Irqs { flags, start, count, fds } => {
            let words = [20, u32::from(*flags), 2, (*start).into(), (*count).into()];
            let events = vec![all[1 + usize::from(*fds) % 2]; usize::from(*fds) % 9];
            message(stream, command::SET_IRQS, 0, &words.map(u32::to_le_bytes).concat(), &events);
        }
        Step::BringUp => bring_up(stream, fds),
        Step::Doorbell { at, value } => {
            let at = 0x1000 + u64::from(at % 12) * 4;
            message(stream, command::REGION_WRITE, 16, &write(0, at, &u32::from(*value).to_le_bytes()), &[]);
        }
        Step::Memory { at, bytes } => {
            _ = rustix::io::pwrite(&fds.memory, bytes, u64::from(*at) * 16);
        }
        Step::Reset => message(stream, command::RESET, 0, &[], &[]),
    }
}

/// Memory from address 0 on, and a controller with its admin queues in it.
fn bring_up(stream: &UnixStream, fds: &Fds) {
    let words = [32 | 3 << 32, 0, 0, MEMORY];
    message(stream, command::DMA_MAP, 0, &words.map(u64::to_le_bytes).concat(), &[fds.memory.as_fd()]);
    message(stream, command::REGION_WRITE, 0, &write(7, 4, &[6, 0]), &[]);
    for (at, value) in
        [(0x14, 0), (0x24, 0x003f_003f), (0x28, 0), (0x2c, 0), (0x30, 0x2000), (0x34, 0), (0x14, 0x46_0001)]
    {
        message(stream, command::REGION_WRITE, 0, &write(0, at, &u32::to_le_bytes(value)), &[]);
    }
}

fn message(stream: &UnixStream, command: u16, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let header = MessageHeader { flags, ..MessageHeader::request(1, command, payload.len()) };
    send(stream, &[header.encode().as_slice(), payload].concat(), fds);
}

/// Sends as much as the server accepts; it closes when it cannot follow.
fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let mut left = bytes;
    while !left.is_empty() {
        let Ok(sent) = sendmsg(stream, &[IoSlice::new(left)], &mut control, SendFlags::NOSIGNAL) else {
            return;
        };
        control.clear();
        left = &left[sent..];
    }
}
