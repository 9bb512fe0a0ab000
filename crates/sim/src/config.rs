//! Configuration of a simulated drive.

use std::path::{Path, PathBuf};
use std::time::Duration;

use onehop_proto::regs::{Cmbsz, Version};

use crate::faults::Fault;
use crate::options::{self, KEYS};
use crate::{Error, Result};

/// Where a drive's blocks are stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Media {
    /// In memory of this size, lost with the drive.
    Memory(u64),
    /// In an image file.
    Image {
        /// The file.
        path: PathBuf,
        /// Size to create or extend it to.
        size: Option<u64>,
    },
}

impl Media {
    /// The files of the drive's content: the image, and beside it the metadata of its blocks. The second is listed even
    /// if it does not exist: a drive without metadata may be opened on an image that has some.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Memory(_) => Vec::new(),
            Self::Image { path, .. } => vec![path.clone(), metadata_path(path)],
        }
    }
}

/// The file beside an image that holds the metadata of its blocks.
pub(crate) fn metadata_path(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".meta");
    name.into()
}

/// How the null controller completes a batch of commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NullOrder {
    /// In the order in which they were submitted.
    Straight,
    /// The last one first.
    Reverse,
}

/// Configuration of a simulated drive; the default is a plain drive of 64 MiB in memory.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the blocks are stored.
    pub media: Media,
    /// Data bytes of a block.
    pub lba: u32,
    /// Metadata bytes of a block.
    pub ms: u16,
    /// Metadata follows each block's data (extended LBA) instead of being in a separate buffer.
    pub ext: bool,
    /// Protection information: 0 none, else type 1 to 3, in the last 8 bytes of each block's metadata.
    pub pi: u8,
    /// Namespaces; the media is split among them.
    pub namespaces: u32,
    /// Longest transfer: `2^mdts` smallest pages; 0 for no limit.
    pub mdts: u8,
    /// I/O queue pairs granted.
    pub queues: u16,
    /// CAP.MQES: entries of the longest I/O queue, zero-based.
    pub mqes_z: u16,
    /// CAP.DSTRD: doorbells are `4 << dstrd` bytes apart.
    pub dstrd: u8,
    /// CAP.CQR: I/O queues must be contiguous.
    pub cqr: bool,
    /// CAP.MPSMIN: the smallest page is `4096 << mpsmin`.
    pub mpsmin: u8,
    /// CAP.MPSMAX: the largest page is `4096 << mpsmax`.
    pub mpsmax: u8,
    /// Bytes of controller memory buffer; 0 for none.
    pub cmb: u64,
    /// What the controller memory buffer may be used for.
    pub cmb_uses: Cmbsz,
    /// SGLs are supported.
    pub sgl: bool,
    /// There is a volatile write cache.
    pub vwc: bool,
    /// CAP.TO: longest wait for ready, in 500 ms.
    pub to: u8,
    /// CRTO.CRWMT, in 500 ms; only from version 2.0 on. Without it, CAP.TO's value.
    pub crto: Option<u16>,
    /// Delay from EN to RDY.
    pub ready: Duration,
    /// The NVMe version: 1.4 or 2.0.
    pub version: Version,
    /// Serial number, at most 20 characters.
    pub serial: String,
    /// Model name, at most 40 characters.
    pub model: String,
    /// Time that every I/O command takes.
    pub latency: Duration,
    /// Random additional time per command, from zero to this.
    pub jitter: Duration,
    /// Bytes per second of the medium; 0 for no limit.
    pub bandwidth: u64,
    /// Maximum Asynchronous Event Requests, zero-based.
    pub aerl: u8,
    /// Maximum concurrent Aborts, zero-based.
    pub acl: u8,
    /// Doorbell Buffer Config is supported.
    pub dbbuf: bool,
    /// Pages of 4 KiB of host memory that the controller prefers; 0 for none.
    pub hmb: u32,
    /// The subsystem can be reset through NSSR.
    pub nssrs: bool,
    /// Seed of all random choices.
    pub seed: u64,
    /// A separate thread executes commands; otherwise register accesses and [`Sim::step`](crate::Sim::step) do.
    pub workers: bool,
    /// CRDT1 to CRDT3: how long a command with a retry delay waits, in units of 100 ms.
    pub crdt: [u16; 3],
    /// The unit in which the simulator itself counts CRDT, so that tests need not wait.
    pub crdt_unit: Duration,
    /// Each page gets a separate bus address, not adjacent to others.
    pub scatter: bool,
    /// I/O commands complete at once and move nothing.
    pub null: Option<NullOrder>,
    /// The faults, and when they strike.
    pub faults: Vec<Fault>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            media: Media::Memory(64 << 20),
            lba: 512,
            ms: 0,
            ext: false,
            pi: 0,
            namespaces: 1,
            mdts: 5,
            queues: 64,
            mqes_z: 1023,
            dstrd: 0,
            cqr: true,
            mpsmin: 0,
            mpsmax: 4,
            cmb: 0,
            cmb_uses: Cmbsz(0).with_sqs(true).with_cqs(true).with_lists(true).with_rds(true).with_wds(true),
            sgl: false,
            vwc: true,
            to: 15,
            crto: None,
            ready: Duration::ZERO,
            version: Version::V1_4,
            serial: "ONEHOP-SIM-1".into(),
            model: "onehop simulated drive".into(),
            latency: Duration::ZERO,
            jitter: Duration::ZERO,
            bandwidth: 0,
            aerl: 3,
            acl: 3,
            dbbuf: false,
            hmb: 0,
            nssrs: false,
            seed: 1,
            workers: true,
            crdt: [1, 2, 3],
            crdt_unit: Duration::from_millis(100),
            scatter: false,
            null: None,
            faults: Vec::new(),
        }
    }
}

impl Config {
    /// Parses what follows `sim:`: `mem:64M?lba=4096&fault=late@n=5,delay=20ms`, `disk.img?mdts=3`.
    ///
    /// # Errors
    /// Names the option that is unknown or has a bad value, and what is valid.
    pub fn parse(spec: &str) -> Result<Self> {
        let (media, list) = spec.split_once('?').unwrap_or((spec, ""));
        let mut config = Self { media: parse_media(media)?, ..Self::default() };
        for option in list.split('&').filter(|o| !o.is_empty()) {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let known = KEYS.iter().find(|k| k.name == key).ok_or_else(|| Error::UnknownOption {
                key: key.into(),
                spec: spec.into(),
                known: KEYS.iter().map(|k| k.name).collect::<Vec<_>>().join(", "),
            })?;
            (known.set)(&mut config, value).map_err(|e| e.about(key, value))?;
        }
        config.check()?;
        Ok(config)
    }

    /// Every option of [`Config::parse`], with its meaning.
    #[must_use]
    pub fn options() -> Vec<(&'static str, &'static str)> {
        KEYS.iter().map(|k| (k.name, k.means)).collect()
    }

    /// Checks whether such a drive is possible.
    ///
    /// # Errors
    /// Names the contradictory values.
    pub fn check(&self) -> Result<()> {
        let no = |why: String| Err(Error::Contradiction(why));
        if !self.lba.is_power_of_two() || !(512..=65536).contains(&self.lba) {
            return no(format!("lba={} is not a power of two from 512 to 65536", self.lba));
        }
        if !matches!(self.ms, 0 | 8 | 16 | 64) {
            return no(format!("ms={}: 0, 8, 16 and 64 bytes of metadata are known", self.ms));
        }
        if self.pi > 3 || self.pi != 0 && self.ms == 0 {
            return no(format!("pi={} with ms={}: types 1 to 3 take 8 bytes of metadata", self.pi, self.ms));
        }
        if self.mpsmin > self.mpsmax || self.mpsmax > 8 {
            return no(format!("mpsmin={} and mpsmax={} do not fit: both 0 to 8", self.mpsmin, self.mpsmax));
        }
        if self.queues == 0 || self.queues == u16::MAX || self.mqes_z == 0 || self.dstrd > 4 {
            return no("queues is 1 to 65534, mqes is 1 to 65535, dstrd is 0 to 4".into());
        }
        if self.namespaces == 0 || self.namespaces > 1024 {
            return no(format!("ns={}: 1 to 1024 namespaces are possible", self.namespaces));
        }
        if self.serial.len() > 20
            || self.model.len() > 40
            || !self.serial.is_ascii()
            || !self.model.is_ascii()
        {
            return no("serial has at most 20 and model at most 40 ASCII characters".into());
        }
        if self.version != Version::V1_4 && self.version != Version::V2_0 {
            return no(format!("version={}: 1.4 and 2.0 are known", self.version));
        }
        if self.crto.is_some() && self.version < Version::V2_0 {
            return no("crto came with version 2.0; add version=2.0".into());
        }
        if self.ready > self.longest_ready() {
            return no(format!("ready={:?} is longer than to and crto allow", self.ready));
        }
        self.check_sizes()
    }

    fn check_sizes(&self) -> Result<()> {
        let no = |why: &str| Err(Error::Contradiction(why.into()));
        let smallest = u64::from(self.lba) + u64::from(self.ms);
        if self.mdts != 0 && (4096 << u32::from(self.mpsmin).min(8)) << self.mdts.min(40) < smallest {
            return no("mdts does not let a single block through");
        }
        if self.mdts > 20 {
            return no("mdts is 0 to 20");
        }
        if !self.cmb.is_multiple_of(4096) || self.cmb > 1 << 30 {
            return no("cmb is a multiple of 4096, at most 1G");
        }
        if let Media::Memory(bytes) = self.media
            && (bytes / u64::from(self.namespaces) < smallest || bytes > 1 << 44)
        {
            return no("memory media hold at least one block of each namespace, and at most 16T");
        }
        Ok(())
    }

    /// Interrupt vectors: one per queue pair and one for the admin queues, up to MSI-X's limit.
    #[must_use]
    pub fn vectors(&self) -> u16 {
        self.queues.saturating_add(1).min(2048)
    }

    /// How long a driver must wait for RDY at most.
    #[must_use]
    pub fn longest_ready(&self) -> Duration {
        Duration::from_millis(500) * u32::from(self.crto.unwrap_or(0).max(u16::from(self.to)))
    }
}

fn parse_media(text: &str) -> Result<Media> {
    match text.strip_prefix("mem:") {
        Some(size) => Ok(Media::Memory(options::size(size).map_err(|e| e.about("mem", size))?)),
        None if text == "mem" => Ok(Config::default().media),
        None if text.is_empty() => Err(Error::BadValue {
            key: "the drive".into(),
            value: text.into(),
            wanted: "give mem:64M or the path of an image file".into(),
        }),
        None => Ok(Media::Image { path: text.into(), size: None }),
    }
}
