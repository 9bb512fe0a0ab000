//! Controllers served on a socket, driven as any drive: by our own server, or manually by another:
//! `ONEHOP_TEST_VFIO_USER=SOCKET cargo test -p onehop-vfio-user -- --test-threads 1 suite_on`, with
//! `ONEHOP_TEST_COMPARE=0` if the server offers Compare but does not implement it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Options};
use onehop_os::{ControllerBackend, HostMem, StopSignal};
use onehop_proto::regs::doorbell;
use onehop_sim::Sim;
use onehop_vfio_user::wire::{HEADER, MessageHeader, command};
use onehop_vfio_user::{ClientError, Function, Nvme, Server, ServerEvent, client};
use rustix::fs::SealFlags;

use crate::suite::{Case, PLAIN, Rng, matrix, run};

/// A drive on its own socket, served until this is dropped.
struct Served {
    sim: Sim,
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<String>>>,
}

fn socket() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("onehop-scheme-{}-{number}.sock", std::process::id()))
}

impl Served {
    fn start(spec: &str, mapped: bool) -> Self {
        let sim = onehop_sim::open(spec).unwrap();
        let nvme = Nvme::new(sim.clone()).unwrap();
        let nvme = if mapped { nvme.with_mapped_doorbells().unwrap() } else { nvme };
        let (socket, stop) = (socket(), Arc::new(AtomicBool::new(false)));
        let (server, stopped) = (Server::bind(&socket).unwrap(), stop.clone());
        let thread = std::thread::spawn(move || {
            let complaints = std::cell::RefCell::new(Vec::new());
            let report = |event: ServerEvent| {
                if !matches!(event, ServerEvent::Connected | ServerEvent::Closed(None)) {
                    complaints.borrow_mut().push(event.to_string());
                }
            };
            server.run(&Function::new(Box::new(nvme)), &|| stopped.load(Ordering::Relaxed), &report).unwrap();
            complaints.into_inner()
        });
        Self { sim, socket, stop, thread: Some(thread) }
    }

    fn port(&self) -> ControllerBackend {
        client::open(&self.socket, &StopSignal::default()).unwrap()
    }

    /// What the server reported, once it has ended.
    fn end(mut self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs the suite on our server, by messages and by mapped doorbells, or on the controller that the environment names.
fn on(case: Case, more: &str) {
    if let Ok(socket) = std::env::var("ONEHOP_TEST_VFIO_USER") {
        let compares = std::env::var("ONEHOP_TEST_COMPARE").as_deref() != Ok("0");
        let connect = || client::open(Path::new(&socket), &StopSignal::default()).unwrap();
        let drive = Drive::open(connect(), Options::default()).unwrap();
        let lba = drive.namespace(1).unwrap().format.lba_bytes() as u32;
        drop(drive);
        return run(connect(), Case { lba, unknown_is_removed: true, compares, ..case });
    }
    let Case { lba, ms, ext, mdts, queues, sgl, .. } = case;
    let (ext, sgl) = (u8::from(ext), u8::from(sgl));
    let spec = format!("mem:24M?lba={lba}&ms={ms}&ext={ext}&mdts={mdts}&queues={queues}&sgl={sgl}&{more}");
    for mapped in [false, true] {
        let served = Served::start(&spec, mapped);
        run(served.port(), case);
        let (sim, said) = (served.sim.clone(), served.end());
        assert!(said.is_empty(), "{spec}, mapped {mapped}: {said:?}");
        assert!(sim.violations().is_empty(), "{spec}, mapped {mapped}: {:?}", sim.violations());
    }
}

#[test]
fn suite_on_a_plain_drive() {
    on(Case { sgl: false, ..PLAIN }, "");
}

#[test]
fn suite_on_deep_queues() {
    on(Case { sgl: false, queues: 8, depth: 200, ..PLAIN }, "mqes=255");
}

#[test]
fn suite_on_shallow_queues() {
    on(Case { sgl: false, queues: 1, depth: 1, ..PLAIN }, "");
}

#[test]
fn suite_on_sgls() {
    on(PLAIN, "");
}

#[test]
fn every_case_by_mapped_doorbells() {
    for case in matrix(64) {
        let Case { lba, ms, ext, mdts, queues, sgl, .. } = case;
        let (ext, sgl) = (u8::from(ext), u8::from(sgl));
        let spec =
            format!("mem:24M?lba={lba}&ms={ms}&ext={ext}&mdts={mdts}&queues={queues}&sgl={sgl}&mqes=63");
        let served = Served::start(&spec, true);
        run(served.port(), case);
        assert!(served.sim.violations().is_empty(), "{spec}: {:?}", served.sim.violations());
    }
}

/// A doorbell only reads back if it is memory: the controller itself returns 0, and records the read.
#[test]
fn doorbells_are_memory_where_the_server_offers_it() {
    for (mapped, want) in [(true, 5), (false, 0)] {
        let served = Served::start("mem:1M", mapped);
        let port = served.port();
        port.regs.write32(doorbell(3, false, 0), 5);
        assert_eq!(port.regs.read32(doorbell(3, false, 0)), want, "mapped: {mapped}");
    }
}

#[test]
fn one_client_follows_the_other() {
    let served = Served::start("mem:8M", true);
    for round in 0..3u8 {
        let drive = Drive::open(served.port(), Options { writable: true, ..Options::default() }).unwrap();
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(4096).unwrap();
        if round > 0 {
            queue.read(ns, 0, 8, &buffer, 0).unwrap();
            assert_eq!(buffer.host().unwrap().to_vec(0, 4096).unwrap(), vec![round; 4096]);
        }
        buffer.host().unwrap().fill(0, 4096, round + 1).unwrap();
        queue.write(ns, 0, 8, &buffer, 0).unwrap();
    }
    assert_eq!(served.sim.violations(), []);
}

#[test]
fn memory_is_mapped_once_and_only_its_own() {
    let served = Served::start("mem:1M", false);
    let mapper = served.port().mapper;
    let memory = mapper.alloc(10_000).unwrap();
    let part = memory.slice(5000..9000).unwrap();
    let mapped = mapper.map(&part).unwrap();
    assert_eq!((mapped.bytes(), mapped.contiguous().unwrap().0 % 4096), (4000, 5000 % 4096));
    let other = HostMem::anonymous(4096).unwrap();
    let why = mapper.map(&other).unwrap_err().to_string();
    assert!(why.contains("only memory that this mapper allocated"), "{why}");
    let gone = memory.slice(0..0).unwrap();
    assert!(mapper.map(&gone).is_err());
}

#[test]
fn a_server_that_goes_takes_the_drive_with_it() {
    let served = Served::start("mem:1M", false);
    let short = Options { timeout: Duration::from_millis(200), ..Options::default() };
    let drive = Drive::open(served.port(), short).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(4096).unwrap();
    queue.read(ns, 0, 1, &buffer, 0).unwrap();
    drop(served.end());
    let error = queue.read(ns, 0, 1, &buffer, 0).unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

/// No other memory and no other route would help.
#[test]
fn memory_that_a_lost_server_does_not_map_is_no_fault_of_the_memory() {
    let served = Served::start("mem:1M", false);
    let drive = Drive::open(served.port(), Options::default()).unwrap();
    let name = drive.name().to_owned();
    drop(served.end());
    match drive.buffer(8192).unwrap_err() {
        Error::Lost { drive, why } => {
            assert_eq!(drive, name);
            assert!(why.contains("mapping 8192 bytes") && why.contains("DMA_MAP"), "{why}");
        }
        other => panic!("{other}"),
    }
}

/// Passes everything on to a server but requests of one kind.
fn all_but(number: u16, server: &Path) -> PathBuf {
    let here = socket();
    let (listener, server) = (UnixListener::bind(&here).unwrap(), UnixStream::connect(server).unwrap());
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let (mut replies, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut replies, &mut to_client));
        let mut raw = [0; HEADER];
        while client.read_exact(&mut raw).is_ok() {
            let header = MessageHeader::decode(&raw);
            let mut payload = vec![0; header.payload().unwrap()];
            client.read_exact(&mut payload).unwrap();
            if header.command != number {
                (&server).write_all(&[&raw, payload.as_slice()].concat()).unwrap();
            }
        }
        server.shutdown(Shutdown::Both).unwrap();
    });
    here
}

/// The server does not answer DMA_MAP when a stop is asked for.
#[test]
fn a_stop_while_memory_is_mapped_is_no_lost_controller() {
    let served = Served::start("mem:1M", false);
    let (socket, stop) = (all_but(command::DMA_MAP, &served.socket), StopSignal::default());
    let port = client::open(&socket, &stop).unwrap();
    std::fs::remove_file(socket).unwrap();
    let memory = port.mapper.alloc(4096).unwrap();
    stop.set();
    // The second finds a connection that was given up.
    for _ in 0..2 {
        let error = Error::from(port.mapper.map(&memory).map(drop).unwrap_err());
        assert!(matches!(&error, Error::Interrupted { drive } if *drive == port.name), "{error}");
    }
    drop(port);
    assert_eq!(served.end(), [] as [String; 0]);
}

/// Its memory is shared by file descriptors. If the server cut a file short, an access would kill this process.
#[test]
fn a_server_cannot_shrink_the_memory_of_its_client() {
    let served = Served::start("mem:1M", false);
    let memory = served.port().mapper.alloc(8192).unwrap();
    let files = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |file: &PathBuf| {
        let name = std::fs::read_link(file).unwrap_or_default();
        name.to_string_lossy().contains("memfd:onehop-dma")
    };
    // Other tests may close theirs meanwhile.
    let seals: Vec<_> = files
        .filter(is_ours)
        .filter_map(|file| rustix::fs::fcntl_get_seals(std::fs::File::open(file).ok()?).ok())
        .collect();
    assert!(!seals.is_empty());
    assert!(seals.iter().all(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL)), "{seals:?}");
    assert_eq!(memory.to_vec(4096, 4).unwrap(), [0; 4]);
}

#[test]
fn an_unresponsive_server_keeps_its_socket() {
    let socket = socket();
    let server = UnixListener::bind(&socket).unwrap();
    rustix::net::listen(&server, 0).unwrap();
    // The backlog is full now; a connect that waits would never return.
    let _waiting = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let (done, wait) = std::sync::mpsc::channel();
    let path = socket.clone();
    std::thread::spawn(move || done.send(Server::bind(&path).map(|_| ())));
    let refused = wait.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(matches!(refused, Err(onehop_vfio_user::Error::InUse(_))), "{refused:?}");
    std::fs::remove_file(socket).unwrap();
}

#[test]
fn a_server_leaves_the_socket_of_its_successor() {
    let socket = socket();
    let first = Server::bind(&socket).unwrap();
    std::fs::remove_file(&socket).unwrap();
    let second = Server::bind(&socket).unwrap();
    drop(first);
    assert!(socket.exists());
    drop(second);
    assert!(!socket.exists());
}

#[test]
fn other_sockets_are_reported() {
    let nowhere = client::open(Path::new("/nowhere/cntrl"), &StopSignal::default())
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(nowhere.contains("/nowhere/cntrl") && nowhere.contains("start its server first"), "{nowhere}");
    let board = Arc::new(onehop_board::Board::new(onehop_board::BoardConfig::default()).unwrap());
    let socket = socket();
    let server = Server::bind(&socket).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let function = Function::new(Box::new(onehop_vfio_user::Sdr::new(board.clone())));
            server.run(&function, &|| stop.load(Ordering::Relaxed), &|_| ()).unwrap();
        });
        let error = client::open(&socket, &StopSignal::default()).map(|_| ()).unwrap_err();
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(&error, ClientError::Unfit { why, .. } if why.contains("010802")), "{error}");
    });
}

/// A server that answers every request with `reply`.
fn answers(reply: impl Fn(&MessageHeader) -> Vec<u8> + Send + 'static) -> Result<(), ClientError> {
    answers_with(reply, |_| ())
}

/// The same, with work for what could be opened.
fn answers_with<T>(
    reply: impl Fn(&MessageHeader) -> Vec<u8> + Send + 'static,
    work: impl FnOnce(&ControllerBackend) -> T,
) -> Result<T, ClientError> {
    let socket = socket();
    let listener = UnixListener::bind(&socket).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut raw = [0; HEADER];
        while stream.read_exact(&mut raw).is_ok() {
            let header = MessageHeader::decode(&raw);
            stream.read_exact(&mut vec![0; header.payload().unwrap()]).unwrap();
            if stream.write_all(&reply(&header)).is_err() {
                return;
            }
        }
    });
    let end = client::open(&socket, &StopSignal::default()).map(|port| work(&port));
    std::fs::remove_file(socket).unwrap();
    thread.join().unwrap();
    end
}

#[test]
fn servers_that_break_the_protocol_are_left() {
    let whole = |header: &MessageHeader, payload: &[u8]| {
        [header.reply(payload.len()).encode().as_slice(), payload].concat()
    };
    let refused = answers(|header| header.refusal(22).encode().to_vec()).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { what: "the version", .. }), "{refused}");
    let other = answers(move |header| whole(header, &[1, 0, 0, 0])).unwrap_err();
    assert!(matches!(&other, ClientError::Unfit { why, .. } if why.contains("version is 1,")), "{other}");
    let short = answers(move |header| whole(header, &[0; 4])).unwrap_err();
    assert!(matches!(short, ClientError::Broken { what: "REGION_READ", .. }), "{short}");
    let long =
        answers(|header| MessageHeader { bytes: u32::MAX, ..header.reply(0) }.encode().to_vec()).unwrap_err();
    assert!(matches!(long, ClientError::Broken { .. }), "{long}");
    // Requests of the server are refused, and replies to other requests ignored, but only for a limited time.
    let began = Instant::now();
    let ends = answers(|header| {
        let unexpected = MessageHeader { id: header.id.wrapping_add(7), ..header.reply(0) };
        let asks = MessageHeader::request(9, 12, 0);
        [asks.encode(), unexpected.encode(), header.refusal(95).encode()].concat()
    });
    assert!(matches!(ends, Err(ClientError::Refused { .. })), "{ends:?}");
    assert!(began.elapsed() < Duration::from_secs(5));
}

/// A server with random replies: mostly of the right form, so that it gets somewhere.
fn anything(seed: u64) -> impl Fn(&MessageHeader) -> Vec<u8> + Send + 'static {
    let rng = std::sync::Mutex::new(Rng(seed));
    move |ask| {
        let mut rng = rng.lock().unwrap();
        let mut sent = Vec::new();
        for _ in 0..rng.below(3) {
            let payload = {
                let count = rng.below(40) as usize;
                rng.bytes(count)
            };
            let unexpected = match rng.below(2) {
                0 => MessageHeader { id: ask.id ^ 0x55aa, ..ask.reply(payload.len()) },
                _ => MessageHeader::request(rng.next() as u16, rng.below(20) as u16, payload.len()),
            };
            sent.extend([unexpected.encode().as_slice(), &payload].concat());
        }
        let fits = rng.below(8) != 0;
        let mut payload = match ask.command {
            command::VERSION if fits => vec![0, 0, 1, 0],
            // The class of an NVMe controller, or a register.
            command::REGION_READ if fits => [&[0; 16][..], &[2, 8, 1]].concat(),
            command::REGION_INFO => {
                let count = 32 + rng.below(100) as usize;
                let mut info = rng.bytes(count);
                info[4..16].copy_from_slice(&[0xf, 0, 0, 0, 0, 0, 0, 0, rng.below(64) as u8, 0, 0, 0]);
                info[16..24].copy_from_slice(&(rng.below(8) << 12).to_le_bytes());
                info
            }
            _ if fits => vec![0; 16],
            _ => {
                let count = rng.below(70) as usize;
                rng.bytes(count)
            }
        };
        if rng.below(16) == 0 {
            return [sent, ask.refusal(rng.below(200) as u32).encode().to_vec()].concat();
        }
        if rng.below(32) == 0 {
            payload.truncate(rng.below(8) as usize);
        }
        [sent, ask.reply(payload.len()).encode().to_vec(), payload].concat()
    }
}

#[test]
fn any_server_comes_to_an_end() {
    let (mut opened, began) = (0, Instant::now());
    for seed in 0..300 {
        let end = answers_with(anything(seed), |port| {
            port.regs.write32(0x14, 1);
            let _ = port.regs.read32(0x1c);
            if let Ok(memory) = port.mapper.alloc(5000) {
                let _ = port.mapper.map(&memory).map(|mapped| mapped.runs().len());
            }
            let _ = port.reset.as_ref().map(|reset| reset.function_reset());
        });
        opened += u32::from(end.is_ok());
    }
    assert!(opened > 20, "{opened} of 300 got as far as a drive");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}
