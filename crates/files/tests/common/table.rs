//! Partition tables built by hand.

/// A GPT with these partitions (first and last block) on a drive of `blocks` blocks; both copies.
pub fn gpt(lba: usize, blocks: u64, parts: &[(u64, u64)]) -> Vec<u8> {
    let mut image = vec![0; lba * blocks as usize];
    image[446 + 4] = 0xEE;
    image[446 + 8] = 1;
    image[446 + 12..446 + 16].copy_from_slice(&(blocks as u32 - 1).to_le_bytes());
    image[510..512].copy_from_slice(&[0x55, 0xAA]);
    let mut entries = vec![0; 16 * 128];
    for (entry, (first, last)) in entries.chunks_mut(128).zip(parts) {
        entry[..16].fill(0x0F);
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
        entry[56] = b'p';
    }
    let table = (entries.len() as u64).div_ceil(lba as u64);
    for (own, other, at) in [(1, blocks - 1, 2), (blocks - 1, 1, blocks - 1 - table)] {
        let mut header = vec![0; 92];
        header[..8].copy_from_slice(b"EFI PART");
        header[10] = 1;
        header[12] = 92;
        for (offset, value) in [(24, own), (32, other), (40, 2 + table), (48, blocks - 2 - table), (72, at)] {
            header[offset..offset + 8].copy_from_slice(&u64::to_le_bytes(value));
        }
        (header[80], header[84]) = (16, 128);
        image[at as usize * lba..][..entries.len()].copy_from_slice(&entries);
        image[own as usize * lba..][..92].copy_from_slice(&header);
    }
    fix_gpt_checksums(&mut image, lba);
    image
}

/// Recomputes the checksums of both copies, as far as they are in place.
pub fn fix_gpt_checksums(image: &mut [u8], lba: usize) {
    for at in [lba, image.len() / lba * lba - lba] {
        let word = |image: &[u8], offset: usize| {
            u32::from_le_bytes(image[at + offset..][..4].try_into().expect("4 bytes"))
        };
        let entries = (word(image, 72) as usize).saturating_mul(lba);
        let len = (word(image, 80) as usize).saturating_mul(word(image, 84) as usize);
        if let Some(entries) = entries.checked_add(len).and_then(|end| image.get(entries..end)) {
            let crc = crc32(entries);
            image[at + 88..][..4].copy_from_slice(&crc.to_le_bytes());
        }
        image[at + 16..][..4].fill(0);
        let len = (word(image, 12) as usize).clamp(92, lba);
        let crc = crc32(&image[at..at + len]);
        image[at + 16..][..4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Sector 0 and a chain of logical partitions at blocks 8, 16 and 24, each of 4 blocks.
pub fn mbr() -> Vec<u8> {
    let mut image = vec![0; 64 * 512];
    mbr_slot(&mut image, 0, 0, 0x83, 2, 6);
    mbr_slot(&mut image, 0, 2, 0x05, 8, 40);
    for sector in [8, 16, 24] {
        mbr_slot(&mut image, sector, 0, 0x83, 1, 4);
    }
    mbr_slot(&mut image, 8, 1, 0x05, 8, 8);
    mbr_slot(&mut image, 16, 1, 0x05, 16, 8);
    image
}

/// Fills one of a sector's four slots and adds the signature.
pub fn mbr_slot(image: &mut [u8], sector: usize, slot: usize, kind: u8, start: u32, count: u32) {
    let at = sector * 512 + 446 + 16 * slot;
    image[at + 4] = kind;
    image[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
    image[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
    image[sector * 512 + 510..][..2].copy_from_slice(&[0x55, 0xAA]);
}

pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |c: u32| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 };
    !bytes.iter().fold(!0, |crc, &b| (0..8).fold(crc ^ u32::from(b), |c, _| step(c)))
}
