//! Samples of an SDR board through the kernel module, into memory of every kind: all of them checked, streams that begin and
//! end, processes that are killed, and rings that the board cannot use.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_gpu::{Emulated, Gpu};
use onehop_os::{HostMem, Udmabuf};
use onehop_pci::Root;
use onehop_radio::{Format, Shape};
use onehop_sdr::{BoardName, Receiver, RxOptions, SampleRoute, Session};

use crate::report::{Failed, check, ensure};

/// How long a block may take to come, on any machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a buffer where nothing else is asked for.
const BUFFER: u32 = 64 << 10;
/// What udmabuf gives to the emulated GPU.
const EXPORTED: usize = 16 << 20;
/// What the board writes to when its program is killed: a page that it must leave alone, the GPU's memory, another such page.
const GUARD: usize = 64 << 10;
const TARGET: usize = 4 << 20;
const WHOLE: usize = TARGET + 2 * GUARD;
const ON_GUARD: u8 = 0x5a;
const AFTER: u8 = 0xc3;
/// How long a late write is waited for: several blocks of the slowest board.
const QUIET: Duration = Duration::from_millis(40);

const USAGE: &str = "onehop-bed sdr receive BOARD MEMORY SECONDS BUFFER-BYTES
onehop-bed sdr restarts|kills BOARD MEMORY COUNT
onehop-bed sdr refused BOARD MEMORY RULE
onehop-bed sdr shapes|clean BOARD
  MEMORY: host, udmabuf, shared:FILE, or the address of a device whose BAR stands for a GPU's memory";

/// One of them.
pub(crate) fn run(args: &[&str]) -> Result<(), Failed> {
    match *args {
        ["receive", board, memory, seconds, bytes] => {
            receive(board, memory, seconds.parse()?, bytes.parse()?)
        }
        ["restarts", board, memory, count] => restarts(board, memory, count.parse()?),
        ["kills", board, memory, count] => kills(board, memory, count.parse()?),
        ["victim", board, memory] => victim(board, memory),
        ["refused", board, memory, rule] => refused(board, memory, rule),
        ["shapes", board] => shapes(board),
        ["clean", board] => clean(board),
        _ => Err(Failed(USAGE.into())),
    }
}

fn session(board: &str) -> Result<Arc<Session>, Failed> {
    let name: BoardName = board.parse()?;
    Ok(Session::open(onehop_sdr::open(&Root::here(), name.address)?)?)
}

/// A GPU with this memory, and the way that samples have to go.
fn gpu(memory: &str) -> Result<(Arc<dyn Gpu>, SampleRoute), Failed> {
    if memory == "host" {
        return Ok((Arc::new(Emulated::new()), SampleRoute::Pinned));
    }
    if memory == "udmabuf" {
        return Ok((Arc::new(Emulated::with_exported(Udmabuf::new(EXPORTED)?)), SampleRoute::Direct));
    }
    let (memory, whole) = target(memory)?;
    let own = if memory.len() == WHOLE { memory.slice(GUARD..GUARD + TARGET)? } else { whole };
    Ok((Arc::new(Emulated::with_vram(own)), SampleRoute::Direct))
}

/// Memory that outlives whoever lets a board write there: as much of it as the tests look at, and all of it.
fn target(memory: &str) -> Result<(HostMem, HostMem), Failed> {
    let whole = match memory.strip_prefix("shared:") {
        Some(path) => {
            let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
            file.set_len(WHOLE as u64)?;
            HostMem::of_file(&file, WHOLE)?
        }
        None => crate::vram(memory)?,
    };
    // Of a large BAR the end, which may be beyond what 32 bits reach.
    let start = whole.len().saturating_sub(WHOLE);
    Ok((whole.slice(start..whole.len())?, whole))
}

fn shape(session: &Session, bytes: u32) -> Result<Shape, Failed> {
    let shape = Shape::of_bytes(Format::Ci16, &session.card().profile.rx, bytes);
    shape.map_err(|broken| Failed(broken.to_string()))
}

fn options(shape: Shape, route: SampleRoute) -> RxOptions {
    RxOptions { shape, only: Some(route), self_test: Some(PATIENCE) }
}

/// Compares every sample with its number, and tells the host how many came and how many were reported lost.
fn receive(board: &str, memory: &str, seconds: f64, bytes: u32) -> Result<(), Failed> {
    check(
        &format!("received for {seconds} s into {memory}, {bytes} bytes at once, every sample checked"),
        || {
            let (session, (gpu, route)) = (session(board)?, gpu(memory)?);
            let shape = shape(&session, bytes)?;
            let mut receiver = Receiver::open(&session, &gpu, &options(shape, route))?;
            receiver
                .addresses()
                .iter()
                .try_for_each(|addr| ensure(*addr != 0, || "a buffer lies at 0".into()))?;
            receiver.start()?;
            let (begun, mut words) = (Instant::now(), vec![0; shape.bytes() as usize]);
            while begun.elapsed().as_secs_f64() < seconds {
                let block = receiver.acquire(PATIENCE)?.ok_or("the board sent nothing for a long time")?;
                block.memory().read(0, &mut words)?;
                counts_up(&words, block.first as u32)?;
            }
            receiver.stop()?;
            let took = begun.elapsed().as_secs_f64();
            while let Some(block) = receiver.acquire(Duration::ZERO)? {
                block.memory().read(0, &mut words)?;
                counts_up(&words, block.first as u32)?;
            }
            let counts = receiver.counts();
            ensure(counts.clock_errors == 0, || format!("{} blocks with a wrong time", counts.clock_errors))?;
            let rate = counts.delivered as f64 * 4.0 / 1e6 / took;
            println!("COUNT {} {} {rate:.1}", counts.delivered, counts.lost);
            Ok(())
        },
    );
    Ok(())
}

fn counts_up(words: &[u8], first: u32) -> Result<(), Failed> {
    let right = |(n, word): (u32, &[u8; 4])| u32::from_le_bytes(*word) == first.wrapping_add(n);
    let wrong = (0..).zip(words.as_chunks().0).find(|pair| !right(*pair));
    wrong.map_or(Ok(()), |(n, word)| {
        let found = u32::from_le_bytes(*word);
        Err(Failed(format!("sample {} has the bits {found:#x}", first.wrapping_add(n))))
    })
}

fn restarts(board: &str, memory: &str, count: u32) -> Result<(), Failed> {
    check(&format!("started and stopped {count} times, into {memory}"), || {
        let (session, (gpu, route)) = (session(board)?, gpu(memory)?);
        let shape = shape(&session, 16 << 10)?;
        let mut receiver = Receiver::open(&session, &gpu, &options(shape, route))?;
        let mut words = vec![0; shape.bytes() as usize];
        for _ in 0..count {
            receiver.start()?;
            let block = receiver.acquire(PATIENCE)?.ok_or("no block after a start")?;
            ensure(block.first == block.lost, || format!("the first block begins with {}", block.first))?;
            block.memory().read(0, &mut words)?;
            counts_up(&words, block.first as u32)?;
            drop(block);
            receiver.stop()?;
        }
        Ok(())
    });
    Ok(())
}

/// Kills a program so many times while samples flow, at random moments: the board writes nothing afterwards, and never
/// beside its buffers.
fn kills(board: &str, memory: &str, count: u32) -> Result<(), Failed> {
    check(
        &format!("killed {count} times while samples flowed into {memory}: no late write, untouched guards"),
        || {
            let (target, _whole) = target(memory)?;
            let mut rng = crate::suite::Rng(count.into());
            for round in 1..=count {
                target.fill(0, WHOLE, ON_GUARD)?;
                let mut victim = Victim::start(board, memory)?;
                victim.wait_until_it_flows()?;
                std::thread::sleep(Duration::from_micros(rng.below(30_000)));
                victim.kill()?;
                quiet(&target).map_err(|Failed(why)| Failed(format!("after kill {round}: {why}")))?;
            }
            Ok(())
        },
    );
    Ok(())
}

struct Victim(Child);

impl Victim {
    fn start(board: &str, memory: &str) -> Result<Self, Failed> {
        let mut command = Command::new("/proc/self/exe");
        Ok(Self(command.args(["sdr", "victim", board, memory]).stdout(Stdio::piped()).spawn()?))
    }

    fn wait_until_it_flows(&mut self) -> Result<(), Failed> {
        let mut said = [0; 5];
        let out = self.0.stdout.as_mut().ok_or("no pipe from the victim")?;
        out.read_exact(&mut said)
            .map_err(|e| Failed(format!("the victim ended before samples flowed: {e}")))?;
        ensure(&said == b"flows", || format!("the victim said {:?}", String::from_utf8_lossy(&said)))
    }

    fn kill(&mut self) -> Result<(), Failed> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Receives until it is killed.
fn victim(board: &str, memory: &str) -> Result<(), Failed> {
    let (session, (gpu, route)) = (session(board)?, gpu(memory)?);
    let shape = shape(&session, BUFFER)?;
    let mut receiver =
        Receiver::open(&session, &gpu, &RxOptions { self_test: None, ..options(shape, route) })?;
    receiver.start()?;
    for block in 0_u64.. {
        receiver.acquire(PATIENCE)?.ok_or("the board sent nothing for a long time")?;
        if block == 2 {
            print!("flows");
            std::io::stdout().flush()?;
        }
    }
    Ok(())
}

/// Nothing is written there any more, and nothing was ever written beside the target.
fn quiet(mem: &HostMem) -> Result<(), Failed> {
    mem.fill(GUARD, TARGET, AFTER)?;
    std::thread::sleep(QUIET);
    let bytes = mem.to_vec(0, WHOLE)?;
    let (front, rest) = bytes.split_at(GUARD);
    let (target, back) = rest.split_at(TARGET);
    let untouched = front.iter().chain(back).all(|byte| *byte == ON_GUARD);
    ensure(untouched, || "a guard page was written".into())?;
    ensure(target.iter().all(|byte| *byte == AFTER), || "memory was written after its program's end".into())
}

/// Memory that the board cannot use on this machine, refused by what is wrong with it.
fn refused(board: &str, memory: &str, rule: &str) -> Result<(), Failed> {
    check(&format!("{memory} is refused: {rule}"), || {
        let session = session(board)?;
        let (gpu, route) = gpu(memory)?;
        let options = options(shape(&session, BUFFER)?, route);
        let no = refusal(Receiver::open(&session, &gpu, &options))?;
        println!("    {no}");
        ensure(no.contains(rule), || format!("it is refused as: {no}"))
    });
    Ok(())
}

/// Blocks that the board cannot fill, each refused by the name of its rule.
fn shapes(board: &str) -> Result<(), Failed> {
    let session = session(board)?;
    let sound = Shape { format: Format::Ci16, burst_samples: 4096, bursts: 4 };
    for (shape, rule) in [
        (Shape { bursts: 33, ..sound }, "bursts"),
        (Shape { burst_samples: 8193, ..sound }, "burst"),
        (Shape { burst_samples: 8192 - 1, ..sound }, "granule"),
        (Shape { bursts: 0, ..sound }, "empty"),
    ] {
        check(
            &format!(
                "a ring of {} bursts of {} samples is refused: {rule}",
                shape.bursts, shape.burst_samples
            ),
            || {
                let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
                let no = refusal(Receiver::open(&session, &gpu, &options(shape, SampleRoute::Pinned)))?;
                ensure(no.contains(&format!("({rule}")), || format!("it is refused as: {no}"))
            },
        );
    }
    Ok(())
}

/// Why it was refused.
fn refusal(opened: onehop_sdr::Result<Receiver>) -> Result<String, Failed> {
    match opened {
        Ok(_) => Err(Failed("it was not refused".into())),
        Err(error) => Ok(error.to_string()),
    }
}

/// Whoever had the board before left nothing mapped.
fn clean(board: &str) -> Result<(), Failed> {
    check("nothing is left mapped for the board", || {
        let name: BoardName = board.parse()?;
        let module =
            onehop_pci::kmod::Session::take(&Root::here(), onehop_pci::DeviceKind::Board, name.address)?;
        let info = module.info()?;
        ensure(info.mappings == 0 && !info.dma_on, || {
            format!("{} mappings, DMA {}", info.mappings, info.dma_on)
        })
    });
    Ok(())
}
