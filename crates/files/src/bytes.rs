//! Little-endian integers from byte slices. Offsets are constants of a format; the caller has checked the length.

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Joins the two halves of a number.
pub(crate) fn wide(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Text up to the first zero; invalid UTF-8 is replaced.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// UTF-16 text up to the first zero.
pub(crate) fn text16(units: impl Iterator<Item = u16>) -> String {
    char::decode_utf16(units.take_while(|&u| u != 0))
        .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
        .collect()
}

/// The text form of a UUID, from bytes in the order of the text.
pub(crate) fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex = |part: &[u8]| part.iter().map(|b| format!("{b:02x}")).collect::<String>();
    [&bytes[..4], &bytes[4..6], &bytes[6..8], &bytes[8..10], &bytes[10..]].map(hex).join("-")
}

/// The text form of a GUID, whose first three fields are little-endian.
pub(crate) fn guid_text(bytes: &[u8; 16]) -> String {
    let mut b = *bytes;
    b[..4].reverse();
    b[4..6].reverse();
    b[6..8].reverse();
    uuid_text(&b)
}

/// CRC-32 as in GPT and zlib (reflected 04C11DB7h). Bit by bit is fast enough for kilobytes.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |c, _| (c >> 1) ^ (0xEDB8_8320 & (c & 1).wrapping_neg()))
    })
}

/// CRC-16 (reflected 8005h), continued from `crc`.
pub(crate) fn crc16(crc: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(crc, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte), |c, _| (c >> 1) ^ (0xA001 & (c & 1).wrapping_neg()))
    })
}

/// CRC-32C without the inversions at both ends, as ext4 chains it.
pub(crate) fn crc32c_raw(crc: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!crc, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_values_of_the_crcs() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc16(0, b"123456789"), 0xBB3D);
        assert_eq!(!crc32c_raw(!0, b"123456789"), 0xE306_9283);
        assert_eq!(crc32c_raw(crc32c_raw(!0, b"12345"), b"6789"), crc32c_raw(!0, b"123456789"));
    }

    #[test]
    fn identifiers_as_text() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8);
        assert_eq!(uuid_text(&bytes), "00010203-0405-0607-0809-0a0b0c0d0e0f");
        assert_eq!(guid_text(&bytes), "03020100-0504-0706-0809-0a0b0c0d0e0f");
        assert_eq!(text(b"abc\0def"), "abc");
        assert_eq!(text16([0x41, 0xD800, 0x42, 0, 0x43].into_iter()), "A\u{FFFD}B");
    }
}
