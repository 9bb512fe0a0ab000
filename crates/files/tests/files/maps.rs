//! Extent maps: made, stored, read again, refused, verified.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use onehop_files::{
    Blocks, CHUNK_BYTES, DriveId, Error, Extent, ExtentMap, FileId, MappedFile, Place, Volume, Which,
};
use proptest::prelude::*;

use crate::template::Sparse;

fn drive(bytes: u64) -> DriveId {
    DriveId { serial: "S-1".into(), nsid: 1, wwid: "eui.00".into(), lba_bytes: 512, bytes }
}

fn file(len: u64) -> MappedFile {
    let id = FileId { ino: 12, generation: 7, len, mtime: (-5, 999_999_999), ctime: (1 << 33, 0) };
    MappedFile {
        path: "/models/ä \"b\".safetensors".into(), fs: "ext4".into(), fs_uuid: "c0ffee".into(), id
    }
}

fn volume() -> (Arc<Sparse>, Volume) {
    let image = Arc::new(Sparse::unpack(include_bytes!("../templates/ext4")));
    let volume = Volume::open(image.clone(), Which::Auto).unwrap();
    (image, volume)
}

#[test]
fn a_map_of_a_file_on_a_volume_is_stored_read_and_verified() {
    let (image, volume) = volume();
    for path in ["dir/pieces", "dir/inline", "plain", "map", "dir/deep/entry-number-1"] {
        let file = volume.lookup(path).unwrap();
        let map = ExtentMap::of_volume(&volume, &file, path, drive(image.size())).unwrap();
        let again = ExtentMap::parse(&map.to_bytes()).unwrap();
        assert_eq!(again, map);
        assert_eq!(again.extents().unwrap(), volume.extents(&file).unwrap(), "{path}");
        again.verify(&*image).unwrap();
        again.check_drive(&drive(image.size())).unwrap();
        again.check_file(&volume.uuid(), &file.id).unwrap();
    }
}

#[test]
fn one_file_holds_several_maps() {
    let (image, volume) = volume();
    let map = |path| {
        let file = volume.lookup(path).unwrap();
        ExtentMap::of_volume(&volume, &file, path, drive(image.size())).unwrap()
    };
    let maps = [map("dir/pieces"), map("dir/inline"), map("plain")];
    let bytes: Vec<u8> = maps.iter().flat_map(ExtentMap::to_bytes).collect();
    assert_eq!(ExtentMap::parse_all(&bytes).unwrap(), maps);
    assert_eq!(ExtentMap::parse_all(&maps[0].to_bytes()).unwrap(), maps[..1]);
    assert!(ExtentMap::parse(&bytes).is_err());
    assert!(ExtentMap::parse_all(b"").is_err());
    for cut in [1, bytes.len() / 2, bytes.len() - 1] {
        assert!(ExtentMap::parse_all(&bytes[..cut]).is_err(), "{cut}");
    }
}

/// Paths are arbitrary bytes, and a stored map keeps all of them.
#[test]
fn non_utf8_paths_are_kept() {
    let empty = |path: &[u8]| {
        let about = MappedFile { path: OsStr::from_bytes(path).into(), ..file(0) };
        ExtentMap::make(about, drive(512), &[], |_, _| Ok(())).unwrap()
    };
    for path in [&b"/m\xffdels/w"[..], b"\xc3\x28", b"/models/\xc3\xa4 \"b\"", b""] {
        let map = empty(path);
        let stored = map.to_bytes();
        assert_eq!(ExtentMap::parse(&stored).unwrap(), map);
        let plain = std::str::from_utf8(path).is_ok();
        let text = String::from_utf8(stored).unwrap();
        assert_eq!(text.contains("\"path\":\""), plain, "{text}");
        // A damaged name must not turn into another name.
        let spoiled = text.replace("\"hex\":\"", "\"hex\":\"x");
        assert!(
            plain
                || ExtentMap::parse(&with_checksum(&spoiled))
                    .unwrap_err()
                    .to_string()
                    .contains("hexadecimal")
        );
    }
}

/// Recomputes the checksum of a map whose body was changed.
fn with_checksum(text: &str) -> Vec<u8> {
    let (_, body) = text.split_once('\n').unwrap();
    format!("onehop-extents 1 {:08x}\n{body}", crc32c::crc32c(body.as_bytes())).into_bytes()
}

#[test]
fn a_changed_block_a_changed_file_and_another_drive_are_reported() {
    let (image, volume) = volume();
    let found = volume.lookup("dir/pieces").unwrap();
    let map = ExtentMap::of_volume(&volume, &found, "dir/pieces", drive(image.size())).unwrap();
    let Place::Drive(at) = volume.extents(&found).unwrap()[2].place else { panic!() };
    let mut changed = Sparse::clone(&image);
    changed.set(at + 5, b'!');
    let error = map.verify(&changed).unwrap_err().to_string();
    assert!(error.contains("dir/pieces has changed: its bytes 2048..3072"), "{error}");
    let error =
        map.check_drive(&DriveId { serial: "S-2".into(), ..drive(image.size()) }).unwrap_err().to_string();
    assert!(error.contains("S-2") && error.contains("S-1"), "{error}");
    let id = FileId { generation: found.id.generation + 1, ..found.id };
    assert!(matches!(map.check_file(&volume.uuid(), &id), Err(Error::Changed { .. })));
    assert!(matches!(map.check_file("other", &found.id), Err(Error::Changed { .. })));
}

#[test]
fn long_extents_have_a_checksum_for_each_chunk_and_are_merged_again() {
    let len = 2 * CHUNK_BYTES + 5;
    let extents = [
        Extent { offset: 0, len, place: Place::Drive(4096) },
        Extent { offset: len, len: 1 << 40, place: Place::Zeros },
    ];
    let mut read = 0;
    let map = ExtentMap::make(file(len + (1 << 40)), drive(1 << 41), &extents, |offset, out| {
        assert_eq!(offset, read);
        read += out.len() as u64;
        Ok(())
    });
    let map = map.unwrap();
    assert_eq!((read, map.chunks().len()), (len, 4));
    assert_eq!(ExtentMap::parse(&map.to_bytes()).unwrap().extents().unwrap(), extents);
}

#[test]
fn maps_that_lie_are_refused() {
    let parse = |body: &str| {
        let body = format!("{body}\n");
        let text = format!("onehop-extents 1 {:08x}\n{body}", crc32c::crc32c(body.as_bytes()));
        ExtentMap::parse(text.as_bytes()).map(|_| ()).map_err(|e| e.to_string())
    };
    let body = |len: u64, drive: &str, chunks: &str| {
        format!(
            r#"{{"file":{{"path":"f","fs":"ext4","fs_uuid":"u","ino":1,"generation":0,"len":{len},"mtime":[0,0],"ctime":[0,0]}},"drive":{drive},"pieces":[{chunks}]}}"#
        )
    };
    let good = r#"{"serial":"s","nsid":1,"wwid":"","lba_bytes":512,"bytes":100000}"#;
    assert_eq!(parse(&body(3000, good, "[1000,2000,7],2000")), Ok(()));
    assert_eq!(parse(&body(3, good, r#""616263""#)), Ok(()));
    assert_eq!(parse(&body(9000, good, r#""616263",8997"#)), Ok(()));
    for (len, drive, chunks, said) in [
        (3000, good, "[1000,2000,7]", "1000 bytes of 3000"),
        (3000, good, "[1000,2000,7],2001", "2001 bytes follows byte 1000"),
        (1000, good, "[1000,99001,7]", "not on its drive"),
        (1000, good, "[1000,18446744073709551615,7]", "not on its drive"),
        (1000, good, "[1000,0,4294967296]", "did not match"),
        (1000, good, "[1000,0]", "did not match"),
        (1000, good, "[-5,0,7]", "did not match"),
        (5, good, "0,5", "0 bytes follows"),
        (3, good, r#""61626""#, "hexadecimal"),
        (3, good, r#""61626x""#, "hexadecimal"),
        (4, good, r#"1,"616263""#, "not on its drive"),
        (4, good, r#""61","626364""#, "not on its drive"),
        (4, good, r#""616263",[1,512,7]"#, "not on its drive"),
        (0, r#"{"serial":"s","nsid":1,"wwid":"","lba_bytes":513,"bytes":1}"#, "", "blocks of 513"),
        (0, r#"{"serial":"s","nsid":1,"lba_bytes":512,"bytes":1}"#, "", "missing field `wwid`"),
        (
            0,
            r#"{"serial":"s","nsid":1,"wwid":"","lba_bytes":512,"bytes":1,"more":1}"#,
            "",
            "unknown field `more`",
        ),
        (1000, good, "18446744073709551615", "line 2, pieces[0]: a chunk of 18446744073709551615 bytes"),
        (u64::MAX, good, "18446744073709551615", "line 2, file.len: 18446744073709551615 bytes"),
        (1 << 63, good, "9223372036854775808", "line 2, file.len"),
    ] {
        let error = parse(&body(len, drive, chunks)).unwrap_err();
        assert!(error.contains(said), "{error}, wanted {said}");
    }
    let whole = ExtentMap::make(file(0), drive(1), &[], |_, _| Ok(())).unwrap().to_bytes();
    for i in 0..whole.len() {
        let mut spoiled = whole.clone();
        spoiled[i] ^= 1;
        assert!(ExtentMap::parse(&spoiled).is_err(), "byte {i}");
        assert!(ExtentMap::parse(&whole[..i]).is_err(), "cut at {i}");
    }
    let long = format!("{}\n", body(u64::MAX, good, "18446744073709551615"));
    let head = format!("onehop-extents 1 {:08x}\n", crc32c::crc32c(long.as_bytes()));
    let maps = [&whole[..], head.as_bytes(), long.as_bytes()].concat();
    assert!(ExtentMap::parse_all(&maps).unwrap_err().to_string().contains("line 4, file.len"));
    let other = String::from_utf8(whole).unwrap().replace("onehop-extents 1 ", "onehop-extents 2 ");
    assert!(ExtentMap::parse(other.as_bytes()).unwrap_err().to_string().contains("version 2 of extent maps"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stored_maps_are_read_back(lens in prop::collection::vec((1..5000_u64, any::<bool>()), 0..40)) {
        let mut extents: Vec<Extent> = Vec::new();
        for (i, (len, hole)) in lens.into_iter().enumerate() {
            let offset = extents.last().map_or(0, |e| e.offset + e.len);
            let place = if hole { Place::Zeros } else { Place::Drive(i as u64 * 8192) };
            extents.push(Extent { offset, len, place });
        }
        let len = extents.last().map_or(0, |e| e.offset + e.len);
        let map = ExtentMap::make(file(len), drive(1 << 30), &extents, |offset, out| {
            out.iter_mut().zip(offset..).for_each(|(b, at)| *b = at as u8);
            Ok(())
        }).unwrap();
        prop_assert_eq!(ExtentMap::parse(&map.to_bytes()).unwrap(), map);
    }
}
