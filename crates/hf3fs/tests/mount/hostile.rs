//! Hostile programs of an ordinary user next to an honest one: the daemon survives, and the honest program's data is
//! right.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::{Client, Request, bytes};
use onehop_usrbio::{Error, Id, Name, Priority, RingName, SHM};

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, attack_time, command, compile, wait};

/// Reproducible pseudorandom numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll() as usize % from.len()]
    }
}

fn name(dice: &mut Dice) -> RingName {
    RingName {
        read: dice.pick(&[true, false]),
        depth: dice.pick(&[0, 1, 3, -3]),
        priority: dice.pick(&Priority::ALL),
        timeout: Duration::from_millis(dice.pick(&[0, 1, 50])),
        flags: dice.pick(&[0, 2, u64::MAX]),
    }
}

/// A request with extreme values.
fn request(dice: &mut Dice, buffer: Id, inode: u64) -> Request {
    let edges = [0, 1, 4095, 4096, 65_535, 65_536, u64::MAX, u64::MAX / 2, i64::MAX as u64, 1 << 40];
    Request {
        buffer: if dice.roll().is_multiple_of(4) { Id([dice.roll() as u8; 16]) } else { buffer },
        inode: if dice.roll().is_multiple_of(4) { dice.pick(&edges) } else { inode },
        offset: dice.pick(&edges),
        at: dice.pick(&edges),
        len: dice.pick(&edges),
        userdata: dice.roll(),
    }
}

fn scribble(ring: &Ring, dice: &mut Dice) {
    let mem = ring.memory();
    for _ in 0..dice.roll() % 64 {
        let place = dice.roll() as usize % (mem.len() / 4) * 4;
        // The indices more often than the rest.
        let place = if dice.roll().is_multiple_of(3) { place % 16 } else { place };
        let value = dice.pick(&[0, 1, 5, 16, 17, u32::MAX, 0x8000_0000, dice.0 as u32]);
        mem.word(place).unwrap().store(value, Ordering::SeqCst);
    }
}

fn invalid_links(mount: &Path, dice: &mut Dice) {
    let id = Id::random().unwrap();
    let targets = [
        "/etc/passwd",
        "/dev/shm",
        "/dev/shm/nothing",
        "/dev/null",
        "",
        "relative",
        "/dev/shm/../../etc/passwd",
    ];
    let names = [
        format!("{id}.r0.t0"),
        format!("{id}"),
        format!("{id}.gdr.d0"),
        format!("{id}.b99999999999"),
        "x".into(),
        format!("{id}.r2147483647.t99999999999999999999"),
    ];
    let (name, target) = (&names[dice.roll() as usize % names.len()], dice.pick(&targets));
    assert!(symlink(target, mount.join("3fs-virt/iovs").join(name)).is_err(), "{name} -> {target}");
}

fn invalid_messages(socket: &Path, dice: &mut Dice) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, send, socket as open};
    let connection = open(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&connection, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    let mut bytes = vec![dice.roll() as u8; dice.pick(&[0, 1, 255, 256, 257, 4096])];
    if bytes.len() == 256 {
        bytes[..8].copy_from_slice(b"onehopU1");
        bytes[8..12].copy_from_slice(&dice.pick(&[1_u32, 2, 3, 4, 101]).to_le_bytes());
        bytes[12..16].copy_from_slice(&dice.pick(&[0_u32, 1, 2, 3]).to_le_bytes());
    }
    let _ = send(&connection, &bytes, rustix::net::SendFlags::NOSIGNAL);
}

/// One round of a hostile program. Any call may fail. Returns whether it truncated memory.
fn misbehave(mount: &Arc<Mount>, inode: u64, dice: &mut Dice) -> bool {
    let Ok(buffer) = Buffer::create(mount, 65_536, dice.pick(&[0, 4096]), None) else { return false };
    let Ok(ring) = Ring::create(mount, 16, name(dice), None) else { return false };
    for _ in 0..20 {
        while ring.prepare(&request(dice, buffer.id(), inode)).is_ok() {}
        ring.submit();
        if dice.roll().is_multiple_of(2) {
            scribble(&ring, dice);
            ring.submit();
        }
        let _ = ring.wait(
            &mut Vec::new(),
            (1, 100),
            Some(std::time::SystemTime::now()),
            Duration::from_millis(1),
        );
    }
    invalid_links(mount.path(), dice);
    invalid_messages(&mount.socket().unwrap(), dice);
    dice.roll().is_multiple_of(2) && truncate_memory(mount, buffer.id(), inode, dice).is_ok()
}

/// Truncates memory that the daemon has mapped: a ring full of requests, and all buffers of this user.
fn truncate_memory(mount: &Mount, buffer: Id, inode: u64, dice: &mut Dice) -> Result<(), Error> {
    let ring = name(dice);
    let submissions = mount.submissions(rustix::process::geteuid().as_raw(), ring.priority)?;
    let name = Name { ring: Some(ring), ..Name::buffer(Id::random()?, 0) };
    // Not a ring of the library, whose file is unlinked and closed once the daemon has it.
    let path = Path::new(SHM).join(format!("onehop-test-{}", name.id));
    let memory = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path).unwrap();
    memory.set_len(bytes(16).unwrap() as u64).unwrap();
    let published = mount.publish(&name, &path);
    std::fs::remove_file(&path).unwrap();
    published?;
    let client = Client::new(HostMem::of_shared(&memory).unwrap())?;
    while client.prepare(&request(dice, buffer, inode)).is_ok() {}
    // The daemon finds the memory truncated, or is using it.
    if dice.roll().is_multiple_of(2) {
        submissions.post();
    }
    for entry in std::fs::read_dir(mount.path().join("3fs-virt/iovs")).into_iter().flatten().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let is_buffer = target.to_string_lossy().contains("/dev/shm/hf3fs-iov-");
        if is_buffer && let Ok(file) = File::options().write(true).open(target) {
            file.set_len(0).unwrap();
        }
    }
    // From here on only the daemon accesses it.
    memory.set_len(0).unwrap();
    submissions.post();
    std::thread::sleep(Duration::from_millis(2));
    mount.withdraw(&name)
}

/// How long hostile programs run.
const RUN_TIME: Duration = Duration::from_secs(3);

/// Run by [`hostile_programs_do_not_affect_others`] in its own process.
#[test]
fn hostile_program() {
    let Ok(mount) = std::env::var("ONEHOP_TEST_HOSTILE") else { return };
    if rustix::process::geteuid().is_root() {
        become_user(ATTACKER, &[]);
    }
    let file = File::options().read(true).write(true).open(Path::new(&mount).join("folder/own")).unwrap();
    let inode = rustix::fs::fstat(&file).unwrap().st_ino;
    let mount = Arc::new(Mount::open(Path::new(&mount)).unwrap());
    let mut dice = Dice(std::process::id().into());
    let (start, mut rounds, mut truncated) = (Instant::now(), 0, 0);
    while start.elapsed() < attack_time(RUN_TIME) {
        truncated += usize::from(misbehave(&mount, inode, &mut dice));
        rounds += 1;
    }
    println!("{rounds} hostile rounds, {truncated} of which truncated memory");
    assert!(truncated > 0 || rounds < 20);
    std::io::stdout().flush().unwrap();
    // Like a program that was killed.
    std::process::abort();
}

/// Waits for a hostile program, prints its output, and checks that it did not panic.
fn check_output(program: Child) {
    let output = wait(program);
    let stdout =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!stdout.contains("panicked"), "{stdout}");
    print!("{stdout}");
}

#[test]
fn hostile_programs_do_not_affect_others() {
    let Some(bed) = Bed::start() else { return };
    let Some(fio) = compile("crates/hf3fs/tests/programs/fio_like.c") else { return };
    let own = bed.dir.join("root/folder/own");
    std::fs::write(&own, vec![1; 100_000]).unwrap();
    if rustix::process::geteuid().is_root() {
        chown(own, Some(ATTACKER), Some(ATTACKER)).unwrap();
    }
    let start_hostile = |time: Duration| {
        let mut program = command(&std::env::current_exe().unwrap());
        program.args(["--exact", "hostile::hostile_program", "--nocapture"]);
        program
            .env("ONEHOP_TEST_HOSTILE", bed.mount())
            .env("ONEHOP_TEST_SECONDS", time.as_secs().to_string());
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut hostile = [(); 2].map(|()| start_hostile(attack_time(RUN_TIME)));
    let (start, mut rounds, mut killed) = (Instant::now(), 0, 0);
    while rounds < 3 || start.elapsed() < attack_time(RUN_TIME) {
        let left = attack_time(RUN_TIME).saturating_sub(start.elapsed());
        // One may truncate memory that the other uses.
        for program in &mut hostile {
            let status = program.try_wait().unwrap();
            if left > Duration::from_secs(1)
                && status.is_some_and(|status| status.signal() == Some(libc::SIGBUS))
            {
                check_output(std::mem::replace(program, start_hostile(left)));
                killed += 1;
            }
        }
        let mut honest = command(&fio);
        honest.arg(bed.mount()).arg(bed.file()).arg("200").stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = wait(honest.spawn().unwrap());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        rounds += 1;
    }
    println!("{rounds} honest programs, all of them right, in {:?}", start.elapsed());
    println!("{killed} hostile programs were killed by SIGBUS and restarted");
    hostile.into_iter().for_each(check_output);
    let report = bed.report();
    assert!(
        report["refused"].as_u64().unwrap() > 0 && report["broken_rings"].as_u64().unwrap() > 0,
        "{report:#}"
    );
    println!("{report:#}");
    bed.until("all gone", |report| report["buffers"] == 0 && report["rings"] == 0);
    // Other files are unchanged.
    let bytes = std::fs::read(bed.dir.join("root/file.bin")).unwrap();
    assert!(bytes.iter().enumerate().all(|(i, b)| *b == ((i as u32).wrapping_mul(0x9e37_79b9) >> 13) as u8));
}
