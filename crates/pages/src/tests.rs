//! Tests with the emulated GPU, on a file system in memory and on a disk.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use onehop_gpu::{Emulated, Place};

use super::*;

const SIZE: u64 = 1 << 20;
const WINDOW_BYTES: u64 = 128 << 10;

/// A file of random bytes, and what it must have.
struct Fixture {
    path: PathBuf,
    gpu: Arc<dyn Gpu>,
    shadow: Vec<u8>,
    seed: u64,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Fixture {
    fn new(folder: &str, name: &str, size: u64) -> Self {
        let path = PathBuf::from(format!("{folder}/onehop-pages-{name}-{}", std::process::id()));
        let mut this = Self { path, gpu: Arc::new(Emulated::new()), shadow: Vec::new(), seed: 7 };
        this.shadow = this.bytes(size as usize);
        std::fs::write(&this.path, &this.shadow).unwrap();
        this
    }

    fn number(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.number().to_le_bytes()).take(count).collect()
    }

    fn open_with(&self, options: PagesOptions) -> Pages {
        let file = File::options().read(true).write(options.writes).open(&self.path).unwrap();
        let pages = Pages::with_windows(file, self.gpu.clone(), options, WINDOW_BYTES).unwrap();
        pages.register();
        pages
    }

    fn open(&self, writes: bool) -> Pages {
        self.open_with(PagesOptions::new(writes))
    }

    fn memory(&self, bytes: usize) -> Region {
        self.gpu.alloc(Place::Vram, bytes).unwrap()
    }

    /// Pages at random places, of random lengths, which do not overlap in these two memories.
    fn pages(&mut self, many: usize, most: u64, size: u64) -> (Vec<Region>, Vec<FilePage>) {
        let mut at = [0; 2];
        let mut pages = Vec::new();
        for _ in 0..many {
            let bytes = (self.number() % most + 1).min(size);
            let offset = self.number() % (size - bytes + 1);
            let memory = (self.number() % 2) as usize;
            pages.push(FilePage { offset, memory: (memory, at[memory]), bytes: bytes as usize });
            at[memory] += bytes as usize + (self.number() % 3) as usize;
        }
        (at.iter().map(|bytes| self.memory(bytes.max(&1) + 8)).collect(), pages)
    }

    /// Writes some pages and reads others; each is compared with the shadow.
    fn mix(&mut self, pages: &Pages, rounds: usize, most: u64) {
        for round in 0..rounds {
            let many = 1 + (self.number() % 20) as usize;
            let (memories, list) = self.pages(many, most, self.shadow.len() as u64);
            if round % 2 == 0 && pages.options.writes {
                let new: Vec<Vec<u8>> = list.iter().map(|page| self.bytes(page.bytes)).collect();
                // One after the other where they overlap: their order is not defined.
                for (page, bytes) in list.iter().zip(&new) {
                    memories[page.memory.0].write(page.memory.1, bytes).unwrap();
                }
                let mut rest: Vec<(FilePage, &Vec<u8>)> = list.iter().copied().zip(&new).collect();
                while !rest.is_empty() {
                    let mut now: Vec<(FilePage, &Vec<u8>)> = Vec::new();
                    rest.retain(|(page, bytes)| {
                        let end = |page: &FilePage| page.offset + page.bytes as u64;
                        let apart = now
                            .iter()
                            .all(|(other, _)| end(other) <= page.offset || end(page) <= other.offset);
                        if apart {
                            now.push((*page, bytes));
                        }
                        !apart
                    });
                    let batch: Vec<FilePage> = now.iter().map(|(page, _)| *page).collect();
                    pages.write(&memories, &batch).unwrap();
                    for (page, bytes) in now {
                        let start = page.offset as usize;
                        self.shadow[start..start + page.bytes].copy_from_slice(bytes);
                    }
                }
                let mut found = vec![0; self.shadow.len()];
                pages.file.read_exact_at(&mut found, 0).unwrap();
                assert!(found == self.shadow, "round {round}");
            } else {
                pages.read(&memories, &list).unwrap();
                self.compare(&memories, &list);
            }
        }
    }

    fn compare(&self, memories: &[Region], list: &[FilePage]) {
        for page in list {
            let mut found = vec![0; page.bytes];
            memories[page.memory.0].read(page.memory.1, &mut found).unwrap();
            let start = page.offset as usize;
            assert!(found == self.shadow[start..start + page.bytes], "{page:?}");
        }
    }
}

/// Folders in memory and on a disk.
fn folders() -> [String; 2] {
    ["/dev/shm".into(), std::env::temp_dir().display().to_string()]
}

#[test]
fn pages_are_moved_both_ways() {
    for folder in folders() {
        for writes in [true, false] {
            let mut fixture = Fixture::new(&folder, &format!("both-{writes}"), SIZE);
            let pages = fixture.open(writes);
            fixture.mix(&pages, 60, 50_000);
            fixture.mix(&pages, 6, SIZE);
            let MovedBytes { registered, staged } = pages.moved();
            if folder == "/dev/shm" || !writes && registered > 0 {
                assert!(registered > 0 && staged == 0, "{folder} {writes}: {:?}", pages.why_staged());
            } else {
                assert!(staged > 0 && registered == 0, "{folder} {writes}");
                assert!(pages.why_staged().is_some());
            }
            pages.sync().unwrap();
        }
    }
}

#[test]
fn a_file_that_is_open_elsewhere_is_staged() {
    let mut fixture = Fixture::new("/dev/shm", "elsewhere", SIZE);
    let _other = File::open(&fixture.path).unwrap();
    let pages = fixture.open(true);
    fixture.mix(&pages, 40, 300_000);
    assert_eq!(pages.moved().registered, 0);
    assert_eq!(pages.why_staged().unwrap(), "the file is open elsewhere");
}

#[test]
fn a_file_that_is_being_closed_is_registered() {
    let fixture = Fixture::new("/dev/shm", "closing", SIZE);
    let other = File::open(&fixture.path).unwrap();
    let pages = fixture.open(true);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(other);
        });
        assert_eq!(pages.register(), SIZE);
    });
}

#[test]
fn windows_are_given_up_for_others() {
    let mut fixture = Fixture::new("/dev/shm", "windows", SIZE);
    let pages = fixture.open_with(PagesOptions { writes: true, registered: 3 * WINDOW_BYTES });
    fixture.mix(&pages, 60, 30_000);
    let moved = pages.moved();
    assert!(moved.registered > 0 && moved.staged > 0, "{moved:?}");
    let memory = [fixture.memory(WINDOW_BYTES as usize)];
    for number in 0..8 {
        let page = FilePage { offset: number * WINDOW_BYTES, memory: (0, 0), bytes: WINDOW_BYTES as usize };
        let (begun, before) = (Instant::now(), pages.moved().registered);
        while pages.moved().registered == before {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", pages.why_staged());
            pages.read(&memory, &[page]).unwrap();
            fixture.compare(&memory, &[page]);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_file_grows_and_its_holes_are_filled() {
    let mut fixture = Fixture::new("/dev/shm", "grows", 5000);
    let pages = fixture.open(true);
    let memory = fixture.memory(1 << 20);
    let data = fixture.bytes(1 << 20);
    memory.write(0, &data).unwrap();
    // Leaves a hole.
    let far = FilePage { offset: 600_000, memory: (0, 7), bytes: 403_520 };
    pages.write(std::slice::from_ref(&memory), &[far]).unwrap();
    fixture.shadow.resize(1_003_520, 0);
    fixture.shadow[600_000..].copy_from_slice(&data[7..403_527]);
    assert_eq!(pages.size().unwrap(), 1_003_520);
    fixture.mix(&pages, 4, 1_003_520);
    std::thread::sleep(Duration::from_millis(300));
    // By now all of it has bytes, or is still a hole, where nothing may be allocated by reading.
    fixture.mix(&pages, 40, 900_000);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(pages.register(), 1_003_520);
    let before = pages.moved();
    fixture.mix(&pages, 10, 900_000);
    assert_eq!(pages.moved().staged, before.staged, "{:?}", pages.why_staged());
}

#[test]
fn parts_are_registered_in_the_background() {
    let mut fixture = Fixture::new("/dev/shm", "background", SIZE);
    let file = File::options().read(true).write(true).open(&fixture.path).unwrap();
    let pages =
        Pages::with_windows(file, fixture.gpu.clone(), PagesOptions::new(true), WINDOW_BYTES).unwrap();
    let begun = Instant::now();
    while pages.moved().registered < 10 * SIZE {
        fixture.mix(&pages, 4, 50_000);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", pages.why_staged());
    }
    assert!(pages.moved().staged > 0);
    assert_eq!(pages.register(), SIZE);
    assert_eq!(pages.register(), SIZE);
}

#[test]
fn reading_does_not_fill_holes() {
    let fixture = Fixture::new("/dev/shm", "holes", 0);
    File::options().write(true).open(&fixture.path).unwrap().set_len(SIZE).unwrap();
    let pages = fixture.open(true);
    let memory = fixture.memory(SIZE as usize);
    memory.fill(0, SIZE as usize, 9).unwrap();
    pages
        .read(std::slice::from_ref(&memory), &[FilePage { offset: 0, memory: (0, 0), bytes: SIZE as usize }])
        .unwrap();
    let mut found = vec![1; SIZE as usize];
    memory.read(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
    assert_eq!(rustix::fs::fstat(&*pages.file).unwrap().st_blocks, 0);
}

#[test]
fn bad_pages_are_refused_before_anything_is_moved() {
    let fixture = Fixture::new("/dev/shm", "bad", SIZE);
    let (reads, writes) = (fixture.open(false), fixture.open(true));
    let memory = [fixture.memory(4096)];
    let len = memory[0].len();
    let page = |offset, memory, bytes| FilePage { offset, memory, bytes };
    for (bad, is_for_both) in [
        (page(SIZE, (0, 0), 1), false),
        (page(SIZE - 10, (0, 0), 11), false),
        (page(u64::MAX, (0, 0), 2), true),
        (page(i64::MAX as u64, (0, 0), 1), true),
        (page(0, (1, 0), 1), true),
        (page(0, (0, len), 1), true),
        (page(0, (0, 1), len), true),
        (page(0, (0, usize::MAX), 2), true),
    ] {
        let list = [page(5, (0, 0), 100), bad];
        for pages in [&reads, &writes] {
            let error = pages.read(&memory, &list).unwrap_err();
            assert!(matches!(error, PagesError::BadPage { page: 1, .. }), "{bad:?}: {error}");
        }
        if is_for_both {
            assert!(
                matches!(writes.write(&memory, &list), Err(PagesError::BadPage { page: 1, .. })),
                "{bad:?}"
            );
        }
    }
    let mut found = [1; 100];
    memory[0].read(0, &mut found).unwrap();
    assert_eq!(found, [0; 100]);
    assert!(matches!(reads.write(&memory, &[page(0, (0, 0), 1)]), Err(PagesError::ReadOnly)));
    reads.read(&memory, &[page(SIZE, (0, len), 0)]).unwrap();
    reads.read(&[], &[]).unwrap();
    let folder = Pages::open(std::path::Path::new("/dev/shm"), fixture.gpu.clone(), PagesOptions::new(false));
    assert!(matches!(folder, Err(PagesError::File(_))));
}

#[test]
fn set_id_files_are_written_by_system_calls() {
    let mut fixture = Fixture::new("/dev/shm", "set-id", SIZE);
    std::fs::set_permissions(&fixture.path, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let (pages, memory) = (fixture.open(true), [fixture.memory(4096)]);
    let page = FilePage { offset: 8192, memory: (0, 0), bytes: 4096 };
    pages.write(&memory, &[page]).unwrap();
    assert_eq!(pages.moved(), MovedBytes { registered: 0, staged: 4096 });
    assert_eq!(pages.why_staged().unwrap(), "the file has set-id bits");
    fixture.shadow[8192..12288].fill(0);
    // Changed later.
    std::fs::set_permissions(&fixture.path, std::fs::Permissions::from_mode(0o755)).unwrap();
    fixture.mix(&pages, 4, 30_000);
    let staged = pages.moved().staged;
    std::fs::set_permissions(&fixture.path, std::fs::Permissions::from_mode(0o2775)).unwrap();
    pages.read(&memory, &[page]).unwrap();
    pages.write(&memory, &[page]).unwrap();
    assert_eq!(pages.moved().staged, staged + 4096);
}

#[test]
fn a_truncation_that_breaks_no_lease_is_noticed() {
    let mut fixture = Fixture::new("/dev/shm", "unleased", SIZE);
    let file = File::options().read(true).write(true).open(&fixture.path).unwrap();
    let same = file.try_clone().unwrap();
    let pages =
        Pages::with_windows(file, fixture.gpu.clone(), PagesOptions::new(true), WINDOW_BYTES).unwrap();
    assert_eq!(pages.register(), SIZE);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                same.set_len(SIZE / 2).unwrap();
                std::thread::sleep(Duration::from_millis(1));
                same.set_len(SIZE).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for _ in 0..300 {
            let (memories, mut list) = fixture.pages(10, 60_000, SIZE / 2);
            pages.read(&memories, &list).unwrap();
            fixture.compare(&memories, &list);
            list.iter_mut().for_each(|page| page.offset += SIZE / 2);
            for moved in [pages.read(&memories, &list), pages.write(&memories, &list)] {
                assert!(!matches!(moved, Err(PagesError::Gpu(_) | PagesError::File(_))), "{moved:?}");
            }
        }
        stop.store(true, Ordering::Relaxed);
        other.join().unwrap();
    });
}

#[test]
fn a_write_changes_the_time_of_modification() {
    let fixture = Fixture::new("/dev/shm", "time", SIZE);
    let pages = fixture.open(true);
    let memory = [fixture.memory(4096)];
    let time = || pages.file.metadata().unwrap().modified().unwrap();
    let before = time();
    std::thread::sleep(Duration::from_millis(20));
    pages.write(&memory, &[FilePage { offset: 4096, memory: (0, 0), bytes: 4096 }]).unwrap();
    assert_eq!(pages.moved(), MovedBytes { registered: 4096, staged: 0 });
    assert!(time() > before);
}

#[test]
fn other_programs_may_open_the_file_and_find_every_write() {
    let mut fixture = Fixture::new("/dev/shm", "others", SIZE);
    let pages = fixture.open(true);
    let stop = AtomicBool::new(false);
    let path = fixture.path.clone();
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (mut opened, mut longest) = (0, Duration::ZERO);
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let file = File::open(&path).unwrap();
                longest = longest.max(begun.elapsed());
                assert_eq!(file.metadata().unwrap().len(), SIZE);
                opened += 1;
                drop(file);
                std::thread::sleep(Duration::from_millis(400));
            }
            (opened, longest)
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(2500) {
            fixture.mix(&pages, 10, 100_000);
        }
        stop.store(true, Ordering::Relaxed);
        let (opened, longest) = others.join().unwrap();
        assert!(opened > 2 && longest < Duration::from_secs(2), "{opened} {longest:?}");
    });
    let moved = pages.moved();
    assert!(moved.registered > 0 && moved.staged > 0, "{moved:?}");
    drop(pages);
    assert!(std::fs::read(&fixture.path).unwrap() == fixture.shadow);
}

#[test]
fn a_file_that_is_truncated_meanwhile_is_an_error_or_right() {
    let mut fixture = Fixture::new("/dev/shm", "truncated", SIZE);
    let pages = fixture.open(true);
    let stop = AtomicBool::new(false);
    let (path, whole) = (fixture.path.clone(), fixture.shadow.clone());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let file = File::options().write(true).open(&path).unwrap();
                file.set_len(SIZE / 2).unwrap();
                std::thread::sleep(Duration::from_millis(5));
                file.write_all_at(&whole[SIZE as usize / 2..], SIZE / 2).unwrap();
                drop(file);
                std::thread::sleep(Duration::from_millis(600));
            }
        });
        let (begun, mut right) = (Instant::now(), 0);
        while begun.elapsed() < Duration::from_secs(3) {
            // The first half is never touched, and of the second either nothing or the same comes back: zeroes only while the
            // other is writing.
            let (memories, mut list) = fixture.pages(10, 60_000, SIZE / 2);
            pages.read(&memories, &list).unwrap();
            fixture.compare(&memories, &list);
            list.iter_mut().for_each(|page| page.offset += SIZE / 2);
            match pages.read(&memories, &list) {
                Ok(()) => right += 1,
                Err(PagesError::BadPage { .. } | PagesError::Page { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        other.join().unwrap();
        assert!(right > 10);
    });
    assert!(pages.moved().registered > 0);
}

#[test]
fn several_threads_move_pages_at_once() {
    let fixture = Fixture::new("/dev/shm", "threads", SIZE);
    for elsewhere in [false, true] {
        let _other = elsewhere.then(|| File::open(&fixture.path).unwrap());
        let pages = fixture.open(true);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (pages, fixture) = (&pages, &fixture);
                scope.spawn(move || {
                    let memory = [fixture.memory(SIZE as usize / 4)];
                    let page = |n: u64| FilePage {
                        offset: thread * (SIZE / 4) + n * 4096,
                        memory: (0, n as usize * 4096),
                        bytes: 4096,
                    };
                    let list: Vec<FilePage> = (0..SIZE / 4 / 4096).map(page).collect();
                    for round in 0..20_u8 {
                        memory[0].fill(0, SIZE as usize / 4, round + thread as u8).unwrap();
                        pages.write(&memory, &list).unwrap();
                        memory[0].fill(0, SIZE as usize / 4, 0xff).unwrap();
                        pages.read(&memory, &list).unwrap();
                        let mut found = vec![0; SIZE as usize / 4];
                        memory[0].read(0, &mut found).unwrap();
                        assert!(found.iter().all(|byte| *byte == round + thread as u8));
                    }
                });
            }
        });
    }
}
