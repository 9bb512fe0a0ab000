//! Untrusted extent maps: an accepted map covers its file without gaps, lies on its drive, and survives a round trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_files::{ExtentMap, Place};

/// Wraps the fuzzer's extents, so that it need not find the fields.
const HEAD: &str = r#"{"file":{"path":"f","fs":"ext4","fs_uuid":"u","ino":1,"generation":0,"len":5000,"mtime":[0,0],"ctime":[0,0]},"drive":{"serial":"s","nsid":1,"wwid":"","lba_bytes":512,"bytes":1000000},"pieces":["#;

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    let Some((how, rest)) = bytes.split_first() else { return };
    let body = match how % 2 {
        0 => rest.to_vec(),
        _ => [HEAD.as_bytes(), rest, b"]}"].concat(),
    };
    let head = format!("onehop-extents 1 {:08x}\n", crc32c::crc32c(&body));
    read(&[head.as_bytes(), &body].concat());
});

fn read(bytes: &[u8]) {
    let map = match ExtentMap::parse(bytes) {
        Ok(map) => map,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert_eq!(ExtentMap::parse(&map.to_bytes()).expect("what is stored can be read"), map);
    let two = ExtentMap::parse_all(&[map.to_bytes(), map.to_bytes()].concat()).expect("and two of them");
    assert_eq!(two, [map.clone(), map.clone()]);
    let mut at = 0;
    for extent in map.extents().expect("a checked map has extents") {
        assert!(extent.offset == at && extent.len > 0);
        at += extent.len;
        if let Place::Drive(start) = extent.place {
            assert!(start + extent.len <= map.drive.bytes);
        }
    }
    assert_eq!(at, map.file.id.len);
}
