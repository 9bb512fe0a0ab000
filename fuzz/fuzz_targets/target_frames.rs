//! Untrusted input of a storage service and of its clients: heads, messages of every kind, and well-formed requests
//! executed on a folder.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use onehop_target::tree::{Folder, FolderRules, Tree};
use onehop_target::wire::{
    HEAD_BYTES, Head, Hello, HelloBack, Join, Reply, Request, VERSION, Welcome, pack, unpack,
};

/// Room for few files, so that the limit is reached.
fn folder() -> &'static Folder {
    static FOLDER: OnceLock<Folder> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = std::env::temp_dir().join("onehop-fuzz-target");
        std::fs::create_dir_all(path.join("folder")).unwrap();
        // May be left over from the last run.
        let _ = std::os::unix::fs::symlink("/", path.join("link"));
        let root = std::fs::File::open(&path).unwrap();
        Folder::new(root.into(), FolderRules { for_others: true, most_open: 8 }).unwrap()
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut head = [0; HEAD_BYTES];
    for (to, from) in head.iter_mut().zip(bytes) {
        *to = *from;
    }
    for genuine in [false, true] {
        if genuine {
            head[..8].copy_from_slice(b"1HOP\0\0\x05\0");
            head[4..6].copy_from_slice(&VERSION.to_le_bytes());
            head[40..44].fill(0);
            let crc = crc32c::crc32c(&head[..HEAD_BYTES - 4]);
            head[HEAD_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        }
        if let Ok(known) = Head::from_bytes(&head, "a fuzzer") {
            assert_eq!(known.to_bytes(), head);
            assert!(known.body as usize <= onehop_target::wire::MAX_BODY);
        }
    }
    let _ = unpack::<Hello>(bytes, "a fuzzer");
    let _ = unpack::<HelloBack>(bytes, "a fuzzer");
    let _ = unpack::<Join>(bytes, "a fuzzer");
    let _ = unpack::<Welcome>(bytes, "a fuzzer");
    let _ = unpack::<Reply>(bytes, "a fuzzer");
    if let Ok(request) = unpack::<Request>(bytes, "a fuzzer") {
        let again: Request = unpack(&pack(&request).unwrap(), "a fuzzer").unwrap();
        assert_eq!(again, request);
        look(&request);
    }
});

/// Executes read-only requests; nothing outside of the folder may be found.
fn look(request: &Request) {
    let folder = folder();
    match request {
        Request::Lookup { parent, name, by } => {
            if let Ok(found) = folder.lookup(*parent, name, by) {
                assert!(["folder", "link"].iter().any(|own| own.as_bytes() == name.bytes()));
                drop(folder.forget(found.node, 1));
            }
        }
        Request::Release { nodes, .. } => {
            nodes.iter().for_each(|(node, times)| drop(folder.forget(*node, *times)));
        }
        Request::Attr { node, uid } => drop(folder.attr(*node, *uid)),
        Request::ReadLink { node, uid } => drop(folder.read_link(*node, *uid)),
        Request::List { node, from, by } => {
            if let Ok(names) = folder.list(*node, *from, by) {
                assert!(names.names.len() <= 4);
            }
        }
        Request::Open { node, access, by, .. } if !access.write && !access.truncate => {
            assert!(
                !folder.open_local(*node, *access, by).is_ok_and(|file| file
                    .file()
                    .metadata()
                    .unwrap()
                    .is_symlink())
            );
        }
        _ => {}
    }
}
