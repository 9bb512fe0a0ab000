//! A qtest server in a thread: an imaginary machine with one NVMe controller, and ways to misbehave.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The address at which BAR0 must have been placed: device 3, function 0.
const BAR0: u64 = 0xe000_0000 + (3 << 3) * (1 << 20);

/// How the fake answers a register read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Correctly.
    None,
    /// With interrupt lines before every answer.
    Interrupts,
    /// Byte by byte.
    Dribbles,
    /// Not at all.
    Silence,
    /// With a line that is not an answer.
    Garbage,
    /// With a line that never ends.
    Endless,
    /// With interrupt lines only, forever.
    OnlyInterrupts,
    /// With half an answer before it ends.
    Truncated,
    /// Without a value.
    NoValue,
    /// With bytes that are not text.
    Binary,
}

/// A running fake.
pub struct Fake {
    dir: PathBuf,
    trouble: Arc<AtomicU32>,
    thread: Option<JoinHandle<Vec<String>>>,
}

impl Fake {
    /// Starts a fake that behaves until [`Fake::make`] is called.
    pub fn start(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("onehop-fake-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::File::create(dir.join("ram")).unwrap().set_len(4 << 20).unwrap();
        let listener = UnixListener::bind(dir.join("sock")).unwrap();
        let trouble = Arc::new(AtomicU32::new(Trouble::None as u32));
        let machine = Machine::new(dir.join("ram"), trouble.clone());
        let thread = Some(std::thread::spawn(move || machine.serve(&listener)));
        Self { dir, trouble, thread }
    }

    /// The drive's name, without `qtest:`.
    pub fn spec(&self) -> String {
        format!("{},{}", self.dir.join("sock").display(), self.dir.join("ram").display())
    }

    /// Misbehaves from now on.
    pub fn make(&self, trouble: Trouble) {
        self.trouble.store(trouble as u32, Ordering::SeqCst);
    }

    /// All commands received, once the client is gone.
    pub fn commands(mut self) -> Vec<String> {
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

struct Machine {
    ram: PathBuf,
    trouble: Arc<AtomicU32>,
    config: HashMap<u32, u32>,
    address: u32,
    seen: Vec<String>,
}

impl Machine {
    fn new(ram: PathBuf, trouble: Arc<AtomicU32>) -> Self {
        let config = [(0x00, 0x0010_1b36), (0x08, 0x0108_0200), (0x10, 0x4), (0x14, 0)].into();
        Self { ram, trouble, config, address: 0, seen: Vec::new() }
    }

    fn serve(mut self, listener: &UnixListener) -> Vec<String> {
        let (mut out, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(out.try_clone().unwrap());
        let mut line = String::new();
        // Ends when the client or the trouble closes the socket.
        while lines.read_line(&mut line).is_ok_and(|n| n > 0) {
            let answer = self.carry_out(line.trim_end());
            self.seen.push(std::mem::take(&mut line).trim_end().to_owned());
            if self.send(&mut out, &answer).is_err() {
                break;
            }
        }
        self.seen
    }

    fn carry_out(&mut self, command: &str) -> String {
        let words: Vec<&str> = command.split(' ').collect();
        let number = |i: usize| u64::from_str_radix(words[i].trim_start_matches("0x"), 16).unwrap();
        let value = |v: u32| format!("OK {v:#018x}\n");
        match (words[0], number(1)) {
            ("outl", 0xcf8) => self.address = number(2) as u32,
            ("outl", 0xcfc) => self.config_write(number(2) as u32),
            ("inl", 0xcfc) => return value(self.config_read()),
            ("readl", BAR0) => return value(0xcafe_0001),
            ("readl", addr) if addr < 4 << 20 => return value(self.memory(addr)),
            ("readl", _) => return value(u32::MAX),
            ("writel", addr) if addr < 4 << 20 => self.store(addr, number(2) as u32),
            ("writel", _) => {}
            _ => return "FAIL Unknown command\n".to_owned(),
        }
        "OK\n".to_owned()
    }

    /// Only device 3 exists.
    fn config_read(&self) -> u32 {
        match self.address >> 8 & 0xff {
            0x18 => self.config.get(&(self.address & 0xff)).copied().unwrap_or(0),
            _ => u32::MAX,
        }
    }

    fn config_write(&mut self, value: u32) {
        let kept = match self.address & 0xff {
            0x10 => value & !0x3fff | 4,
            0x14 | 0x04 => value,
            _ => return,
        };
        self.config.insert(self.address & 0xff, kept);
    }

    fn memory(&self, addr: u64) -> u32 {
        let mut word = [0; 4];
        std::fs::File::open(&self.ram).unwrap().read_exact_at(&mut word, addr).unwrap();
        u32::from_le_bytes(word)
    }

    fn store(&self, addr: u64, value: u32) {
        let file = std::fs::File::options().write(true).open(&self.ram).unwrap();
        file.write_all_at(&value.to_le_bytes(), addr).unwrap();
    }

    fn send(&self, out: &mut UnixStream, answer: &str) -> std::io::Result<()> {
        let now = self.trouble.load(Ordering::SeqCst);
        let is = |trouble: Trouble| trouble as u32 == now;
        if is(Trouble::Interrupts) {
            out.write_all(b"IRQ raise 3\nIRQ lower 3\n")?;
        } else if is(Trouble::Dribbles) {
            return answer.bytes().try_for_each(|byte| out.write_all(&[byte]));
        } else if is(Trouble::Silence) {
            return Ok(());
        } else if is(Trouble::Garbage) {
            return out.write_all(b"220 mail.example ESMTP\r\n");
        } else if is(Trouble::Endless) {
            return out.write_all(&vec![b'x'; 100_000]);
        } else if is(Trouble::OnlyInterrupts) {
            loop {
                out.write_all(b"IRQ raise 3\n")?;
                std::thread::sleep(Duration::from_millis(1));
            }
        } else if is(Trouble::Truncated) {
            out.write_all(&answer.as_bytes()[..answer.len() / 2])?;
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        } else if is(Trouble::NoValue) {
            return out.write_all(b"OK\n");
        } else if is(Trouble::Binary) {
            return out.write_all(b"OK \xff\xfe\n");
        }
        out.write_all(answer.as_bytes())
    }
}
