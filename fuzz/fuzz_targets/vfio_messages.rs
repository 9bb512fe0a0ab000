//! The messages of a vfio-user client, byte by byte: a decoded request agrees with its bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_vfio_user::wire::{ClientRequest, HEADER, MAX_DATA, MAX_MESSAGE, MessageHeader, command};

fuzz_target!(|data: &[u8]| {
    let Some((raw, payload)) = data.split_first_chunk::<HEADER>() else { return };
    let header = MessageHeader::decode(raw);
    assert_eq!(&header.encode(), raw);
    if let Ok(payload) = header.payload() {
        assert!(payload + HEADER <= MAX_MESSAGE);
    }
    // Most numbers are not commands.
    for number in [header.command, header.command % 16] {
        let Ok(request) = ClientRequest::decode(number, payload) else { continue };
        match request {
            ClientRequest::DmaMap(ask) => {
                assert!(ask.bytes > 0 && ask.at.checked_add(ask.bytes - 1).is_some())
            }
            ClientRequest::Read(access) => assert!((1..=MAX_DATA).contains(&(access.bytes as usize))),
            ClientRequest::Write(access, data) => assert_eq!(access.bytes as usize, data.len()),
            ClientRequest::Reset => assert_eq!(number, command::RESET),
            _ => {}
        }
    }
});
