//! Deflates the larger PTX texts.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let to = std::env::var("OUT_DIR").expect("cargo says where");
    for name in ["onehop.ptx", "meter.ptx", "rig.ptx", "blocks.ptx", "array.ptx"] {
        let from = Path::new("ptx").join(name);
        println!("cargo::rerun-if-changed={}", from.display());
        let text = std::fs::read(&from).expect("the PTX is part of the package");
        let packed = miniz_oxide::deflate::compress_to_vec(&text, 9);
        std::fs::write(Path::new(&to).join(name), packed).expect("cargo's folder can be written");
    }
}
