//! Tests of locks, compared with the kernel's own.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use onehop_os::locks::lock_range;
use onehop_target::tree::Local;
use onehop_target::wire::OpenMode;
use proptest::prelude::*;
use rustix::fs::{FlockOperation, flock};

use super::owned::{MAX_PER_PERSON, MAX_RANGES, with, without};
use super::*;
use crate::opens::Opens;

fn range(start: u64, end: u64) -> LockRange {
    LockRange { start, end }
}

/// A request of one of three owners: a range, and its lock type or `None` to unlock it.
type LockCall = (usize, LockRange, Option<LockKind>);

fn call() -> impl Strategy<Value = LockCall> {
    let end = LockRange::WHOLE.end;
    let ranges = prop_oneof![
        6 => (0..10_u64, 0..6_u64).prop_map(|(start, more)| range(start, start + more)),
        1 => (0..10_u64).prop_map(move |start| range(start, end)),
        2 => Just(LockRange::WHOLE),
    ];
    (0..3_usize, ranges, prop::sample::select(&[None, Some(LockKind::Shared), Some(LockKind::Exclusive)]))
}

#[test]
fn a_whole_lock_can_be_released_in_parts() {
    use LockKind::{Exclusive, Shared};
    let (of, locks) = (TestFile::new("parts"), Locks::new(64, &Persons::default()));
    let (handle, open) = of.open(1);
    let by = |owner: u64| LockRequester { owner, handle, uid: 1000, pid: owner as u32 };
    let halves = [range(0, 9), range(10, LockRange::WHOLE.end)];
    let lock = |owner, range, kind| locks.lock(&open, by(owner), range, kind);
    assert_eq!(lock(1, LockRange::WHOLE, Exclusive), Ok(true));
    assert_eq!(lock(2, LockRange::WHOLE, Shared), Ok(false));
    assert_eq!(halves.map(|half| lock(1, half, Shared)), [Ok(true); 2]);
    assert_eq!(lock(2, LockRange::WHOLE, Shared), Ok(true));
    locks.unlock(1, by(2), LockRange::WHOLE).unwrap();
    halves.iter().for_each(|half| locks.unlock(1, by(1), *half).unwrap());
    assert_eq!(lock(2, LockRange::WHOLE, Exclusive), Ok(true));
}

#[test]
fn a_lock_belongs_to_the_program_that_locked_last() {
    let (of, locks) = (TestFile::new("programs"), Locks::new(64, &Persons::default()));
    let [(first, earlier), (second, later), (third, other)] = [(); 3].map(|()| of.open(1));
    let by = |owner: u64, handle, pid| LockRequester { owner, handle, uid: 1000, pid };
    let locked_by = || {
        let found = locks.in_the_way(&other, by(2, third, 300), LockRange::WHOLE, LockKind::Exclusive);
        found.unwrap().map(|(_, _, pid)| pid)
    };
    assert_eq!(locks.lock(&earlier, by(1, first, 100), LockRange::WHOLE, LockKind::Exclusive), Ok(true));
    assert_eq!(locked_by(), Some(100));
    // The file is closed, and the kernel reuses its number before it reports the close.
    assert_eq!(locks.lock(&later, by(1, second, 200), LockRange::WHOLE, LockKind::Exclusive), Ok(true));
    assert!(locks.closed(1, first).is_empty());
    assert_eq!(locked_by(), Some(200));
    // A failed lock changes nothing.
    assert_eq!(locks.lock(&other, by(2, third, 300), LockRange::WHOLE, LockKind::Shared), Ok(false));
    assert_eq!(locked_by(), Some(200));
}

proptest! {
    /// Compares with the kernel's locks of three open files.
    #[test]
    fn ranges_match_the_kernel_s(calls in prop::collection::vec(call(), 1..60)) {
        let (of, kernel) = (TestFile::new("ours"), TestFile::new("reference"));
        let (locks, opens) = (Locks::new(64, &Persons::default()), [(); 3].map(|()| of.open(1)));
        let (references, [ours, theirs]) = ([(); 3].map(|()| kernel.plain()), [&of, &kernel].map(TestFile::plain));
        for (owner, range, kind) in calls {
            let (handle, open) = &opens[owner];
            let by = LockRequester { owner: owner as u64, handle: *handle, uid: 0, pid: 0 };
            let done = match kind {
                Some(kind) => locks.lock(open, by, range, kind),
                None => locks.unlock(1, by, range).map(|()| true),
            };
            prop_assert_eq!(done, Ok(lock_range(&references[owner], range, kind).unwrap()));
            // Probe all locks from a file without locks.
            for at in (0..17).chain([LockRange::WHOLE.end]) {
                for kind in [LockKind::Shared, LockKind::Exclusive] {
                    let [ours, theirs] =
                        [&ours, &theirs].map(|file| lock_in_the_way(file, self::range(at, at), kind).unwrap());
                    prop_assert_eq!(ours, theirs);
                }
            }
        }
    }
}

/// An empty file, opened under different inode numbers.
struct TestFile {
    path: PathBuf,
    opens: Opens,
}

impl TestFile {
    fn new(name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("onehop-serve-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, "").unwrap();
        Self { path, opens: Opens::new(1024, &Persons::default()) }
    }

    /// The file as a program outside the mount opens it.
    fn plain(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }

    fn open(&self, inode: u64) -> (u64, Arc<Open>) {
        let access = OpenMode { read: true, write: true, ..OpenMode::default() };
        let handle = self.opens.add(inode, 1000, access, Arc::new(Local::new(self.plain())));
        (handle, self.opens.get(handle).unwrap())
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn ranges_are_cut_and_joined() {
    use LockKind::{Exclusive, Shared};
    let mut ranges = Vec::new();
    for add in [range(10, 19), range(40, 49), range(30, 35)] {
        ranges = with(&ranges, (add, Shared));
    }
    assert_eq!(ranges, [range(10, 19), range(40, 49), range(30, 35)].map(|range| (range, Shared)));
    let joined = with(&ranges, (range(20, 29), Shared));
    assert_eq!(joined, [(range(40, 49), Shared), (range(10, 35), Shared)]);
    let other = with(&ranges, (range(20, 29), Exclusive));
    assert_eq!(other.len(), 4, "{other:?}");
    let within = with(&ranges, (range(12, 13), Exclusive));
    assert_eq!(within.len(), 5, "{within:?}");
    assert_eq!(with(&within, (range(12, 13), Shared)).len(), 3);
    assert_eq!(with(&ranges, (LockRange::WHOLE, Exclusive)), [(LockRange::WHOLE, Exclusive)]);
    let rest = without(&ranges, range(15, 44));
    assert_eq!(rest, [(range(10, 14), Shared), (range(45, 49), Shared)]);
    let behind = without(&[(LockRange::WHOLE, Shared)], range(0, 0));
    assert_eq!(behind, [(range(1, LockRange::WHOLE.end), Shared)]);
    assert_eq!(without(&rest, LockRange::WHOLE), []);
    // Bytes with alternating lock types are as many ranges.
    let kinds = [Shared, Exclusive].into_iter().cycle();
    let many = (0..100).zip(kinds).fold(Vec::new(), |all, (at, kind)| with(&all, (range(at, at), kind)));
    assert_eq!(many.len(), 100);
}

#[test]
fn locks_count_until_their_owner_or_handle_is_gone() {
    let of = TestFile::new("owners");
    let open = |inode| of.open(inode);
    let locks = Locks::new(8, &Persons::default());
    let user = rustix::process::geteuid().as_raw() + 1;
    let [(first, one), (second, _), (third, other)] = [open(1), open(1), open(2)];
    let by = |owner, handle| LockRequester { owner, handle, uid: user, pid: owner as u32 };
    let take = |open: &Open, owner, handle| {
        locks.lock(open, by(owner, handle), range(owner, owner), LockKind::Shared)
    };
    assert_eq!([take(&one, 10, first), take(&one, 11, first), take(&one, 10, second)], [Ok(true); 3]);
    assert_eq!([take(&one, 12, second), take(&other, 10, third)], [Ok(true); 2]);
    // A user may have as many as remain for others.
    assert_eq!((take(&other, 13, third), locks.shares.taken()), (Err(Errno::NOLCK), 4));
    let theirs = LockRequester { uid: user + 1, ..by(14, third) };
    assert_eq!(locks.lock(&other, theirs, range(14, 14), LockKind::Exclusive), Ok(true));
    let way = locks.in_the_way(&other, by(10, third), range(14, 14), LockKind::Shared).unwrap();
    assert_eq!(way, Some((range(14, 14), LockKind::Exclusive, 14)));
    // A failed lock counts nothing.
    let blocked = LockRequester { uid: user + 1, ..by(15, third) };
    assert_eq!(locks.lock(&other, blocked, range(14, 14), LockKind::Shared), Ok(false));
    assert_eq!(locks.shares.taken(), 5);

    let close = |inode, handle| locks.release(&locks.closed(inode, handle));
    assert!(close(1, second) && !close(1, second), "owner 12 used this handle alone");
    assert!(locks.has_any(1, 10) && locks.has_any(1, 11));
    assert!(locks.has_any(2, 10) && !locks.flushed(1, 12) && locks.flushed(1, 11));
    assert!(close(1, first) && !lock(&locks.files).contains_key(&1));
    locks.unlock(2, by(10, third), range(0, 5)).unwrap();
    assert!(locks.has_any(2, 10));
    locks.unlock(2, by(10, third), LockRange::WHOLE).unwrap();
    assert!(!locks.has_any(2, 10) && close(2, third));
    // The kernel may reuse the number of a removed owner before its locks are released.
    assert_eq!(take(&one, 20, first), Ok(true));
    let gone = locks.closed(1, first);
    assert_eq!(take(&one, 20, second), Ok(true));
    assert!(locks.release(&gone) && locks.has_any(1, 20));
    assert_eq!(locks.lock(&one, by(21, second), range(20, 20), LockKind::Exclusive), Ok(false));
    assert!(close(1, second));
    assert_eq!((locks.shares.taken(), lock(&locks.files).len()), (0, 0));
}

#[test]
fn a_late_close_does_not_release_the_lock_of_the_next_handle() {
    let (of, locks) = (TestFile::new("late"), Locks::new(64, &Persons::default()));
    let [(first, before), (second, after)] = [of.open(1), of.open(1)];
    let by = |owner, handle| LockRequester { owner, handle, uid: 1000, pid: handle as u32 };
    let take = |open: &Open, owner, handle| {
        locks.lock(open, by(owner, handle), LockRange::WHOLE, LockKind::Exclusive)
    };
    // `flock` on an open file that is then closed. The kernel reuses its number before it reports the close.
    assert_eq!((take(&before, 7, first), take(&after, 7, second)), (Ok(true), Ok(true)));
    assert!(!locks.release(&locks.closed(1, first)));
    assert_eq!(take(&before, 8, first), Ok(false), "the lock is lost");
    assert!(locks.release(&locks.closed(1, second)));
    assert_eq!(take(&before, 8, first), Ok(true));
}

#[test]
fn the_holder_of_a_lock_is_reported() {
    use LockKind::{Exclusive, Shared};
    let (of, locks) = (TestFile::new("holders"), Locks::new(64, &Persons::default()));
    let (handle, open) = of.open(1);
    let by = |owner: u64| LockRequester { owner, handle, uid: 1000, pid: owner as u32 };
    let found = |range| locks.in_the_way(&open, by(1), range, Exclusive).unwrap();
    // A program outside the mount has locked a range, and one that uses the mount waits for it.
    let foreign = of.plain();
    assert!(lock_range(&foreign, range(0, 9), Some(Exclusive)).unwrap());
    let waiting = locks.holder(1, by(2)).unwrap();
    assert_eq!(found(range(5, 5)), Some((range(0, 9), Exclusive, 0)));
    locks.end(1, 2, &waiting, &mut lock(&waiting.state));
    // Programs of this mount have locked others.
    assert_eq!(locks.lock(&open, by(3), range(20, 29), Shared), Ok(true));
    assert_eq!(locks.lock(&open, by(4), range(30, 39), Exclusive), Ok(true));
    assert_eq!(found(range(5, 5)), Some((range(0, 9), Exclusive, 0)));
    assert_eq!(found(range(25, 25)), Some((range(20, 29), Shared, 3)));
    assert_eq!(found(range(30, 30)), Some((range(30, 39), Exclusive, 4)));
    // After a partial unlock the rest is reported, even while a call of its owner blocks.
    locks.unlock(1, by(4), range(30, 34)).unwrap();
    let busy = locks.known(1, 4).unwrap();
    let _call = lock(&busy.state);
    assert_eq!((found(range(30, 34)), found(range(30, 50))), (None, Some((range(35, 39), Exclusive, 4))));
}

#[test]
fn a_forked_child_inherits_no_locks() {
    let path = std::env::temp_dir().join(format!("onehop-serve-locks-{}", std::process::id()));
    let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
    let (file, other) = (open(), open());
    let all = Arc::new(Persons::default().shares(64));
    let owned = |file| Owned::of(file, true, RangeCount::new(&all, 1000));
    let mut first = owned(file);
    // As after `fork`: the open file has another descriptor.
    let inherited = first.file.try_clone().unwrap();
    assert!(lock_range(&first.file, LockRange::WHOLE, Some(LockKind::Exclusive)).unwrap());
    assert!(first.flock(LockKind::Exclusive).unwrap());
    let mut second = owned(other);
    assert!(!lock_range(&second.file, LockRange::WHOLE, Some(LockKind::Shared)).unwrap());
    assert!(!second.flock(LockKind::Shared).unwrap());
    drop(first);
    assert!(lock_range(&second.file, LockRange::WHOLE, Some(LockKind::Exclusive)).unwrap());
    assert!(second.flock(LockKind::Exclusive).unwrap());
    drop(inherited);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_lock_lost_in_a_conversion_is_not_shown() {
    use LockKind::{Exclusive, Shared};
    let of = TestFile::new("lost");
    let ((_, open), all) = (of.open(1), Arc::new(Persons::default().shares(64)));
    let mut ours = Owned::of(of.plain(), true, RangeCount::new(&all, 1000));
    assert_eq!(ours.lock(&open, LockRange::WHOLE, Shared), Ok(true));
    // The kernel releases the first lock before it tries for the second. A program outside the mount gets in between.
    flock(&ours.file, FlockOperation::Unlock).unwrap();
    let foreign = of.plain();
    flock(&foreign, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(ours.lock(&open, LockRange::WHOLE, Exclusive), Ok(false));
    assert_eq!((ours.ranges.len(), all.taken()), (0, 0));
}

#[test]
fn locked_ranges_are_limited_per_person() {
    use LockKind::{Exclusive, Shared};
    let (of, locks) = (TestFile::new("ranges"), Locks::new(1 << 10, &Persons::default()));
    let user = rustix::process::geteuid().as_raw() + 1;
    let files = [of.open(1), of.open(2)];
    let by = |owner: u64, uid| LockRequester { owner, handle: files[owner as usize % 2].0, uid, pid: 0 };
    let lock = |owner: u64, uid, at: u64, kind| {
        let (_, open) = &files[owner as usize % 2];
        locks.lock(open, by(owner, uid), range(4 * at, 4 * at + 2), kind)
    };
    let most_of_an_owner = MAX_RANGES as u64;
    for owner in 0..MAX_PER_PERSON / most_of_an_owner {
        assert!((0..most_of_an_owner).all(|at| lock(owner, user, at, Shared) == Ok(true)));
        assert_eq!(lock(owner, user, most_of_an_owner, Shared), Err(Errno::NOLCK));
    }
    assert_eq!(locks.ranges.taken_by(user), MAX_PER_PERSON);
    // Neither a further range nor one that is split. Replacing a range adds none, and unlocking makes room.
    assert_eq!(lock(901, user, 0, Shared), Err(Errno::NOLCK));
    assert_eq!(locks.unlock(1, by(0, user), range(5, 5)), Err(Errno::NOLCK));
    assert_eq!((lock(0, user, 0, Exclusive), lock(0, user, 0, Shared)), (Ok(false), Ok(true)));
    locks.unlock(1, by(0, user), range(0, 3)).unwrap();
    assert_eq!((lock(901, user, 0, Shared), lock(901, user, 9, Shared)), (Ok(true), Err(Errno::NOLCK)));
    // The limit is per person.
    assert_eq!(lock(900, user + 1, 0, Shared), Ok(true));
    for (_, open) in &files {
        locks.release(&locks.closed(open.inode, files[open.inode as usize - 1].0));
    }
    assert_eq!((locks.ranges.taken(), locks.shares.taken()), (0, 0));
}
