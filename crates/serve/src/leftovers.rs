//! Removes files in `/dev/shm` that killed daemons have left.

use std::path::Path;

use onehop_usrbio::SHM;
use onehop_usrbio::mount::SEMAPHORE_PREFIX;
use rustix::fs::{CWD, FileType, FlockOperation, OFlags, Stat, flock, fstat, openat};

/// Whether it is a regular file that nobody has locked. Opening a pipe there would block without `O_NONBLOCK`.
fn is_free(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let Ok(file) = openat(CWD, path, flags, rustix::fs::Mode::empty()) else { return false };
    let is_plain = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    fstat(&file).is_ok_and(is_plain) && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Removes semaphores and sockets of daemons that were killed: nobody holds a lock on them.
pub(crate) fn remove_leftovers() {
    let Ok(entries) = std::fs::read_dir(SHM) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(SEMAPHORE_PREFIX) {
            if is_free(&entry.path()) {
                let _ = std::fs::remove_file(entry.path());
            }
        } else if name.starts_with("onehop-")
            && name.ends_with(".sock")
            && !crate::socket::is_served(&entry.path())
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use onehop_usrbio::Id;

    use super::*;

    #[test]
    fn files_of_others_beside_leftovers_do_not_block() {
        let path =
            |of: &str| Path::new(SHM).join(format!("{SEMAPHORE_PREFIX}test-{of}-{}", Id::random().unwrap()));
        let [pipe, link, left, held] = ["pipe", "link", "left", "held"].map(path);
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, mode, 0).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        std::fs::write(&left, "").unwrap();
        // Daemons of other tests remove leftovers too, so lock the file before it has its name.
        let early = Path::new(SHM).join(format!("onehop-test-{}", Id::random().unwrap()));
        let lock = std::fs::File::create(&early).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        std::fs::rename(early, &held).unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            remove_leftovers();
            tx.send(())
        });
        let ended = rx.recv_timeout(Duration::from_secs(20));
        let start = std::time::Instant::now();
        // Another daemon may hold the lock for a moment, and removes the file then.
        while ended.is_ok() && left.exists() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(2));
        }
        let there = [&pipe, &link, &left, &held].map(|path| path.symlink_metadata().is_ok());
        for path in [pipe, link, left, held] {
            let _ = std::fs::remove_file(path);
        }
        assert_eq!((ended, there), (Ok(()), [true, true, false, true]));
    }
}
