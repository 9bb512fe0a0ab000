//! A web server small enough to be wrong on purpose: ranges, HEAD, and as much of S3 as reading takes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wrong {
    #[default]
    Nothing,
    /// The first answer for every range is cut in the middle.
    Cut,
    /// Every answer is cut in the middle.
    AlwaysCut,
    /// The first request for every range is answered by 503.
    Busy,
    /// After this many requests the object changes, and the server checks If-Match.
    Changes(u64),
    /// The same, but the server ignores If-Match.
    ChangesSilently(u64),
    /// It never answers range and list requests.
    Hangs,
    /// It ignores ranges and sends everything.
    NoRanges,
    /// It reports a longer object.
    Grows(u64),
    /// It sends slowly.
    Slow,
}

/// The server's contents, and a log of requests.
#[derive(Default)]
pub struct State {
    pub objects: Mutex<BTreeMap<String, Vec<u8>>>,
    pub wrong: Mutex<Wrong>,
    pub requests: AtomicU64,
    pub sent: AtomicU64,
    /// Header lines of all requests.
    pub headers: Mutex<Vec<String>>,
    /// Ends of requested ranges.
    seen: Mutex<BTreeSet<String>>,
    stop: AtomicBool,
}

/// The server, which runs until this is dropped.
pub struct Server {
    pub state: Arc<State>,
    address: SocketAddr,
}

impl Server {
    pub fn new(objects: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        *state.objects.lock().unwrap() = objects.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.stop.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(stream), shared) = (stream, shared.clone()) else { continue };
                std::thread::spawn(move || serve(&shared, stream));
            }
        });
        Self { state, address }
    }

    pub fn goes(&self, wrong: Wrong) {
        self.state.requests.store(0, Ordering::Relaxed);
        *self.state.wrong.lock().unwrap() = wrong;
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

/// Serves one connection, request after request, until the peer or the script ends it.
fn serve(state: &State, stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        state.headers.lock().unwrap().extend(lines.iter().cloned());
        answer(state, &lines, &mut stream)?;
    }
}

fn header<'a>(lines: &'a [String], name: &str) -> Option<&'a str> {
    let found = lines.iter().skip(1).filter_map(|line| line.split_once(": "));
    found.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

fn answer(state: &State, lines: &[String], stream: &mut TcpStream) -> Option<()> {
    let number = state.requests.fetch_add(1, Ordering::Relaxed);
    let wrong = *state.wrong.lock().unwrap();
    let mut words = lines.first()?.split(' ');
    let (method, target) = (words.next()?, words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if query.contains("list-type=2") {
        if wrong == Wrong::Hangs {
            return hang();
        }
        return list(state, path, query, stream);
    }
    let Some(data) = state.objects.lock().unwrap().get(path).cloned() else {
        return status(stream, "404 Not Found");
    };
    let old = match wrong {
        Wrong::Changes(after) | Wrong::ChangesSilently(after) => number < after,
        _ => true,
    };
    let tag = if old { "\"first\"" } else { "\"second\"" };
    let matches = header(lines, "if-match").is_none_or(|wanted| wanted == tag);
    if !matches && !matches!(wrong, Wrong::ChangesSilently(_)) {
        return status(stream, "412 Precondition Failed");
    }
    // The rest of a range that was cut has the same end.
    let end = header(lines, "range").and_then(|range| range.split_once('-')).map_or("all", |(_, end)| end);
    let first_time = state.seen.lock().unwrap().insert(format!("{wrong:?} {method} {end}"));
    if wrong == Wrong::Busy && first_time {
        return status(stream, "503 Slow Down");
    }
    let total = match wrong {
        Wrong::Grows(after) if number >= after => data.len() + 1,
        _ => data.len(),
    };
    let common =
        format!("ETag: {tag}\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nAccept-Ranges: bytes\r\n");
    if method == "HEAD" {
        let head = format!("HTTP/1.1 200 OK\r\n{common}Content-Length: {total}\r\n\r\n");
        return stream.write_all(head.as_bytes()).ok();
    }
    let range = header(lines, "range").filter(|_| wrong != Wrong::NoRanges);
    let (first, line) = match range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) {
        Some((from, to)) => {
            let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
            let to = to.min(data.len() - 1);
            (
                (from, to + 1),
                format!("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{to}/{total}\r\n"),
            )
        }
        None => ((0, data.len()), "HTTP/1.1 200 OK\r\n".to_owned()),
    };
    let body = &data[first.0..first.1];
    if wrong == Wrong::Hangs {
        return hang();
    }
    let head = format!("{line}{common}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    let cut = wrong == Wrong::AlwaysCut || wrong == Wrong::Cut && first_time;
    let body = if cut { &body[..body.len() / 2] } else { body };
    for chunk in body.chunks(64 << 10) {
        if wrong == Wrong::Slow {
            std::thread::sleep(Duration::from_millis(20));
        }
        stream.write_all(chunk).ok()?;
        state.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
    }
    if cut { None } else { Some(()) }
}

fn hang() -> Option<()> {
    std::thread::sleep(Duration::from_secs(20));
    None
}

fn status(stream: &mut TcpStream, line: &str) -> Option<()> {
    stream.write_all(format!("HTTP/1.1 {line}\r\nContent-Length: 0\r\n\r\n").as_bytes()).ok()
}

/// ListObjectsV2: all keys of the bucket below a prefix.
fn list(state: &State, path: &str, query: &str, stream: &mut TcpStream) -> Option<()> {
    let prefix = query.split('&').find_map(|pair| pair.strip_prefix("prefix=")).unwrap_or_default();
    let prefix = prefix.replace("%2F", "/");
    let bucket = path.trim_end_matches('/');
    let objects = state.objects.lock().unwrap();
    let keys = objects.iter().filter_map(|(key, data)| {
        let key = key.strip_prefix(bucket)?.strip_prefix('/')?;
        key.starts_with(&prefix).then(|| {
            format!(
                "<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>\
                 <ETag>&quot;first&quot;</ETag><Size>{}</Size></Contents>",
                data.len()
            )
        })
    });
    let body = format!(
        "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>",
        keys.collect::<String>()
    );
    let head =
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).ok()
}
