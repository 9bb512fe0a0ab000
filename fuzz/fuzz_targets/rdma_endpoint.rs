//! The peer's description of its end of an RDMA connection, and the memory that it names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_rdma::{Endpoint, RemoteMemory};

fuzz_target!(|input: (Vec<u8>, [u64; 4])| {
    let (bytes, [addr, len, offset, part]) = input;
    if let Ok(one) = Endpoint::from_bytes(&bytes) {
        assert_eq!(Endpoint::from_bytes(&one.to_bytes()).unwrap(), one);
        assert!(one.pair >> 24 == 0 && one.psn >> 24 == 0 && (1..=1 << 20).contains(&one.message));
    }
    let whole = RemoteMemory { addr, len, rkey: 1 };
    if let Ok(inner) = whole.part(offset, part) {
        assert!(inner.len <= len && inner.addr - addr <= len - inner.len);
    }
});
