//! Extended attributes of local files, restricted to the names that are served.

use rustix::buffer::spare_capacity;
use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;

use super::TreeResult;
use crate::wire::{MAX_XATTR, Xattr};

/// Access control lists, which the kernel of a mount reads itself.
const LISTS: &[u8] = b"system.posix_acl_";

/// Whether an attribute is served. Other machines get none that gives rights on this one.
fn is_served(name: &[u8], for_others: bool) -> bool {
    let everywhere = name.starts_with(b"user.") || name.starts_with(LISTS);
    everywhere || !for_others && (name.starts_with(b"trusted.") || name == b"security.capability")
}

/// Executes a request for the file at a path, with the credentials of this thread.
pub(super) fn ask(path: &str, ask: &Xattr, for_others: bool) -> TreeResult<Vec<u8>> {
    if !ask.is_sound() {
        return Err(Errno::TOOBIG);
    }
    let name = ask.name();
    if !matches!(ask, Xattr::List) && !is_served(name, for_others) {
        return Err(Errno::OPNOTSUPP);
    }
    let mut bytes = Vec::new();
    match ask {
        Xattr::Get { .. } => {
            bytes.reserve_exact(MAX_XATTR);
            match getxattr(path, name, spare_capacity(&mut bytes)) {
                // The kernel would take this error for a refusal to access the file.
                Err(Errno::OPNOTSUPP) if name.starts_with(LISTS) => return Err(Errno::NODATA),
                other => drop(other?),
            }
        }
        Xattr::Set { value, flags, .. } => {
            let flags = XattrFlags::from_bits(*flags).ok_or(Errno::INVAL)?;
            setxattr(path, name, value, flags)?;
        }
        Xattr::Remove { .. } => removexattr(path, name)?,
        Xattr::List => {
            bytes.reserve_exact(MAX_XATTR);
            listxattr(path, spare_capacity(&mut bytes))?;
            let served = bytes.split_inclusive(|byte| *byte == 0);
            let served =
                served.filter(|name| is_served(name.strip_suffix(b"\0").unwrap_or(name), for_others));
            bytes = served.flatten().copied().collect();
        }
    }
    Ok(bytes)
}
