//! A drive's identity: identify data, kept as raw bytes and read through the views of `proto`.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use onehop_proto::format::{self, Format};
use onehop_proto::identify::{self, Controller, NamespaceId};
use onehop_proto::regs::{Cap, Version};

use crate::control::Control;
use crate::durability::AcknowledgedWrites;
use crate::ladder::RESET_PAUSES;
use crate::{Error, Options, Result};

/// Longer commands are no faster, and each slot of a queue has a PRP list for the longest one.
pub(crate) const LONGEST_TRANSFER: u64 = 64 << 20;

/// A controller's identity and capabilities.
#[derive(Clone)]
pub struct Identity {
    bytes: Box<[u8; identify::BYTES]>,
    /// The drive's name, for messages.
    pub name: String,
    /// The capabilities register.
    pub cap: Cap,
    /// The version register.
    pub version: Version,
    /// The power of two of a memory page.
    pub page_shift: u32,
    /// Most bytes of one command: the controller's limit, or that of the options if it is lower.
    pub max_transfer: u64,
    /// I/O queue pairs that the controller granted.
    pub queues: u32,
    /// Whether it is a model of a drive.
    pub simulated: bool,
}

impl Identity {
    pub(crate) fn new(control: &Control, data: &[u8], options: &Options) -> Result<Self> {
        let bytes = page(&control.port.name, data)?;
        let view = Controller::new(&bytes);
        let name = control.port.name.clone();
        let (sqes, cqes) = (view.sqes(), view.cqes());
        if !sqes.allows(6) || !cqes.allows(4) {
            let why =
                format!("it does not take 64-byte submissions and 16-byte completions ({sqes:?}, {cqes:?})");
            return Err(Error::Unsupported { drive: name, why });
        }
        if view.cntrltype() > 1 {
            let why = format!("it is not an I/O controller (CNTRLTYPE {})", view.cntrltype());
            return Err(Error::Unsupported { drive: name, why });
        }
        let limit = format::max_transfer_bytes(view.mdts(), control.cap.mpsmin());
        let page = 1 << control.page_shift;
        // A controller with longer pages than the longest transfer was refused.
        let wanted = options.max_transfer.clamp(page, LONGEST_TRANSFER);
        let max_transfer = limit.unwrap_or(u64::MAX).min(wanted);
        Ok(Self {
            bytes: bytes.clone(),
            name,
            cap: control.cap,
            version: control.version,
            page_shift: control.page_shift,
            max_transfer,
            queues: 0,
            simulated: control.port.simulated,
        })
    }

    /// The identify data.
    #[must_use]
    pub fn controller(&self) -> Controller<'_> {
        Controller::new(&self.bytes)
    }

    /// The serial number.
    #[must_use]
    pub fn serial(&self) -> String {
        self.controller().sn().to_string()
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> String {
        self.controller().mn().to_string()
    }

    /// The firmware revision.
    #[must_use]
    pub fn firmware(&self) -> String {
        self.controller().fr().to_string()
    }

    /// How long a shutdown may take.
    #[must_use]
    pub fn shutdown_time(&self) -> std::time::Duration {
        // RTD3E is in microseconds. A controller that reports none gets as long as a slow one needs.
        match self.controller().rtd3e() {
            0 => std::time::Duration::from_secs(10),
            us => std::time::Duration::from_micros(us.into()).max(std::time::Duration::from_secs(1)),
        }
    }
}

/// A namespace.
#[derive(Clone)]
pub struct Namespace {
    bytes: Box<[u8; identify::BYTES]>,
    /// Its identifier.
    pub nsid: u32,
    /// The format of its blocks in memory. The controller generates and strips protection information: metadata that
    /// consists of nothing else is not transferred at all.
    pub format: Format,
    /// How it is formatted.
    pub medium: Format,
    /// How many blocks it has.
    pub blocks: u64,
    /// Bytes of a block in memory.
    pub(crate) unit: u64,
    /// Whether blocks have no metadata, as is most common: commands then move data only.
    pub(crate) is_plain: bool,
    /// Identifies its drive.
    tag: Arc<()>,
    /// Whether it is still as described here; the same for all clones.
    valid: Arc<AtomicBool>,
    pub(crate) account: Arc<AcknowledgedWrites>,
    /// All its identifiers; the drive may report more of them later. All clones share them.
    ids: Arc<Mutex<Vec<NamespaceId>>>,
    /// Identify commands for it without an answer, since the last answer.
    unanswered: Arc<AtomicU32>,
}

impl Namespace {
    pub(crate) fn new(
        control: &Control,
        nsid: u32,
        data: &[u8],
        account: Arc<AcknowledgedWrites>,
    ) -> Result<Self> {
        let drive = &control.port.name;
        let bytes = page(drive, data)?;
        let view = identify::Namespace::new(&bytes);
        if !view.active() {
            return Err(Error::NoNamespace { drive: drive.clone(), nsid });
        }
        let medium = view.format().map_err(|source| Error::Format { nsid, source })?;
        let format = travelling(medium);
        let blocks = view.nsze();
        let nonsense =
            |why| Err(Error::Nonsense { drive: drive.clone(), what: "identify namespace data", why });
        if blocks == 0 {
            return nonsense(format!("namespace {nsid} is active and has no blocks (NSZE is 0)"));
        }
        let unit = format.transfer_bytes(1).unwrap_or(u64::MAX);
        let is_plain = medium.metadata == 0 && medium.pi == 0;
        if medium.transfer_bytes(blocks).is_none() {
            let bytes = format.lba_bytes();
            return nonsense(format!(
                "namespace {nsid} has {blocks} blocks of {bytes} bytes, more than 64 bits count"
            ));
        }
        let (tag, valid) = (control.tag.clone(), Arc::new(AtomicBool::new(true)));
        let (nguid, eui64) = (view.nguid(), view.eui64());
        let nguid = (nguid != [0; 16]).then_some(NamespaceId::Nguid(nguid));
        let eui64 = (eui64 != [0; 8]).then_some(NamespaceId::Eui64(eui64));
        let ids = Arc::new(Mutex::new(nguid.into_iter().chain(eui64).collect()));
        let unanswered = Arc::default();
        Ok(Self { bytes, nsid, format, medium, blocks, unit, is_plain, tag, valid, account, ids, unanswered })
    }

    /// Whether it has identifiers.
    pub(crate) fn has_ids(&self) -> bool {
        !self.ids().is_empty()
    }

    /// Adds identifiers.
    pub(crate) fn learn(&self, ids: &[NamespaceId]) {
        let mut known = self.ids();
        for id in ids {
            if !known.contains(id) {
                known.push(*id);
            }
        }
    }

    fn ids(&self) -> MutexGuard<'_, Vec<NamespaceId>> {
        self.ids.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Compares it with new identify data: it must not have been formatted, shrunk, or replaced by another namespace
    /// with its number. New identifiers count in later comparisons.
    pub(crate) fn compare(&self, now: Option<&Self>) {
        match now {
            Some(now) if now.medium == self.medium && now.blocks >= self.blocks && self.is_same(now) => {
                self.learn(&now.ids());
                self.unanswered.store(0, Ordering::Relaxed);
            }
            _ => self.valid.store(false, Ordering::Release),
        }
    }

    /// Counts an Identify command that was not answered. After so many that a reset has one try left, the namespace
    /// counts as changed and is skipped: a single namespace must not cost the drive.
    pub(crate) fn count_unanswered(&self) {
        let before = self.unanswered.fetch_add(1, Ordering::Relaxed);
        if before as usize + 1 >= RESET_PAUSES.len() {
            self.valid.store(false, Ordering::Release);
        }
    }

    /// Whether all identifiers are those of the same namespace. They never change during its life: a changed or missing
    /// one means another namespace. An additional one means nothing, unless there was none before.
    fn is_same(&self, now: &Self) -> bool {
        let (before, now) = (self.ids(), now.ids());
        before.is_empty() == now.is_empty() && before.iter().all(|id| now.contains(id))
    }

    /// Whether it is still as described here.
    #[inline]
    pub(crate) fn is_valid(&self) -> bool {
        self.valid.load(Ordering::Acquire)
    }

    /// Whether commands for it may be sent to this drive.
    #[inline]
    pub(crate) fn check(&self, control: &Control) -> Result<()> {
        if !Arc::ptr_eq(&self.tag, &control.tag) {
            return Err(Error::Foreign { what: "namespace", drive: control.port.name.clone() });
        }
        if !self.is_valid() {
            return Err(Error::NamespaceChanged { drive: control.port.name.clone(), nsid: self.nsid });
        }
        Ok(())
    }

    /// Whether blocks have protection information that is not transferred.
    pub(crate) fn hides_metadata(&self) -> bool {
        self.format != self.medium
    }

    /// The identify data.
    #[must_use]
    pub fn identify(&self) -> identify::Namespace<'_> {
        identify::Namespace::new(&self.bytes)
    }

    /// Data bytes of the whole namespace.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.format.data_bytes(self.blocks).unwrap_or(u64::MAX)
    }
}

/// The part of a block that is transferred when commands set PRACT.
fn travelling(medium: Format) -> Format {
    if medium.pi != 0 && medium.metadata == Format::PI_BYTES {
        Format { metadata: 0, extended: false, ..medium }
    } else {
        medium
    }
}

fn page(drive: &str, data: &[u8]) -> Result<Box<[u8; identify::BYTES]>> {
    <[u8; identify::BYTES]>::try_from(data).map(Box::new).map_err(|_| Error::Nonsense {
        drive: drive.to_owned(),
        what: "identify data",
        why: format!("{} bytes instead of {}", data.len(), identify::BYTES),
    })
}
