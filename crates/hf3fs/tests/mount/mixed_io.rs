//! Calls and rings on the same files: each sees the other's changes.

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

use crate::bed::{Bed, LONG, run, subtest, subtest_dir};
use crate::target;

/// A write ring, and its buffer, filled with `R`.
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

    /// Writes the buffer at the file's beginning. Returns the result.
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

/// Run by [`appends_follow_other_writes`].
#[test]
fn appender() {
    let Some(dir) = subtest_dir() else { return };
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
    // Without the mount, which does not know of this write.
    File::options().append(true).open(dir.join("root/log")).unwrap().write_all(b" elsewhere").unwrap();
    let much = vec![b'm'; 3_000_000];
    (&file).write_all(&much).unwrap();
    wanted.extend(b" elsewhere");
    wanted.extend(much);
    check(&wanted);
    // A write at an offset goes to the end of the file: it was opened to append.
    assert_eq!(file.write_at(b"end", 0).unwrap(), 3);
    wanted.extend(b"end");
    check(&wanted);
    // Without O_APPEND it goes to its offset.
    let other = File::options().write(true).open(dir.join("mnt/log")).unwrap();
    assert_eq!(other.write_at(b"begin", 0).unwrap(), 5);
    wanted[..5].copy_from_slice(b"begin");
    check(&wanted);
}

#[test]
fn appends_follow_other_writes() {
    let Some(bed) = Bed::start() else { return };
    assert!(run(subtest("mixed_io::appender", &bed)).contains("1 passed"));
    let Some((bed, _target, _)) = target::start() else { return };
    assert!(run(subtest("mixed_io::appender", &bed)).contains("1 passed"));
}

/// Run by [`partial_writes_of_failed_transfers_are_visible`].
#[test]
fn failing_writer() {
    let Some(dir) = subtest_dir() else { return };
    let file = File::options().read(true).write(true).open(dir.join("mnt/file.bin")).unwrap();
    let writer = Writer::new(&dir, 8 << 20);
    let link = dir.join("mnt/3fs-virt/iovs").join(writer.buffer.id().to_string());
    let memory = File::options().write(true).open(std::fs::read_link(link).unwrap()).unwrap();
    // The second chunk of the transfer is beyond the truncated memory.
    memory.set_len(4 << 20).unwrap();
    let mut seen = [0; 2];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_ne!(&seen, b"RR");
    // As `pwrite` does: the bytes before the failure.
    assert_eq!(writer.write(&file), 4 << 20);
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(&seen, b"RR");
}

#[test]
fn partial_writes_of_failed_transfers_are_visible() {
    let Some(bed) = Bed::start() else { return };
    assert!(run(subtest("mixed_io::failing_writer", &bed)).contains("1 passed"));
}

/// Run by [`rewinding_a_folder_reads_new_names`].
#[test]
fn folder_reader() {
    let Some(dir) = subtest_dir() else { return };
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
    // While names are removed, every other name is returned once.
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
fn rewinding_a_folder_reads_new_names() {
    let Some(bed) = Bed::start() else { return };
    run(subtest("mixed_io::folder_reader", &bed));
    let Some((bed, _target, _)) = target::start() else { return };
    run(subtest("mixed_io::folder_reader", &bed));
}
