//! Tickets for another process's GPU memory: refused, or memory within its allocation.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_gpu::cuda::Ticket;

fuzz_target!(|input: ([u8; Ticket::BYTES], bool, Vec<u8>)| {
    let (mut bytes, genuine, tail) = input;
    assert!(tail.len() == Ticket::BYTES || Ticket::from_bytes(&tail).is_err());
    if genuine {
        bytes[..8].copy_from_slice(b"onehopG1");
        bytes[24] &= 1;
        bytes[25..32].fill(0);
    }
    if let Ok(ticket) = Ticket::from_bytes(&bytes) {
        assert!(ticket.bytes > 0 && ticket.bytes <= ticket.allocation - ticket.offset);
        assert_eq!(ticket.to_bytes(), bytes);
    }
});
