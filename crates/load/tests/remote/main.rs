//! Models on a server of our own: every byte, and everything that may go wrong.
#![allow(clippy::unwrap_used)]

mod server;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onehop_gpu::Emulated;
use onehop_load::engine::{Account, Options, Prepared, RingEngine, Route};
use onehop_load::remote::{Config, Remote};
use onehop_load::stream::Stream;
use onehop_load::{Error, Model, Plan, Selection, Store, check, plan};
use server::{Server, Wrong};

fn noise(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes).map(|i| ((i as u32 ^ seed).wrapping_mul(0x9e37_79b9) >> 11) as u8).collect()
}

fn safetensors(tensors: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let at = data.len();
        data.extend(bytes);
        let (len, end) = (bytes.len(), data.len());
        header.push(format!(r#""{name}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{at},{end}]}}"#));
    }
    let header = format!("{{{}}}", header.join(","));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn tensors() -> Vec<(&'static str, Vec<u8>)> {
    vec![("a", noise(3_000_000, 1)), ("b", noise(5, 2)), ("c", noise(1_000_001, 3)), ("d", noise(777, 4))]
}

/// Generous, for a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// The server with a model, and a client.
fn start() -> (Server, Remote, PathBuf) {
    start_with(LONG)
}

fn start_with(idle: Duration) -> (Server, Remote, PathBuf) {
    let server = Server::new(&[("/m/model.safetensors", safetensors(&tensors()))]);
    let remote = remote(&server, idle);
    let path = server.url("/m/model.safetensors").into();
    (server, remote, path)
}

fn config(s3: Vec<(String, String)>, idle: Duration) -> Config {
    Config { s3, connect: LONG, idle, retries: 4, ..Config::default() }
}

fn remote(server: &Server, idle: Duration) -> Remote {
    Remote::new(s3_config(server, idle)).unwrap()
}

fn s3_config(server: &Server, idle: Duration) -> Config {
    let s3 = [
        ("aws_endpoint", server.url("")),
        ("aws_region", "here-1".into()),
        ("aws_allow_http", "true".into()),
        ("aws_access_key_id", "KEY".into()),
        ("aws_secret_access_key", "SECRET".into()),
        ("aws_profile", "means nothing".into()),
    ];
    config(s3.map(|(name, value)| (name.to_owned(), value)).to_vec(), idle)
}

const SLOT: usize = 256 << 10;

/// Loads everything, and compares every tensor.
fn load(remote: &Remote, path: PathBuf, wanted: &[(&str, Vec<u8>)]) -> Result<Account, Error> {
    let model = Model::open(remote, &[path])?;
    let plan = Plan::new(&model, &Selection::default(), plan::PlanOptions::ring())?;
    let options = Options { slot: Some(SLOT), threads: Some(4), ..Options::default() };
    let prepared = Prepared::new(&plan, &model.files, &options)?;
    let engine = RingEngine::start(&Emulated::new(), &plan, prepared)?;
    let mut stream = Stream::new(plan, engine);
    while stream.next()?.is_some() {}
    model.still_same()?;
    let account = stream.engine().account();
    let (plan, arena) = stream.finish()?;
    assert_eq!(plan.tensors.len(), wanted.len());
    for tensor in &plan.tensors {
        let (_, data) = wanted.iter().find(|(name, _)| *name == tensor.name).unwrap();
        let mut got = vec![0; tensor.bytes as usize];
        arena.read(tensor.at as usize, &mut got)?;
        assert!(got == *data, "{}", tensor.name);
    }
    assert_eq!(check::compare(&plan, &model.files, &arena, &|| true)?, None);
    Ok(account)
}

#[test]
fn every_byte_of_a_model_on_a_web_server() {
    let (server, remote, path) = start();
    let account = load(&remote, path, &tensors()).unwrap();
    assert!(
        account.remote_bytes >= 4_000_783 && account.cached_bytes + account.direct_bytes == 0,
        "{account:?}"
    );
    // Three slots per connection, in huge pages.
    let ring = (4 * 3 * SLOT as u64).next_multiple_of(2 << 20);
    assert_eq!((account.retries, account.ring_bytes), (0, ring));
    let headers = server.state.headers.lock().unwrap().join("\n").to_lowercase();
    assert!(headers.contains("range: bytes=") && headers.contains("if-match: \"first\""), "{headers}");
    // A slow server is not an error.
    server.goes(Wrong::Slow);
    load(&remote, server.url("/m/model.safetensors").into(), &tensors()).unwrap();
}

#[test]
fn s3_works_by_paths_with_and_without_a_signature() {
    let (one, two) = (vec![("x", noise(500_000, 5))], vec![("y", noise(70_000, 6))]);
    let index = r#"{"weight_map":{"x":"one.safetensors","y":"two.safetensors"}}"#;
    let server = Server::new(&[
        ("/bucket/llama/model.safetensors.index.json", index.as_bytes().to_vec()),
        ("/bucket/llama/one.safetensors", safetensors(&one)),
        ("/bucket/llama/two.safetensors", safetensors(&two)),
        ("/bucket/llama/deeper/config.json", b"{}".to_vec()),
    ]);
    let signed = remote(&server, LONG);
    for address in
        ["s3://bucket/llama", "s3://bucket/llama/", "s3://bucket/llama/model.safetensors.index.json"]
    {
        load(&signed, address.into(), &[one.clone(), two.clone()].concat()).unwrap();
    }
    load(&signed, "s3://bucket/llama/two.safetensors".into(), &two).unwrap();
    let names = signed.names("s3://bucket/llama".as_ref()).unwrap();
    assert_eq!(names, ["model.safetensors.index.json", "one.safetensors", "two.safetensors"]);
    assert!(server.state.headers.lock().unwrap().join("\n").contains("AWS4-HMAC-SHA256 Credential=KEY/"));
    for (nothing, holds) in
        [("s3://bucket/nope", "nope"), ("s3://bucket/llama/deeper", "holds no *.safetensors")]
    {
        let error = Model::open(&signed, &[nothing.into()]).err().unwrap().to_string();
        assert!(error.contains(holds), "{error}");
    }
    server.state.headers.lock().unwrap().clear();
    let s3 = [
        ("aws_endpoint", server.url("")),
        ("aws_allow_http", "true".into()),
        ("aws_skip_signature", "true".into()),
    ];
    let s3 = s3.map(|(name, value)| (name.to_owned(), value)).to_vec();
    let open = Remote::new(Config { s3, ..Config::default() }).unwrap();
    load(&open, "s3://bucket/llama/one.safetensors".into(), &one).unwrap();
    assert!(!server.state.headers.lock().unwrap().join("\n").to_lowercase().contains("authorization"));
}

#[test]
fn interrupted_and_refused_requests_are_retried() {
    for wrong in [Wrong::Cut, Wrong::Busy] {
        let (server, remote, path) = start();
        server.goes(wrong);
        let account = load(&remote, path, &tensors()).unwrap();
        assert!(account.retries > 0, "{wrong:?}: {account:?}");
    }
}

#[test]
fn an_object_that_changes_is_noticed() {
    for wrong in [Wrong::Changes(6), Wrong::ChangesSilently(6), Wrong::Grows(6), Wrong::Changes(2)] {
        let (server, remote, path) = start();
        server.goes(wrong);
        let end = load(&remote, path, &tensors());
        assert!(matches!(end, Err(Error::ChangedOnServer { .. })), "{wrong:?}: {end:?}");
    }
    // Also after the last byte.
    let (server, remote, path) = start();
    let model = Model::open(&remote, &[path]).unwrap();
    model.still_same().unwrap();
    server.goes(Wrong::Changes(0));
    assert!(matches!(model.still_same(), Err(Error::ChangedOnServer { .. })));
}

#[test]
fn permanent_failures_end_in_time_with_a_reason() {
    // A server without ranges is not asked twice.
    let cases =
        [(Wrong::AlwaysCut, LONG, 5), (Wrong::NoRanges, LONG, 1), (Wrong::Hangs, Duration::from_secs(1), 5)];
    for (wrong, idle, wanted) in cases {
        let (server, remote, path) = start_with(idle);
        server.goes(wrong);
        let end = load(&remote, path, &tensors());
        assert!(matches!(end, Err(Error::Server { tries, .. }) if tries == wanted), "{wrong:?}: {end:?}");
    }
    let (server, remote, path) = start();
    assert!(remote.open(server.url("/nope").as_ref()).err().unwrap().is_not_found());
    let gone = Server::new(&[]).url("/gone.safetensors");
    assert!(matches!(remote.open(gone.as_ref()), Err(Error::Open { .. } | Error::Server { .. })));
    for (address, holds) in
        [("ftp://x/y", "ftp:// is not read"), ("http://", "http://"), ("s3:///k", "s3:///k")]
    {
        let error = remote.open(address.as_ref()).err().unwrap().to_string();
        assert!(error.contains(holds), "{error}");
    }
    let error = Model::open(&remote, &[server.url("/").into()]).err().unwrap().to_string();
    assert!(error.contains("no file on it"), "{error}");
    // Routes for local files refuse a server's.
    let model = Model::open(&remote, &[path]).unwrap();
    let plan = Plan::new(&model, &Selection::default(), plan::PlanOptions::ring()).unwrap();
    for route in [Route::Cached, Route::Pinned] {
        let refused = Prepared::new(&plan, &model.files, &Options { route, ..Options::default() });
        assert!(matches!(refused, Err(Error::NoFile { .. })));
    }
}

#[test]
fn a_cancelled_load_ends_soon() {
    let (server, remote, path) = start();
    let model = Model::open(&remote, &[path]).unwrap();
    let plan = Plan::new(&model, &Selection::default(), plan::PlanOptions::ring()).unwrap();
    let options = Options { slot: Some(SLOT), ..Options::default() };
    let prepared = Prepared::new(&plan, &model.files, &options).unwrap();
    server.goes(Wrong::Hangs);
    let engine = RingEngine::start(&Emulated::new(), &plan, prepared).unwrap();
    while server.state.requests.load(Ordering::Relaxed) == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let begun = Instant::now();
    drop(engine);
    // The server would block it for twenty seconds.
    assert!(begun.elapsed() < Duration::from_secs(8), "it waited for the server");
}

/// Reading headers and listing a prefix can be cancelled.
#[test]
fn waits_for_a_server_can_be_cancelled() {
    for address in ["/m/model.safetensors", "s3://m/llama"] {
        let (server, ..) = start();
        server.goes(Wrong::Hangs);
        let config = s3_config(&server, LONG);
        let (stopped, remote) = (config.stopped.clone(), Remote::new(config).unwrap());
        let path = if address.starts_with('/') { server.url(address) } else { address.into() };
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let opened = scope.spawn(|| Model::open(&remote, &[path.into()]).err());
            while server.state.requests.load(Ordering::Relaxed) < 2 && !opened.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
            }
            stopped.store(true, Ordering::Relaxed);
            let error = opened.join().unwrap();
            assert!(matches!(error, Some(Error::Cancelled)), "{address}: {error:?}");
        });
        // The server would block it for twenty seconds.
        assert!(begun.elapsed() < Duration::from_secs(15), "it waited for the server");
    }
}
