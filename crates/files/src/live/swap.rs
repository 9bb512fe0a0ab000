//! Active swap files: the kernel writes to their blocks behind the file system's back.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use super::System;
use crate::{Error, Result};

/// Page sizes; a swap area has its signature at the end of the first page.
const PAGES: [u64; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
const SIGNATURES: [&[u8; 10]; 2] = [b"SWAPSPACE2", b"SWAP-SPACE"];

/// Why the file must not be read block by block, if the kernel swaps to it.
pub(super) fn in_use(system: &System, file: &File, shown: &str) -> Result<Option<String>> {
    let failed = |what: String| move |source| Error::System { what, source };
    let path = system.proc.join("swaps");
    let list = match std::fs::read(&path) {
        // A kernel without swap support has no such list.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(failed(format!("reading {}", path.display())))?,
    };
    let about = file.metadata().map_err(failed(format!("stat of {shown}")))?;
    let identity = |of: &Metadata| (of.dev(), of.ino());
    for swap in files(&list) {
        match std::fs::metadata(&swap) {
            Ok(swap) if identity(&swap) == identity(&about) => {
                return Ok(Some("it is an active swap file; `swapoff` it first".to_owned()));
            }
            Ok(_) => {}
            // The swap file was unlinked, or is in another mount namespace: it may be this file under another name.
            Err(_) if is_swap(file) => {
                return Ok(Some(format!(
                    "it has the signature of a swap file and may be the active swap file {}, which cannot be looked up from here",
                    swap.display()
                )));
            }
            Err(_) => {}
        }
    }
    Ok(None)
}

/// The paths of the files in the list, which also has partitions.
fn files(list: &[u8]) -> Vec<PathBuf> {
    let file = |row: &[u8]| {
        let mut words = row.split(|b| b" \t".contains(b)).filter(|word| !word.is_empty());
        let (path, kind) = (words.next()?, words.next()?);
        (kind == b"file").then(|| OsString::from_vec(unescaped(path)).into())
    };
    list.split(|&b| b == b'\n').skip(1).filter_map(file).collect()
}

/// Undoes the kernel's `\ooo` escapes of blanks, tabs, newlines and backslashes.
fn unescaped(mut text: &[u8]) -> Vec<u8> {
    let octal = |b: &u8| (b'0'..=b'7').contains(b);
    let mut out = Vec::new();
    while let [first, rest @ ..] = text {
        match rest {
            [a, b, c, after @ ..] if *first == b'\\' && [a, b, c].into_iter().all(octal) => {
                out.push((a & 7) << 6 | (b & 7) << 3 | (c & 7));
                text = after;
            }
            _ => {
                out.push(*first);
                text = rest;
            }
        }
    }
    out
}

fn is_swap(file: &File) -> bool {
    PAGES.iter().any(|page| {
        let mut found = [0; 10];
        file.read_exact_at(&mut found, page - 10).is_ok() && SIGNATURES.contains(&&found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_files_are_found_by_identity_not_by_name() {
        let root = std::env::temp_dir().join(format!("onehop swap-{}", std::process::id()));
        std::fs::create_dir_all(root.join("proc")).unwrap();
        let system = System::recorded(&root, |_, _| Ok(Vec::new()));
        let swap = root.join("swap\\file");
        let mut bytes = vec![0; 8192];
        std::fs::write(&swap, &bytes).unwrap();
        std::fs::hard_link(&swap, root.join("link")).unwrap();
        std::fs::write(root.join("other"), &bytes).unwrap();
        let said = |name: &str| in_use(&system, &File::open(root.join(name)).unwrap(), name).unwrap();
        let list = |path: &str, kind: &str| {
            let text = format!(
                "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/nvme0n1p3                          partition\t8\t\t0\t\t-2\n\
                 {path}  {kind}\t\t8\t\t0\t\t-3\n"
            );
            std::fs::write(root.join("proc/swaps"), text).unwrap();
        };
        assert_eq!(said("link"), None, "there is no list");
        let escaped = swap.to_str().unwrap().replace('\\', "\\134").replace(' ', "\\040");
        list(&escaped, "file");
        assert!(said("swap\\file").unwrap().contains("active swap file"));
        assert!(said("link").unwrap().contains("swapoff"));
        assert_eq!(said("other"), None);
        list(&escaped, "partition");
        assert_eq!(said("link"), None);
        // It was unlinked, but is still in use as swap.
        list(&format!("{escaped}2\\040(deleted)"), "file");
        assert_eq!(said("link"), None);
        bytes[4086..4096].copy_from_slice(b"SWAPSPACE2");
        std::fs::write(&swap, &bytes).unwrap();
        assert!(said("link").unwrap().contains("file2 (deleted)"));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn escapes_are_undone() {
        for (text, want) in
            [("a\\040b", &b"a b"[..]), ("\\134", b"\\"), ("\\9x", b"\\9x"), ("\\04", b"\\04"), ("", b"")]
        {
            assert_eq!(unescaped(text.as_bytes()), want);
        }
    }
}
