//! The handshake: both sides prove that they have the key, and agree on a session.

use serde::{Deserialize, Serialize};

/// Identifies a session. A client with the key that knows it may resume it.
pub type SessionId = [u8; 16];

/// Identifies a mount over all its sessions.
pub type MountId = [u8; 16];

/// The client's first message.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Its message of the key exchange ([`crate::auth::Key::begin`]); `None` without a key.
    pub exchange: Option<Vec<u8>>,
}

/// The server's answer. After a key exchange, all further frames are encrypted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HelloBack {
    /// Its message of the key exchange ([`crate::auth::Key::respond`]); `None` without a key.
    pub exchange: Option<Vec<u8>>,
}

/// The client joins. That this frame can be decrypted proves that it has the key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Join {
    /// The session that it wants to resume.
    pub session: Option<SessionId>,
    /// The client's mount.
    pub mount: MountId,
}

/// The server accepts the client.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// The session. If it is not the requested one, that one was lost.
    pub session: SessionId,
    /// The boot ID of the server. When it changes, writes that were not synced may be lost.
    pub boot: [u8; 16],
    /// Requests that may be in flight on this connection: its credits.
    pub credits: u32,
    /// How long the server keeps a session without connections, in milliseconds.
    pub lease_ms: u64,
    /// Whether all changes are refused.
    pub read_only: bool,
}
