//! Tests: which writes go through a mapping, and that nothing is lost by it.

use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::XattrFlags;

use super::*;

const PAGES: u64 = 64;

/// A file of [`PAGES`] pages of `0xee`, removed at the end.
struct WrittenFile {
    path: PathBuf,
    file: File,
    routes: Arc<WriteRoutes>,
    writes: FileWrites,
    taken: Arc<AtomicU64>,
}

/// Counts what is taken of a budget: `most`, and no more than the machine's.
fn counted(most: u64) -> (Arc<AtomicU64>, Arc<WriteRoutes>) {
    struct CountedBytes(Arc<AtomicU64>, u64);
    impl Drop for CountedBytes {
        fn drop(&mut self) {
            self.0.fetch_sub(self.1, Ordering::Relaxed);
        }
    }
    let taken = Arc::new(AtomicU64::new(0));
    let of = taken.clone();
    let routes = WriteRoutes::new(|of_machine| {
        let most = most.min(of_machine);
        Box::new(move |_, bytes| {
            let before = of.fetch_add(bytes, Ordering::Relaxed);
            let share = CountedBytes(of.clone(), bytes);
            (before + bytes <= most).then(|| Box::new(share) as TakenBytes)
        })
    });
    (taken, Arc::new(routes))
}

impl Drop for WrittenFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl WrittenFile {
    /// At most `budget` bytes of it are mapped.
    fn with_budget(folder: &Path, name: &str, budget: u64) -> Self {
        let path = folder.join(format!("onehop-writes-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![0xee; (PAGES * PAGE) as usize]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let (taken, routes) = counted(budget);
        let writes = FileWrites::new(routes.clone(), 1000);
        Self { path, file, routes: routes.clone(), writes, taken }
    }

    fn new(folder: &Path, name: &str) -> Self {
        Self::with_budget(folder, name, u64::MAX)
    }

    fn in_memory(name: &str) -> Self {
        Self::new(Path::new("/dev/shm"), name)
    }

    /// Writes as if another write were under way, and returns why not through a mapping.
    fn write(&self, at: u64, bytes: usize, value: u8) -> Option<&'static str> {
        self.write_by(&self.file, at, bytes, value)
    }

    fn write_by(&self, file: &File, at: u64, bytes: usize, value: u8) -> Option<&'static str> {
        let mem = HostMem::anonymous(bytes.next_multiple_of(PAGE as usize)).unwrap();
        mem.fill(0, bytes, value).unwrap();
        let before = self.routes.sums();
        let _other = UnderWay::begin(&self.writes.under_way);
        let from = FileSource { mem: &mem, at: 0, len: bytes };
        assert_eq!(self.writes.write(file, from, at, || Ok(())).unwrap(), bytes);
        let mut found = vec![0; bytes];
        self.file.read_exact_at(&mut found, at).unwrap();
        assert!(found.iter().all(|byte| *byte == value));
        let mut after = self.routes.sums();
        after.retain(|sum| !before.contains(sum));
        assert_eq!(after.len(), 1, "{after:?}");
        after[0].why
    }
}

#[test]
fn others_may_be_under_way() {
    let beds = [WrittenFile::in_memory("plain"), WrittenFile::new(&std::env::temp_dir(), "disk")];
    for bed in beds {
        if place(&bed.file) == Err(Unmapped::FileSystem) {
            println!("skipped: {} is on another file system", bed.path.display());
            continue;
        }
        assert_eq!(bed.write(PAGE, 2 * PAGE as usize, 1), None);
        // Not at the edges of pages either.
        assert_eq!(bed.write(5 * PAGE + 3, PAGE as usize + 11, 2), None);
        let mut around = [0; 2];
        bed.file.read_exact_at(&mut around, 5 * PAGE + 2).unwrap();
        assert_eq!(around, [0xee, 2]);
        bed.file.read_exact_at(&mut around, 6 * PAGE + 13).unwrap();
        assert_eq!(around, [2, 0xee]);
        // A longer file is mapped again.
        bed.file.write_all_at(&[3; 2 * PAGE as usize], PAGES * PAGE).unwrap();
        assert_eq!(bed.write((PAGES + 1) * PAGE, PAGE as usize, 4), None);
        assert_eq!(bed.file.metadata().unwrap().len(), (PAGES + 2) * PAGE);
    }
}

#[test]
fn a_write_alone_goes_by_pwrite() {
    let bed = WrittenFile::in_memory("alone");
    let mem = HostMem::anonymous(PAGE as usize).unwrap();
    let from = FileSource { mem: &mem, at: 0, len: PAGE as usize };
    bed.writes.write(&bed.file, from, 0, || Ok(())).unwrap();
    assert_eq!(bed.routes.sums()[0].why, Some(Unmapped::Alone.why()));
    assert_eq!(bed.writes.under_way.load(Ordering::Relaxed), 0);
}

#[test]
fn what_programs_would_notice_goes_by_pwrite() {
    let why = |reason: Unmapped| Some(reason.why());
    let bed = WrittenFile::in_memory("noticed");
    assert_eq!(bed.write(0, 100, 1), why(Unmapped::Short));
    assert_eq!(bed.write((PAGES - 1) * PAGE, 2 * PAGE as usize, 1), why(Unmapped::Grows));
    bed.file.set_len(PAGES * PAGE + 5 * PAGE + 7).unwrap();
    assert_eq!(bed.write((PAGES + 2) * PAGE, PAGE as usize, 1), why(Unmapped::Uncached));
    assert_eq!(bed.write((PAGES + 4) * PAGE + 8, PAGE as usize, 1), why(Unmapped::Grows));
    let mode = |mode| bed.file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
    for bits in [0o4644, 0o2644, 0o4755] {
        mode(bits);
        assert_eq!(bed.write(0, PAGE as usize, 2), why(Unmapped::Privileged), "{bits:o}");
    }
    // As Python's `os.open` makes files.
    mode(0o755);
    assert_eq!(bed.write(0, PAGE as usize, 2), None);
    // cap_net_raw; only root may set it.
    let capabilities = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const NAME: &str = "security.capability";
    if rustix::fs::fsetxattr(&bed.file, NAME, &capabilities, XattrFlags::empty()).is_ok() {
        assert_eq!(bed.write(0, PAGE as usize, 3), why(Unmapped::Privileged));
        let left = rustix::fs::fgetxattr(&bed.file, NAME, &mut [] as &mut [u8]);
        assert!(left.is_err(), "the file has its capabilities still");
    }
    mode(0o600);
    assert_eq!(bed.write(0, PAGE as usize, 2), None);
    for flags in [libc_flags(OFlags::DSYNC), libc_flags(OFlags::SYNC)] {
        let bed = WrittenFile::in_memory("flags");
        let file = File::options().read(true).write(true).custom_flags(flags).open(&bed.path).unwrap();
        assert_eq!(bed.write_by(&file, 0, PAGE as usize, 1), why(Unmapped::OpenMode));
    }
    let bed = WrittenFile::in_memory("write-only");
    let file = File::options().write(true).open(&bed.path).unwrap();
    assert_eq!(bed.write_by(&file, 0, PAGE as usize, 1), why(Unmapped::OpenMode));
    let bed = WrittenFile::with_budget(Path::new("/dev/shm"), "budget", GROWTH - 1);
    assert_eq!(bed.write(0, PAGE as usize, 1), why(Unmapped::Budget));
}

fn libc_flags(flags: OFlags) -> i32 {
    flags.bits() as i32
}

#[test]
fn only_files_in_memory_are_written_at_once() {
    let mem = HostMem::anonymous(PAGE as usize).unwrap();
    mem.fill(0, PAGE as usize, 9).unwrap();
    let from = FileSource { mem: &mem, at: 0, len: PAGE as usize };
    let beds = [WrittenFile::in_memory("now"), WrittenFile::new(&std::env::temp_dir(), "now")];
    for bed in beds {
        let now = |at| bed.writes.write_now(&bed.file, from, at);
        assert_eq!(now(0), None, "it is not known where the file is");
        bed.write(PAGE, PAGE as usize, 1);
        let is_in_memory = place(&bed.file) == Ok(false);
        assert_eq!(now(0), is_in_memory.then_some(PAGE as usize));
        let mut found = [0; 2];
        bed.file.read_exact_at(&mut found, PAGE - 1).unwrap();
        assert_eq!(found, [if is_in_memory { 9 } else { 0xee }, 1]);
        assert_eq!(now(PAGES * PAGE), None, "the file grows");
    }
}

#[test]
fn the_budget_is_returned() {
    let bed = WrittenFile::in_memory("returned");
    assert_eq!(bed.write(0, PAGE as usize, 1), None);
    let taken = bed.taken.clone();
    assert!(taken.load(Ordering::Relaxed) >= GROWTH);
    drop(bed);
    assert_eq!(taken.load(Ordering::Relaxed), 0);
}

#[test]
fn a_long_hole_counts_for_a_part() {
    let bed = WrittenFile::in_memory("hole");
    bed.file.set_len(1 << 50).unwrap();
    let mapped = bed.write(0, PAGE as usize, 1);
    assert_eq!(mapped, Some(Unmapped::Budget.why()), "two PiB of addresses");
    bed.file.set_len(32 * GROWTH * 2).unwrap();
    assert_eq!(bed.write(0, PAGE as usize, 2), None);
    let taken = bed.taken.load(Ordering::Relaxed);
    assert!(taken >= 4 * GROWTH, "{taken}");
}

#[test]
fn the_time_of_a_write_is_the_files() {
    let bed = WrittenFile::in_memory("times");
    assert_eq!(bed.write(0, PAGE as usize, 1), None);
    std::thread::sleep(Duration::from_millis(20));
    let before = SystemTime::now() - Duration::from_millis(12);
    assert_eq!(bed.write(0, PAGE as usize, 2), None);
    assert!(bed.file.metadata().unwrap().modified().unwrap() >= before);
}

/// The word of a page: its number, and how often it has been written.
fn word(page: u64, version: u64) -> u64 {
    page << 32 | version
}

/// Two threads write pages of words while a third truncates and extends the file. A word is then zero or one of its page's,
/// and one from before the truncation never comes back.
#[test]
fn nothing_that_was_cut_off_returns() {
    cut_off(&WrittenFile::in_memory("truncated"));
    cut_off(&WrittenFile::new(&std::env::temp_dir(), "truncated"));
}

fn cut_off(bed: &WrittenFile) {
    let acknowledged: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let over = AtomicBool::new(false);
    let write = |thread: u64| {
        let mem = HostMem::anonymous(PAGE as usize).unwrap();
        let from = FileSource { mem: &mem, at: 0, len: PAGE as usize };
        for step in 1_u64.. {
            // Each page has one writer.
            let page = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (PAGES - 1) & !1 | thread;
            let version = acknowledged[page as usize].load(Ordering::Relaxed) + 1;
            let bytes = word(page, version).to_le_bytes().repeat(PAGE as usize / 8);
            mem.write(0, &bytes).unwrap();
            assert_eq!(bed.writes.write(&bed.file, from, page * PAGE, || Ok(())).unwrap(), PAGE as usize);
            acknowledged[page as usize].store(version, Ordering::Release);
            if over.load(Ordering::Relaxed) {
                return;
            }
        }
    };
    let truncate = || {
        let end = Instant::now() + Duration::from_secs(2);
        let mut rounds = 0_u64;
        while Instant::now() < end {
            rounds += 1;
            let size = rounds.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 20 & (PAGES * PAGE - 1) & !7;
            let first = size / PAGE;
            let before: Vec<u64> =
                (first..PAGES).map(|page| acknowledged[page as usize].load(Ordering::Acquire)).collect();
            bed.file.set_len(size).unwrap();
            bed.file.set_len(PAGES * PAGE).unwrap();
            let mut found = vec![0; (PAGES * PAGE - size) as usize];
            bed.file.read_exact_at(&mut found, size).unwrap();
            for (at, bytes) in (size..).step_by(8).zip(found.as_chunks::<8>().0) {
                let (found, page) = (u64::from_le_bytes(*bytes), at / PAGE);
                let (of, version) = (found >> 32, found & 0xffff_ffff);
                let is_new = of == page && version > before[(page - first) as usize];
                assert!(found == 0 || is_new, "{found:x} at {at} after a truncation to {size}");
            }
        }
        over.store(true, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| write(0));
        scope.spawn(|| write(1));
        truncate();
    });
    let sums = bed.routes.sums();
    let is_mapped = sums.iter().any(|sum| sum.why.is_none());
    assert!(is_mapped || place(&bed.file).is_err(), "{sums:?}");
}

/// Run by [`a_full_disk_is_an_error`], with a small file system of its own at the folder.
#[test]
fn on_a_small_disk() {
    let Some(folder) = std::env::var_os("ONEHOP_TEST_SMALL_DISK") else { return };
    let folder = PathBuf::from(folder);
    let bed = WrittenFile::new(&folder, "full");
    assert_eq!(place(&bed.file), Ok(true));
    bed.file.set_len(16 * PAGES * PAGE).unwrap();
    // Holes are in the page cache once they have been read.
    bed.file.read_exact_at(&mut vec![0; (16 * PAGES * PAGE) as usize], 0).unwrap();
    let filler = File::create(folder.join("filler")).unwrap();
    let _full =
        (0..).step_by(PAGE as usize).find(|at| filler.write_all_at(&[7; PAGE as usize], *at).is_err());
    let mem = HostMem::anonymous(PAGE as usize).unwrap();
    let _other = UnderWay::begin(&bed.writes.under_way);
    let from = FileSource { mem: &mem, at: 0, len: PAGE as usize };
    let failed = bed.writes.write(&bed.file, from, 3 * PAGES * PAGE, || Ok(())).unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::StorageFull);
    assert_eq!(bed.write(PAGE, PAGE as usize, 8), None, "what has a place on the disk can be written");
    bed.file.sync_all().unwrap();
}

#[test]
fn a_full_disk_is_an_error() {
    let folder = std::env::temp_dir().join(format!("onehop-small-disk-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let script = "truncate -s 24M \"$1.img\" && mke2fs -q -t ext4 \"$1.img\" && mount -o loop \"$1.img\" \"$1\" && \
                  echo mounted && exec \"$0\" --exact file_writes::tests::on_a_small_disk --nocapture";
    let mut small = std::process::Command::new("unshare");
    small.args(["--mount", "sh", "-c", script]).arg(std::env::current_exe().unwrap()).arg(&folder);
    let output = small.env("ONEHOP_TEST_SMALL_DISK", &folder).output();
    let stdout = output.as_ref().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let _ = std::fs::remove_file(folder.with_extension("img"));
    std::fs::remove_dir(&folder).unwrap();
    if !stdout.starts_with("mounted") {
        let mut stderr = std::io::stderr();
        let _ = io::Write::write_fmt(
            &mut stderr,
            format_args!("SKIPPED: cannot mount a small disk: {output:?}\n"),
        );
        return;
    }
    assert!(output.unwrap().status.success() && stdout.contains("1 passed"), "{stdout}");
}

#[test]
fn a_refusal_is_remembered() {
    assert!(is_refusal(&io::Error::from_raw_os_error(libc::EPERM)));
    assert!(is_refusal(&io::Error::from_raw_os_error(libc::ENOSYS)));
    assert!(!is_refusal(&io::Error::from_raw_os_error(libc::EFAULT)));
    let bed = WrittenFile::in_memory("refused");
    bed.writes.is_refused.store(true, Ordering::Relaxed);
    assert_eq!(bed.write(0, PAGE as usize, 1), Some(Unmapped::Refused.why()));
}

#[test]
fn files_without_shares_take_from_one_budget() {
    let bed = WrittenFile::in_memory("unshared");
    let writes = FileWrites::new(Arc::new(WriteRoutes::unshared()), 0);
    let mem = HostMem::anonymous(PAGE as usize).unwrap();
    let from = FileSource { mem: &mem, at: 0, len: PAGE as usize };
    let write = |writes: &FileWrites| {
        let _other = UnderWay::begin(&writes.under_way);
        writes.write(&bed.file, from, 0, || Ok(())).unwrap();
        writes.routes.sums()[0].why
    };
    assert_eq!(write(&writes), None);
    let kept = TAKEN.load(Ordering::Relaxed);
    assert!(kept >= GROWTH);
    // All the rest is taken by others.
    let rest = (u64::MAX - kept) / 2;
    TAKEN.fetch_add(rest, Ordering::Relaxed);
    let late = FileWrites::new(Arc::new(WriteRoutes::unshared()), 0);
    assert_eq!(write(&late), Some(Unmapped::Budget.why()));
    TAKEN.fetch_sub(rest, Ordering::Relaxed);
    drop(writes);
    assert!(TAKEN.load(Ordering::Relaxed) < kept);
}
