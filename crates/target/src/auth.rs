//! Who has the key: a secret that both sides have in a file, and never say.
//!
//! Each side says random bytes, and proves that it has the key by a keyed hash (BLAKE3) over both sides' bytes and its own
//! part; the client first, so that nobody is given anything to guess keys with who does not have it. What follows on the
//! connection is protected against accidents by checksums, not against somebody who can change what others send.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::wire::{Challenge, Hello, Nonce};
use crate::{Error, Result};

/// A key has at least so many bytes: fewer could be tried out.
pub const LEAST_KEY: usize = 32;
const MOST_KEY: u64 = 4096;
const CONTEXT: &str = "onehop target 2026-11-22 a mount and its target share this key";

/// The shared secret.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// Makes a key of secret bytes; none of fewer than [`LEAST_KEY`].
    #[must_use]
    pub fn new(secret: &[u8]) -> Option<Self> {
        (secret.len() >= LEAST_KEY).then(|| Self(blake3::derive_key(CONTEXT, secret)))
    }

    /// Reads it from a file that nobody else may read. White space at its end does not count.
    ///
    /// # Errors
    /// When there is no such file, others may read or write it, or it is too short for a key.
    pub fn read(path: &Path) -> Result<Self> {
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|e| Error::key(path, e.to_string()))?;
        let about = file.metadata().map_err(|e| Error::key(path, e.to_string()))?;
        if !about.is_file() {
            return Err(Error::key(path, "it is no file"));
        }
        let me = rustix::process::geteuid().as_raw();
        if about.uid() != me && about.uid() != 0 {
            let why = format!("it belongs to user {}, who could change it; it has to be ours", about.uid());
            return Err(Error::key(path, why));
        }
        if about.mode() & 0o077 != 0 {
            let why = format!("its mode is {:o}, so that others may use it: chmod 600", about.mode() & 0o777);
            return Err(Error::key(path, why));
        }
        if about.len() > MOST_KEY {
            return Err(Error::key(path, format!("it is longer than {MOST_KEY} bytes")));
        }
        let mut secret = Vec::new();
        file.take(MOST_KEY).read_to_end(&mut secret).map_err(|e| Error::key(path, e.to_string()))?;
        Self::new(secret.trim_ascii_end()).ok_or_else(|| {
            let why = format!(
                "it has fewer than {LEAST_KEY} bytes; make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
            );
            Error::key(path, why)
        })
    }

    fn proof(&self, side: u8, hello: &Hello, challenge: &Challenge, rest: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[side, u8::from(hello.has_key), u8::from(challenge.wants_key)]);
        hasher.update(&hello.nonce).update(&challenge.nonce).update(rest);
        *hasher.finalize().as_bytes()
    }

    /// What proves that a client has it; `rest` is what it says besides.
    #[must_use]
    pub fn client(&self, hello: &Hello, challenge: &Challenge, rest: &[u8]) -> [u8; 32] {
        self.proof(b'c', hello, challenge, rest)
    }

    /// What proves that a server has it.
    #[must_use]
    pub fn server(&self, hello: &Hello, challenge: &Challenge, rest: &[u8]) -> [u8; 32] {
        self.proof(b's', hello, challenge, rest)
    }
}

/// Compares without telling by its time where two proofs differ.
#[must_use]
pub fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    blake3::Hash::from_bytes(*a) == blake3::Hash::from_bytes(*b)
}

/// Random bytes.
///
/// # Errors
/// When the system has none.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::io("getrandom for", "a connection", e))?;
    }
    Ok(bytes)
}

/// A new nonce.
///
/// # Errors
/// When the system has no random bytes.
pub fn nonce() -> Result<Nonce> {
    random()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(name: &str, bytes: &[u8], mode: u32) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("onehop-key-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn keys_are_files_that_nobody_else_reads() {
        for (name, bytes, mode, says) in [
            ("open", &[7_u8; 40][..], 0o644, "chmod 600"),
            ("group", &[7; 40], 0o620, "chmod 600"),
            (
                "short",
                b"too short\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n",
                0o600,
                "fewer than",
            ),
            ("long", &[7; 5000], 0o600, "longer than"),
        ] {
            let path = file(name, bytes, mode);
            let said = Key::read(&path).unwrap_err().to_string();
            assert!(said.contains(says) && said.contains(&*path.to_string_lossy()), "{said}");
            std::fs::remove_file(path).unwrap();
        }
        assert!(Key::read(Path::new("/dev/null")).unwrap_err().to_string().contains("no file"));
        let path = file("good", b"0123456789abcdef0123456789abcdef\n", 0o600);
        let (read, made) =
            (Key::read(&path).unwrap(), Key::new(b"0123456789abcdef0123456789abcdef").unwrap());
        assert_eq!(read.0, made.0);
        assert_eq!(format!("{read:?}"), "Key(..)");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn proofs_hold_for_one_side_one_connection_and_what_was_said() {
        let key = Key::new(&[1; 32]).unwrap();
        let (hello, challenge) =
            (Hello { nonce: [1; 32], has_key: true }, Challenge { nonce: [2; 32], wants_key: true });
        let proof = key.client(&hello, &challenge, b"rest");
        let others = [
            key.server(&hello, &challenge, b"rest"),
            key.client(&hello, &challenge, b"other"),
            key.client(&Hello { nonce: [3; 32], ..hello.clone() }, &challenge, b"rest"),
            key.client(&hello, &Challenge { nonce: [3; 32], ..challenge.clone() }, b"rest"),
            key.client(&hello, &Challenge { wants_key: false, ..challenge.clone() }, b"rest"),
            Key::new(&[2; 32]).unwrap().client(&hello, &challenge, b"rest"),
        ];
        assert!(others.iter().all(|other| !same(other, &proof)));
        assert!(same(&proof, &key.client(&hello, &challenge, b"rest")));
    }
}
