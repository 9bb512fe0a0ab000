//! Untrusted input of a mount's daemon: names of links, messages without descriptors, and rings with arbitrary memory,
//! modified while it is read.
#![no_main]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use onehop_os::HostMem;
use onehop_usrbio::ring::{Done, RingServer, bytes};
use onehop_usrbio::wire::{Answer, Ask, BYTES, Packet};
use onehop_usrbio::{Id, Name, Priority, RingName};

const ENTRIES: i32 = 6;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    name: String,
    message: Vec<u8>,
    depth: i8,
    millis: u8,
    memory: Vec<u8>,
    /// Marks and words that the program stores between two reads of the daemon.
    stores: Vec<(u16, u32)>,
}

fuzz_target!(|input: Input| {
    for text in [input.name.clone(), format!("{}.{}", Id([7; 16]), input.name)] {
        if let Ok(name) = Name::parse(&text) {
            assert_eq!(Name::parse(&name.to_string()).unwrap(), name);
        }
    }
    let mut message = [0; BYTES];
    for (to, from) in message.iter_mut().zip(&input.message) {
        *to = *from;
    }
    for genuine in [false, true] {
        if genuine {
            message[..8].copy_from_slice(b"onehopU1");
        }
        let packet = || Packet { bytes: message, fds: Vec::new() };
        let _ = Ask::unpack(packet());
        let _ = Answer::unpack(packet());
    }
    ring(&input);
});

fn ring(input: &Input) {
    let len = bytes(ENTRIES).unwrap();
    let mem = HostMem::anonymous(len).unwrap().slice(0..len).unwrap();
    let name = RingName {
        read: true,
        depth: input.depth.into(),
        priority: Priority::Normal,
        timeout: Duration::from_millis(input.millis.into()),
        flags: 0,
    };
    let server = RingServer::new(mem.clone(), name).unwrap();
    mem.write(0, &input.memory[..input.memory.len().min(len)]).unwrap();
    let (start, mut out, mut in_flight) = (Instant::now(), Vec::new(), 0);
    for (turn, (place, value)) in input.stores.iter().enumerate().take(64) {
        // A quarter of the stores change the indices, half of these to plausible values.
        let place = usize::from(*place);
        let (at, value) = match place % 8 {
            0 => (place / 8 % 4 * 4, *value % (ENTRIES as u32 + 1)),
            1 => (place / 8 % 4 * 4, *value),
            _ => (place % (len / 4) * 4, *value),
        };
        mem.word(at).unwrap().store(value, Ordering::SeqCst);
        let taken = server.take(start + Duration::from_millis(turn as u64), 4, &mut out);
        in_flight += taken.count;
        assert!(in_flight <= ENTRIES as usize, "more is in flight than there is room for");
        assert_eq!(out.len(), taken.count);
        for entry in out.drain(..) {
            if turn % 3 > 0 {
                server.complete(&[Done { index: entry.index, userdata: entry.userdata, result: 1 }]);
                in_flight -= 1;
            }
        }
    }
}
