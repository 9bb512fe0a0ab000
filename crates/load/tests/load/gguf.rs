//! GGUF headers: every type of value and element, and every violated rule.

use std::time::{Duration, Instant};

use onehop_load::Dtype;
use onehop_load::formats::gguf::{Array, Error, Header, MAX_DEPTH, Value, ggml_type, parse, read};
use proptest::prelude::*;

use crate::common::Memory;

/// A GGUF file under construction: the parts of a header byte by byte, so that they can be wrong.
#[derive(Clone, Default)]
pub struct Gguf {
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    version: Option<u32>,
}

pub fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    [&(text.as_ref().len() as u64).to_le_bytes(), text.as_ref()].concat()
}

pub fn u32s(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

pub fn u64s(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

impl Gguf {
    /// Adds a key with the bytes of its value.
    pub fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([text(key), u32s(&[kind]), value.to_vec()].concat());
        self
    }

    /// Adds a tensor; the fastest dimension comes first, as in the file.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let rank = u32s(&[dims.len() as u32]);
        self.tensors.push([text(name), rank, u64s(dims), u32s(&[kind]), u64s(&[offset])].concat());
        self
    }

    fn version(self, version: u32) -> Self {
        Self { version: Some(version), ..self }
    }

    fn header(&self) -> Vec<u8> {
        let mut bytes = [b"GGUF".to_vec(), u32s(&[self.version.unwrap_or(3)])].concat();
        bytes.extend(u64s(&[self.tensors.len() as u64, self.keys.len() as u64]));
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes
    }

    /// The file, padded to `align`, with `data` bytes behind the header.
    pub fn file(&self, align: usize, data: usize) -> Vec<u8> {
        let mut bytes = self.header();
        bytes.resize(bytes.len().next_multiple_of(align), 0);
        bytes.extend((0..data).map(|i| i as u8));
        bytes
    }
}

fn header(file: &[u8]) -> Result<Header, Error> {
    parse(file, file.len() as u64)
}

fn refused(gguf: &Gguf, data: usize) -> Error {
    header(&gguf.file(32, data)).unwrap_err()
}

#[test]
fn a_small_file() {
    let gguf = Gguf::default()
        .key("general.architecture", 8, &text("llama"))
        .key("general.alignment", 4, &u32s(&[64]))
        .tensor("second", &[64, 3], 2, 128)
        .tensor("first", &[5], 0, 0)
        .tensor("scalar", &[], 24, 64);
    for version in [2, 3] {
        let file = gguf.clone().version(version).file(64, 128 + 108);
        let header = header(&file).unwrap();
        assert_eq!((header.version, header.alignment), (version, 64));
        assert_eq!(header.data, file.len() as u64 - 236);
        assert_eq!(header.value("general.architecture"), Some(&Value::Text("llama".into())));
        let tensors: Vec<_> = header
            .tensors
            .iter()
            .map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice(), t.offset - header.data, t.bytes))
            .collect();
        assert_eq!(
            tensors,
            [
                ("first", Dtype::F32, &[5][..], 0, 20),
                ("scalar", Dtype::I8, &[][..], 64, 1),
                ("second", Dtype::Q4_0, &[3, 64][..], 128, 108),
            ]
        );
    }
}

/// Vocabularies contain parts of characters, and some writers use other booleans.
#[test]
fn values_are_kept_as_they_are() {
    let tokens = [text("ok"), text(b"\xff\xfe\0"), text(b"\xe2\x82")].concat();
    let file = Gguf::default()
        .key("tokens", 9, &[u32s(&[8]), u64s(&[3]), tokens].concat())
        .key("one", 8, &text(b"\xff"))
        .key("truth", 7, &[2])
        .key("truths", 9, &[u32s(&[7]), u64s(&[3]), vec![0, 1, 255]].concat())
        .file(32, 0);
    let header = header(&file).unwrap();
    let Some(Value::Array(Array::Text(tokens))) = header.value("tokens") else { panic!("{header:?}") };
    let bytes: Vec<_> = tokens.iter().map(onehop_load::formats::gguf::Text::bytes).collect();
    assert_eq!(bytes, [&b"ok"[..], b"\xff\xfe\0", b"\xe2\x82"]);
    assert_eq!((tokens[0].text(), tokens[1].text()), (Some("ok"), None));
    assert_eq!(header.value("one"), Some(&Value::Text(b"\xff"[..].into())));
    assert_eq!(header.value("truth"), Some(&Value::Bool(true)));
    assert_eq!(header.value("truths"), Some(&Value::Array(Array::Bool(vec![false, true, true]))));
}

#[test]
fn a_file_without_tensors_needs_no_padding() {
    assert!(header(&Gguf::default().header()).unwrap().tensors.is_empty());
    assert!(header(&Gguf::default().tensor("none", &[0], 0, 0).header()).is_ok());
}

#[test]
fn values_of_every_type() {
    let kinds: [(u32, Vec<u8>, Value); 12] = [
        (0, vec![200], Value::U8(200)),
        (1, vec![200], Value::I8(-56)),
        (2, vec![1, 2], Value::U16(513)),
        (3, vec![0, 0x80], Value::I16(i16::MIN)),
        (4, u32s(&[7]), Value::U32(7)),
        (5, vec![0xff; 4], Value::I32(-1)),
        (6, 1.5f32.to_le_bytes().to_vec(), Value::F32(1.5)),
        (7, vec![1], Value::Bool(true)),
        (8, text("ü"), Value::Text("ü".into())),
        (10, vec![0xff; 8], Value::U64(u64::MAX)),
        (11, vec![0xff; 8], Value::I64(-1)),
        (12, (-0.25f64).to_le_bytes().to_vec(), Value::F64(-0.25)),
    ];
    for (kind, bytes, value) in kinds {
        let scalar = Gguf::default().key("k", kind, &bytes);
        assert_eq!(header(&scalar.header()).unwrap().value("k"), Some(&value));
        let array = [u32s(&[kind]), u64s(&[2]), bytes.clone(), bytes.clone()].concat();
        let nested = [u32s(&[9]), u64s(&[1]), array.clone()].concat();
        let gguf = Gguf::default().key("a", 9, &array).key("n", 9, &nested);
        let header = header(&gguf.header()).unwrap();
        let (Some(Value::Array(a)), Some(Value::Array(Array::Array(n)))) =
            (header.value("a"), header.value("n"))
        else {
            panic!("{header:?}")
        };
        assert_eq!((a.len(), n.as_slice()), (2, &[a.clone()][..]));
        // A last value that is one byte short is truncation, as opposed to bytes that have not been read.
        let short = &scalar.header()[..scalar.header().len() - 1];
        assert!(matches!(header_of(short, short.len() as u64), Error::Truncated { .. }));
        assert!(matches!(header_of(short, 1 << 40), Error::More { .. }));
    }
}

fn header_of(bytes: &[u8], length: u64) -> Error {
    parse(bytes, length).unwrap_err()
}

#[test]
fn versions() {
    let version = |n| refused(&Gguf::default().version(n), 0);
    assert_eq!(version(1), Error::Version1);
    assert_eq!(version(4), Error::Version(4));
    assert_eq!(version(0), Error::Version(0));
    assert_eq!(version(3u32.swap_bytes()), Error::BigEndian(0x0300_0000));
    assert_eq!(header_of(b"GGUX\x03\0\0\0", 8), Error::Magic);
    assert!(matches!(header_of(b"GGU", 3), Error::Truncated { .. }));
    assert!(matches!(header_of(b"GGUF", 4), Error::Truncated { .. }));
}

#[test]
fn every_broken_rule_has_its_own_error() {
    use Error as E;
    let tensor = |dims: &[u64], kind, offset| refused(&Gguf::default().tensor("t", dims, kind, offset), 64);
    assert!(matches!(tensor(&[17], 0, 0), E::OutOfRange { bytes: 68, length: 64, .. }));
    assert!(matches!(tensor(&[1], 0, 64), E::OutOfRange { .. }));
    assert!(matches!(tensor(&[1], 0, u64::MAX - 31), E::OutOfRange { .. }));
    assert!(matches!(tensor(&[1], 0, 8), E::Unaligned { offset: 8, alignment: 32, .. }));
    assert!(matches!(tensor(&[1; 5], 0, 0), E::Rank { rank: 5, .. }));
    assert!(matches!(tensor(&[33], 2, 0), E::Block { columns: 33, block: 32, .. }));
    assert!(matches!(tensor(&[], 2, 0), E::Block { columns: 1, .. }));
    assert!(matches!(tensor(&[1 << 63, 2], 24, 0), E::Overflow { .. }));
    assert!(matches!(tensor(&[1 << 62], 28, 0), E::Overflow { .. }));
    assert!(matches!(tensor(&[1], 31, 0), E::RemovedType { name: "Q4_0_4_4", .. }));
    assert!(matches!(tensor(&[1], 4, 0), E::RemovedType { name: "Q4_2", .. }));
    for number in [43, 1000, u32::MAX] {
        assert!(matches!(tensor(&[1], number, 0), E::UnknownType { number: n, .. } if n == number));
    }
    let two =
        |name, offset| refused(&Gguf::default().tensor("a", &[16], 0, 0).tensor(name, &[8], 0, offset), 96);
    assert!(matches!(two("b", 32), E::Overlap { end, offset, .. } if end == offset + 32));
    assert_eq!(two("a", 64), E::Twice("a".into()));
    assert_eq!(two("b\0", 64), E::NulInName("b\0".into()));

    let key = |kind, value: &[u8]| refused(&Gguf::default().key("k", kind, value), 0);
    assert!(matches!(key(13, &[]), E::ValueType { number: 13, .. }));
    assert!(matches!(key(9, &[u32s(&[99]), u64s(&[0])].concat()), E::ValueType { number: 99, .. }));
    let name = [text(b"\xff\xfe"), u32s(&[0]), vec![1]].concat();
    let named = [b"GGUF".to_vec(), u32s(&[3]), u64s(&[0, 1]), name].concat();
    assert!(matches!(header(&named), Err(E::NotText(_))));
    assert!(
        matches!(refused(&Gguf::default().key("k", 0, &[1]).key("k", 0, &[1]), 0), E::KeyTwice(k) if k == "k")
    );
    for alignment in [0, 3, 33] {
        let gguf = Gguf::default().key("general.alignment", 4, &u32s(&[alignment]));
        assert!(matches!(refused(&gguf, 0), E::Alignment(_)));
    }
    assert!(matches!(
        refused(&Gguf::default().key("general.alignment", 10, &u64s(&[32])), 0),
        E::Alignment(_)
    ));
}

/// Lengths and counts that exceed the file are refused before memory is allocated for them.
#[test]
fn counts_beyond_the_file() {
    let counts =
        |tensors, keys| header_of(&[b"GGUF".to_vec(), u32s(&[3]), u64s(&[tensors, keys])].concat(), 1000);
    assert!(matches!(counts(1 << 63, 0), Error::Count { what: "tensors", .. }));
    assert!(matches!(counts(0, u64::MAX), Error::Count { what: "keys", .. }));
    assert!(matches!(counts(42, 0), Error::Count { .. }));
    assert!(matches!(counts(40, 0), Error::More { .. }));
    for kind in [0, 8, 9, 12] {
        let array = [u32s(&[kind]), u64s(&[1 << 60])].concat();
        assert!(matches!(refused(&Gguf::default().key("k", 9, &array), 0), Error::Count { .. }));
    }
    let long = refused(&Gguf::default().key("k", 8, &u64s(&[u64::MAX])), 0);
    assert!(matches!(long, Error::Truncated { needed: u64::MAX, .. }));
}

#[test]
fn arrays_of_arrays_end_somewhere() {
    let nested = |depth: u32| {
        let mut value = Vec::new();
        (1..depth).for_each(|_| value.extend([u32s(&[9]), u64s(&[1])].concat()));
        value.extend([u32s(&[0]), u64s(&[0])].concat());
        header(&Gguf::default().key("k", 9, &value).file(32, 0))
    };
    assert!(nested(MAX_DEPTH).is_ok());
    assert_eq!(nested(MAX_DEPTH + 1), Err(Error::Depth("k".into())));
    assert_eq!(nested(1_000_000), Err(Error::Depth("k".into())));
}

/// A header that is longer than the first read.
#[test]
fn long_headers_are_read_on() {
    let tokens: Vec<u8> = (0..200_000).flat_map(|i| text(format!("token {i}"))).collect();
    let value = [u32s(&[8]), u64s(&[200_000]), tokens].concat();
    let gguf = Gguf::default().key("tokens", 9, &value).tensor("t", &[8], 0, 0);
    let header = read(&Memory("long".into(), gguf.file(32, 32))).unwrap();
    assert!(header.data > 3 << 20);
    assert!(matches!(header.value("tokens"), Some(Value::Array(Array::Text(t))) if t[7] == "token 7"));
}

#[test]
fn headers_beyond_the_limit_are_refused() {
    struct Endless;
    impl onehop_load::Source for Endless {
        fn name(&self) -> &str {
            "endless"
        }
        fn bytes(&self) -> u64 {
            1 << 40
        }
        fn read_at(&self, _: u64, buffer: &mut [u8]) -> onehop_load::Result<()> {
            let start =
                [b"GGUF".to_vec(), u32s(&[3]), u64s(&[0, 1]), text("k"), u32s(&[8]), u64s(&[1 << 39])];
            let start = start.concat();
            buffer[..start.len()].copy_from_slice(&start);
            Ok(())
        }
    }
    let why = read(&Endless).unwrap_err();
    assert!(matches!(why, onehop_load::Error::Gguf { why: Error::HeaderTooLong, .. }), "{why}");
}

#[test]
fn a_million_tensors() {
    let mut gguf = Gguf::default();
    for i in 0..1_000_000u64 {
        gguf = gguf.tensor(&format!("layers.{i}"), &[8], 0, 32 * i);
    }
    let file = gguf.file(32, 32_000_000);
    let start = Instant::now();
    assert_eq!(read(&Memory("many".into(), file)).unwrap().tensors.len(), 1_000_000);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn types_have_one_number_each() {
    let known: Vec<_> = (0..100).filter_map(|n| ggml_type(n).ok()).collect();
    let mut unique = known.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!((known.len(), unique.len()), (35, 35));
    assert!(known.iter().all(|d| d.block().0.is_power_of_two()));
}

proptest! {
    /// Truncated, or with a byte changed: an error or a header, never a panic, and accepted tensors are within the
    /// file.
    #[test]
    fn damaged_files(at in 0usize..400, byte: u8, cut in prop::option::of(0usize..400)) {
        let mut file = Gguf::default()
            .key("general.alignment", 4, &u32s(&[32]))
            .key("names", 9, &[u32s(&[8]), u64s(&[2]), text("a"), text("bc")].concat())
            .tensor("one", &[64, 2], 8, 0)
            .tensor("two", &[3], 1, 160)
            .file(32, 200);
        if let Some(b) = file.get_mut(at) {
            *b = byte;
        }
        file.truncate(cut.unwrap_or(file.len()));
        if let Ok(header) = header(&file) {
            prop_assert!(header.tensors.iter().all(|t| t.offset + t.bytes <= file.len() as u64));
            prop_assert!(header.tensors.windows(2).all(|w| w[0].offset + w[0].bytes <= w[1].offset));
        }
    }
}
