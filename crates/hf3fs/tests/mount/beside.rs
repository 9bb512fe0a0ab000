//! Calls and rings on the same files: neither is wrong about what the other did.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::{Priority, RingName};

use crate::bed::{Bed, LONG, part, part_of, run};
use crate::target;

/// A ring that writes, and its buffer, full of `R`.
pub struct Writer {
    buffer: Buffer,
    ring: Ring,
}

impl Writer {
    pub fn new(dir: &Path, len: usize) -> Self {
        let mount = Arc::new(Mount::open(&dir.join("mnt")).unwrap());
        let name =
            RingName { read: false, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
        let ring = Ring::create(&mount, 8, name, None).unwrap();
        let buffer = Buffer::create(&mount, len, 0, None).unwrap();
        buffer.memory().fill(0, len, b'R').unwrap();
        Self { buffer, ring }
    }

    /// Writes all of the buffer at the file's beginning; gives the result.
    pub fn write(&self, file: &File) -> i64 {
        let (inode, len) = (file.metadata().unwrap().ino(), self.buffer.memory().len() as u64);
        let request = Request { buffer: self.buffer.id(), offset: 0, inode, at: 0, len, userdata: 0 };
        self.ring.prepare(&request).unwrap();
        self.ring.submit();
        let mut done = Vec::new();
        let until = SystemTime::now() + LONG;
        self.ring.wait(&mut done, (1, 8), Some(until), Duration::from_millis(1)).unwrap();
        done[0].result
    }
}

/// Run by [`appends_go_behind_what_others_wrote`].
#[test]
fn appender() {
    let Some(dir) = part_of() else { return };
    let path = dir.join("mnt/log");
    let file = File::options().read(true).append(true).create(true).open(path).unwrap();
    let check = |wanted: &[u8]| {
        let mut seen = vec![0; wanted.len() + 100];
        assert_eq!(file.read_at(&mut seen, 0).unwrap(), wanted.len());
        assert!(&seen[..wanted.len()] == wanted && file.metadata().unwrap().len() == wanted.len() as u64);
    };
    let mut wanted = vec![b'R'; 4096];
    assert_eq!(Writer::new(&dir, 4096).write(&file), 4096);
    (&file).write_all(b"APPENDED").unwrap();
    wanted.extend(b"APPENDED");
    check(&wanted);
    // By somebody whom this mount knows nothing of.
    File::options().append(true).open(dir.join("root/log")).unwrap().write_all(b" elsewhere").unwrap();
    let much = vec![b'm'; 3_000_000];
    (&file).write_all(&much).unwrap();
    wanted.extend(b" elsewhere");
    wanted.extend(much);
    check(&wanted);
    // A place that is given is no place for an append.
    assert_eq!(file.write_at(b"end", 0).unwrap(), 3);
    wanted.extend(b"end");
    check(&wanted);
    // One who does not append writes where it says.
    let other = File::options().write(true).open(dir.join("mnt/log")).unwrap();
    assert_eq!(other.write_at(b"begin", 0).unwrap(), 5);
    wanted[..5].copy_from_slice(b"begin");
    check(&wanted);
}

#[test]
fn appends_go_behind_what_others_wrote() {
    let Some(bed) = Bed::start() else { return };
    assert!(run(part("beside::appender", &bed)).contains("1 passed"));
    let Some((bed, _target, _)) = target::start() else { return };
    assert!(run(part("beside::appender", &bed)).contains("1 passed"));
}

/// Run by [`what_a_failed_transfer_wrote_is_seen`].
#[test]
fn writer_in_part() {
    let Some(dir) = part_of() else { return };
    let file = File::options().read(true).write(true).open(dir.join("mnt/file.bin")).unwrap();
    let writer = Writer::new(&dir, 8 << 20);
    let link = dir.join("mnt/3fs-virt/iovs").join(writer.buffer.id().to_string());
    let memory = File::options().write(true).open(std::fs::read_link(link).unwrap()).unwrap();
    // The second piece of the transfer finds its memory gone.
    memory.set_len(4 << 20).unwrap();
    let mut seen = [0; 2];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_ne!(&seen, b"RR");
    assert!(writer.write(&file) < 0);
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(&seen, b"RR");
}

#[test]
fn what_a_failed_transfer_wrote_is_seen() {
    let Some(bed) = Bed::start() else { return };
    assert!(run(part("beside::writer_in_part", &bed)).contains("1 passed"));
}

/// Run by [`a_folder_that_is_read_again_has_what_was_made_since`].
#[test]
fn reader_of_folders() {
    let Some(dir) = part_of() else { return };
    let path = dir.join("mnt/folder");
    let mut folder = rustix::fs::Dir::new(File::open(&path).unwrap()).unwrap();
    let names =
        |folder: &mut rustix::fs::Dir| std::iter::from_fn(|| folder.read().map(Result::unwrap)).count();
    // Not to the end.
    folder.read().unwrap().unwrap();
    let first = path.join("first");
    File::create(&first).unwrap();
    folder.rewind();
    assert_eq!(names(&mut folder), 3);
    std::fs::remove_file(first).unwrap();
    folder.rewind();
    assert_eq!(names(&mut folder), 2);
    for number in 0..3000 {
        File::create(path.join(format!("{number:0100}"))).unwrap();
    }
    folder.rewind();
    assert_eq!(names(&mut folder), 3002);
    // While names go each of the others is there once.
    folder.rewind();
    let mut seen = std::collections::HashSet::new();
    while let Some(entry) = folder.read() {
        let name = entry.unwrap().file_name().to_str().unwrap().to_owned();
        assert!(seen.insert(name.clone()), "{name} twice");
        if !name.starts_with('.') {
            std::fs::remove_file(path.join(name)).unwrap();
        }
    }
    assert_eq!(seen.len(), 3002);
}

#[test]
fn a_folder_that_is_read_again_has_what_was_made_since() {
    let Some(bed) = Bed::start() else { return };
    run(part("beside::reader_of_folders", &bed));
    let Some((bed, _target, _)) = target::start() else { return };
    run(part("beside::reader_of_folders", &bed));
}
