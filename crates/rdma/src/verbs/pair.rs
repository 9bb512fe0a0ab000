//! Completion queues and queue pairs of reliable connections.

use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, OnceLock};

use super::device::{Domain, REMOTE, Registration};
use super::{last, sys};
use crate::endpoint::Endpoint;
use crate::memory::RemoteMemory;
use crate::{Error, Result};

/// Completions taken at once.
const BATCH: usize = 32;

/// A completion queue with a descriptor that becomes readable on completions.
pub(crate) struct CompletionQueue {
    domain: Arc<Domain>,
    channel: NonNull<sys::CompChannel>,
    cq: NonNull<sys::Cq>,
}

// SAFETY: the library locks a queue for each of the calls made here.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: pairs hold the queue and are gone; every received event has been acknowledged.
        unsafe {
            self.domain.device.call(|library| {
                (library.destroy_cq)(self.cq.as_ptr());
                (library.destroy_comp_channel)(self.channel.as_ptr());
            });
        }
    }
}

/// The end of a work item.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub id: u64,
    /// The library's error number; 0 for success.
    pub status: i32,
    /// For a received message: its length, and the immediate number.
    pub received: Option<(u32, u32)>,
}

impl CompletionQueue {
    pub fn new(domain: &Arc<Domain>, entries: usize) -> Result<Self> {
        let device = &domain.device;
        // SAFETY: the context is open.
        let channel = unsafe {
            device.make("ibv_create_comp_channel", |library| (library.create_comp_channel)(device.context()))
        }?;
        // SAFETY: the context is open, and the channel is of that context.
        let cq = unsafe {
            device.make("ibv_create_cq", |library| {
                (library.create_cq)(device.context(), entries as i32, null_mut(), channel.as_ptr(), 0)
            })
        };
        let cq = cq.inspect_err(|_| {
            // SAFETY: nothing uses the channel.
            unsafe { device.call(|library| (library.destroy_comp_channel)(channel.as_ptr())) };
        })?;
        let this = Self { domain: domain.clone(), channel, cq };
        let flags = rustix::fs::fcntl_getfl(this.events())
            .and_then(|flags| rustix::fs::fcntl_setfl(this.events(), flags | rustix::fs::OFlags::NONBLOCK));
        flags.map_err(|e| Error::system("fcntl of a completion channel", e))?;
        Ok(this)
    }

    /// Readable when something has arrived since the queue was armed.
    pub fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as self, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Makes [`Self::events`] readable at the next completion. Earlier ones do not: poll once more after this.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: the queue and its context are alive, and the library has filled the context's calls.
        unsafe {
            let cq = self.cq.as_ptr();
            self.domain.device.ask("ibv_req_notify_cq", |_| match (*(*cq).context).req_notify_cq {
                Some(call) => call(cq, 0),
                None => 95,
            })
        }
    }

    /// Consumes the events that made the descriptor readable.
    pub fn drain(&self) {
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel is open and does not block; the event is of our own queue, and is acknowledged at once.
        unsafe {
            self.domain.device.call(|library| {
                while (library.get_cq_event)(self.channel.as_ptr(), &mut cq, &mut context) == 0 {
                    (library.ack_cq_events)(cq, 1);
                }
            });
        }
    }

    /// Takes completions, at most a batch; returns their number.
    pub fn take(&self, out: &mut Vec<Completion>) -> Result<usize> {
        let mut found = [sys::Wc::default(); BATCH];
        let device = &self.domain.device;
        // SAFETY: as for `arm`; there is room for as many completions as are asked for.
        let count = unsafe {
            let cq = self.cq.as_ptr();
            device.call(|_| {
                let count = match (*(*cq).context).poll_cq {
                    Some(call) => call(cq, BATCH as i32, found.as_mut_ptr()),
                    None => -1,
                };
                usize::try_from(count).map_err(|_| last("ibv_poll_cq", device.name()))
            })
        }?;
        out.extend(found.iter().take(count).map(|wc| {
            // The opcode is undefined on failure. A write with an immediate number has another and leaves no
            // message.
            let received = wc.status == sys::WC_SUCCESS && wc.opcode == sys::WC_RECV;
            let received = received.then(|| (wc.byte_len, u32::from_be(wc.imm_data)));
            Completion { id: wc.wr_id, status: wc.status, received }
        }));
        Ok(count)
    }

    pub fn status(&self, status: i32) -> String {
        self.domain.device.status(status)
    }
}

/// A requested state of a queue pair.
pub(crate) enum PairState<'a> {
    /// Accepts receives. The other side reaches no memory yet.
    Initialised { port: u8 },
    /// Receives from the other side.
    Receives { with: &'a Endpoint, port: u8, gid_index: u8, mtu: i32, reads: u8 },
    /// Sends too.
    Sends { psn: u32, reads: u8 },
    /// The same, and the other side reaches exposed memory.
    LetsIn,
    /// All its work ends with an error.
    Broken,
}

/// A work request.
pub(crate) enum PairRequest {
    /// A message, with an immediate number.
    Send { number: u32 },
    /// Bytes into the other side's memory.
    Write { to: RemoteMemory },
    /// Bytes out of the other side's memory.
    Read { from: RemoteMemory },
}

/// A queue pair of a reliable connection. When it is destroyed, as by dropping it, the device stops accessing its
/// memory.
pub(crate) struct QueuePair {
    queue: Arc<CompletionQueue>,
    qp: NonNull<sys::Qp>,
    number: u32,
    /// The memory for received messages.
    messages: OnceLock<Arc<Registration>>,
    ended: bool,
}

// SAFETY: the library's calls on a pair may be made by any thread.
unsafe impl Send for QueuePair {}
// SAFETY: verbs calls may be made by several threads at once; posts are locked by the library, and the only
// other concurrent call, `modify_qp` to RTS, changes no state that a post reads.
unsafe impl Sync for QueuePair {}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.end();
    }
}

impl QueuePair {
    /// Destroys it; false if the device refuses. The device may then reach memory for the pair permanently: receive
    /// memory is leaked here, and the caller leaks the rest.
    #[must_use]
    pub fn destroy(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.ended, true) {
            return true;
        }
        // SAFETY: no one else has the pair, and it is destroyed once. When that succeeds, the device reaches no memory
        // for it any more.
        let destroyed = unsafe {
            let device = &self.queue.domain.device;
            device.ask("ibv_destroy_qp", |library| (library.destroy_qp)(self.qp.as_ptr()))
        }
        .is_ok();
        if !destroyed {
            // It uses the queue and the domain.
            std::mem::forget(self.queue.clone());
            if let Some(memory) = self.messages.get() {
                memory.lose();
            }
        }
        destroyed
    }

    pub fn new(queue: &Arc<CompletionQueue>, sends: u32, receives: u32) -> Result<Self> {
        let cap = sys::QpCap {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let mut attr = sys::QpInitAttr {
            qp_context: null_mut(),
            send_cq: queue.cq.as_ptr(),
            recv_cq: queue.cq.as_ptr(),
            srq: null_mut(),
            cap,
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        let device = &queue.domain.device;
        // SAFETY: the domain and the completion queue live as long as the pair, which holds them.
        let qp = unsafe {
            device.make("ibv_create_qp", |library| (library.create_qp)(queue.domain.pd(), &mut attr))
        }?;
        // SAFETY: the library has just created it, and no longer changes this field.
        let number = unsafe { qp.as_ref().qp_num };
        Ok(Self { queue: queue.clone(), qp, number, messages: OnceLock::new(), ended: false })
    }

    /// Its number for the other side.
    pub fn number(&self) -> u32 {
        self.number
    }

    pub fn change(&self, state: &PairState<'_>) -> Result<()> {
        let (mut attr, mask) = attributes(state);
        let device = &self.queue.domain.device;
        // SAFETY: the pair is alive, and `attr` across the call.
        unsafe {
            device.ask("ibv_modify_qp", |library| (library.modify_qp)(self.qp.as_ptr(), &mut attr, mask))
        }
    }

    /// Posts work on registered memory, from `addr` on.
    pub fn post(&self, id: u64, work: &PairRequest, (addr, bytes): (u64, u32), lkey: u32) -> Result<()> {
        let mut sge = sys::Sge { addr, length: bytes, lkey };
        let mut request = match work {
            PairRequest::Send { number } => {
                let imm_data = number.to_be();
                sys::SendWr { imm_data, ..sys::SendWr::new(id, sys::WR_SEND_WITH_IMM) }
            }
            PairRequest::Write { to } => sys::SendWr {
                remote_addr: to.addr,
                rkey: to.rkey,
                ..sys::SendWr::new(id, sys::WR_RDMA_WRITE)
            },
            PairRequest::Read { from } => sys::SendWr {
                remote_addr: from.addr,
                rkey: from.rkey,
                ..sys::SendWr::new(id, sys::WR_RDMA_READ)
            },
        };
        if bytes > 0 {
            request.sg_list = &mut sge;
            request.num_sge = 1;
        }
        // SAFETY: the pair is alive, the library has filled the context's calls, and takes a copy of the request. The device
        // reaches memory by the key only, which it checks.
        unsafe {
            let qp = self.qp.as_ptr();
            self.queue.domain.device.ask("ibv_post_send", |_| match (*(*qp).context).post_send {
                Some(call) => call(qp, &mut request, &mut null_mut()),
                None => 95,
            })
        }
    }

    /// Posts registered memory for receiving a message.
    pub fn receive(&self, id: u64, addr: u64, bytes: u32, memory: &Arc<Registration>) -> Result<()> {
        self.messages.get_or_init(|| memory.clone());
        let mut sge = sys::Sge { addr, length: bytes, lkey: memory.lkey };
        let mut request = sys::RecvWr { wr_id: id, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        // SAFETY: as for `post`.
        unsafe {
            let qp = self.qp.as_ptr();
            self.queue.domain.device.ask("ibv_post_recv", |_| match (*(*qp).context).post_recv {
                Some(call) => call(qp, &mut request, &mut null_mut()),
                None => 95,
            })
        }
    }
}

/// A message that is not acknowledged is sent again after 4.096 µs × 2^this, which makes 67 ms.
const ACK_TIMEOUT: u8 = 14;
/// Number of retries before the connection counts as broken: after some seconds.
const RETRIES: u8 = 7;
/// Delay before a message that found no receive is sent again: 0.64 ms. With credits, this is rare.
const NO_RECEIVE_WAIT: u8 = 12;

fn attributes(state: &PairState<'_>) -> (sys::QpAttr, i32) {
    let empty = sys::QpAttr::default();
    match *state {
        PairState::Initialised { port } => {
            let attr = sys::QpAttr { qp_state: sys::QPS_INIT, port_num: port, qp_access_flags: 0, ..empty };
            (attr, sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS)
        }
        PairState::Receives { with, port, gid_index, mtu, reads } => {
            let grh = sys::GlobalRoute {
                dgid: halves(with.gid),
                sgid_index: gid_index,
                hop_limit: 64,
                ..Default::default()
            };
            let attr = sys::QpAttr {
                qp_state: sys::QPS_RTR,
                path_mtu: mtu,
                dest_qp_num: with.pair,
                rq_psn: with.psn,
                max_dest_rd_atomic: reads,
                min_rnr_timer: NO_RECEIVE_WAIT,
                ah_attr: sys::AhAttr {
                    grh,
                    dlid: with.lid,
                    is_global: 1,
                    port_num: port,
                    ..Default::default()
                },
                ..empty
            };
            let mask = sys::QP_STATE
                | sys::QP_AV
                | sys::QP_PATH_MTU
                | sys::QP_DEST_QPN
                | sys::QP_RQ_PSN
                | sys::QP_MAX_DEST_RD_ATOMIC
                | sys::QP_MIN_RNR_TIMER;
            (attr, mask)
        }
        PairState::Sends { psn, reads } => {
            let attr = sys::QpAttr {
                qp_state: sys::QPS_RTS,
                sq_psn: psn,
                max_rd_atomic: reads,
                timeout: ACK_TIMEOUT,
                retry_cnt: RETRIES,
                rnr_retry: RETRIES - 1,
                ..empty
            };
            let mask = sys::QP_STATE
                | sys::QP_SQ_PSN
                | sys::QP_MAX_QP_RD_ATOMIC
                | sys::QP_TIMEOUT
                | sys::QP_RETRY_CNT
                | sys::QP_RNR_RETRY;
            (attr, mask)
        }
        PairState::LetsIn => {
            let attr = sys::QpAttr { qp_state: sys::QPS_RTS, qp_access_flags: REMOTE, ..empty };
            (attr, sys::QP_STATE | sys::QP_ACCESS_FLAGS)
        }
        PairState::Broken => (sys::QpAttr { qp_state: sys::QPS_ERR, ..empty }, sys::QP_STATE),
    }
}

fn halves(gid: [u8; 16]) -> [u64; 2] {
    let half = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&gid[at..at + 8]);
        u64::from_ne_bytes(bytes)
    };
    [half(0), half(8)]
}
