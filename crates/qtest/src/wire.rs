//! The qtest line protocol: one command per line, answered by `OK` or `OK VALUE`, with `IRQ` lines in between.
//!
//! A command without a result is *posted*: its `OK` is collected before the next result, as a PCIe read pushes posted
//! writes ahead of it.

use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use onehop_os::Deadline;
use rustix::net::{SendFlags, send};

/// Most unanswered posted commands: their answers always fit the socket's buffer.
const MOST_OWED: usize = 32;

/// Longest answer; more without a line end is not qtest.
const LONGEST_LINE: usize = 4096;

/// Why the wire is unusable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireFault {
    /// The peer closed the connection.
    #[error("it closed the socket, so it has ended")]
    Closed,
    /// No answer in time.
    #[error(
        "it did not answer within {0:?}; it serves one qtest client at a time: is another one connected, or is it \
         stopped?"
    )]
    Silent(Duration),
    /// An answer that matches no command.
    #[error("it answered '{0}'; is this a qtest socket?")]
    Answer(String),
    /// A system call failed.
    #[error("{0}")]
    System(io::Error),
}

impl From<io::Error> for WireFault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::System(error),
        }
    }
}

/// One connection. After a [`WireFault`] the two ends may be out of step, so it must not be used again.
pub(crate) struct Wire {
    stream: BufReader<UnixStream>,
    wait: Duration,
    line: Vec<u8>,
    out: Vec<u8>,
    owed: usize,
}

impl Wire {
    /// Connects; `wait` limits the time for each answer (twice that if it comes in parts).
    pub(crate) fn connect(socket: &Path, wait: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(wait))?;
        stream.set_write_timeout(Some(wait))?;
        Ok(Self { stream: BufReader::new(stream), wait, line: Vec::new(), out: Vec::new(), owed: 0 })
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn post(&mut self, command: fmt::Arguments<'_>) -> Result<(), WireFault> {
        if self.owed >= MOST_OWED {
            self.settle()?;
        }
        self.send(command)?;
        self.owed += 1;
        Ok(())
    }

    /// Sends a command and waits for its result.
    pub(crate) fn ask(&mut self, command: fmt::Arguments<'_>) -> Result<u64, WireFault> {
        self.send(command)?;
        self.settle()?;
        self.answer()?.ok_or_else(|| WireFault::Answer("OK without a value".into()))
    }

    /// Waits until every posted command has been answered, and so has taken effect.
    pub(crate) fn settle(&mut self) -> Result<(), WireFault> {
        while self.owed > 0 {
            self.answer()?;
            self.owed -= 1;
        }
        Ok(())
    }

    fn send(&mut self, command: fmt::Arguments<'_>) -> Result<(), WireFault> {
        use io::Write;
        self.out.clear();
        writeln!(self.out, "{command}")?;
        let until = Deadline::after(self.wait);
        let mut left = self.out.as_slice();
        while !left.is_empty() {
            // Not write(2): a closed socket would raise SIGPIPE, which is fatal unless the program ignores it, as
            // Rust's own do.
            match send(self.stream.get_ref(), left, SendFlags::NOSIGNAL).map_err(io::Error::from) {
                Ok(sent) => left = &left[sent..],
                Err(e) if e.kind() == ErrorKind::Interrupted && !until.passed() => {}
                Err(e) => return Err(self.timed(e)),
            }
        }
        Ok(())
    }

    /// The next answer, with its value if it has one.
    fn answer(&mut self) -> Result<Option<u64>, WireFault> {
        let until = Deadline::after(self.wait);
        loop {
            self.next_line(until)?;
            if !self.line.starts_with(b"IRQ ") {
                return value(&self.line).ok_or_else(|| WireFault::Answer(excerpt(&self.line)));
            }
        }
    }

    fn next_line(&mut self, until: Deadline) -> Result<(), WireFault> {
        self.line.clear();
        loop {
            let chunk = match self.stream.fill_buf() {
                Ok([]) => return Err(WireFault::Closed),
                Ok(chunk) => chunk,
                Err(e) if e.kind() == ErrorKind::Interrupted && !until.passed() => continue,
                Err(e) => return Err(self.timed(e)),
            };
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(chunk.len(), |at| at + 1);
            self.line.extend_from_slice(&chunk[..used]);
            self.stream.consume(used);
            if self.line.len() > LONGEST_LINE {
                return Err(WireFault::Answer(excerpt(&self.line)));
            }
            if until.passed() {
                return Err(WireFault::Silent(self.wait));
            }
            if end.is_some() {
                return Ok(());
            }
        }
    }

    fn timed(&self, error: io::Error) -> WireFault {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                WireFault::Silent(self.wait)
            }
            _ => error.into(),
        }
    }
}

/// Parses `OK` or `OK 0x…`; `None` for anything else.
fn value(line: &[u8]) -> Option<Option<u64>> {
    let rest = std::str::from_utf8(line).ok()?.strip_prefix("OK")?;
    if rest.trim_end().is_empty() {
        return Some(None);
    }
    let digits = rest.strip_prefix(' ')?.trim().strip_prefix("0x")?;
    u64::from_str_radix(digits, 16).ok().map(Some)
}

/// The start of a line, in printable form.
fn excerpt(line: &[u8]) -> String {
    let shown = String::from_utf8_lossy(&line[..line.len().min(60)]);
    shown.trim().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood_or_refused() {
        assert_eq!(value(b"OK\n"), Some(None));
        assert_eq!(value(b"OK 0x10\n"), Some(Some(16)));
        assert_eq!(value(b"OK 0xffffffffffffffff\r\n"), Some(Some(u64::MAX)));
        for bad in
            ["OKAY", "OK0x10", "OK 10", "OK 0x", "OK 0x1ffffffffffffffff", "FAIL", "ERR x", "", "ok", "OK é"]
        {
            assert_eq!(value(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(value(&[b'O', b'K', b' ', 0xff]), None);
    }
}
