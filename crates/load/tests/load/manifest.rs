//! Manifests: made, written, read back and compared with a model; strict in every respect.

use onehop_load::manifest::{Error, Manifest, crc32c};
use onehop_load::{Local, Model};
use proptest::prelude::*;

use crate::common::{Dice, Dir, Memory};

const GOOD: &str =
    r#"{"onehop_manifest":1,"tensors":{"a":{"dtype":"U8","shape":[2,2],"bytes":4,"crc32c":"0000beef"}}}"#;

/// A file with a tensor that needs several reads, and a small one.
fn file() -> Vec<u8> {
    let json = r#"{"a":{"dtype":"U8","shape":[2500000],"data_offsets":[0,2500000]},"b":{"dtype":"F32","shape":[],"data_offsets":[2500000,2500004]}}"#;
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.as_bytes());
    file.extend(Dice(9).bytes(2_500_004));
    file
}

#[test]
fn made_written_read_and_verified() {
    let dir = Dir::new();
    let bytes = file();
    let path = dir.write("m.safetensors", &bytes);
    let model = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let made = Manifest::of(&model).unwrap();
    let infos = || model.tensors.iter().map(|t| &t.info);
    for info in infos() {
        let data = &bytes[info.offset as usize..(info.offset + info.bytes) as usize];
        assert_eq!(made.tensors[&info.name].crc32c, ::crc32c::crc32c(data));
    }
    let text = made.to_json();
    let read = Manifest::read(&Memory("m.json".into(), text.clone().into_bytes())).unwrap();
    assert_eq!((&read, read.to_json()), (&made, text));
    for info in infos() {
        read.check(info, crc32c(&*model.files[0], info).unwrap()).unwrap();
    }

    // Any single bit.
    for at in [bytes.len() - 2_500_004, bytes.len() - 1_000_000, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 4;
        let file = Memory("damaged".into(), damaged);
        let wrong: Vec<_> =
            infos().filter_map(|info| read.check(info, crc32c(&file, info).unwrap()).err()).collect();
        assert!(matches!(wrong.as_slice(), [Error::Differs { .. }]), "{wrong:?}");
    }
}

#[test]
fn another_model_is_noticed() {
    let manifest = Manifest::parse(GOOD.as_bytes()).unwrap();
    let info = |name: &str, shape: &[u64]| onehop_load::TensorInfo {
        name: name.into(),
        dtype: onehop_load::Dtype::U8,
        shape: shape.into(),
        offset: 0,
        bytes: shape.iter().product(),
    };
    manifest.check(&info("a", &[2, 2]), 0xbeef).unwrap();
    assert!(matches!(manifest.check(&info("b", &[4]), 7), Err(Error::NotListed(name)) if name == "b"));
    assert!(matches!(manifest.check(&info("a", &[4]), 0xbeef), Err(Error::Other { .. })));
    assert!(matches!(manifest.check(&info("a", &[2, 2]), 7), Err(Error::Differs { is: 7, was: 0xbeef, .. })));
}

#[test]
fn strict_about_everything() {
    let with = |from: &str, to: &str| {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD, "{from}");
        Manifest::parse(text.as_bytes()).unwrap_err()
    };
    use Error as E;
    assert!(matches!(with(":1,", ":2,"), E::Version(v) if v == "2"));
    assert!(matches!(with(":1,", ":1.0,"), E::Version(_)));
    assert!(matches!(with(":1,", ":-1,"), E::Version(_)));
    assert!(matches!(with(r#""onehop_manifest":1,"#, ""), E::Missing { key: "onehop_manifest", .. }));
    assert!(matches!(with(r#""tensors""#, r#""tensor""#), E::Unknown { .. }));
    assert!(matches!(with(r#"{"onehop"#, r#"{"onehop_manifest":1,"onehop"#), E::Twice { .. }));
    assert!(matches!(
        with(r#""a":"#, r#""a":{"dtype":"U8","shape":[],"bytes":1,"crc32c":"00000000"},"a":"#),
        E::Twice { .. }
    ));
    assert!(matches!(with(r#""bytes":4"#, r#""bytes":4,"bytes":4"#), E::Twice { .. }));
    assert!(matches!(with(r#""bytes":4"#, r#""bytes":4,"sha":1"#), E::Unknown { .. }));
    assert!(matches!(with(r#""bytes":4,"#, ""), E::Missing { key: "bytes", .. }));
    assert!(matches!(with(r#"U8"#, "U9"), E::Value { key: "dtype", .. }));
    assert!(matches!(with("[2,2]", "[2,-2]"), E::Value { key: "shape", .. }));
    assert!(matches!(with("[2,2]", "[2,3]"), E::Value { key: "bytes", .. }));
    assert!(matches!(with("[2,2]", "[4294967296,4294967296]"), E::Value { key: "bytes", .. }));
    for crc in ["beef", "0000BEEF", "+000beef", "00000beef", "0000bee ", "ü00beef"] {
        assert!(matches!(with("0000beef", crc), E::Value { key: "crc32c", .. }), "{crc}");
    }
    for text in ["", "[]", "{} {}", "{\"tensors\":[]}", "{\"tensors\":{\"a\":[]}}", &"[".repeat(100_000)] {
        assert!(matches!(Manifest::parse(text.as_bytes()), Err(E::Json(_))), "{text:.40}");
    }
}

proptest! {
    #[test]
    fn written_manifests_are_read_back(names in prop::collection::btree_set(".{0,8}", 0..6), seed: u64) {
        let mut dice = Dice(seed);
        let mut manifest = Manifest::default();
        for name in names {
            let info = onehop_load::TensorInfo {
                name,
                dtype: onehop_load::Dtype::ALL[dice.below(onehop_load::Dtype::ALL.len() as u64) as usize],
                shape: vec![],
                offset: 0,
                bytes: 0,
            };
            let (count, bytes) = info.dtype.block();
            manifest.add(&onehop_load::TensorInfo { shape: vec![3, count], bytes: 3 * bytes, ..info }, dice.next() as u32);
        }
        prop_assert_eq!(Manifest::parse(manifest.to_json().as_bytes()).unwrap(), manifest);
    }
}
