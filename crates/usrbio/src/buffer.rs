//! Buffers and rings in host memory, as a program creates them.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use onehop_os::HostMem;

use crate::mount::{self, Mount, Submissions};
use crate::ring::{Client, Completion, Request, bytes};
use crate::{Error, Id, Name, Result, RingName, SHM};

/// A file in shared memory, unlinked on request or when its creator drops it.
struct Shm {
    path: PathBuf,
    mem: HostMem,
}

impl Shm {
    /// New memory, all of it allocated: a full `/dev/shm` is an error here and not a signal later.
    fn create(len: usize, node: Option<u32>) -> Result<Self> {
        Self::make(len, node).map_err(|why| Error::NoShared { len, why: Box::new(why) })
    }

    fn make(len: usize, node: Option<u32>) -> Result<Self> {
        let path = Path::new(SHM).join(format!("hf3fs-iov-{}", Id::random()?));
        // Other users have no access; daemons run as the same user, or as root.
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|e| Error::file("create", &path, e))?;
        let made = file.set_len(len as u64).map_err(|e| Error::file("ftruncate", &path, e)).and_then(|()| {
            let mem = HostMem::of_shared(&file)?;
            if let Some(node) = node {
                mem.prefer_node(node);
            }
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len as u64)
                .map_err(|e| Error::file("fallocate", &path, e))?;
            Ok(mem)
        });
        let mem = made.inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        Ok(Self { path, mem })
    }

    fn unlink(&self) {
        // It may have been removed already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A buffer that the daemon knows.
pub struct Buffer {
    mount: Arc<Mount>,
    name: Name,
    shm: Shm,
    /// Whether this side created it, and removes it.
    own: bool,
}

impl Buffer {
    /// A new one.
    ///
    /// # Errors
    /// When there is no memory, or the daemon refuses it.
    pub fn create(mount: &Arc<Mount>, len: usize, block: u64, node: Option<u32>) -> Result<Self> {
        if len == 0 || block > len as u64 {
            return Err(Error::Argument(format!("a buffer of {len} bytes in blocks of {block}")));
        }
        let name = Name::buffer(Id::random()?, block);
        let shm = Shm::create(len, node)?;
        mount.publish(&name, &shm.path).inspect_err(|_| shm.unlink())?;
        Ok(Self { mount: mount.clone(), name, shm, own: true })
    }

    /// One that another program created.
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
        Ok(Self { mount: mount.clone(), name, shm: Shm { path, mem: mem.slice(0..len)? }, own: false })
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> Id {
        self.name.id
    }

    /// Its memory.
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
            // A daemon that is gone has forgotten it.
            let _ = self.mount.withdraw(&self.name);
            self.shm.unlink();
        }
    }
}

/// A ring that the daemon knows.
pub struct Ring {
    mount: Arc<Mount>,
    name: Name,
    mem: HostMem,
    client: Client,
    submissions: Submissions,
}

impl Ring {
    /// A new one.
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
        let submissions = mount.submissions(ring.priority)?;
        let shm = Shm::create(len, node)?;
        let published = mount.publish(&name, &shm.path);
        // The daemon has mapped it by now, or never will.
        shm.unlink();
        published?;
        let made = Client::new(shm.mem.clone());
        let client = made.inspect_err(|_| {
            let _ = mount.withdraw(&name);
        })?;
        Ok(Self { mount: mount.clone(), name, mem: shm.mem, client, submissions })
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> Id {
        self.name.id
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &HostMem {
        &self.mem
    }

    /// Its entries.
    #[must_use]
    pub fn entries(&self) -> i32 {
        self.client.entries()
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

    /// Waits for `least` completions and takes `most` at most, until the given time; after that, fewer than `least`.
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
                // There is room again for completions that wait for it.
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
                // Its last completions were taken just now.
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
        // A daemon that is gone has forgotten it.
        let _ = self.mount.withdraw(&self.name);
    }
}
