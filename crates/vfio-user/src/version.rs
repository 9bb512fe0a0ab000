//! The version exchange, in which both sides state their version and limits.

use serde_json::{Value, json};

use crate::error::Refusal;
use crate::wire::{MAX_DATA, MAX_FDS};

/// The implemented protocol version.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;
/// Upper limit of ranges that a client may share at once; each is a mapping of this process.
pub(crate) const MAX_MAPS: usize = 32768;
/// Granularity of shared memory.
pub(crate) const PAGE: u64 = 4096;

/// Negotiates the version; `data` is the JSON of the client's capabilities, which may be absent.
pub(crate) fn agree(major: u16, minor: u16, data: &[u8]) -> Result<Vec<u8>, Refusal> {
    if major != MAJOR {
        return Err(Refusal::unsupported(format!("version {major}.{minor}; {MAJOR}.{MINOR} is supported")));
    }
    let text = data.split(|byte| *byte == 0).next().unwrap_or_default();
    // The client's capabilities do not affect the reply, but must be valid.
    if !text.is_empty() && !serde_json::from_slice::<Value>(text).is_ok_and(|said| said.is_object()) {
        return Err(Refusal::invalid("the client's capabilities are not a JSON object"));
    }
    let mine = json!({ "capabilities": {
        "max_msg_fds": MAX_FDS,
        "max_data_xfer_size": MAX_DATA,
        "max_dma_maps": MAX_MAPS,
        "pgsizes": PAGE,
    }});
    let numbers = [MAJOR.to_le_bytes(), minor.min(MINOR).to_le_bytes()];
    Ok([numbers.as_flattened(), mine.to_string().as_bytes(), &[0]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_its_own_version_and_refuses_nonsense() {
        let said = agree(0, 3, b"{\"capabilities\":{\"max_msg_fds\":8}}\0").unwrap();
        assert_eq!(said[..4], [0, 0, 1, 0]);
        assert!(serde_json::from_slice::<Value>(&said[4..said.len() - 1]).is_ok());
        assert_eq!(agree(0, 0, b"").unwrap()[2], 0);
        assert!(agree(1, 0, b"").is_err());
        for bad in [b"{".as_slice(), b"[1]", b"\xff\0", &b"[".repeat(100_000)] {
            assert!(agree(0, 0, bad).is_err());
        }
    }
}
