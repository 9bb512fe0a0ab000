//! GGUF against the `gguf` package of PyPI: what its writer writes is read as by its reader, and block sizes agree.

use std::io::Write;
use std::process::Command;

use onehop_load::Dtype;
use onehop_load::formats::gguf::{Array, Text, Value, ggml_type, read};
use serde_json::Value as Json;

use crate::common::{Dir, Memory};

/// Writes files into the given directory, and prints as JSON what its reader finds in them.
const SCRIPT: &str = r#"
import json, os, sys
import numpy as np
import gguf

def write(path, seed, alignment):
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, "llama")
    if alignment:
        w.add_custom_alignment(alignment)
    w.add_uint8("t.u8", 200); w.add_int8("t.i8", -3); w.add_uint16("t.u16", 60000); w.add_int16("t.i16", -300)
    w.add_uint32("t.u32", 1 << 31); w.add_int32("t.i32", -5); w.add_float32("t.f32", 0.5); w.add_bool("t.bool", True)
    w.add_string("t.text", "gr\u00fc\u00dfe"); w.add_uint64("t.u64", 1 << 63); w.add_int64("t.i64", -1)
    w.add_float64("t.f64", 1e300); w.add_array("t.list", ["a", "", "ccc"]); w.add_array("t.ints", [1, 2, 3])
    for i in range(int(rng.integers(1, 9))):
        shape = [int(n) for n in rng.integers(1, 7, size=int(rng.integers(1, 5)))]
        for kind in (np.float32, np.float16, np.int8, np.int64, np.float64):
            w.add_tensor(f"{np.dtype(kind).name}.{i}", rng.integers(0, 99, size=shape).astype(kind))
        for kind in gguf.GGML_QUANT_SIZES:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if block > 1:
                raw = rng.integers(0, 256, size=shape[:-1] + [shape[-1] * size]).astype(np.uint8)
                w.add_tensor(f"{kind.name}.{i}", raw, raw_dtype=kind)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()

out = {"types": [[int(k), k.name, *gguf.GGML_QUANT_SIZES[k]] for k in gguf.GGML_QUANT_SIZES], "files": {}}
for seed, alignment in ((1, 0), (2, 64), (3, 256), (4, 0)):
    path = os.path.join(sys.argv[1], f"{seed}.gguf")
    write(path, seed, alignment)
    r = gguf.GGUFReader(path)
    out["files"][path] = {
        "alignment": int(r.alignment), "data": int(r.data_offset), "keys": [f for f in r.fields if not f.startswith("GGUF.")],
        "tensors": [[t.name, t.tensor_type.name, [int(n) for n in t.shape][::-1], int(t.data_offset), int(t.n_bytes)] for t in r.tensors]}

# Values that the format forbids, which its reader keeps as they are.
path = os.path.join(sys.argv[1], "verbatim")
w = gguf.GGUFWriter(path, "llama")
w.add_array("t.tokens", [b"ok", b"\xff\xfe\x00", b"\xe2\x82"]); w.add_string("t.one", b"\xff"); w.add_bool("t.truth", True)
w.write_header_to_file(); w.write_kv_data_to_file(); w.close()
data = bytearray(open(path, "rb").read())
data[data.index(b"t.truth") + len(b"t.truth") + 4] = 2
open(path, "wb").write(data)
fields = gguf.GGUFReader(path).fields
texts = lambda key: [bytes(fields[key].parts[i]).hex() for i in fields[key].data]
truth = fields["t.truth"]
out["verbatim"] = {"path": path, "tokens": texts("t.tokens"), "one": texts("t.one"), "truth": bool(truth.parts[truth.data[0]][0])}
print(json.dumps(out))
"#;

/// The package's answer, or `None` with a message that says why.
fn oracle(dir: &Dir) -> Option<Json> {
    let script = dir.write("oracle.py", SCRIPT);
    let skip = |why: &str| {
        // Not eprintln: the test runner would hide it in a passing test.
        let _ = std::io::stderr().write_all(format!("SKIPPED: {why} is not installed\n").as_bytes());
        None
    };
    let Ok(there) = Command::new("python3").args(["-c", "import gguf"]).output() else {
        return skip("python3");
    };
    if !there.status.success() {
        return skip("the Python package gguf");
    }
    let output = Command::new("python3").arg(script).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn files_of_the_reference_are_read_alike() {
    let dir = Dir::new();
    let Some(said) = oracle(&dir) else { return };
    for kind in said["types"].as_array().unwrap() {
        let number = kind[0].as_u64().unwrap() as u32;
        let dtype: Dtype = ggml_type(number).unwrap_or_else(|_| panic!("{kind} is not known"));
        assert_eq!(dtype.name(), kind[1].as_str().unwrap());
        assert_eq!(dtype.block(), (kind[2].as_u64().unwrap(), kind[3].as_u64().unwrap()), "{dtype}");
    }
    let verbatim = &said["verbatim"];
    let path = verbatim["path"].as_str().unwrap();
    let header = read(&Memory(path.into(), std::fs::read(path).unwrap())).unwrap();
    let hex = |text: &Text| text.bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let Some(Value::Array(Array::Text(tokens))) = header.value("t.tokens") else { panic!("{header:?}") };
    assert_eq!(serde_json::json!(tokens.iter().map(hex).collect::<Vec<_>>()), verbatim["tokens"]);
    let Some(Value::Text(one)) = header.value("t.one") else { panic!("{header:?}") };
    assert_eq!(serde_json::json!([hex(one)]), verbatim["one"]);
    assert_eq!(header.value("t.truth"), verbatim["truth"].as_bool().map(Value::Bool).as_ref());
    for (path, said) in said["files"].as_object().unwrap() {
        let header = read(&Memory(path.clone(), std::fs::read(path).unwrap())).unwrap();
        assert_eq!(
            (header.alignment, header.data),
            (said["alignment"].as_u64().unwrap(), said["data"].as_u64().unwrap())
        );
        let keys: Vec<_> = header.metadata.iter().map(|(key, _)| key.as_str()).collect();
        let wanted: Vec<_> = said["keys"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
        assert_eq!(keys, wanted);
        let mut tensors: Vec<_> = header
            .tensors
            .iter()
            .map(|t| serde_json::json!([t.name, t.dtype, t.shape, t.offset, t.bytes]))
            .collect();
        let mut wanted = said["tensors"].as_array().unwrap().clone();
        for list in [&mut tensors, &mut wanted] {
            list.sort_by_key(|t| t[0].as_str().unwrap().to_owned());
        }
        assert_eq!(tensors, wanted);
    }
}
