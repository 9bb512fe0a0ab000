//! safetensors headers: what the reference accepts, and every violated rule.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use onehop_load::formats::safetensors::{Error, Header, header_bytes, parse, read};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorView, serialize};

use crate::common::{Memory, safetensors};

/// The header of a whole file.
fn header(file: &[u8]) -> Result<Header, Error> {
    let prefix = file.first_chunk().copied().ok_or(Error::NoLength(file.len() as u64))?;
    let end = header_bytes(prefix, file.len() as u64)? as usize;
    parse(&file[8..end], file.len() as u64)
}

fn refused(json: &str, data: usize) -> Error {
    header(&safetensors(json, data)).unwrap_err()
}

const DTYPES: [Dtype; 22] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// Compares with the reference's view of the same file, tensor by tensor.
fn agrees(file: &[u8]) {
    let ours = header(file).unwrap();
    let (bytes, theirs) = SafeTensors::read_metadata(file).unwrap();
    assert_eq!(ours.data, bytes as u64 + 8);
    assert_eq!(ours.tensors.len(), theirs.tensors().len());
    for tensor in &ours.tensors {
        let info = theirs.info(&tensor.name).unwrap();
        assert_eq!(info.dtype.to_string(), tensor.dtype.name());
        assert_eq!(info.shape.iter().map(|d| *d as u64).collect::<Vec<_>>(), tensor.shape);
        assert_eq!(info.data_offsets.0 as u64 + ours.data, tensor.offset);
        assert_eq!(info.data_offsets.1 as u64 + ours.data, tensor.offset + tensor.bytes);
    }
    let metadata: BTreeMap<_, _> = ours.metadata.into_iter().collect();
    let wanted: BTreeMap<_, _> = theirs.metadata().clone().unwrap_or_default().into_iter().collect();
    assert_eq!(metadata, wanted);
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(DTYPES.to_vec())
}

proptest! {
    #[test]
    fn files_of_the_reference_are_read_alike(
        tensors in prop::collection::btree_map("[a-zé\"\\\\ ]{0,9}", (dtype(), prop::collection::vec(0usize..5, 0..4)), 0..9),
        metadata in prop::option::of(prop::collection::hash_map(".{0,5}", ".{0,9}", 0..4)),
    ) {
        let views: Vec<_> = tensors
            .iter()
            .filter_map(|(name, (dtype, shape))| {
                let bits = shape.iter().product::<usize>() * dtype.bitsize();
                let data: &[u8] = vec![1; bits / 8].leak();
                TensorView::new(*dtype, shape.clone(), data).ok().map(|view| (name.clone(), view))
            })
            .collect();
        // For no tensor and empty metadata, the reference writes something that its own reader refuses as JSON.
        prop_assume!(!views.is_empty() || metadata.as_ref().is_none_or(|m| !m.is_empty()));
        agrees(&serialize(views, metadata).unwrap());
    }

    /// Nearly valid headers: either both accept and agree, or both refuse.
    #[test]
    fn verdicts_agree(
        tensors in prop::collection::vec((dtype(), prop::collection::vec(0u64..4, 0..3), 0u64..3, -1i64..9), 1..4),
        data in 0usize..40,
    ) {
        let mut at = 0i64;
        let entries: Vec<_> = tensors
            .iter()
            .enumerate()
            .map(|(i, (dtype, shape, moved, size))| {
                let right = shape.iter().product::<u64>() as i64 * dtype.bitsize() as i64 / 8;
                let from = at + i64::from(*moved == 2);
                at = from + if *size < 6 { right } else { *size };
                format!(r#""{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{at}]}}"#)
            })
            .collect();
        for data in [data, at.max(0) as usize] {
            let file = safetensors(&format!("{{{}}}", entries.join(",")), data);
            match (header(&file), SafeTensors::read_metadata(&file)) {
                (Ok(_), Ok(_)) => agrees(&file),
                (Err(_), Err(_)) => {}
                (ours, theirs) => panic!("we say {ours:?}, the reference {theirs:?}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// A byte changed, or truncated: what we accept, the reference accepts and reads alike.
    #[test]
    fn damaged_files(at in 0usize..250, byte: u8, cut in prop::option::weighted(0.2, 0usize..250)) {
        let json = r#"{"__metadata__":{"a":"b"},"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"y":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        let mut file = safetensors(json, 16);
        if let Some(b) = file.get_mut(at) {
            *b = byte;
        }
        file.truncate(cut.unwrap_or(file.len()));
        if header(&file).is_ok() {
            agrees(&file);
        }
    }
}

/// Both accept what is unusual but unambiguous.
#[test]
fn unusual_but_unambiguous() {
    for (json, data) in [
        ("{}", 0),
        ("  {} \n\t ", 0),
        (r#"{"__metadata__":null}"#, 0),
        (r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1),
        (r#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"strides":[[{}]]}}"#, 1),
        (
            r#"{"b":{"data_offsets":[0,0],"dtype":"F4","shape":[0]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
            2,
        ),
        (r#"{"../../etc/passwd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1),
    ] {
        agrees(&safetensors(json, data));
    }
}

/// Where we are stricter than the reference, which accepts all of these.
#[test]
fn stricter_than_the_reference() {
    let u8s = |from: u64, to: u64| {
        format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
    };
    let ones = vec!["1"; 65].join(",");
    let cases = [
        (format!(r#"{{"a":{},"a":{}}}"#, u8s(0, 1), u8s(0, 1)), 1),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#.into(), 0),
        (r#"{"a":["U8",[1],[0,1]]}"#.into(), 1),
        (format!(r#"{{"a\u0000b":{}}}"#, u8s(0, 1)), 1),
        (format!(r#"{{"a":{{"dtype":"U8","shape":[{ones}],"data_offsets":[0,1]}}}}"#), 1),
    ];
    let errors = cases.map(|(json, data)| {
        let file = safetensors(&json, data);
        assert!(SafeTensors::read_metadata(&file).is_ok(), "{json}");
        header(&file).unwrap_err()
    });
    assert!(matches!(
        errors,
        [Error::Twice(_), Error::KeyTwice { .. }, Error::Json(_), Error::NulInName(_), Error::Rank(_)]
    ));
}

#[test]
fn every_broken_rule_has_its_own_error() {
    let one = |dtype: &str, shape: &str, offsets: &str, data| {
        refused(&format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), data)
    };
    let two = |first: &str, second: &str, data| {
        let of = |range: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{range}}}"#);
        refused(&format!(r#"{{"b":{},"a":{}}}"#, of(second), of(first)), data)
    };
    use Error as E;
    assert!(matches!(one("U8", "[9]", "[0,9]", 8), E::OutOfRange { to: 9, length: 8, .. }));
    assert!(matches!(one("U8", "[9]", "[9223372036854775808,9223372036854775817]", 8), E::OutOfRange { .. }));
    assert!(matches!(one("U8", "[8]", "[8,0]", 8), E::Backwards { from: 8, to: 0, .. }));
    assert!(matches!(one("U8", "[7]", "[1,8]", 8), E::Hole { from: 0, to: 1, .. }));
    assert!(matches!(one("U8", "[7]", "[0,7]", 8), E::Trailing { end: 7, length: 8 }));
    assert!(matches!(one("F32", "[3]", "[0,8]", 8), E::Size { needs: 12, has: 8, .. }));
    assert!(matches!(one("F32", "[9223372036854775808,2]", "[0,8]", 8), E::Overflow { .. }));
    assert!(matches!(one("F64", "[4611686018427387904]", "[0,8]", 8), E::Overflow { .. }));
    assert!(matches!(one("F4", "[3]", "[0,1]", 1), E::PartOfByte { .. }));
    assert!(matches!(one("F6_E2M3", "[2]", "[0,1]", 1), E::PartOfByte { .. }));
    assert!(matches!(one("Q4_0", "[32]", "[0,18]", 18), E::UnknownDtype { dtype, .. } if dtype == "Q4_0"));
    assert!(matches!(one("f32", "[2]", "[0,8]", 8), E::UnknownDtype { .. }));
    for number in ["-1", "1.5", "8.0", "1e1", "18446744073709551616", "-0"] {
        let shape = one("U8", &format!("[{number}]"), "[0,8]", 8);
        assert!(matches!(shape, E::NotWhole { key: "shape", .. }), "{number}: {shape}");
        let offsets = one("U8", "[8]", &format!("[0,{number}]"), 8);
        assert!(matches!(offsets, E::NotWhole { key: "data_offsets", .. }), "{number}: {offsets}");
    }
    for json in ["NaN", "Infinity", "null", "\"8\"", "true", "[8]", "{}"] {
        assert!(matches!(one("U8", &format!("[{json}]"), "[0,8]", 8), E::Json(_)), "{json}");
    }
    assert!(matches!(one("U8", "[8]", "[0,8,9]", 8), E::Offsets { count: 3, .. }));
    assert!(matches!(one("U8", "[8]", "[]", 8), E::Offsets { count: 0, .. }));
    assert!(matches!(two("[0,4]", "[2,6]", 6), E::Overlap { from: 2, end: 4, .. }));
    assert!(matches!(two("[0,4]", "[0,4]", 4), E::Overlap { .. }));
    assert!(matches!(two("[0,4]", "[5,9]", 9), E::Hole { from: 4, to: 5, .. }));
    for (json, key) in [
        (r#"{"a":{}}"#, "dtype"),
        (r#"{"a":{"dtype":"U8"}}"#, "shape"),
        (r#"{"a":{"dtype":"U8","shape":[]}}"#, "data_offsets"),
    ] {
        assert!(matches!(refused(json, 0), E::Missing { key: k, .. } if k == key));
    }
    for twice in [
        r#"{"a":{"dtype":"U8","dtype":"U8"}}"#,
        r#"{"a":{"shape":[],"shape":[]}}"#,
        r#"{"a":{"data_offsets":[0,1],"data_offsets":[0,1]}}"#,
        r#"{"__metadata__":{},"__metadata__":{}}"#,
    ] {
        assert!(matches!(refused(twice, 0), E::KeyTwice { .. }), "{twice}");
    }
    for json in [
        "[]",
        "33",
        "{ ",
        "{}{}",
        "{\"a\":3}",
        "{\"__metadata__\":{\"a\":1}}",
        "{\"a\":{\"dtype\":3}}",
        "\u{feff}{}",
    ] {
        assert!(matches!(refused(json, 0), E::Json(_)), "{json}");
    }
    // Also in ignored values: found by fuzzing.
    let deep = "[".repeat(200) + &"]".repeat(200);
    for other in [
        &b"\"F6\xafE2\""[..],
        b"[1,3110E885515]",
        br#""\ud800""#,
        br#"{"\udc00":1}"#,
        b"[1,]",
        deep.as_bytes(),
    ] {
        let rest = br#","dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
        let json = [&br#"{"a":{"other":"#[..], other, rest].concat();
        assert!(matches!(parse(&json, 8 + json.len() as u64), Err(E::Json(_))));
        let file = [&(json.len() as u64).to_le_bytes(), &json[..]].concat();
        assert!(SafeTensors::read_metadata(&file).is_err());
    }
    assert!(matches!(parse(b"{\"\xff\":1}", 99), Err(E::Json(_))));
}

#[test]
fn lengths_of_headers() {
    use Error as E;
    for bytes in 0..8 {
        assert!(
            matches!(read(&Memory("m".into(), vec![0; bytes])).unwrap_err().to_string(), e if e.contains("too few"))
        );
    }
    assert!(matches!(header_bytes(0u64.to_le_bytes(), 100), Err(E::HeaderTooShort(0))));
    assert!(matches!(header_bytes(1u64.to_le_bytes(), 100), Err(E::HeaderTooShort(1))));
    assert!(matches!(header_bytes(93u64.to_le_bytes(), 100), Err(E::Truncated { said: 93, left: 92 })));
    assert_eq!(header_bytes(92u64.to_le_bytes(), 100).unwrap(), 100);
    assert_eq!(header_bytes(100_000_000u64.to_le_bytes(), u64::MAX).unwrap(), 100_000_008);
    for said in [100_000_001, 1 << 63, u64::MAX] {
        assert!(matches!(header_bytes(said.to_le_bytes(), u64::MAX), Err(E::HeaderTooLong(n)) if n == said));
    }
}

/// Every prefix of a valid file is refused, and so is every file with trailing bytes.
#[test]
fn truncated_anywhere() {
    let view = |n: usize| TensorView::new(Dtype::U8, vec![n], vec![7; n].leak()).unwrap();
    let file = serialize([("one", view(13)), ("two", view(5))], None).unwrap();
    agrees(&file);
    for end in 0..file.len() {
        let read = read(&Memory("short".into(), file[..end].to_vec()));
        assert!(matches!(read, Err(onehop_load::Error::Safetensors { .. })), "{end}");
    }
    let longer = [&file[..], b"x"].concat();
    assert!(matches!(header(&longer), Err(Error::Trailing { .. })));
}

/// Nesting costs heap, not stack, or is refused, wherever it occurs.
#[test]
fn deep_nesting() {
    let deep = "[".repeat(1_000_000);
    for json in [
        deep.clone(),
        format!("{{\"a\":{deep}"),
        format!("{{\"a\":{{\"strides\":{deep}"),
        format!("{{\"a\":{{\"shape\":{deep}"),
        format!("{{\"__metadata__\":{{\"a\":{deep}"),
        "{\"a\":".repeat(1_000_000),
    ] {
        assert!(matches!(parse(json.as_bytes(), u64::MAX), Err(Error::Json(_))));
    }
}

/// Of long lists, only as many elements are kept as a tensor can have.
#[test]
fn endless_lists() {
    let ones = "1,".repeat(2_000_000) + "1";
    let shape = format!(r#"{{"a":{{"dtype":"U8","shape":[{ones}],"data_offsets":[0,1]}}}}"#);
    assert!(matches!(parse(shape.as_bytes(), u64::MAX), Err(Error::Rank(_))));
    let offsets = format!(r#"{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[{ones}]}}}}"#);
    assert!(matches!(parse(offsets.as_bytes(), u64::MAX), Err(Error::Offsets { count: 2_000_001, .. })));
}

#[test]
fn a_million_tensors() {
    let entries: Vec<_> = (0..1_000_000)
        .map(|i| {
            format!(r#""layers.{i}":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4)
        })
        .collect();
    let json = format!("{{{}}}", entries.join(","));
    let start = Instant::now();
    let header = parse(json.as_bytes(), json.len() as u64 + 8 + 4_000_000).unwrap();
    assert_eq!(header.tensors.len(), 1_000_000);
    // A second in an optimised build on an idle machine; anything quadratic would take hours.
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let twice = json.replacen("layers.999999", "layers.0", 1);
    let twice = parse(twice.as_bytes(), twice.len() as u64 + 8 + 4_000_000);
    assert!(matches!(twice, Err(Error::Twice(name)) if name == "layers.0"));
}

/// The reference's own serialized header, without the file around it.
#[test]
fn the_reference_reads_the_same_json() {
    let json = r#"{"a":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[0,3]}}"#;
    let theirs: Metadata = serde_json::from_str(json).unwrap();
    let ours = parse(json.as_bytes(), json.len() as u64 + 11).unwrap();
    assert_eq!(theirs.data_len() as u64, ours.tensors.iter().map(|t| t.bytes).sum::<u64>());
}
