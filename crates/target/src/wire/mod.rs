//! What goes over a connection: frames of a head, a body and perhaps data.
//!
//! The head has a fixed length and a checksum of its own, so that the lengths in it are believed only when they arrived as they
//! were sent. Bodies are short and hold a message each; data is bytes of files.

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

/// The answer of a target that has no room for this user's request or its data, and has done nothing: it can be asked again.
pub(crate) const FULL: Errno = Errno::NOBUFS;
/// A body has at most so many bytes.
pub const MOST_BODY: usize = 64 << 10;
/// Data has at most so many bytes: a transfer that is longer is cut into pieces.
pub const MOST_DATA: usize = 4 << 20;
/// A name has at most so many bytes, as Linux has it.
pub const MOST_NAME: usize = 255;
/// An extended attribute has at most so many bytes, so that it fits a body whatever else stands there.
pub const MOST_XATTR: usize = MOST_BODY - 8192;
/// What a link says has at most so many bytes.
pub const MOST_LINK: usize = 4095;

/// A message as the bytes of a body.
///
/// # Errors
/// When it is too long for one.
pub fn pack<T: serde::Serialize>(message: &T) -> Result<Vec<u8>> {
    let bytes =
        postcard::to_stdvec(message).map_err(|e| Error::protocol("this side", format!("a message: {e}")))?;
    if bytes.len() > MOST_BODY {
        return Err(Error::protocol("this side", format!("a message of {} bytes", bytes.len())));
    }
    Ok(bytes)
}

/// The message in a body; nothing may be left over.
///
/// # Errors
/// When there is none of this kind in it.
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
