//! Registered memory. Registration gains nothing here; it serves to check calls.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
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
///
/// # Safety
/// The memory is not freed before the call returns.
// SAFETY: the name is cuFile's, which this library replaces; as below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufRegister(base: *const c_void, bytes: usize, _flags: c_int) -> CuFileError {
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
        with_state(|state| add(&mut state.buffers, at, bytes))
    });
    stats::count(CountedCall::BufferRegister, answer.err == 0);
    answer
}

/// Adds memory. If another thread has registered it meanwhile, calls are checked against the length given there.
fn add(buffers: &mut BTreeMap<usize, RegisteredBuffer>, at: usize, bytes: usize) -> Result<(), Failure> {
    match buffers.entry(at) {
        Entry::Vacant(free) => {
            free.insert(RegisteredBuffer { bytes });
            Ok(())
        }
        Entry::Occupied(_) => Err(Code::MemoryAlreadyRegistered.into()),
    }
}

/// Deregisters memory.
// SAFETY: as above.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_the_length_of_its_first_registration() {
        let mut buffers = BTreeMap::new();
        assert_eq!(add(&mut buffers, 4096, 100), Ok(()));
        assert_eq!(add(&mut buffers, 4096, 200), Err(Code::MemoryAlreadyRegistered.into()));
        assert_eq!(buffers[&4096].bytes, 100);
    }
}
