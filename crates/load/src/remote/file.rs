//! An object on a server, as a file with random access.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::path::Path as Location;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt};
use tokio::runtime::Runtime;

use super::Config;
use crate::error::{Error, Result};
use crate::identity::Change;
use crate::source::{Fetch, Source};

/// Interval between checks for cancellation.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Delay of the first retry; it doubles with each further one, up to a limit.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// Time limit for querying an object or reading a header; a read gets more time for its bytes at the minimum rate.
const PATIENCE: Duration = Duration::from_secs(120);
const SLOWEST: u64 = 64 << 10;

/// Why a read ended.
pub(super) enum ReadFailure {
    /// A retry may succeed.
    Again(Box<dyn std::error::Error + Send + Sync>),
    /// A retry is pointless.
    Final(object_store::Error),
    /// The error is ours.
    Ours(Error),
}

impl ReadFailure {
    pub(super) fn late(waited: Duration) -> Self {
        Self::Again(format!("no byte came for {waited:?}").into())
    }

    pub(super) fn error(self, file: &str, tries: u32) -> Error {
        let file = file.to_owned();
        match self {
            Self::Again(source) => Error::Server { file, tries, source },
            Self::Final(source @ object_store::Error::NotFound { .. }) => {
                let source = std::io::Error::new(std::io::ErrorKind::NotFound, source);
                Error::Open { file, source }
            }
            Self::Final(source) => Error::Server { file, tries, source: Box::new(source) },
            Self::Ours(error) => error,
        }
    }
}

impl From<object_store::Error> for ReadFailure {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::Generic { .. } => Self::Again(Box::new(error)),
            other => Self::Final(other),
        }
    }
}

/// The identity of an object.
#[derive(Clone, PartialEq, Eq)]
struct ObjectIdentity {
    bytes: u64,
    tag: Option<String>,
    modified: String,
    version: Option<String>,
}

impl fmt::Display for ObjectIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.bytes, self.modified)?;
        self.tag.iter().try_for_each(|tag| write!(f, " with the tag {tag}"))?;
        self.version.iter().try_for_each(|version| write!(f, ", version {version}"))
    }
}

impl ObjectIdentity {
    fn of(meta: &ObjectMeta) -> Self {
        let (tag, version) = (meta.e_tag.clone(), meta.version.clone());
        Self { bytes: meta.size, tag, modified: meta.last_modified.to_string(), version }
    }

    /// The tag for `If-Match`. A weak one is only compared, because `If-Match` never holds for it.
    fn strong_tag(&self) -> Option<String> {
        self.tag.clone().filter(|tag| !tag.starts_with("W/"))
    }
}

struct RemoteFileInner {
    name: String,
    runtime: Arc<Runtime>,
    store: Arc<dyn ObjectStore>,
    location: Location,
    config: Config,
    looks: ObjectIdentity,
}

/// An object on a server.
pub(super) struct RemoteFile(Arc<RemoteFileInner>);

impl RemoteFile {
    pub(super) fn open(
        name: String,
        runtime: Arc<Runtime>,
        store: Arc<dyn ObjectStore>,
        location: Location,
        config: Config,
    ) -> Result<Self> {
        let looks = ObjectIdentity { bytes: 0, tag: None, modified: String::new(), version: None };
        let inner = RemoteFileInner { name, runtime, store, location, config, looks };
        let looks = inner.head()?;
        Ok(Self(Arc::new(RemoteFileInner { looks, ..inner })))
    }
}

/// Waits for a server, up to the idle limit or until the caller cancels.
pub(super) async fn in_time<T>(
    work: impl Future<Output = T>,
    idle: Duration,
    go_on: &dyn Fn() -> bool,
) -> Result<T, ReadFailure> {
    let (mut work, begun) = (pin!(work), Instant::now());
    loop {
        if !go_on() {
            return Err(ReadFailure::Ours(Error::Cancelled));
        }
        if let Ok(done) = tokio::time::timeout(CANCEL_POLL_INTERVAL, &mut work).await {
            return Ok(done);
        }
        if begun.elapsed() >= idle {
            return Err(ReadFailure::late(idle));
        }
    }
}

impl RemoteFileInner {
    /// Fetches its present identity.
    fn head(&self) -> Result<ObjectIdentity> {
        let mut looks = None;
        self.with_deadline(0, |go_on| {
            self.with_retries(go_on, async || {
                let meta = in_time(self.store.head(&self.location), self.config.idle, go_on).await??;
                looks = Some(ObjectIdentity::of(&meta));
                Ok(())
            })
        })?;
        looks.ok_or(Error::Incomplete)
    }

    /// Runs `work` until the caller cancels, or the time limit for this many bytes is over.
    fn with_deadline<T>(&self, bytes: u64, work: impl FnOnce(&dyn Fn() -> bool) -> Result<T>) -> Result<T> {
        let (begun, limit) = (Instant::now(), PATIENCE + Duration::from_secs(bytes / SLOWEST));
        let stopped = || self.config.stopped.load(Ordering::Relaxed);
        match work(&|| !stopped() && begun.elapsed() < limit) {
            Err(Error::Cancelled) if !stopped() => {
                Err(Error::Slow { file: self.name.clone(), waited: limit })
            }
            other => other,
        }
    }

    /// Retries until it succeeds, or must not be retried; returns the number of retries.
    fn with_retries(
        &self,
        go_on: &dyn Fn() -> bool,
        mut work: impl AsyncFnMut() -> Result<(), ReadFailure>,
    ) -> Result<u64> {
        let (mut tries, mut pause) = (0, FIRST_PAUSE);
        self.runtime.block_on(async {
            loop {
                tries += 1;
                match work().await {
                    Ok(()) => return Ok(u64::from(tries - 1)),
                    Err(ReadFailure::Again(_)) if tries <= self.config.retries => {}
                    Err(failure) => return Err(failure.error(&self.name, tries)),
                }
                let begun = Instant::now();
                while begun.elapsed() < pause {
                    if !go_on() {
                        return Err(Error::Cancelled);
                    }
                    tokio::time::sleep(CANCEL_POLL_INTERVAL.min(pause)).await;
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        })
    }

    fn changed(&self, now: impl fmt::Display) -> ReadFailure {
        let (was, now) = (self.looks.to_string(), now.to_string());
        ReadFailure::Ours(Error::ChangedOnServer { file: self.name.clone(), was, now })
    }

    /// One request for the missing bytes.
    async fn request(
        &self,
        (offset, bytes): (u64, u64),
        done: &mut u64,
        go_on: &dyn Fn() -> bool,
        take: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<(), ReadFailure> {
        let range = GetRange::Bounded(offset + *done..offset + bytes);
        let options = GetOptions {
            range: Some(range),
            if_match: self.looks.strong_tag(),
            version: self.looks.version.clone(),
            ..GetOptions::default()
        };
        let got = match in_time(self.store.get_opts(&self.location, options), self.config.idle, go_on).await?
        {
            Err(object_store::Error::Precondition { .. }) => {
                return Err(self.changed("another object: the server says that its tag is no longer this"));
            }
            other => other?,
        };
        let now = ObjectIdentity::of(&got.meta);
        if now != self.looks {
            return Err(self.changed(now));
        }
        let mut body = got.into_stream();
        while *done < bytes {
            let Some(part) = in_time(body.next(), self.config.idle, go_on).await? else {
                return Err(ReadFailure::Again("the answer ended early".into()));
            };
            let part = part?;
            // Surplus bytes from the server are ignored.
            let part = &part[..part.len().min((bytes - *done) as usize)];
            take(*done, part).map_err(ReadFailure::Ours)?;
            *done += part.len() as u64;
        }
        Ok(())
    }
}

impl Fetch for RemoteFileInner {
    fn fetch(
        &self,
        offset: u64,
        bytes: u64,
        go_on: &dyn Fn() -> bool,
        take: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<u64> {
        let length = self.looks.bytes;
        if offset.checked_add(bytes).is_none_or(|end| end > length) {
            return Err(Error::Ended { file: self.name.clone(), offset, bytes, length });
        }
        let mut done = 0;
        self.with_retries(go_on, async || self.request((offset, bytes), &mut done, go_on, take).await)
    }
}

impl Source for RemoteFile {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn bytes(&self) -> u64 {
        self.0.looks.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let bytes = buffer.len() as u64;
        let mut take = |at: u64, part: &[u8]| {
            buffer[at as usize..][..part.len()].copy_from_slice(part);
            Ok(())
        };
        self.0.with_deadline(bytes, |go_on| self.0.fetch(offset, bytes, go_on, &mut take)).map(|_| ())
    }

    fn fetch(&self) -> Option<Arc<dyn Fetch>> {
        Some(self.0.clone())
    }

    /// Checks the object again.
    fn still_same(&self) -> Result<Option<Change>> {
        let now = self.0.head()?;
        if now == self.0.looks { Ok(None) } else { Err(self.0.changed(now).error(&self.0.name, 1)) }
    }
}
