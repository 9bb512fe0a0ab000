//! Authentication by a key: a secret that both sides read from a file, and never send.
//!
//! The exchange is Noise's NNpsk0 ([`snow`]): each side makes a key pair for this connection, and the shared secret
//! enters everything that is derived from the pairs. The client proves first that it has the secret, so a stranger gets
//! nothing from a target to test guesses against. The result is two keys for the frames of this connection, one for
//! each direction. Who learns the secret later cannot derive them.

use std::path::Path;

use onehop_os::secret::{fill_random, read_secret};
use snow::{Builder, HandshakeState};

use crate::wire::VERSION;
use crate::{Error, Result};

/// The least bytes of a secret: shorter ones could be guessed.
pub const MIN_KEY_BYTES: usize = 32;
const MAX_KEY_BYTES: u64 = 4096;
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
    /// Makes a key from secret bytes; `None` if there are fewer than [`MIN_KEY_BYTES`].
    #[must_use]
    pub fn new(secret: &[u8]) -> Option<Self> {
        (secret.len() >= MIN_KEY_BYTES).then(|| Self(blake3::derive_key(CONTEXT, secret)))
    }

    /// Reads a key from a file that no other user can read. Trailing white space is ignored.
    ///
    /// # Errors
    /// When there is no such file, others may read or write it, or it is too short.
    pub fn read(path: &Path) -> Result<Self> {
        let secret = read_secret(path, MAX_KEY_BYTES).map_err(|why| Error::key(path, why))?;
        Self::new(secret.trim_ascii_end()).ok_or_else(|| {
            let why = format!(
                "it has fewer than {MIN_KEY_BYTES} bytes; create one: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
            );
            Error::key(path, why)
        })
    }

    /// Starts the exchange as the client. Returns its state and the first message. `binding` identifies the connection,
    /// and must be the same on both sides.
    ///
    /// # Errors
    /// When the system has no random bytes.
    pub fn begin(&self, binding: &[u8]) -> Result<(Exchange, Vec<u8>)> {
        let mut state = self.state(binding, true)?;
        let message = write(&mut state)?;
        Ok((Exchange(state), message))
    }

    /// Answers a client's message as the server. Returns the answer and the keys; `None` if the client has another
    /// secret or another binding.
    ///
    /// # Errors
    /// When the system has no random bytes.
    pub fn respond(&self, binding: &[u8], message: &[u8]) -> Result<Option<(Vec<u8>, Keys)>> {
        let mut state = self.state(binding, false)?;
        if !read(&mut state, message) {
            return Ok(None);
        }
        let answer = write(&mut state)?;
        let [receive, send] = keys(&mut state);
        Ok(Some((answer, Keys { send, receive })))
    }

    fn state(&self, binding: &[u8], begins: bool) -> Result<HandshakeState> {
        let prologue = [PROLOGUE, &VERSION.to_le_bytes(), binding].concat();
        let made = || {
            let builder = Builder::new(PATTERN.parse()?).psk(0, &self.0)?.prologue(&prologue)?;
            if begins { builder.build_initiator() } else { builder.build_responder() }
        };
        made().map_err(failed)
    }
}

fn failed(error: snow::Error) -> Error {
    Error::io("the key exchange of", "a connection", std::io::Error::other(error))
}

/// Both sides must use the same.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const PROLOGUE: &[u8] = b"onehop target";
const FRAMES: &str = "onehop target 2026-11-24 frames of one direction of a connection";
/// The longest message of the exchange: a public key and a tag.
const MAX_MESSAGE: usize = 64;

/// The client's state of an exchange.
pub struct Exchange(HandshakeState);

impl Exchange {
    /// The keys, from the server's answer; `None` if the server has another secret.
    #[must_use]
    pub fn finish(self, answer: &[u8]) -> Option<Keys> {
        let Self(mut state) = self;
        if !read(&mut state, answer) {
            return None;
        }
        let [send, receive] = keys(&mut state);
        Some(Keys { send, receive })
    }
}

/// The keys of a connection's frames.
pub struct Keys {
    /// For frames that this side sends.
    pub send: [u8; 32],
    /// For frames that it receives.
    pub receive: [u8; 32],
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(..)")
    }
}

fn write(state: &mut HandshakeState) -> Result<Vec<u8>> {
    let mut message = vec![0; MAX_MESSAGE];
    let len = state.write_message(&[], &mut message).map_err(failed)?;
    message.truncate(len);
    Ok(message)
}

/// Reads a message. Returns whether its sender has the same secret.
fn read(state: &mut HandshakeState, message: &[u8]) -> bool {
    let mut nothing = [0; MAX_MESSAGE];
    message.len() <= MAX_MESSAGE && matches!(state.read_message(message, &mut nothing), Ok(0))
}

/// The client's key and the server's, bound to the whole exchange.
fn keys(state: &mut HandshakeState) -> [[u8; 32]; 2] {
    let (client, server) = state.dangerously_get_raw_split();
    [client, server].map(|key| {
        let all = [&key[..], state.get_handshake_hash()].concat();
        blake3::derive_key(FRAMES, &all)
    })
}

/// Random bytes.
///
/// # Errors
/// When the system has none.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    fill_random(&mut bytes).map_err(|e| Error::io("getrandom for", "a connection", e))?;
    Ok(bytes)
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
    fn keys_are_files_that_only_their_owner_reads() {
        for (name, bytes, mode, expected) in [
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
            let error = Key::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(&*path.to_string_lossy()), "{error}");
            std::fs::remove_file(path).unwrap();
        }
        assert!(Key::read(Path::new("/dev/null")).unwrap_err().to_string().contains("not a file"));
        let path = file("good", b"0123456789abcdef0123456789abcdef\n", 0o600);
        let (read, made) =
            (Key::read(&path).unwrap(), Key::new(b"0123456789abcdef0123456789abcdef").unwrap());
        assert_eq!(read.0, made.0);
        assert_eq!(format!("{read:?}"), "Key(..)");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn both_sides_derive_the_same_keys() {
        let key = Key::new(&[1; 32]).unwrap();
        let (exchange, message) = key.begin(b"facts").unwrap();
        let (answer, server) = key.respond(b"facts", &message).unwrap().unwrap();
        let (_, of_another) = key.respond(b"facts", &message).unwrap().unwrap();
        let client = exchange.finish(&answer).unwrap();
        assert_eq!((client.send, client.receive), (server.receive, server.send));
        assert_ne!(client.send, client.receive);
        // A replayed client message leads to other keys.
        assert_ne!(server.send, of_another.send);
        assert_eq!(format!("{client:?}"), "Keys(..)");
    }

    #[test]
    fn other_secrets_bindings_and_changed_messages_are_refused() {
        let (key, other) = (Key::new(&[1; 32]).unwrap(), Key::new(&[2; 32]).unwrap());
        let (_, message) = key.begin(b"facts").unwrap();
        assert!(other.respond(b"facts", &message).unwrap().is_none());
        assert!(key.respond(b"other facts", &message).unwrap().is_none());
        for len in [0, 1, message.len() - 1] {
            assert!(key.respond(b"facts", &message[..len]).unwrap().is_none());
        }
        assert!(key.respond(b"facts", &[&message[..], b"x"].concat()).unwrap().is_none());
        assert!(key.respond(b"facts", &vec![7; 65_536]).unwrap().is_none());
        for byte in 0..message.len() {
            let mut changed = message.clone();
            changed[byte] ^= 0x40;
            assert!(key.respond(b"facts", &changed).unwrap().is_none(), "byte {byte}");
        }
        let (answer, _) = other.respond(b"facts", &other.begin(b"facts").unwrap().1).unwrap().unwrap();
        assert!(key.begin(b"facts").unwrap().0.finish(&answer).is_none(), "an answer to another client");
        let (exchange, message) = key.begin(b"facts").unwrap();
        let (mut answer, _) = key.respond(b"facts", &message).unwrap().unwrap();
        answer[3] ^= 1;
        assert!(exchange.finish(&answer).is_none());
    }
}
