//! `onehop cufile`: programs with onehop's libcufile.

use std::path::PathBuf;

use crate::run::{code, json, onehop, stderr, stdout};

/// A folder with empty files of the library's names, which the loader ignores.
fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("onehop-cufile-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcufile.so.0", "libcufile.so"] {
        std::fs::write(folder.join(name), "").unwrap();
    }
    folder.canonicalize().unwrap()
}

#[test]
fn a_program_finds_the_library_and_gives_its_own_exit_code() {
    let folder = folder();
    let library = folder.to_str().unwrap();
    let script = "echo \"$LD_PRELOAD $LD_LIBRARY_PATH ${LD_AUDIT:+audited} $1\"; exit 7";
    let run = ["cufile", "run", "--library", library, "--", "sh", "-c", script, "sh", "--json"];
    let output = onehop(&run);
    let message = stdout(&output);
    assert_eq!(code(&output), 7, "{}", stderr(&output));
    assert!(
        message.starts_with(&format!("{library}/libcufile.so.0")) && message.contains(&format!(" {library}"))
    );
    assert!(message.trim_end().ends_with(" audited --json"), "{message}");
    let plain =
        ["cufile", "run", "--no-audit", "--library", library, "--", "sh", "-c", script, "sh", "--json"];
    assert!(!stdout(&onehop(&plain)).contains("audited"));

    let printed = stdout(&onehop(&["cufile", "env", "--library", library]));
    assert!(printed.contains(&format!("export LD_PRELOAD='{library}/libcufile.so.0")), "{printed}");
    let document = json(&["cufile", "env", "--library", library]).1;
    assert!(document["LD_LIBRARY_PATH"].as_str().unwrap().starts_with(library), "{document}");
    assert!(document["LD_AUDIT"].as_str().unwrap().starts_with(library), "{document}");
    let plain = json(&["cufile", "env", "--no-audit", "--library", library]).1;
    assert!(plain.get("LD_AUDIT").is_none(), "{plain}");

    assert_eq!(code(&onehop(&["cufile", "run", "--library", library, "--", "/no/such/program"])), 1);
    assert_eq!(code(&onehop(&["cufile", "run", "--library", "/no/such/folder", "--", "true"])), 3);
    assert_eq!(code(&onehop(&["cufile", "run"])), 2);
    std::fs::remove_dir_all(folder).unwrap();
}
