//! An ordinary user who uses up files, folders, names, syncs and semaphores, which must not affect other users.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant, SystemTime};

use onehop_target::client::{self, RemoteTree};
use onehop_target::tcp::TcpConnector;
use onehop_target::tree::Tree;
use onehop_target::wire::{Caller, OpenMode, ROOT};
use onehop_usrbio::buffer::Ring;
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::{Id, Name, Priority, RingName, SHM};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, attack_time, run, skipped, subtest, subtest_dir};
use crate::clock::Attack;
use crate::hung_fs::Mounted;
use crate::processes::KilledOnDrop;

/// The descriptor limit of a daemon or a target.
const DESCRIPTORS: u64 = 1200;
/// The number of names in the large folder.
const NAMES: usize = 6_000;

/// A daemon in its own process with a low descriptor limit. It mounts a folder, or a target with the same limit.
pub struct SmallDaemon {
    pub bed: Bed,
    daemon: KilledOnDrop,
    target: Option<KilledOnDrop>,
}

impl SmallDaemon {
    pub fn start(of_target: bool) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped("only root can be two users");
            return None;
        }
        let bed = Bed::folder();
        std::fs::create_dir(bed.dir.join("root/many")).unwrap();
        for number in 0..NAMES {
            File::create(bed.dir.join(format!("root/many/a name of some length {number:05}"))).unwrap();
        }
        let (target, address) =
            of_target.then(|| KilledOnDrop::target_with(&bed, "127.0.0.1:0", DESCRIPTORS)).unzip();
        let address = address.map(|address: String| address.parse().unwrap());
        let daemon = KilledOnDrop::daemon_with(&bed, address, DESCRIPTORS)?;
        Some(Self { bed, daemon, target })
    }

    /// The open descriptors of the daemon or its target, whichever has more.
    fn descriptors(&self) -> usize {
        let of = |process: &KilledOnDrop| {
            std::fs::read_dir(format!("/proc/{}/fd", process.0.id())).unwrap().count()
        };
        of(&self.daemon).max(self.target.as_ref().map_or(0, of))
    }

    /// The CPU time of the daemon.
    fn cpu_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.daemon.0.id())).unwrap();
        let behind_name = stat.rsplit(')').next().unwrap();
        let ticks =
            behind_name.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap());
        // Linux reports hundredths of a second on every machine.
        Duration::from_millis(ticks.sum::<u64>() * 10)
    }

    /// The daemon's memory in bytes.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

/// An attacker in their own process, who keeps all resources until this is dropped.
struct Attacker(Child);

impl Attacker {
    /// Starts one, and waits until it has all the resources it can get.
    fn start(name: &str, bed: &Bed) -> Self {
        Self::of(subtest(name, bed))
    }

    /// As [`Self::start`], with any program.
    fn of(mut program: std::process::Command) -> Self {
        let child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut this = Self(child);
        let mut stdout = String::new();
        let out = this.0.stdout.as_mut().unwrap();
        while !stdout.contains("holding") {
            let mut bytes = [0; 256];
            let count = out.read(&mut bytes).unwrap();
            assert_ne!(count, 0, "{stdout}");
            stdout.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        this
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let start = Instant::now();
        while self.0.try_wait().unwrap().is_none() {
            if start.elapsed() > LONG {
                let _ = self.0.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// In that process: keeps everything until the test is done.
fn hold<T>(held: T) {
    println!("holding");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    drop(held);
}

/// Raises this process's descriptor limit to the maximum.
pub fn raise_descriptor_limit() {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
}

/// Run as another user while an attacker holds all resources: ordinary operations work.
#[test]
fn bystander() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER + 1, &[]);
    let mount = dir.join("mnt");
    let files: Vec<_> = (0..20).map(|_| File::open(mount.join("file.bin")).unwrap()).collect();
    for file in &files {
        file.read_exact_at(&mut [0; 4096], 0).unwrap();
    }
    assert_eq!(std::fs::read_dir(mount.join("many")).unwrap().count(), NAMES);
    let mine = mount.join("folder/mine");
    std::fs::write(&mine, "mine").unwrap();
    assert_eq!(std::fs::read(&mine).unwrap(), b"mine");
    std::fs::remove_file(mine).unwrap();
}

/// Checks that other users are not affected.
fn check_bystander(bed: &Bed) {
    run(subtest("exhaustion::bystander", bed));
}

/// Opens until an error; returns it.
fn open_all<T>(open: impl Fn() -> std::io::Result<T>) -> (Vec<T>, std::io::Error) {
    let mut held = Vec::new();
    loop {
        match open() {
            Ok(file) => held.push(file),
            Err(error) => return (held, error),
        }
    }
}

/// Run by [`open_files_are_limited_per_user`].
#[test]
fn file_opener() {
    let Some(dir) = subtest_dir() else { return };
    raise_descriptor_limit();
    become_user(ATTACKER, &[]);
    let file = dir.join("mnt/file.bin");
    let (held, error) = open_all(|| File::open(&file));
    assert_eq!(error.raw_os_error(), Some(Errno::MFILE.raw_os_error()), "{error}");
    let made = File::create(dir.join("mnt/folder/never")).unwrap_err();
    assert_eq!(made.raw_os_error(), Some(Errno::MFILE.raw_os_error()), "{made}");
    hold(held);
}

#[test]
fn open_files_are_limited_per_user() {
    let _attack = Attack::begin();
    let Some(small) = SmallDaemon::start(false) else { return };
    make_folder_writable(&small.bed);
    let attacker = Attacker::start("exhaustion::file_opener", &small.bed);
    check_bystander(&small.bed);
    assert!(!small.bed.dir.join("root/folder/never").exists());
    drop(attacker);
    drop(Attacker::start("exhaustion::file_opener", &small.bed));
}

/// Makes `root/folder` writable for all users.
pub fn make_folder_writable(bed: &Bed) {
    std::fs::set_permissions(bed.dir.join("root/folder"), Permissions::from_mode(0o777)).unwrap();
}

/// Run by [`known_names_use_no_descriptors`].
#[test]
fn name_watcher() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let many = dir.join("mnt/many");
    // Watched, so that the kernel keeps them.
    let watch = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).unwrap();
    let mut found = 0;
    for entry in std::fs::read_dir(many).unwrap() {
        let path = entry.unwrap().path();
        rustix::fs::inotify::add_watch(&watch, &path, rustix::fs::inotify::WatchFlags::DELETE_SELF).unwrap();
        found += 1;
    }
    assert_eq!(found, NAMES);
    hold(watch);
}

#[test]
fn known_names_use_no_descriptors() {
    let _attack = Attack::begin();
    for of_target in [false, true] {
        let Some(small) = SmallDaemon::start(of_target) else { return };
        make_folder_writable(&small.bed);
        let attacker = Attacker::start("exhaustion::name_watcher", &small.bed);
        assert!(small.descriptors() < DESCRIPTORS as usize / 2, "{} descriptors", small.descriptors());
        check_bystander(&small.bed);
        drop(attacker);
    }
}

/// Run by [`open_folders_use_little_memory`].
#[test]
fn folder_opener() {
    let Some(dir) = subtest_dir() else { return };
    raise_descriptor_limit();
    become_user(ATTACKER, &[]);
    let many = dir.join("mnt/many");
    let (held, error) = open_all(|| {
        let mut folder = rustix::fs::Dir::new(File::open(&many)?)?;
        // Further names are not read yet.
        folder.next().unwrap()?;
        Ok(folder)
    });
    assert_eq!(error.raw_os_error(), Some(Errno::MFILE.raw_os_error()), "{error}");
    assert!(held.len() > 1000, "{} folders", held.len());
    hold(held);
}

#[test]
fn open_folders_use_little_memory() {
    let _attack = Attack::begin();
    let Some(small) = SmallDaemon::start(false) else { return };
    make_folder_writable(&small.bed);
    check_bystander(&small.bed);
    let before = small.memory();
    let attacker = Attacker::start("exhaustion::folder_opener", &small.bed);
    check_bystander(&small.bed);
    let more = small.memory().saturating_sub(before);
    println!("{more} bytes more");
    assert!(more < 100 << 20, "{more} bytes");
    drop(attacker);
}

/// More syncs than a user's thread limit.
const SYNCS: usize = 40;

/// Run by [`hung_syncs_do_not_delay_other_users`]: syncs on a file system that does not answer.
#[test]
fn syncer() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let all = Barrier::new(SYNCS + 1);
    std::thread::scope(|scope| {
        for number in 0..SYNCS {
            let file = File::open(dir.join("mnt/stuck").join(number.to_string())).unwrap();
            let all = &all;
            scope.spawn(move || {
                all.wait();
                // Fails when the mount gives up on the file system.
                let _ = file.sync_all();
            });
        }
        all.wait();
        // Lets the calls reach the kernel.
        std::thread::sleep(Duration::from_millis(100));
        hold(());
    });
}

#[test]
fn hung_syncs_do_not_delay_other_users() {
    let _attack = Attack::begin();
    for of_target in [false, true] {
        let Some(small) = SmallDaemon::start(of_target) else { return };
        make_folder_writable(&small.bed);
        let Some(stuck) = Mounted::new(&small.bed.dir.join("root/stuck")) else { return };
        stuck.syncs.set(true);
        let attacker = Attacker::start("exhaustion::syncer", &small.bed);
        let begun = Instant::now();
        while !stuck.syncs.holds_a_request() {
            assert!(begun.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(2));
        }
        check_bystander(&small.bed);
        stuck.syncs.set(false);
        drop(attacker);
    }
}

/// How long the attack runs.
const ATTACK: Duration = Duration::from_secs(3);

/// The user's semaphores.
fn semaphores(mount: &Path) -> Vec<PathBuf> {
    let links = std::fs::read_dir(mount.join("3fs-virt/iovs")).unwrap().map(|entry| entry.unwrap().path());
    let all = links.filter(|path| path.to_string_lossy().contains("submit-ios"));
    all.map(|path| std::fs::read_link(path).unwrap()).collect()
}

/// Run by [`posted_semaphores_cost_little_cpu_time`]: posts without submissions, again and again.
#[test]
fn poster() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    // With a ring, threads wait for the semaphore.
    let _ring = crate::mixed_io::Writer::new(&dir, 4096);
    let open = |path| File::options().write(true).open(path).unwrap();
    let files: Vec<_> = semaphores(&dir.join("mnt")).into_iter().map(open).collect();
    assert!(!files.is_empty());
    let start = Instant::now();
    while start.elapsed() < attack_time(ATTACK) {
        for file in &files {
            file.write_all_at(&i32::MAX.to_le_bytes(), 0).unwrap();
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Run by [`posted_semaphores_cost_little_cpu_time`]: each of many users reads the links.
#[test]
fn link_readers() {
    let Some(dir) = subtest_dir() else { return };
    for uid in 0..300 {
        let mount = dir.join("mnt");
        let user = std::thread::spawn(move || {
            become_user(30_000 + uid, &[]);
            semaphores(&mount)
        });
        user.join().unwrap();
    }
}

/// Run by [`posted_semaphores_cost_little_cpu_time`]: a new user uses a ring.
#[test]
fn newcomer() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER + 2, &[]);
    let file =
        File::options().read(true).write(true).create(true).truncate(true).open(dir.join("mnt/folder/ring"));
    assert_eq!(crate::mixed_io::Writer::new(&dir, 4096).write(&file.unwrap()), 4096);
}

/// This thread's CPU time.
fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn posted_semaphores_cost_little_cpu_time() {
    let _attack = Attack::begin();
    let Some(small) = SmallDaemon::start(false) else { return };
    make_folder_writable(&small.bed);
    let before = small.cpu_time();
    let attack = subtest("exhaustion::poster", &small.bed);
    let busy = std::thread::scope(|scope| {
        let (attack, start) = (scope.spawn(|| run(attack)), thread_cpu_time());
        // Measures what a busy thread gets on this machine.
        while !attack.is_finished() {
            std::hint::spin_loop();
        }
        attack.join().unwrap();
        thread_cpu_time() - start
    });
    let took = small.cpu_time() - before;
    println!("{took:?} of CPU time, a busy thread had {busy:?}");
    assert!(took < busy / 2, "{took:?} of CPU time, a busy thread had {busy:?}");
    run(subtest("exhaustion::link_readers", &small.bed));
    run(subtest("exhaustion::newcomer", &small.bed));
}

/// The owner of leases: opens the leased files through the mount in every way, from many threads, and releases the
/// leases at the end of stdin.
const LEASES: &str = "
import fcntl, os, signal, sys, threading
below, through, uid = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
signal.signal(signal.SIGIO, signal.SIG_IGN)
held, ends = [], []
def lease(name):
    held.append(os.open(f'{below}/{name}', os.O_CREAT | os.O_RDWR, 0o600))
    fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
def use(number):
    path = f'{through}/{number}'
    try:
        if number % 3 == 0: os.close(os.open(path, os.O_RDONLY))
        elif number % 3 == 1: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        else: os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        ends.append('well')
    except OSError as e: ends.append(str(e))
for number in range(40): lease(number)
try: os.open(f'{through}/0', os.O_RDONLY | os.O_NONBLOCK)
except BlockingIOError: pass
else: raise SystemExit('a lease has no effect')
try: os.truncate(f'{through}/1', 0)
except BlockingIOError: pass
else: raise SystemExit('a lease does not block truncate')
threads = [threading.Thread(target=use, args=(n,)) for n in range(40)]
for t in threads: t.start()
signal.sigtimedwait([signal.SIGUSR1], 0.7)
assert not ends, ends
print('holding', flush=True)
sys.stdin.read(1)
for fd in held: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
for t in threads: t.join(20)
assert ends == ['well'] * 40, ends
";

#[test]
fn leases_do_not_delay_other_users() {
    let _attack = Attack::begin();
    let Some(small) = SmallDaemon::start(false) else { return };
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        return skipped("python3 is not installed");
    }
    make_folder_writable(&small.bed);
    let owned = small.bed.dir.join("root/owned");
    std::fs::create_dir(&owned).unwrap();
    std::os::unix::fs::chown(&owned, Some(ATTACKER), Some(ATTACKER)).unwrap();
    let mut python = std::process::Command::new("python3");
    python.args(["-c", LEASES]).arg(&owned).arg(small.bed.mount().join("owned")).arg(ATTACKER.to_string());
    let mut attacker = Attacker::of(python);
    let begun = Instant::now();
    let _ = std::fs::metadata(small.bed.mount().join("nothing"));
    check_bystander(&small.bed);
    // The kernel breaks a lease after 45 seconds.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    drop(attacker.0.stdin.take());
    let ended = attacker.0.wait().unwrap();
    assert!(ended.success() && begun.elapsed() < Duration::from_secs(40), "{ended}");
}

/// Run by [`long_requests_use_little_memory`]: reads a small file with requests of a tebibyte each into a sparse file.
#[test]
fn long_requester() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    const LONG_REQUEST: u64 = 1 << 40;
    let (mount, id) = (Arc::new(Mount::open(&dir.join("mnt")).unwrap()), Id::random().unwrap());
    let path = Path::new(SHM).join(format!("onehop-test-{id}"));
    let hole = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    hole.set_len(LONG_REQUEST).unwrap();
    mount.publish(&Name::buffer(id, 0), &path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let name =
        RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
    let ring = Ring::create(&mount, 64, name, None).unwrap();
    let file = File::open(dir.join("mnt/file.bin")).unwrap();
    let (inode, size) = (file.metadata().unwrap().ino(), file.metadata().unwrap().len());
    let request = Request { buffer: id, offset: 0, inode, at: 0, len: LONG_REQUEST, userdata: 0 };
    for turn in 0..40 {
        ring.prepare(&Request { at: turn % 2 * (1 << 30), ..request }).unwrap();
    }
    ring.submit();
    let (mut done, until) = (Vec::new(), SystemTime::now() + LONG / 2);
    ring.wait(&mut done, (40, 64), Some(until), Duration::from_millis(1)).unwrap();
    assert_eq!(done.len(), 40);
    assert_eq!(done.iter().filter(|one| one.result == size as i64).count(), 20);
    assert_eq!(done.iter().filter(|one| one.result == 0).count(), 20);
    let filled = hole.metadata().unwrap().blocks() * 512;
    assert!(filled < 16 << 20, "{filled} bytes were allocated for a file of {size}");
    hold((ring, hole));
}

#[test]
fn long_requests_use_little_memory() {
    let _attack = Attack::begin();
    let Some(small) = SmallDaemon::start(false) else { return };
    make_folder_writable(&small.bed);
    let before = small.memory();
    let attacker = Attacker::start("exhaustion::long_requester", &small.bed);
    check_bystander(&small.bed);
    // Pages that the daemon fills are shared memory, and count for it.
    let more = small.memory().saturating_sub(before);
    assert!(more < 100 << 20, "{more} bytes");
    drop(attacker);
}

#[test]
fn mounts_share_the_descriptors_of_a_target() {
    let _attack = Attack::begin();
    let bed = Bed::folder();
    std::fs::create_dir(bed.dir.join("root/many")).unwrap();
    for number in 0..400 {
        File::create(bed.dir.join(format!("root/many/{number}"))).unwrap();
    }
    let (target, address) = KilledOnDrop::target_with(&bed, "127.0.0.1:0", DESCRIPTORS);
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", target.0.id())).unwrap().count();
    let name = |text: &str| onehop_target::wire::Name::new(text.as_bytes()).unwrap();
    let reads = OpenMode { read: true, ..OpenMode::default() };
    let by = Caller::ROOT;
    let mut mounts = Vec::new();
    for number in 0..14 {
        let connector = TcpConnector::new(&address).unwrap();
        let options = client::ClientOptions { lanes: 1, ..client::ClientOptions::new(crate::target::key()) };
        let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
        let many = tree.lookup(ROOT, &name("many"), &by).unwrap().node;
        let known: Vec<_> = (0..400)
            .map(|number| tree.lookup(many, &name(&number.to_string()), &by))
            .collect::<Result<_, _>>()
            .unwrap_or_else(|error| panic!("mount {number} finds nothing: {error}"));
        let open = |known: &onehop_target::wire::Attr| tree.open(known.node, reads, &by);
        let open: Vec<_> = known.iter().map_while(|known| open(known).ok()).collect();
        // Each mount may open half of what the mounts before it have left.
        assert!(open.len() < 200 && (number > 5 || !open.is_empty()), "mount {number} opens {}", open.len());
        assert!(descriptors() < DESCRIPTORS as usize * 3 / 4, "{} descriptors", descriptors());
        mounts.push((tree, open));
    }
    // Descriptors that one mount frees are available to the others.
    mounts[0].1.clear();
    let start = Instant::now();
    let (tree, _) = mounts.last().unwrap();
    let file = tree.lookup(ROOT, &name("file.bin"), &by).unwrap().node;
    while let Err(error) = tree.open(file, reads, &by) {
        assert!(error == Errno::MFILE && start.elapsed() < LONG, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
