//! The receiving side: headers, data, digests.

use onehop_proto::Status;

use super::command::Data;
use super::send::Item;
use super::{CapsuleQueue, DataPart, ProtocolViolation, QueueEvent, Want};
use crate::pdu::{
    self, COMMON, Common, DIGEST, DataHeader, Digests, HEADER, INIT, InitResponse, flag, kind, u16_at, u32_at,
};

/// Minimum MAXH2CDATA of a controller.
const LEAST_H2C: u32 = 4096;
/// Maximum CPDA.
const MOST_CPDA: u8 = 31;

#[derive(Clone, Copy)]
enum Stage {
    /// This many bytes of header, digest included.
    Head(usize),
    /// This many bytes between header and data.
    Padding(usize),
    Data(DataPart),
    DataDigest,
}

/// A PDU that is being received.
pub(super) struct Receiver {
    stage: Stage,
    head: [u8; INIT],
    have: usize,
    padding: [u8; 256],
    digest: [u8; DIGEST],
    crc: u32,
    common: Common,
    data: DataHeader,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Self {
            stage: Stage::Head(COMMON),
            head: [0; INIT],
            have: 0,
            padding: [0; 256],
            digest: [0; DIGEST],
            crc: 0,
            common: Common::decode(&[]),
            data: DataHeader::decode(&[]),
        }
    }

    /// The part of the current header that has arrived.
    pub(super) fn header(&self) -> &[u8] {
        match self.stage {
            Stage::Head(_) => &self.head[..self.have.min(INIT)],
            _ => &self.head[..HEADER],
        }
    }

    fn expect_header(&mut self) {
        self.stage = Stage::Head(HEADER);
        self.have = 0;
    }

    /// The rest of the memory for the header, digest or padding that is being received.
    fn room(&mut self) -> &mut [u8] {
        match self.stage {
            Stage::Head(need) => &mut self.head[self.have..need],
            Stage::Padding(left) => &mut self.padding[..left],
            Stage::DataDigest => &mut self.digest[self.have..],
            Stage::Data(_) => &mut [],
        }
    }
}

impl CapsuleQueue {
    /// What to receive next; never empty.
    pub fn want(&mut self) -> Want<'_> {
        match self.receiver.stage {
            Stage::Data(extent) => Want::Data(extent),
            _ => Want::Bytes(self.receiver.room()),
        }
    }

    /// Whether the data being received has a digest: then the caller must pass it to [`Self::check`].
    #[must_use]
    pub fn checks_data(&self) -> bool {
        self.digests.data
    }

    /// Adds received data to the digest, in order, before [`Self::got`] handles it.
    pub fn check(&mut self, data: &[u8]) {
        self.receiver.crc = crc32c::crc32c_append(self.receiver.crc, data);
    }

    /// Handles received bytes, at most as many as were wanted.
    ///
    /// # Errors
    /// When the other side violates the protocol, or has ended the connection.
    pub fn got(&mut self, bytes: usize) -> Result<Option<QueueEvent>, ProtocolViolation> {
        let receiver = &mut self.receiver;
        match receiver.stage {
            Stage::Head(need) => {
                receiver.have = need.min(receiver.have + bytes);
                if receiver.have == need { self.take_header() } else { Ok(None) }
            }
            Stage::Padding(left) => {
                let left = left.saturating_sub(bytes);
                receiver.stage = if left > 0 { Stage::Padding(left) } else { receiver.to_data() };
                Ok(None)
            }
            Stage::Data(mut extent) => {
                let bytes = (bytes as u64).min(extent.bytes.into()) as u32;
                extent.offset += bytes;
                extent.bytes -= bytes;
                if extent.bytes > 0 {
                    receiver.stage = Stage::Data(extent);
                    return Ok(None);
                }
                if self.digests.data {
                    receiver.stage = Stage::DataDigest;
                    receiver.have = 0;
                    return Ok(None);
                }
                Ok(self.take_data(false))
            }
            Stage::DataDigest => {
                receiver.have = DIGEST.min(receiver.have + bytes);
                if receiver.have < DIGEST {
                    return Ok(None);
                }
                let is_damaged = u32::from_le_bytes(receiver.digest) != receiver.crc;
                Ok(self.take_data(is_damaged))
            }
        }
    }

    fn take_header(&mut self) -> Result<Option<QueueEvent>, ProtocolViolation> {
        let receiver = &mut self.receiver;
        receiver.common = Common::decode(&receiver.head);
        let (common, have) = (receiver.common, receiver.have);
        let want = match common.kind {
            kind::IC_RESP if !self.is_open => INIT,
            kind::C2H_TERM => HEADER,
            kind::RESPONSE | kind::C2H_DATA | kind::R2T if self.is_open => HEADER,
            other => return Err(ProtocolViolation::Kind(other)),
        };
        if usize::from(common.hlen) != want {
            let Common { kind, hlen, .. } = common;
            return Err(ProtocolViolation::HeaderLength { kind, hlen, want: want as u8 });
        }
        // A request to end the connection has no digest.
        let digest = if self.digests.header && common.kind != kind::C2H_TERM { DIGEST } else { 0 };
        if have < want + digest {
            receiver.stage = Stage::Head(want + digest);
            return Ok(None);
        }
        if digest > 0 && u32_at(&receiver.head, want) != crc32c::crc32c(&receiver.head[..want]) {
            return Err(ProtocolViolation::HeaderDigest);
        }
        let head = receiver.head;
        match common.kind {
            kind::C2H_TERM => {
                Err(ProtocolViolation::Terminated { reason: u16_at(&head, 8), info: u32_at(&head, 10) })
            }
            kind::IC_RESP => self.open(&common, &head),
            _ if common.has(flag::HEADER_DIGEST) != self.digests.header => Err(bad_flags(&common)),
            kind::C2H_DATA => self.take_data_header(&common, &head),
            _ => {
                check_length(&common, (HEADER + digest) as u64)?;
                self.receiver.expect_header();
                if common.kind == kind::R2T { self.take_r2t(&head) } else { self.take_response(&head) }
            }
        }
    }

    fn open(&mut self, common: &Common, head: &[u8]) -> Result<Option<QueueEvent>, ProtocolViolation> {
        check_length(common, INIT as u64)?;
        let InitResponse { version, cpda, digests, max_h2c } = InitResponse::decode(head);
        let granted = Digests::from_bits(digests);
        let bad = |what: String| Err(ProtocolViolation::Parameters(what));
        if version != 0 {
            return bad(format!("PDU format version {version}; this host speaks version 0"));
        }
        if cpda > MOST_CPDA {
            return bad(format!("CPDA {cpda} is above {MOST_CPDA}"));
        }
        if granted.bits() != digests
            || granted.header && !self.asked.header
            || granted.data && !self.asked.data
        {
            return bad(format!("digests {digests:#04x} were not asked for"));
        }
        if granted != self.asked {
            return bad(format!("{} were asked for and {granted} granted", self.asked));
        }
        if max_h2c < LEAST_H2C || !max_h2c.is_multiple_of(4) {
            return bad(format!("MAXH2CDATA {max_h2c} is below {LEAST_H2C} or not a multiple of 4"));
        }
        self.digests = granted;
        self.unit = (usize::from(cpda) + 1) * 4;
        self.max_h2c = max_h2c;
        self.is_open = true;
        self.receiver.expect_header();
        Ok(Some(QueueEvent::Opened))
    }

    fn take_response(&mut self, head: &[u8]) -> Result<Option<QueueEvent>, ProtocolViolation> {
        let cqe = pdu::completion(head);
        let slot = self.find(kind::RESPONSE, cqe.cid())?;
        if self.commands[usize::from(slot)].is_sending {
            let what = "it was answered while its data was on its way";
            return Err(ProtocolViolation::Order { cid: cqe.cid(), what });
        }
        Ok(self.finish(slot, cqe))
    }

    fn take_r2t(&mut self, head: &[u8]) -> Result<Option<QueueEvent>, ProtocolViolation> {
        let DataHeader { cid, tag, offset, len } = DataHeader::decode(head);
        let slot = self.find(kind::R2T, cid)?;
        let command = &mut self.commands[usize::from(slot)];
        let all = if matches!(command.data, Data::Out(_)) { command.all() } else { 0 };
        if command.is_sending {
            let what = "data was asked for while other data was on its way";
            return Err(ProtocolViolation::Order { cid, what });
        }
        if offset != command.moved || len == 0 || len > all.saturating_sub(offset) {
            return Err(ProtocolViolation::Range { cid, have: command.moved, all, offset, len });
        }
        command.is_sending = true;
        self.sender.queue(Item::Data { slot, tag, offset, end: offset + len });
        Ok(None)
    }

    fn take_data_header(
        &mut self,
        common: &Common,
        head: &[u8],
    ) -> Result<Option<QueueEvent>, ProtocolViolation> {
        let data = DataHeader::decode(head);
        let DataHeader { cid, offset, len, .. } = data;
        let header = HEADER + if self.digests.header { DIGEST } else { 0 };
        let tail = if self.digests.data { DIGEST } else { 0 };
        let is_lone_success = common.has(flag::SUCCESS) && !common.has(flag::LAST);
        if common.has(flag::DATA_DIGEST) != self.digests.data || is_lone_success {
            return Err(bad_flags(common));
        }
        let Some(padding) = usize::from(common.pdo).checked_sub(header) else {
            return Err(ProtocolViolation::DataStart { pdo: common.pdo });
        };
        check_length(common, u64::from(common.pdo) + u64::from(len) + tail as u64)?;
        let slot = self.find(kind::C2H_DATA, cid)?;
        let command = &self.commands[usize::from(slot)];
        let all = if matches!(command.data, Data::In(_)) { command.all() } else { 0 };
        if command.is_last {
            return Err(ProtocolViolation::Order { cid, what: "data came behind its last" });
        }
        if offset != command.moved || len == 0 || len > all.saturating_sub(offset) {
            return Err(ProtocolViolation::Range { cid, have: command.moved, all, offset, len });
        }
        let receiver = &mut self.receiver;
        receiver.data = data;
        receiver.crc = 0;
        receiver.stage = if padding > 0 { Stage::Padding(padding) } else { receiver.to_data() };
        Ok(None)
    }

    /// All data of a PDU has arrived.
    fn take_data(&mut self, is_damaged: bool) -> Option<QueueEvent> {
        let (common, DataHeader { cid, len, .. }) = (self.receiver.common, self.receiver.data);
        self.receiver.expect_header();
        let slot = self.find(kind::C2H_DATA, cid).ok()?;
        let command = &mut self.commands[usize::from(slot)];
        command.moved += len;
        command.is_last = common.has(flag::LAST);
        command.is_damaged |= is_damaged;
        if !common.has(flag::SUCCESS) {
            return None;
        }
        self.finish(slot, pdu::made_completion(cid, Status::SUCCESS))
    }
}

impl Receiver {
    /// The stage for the data that the header announced.
    fn to_data(&self) -> Stage {
        let DataHeader { cid, offset, len, .. } = self.data;
        Stage::Data(DataPart { slot: cid & (super::MAX_DEPTH - 1), offset, bytes: len })
    }
}

fn bad_flags(common: &Common) -> ProtocolViolation {
    ProtocolViolation::Flags { kind: common.kind, flags: common.flags }
}

fn check_length(common: &Common, want: u64) -> Result<(), ProtocolViolation> {
    if u64::from(common.plen) == want {
        return Ok(());
    }
    Err(ProtocolViolation::Length { kind: common.kind, plen: common.plen, want })
}
