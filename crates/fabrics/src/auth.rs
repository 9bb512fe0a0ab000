//! DH-HMAC-CHAP: a host and a controller prove to each other that they know a secret, without revealing it.
//!
//! It runs on each queue, between Connect and the first command. The controller chooses the hash, and whether there is
//! a Diffie-Hellman exchange. Without that, recorded messages allow offline attacks on the secret.

use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use onehop_os::HostMem;
use onehop_os::secret::{fill_random, read_secret};
use onehop_proto::fabrics;
use sha2::{Digest, Sha256, Sha384, Sha512};

use crate::association::{answered, command_limit};
use crate::group::{DhGroup, EXPONENT_BYTES};
use crate::link::QueueLink;
use crate::pdu::{u16_at, u32_at};
use crate::queue::Data;
use crate::{Error, Host, Result};

/// Maximum size of a secret's file.
const MAX_FILE: u64 = 4096;
/// Room for a controller's longest message.
const RECEIVE_BYTES: u32 = 4096;
/// The content of a secret's file.
const FORM: &str = "its content should be DHHC-1:…:, as `nvme gen-dhchap-key` prints it";
/// The group without Diffie-Hellman.
const NULL_GROUP: u8 = 0;

/// Message types.
mod message {
    pub(super) const NEGOTIATE: [u8; 2] = [0, 0];
    pub(super) const CHALLENGE: [u8; 2] = [1, 1];
    pub(super) const REPLY: [u8; 2] = [1, 2];
    pub(super) const SUCCESS_1: [u8; 2] = [1, 3];
    pub(super) const SUCCESS_2: [u8; 2] = [1, 4];
    pub(super) const FAILURE_2: [u8; 2] = [0, 0xf0];
    pub(super) const FAILURE_1: [u8; 2] = [0, 0xf1];
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ChapHash {
    Sha256 = 1,
    Sha384,
    Sha512,
}

impl ChapHash {
    const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    fn of(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| *hash as u8 == id)
    }

    fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    fn digest(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::Sha256 => Sha256::digest(bytes).to_vec(),
            Self::Sha384 => Sha384::digest(bytes).to_vec(),
            Self::Sha512 => Sha512::digest(bytes).to_vec(),
        }
    }

    fn mac(self, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
        match self {
            Self::Sha256 => fed::<Hmac<Sha256>>(key, parts).finalize().into_bytes().to_vec(),
            Self::Sha384 => fed::<Hmac<Sha384>>(key, parts).finalize().into_bytes().to_vec(),
            Self::Sha512 => fed::<Hmac<Sha512>>(key, parts).finalize().into_bytes().to_vec(),
        }
    }

    /// Compares `mac` with [`Self::mac`] in constant time.
    fn is_mac(self, mac: &[u8], key: &[u8], parts: &[&[u8]]) -> bool {
        match self {
            Self::Sha256 => fed::<Hmac<Sha256>>(key, parts).verify_slice(mac).is_ok(),
            Self::Sha384 => fed::<Hmac<Sha384>>(key, parts).verify_slice(mac).is_ok(),
            Self::Sha512 => fed::<Hmac<Sha512>>(key, parts).verify_slice(mac).is_ok(),
        }
    }
}

fn fed<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> M {
    let mut mac = <M as KeyInit>::new_from_slice(key).expect("a key of HMAC has any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// A secret of a host or a controller.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapSecret {
    key: Vec<u8>,
    /// The hash that binds it to its owner's NQN.
    bound_by: Option<ChapHash>,
}

impl std::fmt::Debug for ChapSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ChapSecret")
    }
}

impl ChapSecret {
    /// Reads it from a file that no other user can read.
    ///
    /// # Errors
    /// When there is no such file, others may use it, or it contains no secret.
    pub fn read(path: &Path) -> Result<Self> {
        let refused = |why: String| Error::Secret { path: path.display().to_string(), why };
        let bytes = read_secret(path, MAX_FILE).map_err(refused)?;
        let secret = std::str::from_utf8(&bytes).ok().and_then(|text| Self::parse(text.trim_ascii()));
        secret.ok_or_else(|| refused(FORM.into()))
    }

    /// `DHHC-1:HH:BASE64:`, where HH is the hash that binds it (00 for none), and the last four bytes are a checksum.
    fn parse(text: &str) -> Option<Self> {
        let (hash, rest) = text.strip_prefix("DHHC-1:")?.split_once(':')?;
        let bytes = BASE64_STANDARD.decode(rest.strip_suffix(':')?).ok()?;
        let (key, sum) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
        let bound_by = match hash {
            "00" => None,
            "01" => Some(ChapHash::Sha256),
            "02" => Some(ChapHash::Sha384),
            "03" => Some(ChapHash::Sha512),
            _ => return None,
        };
        let is_whole = ChapHash::ALL.iter().any(|hash| hash.bytes() == key.len())
            && crc32fast::hash(key).to_le_bytes() == sum;
        is_whole.then(|| Self { key: key.to_owned(), bound_by })
    }

    /// The key for the owner of this name.
    fn key_of(&self, nqn: &str) -> Vec<u8> {
        match self.bound_by {
            None => self.key.clone(),
            Some(hash) => hash.mac(&self.key, &[nqn.as_bytes(), b"NVMe-over-Fabrics"]),
        }
    }
}

/// The two ends of a connection, and their secrets.
#[derive(Clone, Copy)]
pub(crate) struct ChapParties<'a> {
    pub queue: &'a str,
    pub host: &'a Host,
    pub subsystem: &'a str,
}

impl ChapParties<'_> {
    /// The host's proof.
    fn of_host(&self, secret: &ChapSecret, challenge: &ChapChallenge) -> Vec<u8> {
        let Self { host, subsystem, .. } = self;
        let ends = (host.nqn.as_str(), *subsystem);
        let key = secret.key_of(&host.nqn);
        with_message(challenge, "HostHost", ends, |parts| challenge.hash.mac(&key, parts))
    }

    /// Whether this proves the controller's identity.
    fn is_controller(&self, secret: &ChapSecret, challenge: &ChapChallenge, proof: &[u8]) -> bool {
        let Self { host, subsystem, .. } = self;
        let ends = (*subsystem, host.nqn.as_str());
        let key = secret.key_of(subsystem);
        with_message(challenge, "Controller", ends, |parts| challenge.hash.is_mac(proof, &key, parts))
    }

    fn failed(&self, why: impl Into<String>) -> Error {
        Error::AuthenticationFailed { queue: self.queue.to_owned(), why: why.into() }
    }
}

/// Passes `f` the data to be hashed for a challenge by `who`.
fn with_message<T>(
    challenge: &ChapChallenge,
    who: &str,
    (own, other): (&str, &str),
    then: impl FnOnce(&[&[u8]]) -> T,
) -> T {
    let ChapChallenge { value, sequence, transaction, .. } = challenge;
    then(&[
        value,
        &sequence.to_le_bytes(),
        &transaction.to_le_bytes(),
        &[0],
        who.as_bytes(),
        own.as_bytes(),
        &[0],
        other.as_bytes(),
    ])
}

/// A challenge to the other side.
struct ChapChallenge {
    hash: ChapHash,
    transaction: u16,
    sequence: u32,
    value: Vec<u8>,
}

impl ChapChallenge {
    fn new(hash: ChapHash, transaction: u16) -> Result<Self> {
        let mut value = vec![0; hash.bytes()];
        fill(&mut value)?;
        let mut sequence = [0; 4];
        fill(&mut sequence)?;
        // Zero stands for none.
        Ok(Self { hash, transaction, sequence: u32::from_le_bytes(sequence) | 1, value })
    }

    /// Decodes a controller's message, with its public value; the error says what is wrong.
    fn decode(
        message: &[u8],
        transaction: u16,
    ) -> std::result::Result<(Self, Option<PublicValue<'_>>), String> {
        expect(message, message::CHALLENGE, transaction)?;
        let hash = ChapHash::of(message[8]).ok_or_else(|| format!("hash {} is not known", message[8]))?;
        let length = usize::from(message[6]);
        let value = message.get(16..16 + length).filter(|_| length == hash.bytes());
        let value = value.ok_or_else(|| format!("a challenge of {length} bytes"))?.to_owned();
        let bytes = usize::from(u16_at(message, 10));
        let public = match (message[9], DhGroup::of(message[9])) {
            (NULL_GROUP, _) if bytes == 0 => None,
            (_, Some(group)) if bytes == group.bytes() => {
                let value =
                    message.get(16 + length..16 + length + bytes).ok_or("a message that is cut off")?;
                Some(PublicValue { group, value })
            }
            (id, _) => return Err(format!("DH group {id} with {bytes} bytes")),
        };
        Ok((Self { hash, transaction, sequence: u32_at(message, 12), value }, public))
    }

    /// The effective challenge after a Diffie-Hellman exchange.
    fn bound_to(self, shared: Option<&[u8]>) -> Self {
        let Some(shared) = shared else { return self };
        let value = self.hash.mac(&self.hash.digest(shared), &[&self.value]);
        Self { value, ..self }
    }
}

/// A controller's public value in a Diffie-Hellman exchange.
struct PublicValue<'a> {
    group: DhGroup,
    value: &'a [u8],
}

impl PublicValue<'_> {
    /// This side's public value, and the shared secret; fails if the controller's value makes that predictable.
    fn answer(&self) -> Result<Option<[Vec<u8>; 2]>> {
        let mut exponent = [0; EXPONENT_BYTES];
        fill(&mut exponent)?;
        let shared = self.group.shared(&exponent, self.value);
        Ok(shared.map(|shared| [self.group.public(&exponent), shared]))
    }
}

fn fill(bytes: &mut [u8]) -> Result<()> {
    fill_random(bytes).map_err(|error| Error::Memory(format!("random numbers: {error}")))
}

/// Refuses another message than the expected one, or one of another exchange.
fn expect(message: &[u8], kind: [u8; 2], transaction: u16) -> std::result::Result<(), String> {
    if message.len() < 16 {
        return Err(format!("a message of {} bytes", message.len()));
    }
    if message[..2] == message::FAILURE_1 {
        return Err(reason(message[7]).into());
    }
    if message[..2] != kind {
        return Err(format!("message {:02x}{:02x} came out of order", message[0], message[1]));
    }
    if u16_at(message, 4) != transaction {
        return Err(format!("a message of exchange {}, not {transaction}", u16_at(message, 4)));
    }
    Ok(())
}

/// A controller's reason for refusing.
fn reason(code: u8) -> &'static str {
    match code {
        1 => "the target does not accept the secret (dhchap), or has none of its own (dhchap-ctrl)",
        2 => "the target does not have this protocol",
        3 => "the target asks for a secure channel",
        4 => "the target has none of the hash functions",
        5 => "the target has none of the DH groups",
        6 => "the target finds a message wrong",
        7 => "the target finds a message out of order",
        _ => "the target gives no known reason",
    }
}

fn head(kind: [u8; 2], transaction: u16) -> Vec<u8> {
    let [low, high] = transaction.to_le_bytes();
    vec![kind[0], kind[1], 0, 0, low, high]
}

/// Offers all hashes and all groups, those with Diffie-Hellman first.
fn negotiate(transaction: u16) -> Vec<u8> {
    const CHAP: u8 = 1;
    let mut out = head(message::NEGOTIATE, transaction);
    out.extend([0, 1, CHAP, 0, ChapHash::ALL.len() as u8, DhGroup::ALL.len() as u8 + 1]);
    let (hashes, groups) = (ChapHash::ALL.map(|hash| hash as u8), DhGroup::ALL.map(|group| group.id));
    let mut ids = [NULL_GROUP; 60];
    ids[..hashes.len()].copy_from_slice(&hashes);
    ids[30..30 + groups.len()].copy_from_slice(&groups);
    out.extend(ids);
    out
}

fn reply(proof: &[u8], transaction: u16, own: Option<&ChapChallenge>, public: &[u8]) -> Vec<u8> {
    let mut out = head(message::REPLY, transaction);
    out.extend([proof.len() as u8, 0, u8::from(own.is_some()), 0]);
    out.extend((public.len() as u16).to_le_bytes());
    out.extend(own.map_or(0, |own| own.sequence).to_le_bytes());
    out.extend(proof);
    out.resize(16 + 2 * proof.len(), 0);
    if let Some(own) = own {
        out[16 + proof.len()..].copy_from_slice(&own.value);
    }
    out.extend(public);
    out
}

/// The last message: whether the controller's proof was accepted.
fn verdict(is_believed: bool, transaction: u16) -> Vec<u8> {
    let mut out = head(if is_believed { message::SUCCESS_2 } else { message::FAILURE_2 }, transaction);
    if !is_believed {
        // Authentication failed, without details.
        out.extend([1, 1]);
    }
    out.resize(16, 0);
    out
}

/// Authenticates the host to a queue's controller by `due`, and the controller to the host if its secret is known.
pub(crate) fn authenticate(link: &QueueLink, parties: &ChapParties<'_>, due: Instant) -> Result<()> {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let secrets = &parties.host.secrets;
    let Some(secret) = &secrets.host else {
        return Err(Error::Authentication { host: parties.host.nqn.clone() });
    };
    let transaction = NEXT.fetch_add(1, Ordering::Relaxed);
    send(link, &negotiate(transaction), due)?;
    let message = receive(link, due)?;
    let is_failure = message[..2] == message::FAILURE_1;
    let refused = |why: String| {
        if !is_failure {
            // Notifies the target, if it still listens.
            let _ = send(link, &verdict(false, transaction), due);
        }
        parties.failed(why)
    };
    let decoded = ChapChallenge::decode(&message, transaction);
    let (challenge, theirs) = decoded.map_err(refused)?;
    let [public, shared] = match theirs {
        None => [None, None],
        Some(theirs) => {
            let known_to_all = || refused("the target's part of the DH exchange is known to all".into());
            theirs.answer()?.ok_or_else(known_to_all)?.map(Some)
        }
    };
    let known = secrets.target.as_ref();
    let own = known.map(|_| ChapChallenge::new(challenge.hash, transaction)).transpose()?;
    let proof = parties.of_host(secret, &challenge.bound_to(shared.as_deref()));
    let public = public.unwrap_or_default();
    send(link, &reply(&proof, transaction, own.as_ref(), &public), due)?;
    let answer = receive(link, due)?;
    expect(&answer, message::SUCCESS_1, transaction).map_err(|why| parties.failed(why))?;
    let (Some(known), Some(own)) = (known, own) else { return Ok(()) };
    let proof = answer.get(16..16 + own.hash.bytes()).filter(|_| answer[8] & 1 == 1);
    let own = own.bound_to(shared.as_deref());
    let is_believed = proof.is_some_and(|proof| parties.is_controller(known, &own, proof));
    let sent = send(link, &verdict(is_believed, transaction), due);
    if is_believed {
        sent
    } else {
        Err(parties.failed("the target does not know its own secret (dhchap-ctrl)"))
    }
}

fn send(link: &QueueLink, message: &[u8], due: Instant) -> Result<()> {
    let memory = HostMem::anonymous(message.len())?;
    memory.write(0, message)?;
    let (sqe, data) = (fabrics::auth_send(message.len() as u32), Data::InCapsule(message.len() as u32));
    let what = "Authentication Send";
    answered(what, link.exchange(what, &sqe, data, Some(&memory), command_limit(due))?).map(|_| ())
}

fn receive(link: &QueueLink, due: Instant) -> Result<Vec<u8>> {
    let memory = HostMem::anonymous(RECEIVE_BYTES as usize)?;
    let (sqe, data) = (fabrics::auth_receive(RECEIVE_BYTES), Data::In(RECEIVE_BYTES));
    let what = "Authentication Receive";
    answered(what, link.exchange(what, &sqe, data, Some(&memory), command_limit(due))?)?;
    let mut message = vec![0; RECEIVE_BYTES as usize];
    memory.read(0, &mut message)?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;

    const PLAIN: &str = "DHHC-1:00:HyKIofh8AbmtBGU0XjaATtRK+MfwUBYJV+Oy2GdVHAwbo+Ie:";
    const BOUND: &str = "DHHC-1:01:gXq6iuF3YNTyw+5ijxRIBGFLSOz9PsV3gO7/UQgumVCUAsqM:";

    #[test]
    fn secrets_are_read_as_they_are_written() {
        let [plain, bound] = [PLAIN, BOUND].map(|text| ChapSecret::parse(text).unwrap());
        assert_eq!((plain.key.len(), plain.bound_by), (32, None));
        assert_eq!(bound.bound_by, Some(ChapHash::Sha256));
        assert_eq!(plain.key_of("nqn.a"), plain.key);
        assert!(bound.key_of("nqn.a") != bound.key_of("nqn.b") && bound.key_of("nqn.a") != bound.key);
        assert_eq!(format!("{plain:?}"), "ChapSecret");
        for bad in [
            "",
            "DHHC-1:00:",
            "DHHC-1:00::",
            "DHHC-1:00:AAAAAA==:",
            "DHHC-1:04:gXq6iuF3YNTyw+5ijxRIBGFLSOz9PsV3gO7/UQgumVCUAsqM:",
            "DHHC-1:1:gXq6iuF3YNTyw+5ijxRIBGFLSOz9PsV3gO7/UQgumVCUAsqM:",
            "DHHC-1:01:gXq6iuF3YNTyw+5ijxRIBGFLSOz9PsV3gO7/UQgumVCUAsqM",
            "DHHC-1:01:hXq6iuF3YNTyw+5ijxRIBGFLSOz9PsV3gO7/UQgumVCUAsqM:",
            "DHHC-2:01:gXq6iuF3YNTyw+5ijxRIBGFLSOz9PsV3gO7/UQgumVCUAsqM:",
        ] {
            assert!(ChapSecret::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn files_of_secrets_belong_to_one_user() {
        let path = std::env::temp_dir().join(format!("onehop-chap-{}", std::process::id()));
        let read = |mode: u32, text: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            ChapSecret::read(&path).map_err(|error| error.to_string())
        };
        assert!(read(0o600, &format!("{PLAIN}\n")).is_ok());
        assert!(read(0o640, PLAIN).unwrap_err().contains("chmod 600"));
        assert!(read(0o600, "hunter2").unwrap_err().contains("nvme gen-dhchap-key"));
        assert!(read(0o600, &"A".repeat(9000)).is_err());
        std::fs::remove_file(&path).unwrap();
        assert!(ChapSecret::read(&path).is_err() && ChapSecret::read(Path::new("/dev/null")).is_err());
    }

    /// A challenge from a controller.
    fn challenge(hash: u8, group: u8, public: &[u8]) -> Vec<u8> {
        let bytes = ChapHash::of(hash).map_or(32, ChapHash::bytes);
        let mut out = head(message::CHALLENGE, 7);
        out.extend([bytes as u8, 0, hash, group]);
        out.extend((public.len() as u16).to_le_bytes());
        out.extend(99_u32.to_le_bytes());
        out.extend(vec![5; bytes]);
        out.extend(public);
        out
    }

    #[test]
    fn messages_are_what_the_standard_says() {
        let offer = negotiate(7);
        assert_eq!((offer.len(), &offer[..12]), (72, &[0, 0, 0, 0, 7, 0, 0, 1, 1, 0, 3, 6][..]));
        assert_eq!((&offer[12..16], &offer[42..48]), (&[1, 2, 3, 0][..], &[1, 2, 3, 4, 5, 0][..]));
        let plain = challenge(2, 0, &[]);
        let (first, public) = ChapChallenge::decode(&plain, 7).unwrap();
        assert_eq!((first.hash, first.sequence, first.value.len()), (ChapHash::Sha384, 99, 48));
        assert!(public.is_none());
        let with_group = challenge(1, 1, &[9; 256]);
        let (_, public) = ChapChallenge::decode(&with_group, 7).unwrap();
        assert_eq!(public.unwrap().value, [9; 256]);
        for (message, transaction) in [
            (challenge(1, 0, &[]), 8),
            (challenge(4, 0, &[]), 7),
            (challenge(1, 0, &[1]), 7),
            (challenge(1, 6, &[1; 256]), 7),
            (challenge(1, 2, &[1; 256]), 7),
            (challenge(1, 1, &[9; 256])[..200].to_vec(), 7),
            (vec![1, 1], 7),
            (verdict(true, 7), 7),
        ] {
            assert!(ChapChallenge::decode(&message, transaction).is_err());
        }
        let failure = [&[0, 0xf1, 0, 0, 7, 0, 1, 1][..], &[0; 8]].concat();
        let refused = ChapChallenge::decode(&failure, 7);
        assert!(refused.err().unwrap().contains("does not accept the secret"));
        let own = ChapChallenge::new(ChapHash::Sha256, 7).unwrap();
        let answer = reply(&[1; 32], 7, Some(&own), &[2; 256]);
        assert_eq!(
            (answer.len(), answer[6], answer[8], answer[10..12].to_vec()),
            (16 + 64 + 256, 32, 1, vec![0, 1])
        );
        assert_eq!((&answer[48..80], answer[80]), (&own.value[..], 2));
        let alone = reply(&[1; 32], 7, None, &[]);
        assert_eq!((alone.len(), &alone[8..16], &alone[48..]), (80, &[0; 8][..], &[0; 32][..]));
    }

    /// Computed with Python's hmac and hashlib.
    #[test]
    fn proofs_are_what_another_program_computes() {
        const OF_HOST: &str = "44810f277a5beb4a1163c7c7137c41b0d9351531ab5ed6db1a37a3d33cd4b368";
        const OF_TARGET: &str = "34227c2d6bb73efeab3330509e871e81274d7c840579eb6877ff34fa269bf72a\
                                 53db570864ef3172f2299581f7bc8992";
        const WITH_GROUP: &str = "704df32ea4060fd5bc40b73f8d67970c55133f61617bd566617ff44d808cf723";
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let host = Host { nqn: "nqn.host".into(), id: [1; 16], secrets: crate::Secrets::default() };
        let parties = ChapParties { queue: "a queue", host: &host, subsystem: "nqn.sub" };
        let [plain, bound] = [PLAIN, BOUND].map(|text| ChapSecret::parse(text).unwrap());
        let asked = |hash: u8| ChapChallenge::decode(&challenge(hash, 0, &[]), 7).unwrap().0;
        assert_eq!(hex(&parties.of_host(&plain, &asked(1))), OF_HOST);
        assert_eq!(hex(&parties.of_host(&bound, &asked(1).bound_to(Some(&[7; 256])))), WITH_GROUP);
        let proof: Vec<_> =
            (0..48).map(|i| u8::from_str_radix(&OF_TARGET[2 * i..2 * i + 2], 16).unwrap()).collect();
        assert!(parties.is_controller(&bound, &asked(2), &proof));
        for wrong in [&proof[..47], &[&proof[..47], &[proof[47] ^ 1]].concat(), &[]] {
            assert!(!parties.is_controller(&bound, &asked(2), wrong));
        }
        assert!(!parties.is_controller(&plain, &asked(2), &proof));
    }

    proptest! {
        #[test]
        fn any_message_is_decoded_or_refused(kind in 0_usize..4, rest in proptest::collection::vec(any::<u8>(), 0..600)) {
            let kinds = [message::CHALLENGE, message::SUCCESS_1, message::FAILURE_1, [7, 7]];
            let message = [&kinds[kind][..], &[0, 0, 7, 0], &rest].concat();
            let _ = ChapChallenge::decode(&message, 7);
            let _ = expect(&message, message::SUCCESS_1, 7);
        }
    }
}
