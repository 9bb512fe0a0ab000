//! How a connection begins: both sides show that they have the key, and agree on a session.

use std::time::Duration;

use crate::auth::{Key, nonce, same};
use crate::transport::{Link, Outgoing};
use crate::wire::{Challenge, Head, Hello, Kind, Proof, SessionId, Welcome, pack, unpack};
use crate::{Error, Result};

/// Sends a frame that has no data.
pub(crate) fn send(link: &dyn Link, kind: Kind, body: &[u8], limit: Duration) -> Result<()> {
    link.send(&Outgoing { head: Head::new(kind, 0, body), body, data: None }, limit)
}

/// Waits for a message of one kind, and takes nothing else.
fn receive<T: serde::de::DeserializeOwned>(link: &dyn Link, kind: Kind, limit: Duration) -> Result<T> {
    let peer = link.peer();
    let mut no_data = |_: &Head, _: &[u8]| Err(Error::protocol(peer, "data before it was let in"));
    let Some(frame) = link.receive(limit, limit, &mut no_data)? else {
        return Err(Error::TimedOut { peer: peer.to_owned(), what: "introduce itself", limit });
    };
    match frame.head.kind {
        found if found == kind => unpack(&frame.body, peer),
        Kind::Goodbye => Err(refusal(peer, &frame.body)),
        other => Err(Error::protocol(peer, format!("{other:?} where {kind:?} belongs"))),
    }
}

/// What a goodbye says.
pub(crate) fn refusal(peer: &str, body: &[u8]) -> Error {
    // It comes from a stranger, and people read it.
    let why = String::from_utf8_lossy(body).chars().filter(|c| !c.is_control()).take(500).collect();
    Error::Refused { peer: peer.to_owned(), why }
}

/// The client's part.
pub(crate) fn greet(
    link: &dyn Link,
    key: Option<&Key>,
    session: Option<SessionId>,
    limit: Duration,
) -> Result<Welcome> {
    let peer = link.peer().to_owned();
    let hello = Hello { nonce: nonce()?, has_key: key.is_some() };
    send(link, Kind::Hello, &pack(&hello)?, limit)?;
    let challenge: Challenge = receive(link, Kind::Challenge, limit)?;
    let refused = |why: &str| Error::Refused { peer: peer.clone(), why: why.to_owned() };
    match (key.is_some(), challenge.wants_key) {
        (true, false) => return Err(refused("it has no key, so nobody knows who it is; give it ours")),
        (false, true) => return Err(refused("it lets those in who have its key; none was given here")),
        _ => {}
    }
    let wish = pack(&session)?;
    let proof = key.map_or([0; 32], |key| key.client(&hello, &challenge, &wish));
    send(link, Kind::Proof, &pack(&Proof { proof, session })?, limit)?;
    let welcome: Welcome = receive(link, Kind::Welcome, limit)?;
    let proof =
        key.map_or(Ok([0; 32]), |key| said(&welcome).map(|said| key.server(&hello, &challenge, &said)));
    if !same(&proof?, &welcome.proof) {
        return Err(Error::WrongKey { peer });
    }
    Ok(welcome)
}

/// What of a welcome is proven: all the rest of it.
fn said(welcome: &Welcome) -> Result<Vec<u8>> {
    pack(&Welcome { proof: [0; 32], ..welcome.clone() })
}

/// The server's part; `open` finds the session, or makes one.
pub(crate) fn admit<T>(
    link: &dyn Link,
    key: Option<&Key>,
    limit: Duration,
    open: impl FnOnce(Option<SessionId>) -> Result<(Welcome, T)>,
) -> Result<T> {
    let peer = link.peer().to_owned();
    let hello: Hello = receive(link, Kind::Hello, limit)?;
    let challenge = Challenge { nonce: nonce()?, wants_key: key.is_some() };
    send(link, Kind::Challenge, &pack(&challenge)?, limit)?;
    let theirs: Proof = receive(link, Kind::Proof, limit)?;
    let wish = pack(&theirs.session)?;
    let proof = key.map_or([0; 32], |key| key.client(&hello, &challenge, &wish));
    if !same(&proof, &theirs.proof) {
        // They learn it, or go without; either way they are not let in.
        let _ = send(link, Kind::Goodbye, b"this is not the target's key", limit);
        return Err(Error::WrongKey { peer });
    }
    let (mut welcome, opened) = open(theirs.session).inspect_err(|error| {
        let _ = send(link, Kind::Goodbye, error.to_string().as_bytes(), limit);
    })?;
    if let Some(key) = key {
        welcome.proof = key.server(&hello, &challenge, &said(&welcome)?);
    }
    send(link, Kind::Welcome, &pack(&welcome)?, limit)?;
    Ok(opened)
}
