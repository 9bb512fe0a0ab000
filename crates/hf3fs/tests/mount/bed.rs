//! A mount in a temporary folder, and C and Python programs that use it.

use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};
use serde_json::Value;

/// The time limit of a program on a busy machine.
pub const LONG: Duration = Duration::from_secs(120);

/// How long attacks run: `usual`, or what `crates/hf3fs/hostile` was asked for.
pub fn attack_time(usual: Duration) -> Duration {
    let seconds = std::env::var("ONEHOP_TEST_SECONDS").ok().and_then(|text| text.parse().ok());
    seconds.map_or(usual, Duration::from_secs)
}

/// A test bed: a temporary folder, and the mount in it. Removed on drop.
pub struct Bed {
    pub dir: PathBuf,
    pub daemon: Option<Daemon>,
}

pub fn skipped(why: &str) {
    // Not eprintln, which is captured when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

impl Bed {
    /// A folder with a file, without a mount.
    pub fn folder() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("onehop-3fs-{}-{number}", std::process::id()));
        for name in ["root/folder", "mnt"] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        let bytes: Vec<u8> = (0..6_000_011_u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        std::fs::write(dir.join("root/file.bin"), bytes).unwrap();
        Self { dir: dir.canonicalize().unwrap(), daemon: None }
    }

    /// A mount. Without FUSE, prints that the test is skipped and returns `None`.
    pub fn start() -> Option<Self> {
        let this = Self::folder();
        let options = MountOptions::new(&this.mount(), &this.dir.join("root"));
        this.mounted(options)
    }

    /// Mounts at its mount point.
    pub fn mounted(mut self, mut options: MountOptions) -> Option<Self> {
        options.emulated_gpu = true;
        if std::fs::metadata("/dev/fuse").is_err() {
            skipped("there is no /dev/fuse");
            return None;
        }
        match Daemon::start(options) {
            Ok(daemon) => self.daemon = Some(daemon),
            Err(error @ onehop_serve::Error::Mount { .. }) => {
                skipped(&error.to_string());
                return None;
            }
            Err(error) => panic!("{error}"),
        }
        Some(self)
    }

    pub fn mount(&self) -> PathBuf {
        self.dir.join("mnt")
    }

    pub fn file(&self) -> PathBuf {
        self.mount().join("file.bin")
    }

    pub fn report(&self) -> Value {
        serde_json::from_str(&self.daemon.as_ref().unwrap().report()).unwrap()
    }

    /// Waits until the daemon's report meets a condition; panics after a timeout.
    pub fn until(&self, what: &str, is_met: impl Fn(&Value) -> bool) {
        let start = Instant::now();
        while !is_met(&self.report()) {
            assert!(start.elapsed() < LONG, "{what}: {:#}", self.report());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.end().unwrap();
        }
        // The mounts of a killed daemon.
        while rustix::mount::unmount(self.mount(), rustix::mount::UnmountFlags::DETACH).is_ok() {}
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The folder of this build's library, which is that of the tests.
pub fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    assert!(
        tests.join("libhf3fs_api_shared.so").is_file(),
        "no libhf3fs_api_shared.so in {}",
        tests.display()
    );
    tests
}

pub fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compiles a program. Without a compiler, prints that the test is skipped and returns `None`.
pub fn compile(source: &str) -> Option<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if Command::new("cc").arg("--version").output().is_err() {
        skipped("cc is not installed");
        return None;
    }
    let (library, source) = (library(), top().join(source));
    let stem = source.file_stem().unwrap().to_string_lossy().into_owned();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let program = library.join(format!("3fs-{stem}-{}-{number}", std::process::id()));
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(top().join("include"))
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .arg("-L")
        .arg(&library)
        .args(["-lhf3fs_api_shared", "-ldl"])
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// A command with an emulated GPU.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("HF3FS_GDR_ENABLED", "emulated")
        .env("HF3FS_LIB_DIR", library())
        .env_remove("HF3FS_GDR_FALLBACK");
    command.stdin(Stdio::null());
    command
}

/// A command that runs one test of this program, with the bed's folder in `ONEHOP_TEST_DIR`; without the variable, that
/// test does nothing. The process that serves a mount must not use it.
pub fn subtest(name: &str, bed: &Bed) -> Command {
    let mut program = command(&std::env::current_exe().unwrap());
    program.args(["--exact", name, "--nocapture"]).env("ONEHOP_TEST_DIR", &bed.dir);
    program
}

/// In that process: the bed's folder.
pub fn subtest_dir() -> Option<PathBuf> {
    std::env::var_os("ONEHOP_TEST_DIR").map(PathBuf::from)
}

/// Runs a program, which must succeed in time. Returns its output.
pub fn run(mut command: Command) -> String {
    // Not a pipe: nothing would read it, so a program with much output would block.
    let memory = rustix::fs::memfd_create("stderr", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut log = std::fs::File::from(memory);
    command.stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
    let output = wait(command.spawn().unwrap());
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let mut errors = Vec::new();
        log.rewind().unwrap();
        log.read_to_end(&mut errors).unwrap();
        panic!("{command:?}: {stdout}{}", String::from_utf8_lossy(&errors));
    }
    stdout
}

/// Waits for a program, and kills it after a timeout.
pub fn wait(mut child: Child) -> Output {
    let (start, limit) = (Instant::now(), LONG + attack_time(Duration::ZERO));
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > limit {
            child.kill().unwrap();
            panic!("a program did not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}
