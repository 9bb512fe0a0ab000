//! How a connection begins: both sides prove that they have the key, enable encryption, and agree on a session.

use std::time::Duration;

use crate::auth::Key;
use crate::transport::{Link, Outgoing};
use crate::wire::{FrameKind, Head, Hello, HelloBack, Join, Welcome, pack, unpack};
use crate::{Error, Result};

/// Sends a frame without data.
pub(crate) fn send(link: &dyn Link, kind: FrameKind, body: &[u8], limit: Duration) -> Result<()> {
    link.send(&Outgoing { head: Head::new(kind, 0, body), body, data: None }, limit)
}

/// Waits for a message of one kind. Any other is an error.
fn receive<T: serde::de::DeserializeOwned>(link: &dyn Link, kind: FrameKind, limit: Duration) -> Result<T> {
    let peer = link.peer();
    let mut no_data = |_: &Head, _: &[u8]| Err(Error::protocol(peer, "data before the handshake"));
    let Some(frame) = link.receive(limit, limit, &mut no_data)? else {
        return Err(Error::TimedOut { peer: peer.to_owned(), what: "introduce itself", limit });
    };
    match frame.head.kind {
        found if found == kind => unpack(&frame.body, peer),
        FrameKind::Goodbye => Err(refusal(peer, &frame.body)),
        other => Err(Error::protocol(peer, format!("{other:?} instead of {kind:?}"))),
    }
}

/// The error in a goodbye.
pub(crate) fn refusal(peer: &str, body: &[u8]) -> Error {
    // Untrusted text that is shown to users.
    let why = String::from_utf8_lossy(body).chars().filter(|c| !c.is_control()).take(500).collect();
    Error::Refused { peer: peer.to_owned(), why }
}

/// The client's side.
pub(crate) fn greet(link: &dyn Link, key: Option<&Key>, join: &Join, limit: Duration) -> Result<Welcome> {
    let peer = link.peer().to_owned();
    let begun = key.map(|key| key.begin(&link.binding())).transpose()?;
    let (exchange, message) = begun.unzip();
    send(link, FrameKind::Hello, &pack(&Hello { exchange: message })?, limit)?;
    let back: HelloBack = receive(link, FrameKind::HelloBack, limit)?;
    match (exchange, back.exchange) {
        (Some(exchange), Some(answer)) => {
            let keys = exchange.finish(&answer).ok_or_else(|| Error::WrongKey { peer: peer.clone() })?;
            link.encrypt(&keys);
        }
        (Some(_), None) => {
            let why = "it has no key, so it cannot be authenticated; give it our key".to_owned();
            return Err(Error::Refused { peer, why });
        }
        (None, Some(_)) => return Err(Error::protocol(&peer, "a key exchange that was not started")),
        (None, None) => {}
    }
    send(link, FrameKind::Join, &pack(join)?, limit)?;
    let welcome: Welcome = receive(link, FrameKind::Welcome, limit)?;
    link.trust()?;
    Ok(welcome)
}

/// The server's side. `open` finds the session or creates one.
pub(crate) fn admit<T>(
    link: &dyn Link,
    key: Option<&Key>,
    limit: Duration,
    open: impl FnOnce(&Join) -> Result<(Welcome, T)>,
) -> Result<T> {
    let peer = link.peer().to_owned();
    // Best effort: the client is refused in any case.
    let refuse = |why: &str| drop(send(link, FrameKind::Goodbye, why.as_bytes(), limit));
    let hello: Hello = receive(link, FrameKind::Hello, limit)?;
    let back = |exchange| send(link, FrameKind::HelloBack, &pack(&HelloBack { exchange })?, limit);
    match (key, hello.exchange) {
        (Some(key), Some(message)) => {
            let Some((answer, keys)) = key.respond(&link.binding(), &message)? else {
                refuse("this is not the target's key");
                return Err(Error::WrongKey { peer });
            };
            back(Some(answer))?;
            link.encrypt(&keys);
        }
        (Some(_), None) => {
            refuse("a key is required");
            return Err(Error::WrongKey { peer });
        }
        (None, _) => back(None)?,
    }
    let join: Join = receive(link, FrameKind::Join, limit)?;
    let (welcome, opened) = open(&join).inspect_err(|error| refuse(&error.to_string()))?;
    send(link, FrameKind::Welcome, &pack(&welcome)?, limit)?;
    Ok(opened)
}
