//! A device without hardware, for tests: it accepts all work and does none of it, completes the receives that a
//! test names, records rights, and destroys a queue pair only when allowed, or never. Like the kernel, it
//! refuses threads that have acted as users. Its objects are never freed.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::identity;
use rustix::event::{EventfdFlags, eventfd};

use super::caller::Caller;
use super::sys::{self, Functions};
use super::{Verbs, VerbsDevice};

/// Time limit of a test.
const LONG: Duration = Duration::from_secs(30);

/// The device's recorded calls, and its permissions.
#[derive(Default)]
pub(crate) struct Fake {
    state: Mutex<FakeState>,
    changed: Condvar,
}

#[derive(Default)]
struct FakeState {
    holds: bool,
    refuses: bool,
    destroying: bool,
    destroyed: bool,
    pair_rights: Vec<u32>,
    memory_rights: Vec<u32>,
    /// Receives to complete: number, opcode, length.
    receives: Vec<(u64, c_int, u32)>,
}

/// A context, and its device.
#[repr(C)]
struct FakeContext {
    known: sys::Context,
    fake: &'static Fake,
}

impl Fake {
    pub fn new() -> &'static Self {
        Box::leak(Box::default())
    }

    pub fn device(&'static self) -> VerbsDevice {
        // SAFETY: all zeroes is a valid value of this structure.
        let mut known: sys::Context = unsafe { std::mem::zeroed() };
        known.poll_cq = Some(poll_cq);
        known.req_notify_cq = Some(req_notify_cq);
        known.post_send = Some(post_send);
        known.post_recv = Some(post_recv);
        let context = leak(FakeContext { known, fake: self }).cast();
        let caller = Caller::start().unwrap();
        VerbsDevice::new(Verbs(Arc::new(functions())), "fake", NonNull::new(context).unwrap(), caller)
    }

    fn change(&self, change: impl FnOnce(&mut FakeState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait(&self, until: impl Fn(&FakeState) -> bool) {
        let begun = Instant::now();
        let mut state = self.state.lock().unwrap();
        while !until(&state) {
            assert!(begun.elapsed() < LONG, "the device waits in vain");
            let waited = self.changed.wait_timeout(state, LONG);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Blocks the destruction of pairs until [`Self::allow`].
    pub fn hold(&self) {
        self.change(|state| state.holds = true);
    }

    pub fn allow(&self) {
        self.change(|state| state.holds = false);
    }

    /// Refuses to destroy pairs from now on.
    pub fn refuse(&self) {
        self.change(|state| state.refuses = true);
    }

    pub fn wait_until_destroying(&self) {
        self.wait(|state| state.destroying);
    }

    /// Completes a receive.
    pub fn complete_receive(&self, id: u64, opcode: c_int, bytes: u32) {
        self.change(|state| state.receives.push((id, opcode, bytes)));
    }

    pub fn has_destroyed(&self) -> bool {
        self.state.lock().unwrap().destroyed
    }

    /// The other side's rights of a pair, each time they were set.
    pub fn pair_rights(&self) -> Vec<u32> {
        self.state.lock().unwrap().pair_rights.clone()
    }

    /// The rights with which memory was registered.
    pub fn memory_rights(&self) -> Vec<u32> {
        self.state.lock().unwrap().memory_rights.clone()
    }
}

/// `EACCES` for a thread that has acted as a user.
fn refusal() -> c_int {
    if identity::has_changed() { 13 } else { 0 }
}

fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn of(context: *mut sys::Context) -> &'static Fake {
    // SAFETY: every context of this device is the first field of one that is never freed.
    unsafe { (*context.cast::<FakeContext>()).fake }
}

extern "C" fn poll_cq(cq: *mut sys::Cq, _: c_int, out: *mut sys::Wc) -> c_int {
    // SAFETY: the caller's queue is one of `create_cq`.
    let fake = of(unsafe { (*cq).context });
    let Some((id, opcode, bytes)) = fake.state.lock().unwrap().receives.pop() else { return 0 };
    // SAFETY: the caller has room for a completion.
    let wc = unsafe { &mut *out };
    (wc.wr_id, wc.opcode, wc.byte_len) = (id, opcode, bytes);
    1
}
extern "C" fn req_notify_cq(_: *mut sys::Cq, _: c_int) -> c_int {
    0
}
extern "C" fn post_send(_: *mut sys::Qp, _: *mut sys::SendWr, _: *mut *mut sys::SendWr) -> c_int {
    refusal()
}
extern "C" fn post_recv(_: *mut sys::Qp, _: *mut sys::RecvWr, _: *mut *mut sys::RecvWr) -> c_int {
    refusal()
}

/// A domain is represented by its context.
extern "C" fn alloc_pd(context: *mut sys::Context) -> *mut c_void {
    context.cast()
}

extern "C" fn reg_mr(pd: *mut c_void, _: *mut c_void, _: usize, _: u64, access: c_uint) -> *mut sys::Mr {
    if refusal() != 0 {
        return null_mut();
    }
    of(pd.cast()).change(|state| state.memory_rights.push(access));
    // SAFETY: all zeroes is a valid value of this structure.
    leak(unsafe { std::mem::zeroed() })
}

extern "C" fn create_comp_channel(_: *mut sys::Context) -> *mut sys::CompChannel {
    // SAFETY: all zeroes is a valid value of this structure.
    let mut channel: sys::CompChannel = unsafe { std::mem::zeroed() };
    channel.fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap().into_raw_fd();
    leak(channel)
}

extern "C" fn create_cq(
    context: *mut sys::Context,
    _: c_int,
    _: *mut c_void,
    _: *mut sys::CompChannel,
    _: c_int,
) -> *mut sys::Cq {
    leak(sys::Cq { context })
}

extern "C" fn create_qp(pd: *mut c_void, _: *mut sys::QpInitAttr) -> *mut sys::Qp {
    // SAFETY: all zeroes is a valid value of this structure.
    let mut pair: sys::Qp = unsafe { std::mem::zeroed() };
    pair.context = pd.cast();
    leak(pair)
}

extern "C" fn modify_qp(pair: *mut sys::Qp, attr: *mut sys::QpAttr, mask: c_int) -> c_int {
    // SAFETY: the caller's pair is one of `create_qp`, and its attributes live across the call.
    let (context, rights) = unsafe { ((*pair).context, (*attr).qp_access_flags) };
    if refusal() != 0 {
        return refusal();
    }
    if mask & sys::QP_ACCESS_FLAGS != 0 {
        of(context).change(|state| state.pair_rights.push(rights));
    }
    0
}

extern "C" fn destroy_qp(pair: *mut sys::Qp) -> c_int {
    // SAFETY: the caller's pair is one of `create_qp`.
    let fake = of(unsafe { (*pair).context });
    fake.change(|state| state.destroying = true);
    fake.wait(|state| !state.holds);
    if refusal() != 0 || fake.state.lock().unwrap().refuses {
        return 16;
    }
    fake.change(|state| state.destroyed = true);
    0
}

extern "C" fn none(_: *mut c_int) -> *mut *mut c_void {
    null_mut()
}
extern "C" fn no_list(_: *mut *mut c_void) {}
extern "C" fn no_name(_: *mut c_void) -> *const c_char {
    null()
}
extern "C" fn no_context(_: *mut c_void) -> *mut sys::Context {
    null_mut()
}
extern "C" fn keep_context(_: *mut sys::Context) -> c_int {
    0
}
extern "C" fn no_attr(_: *mut sys::Context, _: *mut sys::DeviceAttr) -> c_int {
    -1
}
extern "C" fn no_port(_: *mut sys::Context, _: u8, _: *mut sys::PortAttr) -> c_int {
    -1
}
extern "C" fn no_gid(_: *mut sys::Context, _: u32, _: u32, _: *mut sys::GidEntry, _: u32, _: usize) -> c_int {
    -1
}
extern "C" fn keep(_: *mut c_void) -> c_int {
    0
}
extern "C" fn keep_mr(_: *mut sys::Mr) -> c_int {
    0
}
extern "C" fn keep_channel(_: *mut sys::CompChannel) -> c_int {
    0
}
extern "C" fn keep_cq(_: *mut sys::Cq) -> c_int {
    0
}
extern "C" fn no_event(_: *mut sys::CompChannel, _: *mut *mut sys::Cq, _: *mut *mut c_void) -> c_int {
    -1
}
extern "C" fn no_ack(_: *mut sys::Cq, _: c_uint) {}
extern "C" fn status(_: c_int) -> *const c_char {
    c"a fake's status".as_ptr()
}

fn functions() -> Functions {
    Functions {
        get_device_list: none,
        free_device_list: no_list,
        get_device_name: no_name,
        open_device: no_context,
        close_device: keep_context,
        query_device: no_attr,
        query_port: no_port,
        query_gid_ex: no_gid,
        alloc_pd,
        dealloc_pd: keep,
        reg_mr,
        dereg_mr: keep_mr,
        create_comp_channel,
        destroy_comp_channel: keep_channel,
        create_cq,
        destroy_cq: keep_cq,
        get_cq_event: no_event,
        ack_cq_events: no_ack,
        create_qp,
        modify_qp,
        destroy_qp,
        wc_status_str: status,
        reg_dmabuf_mr: None,
        _library: libloading::os::unix::Library::this().into(),
    }
}
