//! Loads of several ranks, each with an emulated GPU of its own: all bytes, read once; and what happens when one of them
//! fails, differs, or never comes. Most ranks are threads here; the one that is killed is a process.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_gpu::{Emulated, Gpu};
use onehop_load::engine::{Account, Arena, Options, Prepared, RingEngine, Route, slot_in_group};
use onehop_load::group::Group;
use onehop_load::stream::Stream;
use onehop_load::{Error, Local, Model, Plan, Selection, plan};

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::engine::{Folder, bytes_of, matrices, model};

const SIZES: [usize; 8] = [9 << 20, 1, 4096, 777, 3 << 20, 0, 12_345, 5 << 20 | 3];
/// Time limit for what a failure of one rank makes of the others.
const SOON: Duration = Duration::from_secs(10);

/// A name that no other test uses.
fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// What one rank does.
#[derive(Clone)]
struct Rank {
    path: PathBuf,
    selection: Selection,
    cuts: Vec<String>,
    options: Options,
    /// Whether its memory can be opened by others.
    is_shared: bool,
    /// Ends the load.
    stop: Arc<AtomicBool>,
}

type Loaded = (Vec<(String, Vec<u8>)>, Account);

impl Rank {
    fn of(path: &Path) -> Self {
        let options = Options { slot: Some(64 << 10), threads: Some(2), ..Options::default() };
        let (path, selection, cuts) = (path.into(), Selection::default(), Vec::new());
        Self { path, selection, cuts, options, is_shared: true, stop: Arc::default() }
    }

    /// Starts to load, and stops when `until` says so with the bytes that have been read.
    fn start(&self, group: &Group, until: fn(u64) -> bool) -> Result<Stream<RingEngine>, Error> {
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let model = Model::open(&Local, std::slice::from_ref(&self.path))?;
        let plan = Plan::new(&model, &self.selection, plan::PlanOptions::ring())?;
        let slot = slot_in_group(&plan, &model.files, &self.options, group.size());
        let go_on = || !self.stop.load(Ordering::Acquire);
        let met = group.meet(&plan, &model.files, &self.cuts, slot, &go_on)?;
        let mut prepared = Prepared::for_group(&plan, &model.files, &self.options, Arc::default(), met)?;
        if !self.is_shared {
            prepared = prepared.into_arenas(vec![Arena::new(&*gpu, &plan)?]);
        }
        let mut engine = RingEngine::start_in_group(&gpu, &plan, prepared)?;
        engine.watch(move |read| !until(read));
        Ok(Stream::new(plan, engine))
    }

    fn load(&self, group: &Group) -> Result<Loaded, Error> {
        self.load_until(group, |_| false)
    }

    fn load_until(&self, group: &Group, until: fn(u64) -> bool) -> Result<Loaded, Error> {
        let mut stream = self.start(group, until)?;
        let mut tensors = Vec::new();
        while let Some(streamed) = stream.next()? {
            tensors.push((streamed.tensor.name.clone(), bytes_of(streamed.arena, streamed.tensor)));
        }
        stream.engine_mut().wait_for_group()?;
        let account = stream.engine().account();
        let (plan, arena) = stream.finish()?;
        // What others have written must not change what was there.
        for placed in &plan.tensors {
            let before = tensors.iter().find(|(name, _)| *name == placed.name).unwrap();
            assert!(bytes_of(&arena, placed) == before.1, "{}", placed.name);
        }
        Ok((tensors, account))
    }
}

/// Loads with all ranks at once.
fn load(ranks: &[Rank]) -> Vec<Result<Loaded, Error>> {
    let name = name();
    let size = ranks.len();
    std::thread::scope(|scope| {
        let start = |(rank, what): (usize, &Rank)| {
            let group = Group::new(&name, rank, size).unwrap().waiting_for(SOON);
            let what = what.clone();
            scope.spawn(move || what.load(&group))
        };
        let ranks: Vec<_> = ranks.iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn check(mut got: Vec<(String, Vec<u8>)>, mut want: Vec<(String, Vec<u8>)>) {
    got.sort();
    want.sort();
    let names = |list: &[(String, Vec<u8>)]| list.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&got), names(&want));
    assert!(got == want);
}

fn read(loaded: &[Loaded]) -> u64 {
    loaded.iter().map(|(_, account)| account.read_bytes()).sum()
}

#[test]
fn ranks_that_need_all_read_each_byte_once() {
    let folder = Folder::new("ranks-all");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let bytes = std::fs::metadata(&path).unwrap().len();
    for (size, route) in
        [(1, Route::Auto), (2, Route::Auto), (4, Route::Auto), (3, Route::Cached), (2, Route::Pinned)]
    {
        let mut rank = Rank::of(&path);
        rank.options.route = route;
        let loaded: Result<Vec<Loaded>, Error> = load(&vec![rank; size]).into_iter().collect();
        let loaded = match loaded {
            Err(Error::Rank { why, .. } | Error::NotDirect { why, .. }) if route == Route::Pinned => {
                println!("SKIP: {why}");
                continue;
            }
            loaded => loaded.unwrap(),
        };
        // Whole blocks are read, of which the first chunk has a part more.
        let once = read(&loaded);
        assert!((bytes - 8192..=bytes + 8192 * size as u64).contains(&once), "{size} read {once} of {bytes}");
        for (rank, (got, account)) in loaded.into_iter().enumerate() {
            let group = account.group.as_ref().unwrap();
            assert_eq!((group.rank, group.size, group.way), (rank, size, "peer"));
            let moved = (group.passed_bytes > 0, group.received_bytes > 0);
            assert_eq!(moved, (size > 1, size > 1), "{group:?}");
            check(got, tensors.clone());
        }
    }
}

#[test]
fn rows_and_columns_are_read_once() {
    let folder = Folder::new("ranks-cut");
    let path = folder.0.join("m.safetensors");
    let shapes = [("a", 600, 4096), ("norm", 1, 5000), ("b", 64, 100_000), ("c", 1000, 200)];
    let tensors = matrices(&path, &shapes);
    let bytes = std::fs::metadata(&path).unwrap().len();
    for (dimension, size) in [(0, 2), (1, 2), (1, 4), (0, 4)] {
        let ranks: Vec<Rank> = (0..size)
            .map(|rank| {
                let mut one = Rank::of(&path);
                for pattern in ["a", "b", "c"] {
                    one.selection = one.selection.cut(pattern, dimension);
                    one.cuts.push(format!("{pattern}={dimension} of {size}"));
                }
                one.selection = one.selection.rank(rank as u64, size as u64).unwrap();
                one
            })
            .collect();
        let loaded: Result<Vec<Loaded>, Error> = load(&ranks).into_iter().collect();
        let loaded = loaded.unwrap();
        let once = read(&loaded);
        let blocks = 8192 * 8 * size as u64;
        assert!(once <= bytes + blocks, "cut {dimension} of {size}: {once} of {bytes} bytes were read");
        for (rank, (got, _)) in loaded.into_iter().enumerate() {
            let part = |(name, data): &(String, Vec<u8>)| {
                let (_, rows, columns) = *shapes.iter().find(|shape| shape.0 == *name).unwrap();
                let data = match (&**name, dimension) {
                    ("norm", _) => data.clone(),
                    (_, 0) => data[rank * rows / size * columns..(rank + 1) * rows / size * columns].to_vec(),
                    _ => {
                        let within = rank * columns / size..(rank + 1) * columns / size;
                        data.chunks_exact(columns).flat_map(|row| &row[within.clone()]).copied().collect()
                    }
                };
                (name.clone(), data)
            };
            check(got, tensors.iter().map(part).collect());
        }
    }
}

/// Plans that do not fit into a socket, which both ranks send before they receive.
#[test]
fn ranks_with_long_plans_meet() {
    let folder = Folder::new("ranks-plans");
    let path = folder.0.join("m.safetensors");
    let names: Vec<String> = (0..12_000).map(|i| format!("n{i:05}")).collect();
    let tensors = matrices(&path, &names.iter().map(|name| (&**name, 2, 32)).collect::<Vec<_>>());
    let rank = |rank| {
        let mut one = Rank::of(&path);
        one.selection = one.selection.cut("n*", 1).rank(rank, 2).unwrap();
        one
    };
    for (rank, loaded) in load(&[rank(0), rank(1)]).into_iter().enumerate() {
        let half = |(name, data): &(String, Vec<u8>)| {
            let rows = data.chunks_exact(32).flat_map(|row| &row[rank * 16..rank * 16 + 16]);
            (name.clone(), rows.copied().collect())
        };
        check(loaded.unwrap().0, tensors.iter().map(half).collect());
    }
}

#[test]
fn each_rank_gets_what_it_selects() {
    let folder = Folder::new("ranks-select");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let (mut few, all) = (Rank::of(&path), Rank::of(&path));
    few.selection = few.selection.only("t0").only("t6");
    let mut loaded = load(&[few, all]).into_iter().map(Result::unwrap);
    let (got, account) = loaded.next().unwrap();
    let wanted = tensors.iter().filter(|(name, _)| name == "t0" || name == "t6").cloned().collect();
    check(got, wanted);
    // Nobody else can read what it alone does not need.
    assert!(account.read_bytes() <= (9 << 20) + (1 << 17), "{account:?}");
    check(loaded.next().unwrap().0, tensors);
}

#[test]
fn ranks_that_do_not_reach_each_other_load_alone() {
    let folder = Folder::new("ranks-alone");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let mut unshared = Rank::of(&path);
    unshared.is_shared = false;
    for loaded in load(&[Rank::of(&path), unshared]) {
        let (got, account) = loaded.unwrap();
        check(got, tensors.clone());
        let group = account.group.unwrap();
        assert_eq!((group.way, group.passed_bytes, group.received_bytes), ("alone", 0, 0));
        let why = group.why_alone.unwrap();
        assert!(why.contains("rank 1 cannot share"), "{why}");
    }
}

#[test]
fn ranks_that_disagree_are_told_before_a_byte_moves() {
    let folder = Folder::new("ranks-differ");
    let (one, other) = (folder.0.join("m.safetensors"), folder.0.join("n.safetensors"));
    model(&one, &SIZES);
    model(&other, &SIZES[..7]);
    let copy = folder.0.join("copy.safetensors");
    std::fs::copy(&one, &copy).unwrap();
    let mut cut = Rank::of(&one);
    cut.cuts = vec!["t*=0 of 2".into()];
    for (ranks, expected) in [
        ([Rank::of(&one), Rank::of(&other)], "bytes here"),
        ([Rank::of(&one), Rank::of(&copy)], "not the same file"),
        ([Rank::of(&one), cut], "t*=0 of 2"),
    ] {
        for (rank, loaded) in load(&ranks).into_iter().enumerate() {
            let text = loaded.unwrap_err().to_string();
            assert!(text.contains(expected), "rank {rank}: {text}");
            assert!(text.contains(&format!("rank {}", 1 - rank)), "{text}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_waited_for_and_named() {
    let folder = Folder::new("ranks-absent");
    let path = folder.0.join("m.safetensors");
    model(&path, &SIZES);
    let name = name();
    for (rank, missing) in [(0, "ranks 1, 2"), (1, "ranks 0, 2"), (2, "ranks 0, 1")] {
        let group = Group::new(&name, rank, 3).unwrap().waiting_for(Duration::from_millis(300));
        let start = Instant::now();
        let text = Rank::of(&path).load(&group).unwrap_err().to_string();
        assert!(text.contains(missing) && text.contains("ONEHOP_GROUP_TIMEOUT"), "{text}");
        assert!(start.elapsed() < SOON);
    }
}

#[test]
fn a_second_group_of_the_same_name_is_refused() {
    let folder = Folder::new("ranks-name");
    let path = folder.0.join("m.safetensors");
    model(&path, &SIZES);
    let name = name();
    let group = |rank, size| Group::new(&name, rank, size).unwrap().waiting_for(SOON);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Rank::of(&path).load(&group(0, 2)));
        std::thread::sleep(Duration::from_millis(200));
        let second = Rank::of(&path).load(&group(0, 2)).unwrap_err().to_string();
        assert!(second.contains("is rank 0 of a group of this name"), "{second}");
        // The first one goes on.
        Rank::of(&path).load(&group(1, 2)).unwrap();
        first.join().unwrap().unwrap();
    });
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Rank::of(&path).load(&group(0, 2)));
        let second = Rank::of(&path).load(&group(1, 3)).unwrap_err().to_string();
        let first = first.join().unwrap().unwrap_err().to_string();
        for text in [first, second] {
            assert!(text.contains("3 ranks") && text.contains('2'), "{text}");
        }
    });
}

#[test]
fn names_and_ranks_that_make_no_sense_are_refused() {
    for (name, rank, size) in [("", 0, 1), ("a/b", 0, 1), ("a", 1, 1), ("a", 0, 0), ("a", 0, 65)] {
        assert!(matches!(Group::new(name, rank, size), Err(Error::Group { .. })), "{name} {rank} {size}");
    }
    assert!(Group::new(&"n".repeat(65), 0, 1).is_err());
}

/// A model large enough to be stopped in the middle.
fn long_model(folder: &Folder) -> PathBuf {
    let path = folder.0.join("long.safetensors");
    model(&path, &[32 << 20; 6]);
    path
}

#[test]
fn a_rank_that_is_cancelled_ends_the_others() {
    let folder = Folder::new("ranks-cancel");
    let path = long_model(&folder);
    let name = name();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let path = &path;
        let other = |rank: usize| {
            let group = Group::new(&name, rank, 3).unwrap().waiting_for(SOON);
            scope.spawn(move || Rank::of(path).load(&group))
        };
        let others = [other(0), other(2)];
        let group = Group::new(&name, 1, 3).unwrap().waiting_for(SOON);
        let cancelled = Rank::of(path).load_until(&group, |read| read > 1 << 20);
        assert!(matches!(cancelled, Err(Error::Cancelled)), "{:?}", cancelled.map(|loaded| loaded.1));
        for other in others {
            let text = other.join().unwrap().unwrap_err().to_string();
            assert!(text.contains("rank ") && text.contains("cancelled"), "{text}");
        }
    });
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

/// The variables of a rank that is a process of its own: the group's name, its rank, and the model.
const CHILD: &str = "ONEHOP_TEST_RANK";

fn child(name: &str, rank: usize, size: usize, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["ranks::the_process_of_a_rank", "--exact", "--nocapture"]);
    command.env(CHILD, format!("{name}|{rank}|{size}|{}", path.display())).stdout(Stdio::null());
    command
}

/// Set for a rank that ends right after it has met the others, and leaves a child that has its connections.
const STAYS: &str = "ONEHOP_TEST_RANK_STAYS";

/// Nothing when it runs by itself.
#[test]
fn the_process_of_a_rank() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let mut words = text.split('|');
    let mut next = || words.next().unwrap();
    let (name, rank, size, path) = (next(), next().parse().unwrap(), next().parse().unwrap(), next());
    let group = Group::new(name, rank, size).unwrap().waiting_for(SOON);
    let rank = Rank::of(Path::new(path));
    if std::env::var_os(STAYS).is_some() {
        let model = Model::open(&Local, std::slice::from_ref(&rank.path)).unwrap();
        let plan = Plan::new(&model, &rank.selection, plan::PlanOptions::ring()).unwrap();
        let _met = group.meet(&plan, &model.files, &[], 64 << 10, &|| true).unwrap();
        let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let sockets = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| {
            let path = fd.unwrap().path();
            let is_socket = std::fs::read_link(&path).ok()?.to_string_lossy().starts_with("socket:");
            let number = path.file_name()?.to_string_lossy().parse().ok()?;
            is_socket.then(|| pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).unwrap())
        });
        // It gets this process's connection, as a child without exec does.
        let mut sleeps = Command::new("sleep");
        sleeps.arg("20").stdout(Stdio::null());
        let sockets: Vec<_> = sockets.collect();
        let [socket] = &sockets[..] else { panic!("{} sockets", sockets.len()) };
        sleeps.stdin(Stdio::from(socket.try_clone().unwrap())).spawn().unwrap();
        std::process::abort();
    }
    rank.load(&group).unwrap();
}

#[test]
fn a_rank_that_leaves_while_a_third_is_waited_for_ends_the_others() {
    let folder = Folder::new("ranks-third");
    let path = folder.0.join("m.safetensors");
    model(&path, &SIZES);
    for leaves in [0, 1] {
        let name = name();
        let group = &|rank| Group::new(&name, rank, 3).unwrap().waiting_for(Duration::from_secs(60));
        let start = Instant::now();
        std::thread::scope(|scope| {
            let left = Rank::of(&path);
            let stop = left.stop.clone();
            let left = scope.spawn(move || left.load(&group(leaves)));
            let stays = scope.spawn(|| Rank::of(&path).load(&group(1 - leaves)));
            std::thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Release);
            assert!(matches!(left.join().unwrap(), Err(Error::Cancelled)));
            let text = stays.join().unwrap().unwrap_err().to_string();
            assert!(text.contains(&format!("rank {leaves} ")) && text.contains("cancelled"), "{text}");
        });
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    }
}

#[test]
fn a_rank_that_declines_is_not_waited_for() {
    let folder = Folder::new("ranks-declines");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    for declines in [0, 1, 2] {
        let name = name();
        let group = &|rank| Group::new(&name, rank, 3).unwrap().waiting_for(Duration::from_secs(60));
        let path = &path;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let others: Vec<_> = (0..3)
                .filter(|rank| *rank != declines)
                .map(|rank| scope.spawn(move || (rank, Rank::of(path).load(&group(rank)))))
                .collect();
            group(declines).decline("there is no such file");
            for other in others {
                let (rank, loaded) = other.join().unwrap();
                let text = loaded.unwrap_err().to_string();
                assert!(text.contains(&format!("rank {declines} ")), "rank {rank}: {text}");
                assert!(text.contains("no such file"), "rank {rank}: {text}");
            }
        });
        // The next load does not fail because of it.
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                (0..3).map(|rank| scope.spawn(move || Rank::of(path).load(&group(rank)))).collect();
            ranks.into_iter().for_each(|rank| check(rank.join().unwrap().unwrap().0, tensors.clone()));
        });
        assert!(start.elapsed() < 2 * SOON, "{:?}", start.elapsed());
    }
}

#[test]
fn a_rank_that_is_killed_ends_the_others() {
    let folder = Folder::new("ranks-killed");
    let path = long_model(&folder);
    for millis in [0, 20, 60, 120, 250, 400] {
        let name = name();
        let group = Group::new(&name, 0, 2).unwrap().waiting_for(Duration::from_secs(2));
        let start = Instant::now();
        let mut process = child(&name, 1, 2, &path).stderr(Stdio::null()).spawn().unwrap();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(millis));
            process.kill().unwrap();
            process.wait().unwrap();
        });
        let loaded = Rank::of(&path).load(&group);
        killer.join().unwrap();
        // It may have been done, or have been killed before it came.
        match loaded {
            Ok((_, account)) => println!("after {millis} ms it was done: {account:?}"),
            Err(error) => {
                let text = error.to_string();
                println!("after {millis} ms: {text}");
                assert!(text.contains("rank 1"), "{text}");
            }
        }
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        // Nothing is left behind that the next load of this name would find.
        let mut process = child(&name, 1, 2, &path).spawn().unwrap();
        Rank::of(&path).load(&group.waiting_for(SOON)).unwrap();
        assert!(process.wait().unwrap().success());
    }
}

#[test]
fn processes_load_together() {
    let folder = Folder::new("ranks-processes");
    let path = folder.0.join("m.safetensors");
    model(&path, &SIZES);
    let name = name();
    let mut others: Vec<_> = (1..4).map(|rank| child(&name, rank, 4, &path).spawn().unwrap()).collect();
    let group = Group::new(&name, 0, 4).unwrap().waiting_for(SOON);
    Rank::of(&path).load(&group).unwrap();
    for other in &mut others {
        assert!(other.wait().unwrap().success());
    }
}

/// A rank that was killed is noticed even where a child of it still has its connections.
#[test]
fn a_child_of_a_killed_rank_holds_nobody_up() {
    let folder = Folder::new("ranks-child");
    let path = folder.0.join("m.safetensors");
    model(&path, &SIZES);
    let name = name();
    let group = Group::new(&name, 0, 2).unwrap().waiting_for(SOON);
    let mut process = child(&name, 1, 2, &path);
    process.env(STAYS, "1").stderr(Stdio::null());
    let mut process = process.spawn().unwrap();
    let start = Instant::now();
    let text = Rank::of(&path).load(&group).unwrap_err().to_string();
    assert!(text.contains("rank 1") && text.contains("ended"), "{text}");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    process.wait().unwrap();
}
