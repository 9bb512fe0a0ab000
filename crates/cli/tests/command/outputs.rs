//! Files that commands write.

use crate::load::{TENSORS, model, text};
use crate::run::{Dir, succeed};

#[test]
fn a_manifest_stays_until_the_next_one_is_complete() {
    let dir = Dir::new();
    let (file, sums) = (dir.path().join("m.safetensors"), dir.path().join("sums.json"));
    model(&file, &TENSORS, 1);
    let load = ["load", text(&file), "-g", "emu", "--write-manifest", text(&sums)];
    succeed(&load);
    let before = std::fs::read(&sums).unwrap();
    model(&file, &TENSORS, 2);
    // No file may grow, as on a full disk.
    let script = "ulimit -f 0; trap '' XFSZ; exec \"$0\" \"$@\"";
    let ended = std::process::Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_onehop")])
        .args(load)
        .output();
    let output = ended.unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read(&sums).unwrap() == before);
    succeed(&load);
    assert!(std::fs::read(&sums).unwrap() != before);
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}
