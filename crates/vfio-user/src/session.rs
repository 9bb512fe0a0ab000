//! A session with one client: requests in, replies out.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::dma::Shared;
use crate::error::{Broken, Refusal};
use crate::function::{Function, REGIONS};
use crate::link::{Link, Message};
use crate::model::Vectors;
use crate::server::Event;
use crate::version;
use crate::wire::{Access, DmaMap, IrqData, RegionInfo, Request, SetIrqs};

/// Kinds of interrupts: INTx, MSI, MSI-X, errors, requests. One of MSI and MSI-X has any.
const IRQ_KINDS: u32 = 5;
const IRQ_MSI: u32 = 1;
const IRQ_MSIX: u32 = 2;
/// Event fds are how interrupts are told; each vector can be masked.
const IRQ_FLAGS: u32 = 1 | 2;
/// It is a PCI device; perhaps it can be reset.
const DEVICE_FLAGS: u32 = 2;
const DEVICE_RESET: u32 = 1;
/// It can be read and written.
const REGION_FLAGS: u32 = 1 | 2;
/// Parts of it can be mapped, and capabilities say which.
const REGION_MAPPED: u32 = 4 | 8;
/// The capability that lists such parts, and its version.
const SPARSE_MMAP: u32 = 1 | 1 << 16;

/// Whether to stop serving.
type Stop<'a> = dyn Fn() -> bool + 'a;

/// What a session has done.
#[derive(Default)]
pub(crate) struct Session {
    shared: Shared,
    agreed: bool,
}

/// Serves a client until it closes, breaks the protocol, or `stop` says so.
pub(crate) fn run(
    stream: UnixStream,
    function: &Function,
    stop: &dyn Fn() -> bool,
    tell: &dyn Fn(Event),
) -> Result<(), Broken> {
    let (link, mut session) = (Link::new(stream, stop), Session::default());
    let ended = session.serve(&link, function, tell);
    // Memory goes last: until it is reset, the device may still use it.
    function.interrupts.disconnect();
    function.reset();
    session.shared.clear();
    ended
}

/// What a request is answered with.
struct Answer {
    payload: Vec<u8>,
    file: Option<Arc<File>>,
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl Session {
    fn serve(
        &mut self,
        link: &Link<&Stop<'_>>,
        function: &Function,
        tell: &dyn Fn(Event),
    ) -> Result<(), Broken> {
        while let Some(message) = link.receive()? {
            let Message { header, payload, fds } = message;
            if !header.is_request() {
                return Err(Broken::Protocol(format!("a reply to a request {} that nobody made", header.id)));
            }
            let answer =
                Request::decode(header.command, &payload).and_then(|r| self.answer(&r, fds, function));
            match answer {
                Ok(Answer { payload, file }) if header.wants_reply() => {
                    link.send(&header.reply(payload.len()), &payload, file.as_deref())?;
                }
                Ok(_) => {}
                Err(refusal) => {
                    if header.wants_reply() {
                        link.send(&header.refusal(refusal.errno.raw_os_error().unsigned_abs()), &[], None)?;
                    }
                    tell(Event::Refused { command: header.command, refusal });
                }
            }
        }
        Ok(())
    }

    fn answer(
        &mut self,
        request: &Request<'_>,
        fds: Vec<OwnedFd>,
        function: &Function,
    ) -> Result<Answer, Refusal> {
        if !self.agreed && !matches!(request, Request::Version(..)) {
            return Err(Refusal::invalid("the first message has to agree on a version"));
        }
        let payload = match request {
            Request::Version(..) if self.agreed => {
                return Err(Refusal::invalid("a version is agreed on already"));
            }
            Request::Version(major, minor, data) => {
                let said = version::agree(*major, *minor, data)?;
                self.agreed = true;
                said
            }
            Request::DmaMap(ask) => self.map(ask, fds, function)?,
            Request::DmaUnmap(ask) => {
                self.shared.remove(ask)?;
                let flags = if ask.all { 2 } else { 0 };
                [words([24, flags]), ask.at.to_le_bytes().into(), ask.bytes.to_le_bytes().into()].concat()
            }
            Request::DeviceInfo => {
                let reset = if function.has_reset() { DEVICE_RESET } else { 0 };
                words([16, DEVICE_FLAGS | reset, REGIONS, IRQ_KINDS])
            }
            Request::RegionInfo(ask) => return region_info(ask, function),
            Request::IrqInfo(index) => irq_info(*index, function)?,
            Request::SetIrqs(ask) => set_irqs(ask, fds, function).map(|()| Vec::new())?,
            Request::Read(access) => read(access, function)?,
            Request::Write(access, data) => {
                function.write(access, data)?;
                echo(access)
            }
            Request::Reset => {
                function.reset();
                Vec::new()
            }
        };
        Ok(Answer { payload, file: None })
    }

    fn map(&mut self, ask: &DmaMap, fds: Vec<OwnedFd>, function: &Function) -> Result<Vec<u8>, Refusal> {
        let count = fds.len();
        let mut fds = fds.into_iter();
        let (first, None) = (fds.next(), fds.next()) else {
            return Err(Refusal::invalid(format!("{count} file descriptors for one piece of memory")));
        };
        self.shared.add(&*function.model, ask, first)?;
        Ok(Vec::new())
    }
}

fn echo(access: &Access) -> Vec<u8> {
    [access.offset.to_le_bytes().as_slice(), &words([access.region, access.bytes])].concat()
}

fn read(access: &Access, function: &Function) -> Result<Vec<u8>, Refusal> {
    let mut reply = echo(access);
    let head = reply.len();
    reply.resize(head + access.bytes as usize, 0);
    function.read(access, &mut reply[head..])?;
    Ok(reply)
}

fn region_info(ask: &RegionInfo, function: &Function) -> Result<Answer, Refusal> {
    let RegionInfo { index, room } = *ask;
    let bytes = function.region_bytes(index)?;
    let mapping = u8::try_from(index).ok().and_then(|bar| function.model.mapping(bar));
    let capability = mapping.map(|mapping| sparse_areas(&mapping.areas)).unwrap_or_default();
    let flags = match (bytes, mapping) {
        (0, _) => 0,
        (_, None) => REGION_FLAGS,
        (_, Some(_)) => REGION_FLAGS | REGION_MAPPED,
    };
    let need = (RegionInfo::BYTES + capability.len()) as u32;
    let fits = need <= room;
    // Where there is no room, the client learns how much it needs and asks again.
    let first = if fits && !capability.is_empty() { RegionInfo::BYTES as u32 } else { 0 };
    // Where a region lies in its file. What cannot be mapped needs no place, it only has to differ.
    let offset = if mapping.is_some() { 0 } else { u64::from(index) << 40 };
    let head = [words([need, flags, index, first]), bytes.to_le_bytes().into(), offset.to_le_bytes().into()];
    let (tail, file) = if fits { (capability, mapping.map(|m| m.file.clone())) } else { (Vec::new(), None) };
    Ok(Answer { payload: [head.concat(), tail].concat(), file })
}

/// The capability that says which parts of a region can be mapped.
fn sparse_areas(areas: &[Range<u64>]) -> Vec<u8> {
    let mut bytes = words([SPARSE_MMAP, 0, areas.len() as u32, 0]);
    for area in areas {
        bytes.extend(area.start.to_le_bytes());
        bytes.extend((area.end - area.start).to_le_bytes());
    }
    bytes
}

/// The kind of interrupts that there are.
fn irq_kind(function: &Function) -> u32 {
    match function.vectors() {
        Vectors::MsiX(_) => IRQ_MSIX,
        Vectors::Msi => IRQ_MSI,
    }
}

fn irq_info(index: u32, function: &Function) -> Result<Vec<u8>, Refusal> {
    match index {
        0..IRQ_KINDS if index == irq_kind(function) => {
            Ok(words([16, IRQ_FLAGS, index, function.interrupts.count()]))
        }
        0..IRQ_KINDS => Ok(words([16, 0, index, 0])),
        _ => Err(Refusal::invalid(format!("interrupts of kind {index}; there are 0 to {}", IRQ_KINDS - 1))),
    }
}

fn set_irqs(ask: &SetIrqs<'_>, fds: Vec<OwnedFd>, function: &Function) -> Result<(), Refusal> {
    let have = if ask.index == irq_kind(function) { function.interrupts.count() } else { 0 };
    if ask.index >= IRQ_KINDS || ask.start.checked_add(ask.count).is_none_or(|end| end > have) {
        let SetIrqs { index, start, count, .. } = ask;
        return Err(Refusal::invalid(format!(
            "{count} interrupts from {start} on, of kind {index} with {have}"
        )));
    }
    let (irqs, count) = (&function.interrupts, ask.count as usize);
    match ask.data {
        IrqData::All if count == 0 => irqs.disconnect(),
        IrqData::All => irqs.act(ask.action, ask.start, std::iter::repeat_n(true, count)),
        IrqData::Some(which) => irqs.act(ask.action, ask.start, which.iter().map(|byte| *byte != 0)),
        // Without any, the vectors lose the ones that they had.
        IrqData::Events if fds.is_empty() => irqs.connect(ask.start, (0..count).map(|_| None).collect())?,
        IrqData::Events if fds.len() == count => {
            irqs.connect(ask.start, fds.into_iter().map(Some).collect())?
        }
        IrqData::Events => {
            return Err(Refusal::invalid(format!("{} event fds for {count} vectors", fds.len())));
        }
    }
    Ok(())
}
