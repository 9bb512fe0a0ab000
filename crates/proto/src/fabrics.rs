//! NVMe over Fabrics: the commands that only message-based controllers have, and the discovery log.

use crate::wire::record;
use crate::{Sqe, Status};

/// The opcode of all Fabrics commands; the command's own type is in the place of NSID.
pub const OPCODE: u8 = 0x7f;

/// The NQN of every discovery controller.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Longest NQN, in bytes.
pub const MAX_NQN: usize = 223;

/// CNTLID of a Connect command for the admin queue: the controller chooses.
pub const ANY_CONTROLLER: u16 = 0xffff;

/// The log page of a discovery controller.
pub const DISCOVERY_LOG: u8 = 0x70;

/// Types of Fabrics commands (FCTYPE).
pub mod fctype {
    /// Property Set.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Connect.
    pub const CONNECT: u8 = 0x01;
    /// Property Get.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Authentication Send.
    pub const AUTH_SEND: u8 = 0x05;
    /// Authentication Receive.
    pub const AUTH_RECEIVE: u8 = 0x06;
    /// Disconnect.
    pub const DISCONNECT: u8 = 0x08;
}

/// SGL descriptor types of message-based transports, as they lie in byte 15.
pub mod sgl {
    /// A data block at an offset of the capsule.
    pub const IN_CAPSULE: u8 = 0x01;
    /// A data block that the transport moves.
    pub const TRANSPORT: u8 = 0x5a;
}

const fn command(kind: u8) -> Sqe {
    with_sgl(Sqe::new(OPCODE, kind as u32), 0, 0)
}

const fn with_sgl(mut sqe: Sqe, len: u32, kind: u8) -> Sqe {
    sqe.dw[0] = sqe.dw[0] & !(3 << 14) | 1 << 14;
    sqe.with_qword(6, 0).with_qword(8, len as u64 | (kind as u64) << 56)
}

/// AUTHREQ of a queue whose host must authenticate itself (ATR).
pub const AUTHENTICATION: u16 = 1 << 1;

/// NVMe's own security protocol, by its number and what is specific to it.
const AUTHENTICATION_PROTOCOL: u32 = 0xe9 << 24 | 1 << 16 | 1 << 8;

/// Authentication Send of `len` bytes.
#[must_use]
pub const fn auth_send(bytes: u32) -> Sqe {
    authentication(fctype::AUTH_SEND, bytes)
}

/// Authentication Receive of `len` bytes.
#[must_use]
pub const fn auth_receive(bytes: u32) -> Sqe {
    authentication(fctype::AUTH_RECEIVE, bytes)
}

const fn authentication(kind: u8, bytes: u32) -> Sqe {
    let mut sqe = command(kind);
    sqe.dw[10] = AUTHENTICATION_PROTOCOL;
    sqe.dw[11] = bytes;
    sqe
}

/// The command with `len` bytes of data that the transport moves; none at all if `len` is 0.
#[must_use]
pub const fn with_transport_data(sqe: Sqe, len: u32) -> Sqe {
    with_sgl(sqe, len, sgl::TRANSPORT)
}

/// The command with `len` bytes of data that follow it in its capsule.
#[must_use]
pub const fn with_capsule_data(sqe: Sqe, len: u32) -> Sqe {
    with_sgl(sqe, len, sgl::IN_CAPSULE)
}

/// The type of a Fabrics command; none if it is another command.
#[must_use]
pub const fn fctype_of(sqe: &Sqe) -> Option<u8> {
    if sqe.opcode() == OPCODE { Some(sqe.nsid() as u8) } else { None }
}

/// A Connect command. Its data is a [`ConnectData`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connect {
    /// The queue; 0 is the admin queue.
    pub qid: u16,
    /// Entries less one.
    pub size_z: u16,
    /// Completions need not say how far the submission queue was fetched.
    pub no_flow_control: bool,
    /// Keep Alive time-out in milliseconds; 0 for none. For the admin queue only.
    pub keep_alive_ms: u32,
}

impl Connect {
    /// The command, without its data.
    #[must_use]
    pub const fn command(&self) -> Sqe {
        command(fctype::CONNECT)
            .with_dw(10, (self.qid as u32) << 16)
            .with_dw(11, self.size_z as u32 | (self.no_flow_control as u32) << 18)
            .with_dw(12, self.keep_alive_ms)
    }
}

impl From<&Sqe> for Connect {
    fn from(sqe: &Sqe) -> Self {
        Self {
            qid: (sqe.dw[10] >> 16) as u16,
            size_z: sqe.dw[11] as u16,
            no_flow_control: sqe.dw[11] >> 18 & 1 != 0,
            keep_alive_ms: sqe.dw[12],
        }
    }
}

record! {
    /// The data of a Connect command.
    ConnectData, ConnectDataBuild, 1024;
    /// The host's identifier.
    host_id 0 [u8; 16];
    /// The controller, or [`ANY_CONTROLLER`].
    cntlid 16 u16;
}

impl<'a> ConnectData<'a> {
    /// The subsystem's NQN.
    #[must_use]
    pub fn subnqn(&self) -> crate::wire::Text<'a> {
        crate::wire::Text::in_record(self.bytes(), 256, 256)
    }

    /// The host's NQN.
    #[must_use]
    pub fn hostnqn(&self) -> crate::wire::Text<'a> {
        crate::wire::Text::in_record(self.bytes(), 512, 256)
    }
}

/// The data of a Connect command; names longer than [`MAX_NQN`] are cut.
#[must_use]
pub fn connect_data(host_id: [u8; 16], cntlid: u16, subnqn: &str, hostnqn: &str) -> [u8; 1024] {
    let mut data = [0; 1024];
    let _ = ConnectDataBuild::new(&mut data).host_id(host_id).cntlid(cntlid);
    // NQNs end in zeros, unlike the padded text of other records.
    for (at, name) in [(256, subnqn), (512, hostnqn)] {
        data.iter_mut().skip(at).take(MAX_NQN).zip(name.bytes()).for_each(|(to, byte)| *to = byte);
    }
    data
}

/// The answer to a Connect command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connected {
    /// The controller.
    pub cntlid: u16,
    /// What must be authenticated before the queue can be used: bit 1 the host, bit 2 also requests a secure channel.
    pub authreq: u16,
}

impl From<u32> for Connected {
    fn from(result: u32) -> Self {
        Self { cntlid: result as u16, authreq: (result >> 16) as u16 }
    }
}

/// Property Get of a register of 4 or 8 bytes.
#[must_use]
pub const fn property_get(offset: u32, is_wide: bool) -> Sqe {
    command(fctype::PROPERTY_GET).with_dw(10, is_wide as u32).with_dw(11, offset)
}

/// Property Set of a register of 4 bytes.
#[must_use]
pub const fn property_set(offset: u32, value: u32) -> Sqe {
    command(fctype::PROPERTY_SET).with_dw(11, offset).with_dw(12, value)
}

/// The meaning of a Connect command's status; its codes are those of other commands, too.
#[must_use]
pub fn connect_status(status: Status) -> &'static str {
    match status.0 & 0x7ff {
        0x180 => "the target does not know this format of the Connect command",
        0x181 => "the controller is busy",
        0x182 => "the target refuses a parameter of the Connect command",
        0x183 => "another discovery controller has to be asked first",
        0x184 => "the target does not let this host connect",
        0x191 => "the host has to authenticate itself",
        _ => status.name(),
    }
}

record! {
    /// The head of the discovery log; entries follow at byte 1024.
    DiscoveryLog, DiscoveryLogBuild, 1024;
    /// Changes whenever the log does.
    genctr 0 u64;
    /// How many entries follow.
    numrec 8 u64;
    /// 0.
    recfmt 16 u16;
}

record! {
    /// An entry of the discovery log: where a subsystem can be reached.
    DiscoveryEntry, DiscoveryEntryBuild, 1024;
    /// The transport: 1 RDMA, 2 Fibre Channel, 3 TCP.
    trtype 0 u8;
    /// The address family: 1 IPv4, 2 IPv6.
    adrfam 1 u8;
    /// 1 another discovery service, 2 an NVM subsystem, 3 this discovery service.
    subtype 2 u8;
    /// Bits 1:0: whether a secure channel is 1 required or 2 not.
    treq 3 u8;
    /// The port of the subsystem.
    portid 4 u16;
    /// The controller, or [`ANY_CONTROLLER`].
    cntlid 6 u16;
    /// Most entries of the admin queue.
    asqsz 8 u16;
    @text:
    /// The service: a TCP port.
    trsvcid 32 32;
    /// The subsystem's NQN.
    subnqn 256 256;
    /// The address.
    traddr 512 256;
}

impl DiscoveryEntry<'_> {
    /// `subtype` of an NVM subsystem.
    pub const NVM: u8 = 2;
    /// `trtype` of TCP.
    pub const TCP: u8 = 3;

    /// The name of the transport type.
    #[must_use]
    pub fn transport(&self) -> &'static str {
        match self.trtype() {
            1 => "rdma",
            2 => "fc",
            3 => "tcp",
            254 => "loop",
            _ => "unknown",
        }
    }
}

/// A 64-bit result of a completion: what Property Get of a wide register returns.
#[must_use]
pub const fn wide_result(cqe: &crate::Cqe) -> u64 {
    cqe.dw[0] as u64 | (cqe.dw[1] as u64) << 32
}
