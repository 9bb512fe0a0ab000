//! The wire format: frames of a head, a body and possibly data.
//!
//! The head has a fixed length and a checksum of its own, so that its lengths are used only if they arrived intact.
//! Bodies are short and hold one message each. Data is file data.

mod head;
mod hello;
mod message;

pub use head::{FrameKind, HEAD_BYTES, Head, VERSION};
pub use hello::{Hello, HelloBack, Join, MountId, SessionId, Welcome};
pub use message::{
    ACCESS_LIST, Attr, AttrChange, Caller, FileKey, FileKind, FsSpace, Make, NO_USER, Name, OpenMode, ROOT,
    Remote, Reply, Request, Time, TimeChange, Xattr,
};

use rustix::io::Errno;

use crate::{Error, Result};

/// The target's error when it has no room for this user's request or data. Nothing was executed; the request may be
/// repeated.
pub(crate) const FULL: Errno = Errno::NOBUFS;
/// The longest body in bytes.
pub const MAX_BODY: usize = 64 << 10;
/// The most data in one frame. Longer transfers are split into chunks.
pub const MAX_DATA: usize = 4 << 20;
/// The longest name in bytes, as in Linux.
pub const MAX_NAME: usize = 255;
/// The longest value of an extended attribute, which fits in a body with everything else in it.
pub const MAX_XATTR: usize = MAX_BODY - 8192;
/// The longest target of a symbolic link in bytes.
pub const MAX_LINK: usize = 4095;

/// Encodes a message as a body.
///
/// # Errors
/// When it is too long.
pub fn pack<T: serde::Serialize>(message: &T) -> Result<Vec<u8>> {
    let bytes =
        postcard::to_stdvec(message).map_err(|e| Error::protocol("this side", format!("a message: {e}")))?;
    if bytes.len() > MAX_BODY {
        return Err(Error::protocol("this side", format!("a message of {} bytes", bytes.len())));
    }
    Ok(bytes)
}

/// Decodes the message in a body, which must have no trailing bytes.
///
/// # Errors
/// When the body is not such a message.
pub fn unpack<T: serde::de::DeserializeOwned>(bytes: &[u8], peer: &str) -> Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(Error::protocol(peer, format!("{} bytes after a message", rest.len()))),
        Err(error) => Err(Error::protocol(peer, format!("an invalid message: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_that_are_not_messages_are_refused() {
        let refused = |bytes: &[u8]| unpack::<Name>(bytes, "a peer").unwrap_err().to_string();
        let mut body = pack(&Name::new(b"a").unwrap()).unwrap();
        assert!(refused(&body[..1]).contains("an invalid message"), "{}", refused(&body[..1]));
        body.push(0);
        assert!(refused(&body).contains("1 bytes after a message"), "{}", refused(&body));
        assert_eq!(Name::try_from(b"a/b".to_vec()).unwrap_err(), "not a valid file name");
    }
}
