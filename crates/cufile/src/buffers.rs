//! Registered memory. Registration gains nothing here; it serves to check calls.

use std::ffi::{c_int, c_void};

use crate::driver::open_for_a_call;
use crate::error::{Code, Failure};
use crate::machine::machine;
use crate::state::{answer, with_state};
use crate::stats::{self, CountedCall};
use crate::types::CuFileError;

/// Registered memory.
#[derive(Clone, Copy, Debug)]
pub struct RegisteredBuffer {
    /// Its bytes.
    pub bytes: usize,
}

/// Registers memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(base: *const c_void, bytes: usize, _flags: c_int) -> CuFileError {
    let answer = answer("cuFileBufRegister", || {
        let at = base as usize;
        let last = bytes.checked_sub(1).and_then(|more| at.checked_add(more)).ok_or(Code::InvalidValue)?;
        if at == 0 {
            return Err(Code::InvalidValue.into());
        }
        open_for_a_call();
        if with_state(|state| state.buffers.contains_key(&at)) {
            return Err(Code::MemoryAlreadyRegistered.into());
        }
        match machine().pointer(at)? {
            // One range may consist of several allocations, as PyTorch's expandable segments do.
            Some(first) if machine().pointer(last)?.is_none_or(|end| end.ordinal != first.ordinal) => {
                return Err(Code::InvalidPointerRange.into());
            }
            // The first read then need not wait for it, and reports any error.
            Some(first) => drop(machine().destination(first, at)),
            None if is_mapped(at) && is_mapped(last) => {}
            None => return Err(Code::InvalidPointer.into()),
        }
        with_state(|state| match state.buffers.insert(at, RegisteredBuffer { bytes }) {
            None => Ok(()),
            // Another thread registered it meanwhile.
            Some(_) => Err(Code::MemoryAlreadyRegistered.into()),
        })
    });
    stats::count(CountedCall::BufferRegister, answer.err == 0);
    answer
}

/// Deregisters memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(base: *const c_void) -> CuFileError {
    let answer = answer("cuFileBufDeregister", || {
        let removed = with_state(|state| state.buffers.remove(&(base as usize)));
        removed.map(|_| ()).ok_or_else(|| Code::MemoryNotRegistered.into())
    });
    stats::count(CountedCall::BufferDeregister, answer.err == 0);
    answer
}

/// Whether there is a page at an address of this process.
fn is_mapped(at: usize) -> bool {
    let (page, mut there) = (onehop_os::page_cache::page_size(), 0_u8);
    let start = (at / page * page) as *mut c_void;
    // SAFETY: the kernel looks the page up without accessing it; there is a byte for the one page.
    unsafe { libc::mincore(start, page, (&raw mut there).cast()) == 0 }
}

/// The number of bytes registered at an address.
pub fn registered(base: usize) -> Option<usize> {
    with_state(|state| state.buffers.get(&base).map(|registered| registered.bytes))
}

/// The address of a call's bytes, checked against what was registered at its base.
pub fn address(base: usize, offset: i64, bytes: usize) -> Result<usize, Failure> {
    if base == 0 {
        return Err(Failure::System(libc::EINVAL));
    }
    if let Some(all) = registered(base) {
        let start = usize::try_from(offset).map_err(|_| Code::Internal)?;
        if start > all || bytes > all - start {
            return Err(Code::InvalidMappingRange.into());
        }
    }
    let at = base.checked_add_signed(offset as isize).ok_or(Code::InvalidValue)?;
    at.checked_add(bytes).map(|_| at).ok_or_else(|| Code::InvalidValue.into())
}
