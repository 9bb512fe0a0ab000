//! Data transfer between controller and host: data pointers and copies.

use std::sync::Arc;

use onehop_proto::format::max_transfer_bytes;
use onehop_proto::prp::{self, WalkError};
use onehop_proto::regs::Cmbsz;
use onehop_proto::sgl::{self, Descriptor, Part, SglError, Support};
use onehop_proto::{BusAddr, Sqe, Status};

use crate::device::ControllerState;
use crate::dma::{Segment, Space, Unreachable};
use crate::exec::CommandFailure;
use crate::violation::Rule;

/// A part of a transfer; without an address its bytes are discarded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferSpan {
    pub addr: Option<u64>,
    pub len: usize,
}

/// Direction of the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TransferDirection {
    ToHost,
    FromHost,
}

/// Reads qwords of lists, mostly from the last one's mapping.
struct ListReader<'a> {
    space: &'a Space,
    known: Option<Arc<Segment>>,
}

impl ListReader<'_> {
    fn qword(&mut self, addr: u64) -> Result<u64, Unreachable> {
        let known = self.known.as_ref().and_then(|s| Some((s.clone(), s.offset(addr, 8)?)));
        let (segment, at) = match known {
            Some(found) => found,
            None => self.space.find(addr, 8)?,
        };
        let lost = |_| Unreachable::NotShared { addr, bytes: 8 };
        let mut raw = [0; 8];
        segment.host().and_then(|mem| mem.read(at, &mut raw)).map_err(lost)?;
        self.known = Some(segment);
        Ok(u64::from_le_bytes(raw))
    }
}

/// The controller's SGL support.
pub(crate) const fn sgl_support(sgl: bool) -> Support {
    if !sgl {
        return Support(0);
    }
    Support(0).with_kind(Support::DWORDS).with_bit_bucket(true).with_byte_metadata(false)
}

impl ControllerState {
    /// Finds the memory of a command's data: `len` bytes by PRPs, or by an SGL on I/O queues that allow it.
    pub(crate) fn find_spans(
        &mut self,
        sqid: u16,
        sqe: &Sqe,
        len: usize,
        way: TransferDirection,
    ) -> Result<Vec<TransferSpan>, CommandFailure> {
        let limit = max_transfer_bytes(self.config.mdts, self.config.mpsmin);
        if limit.is_some_and(|limit| len as u64 > limit) {
            self.breach(Rule::Mdts, Some(sqid), format!("a transfer of {len} bytes"));
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        let spans = match sqe.psdt() {
            0 => self.prp_spans(sqid, sqe, len)?,
            1 if self.config.sgl && sqid != 0 => self.sgl_spans(sqid, sqe, len, way)?,
            psdt => {
                self.breach(Rule::Psdt, Some(sqid), format!("PSDT = {psdt:02b}b"));
                return Err(Status::INVALID_FIELD.with_dnr().into());
            }
        };
        if self.cmb.is_some() {
            self.check_cmb_spans(sqid, sqe, &spans, way)?;
        }
        Ok(spans)
    }

    /// Refuses data and lists in the controller memory buffer if it does not support them.
    fn check_cmb_spans(
        &self,
        sqid: u16,
        sqe: &Sqe,
        spans: &[TransferSpan],
        way: TransferDirection,
    ) -> Result<(), CommandFailure> {
        let allowed = if way == TransferDirection::ToHost { Cmbsz::rds } else { Cmbsz::wds };
        for addr in spans.iter().filter_map(|s| s.addr) {
            self.check_cmb_use(sqid, "data", addr, allowed)?;
        }
        let list = match Descriptor::of(sqe) {
            _ if sqe.psdt() == 0 => (spans.len() > 2).then_some(sqe.prp2()),
            Ok(Descriptor::Segment { at, .. } | Descriptor::LastSegment { at, .. }) => Some(at.0),
            _ => None,
        };
        list.map_or(Ok(()), |list| self.check_cmb_use(sqid, "a list", list, Cmbsz::lists))
    }

    fn prp_spans(&mut self, sqid: u16, sqe: &Sqe, len: usize) -> Result<Vec<TransferSpan>, CommandFailure> {
        let mut spans = std::mem::take(&mut self.spans);
        spans.clear();
        let mut reader = ListReader { space: &self.space, known: None };
        let shift = self.regs.cc.page_shift();
        let walk = prp::walk(shift, sqe.prp1(), sqe.prp2(), len as u64, |at: BusAddr| reader.qword(at.0));
        let mut wrong = None;
        for step in walk {
            match step {
                Ok((at, len)) => spans.push(TransferSpan { addr: Some(at.0), len: len as usize }),
                Err(error) => wrong = Some(error),
            }
        }
        let Some(error) = wrong else { return Ok(spans) };
        let rule = match error {
            WalkError::Read(at) => {
                self.breach_dma(sqid, "PRP list", at);
                return Err(error.status().into());
            }
            WalkError::Prp1Unaligned(_) => Rule::Prp1,
            WalkError::Prp2Offset(_) | WalkError::ListUnaligned(_) => Rule::Prp2,
            _ => Rule::PrpList,
        };
        self.breach(rule, Some(sqid), error.to_string());
        Err(error.status().with_dnr().into())
    }

    fn sgl_spans(
        &mut self,
        sqid: u16,
        sqe: &Sqe,
        len: usize,
        way: TransferDirection,
    ) -> Result<Vec<TransferSpan>, CommandFailure> {
        let mut spans = std::mem::take(&mut self.spans);
        spans.clear();
        let mut reader = ListReader { space: &self.space, known: None };
        let rules = sgl::Rules {
            support: sgl_support(true),
            is_source: way == TransferDirection::FromHost,
            max_descriptors: 1 << 16,
        };
        let first = (sqe.qword(6), sqe.qword(8));
        let walk = sgl::Walk::new(first, len as u64, rules, |at: BusAddr| {
            Ok((reader.qword(at.0)?, reader.qword(at.0.wrapping_add(8))?))
        });
        let mut wrong = None;
        for part in walk {
            match part {
                Ok(Part::Memory { at, len }) => {
                    spans.push(TransferSpan { addr: Some(at.0), len: len as usize })
                }
                Ok(Part::Discard { len }) => spans.push(TransferSpan { addr: None, len: len as usize }),
                Err(error) => wrong = Some(error),
            }
        }
        let Some(error) = wrong else { return Ok(spans) };
        if let SglError::Read(at) = error {
            self.breach_dma(sqid, "SGL segment", at);
        } else {
            self.breach(Rule::Sgl, Some(sqid), error.to_string());
        }
        Err(error.status().with_dnr().into())
    }

    /// Returns a list of spans for reuse by the next command.
    pub(crate) fn reuse_spans(&mut self, spans: Vec<TransferSpan>) {
        if spans.capacity() > self.spans.capacity() {
            self.spans = spans;
        }
    }

    /// Copies data to the host.
    pub(crate) fn scatter(&mut self, spans: &[TransferSpan], data: &[u8]) -> Result<(), Unreachable> {
        let mut left = data;
        for span in spans {
            let (now, rest) = left.split_at(span.len.min(left.len()));
            if let Some(addr) = span.addr {
                self.space.write(addr, now)?;
            }
            left = rest;
        }
        self.counts.rest.bytes_read += data.len() as u64;
        Ok(())
    }

    /// Copies data from the host.
    pub(crate) fn gather(&mut self, spans: &[TransferSpan], data: &mut [u8]) -> Result<(), Unreachable> {
        self.counts.rest.bytes_written += data.len() as u64;
        let mut left = data;
        for span in spans {
            let (now, rest) = left.split_at_mut(span.len.min(left.len()));
            if let Some(addr) = span.addr {
                self.space.read(addr, now)?;
            }
            left = rest;
        }
        Ok(())
    }

    /// Sends data of an admin command.
    pub(crate) fn send(&mut self, sqid: u16, sqe: &Sqe, data: &[u8]) -> Result<(), CommandFailure> {
        let spans = self.find_spans(sqid, sqe, data.len(), TransferDirection::ToHost)?;
        let done = self.scatter(&spans, data);
        self.reuse_spans(spans);
        done.map_err(|at| self.transfer_failed(sqid, "data to the host", at))
    }

    /// Receives data of a command.
    pub(crate) fn receive(&mut self, sqid: u16, sqe: &Sqe, data: &mut [u8]) -> Result<(), CommandFailure> {
        let spans = self.find_spans(sqid, sqe, data.len(), TransferDirection::FromHost)?;
        let done = self.gather(&spans, data);
        self.reuse_spans(spans);
        done.map_err(|at| self.transfer_failed(sqid, "data from the host", at))
    }

    /// The controller could not reach the host's memory.
    pub(crate) fn transfer_failed(&self, sqid: u16, what: &str, at: Unreachable) -> CommandFailure {
        self.breach_dma(sqid, what, at);
        Status::DATA_TRANSFER_ERROR.into()
    }
}
