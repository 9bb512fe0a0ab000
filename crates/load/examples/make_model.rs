//! Makes a safetensors file of random tensors of the given size, in seconds: `make_model FILE GIB [SHARDS]`. Tensor
//! sizes resemble those of a transformer's layers. With shards, the file's name is that of a directory.
#![allow(clippy::unwrap_used, reason = "an example may fail")]

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a layer's tensors: four projections of attention, three of the feed-forward part, two norms.
const LAYER: [u64; 9] = [32 << 20, 8 << 20, 8 << 20, 32 << 20, 112 << 20, 112 << 20, 112 << 20, 8192, 8192];

fn main() {
    let mut args = std::env::args().skip(1);
    let (path, gib) = (args.next().unwrap(), args.next().unwrap().parse::<f64>().unwrap());
    let shards: usize = args.next().map_or(1, |n| n.parse().unwrap());
    let bytes = (gib * f64::from(1 << 30)) as u64;
    if shards == 1 {
        return make(Path::new(&path), bytes, 0);
    }
    std::fs::create_dir_all(&path).unwrap();
    let mut map = Vec::new();
    for i in 0..shards {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
        make(&Path::new(&path).join(&name), bytes / shards as u64, i);
        map.extend(names(bytes / shards as u64, i).into_iter().map(|(t, _)| format!("\"{t}\":\"{name}\"")));
    }
    let index = format!("{{\"metadata\":{{}},\"weight_map\":{{{}}}}}", map.join(","));
    std::fs::write(Path::new(&path).join("model.safetensors.index.json"), index).unwrap();
}

/// Names and sizes of tensors with this total.
fn names(bytes: u64, shard: usize) -> Vec<(String, u64)> {
    let (mut tensors, mut left) = (Vec::new(), bytes / 2 * 2);
    for i in 0.. {
        let size = LAYER[i % LAYER.len()].min(left);
        if size == 0 {
            break;
        }
        tensors.push((format!("model.{shard}.layers.{}.{}.weight", i / LAYER.len(), i % LAYER.len()), size));
        left -= size;
    }
    tensors
}

fn make(path: &Path, bytes: u64, shard: usize) {
    let (mut header, mut at) = (Vec::new(), 0);
    for (name, size) in names(bytes, shard) {
        let end = at + size;
        header.push(format!(
            r#""{name}":{{"dtype":"BF16","shape":[{}],"data_offsets":[{at},{end}]}}"#,
            size / 2
        ));
        at = end;
    }
    let mut header = format!("{{{}}}", header.join(","));
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let start = 8 + header.len() as u64;
    let threads = std::thread::available_parallelism().unwrap().get() as u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let file = &file;
            scope.spawn(move || fill(file, start, at, thread, threads, shard as u64));
        }
    });
}

/// Writes every `threads`-th chunk of the data.
fn fill(file: &File, start: u64, bytes: u64, thread: u64, threads: u64, seed: u64) {
    const CHUNK: u64 = 4 << 20;
    let mut data = vec![0; CHUNK as usize];
    for chunk in (thread..bytes.div_ceil(CHUNK)).step_by(threads as usize) {
        let mut state = (chunk << 8 | seed) + 1;
        for word in data.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
        }
        let count = CHUNK.min(bytes - chunk * CHUNK) as usize;
        file.write_all_at(&data[..count], start + chunk * CHUNK).unwrap();
    }
}
