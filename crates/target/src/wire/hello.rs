//! How both sides begin: who they are, that they have the key, and which session it is.

use serde::{Deserialize, Serialize};

/// Random bytes, new for each connection.
pub type Nonce = [u8; 32];
/// Names a session; whoever knows it and has the key may go on with it.
pub type SessionId = [u8; 16];

/// A client begins.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The client's share of what is proven.
    pub nonce: Nonce,
    /// Whether it has a key, and so wants to see that the server has it.
    pub has_key: bool,
}

/// The server's answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Challenge {
    /// The server's share.
    pub nonce: Nonce,
    /// Whether it lets only those in who have the key.
    pub wants_key: bool,
}

/// The client has the key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Proof {
    /// [`crate::auth::Key::client`] of all that was said; zeroes without a key.
    pub proof: [u8; 32],
    /// The session that it wants to go on with.
    pub session: Option<SessionId>,
}

/// The server has it too, and the connection can be used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// [`crate::auth::Key::server`] of all that was said; zeroes without a key.
    pub proof: [u8; 32],
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
