//! How both sides begin: that they have the key, and which session it is.

use serde::{Deserialize, Serialize};

/// Names a session; a client that knows it and has the key may go on with it.
pub type SessionId = [u8; 16];

/// Names a mount for as long as it is one, whatever becomes of its sessions.
pub type MountId = [u8; 16];

/// A client begins.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Its message of the key exchange ([`crate::auth::Key::begin`]); none where it has no key.
    pub exchange: Option<Vec<u8>>,
}

/// The server's answer. Where there was an exchange, all frames after this one are encrypted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HelloBack {
    /// Its message of the key exchange ([`crate::auth::Key::respond`]); none where it has no key.
    pub exchange: Option<Vec<u8>>,
}

/// The client wants to be let in. That this frame opens shows that it has the key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Join {
    /// The session that it wants to go on with.
    pub session: Option<SessionId>,
    /// Which mount it is.
    pub mount: MountId,
}

/// It is let in, and the connection can be used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// The session. Another one than was wanted: the server knows nothing of that any more.
    pub session: SessionId,
    /// Names the server machine's run. When it changes, what was written and not synced may be lost.
    pub boot: [u8; 16],
    /// Requests of this connection that may be under way at once: its credits.
    pub credits: u32,
    /// How long the server keeps a session that has no connection, in milliseconds.
    pub lease_ms: u64,
    /// Whether everything that would change something is refused.
    pub read_only: bool,
}
