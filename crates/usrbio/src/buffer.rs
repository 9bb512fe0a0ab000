//! Buffers and rings in host memory, created by a program.

use std::fs::{DirEntry, File};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use onehop_os::HostMem;

use crate::mount::{self, Mount, Submissions};
use crate::ring::{Client, Completion, HeldClient, Request, bytes};
use crate::{Error, Id, Name, Result, RingName, SHM};

/// The prefix of buffers' names in shared memory.
const PREFIX: &str = "hf3fs-iov-";
/// Memory of at least this length is allocated on first touch: allocating a gibibyte takes 0.2 to 0.4 s.
const LONG: usize = 16 << 20;

/// Checks that shared memory has room for a new file of `len` bytes, and for the untouched rest of all other buffers of
/// its user. Other users' buffers do not count: they could reserve everything.
fn check_room(len: u64, owner: u32) -> Result<()> {
    let room = rustix::fs::statvfs(SHM).map_err(|e| Error::file("statvfs", SHM, e))?;
    let is_theirs = |entry: &DirEntry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
    let files = std::fs::read_dir(SHM).map_err(|e| Error::file("list", SHM, e))?.flatten().filter(is_theirs);
    let files = files.filter_map(|entry| entry.metadata().ok()).filter(|data| data.uid() == owner);
    let untouched = files.map(|data| data.len().saturating_sub(data.blocks().saturating_mul(512)));
    let reserved = untouched.fold(0, u64::saturating_add).saturating_sub(len);
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    // A tmpfs without a limit reports no blocks at all.
    if room.f_blocks == 0 || reserved.saturating_add(len) <= free {
        return Ok(());
    }
    Err(Error::NoRoom { len, at: SHM, free, reserved })
}

/// A file in shared memory, unlinked on request or when its creator drops it.
struct Shm {
    path: PathBuf,
    mem: HostMem,
    _lazy: Option<LazyBuffer>,
}

/// Long buffers of this process. If there are none, a short buffer skips the check of all files.
static LAZY_BUFFERS: AtomicUsize = AtomicUsize::new(0);

/// Counts a long buffer.
struct LazyBuffer;

impl LazyBuffer {
    fn new() -> Self {
        LAZY_BUFFERS.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for LazyBuffer {
    fn drop(&mut self) {
        LAZY_BUFFERS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shm {
    /// Allocates memory. Returns it with the ID of its owner. A full `/dev/shm` is an error here, instead of a signal
    /// later.
    fn create(len: usize, node: Option<u32>) -> Result<(Self, u32)> {
        Self::make(len, node).map_err(|why| match why {
            Error::NoRoom { .. } => why,
            why => Error::NoShared { len, why: Box::new(why) },
        })
    }

    fn make(len: usize, node: Option<u32>) -> Result<(Self, u32)> {
        let path = Path::new(SHM).join(format!("{PREFIX}{}", Id::random()?));
        // Other users have no access; daemons run as the same user, or as root.
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|e| Error::file("create", &path, e))?;
        let failed = |call| {
            let path = &path;
            move |e: std::io::Error| Error::file(call, path, e)
        };
        let made = file.set_len(len as u64).map_err(failed("ftruncate")).and_then(|()| {
            let (mem, owner) = (HostMem::of_shared(&file)?, file.metadata().map_err(failed("fstat"))?.uid());
            if let Some(node) = node {
                mem.prefer_node(node);
            }
            let is_short = len < LONG;
            if !is_short || LAZY_BUFFERS.load(Ordering::Relaxed) > 0 {
                check_room(len as u64, owner)?;
            }
            if is_short {
                rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len as u64)
                    .map_err(|e| Error::file("fallocate", &path, e))?;
            }
            Ok((mem, owner, (!is_short).then(LazyBuffer::new)))
        });
        let (mem, owner, lazy) = made.inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        Ok((Self { path, mem, _lazy: lazy }, owner))
    }

    fn unlink(&self) {
        // Fails if it was already removed.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A buffer that is registered with the daemon.
pub struct Buffer {
    mount: Arc<Mount>,
    name: Name,
    shm: Shm,
    /// Whether this side created it, and so removes it.
    own: bool,
}

impl Buffer {
    /// Creates and registers a buffer.
    ///
    /// # Errors
    /// When there is no memory, or the daemon refuses it.
    pub fn create(mount: &Arc<Mount>, len: usize, block: u64, node: Option<u32>) -> Result<Self> {
        if len == 0 || block > len as u64 {
            return Err(Error::Argument(format!("a buffer of {len} bytes in blocks of {block}")));
        }
        let name = Name::buffer(Id::random()?, block);
        let (shm, _) = Shm::create(len, node)?;
        mount.publish(&name, &shm.path).inspect_err(|_| shm.unlink())?;
        Ok(Self { mount: mount.clone(), name, shm, own: true })
    }

    /// Opens a buffer that another program created.
    ///
    /// # Errors
    /// When it does not exist, is shorter, or may not be written.
    pub fn open(mount: &Arc<Mount>, id: Id, len: usize, block: u64) -> Result<Self> {
        let name = Name::buffer(id, block);
        let path = mount.target(&name.to_string())?;
        let mem = mount::map(&path)?;
        if len > mem.len() || len == 0 {
            return Err(Error::Argument(format!("the buffer has {} bytes, not {len}", mem.len())));
        }
        Ok(Self {
            mount: mount.clone(),
            name,
            shm: Shm { path, mem: mem.slice(0..len)?, _lazy: None },
            own: false,
        })
    }

    /// The ID.
    #[must_use]
    pub fn id(&self) -> Id {
        self.name.id
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &HostMem {
        &self.shm.mem
    }

    /// Removes its name in `/dev/shm`; processes that have it open keep it.
    pub fn unlink(&self) {
        self.shm.unlink();
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.own {
            // Fails if the daemon is gone.
            let _ = self.mount.withdraw(&self.name);
            self.shm.unlink();
        }
    }
}

/// A ring that is registered with the daemon.
pub struct Ring {
    mount: Arc<Mount>,
    name: Name,
    mem: HostMem,
    client: Client,
    submissions: Arc<Submissions>,
}

impl Ring {
    /// Creates and registers a ring.
    ///
    /// # Errors
    /// When there is no memory, or the daemon refuses it.
    pub fn create(mount: &Arc<Mount>, entries: i32, ring: RingName, node: Option<u32>) -> Result<Self> {
        let len = bytes(entries).ok_or_else(|| Error::Argument(format!("a ring of {entries} entries")))?;
        if ring.depth > entries {
            let depth = ring.depth;
            return Err(Error::Argument(format!("a ring of {entries} entries never has {depth}")));
        }
        let name = Name { ring: Some(ring), ..Name::buffer(Id::random()?, 0) };
        let (shm, owner) = Shm::create(len, node)?;
        let published = mount.publish(&name, &shm.path);
        // The daemon has mapped it by now, or never will.
        shm.unlink();
        published?;
        let made = mount
            .submissions(owner, ring.priority)
            .and_then(|submissions| Ok((submissions, Client::new(shm.mem.clone())?)));
        let (submissions, client) = made.inspect_err(|_| {
            let _ = mount.withdraw(&name);
        })?;
        Ok(Self { mount: mount.clone(), name, mem: shm.mem, client, submissions })
    }

    /// The ID.
    #[must_use]
    pub fn id(&self) -> Id {
        self.name.id
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &HostMem {
        &self.mem
    }

    /// The number of entries.
    #[must_use]
    pub fn entries(&self) -> i32 {
        self.client.entries()
    }

    /// Locks out other threads: see [`Client::hold`].
    #[must_use]
    pub fn hold(&self) -> HeldClient<'_> {
        self.client.hold()
    }

    /// Enters a request: see [`Client::prepare`].
    ///
    /// # Errors
    /// When the ring is full.
    pub fn prepare(&self, request: &Request) -> Result<i32> {
        self.client.prepare(request)
    }

    /// Signals the daemon that there are submissions.
    pub fn submit(&self) {
        self.submissions.post();
    }

    /// Waits for `least` completions and takes at most `most`. At the given time, returns fewer than `least`.
    ///
    /// # Errors
    /// When the ring's contents are inconsistent, or the daemon has ended and nothing more will come.
    pub fn wait(
        &self,
        out: &mut Vec<Completion>,
        (least, most): (usize, usize),
        until: Option<SystemTime>,
        nap: Duration,
    ) -> Result<usize> {
        let mut count = 0;
        let mut spun = None;
        let (mut looked, mut is_served) = (Instant::now(), true);
        loop {
            let taken = self.client.take(out, most - count)?;
            count += taken;
            if taken > 0 {
                // There is room again for completions that the daemon holds back.
                self.submit();
                spun = None;
                if count < most {
                    continue;
                }
            }
            if count >= least.min(most) {
                return Ok(count);
            }
            if !is_served {
                // The last completions of the daemon were taken just now.
                return if count > 0 { Ok(count) } else { Err(Error::Gone) };
            }
            let left = match until {
                None => nap,
                // The wall clock, as in the original: a time in the past is no wait at all.
                Some(until) => match until.duration_since(SystemTime::now()) {
                    Ok(left) if !left.is_zero() => left.min(nap),
                    _ => return Ok(count),
                },
            };
            // A wakeup takes longer than most reads.
            let since = *spun.get_or_insert_with(Instant::now);
            if since.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            self.client.wait(left);
            if looked.elapsed() >= MAP_POLL_INTERVAL {
                looked = Instant::now();
                is_served = self.submissions.are_served();
            }
        }
    }
}

/// How long a program polls before it sleeps.
const SPIN: Duration = Duration::from_micros(10);
/// How often a waiting program checks whether there is a daemon.
const MAP_POLL_INTERVAL: Duration = Duration::from_millis(100);

impl Drop for Ring {
    fn drop(&mut self) {
        // Fails if the daemon is gone.
        let _ = self.mount.withdraw(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    const MIB: usize = 1 << 20;

    /// Run by [`long_buffers_are_allocated_on_first_touch`], with an empty `/dev/shm` of 64 MiB.
    #[test]
    fn in_a_small_shm() {
        if std::env::var_os("ONEHOP_TEST_SMALL_SHM").is_none() {
            return;
        }
        let blocks = |shm: &Shm| std::fs::metadata(&shm.path).unwrap().blocks();
        let (short, owner) = Shm::create(MIB, None).unwrap();
        assert_eq!((blocks(&short) * 512, owner), (MIB as u64, rustix::process::geteuid().as_raw()));
        let (first, _) = Shm::create(40 * MIB, None).unwrap();
        assert_eq!(blocks(&first), 0);
        let refuse = |len, of_others: usize| {
            let error = Shm::create(len, None).err().unwrap();
            assert!(
                matches!(error, Error::NoRoom { reserved, .. } if reserved == of_others as u64),
                "{error}"
            );
            assert_eq!(error.errno(), rustix::io::Errno::NOMEM.raw_os_error());
            assert_eq!(std::fs::read_dir(SHM).unwrap().count(), 2, "it left a file behind");
        };
        refuse(24 * MIB, 40 * MIB);
        // A short buffer must not take reserved memory either.
        let most = Shm::create(23 * MIB, None).unwrap();
        assert!(Shm::create(MIB, None).is_err());
        std::fs::remove_file(&most.0.path).unwrap();
        drop(most);
        // Touched memory is no longer reserved, but not free either.
        first.mem.fill(0, 30 * MIB, 1).unwrap();
        refuse(24 * MIB, 10 * MIB);
        let error = Shm::create(15 * MIB, None).map(|(shm, _)| shm.mem.fill(0, 15 * MIB, 1).unwrap());
        error.unwrap();
        let names = std::fs::read_dir(SHM).unwrap().flatten().map(|entry| entry.path());
        names
            .filter(|path| *path != short.path && *path != first.path)
            .for_each(|path| std::fs::remove_file(path).unwrap());
        // Reservations of other users do not count.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&first.path, Some(21_001), None).unwrap();
            drop(Shm::create(24 * MIB, None).unwrap());
        }
    }

    #[test]
    fn long_buffers_are_allocated_on_first_touch() {
        let script = "mount -t tmpfs -o size=64m none /dev/shm && echo mounted && exec \"$0\" --exact \
                      buffer::tests::in_a_small_shm --nocapture";
        let mut small = Command::new("unshare");
        small.args(["--mount", "sh", "-c", script]).arg(std::env::current_exe().unwrap());
        let output = small.env("ONEHOP_TEST_SMALL_SHM", "yes").output();
        let stdout =
            output.as_ref().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        if !stdout.starts_with("mounted") {
            let _ = writeln!(std::io::stderr(), "SKIPPED: cannot mount a /dev/shm for this test: {output:?}");
            return;
        }
        assert!(stdout.contains("1 passed"), "{output:?}");
    }
}
