//! A session with one client: requests and replies.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::dma::SharedMemory;
use crate::error::{Broken, Refusal};
use crate::function::{Function, REGIONS};
use crate::link::{Message, MessageSocket};
use crate::model::Vectors;
use crate::server::ServerEvent;
use crate::version;
use crate::wire::{ClientRequest, DmaMap, IrqData, RegionAccess, RegionInfo, SetIrqs};

/// Kinds of interrupts: INTx, MSI, MSI-X, errors, requests. A function has vectors of MSI or of MSI-X.
const IRQ_KINDS: u32 = 5;
const IRQ_MSI: u32 = 1;
const IRQ_MSIX: u32 = 2;
/// Interrupts are signalled by event fds, and each vector can be masked.
const IRQ_FLAGS: u32 = 1 | 2;
/// A PCI device; the reset flag is added if it can be reset.
const DEVICE_FLAGS: u32 = 2;
const DEVICE_RESET: u32 = 1;
/// Readable and writable.
const REGION_FLAGS: u32 = 1 | 2;
/// Parts of it can be mapped, as its capabilities list.
const REGION_MAPPED: u32 = 4 | 8;
/// The capability that lists mappable parts, and its version.
const SPARSE_MMAP: u32 = 1 | 1 << 16;

/// Whether to stop serving.
type Stop<'a> = dyn Fn() -> bool + 'a;

/// The state of a session.
#[derive(Default)]
pub(crate) struct ServerSession {
    shared: SharedMemory,
    agreed: bool,
}

/// Serves a client until it closes, violates the protocol, or `stop` returns true.
pub(crate) fn run(
    stream: UnixStream,
    function: &Function,
    stop: &dyn Fn() -> bool,
    report: &dyn Fn(ServerEvent),
) -> Result<(), Broken> {
    let (link, mut session) = (MessageSocket::new(stream, stop), ServerSession::default());
    let ended = session.serve(&link, function, report);
    // Memory is unshared last: until it is reset, the device may still use it.
    function.interrupts.disconnect();
    function.reset();
    session.shared.clear();
    ended
}

/// The reply to a request.
struct Response {
    payload: Vec<u8>,
    file: Option<Arc<File>>,
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl ServerSession {
    fn serve(
        &mut self,
        link: &MessageSocket<&Stop<'_>>,
        function: &Function,
        report: &dyn Fn(ServerEvent),
    ) -> Result<(), Broken> {
        while let Some(message) = link.receive()? {
            let Message { header, payload, fds } = message;
            if !header.is_request() {
                return Err(Broken::Protocol(format!(
                    "a reply to request {}, which was never sent",
                    header.id
                )));
            }
            let answer =
                ClientRequest::decode(header.command, &payload).and_then(|r| self.answer(&r, fds, function));
            match answer {
                Ok(Response { payload, file }) if header.wants_reply() => {
                    link.send(&header.reply(payload.len()), &payload, file.as_deref())?;
                }
                Ok(_) => {}
                Err(refusal) => {
                    if header.wants_reply() {
                        link.send(&header.refusal(refusal.errno.raw_os_error().unsigned_abs()), &[], None)?;
                    }
                    report(ServerEvent::Refused { command: header.command, refusal });
                }
            }
        }
        Ok(())
    }

    fn answer(
        &mut self,
        request: &ClientRequest<'_>,
        fds: Vec<OwnedFd>,
        function: &Function,
    ) -> Result<Response, Refusal> {
        if !self.agreed && !matches!(request, ClientRequest::Version(..)) {
            return Err(Refusal::invalid("the first message must negotiate the version"));
        }
        let payload = match request {
            ClientRequest::Version(..) if self.agreed => {
                return Err(Refusal::invalid("the version has already been negotiated"));
            }
            ClientRequest::Version(major, minor, data) => {
                let said = version::agree(*major, *minor, data)?;
                self.agreed = true;
                said
            }
            ClientRequest::DmaMap(ask) => self.map(ask, fds, function)?,
            ClientRequest::DmaUnmap(ask) => {
                self.shared.remove(ask)?;
                let flags = if ask.all { 2 } else { 0 };
                [words([24, flags]), ask.at.to_le_bytes().into(), ask.bytes.to_le_bytes().into()].concat()
            }
            ClientRequest::DeviceInfo => {
                let reset = if function.has_reset() { DEVICE_RESET } else { 0 };
                words([16, DEVICE_FLAGS | reset, REGIONS, IRQ_KINDS])
            }
            ClientRequest::RegionInfo(ask) => return region_info(ask, function),
            ClientRequest::IrqInfo(index) => irq_info(*index, function)?,
            ClientRequest::SetIrqs(ask) => set_irqs(ask, fds, function).map(|()| Vec::new())?,
            ClientRequest::Read(access) => read(access, function)?,
            ClientRequest::Write(access, data) => {
                function.write(access, data)?;
                echo(access)
            }
            ClientRequest::Reset => {
                function.reset();
                Vec::new()
            }
        };
        Ok(Response { payload, file: None })
    }

    fn map(&mut self, ask: &DmaMap, fds: Vec<OwnedFd>, function: &Function) -> Result<Vec<u8>, Refusal> {
        let count = fds.len();
        let mut fds = fds.into_iter();
        let (first, None) = (fds.next(), fds.next()) else {
            return Err(Refusal::invalid(format!("{count} file descriptors for one range of memory")));
        };
        self.shared.add(&*function.model, ask, first)?;
        Ok(Vec::new())
    }
}

fn echo(access: &RegionAccess) -> Vec<u8> {
    [access.offset.to_le_bytes().as_slice(), &words([access.region, access.bytes])].concat()
}

fn read(access: &RegionAccess, function: &Function) -> Result<Vec<u8>, Refusal> {
    let mut reply = echo(access);
    let head = reply.len();
    reply.resize(head + access.bytes as usize, 0);
    function.read(access, &mut reply[head..])?;
    Ok(reply)
}

fn region_info(ask: &RegionInfo, function: &Function) -> Result<Response, Refusal> {
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
    // If the client has too little room, it learns the size and asks again.
    let first = if fits && !capability.is_empty() { RegionInfo::BYTES as u32 } else { 0 };
    // Offset of the region in its file. A region that cannot be mapped only needs a distinct offset.
    let offset = if mapping.is_some() { 0 } else { u64::from(index) << 40 };
    let head = [words([need, flags, index, first]), bytes.to_le_bytes().into(), offset.to_le_bytes().into()];
    let (tail, file) = if fits { (capability, mapping.map(|m| m.file.clone())) } else { (Vec::new(), None) };
    Ok(Response { payload: [head.concat(), tail].concat(), file })
}

/// The capability that lists the mappable parts of a region.
fn sparse_areas(areas: &[Range<u64>]) -> Vec<u8> {
    let mut bytes = words([SPARSE_MMAP, 0, areas.len() as u32, 0]);
    for area in areas {
        bytes.extend(area.start.to_le_bytes());
        bytes.extend((area.end - area.start).to_le_bytes());
    }
    bytes
}

/// The function's kind of interrupts.
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
        // An empty list disconnects the vectors.
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
