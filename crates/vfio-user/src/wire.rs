//! The messages of the vfio-user protocol. All integers are little-endian, because both sides run on one machine.

use crate::error::Refusal;

/// Size of a message header.
pub const HEADER: usize = 16;
/// Most bytes of a region access, as stated in the version reply.
pub const MAX_DATA: usize = 1 << 20;
/// The longest message: a region write of [`MAX_DATA`] bytes.
pub const MAX_MESSAGE: usize = HEADER + 16 + MAX_DATA;
/// Most file descriptors in a message, as stated in the version reply.
pub const MAX_FDS: usize = 16;

/// Numbers of the supported commands.
pub mod command {
    /// Negotiates version and limits.
    pub const VERSION: u16 = 1;
    /// Shares memory.
    pub const DMA_MAP: u16 = 2;
    /// Unshares memory.
    pub const DMA_UNMAP: u16 = 3;
    /// Number of regions and interrupt kinds, reset support.
    pub const DEVICE_INFO: u16 = 4;
    /// Size and access of a region.
    pub const REGION_INFO: u16 = 5;
    /// Vectors of a kind of interrupts.
    pub const IRQ_INFO: u16 = 7;
    /// Event fds, masks and triggers of interrupts.
    pub const SET_IRQS: u16 = 8;
    /// Reads a region.
    pub const REGION_READ: u16 = 9;
    /// Writes a region.
    pub const REGION_WRITE: u16 = 10;
    /// Resets the device.
    pub const RESET: u16 = 13;
}

/// The name of a command.
#[must_use]
pub const fn name(number: u16) -> &'static str {
    match number {
        command::VERSION => "the version",
        command::DMA_MAP => "DMA_MAP",
        command::DMA_UNMAP => "DMA_UNMAP",
        command::DEVICE_INFO => "DEVICE_GET_INFO",
        command::REGION_INFO => "DEVICE_GET_REGION_INFO",
        command::IRQ_INFO => "DEVICE_GET_IRQ_INFO",
        command::SET_IRQS => "DEVICE_SET_IRQS",
        command::REGION_READ => "REGION_READ",
        command::REGION_WRITE => "REGION_WRITE",
        command::RESET => "DEVICE_RESET",
        _ => "an unknown command",
    }
}

const REPLY: u32 = 1;
const TYPE: u32 = 0xf;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A message's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageHeader {
    /// Matches a reply to its request.
    pub id: u16,
    /// One of [`command`].
    pub command: u16,
    /// Bytes of the message, including the header.
    pub bytes: u32,
    /// Message type and flags.
    pub flags: u32,
    /// Error number of a refusing reply, otherwise 0.
    pub errno: u32,
}

impl MessageHeader {
    /// Decodes a header.
    #[must_use]
    pub fn decode(raw: &[u8; HEADER]) -> Self {
        let mut fields = Fields(raw);
        Self {
            id: fields.u16(),
            command: fields.u16(),
            bytes: fields.u32(),
            flags: fields.u32(),
            errno: fields.u32(),
        }
    }

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut raw = [0; HEADER];
        raw[..2].copy_from_slice(&self.id.to_le_bytes());
        raw[2..4].copy_from_slice(&self.command.to_le_bytes());
        raw[4..8].copy_from_slice(&self.bytes.to_le_bytes());
        raw[8..12].copy_from_slice(&self.flags.to_le_bytes());
        raw[12..].copy_from_slice(&self.errno.to_le_bytes());
        raw
    }

    /// The header of a request with `payload` bytes behind it.
    #[must_use]
    pub const fn request(id: u16, command: u16, payload: usize) -> Self {
        Self { id, command, bytes: (HEADER + payload) as u32, flags: 0, errno: 0 }
    }

    /// The same request, without a reply.
    #[must_use]
    pub const fn posted(self) -> Self {
        Self { flags: self.flags | NO_REPLY, ..self }
    }

    /// Bytes behind the header.
    ///
    /// # Errors
    /// When the length is impossible; the next message cannot be located then.
    pub fn payload(&self) -> Result<usize, String> {
        match (self.bytes as usize).checked_sub(HEADER) {
            Some(payload) if self.bytes as usize <= MAX_MESSAGE => Ok(payload),
            _ => Err(format!("a message of {} bytes; {HEADER} to {MAX_MESSAGE} are possible", self.bytes)),
        }
    }

    /// Whether it is a request rather than a reply.
    #[must_use]
    pub const fn is_request(&self) -> bool {
        self.flags & TYPE == 0
    }

    /// Whether the sender expects a reply.
    #[must_use]
    pub const fn wants_reply(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// Whether it is a refusing reply.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        self.flags & ERROR != 0
    }

    /// The header of the reply to this message.
    #[must_use]
    pub const fn reply(&self, payload: usize) -> Self {
        Self { bytes: (HEADER + payload) as u32, flags: REPLY, errno: 0, ..*self }
    }

    /// The complete refusal of this message.
    #[must_use]
    pub const fn refusal(&self, errno: u32) -> Self {
        Self { bytes: HEADER as u32, flags: REPLY | ERROR, errno, ..*self }
    }
}

/// Takes integers from the front of bytes whose length was checked; missing ones read as 0.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((first, rest)) = self.0.split_first_chunk() else { return [0; N] };
        self.0 = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// A request to share memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaMap {
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Bus address.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A request to unshare memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaUnmap {
    /// Unshare everything.
    pub all: bool,
    /// Bus address.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// An action on interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IrqAction {
    /// Masks them.
    Mask,
    /// Unmasks them.
    Unmask,
    /// Raises them now; or, with event fds, connects them.
    Trigger,
}

/// Which interrupts of a range are affected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IrqData<'a> {
    /// All.
    All,
    /// Those whose byte is not 0.
    Some(&'a [u8]),
    /// All, with the event fds of the message.
    Events,
}

/// A request about interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetIrqs<'a> {
    /// Kind of interrupt.
    pub index: u32,
    /// First vector.
    pub start: u32,
    /// Number of vectors.
    pub count: u32,
    /// The action.
    pub action: IrqAction,
    /// Which of them.
    pub data: IrqData<'a>,
}

/// An access to a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionAccess {
    /// The region.
    pub region: u32,
    /// Offset in the region.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u32,
}

/// A query about a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionInfo {
    /// The region.
    pub index: u32,
    /// The client's room for the answer, in bytes.
    pub room: u32,
}

impl RegionInfo {
    /// Size of the query, and of the answer without capabilities.
    pub const BYTES: usize = 32;
}

/// A decoded request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientRequest<'a> {
    /// [`command::VERSION`]: major and minor, and the JSON of the client's capabilities.
    Version(u16, u16, &'a [u8]),
    /// [`command::DMA_MAP`].
    DmaMap(DmaMap),
    /// [`command::DMA_UNMAP`].
    DmaUnmap(DmaUnmap),
    /// [`command::DEVICE_INFO`].
    DeviceInfo,
    /// [`command::REGION_INFO`] of an index.
    RegionInfo(RegionInfo),
    /// [`command::IRQ_INFO`] of an index.
    IrqInfo(u32),
    /// [`command::SET_IRQS`].
    SetIrqs(SetIrqs<'a>),
    /// [`command::REGION_READ`].
    Read(RegionAccess),
    /// [`command::REGION_WRITE`] with its data.
    Write(RegionAccess, &'a [u8]),
    /// [`command::RESET`].
    Reset,
}

impl<'a> ClientRequest<'a> {
    /// Decodes the payload of a request.
    ///
    /// # Errors
    /// The refusal for an unknown command, or a malformed payload.
    pub fn decode(command: u16, payload: &'a [u8]) -> Result<Self, Refusal> {
        let least = match command {
            command::VERSION => 4,
            command::DMA_MAP => 32,
            command::DMA_UNMAP => 24,
            command::SET_IRQS => 20,
            command::DEVICE_INFO | command::IRQ_INFO | command::REGION_READ | command::REGION_WRITE => 16,
            command::REGION_INFO => RegionInfo::BYTES,
            command::RESET => 0,
            _ => return Err(Refusal::unsupported(format!("command {command} is not supported"))),
        };
        if payload.len() < least {
            let why =
                format!("command {command} with {} bytes; at least {least} are required", payload.len());
            return Err(Refusal::invalid(why));
        }
        let mut fields = Fields(payload);
        Ok(match command {
            command::VERSION => Self::Version(fields.u16(), fields.u16(), fields.0),
            command::DMA_MAP => Self::DmaMap(dma_map(fields)?),
            command::DMA_UNMAP => Self::DmaUnmap(dma_unmap(fields)?),
            command::DEVICE_INFO => Self::DeviceInfo,
            command::REGION_INFO => Self::RegionInfo(region_info(fields)?),
            command::IRQ_INFO => Self::IrqInfo(index(fields)),
            command::SET_IRQS => Self::SetIrqs(set_irqs(fields)?),
            command::REGION_READ => Self::Read(access(&mut fields)?),
            command::REGION_WRITE => {
                let access = access(&mut fields)?;
                if fields.0.len() != access.bytes as usize {
                    let why = format!("a write of {} bytes that brings {}", access.bytes, fields.0.len());
                    return Err(Refusal::invalid(why));
                }
                Self::Write(access, fields.0)
            }
            _ => Self::Reset,
        })
    }
}

/// The third field: an index behind two others.
fn index(mut fields: Fields<'_>) -> u32 {
    let [_, _, index] = [fields.u32(), fields.u32(), fields.u32()];
    index
}

fn region_info(mut fields: Fields<'_>) -> Result<RegionInfo, Refusal> {
    let [room, _, index] = [fields.u32(), fields.u32(), fields.u32()];
    if (room as usize) < RegionInfo::BYTES {
        let why = format!("room for {room} bytes about a region; {} are required", RegionInfo::BYTES);
        return Err(Refusal::invalid(why));
    }
    Ok(RegionInfo { index, room })
}

fn access(fields: &mut Fields<'_>) -> Result<RegionAccess, Refusal> {
    let (offset, region, bytes) = (fields.u64(), fields.u32(), fields.u32());
    if bytes == 0 || bytes as usize > MAX_DATA {
        return Err(Refusal::invalid(format!("an access of {bytes} bytes; 1 to {MAX_DATA} are possible")));
    }
    Ok(RegionAccess { region, offset, bytes })
}

fn dma_map(mut fields: Fields<'_>) -> Result<DmaMap, Refusal> {
    let [_, flags] = [fields.u32(), fields.u32()];
    let (offset, at, bytes) = (fields.u64(), fields.u64(), fields.u64());
    if flags & !3 != 0 || flags == 0 {
        return Err(Refusal::invalid(format!("memory is shared with the flags {flags:#x}")));
    }
    if bytes == 0 || at.checked_add(bytes - 1).is_none() || offset.checked_add(bytes).is_none() {
        return Err(Refusal::invalid(format!("{bytes:#x} bytes at {at:#x}, file offset {offset:#x}, wrap")));
    }
    Ok(DmaMap { readable: flags & 1 != 0, writable: flags & 2 != 0, offset, at, bytes })
}

fn dma_unmap(mut fields: Fields<'_>) -> Result<DmaUnmap, Refusal> {
    let [_, flags] = [fields.u32(), fields.u32()];
    let (at, bytes) = (fields.u64(), fields.u64());
    match flags {
        0 | 2 => Ok(DmaUnmap { all: flags == 2, at, bytes }),
        _ => Err(Refusal::unsupported("unsharing with a dirty page bitmap, which is not supported")),
    }
}

fn set_irqs(mut fields: Fields<'_>) -> Result<SetIrqs<'_>, Refusal> {
    let [_, flags, index] = [fields.u32(), fields.u32(), fields.u32()];
    let [start, count] = [fields.u32(), fields.u32()];
    let action = match flags & !7 {
        0x08 => IrqAction::Mask,
        0x10 => IrqAction::Unmask,
        0x20 => IrqAction::Trigger,
        _ => return Err(Refusal::invalid(format!("interrupts are set with the flags {flags:#x}"))),
    };
    let data = match flags & 7 {
        1 => IrqData::All,
        2 if fields.0.len() == count as usize => IrqData::Some(fields.0),
        4 if action == IrqAction::Trigger => IrqData::Events,
        _ => {
            return Err(Refusal::invalid(format!(
                "interrupts are set with the flags {flags:#x}, count {count}"
            )));
        }
    };
    Ok(SetIrqs { index, start, count, action, data })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_go_there_and_back() {
        let header = MessageHeader { id: 0x1234, command: 9, bytes: 32, flags: 0x10, errno: 0 };
        assert_eq!(MessageHeader::decode(&header.encode()), header);
        assert!(header.is_request() && !header.wants_reply());
        assert_eq!(header.payload(), Ok(16));
        let refused = header.refusal(22);
        assert!(refused.is_error() && !refused.is_request());
        assert_eq!((refused.id, refused.errno, refused.payload()), (0x1234, 22, Ok(0)));
        for bytes in [0, 15, MAX_MESSAGE as u32 + 1, u32::MAX] {
            assert!(MessageHeader { bytes, ..header }.payload().is_err());
        }
    }

    #[test]
    fn lengths_and_flags_are_checked() {
        for (number, least) in
            [(1, 4), (2, 32), (3, 24), (4, 16), (5, 32), (7, 16), (8, 20), (9, 16), (10, 16)]
        {
            assert!(ClientRequest::decode(number, &vec![0; least - 1]).is_err(), "command {number}");
        }
        assert_eq!(ClientRequest::decode(0, &[]).unwrap_err().errno, rustix::io::Errno::OPNOTSUPP);
        assert!(ClientRequest::decode(command::SET_IRQS, &[0xff; 20]).is_err());
        let about = |room: u32| {
            let words = [room, 0, 3, 0, 0, 0, 0, 0].map(u32::to_le_bytes);
            match ClientRequest::decode(command::REGION_INFO, words.as_flattened()) {
                Ok(ClientRequest::RegionInfo(ask)) => Some(ask),
                _ => None,
            }
        };
        assert_eq!(about(31), None);
        assert_eq!(about(32), Some(RegionInfo { index: 3, room: 32 }));
        let write = |count: u32, have: usize| {
            let mut bytes =
                [0u64.to_le_bytes().as_slice(), &7u32.to_le_bytes(), &count.to_le_bytes()].concat();
            bytes.resize(16 + have, 0);
            ClientRequest::decode(command::REGION_WRITE, &bytes).is_ok()
        };
        assert!(write(4, 4) && !write(4, 5) && !write(4, 3) && !write(0, 0) && !write(u32::MAX, 4));
    }

    #[test]
    fn ranges_that_wrap_are_refused() {
        let map = |at: u64, bytes: u64, offset: u64| {
            let words = [32 | 3 << 32, offset, at, bytes];
            let raw: Vec<u8> = words.iter().flat_map(|w: &u64| w.to_le_bytes()).collect();
            ClientRequest::decode(command::DMA_MAP, &raw).is_ok()
        };
        assert!(map(0, 4096, 0) && map(u64::MAX - 4095, 4096, 0));
        assert!(!map(u64::MAX - 4094, 4096, 0) && !map(0, 0, 0) && !map(0, 4096, u64::MAX));
    }
}
