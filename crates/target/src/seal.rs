//! Encrypted and authenticated records: the form of frames once both sides have proven that they have the key.
//!
//! A frame is one record with its head, followed by records with its body and data: 64 KiB each but the last, with the
//! whole body in the first. AES-256-GCM seals a record; the number of the record in its direction is the nonce. So a
//! record that was changed, repeated, dropped, moved or forged does not open. Lengths are taken from authenticated
//! heads only.

use std::time::{Duration, Instant};

use crate::cipher::{Cipher, TAG};
use crate::transport::{DataPlacer, Incoming, Outgoing, due};
use crate::wire::{HEAD_BYTES, Head, MAX_BODY};
use crate::{Error, Result};

/// Bytes of body and data in one record.
const RECORD: usize = 64 << 10;
// So that a body fits in one record.
const _: () = assert!(RECORD >= MAX_BODY);
const SEALED_HEAD: usize = HEAD_BYTES + TAG;
/// A key is replaced after this many records, well below the limit of AES-GCM for one key.
const RECORDS_PER_KEY: u64 = 1 << 22;
const NEXT_KEY: &str = "onehop target 2026-11-24 the key after this one";

/// One direction of a connection: its key, and the number of records.
struct Direction {
    key: [u8; 32],
    cipher: Cipher,
    count: u64,
}

impl Direction {
    fn new(key: [u8; 32]) -> Self {
        Self { key, cipher: Cipher::new(&key), count: 0 }
    }

    fn next(&mut self) -> [u8; 12] {
        if self.count > 0 && self.count.is_multiple_of(RECORDS_PER_KEY) {
            self.key = blake3::derive_key(NEXT_KEY, &self.key);
            self.cipher = Cipher::new(&self.key);
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.count.to_le_bytes());
        self.count += 1;
        nonce
    }

    /// Seals a record in place. The tag goes into its last bytes.
    fn seal(&mut self, record: &mut [u8]) -> Result<()> {
        let nonce = self.next();
        let (text, tag) = record.split_at_mut(record.len() - TAG);
        let made = self.cipher.seal(nonce, text);
        let made = made.ok_or_else(|| Error::protocol("this side", "a record that cannot be sealed"))?;
        tag.copy_from_slice(&made);
        Ok(())
    }

    /// Opens a record in place. On error its content must not be used.
    fn open(&mut self, record: &mut [u8], peer: &str) -> Result<()> {
        let nonce = self.next();
        let (text, end) = record.split_at_mut(record.len() - TAG);
        let mut tag = [0; TAG];
        tag.copy_from_slice(end);
        let authentic = self.cipher.open(nonce, text, tag);
        if authentic { Ok(()) } else { Err(Error::Forged { peer: peer.to_owned() }) }
    }
}

/// Seals the frames that a side sends.
pub(crate) struct Sealer {
    direction: Direction,
    /// A sealed head and record.
    buffer: Vec<u8>,
}

impl Sealer {
    pub fn new(key: [u8; 32]) -> Self {
        Self { direction: Direction::new(key), buffer: vec![0; SEALED_HEAD + RECORD + TAG] }
    }

    /// Seals a frame, and passes all of it to `give` in order.
    pub fn frame(&mut self, frame: &Outgoing<'_>, mut give: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.buffer[..HEAD_BYTES].copy_from_slice(&frame.head.to_bytes());
        self.direction.seal(&mut self.buffer[..SEALED_HEAD])?;
        let (body, data) = (frame.body, frame.data.map_or(0, |data| data.len));
        let (mut start, mut left, mut done) = (SEALED_HEAD, body, 0);
        while !left.is_empty() || done < data {
            let count = (RECORD - left.len()).min(data - done);
            let (middle, end) = (start + left.len(), start + left.len() + count);
            self.buffer[start..middle].copy_from_slice(left);
            if let Some(from) = frame.data {
                from.mem.read(from.at + done, &mut self.buffer[middle..end])?;
            }
            self.direction.seal(&mut self.buffer[start..end + TAG])?;
            give(&self.buffer[..end + TAG])?;
            (start, left, done) = (0, &[], done + count);
        }
        if start > 0 { give(&self.buffer[..SEALED_HEAD]) } else { Ok(()) }
    }
}

/// Bytes from the other side.
pub(crate) trait ByteSource {
    /// Fills all of `out`.
    fn take(&mut self, out: &mut [u8], until: Instant) -> Result<()>;
}

/// Opens the frames that a side receives.
pub(crate) struct Opener {
    direction: Direction,
    record: Vec<u8>,
}

impl Opener {
    pub fn new(key: [u8; 32]) -> Self {
        Self { direction: Direction::new(key), record: vec![0; RECORD + TAG] }
    }

    /// The next record, which holds `bytes` bytes.
    fn next(
        &mut self,
        bytes: usize,
        source: &mut impl ByteSource,
        until: Instant,
        peer: &str,
    ) -> Result<&[u8]> {
        let record = &mut self.record[..bytes + TAG];
        source.take(record, until)?;
        self.direction.open(record, peer)?;
        Ok(&record[..bytes])
    }

    /// Reads a frame that has begun to arrive. Its data goes where `place` says, after it was authenticated.
    pub fn frame(
        &mut self,
        source: &mut impl ByteSource,
        stall: Duration,
        peer: &str,
        place: DataPlacer<'_>,
    ) -> Result<Incoming> {
        let until = Instant::now() + stall;
        let mut bytes = [0; HEAD_BYTES];
        bytes.copy_from_slice(self.next(HEAD_BYTES, source, until, peer)?);
        let head = Head::from_bytes(&bytes, peer)?;
        let (in_body, in_data) = (head.body as usize, head.data as usize);
        let first = (in_body + in_data).min(RECORD);
        let record = if first > 0 { self.next(first, source, until, peer)? } else { &[] };
        let body = record[..in_body].to_vec();
        if in_data == 0 {
            return Ok(Incoming { head, body });
        }
        let to = place(&head, &body)?;
        if to.as_ref().is_some_and(|to| to.len < in_data) {
            return Err(Error::protocol(
                peer,
                format!("{in_data} bytes of data, which is more than expected"),
            ));
        }
        // The wait for a buffer was ours, so the other side's time starts now.
        let until = due(stall, in_data);
        let (mut record, mut done) = (&record[in_body..], 0);
        loop {
            if let Some(to) = &to {
                to.mem.write(to.at + done, record)?;
            }
            done += record.len();
            if done == in_data {
                return Ok(Incoming { head, body });
            }
            record = self.next(RECORD.min(in_data - done), source, until, peer)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use onehop_os::HostMem;
    use proptest::prelude::*;

    use super::*;
    use crate::transport::MemoryRange;
    use crate::wire::{FrameKind, MAX_DATA};

    const TEST_TIMEOUT: Duration = Duration::from_secs(30);

    impl ByteSource for &[u8] {
        fn take(&mut self, out: &mut [u8], _: Instant) -> Result<()> {
            std::io::Read::read_exact(self, out).map_err(|e| Error::io("reading", "a test", e))
        }
    }

    fn sealed(sealer: &mut Sealer, body: &[u8], data: &[u8]) -> Vec<u8> {
        let mut head = Head::new(FrameKind::Request, 7, body);
        head.data = data.len() as u32;
        let mem = HostMem::anonymous(data.len().max(1)).unwrap();
        mem.write(0, data).unwrap();
        let range = MemoryRange { mem, at: 0, len: data.len() };
        let data = (!data.is_empty()).then_some(&range);
        let mut sent = Vec::new();
        let frame = Outgoing { head, body, data };
        let give = |bytes: &[u8]| {
            sent.extend_from_slice(bytes);
            Ok(())
        };
        sealer.frame(&frame, give).unwrap();
        sent
    }

    fn opened(opener: &mut Opener, mut bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
        let mem = HostMem::anonymous(MAX_DATA).unwrap();
        let to = MemoryRange { mem: mem.clone(), at: 0, len: MAX_DATA };
        let mut place = |_: &Head, _: &[u8]| Ok(Some(to.clone()));
        let frame = opener.frame(&mut bytes, TEST_TIMEOUT, "a test", &mut place)?;
        assert!(bytes.is_empty());
        Ok((frame.body, mem.to_vec(0, frame.head.data as usize)?))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn frames_arrive_as_they_were_sent(
            frames in prop::collection::vec((length(MAX_BODY), length(MAX_DATA)), 1..4),
        ) {
            let (mut sealer, mut opener) = (Sealer::new([1; 32]), Opener::new([1; 32]));
            for (body, data) in frames {
                let (body, data) = (noise(body), noise(data));
                let sent = sealed(&mut sealer, &body, &data);
                prop_assert!(opened(&mut opener, &sent).unwrap() == (body, data));
            }
        }

        #[test]
        fn a_changed_bit_is_detected(body in 0..200_usize, data in length(3 * RECORD), bit: prop::sample::Index) {
            let (mut sealer, mut opener) = (Sealer::new([1; 32]), Opener::new([1; 32]));
            let mut sent = sealed(&mut sealer, &noise(body), &noise(data));
            let bit = bit.index(sent.len() * 8);
            sent[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(is_forged(&mut opener, &sent));
        }
    }

    fn length(most: usize) -> impl Strategy<Value = usize> {
        prop_oneof![Just(0), 1..100_usize, RECORD - 100..RECORD + 1, 0..=most].prop_map(move |n| n.min(most))
    }

    fn noise(bytes: usize) -> Vec<u8> {
        (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    fn is_forged(opener: &mut Opener, bytes: &[u8]) -> bool {
        matches!(opened(opener, bytes), Err(Error::Forged { .. }))
    }

    #[test]
    fn records_open_once_in_order_and_direction() {
        let mut sealer = Sealer::new([1; 32]);
        let first = sealed(&mut sealer, b"one", b"");
        let second = sealed(&mut sealer, b"one", b"");
        assert_ne!(first, second);
        assert!(is_forged(&mut Opener::new([1; 32]), &second), "the first was dropped");
        assert!(is_forged(&mut Opener::new([2; 32]), &first), "of the other direction");
        let mut opener = Opener::new([1; 32]);
        opened(&mut opener, &first).unwrap();
        assert!(is_forged(&mut opener, &first), "a frame was repeated");
    }

    #[test]
    fn data_is_authenticated_before_it_is_written() {
        let data = noise(2 * RECORD);
        let mut sent = sealed(&mut Sealer::new([1; 32]), b"", &data);
        *sent.last_mut().unwrap() ^= 1;
        let mem = HostMem::anonymous(data.len()).unwrap();
        let to = MemoryRange { mem: mem.clone(), at: 0, len: data.len() };
        let mut place = |_: &Head, _: &[u8]| Ok(Some(to.clone()));
        let ended = Opener::new([1; 32]).frame(&mut &sent[..], TEST_TIMEOUT, "a test", &mut place);
        assert!(matches!(ended, Err(Error::Forged { .. })));
        assert_eq!(mem.to_vec(0, RECORD).unwrap(), data[..RECORD]);
        assert!(mem.to_vec(RECORD, RECORD).unwrap().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn keys_are_replaced_on_both_sides() {
        let (mut sealer, mut opener) = (Sealer::new([1; 32]), Opener::new([1; 32]));
        for direction in [&mut sealer.direction, &mut opener.direction] {
            direction.count = RECORDS_PER_KEY - 1;
        }
        let last_of_a_key = sealed(&mut sealer, b"body", b"data");
        assert_eq!(opened(&mut opener, &last_of_a_key).unwrap(), (b"body".to_vec(), b"data".to_vec()));
        assert_ne!(sealer.direction.key, [1; 32]);
        assert_eq!(sealer.direction.key, opener.direction.key);
        // The old key opens nothing any more.
        let mut old = Opener::new([1; 32]);
        let next = sealed(&mut sealer, b"body", b"");
        old.direction.count = opener.direction.count;
        assert!(is_forged(&mut old, &next));
        assert!(opened(&mut opener, &next).is_ok());
    }
}
