//! The parts of libibverbs's header that are used here: its structures, and its functions by name.
//!
//! The structures are part of the library's stable interface (`IBVERBS_1.1`); `layouts` below checks their sizes and
//! offsets against those of a C compiler on 64-bit Linux. The four calls of the fast path are not functions of the
//! library but pointers in a context, which its header's inline functions call; so they are here.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// The first fields of a context.
#[repr(C)]
pub struct Context {
    device: *mut c_void,
    ops: [*const c_void; 11],
    // SAFETY: to be called on queues of this context that are alive, with room for what they write.
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    more_ops: [*const c_void; 12],
    // SAFETY: to be called on pairs of this context that are alive, with requests that live across the call.
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    last_ops: [*const c_void; 5],
    pub cmd_fd: c_int,
    pub async_fd: c_int,
}

#[repr(C)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    guids: [u64; 2],
    pub max_mr_size: u64,
    page_size_cap: u64,
    ids: [u32; 3],
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    device_cap_flags: c_uint,
    pub max_sge: c_int,
    sge_rd_and_cq: [c_int; 2],
    pub max_cqe: c_int,
    pub max_mr: c_int,
    max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    ee_and_res: [c_int; 2],
    pub max_qp_init_rd_atom: c_int,
    rest: [c_int; 16],
    more: [u8; 3],
    phys_port_cnt: u8,
    end: u32,
}

impl DeviceAttr {
    pub fn ports(&self) -> u8 {
        self.phys_port_cnt
    }
}

#[repr(C)]
#[derive(Default)]
pub struct PortAttr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    words: [u32; 4],
    keys: u16,
    pub lid: u16,
    bytes: [u8; 10],
    pub link_layer: u8,
    rest: [u8; 5],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GidEntry {
    pub gid: [u64; 2],
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[repr(C)]
pub struct Mr {
    context: *mut Context,
    pd: *mut c_void,
    pub addr: *mut c_void,
    pub length: usize,
    handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
}

#[repr(C)]
pub struct CompChannel {
    context: *mut Context,
    pub fd: c_int,
}

#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pointers: [*mut c_void; 5],
    handle: u32,
    pub qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GlobalRoute {
    pub dgid: [u64; 2],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Default)]
pub struct QpAttr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub rest: [u64; 9],
}

#[repr(C)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    src_qp: u32,
    pub wc_flags: c_uint,
    rest: [u32; 2],
}

impl SendWr {
    pub fn new(wr_id: u64, opcode: c_int) -> Self {
        Self {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode,
            send_flags: SEND_SIGNALED,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            rest: [0; 9],
        }
    }
}

pub const GID_TYPE_ROCE_V1: u32 = 1;
pub const GID_TYPE_ROCE_V2: u32 = 2;
pub const PORT_ACTIVE: c_int = 4;
pub const LINK_LAYER_ETHERNET: u8 = 2;

pub const ACCESS_LOCAL_WRITE: c_uint = 1;
pub const ACCESS_REMOTE_WRITE: c_uint = 2;
pub const ACCESS_REMOTE_READ: c_uint = 4;
pub const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

pub const WR_RDMA_WRITE: c_int = 0;
pub const WR_SEND_WITH_IMM: c_int = 3;
pub const WR_RDMA_READ: c_int = 4;
pub const SEND_SIGNALED: c_uint = 2;
pub const WC_SUCCESS: c_int = 0;
pub const WC_RECV: c_int = 128;

pub const QPT_RC: c_int = 2;
pub const QPS_INIT: c_int = 1;
pub const QPS_RTR: c_int = 2;
pub const QPS_RTS: c_int = 3;
pub const QPS_ERR: c_int = 6;
pub const QP_STATE: c_int = 1;
pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub const QP_PKEY_INDEX: c_int = 1 << 4;
pub const QP_PORT: c_int = 1 << 5;
pub const QP_AV: c_int = 1 << 7;
pub const QP_PATH_MTU: c_int = 1 << 8;
pub const QP_TIMEOUT: c_int = 1 << 9;
pub const QP_RETRY_CNT: c_int = 1 << 10;
pub const QP_RNR_RETRY: c_int = 1 << 11;
pub const QP_RQ_PSN: c_int = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub const QP_SQ_PSN: c_int = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub const QP_DEST_QPN: c_int = 1 << 20;

/// Declares the table of functions, and how it is loaded.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions; it stays loaded as long as this lives.
        pub struct Functions {
            // SAFETY: to be called as the library's manual says, on objects that are alive.
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            /// Since rdma-core 34.
            pub reg_dmabuf_mr: Option<RegDmabufMr>,
            pub _library: Library,
        }

        impl Functions {
            /// Looks up every function; on failure returns the name of the first missing one.
            pub fn of(library: Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the name is that of a function with this signature in libibverbs's stable interface.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) $(-> $result)?>($symbol.as_bytes()) };
                        *found.map_err(|_| $symbol)?
                    },)*
                    reg_dmabuf_mr: {
                        // SAFETY: as above.
                        unsafe { library.get::<RegDmabufMr>(b"ibv_reg_dmabuf_mr") }.ok().map(|found| *found)
                    },
                    _library: library,
                })
            }
        }
    };
}

// SAFETY: to be called with a domain that is alive; the kernel checks the rest.
pub type RegDmabufMr = unsafe extern "C" fn(*mut c_void, u64, usize, u64, c_int, c_int) -> *mut Mr;

functions! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut c_void;
    free_device_list = "ibv_free_device_list": fn(*mut *mut c_void);
    get_device_name = "ibv_get_device_name": fn(*mut c_void) -> *const c_char;
    open_device = "ibv_open_device": fn(*mut c_void) -> *mut Context;
    close_device = "ibv_close_device": fn(*mut Context) -> c_int;
    query_device = "ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = "ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_ex = "_ibv_query_gid_ex": fn(*mut Context, u32, u32, *mut GidEntry, u32, usize) -> c_int;
    alloc_pd = "ibv_alloc_pd": fn(*mut Context) -> *mut c_void;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut c_void) -> c_int;
    reg_mr = "ibv_reg_mr_iova2": fn(*mut c_void, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    dereg_mr = "ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel": fn(*mut CompChannel) -> c_int;
    create_cq = "ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq = "ibv_destroy_cq": fn(*mut Cq) -> c_int;
    get_cq_event = "ibv_get_cq_event": fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": fn(*mut Cq, c_uint);
    create_qp = "ibv_create_qp": fn(*mut c_void, *mut QpInitAttr) -> *mut Qp;
    modify_qp = "ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut Qp) -> c_int;
    wc_status_str = "ibv_wc_status_str": fn(c_int) -> *const c_char;
}

/// The same structures according to a C compiler (rdma-core 44, x86-64).
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(Context, poll_cq) == 96 && offset_of!(Context, req_notify_cq) == 104);
    assert!(offset_of!(Context, post_send) == 208 && offset_of!(Context, post_recv) == 216);
    assert!(offset_of!(Context, cmd_fd) == 264 && offset_of!(Context, async_fd) == 268);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_mr_size) == 80);
    assert!(offset_of!(DeviceAttr, max_qp) == 108 && offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_mr) == 136 && offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156 && offset_of!(DeviceAttr, max_sge) == 120);
    assert!(size_of::<PortAttr>() == 52 && offset_of!(PortAttr, lid) == 34);
    assert!(offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<GidEntry>() == 32 && offset_of!(GidEntry, gid_type) == 24);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(offset_of!(CompChannel, fd) == 8 && offset_of!(Qp, qp_num) == 52);
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, cap) == 32);
    assert!(offset_of!(QpInitAttr, qp_type) == 52);
    assert!(
        size_of::<AhAttr>() == 32 && offset_of!(AhAttr, dlid) == 24 && offset_of!(AhAttr, is_global) == 29
    );
    assert!(size_of::<GlobalRoute>() == 24 && offset_of!(GlobalRoute, sgid_index) == 20);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, ah_attr) == 56);
    assert!(offset_of!(QpAttr, dest_qp_num) == 28 && offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, max_rd_atomic) == 126 && offset_of!(QpAttr, rnr_retry) == 132);
    assert!(size_of::<SendWr>() == 128 && offset_of!(SendWr, remote_addr) == 40);
    assert!(offset_of!(SendWr, rkey) == 48 && offset_of!(SendWr, imm_data) == 36);
    assert!(size_of::<RecvWr>() == 32 && size_of::<Sge>() == 16);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, byte_len) == 20 && offset_of!(Wc, wc_flags) == 36);
};
