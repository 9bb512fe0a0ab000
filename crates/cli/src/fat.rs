//! Generates a small FAT16 volume for the demo: one file, with two extents, in one directory.

/// The path of the file.
pub(crate) const PATH: &str = "/models/model.safetensors";
const LONG_NAME: &str = "model.safetensors";
const SHORT_NAME: &[u8; 11] = b"MODEL~1 SAF";

/// Sector size, and block size of the drive.
const SECTOR: u64 = 4096;
const ENTRY: usize = 32;
const RESERVED: u64 = 1;
const FATS: u64 = 2;
/// The root directory is one sector.
const ROOT_ENTRIES: u64 = SECTOR / ENTRY as u64;
/// Cluster counts of FAT16: the count alone determines the FAT type.
const CLUSTERS: std::ops::RangeInclusive<u64> = 4085..=65_524;
/// The cluster of the directory, the first cluster of the file, and the gap between its two extents.
const DIRECTORY: u64 = 2;
const FIRST: u64 = 10;
const GAP: u64 = 7;
const END: u16 = 0xffff;

/// A volume, as the ranges that are not zero.
pub(crate) struct Image {
    /// Size of the volume.
    pub bytes: u64,
    /// Offset and contents of each range.
    pub ranges: Vec<(u64, Vec<u8>)>,
}

struct FatGeometry {
    /// Sectors per cluster.
    per_cluster: u64,
    clusters: u64,
    fat_sectors: u64,
    /// Clusters of the file.
    file: u64,
}

impl FatGeometry {
    /// The geometry with the smallest clusters in which a file of this size fits.
    fn of(bytes: u64) -> Self {
        let mut per_cluster = 1;
        loop {
            let file = bytes.div_ceil(per_cluster * SECTOR);
            let clusters = (file + FIRST + GAP).max(*CLUSTERS.start() + 100);
            if clusters <= *CLUSTERS.end() {
                let fat_sectors = ((clusters + 2) * 2).div_ceil(SECTOR);
                return Self { per_cluster, clusters, fat_sectors, file };
            }
            per_cluster *= 2;
        }
    }

    fn root(&self) -> u64 {
        RESERVED + FATS * self.fat_sectors
    }

    fn sectors(&self) -> u64 {
        self.root() + 1 + self.clusters * self.per_cluster
    }

    /// The byte offset of a cluster.
    fn at(&self, cluster: u64) -> u64 {
        (self.root() + 1 + (cluster - 2) * self.per_cluster) * SECTOR
    }

    /// The file's clusters, in order.
    fn chain(&self) -> Vec<u64> {
        let half = self.file / 2;
        (0..self.file).map(|i| FIRST + i + if i < half { 0 } else { GAP }).collect()
    }
}

/// Generates a volume with this file.
pub(crate) fn generate(file: &[u8]) -> Image {
    let shape = FatGeometry::of(file.len() as u64);
    let chain = shape.chain();
    let mut ranges = vec![(0, boot(&shape))];
    let table = table(&shape, &chain);
    ranges.extend((0..FATS).map(|i| ((RESERVED + i * shape.fat_sectors) * SECTOR, table.clone())));
    ranges.push((shape.root() * SECTOR, entry(b"MODELS     ", 0x10, DIRECTORY, 0)));
    let mut names = entry(b".          ", 0x10, DIRECTORY, 0);
    names.extend(entry(b"..         ", 0x10, 0, 0));
    names.extend(long_entries());
    names.extend(entry(SHORT_NAME, 0x20, chain.first().copied().unwrap_or(0), file.len() as u32));
    ranges.push((shape.at(DIRECTORY), names));
    let half = (shape.file / 2 * shape.per_cluster * SECTOR) as usize;
    let (first, second) = file.split_at(half.min(file.len()));
    ranges.push((shape.at(FIRST), first.to_vec()));
    ranges.push((shape.at(FIRST + shape.file / 2 + GAP), second.to_vec()));
    Image { bytes: shape.sectors() * SECTOR, ranges }
}

fn boot(shape: &FatGeometry) -> Vec<u8> {
    let mut out = vec![0; SECTOR as usize];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0xeb, 0x3c, 0x90]);
    put(3, b"onehop  ");
    put(11, &(SECTOR as u16).to_le_bytes());
    put(13, &[shape.per_cluster as u8]);
    put(14, &(RESERVED as u16).to_le_bytes());
    put(16, &[FATS as u8]);
    put(17, &(ROOT_ENTRIES as u16).to_le_bytes());
    let sectors = shape.sectors();
    match u16::try_from(sectors) {
        Ok(few) => put(19, &few.to_le_bytes()),
        Err(_) => put(32, &(sectors as u32).to_le_bytes()),
    }
    put(21, &[0xf8]);
    put(22, &(shape.fat_sectors as u16).to_le_bytes());
    put(24, &32_u16.to_le_bytes());
    put(26, &64_u16.to_le_bytes());
    put(36, &[0x80, 0, 0x29]);
    put(39, b"1hop");
    put(43, b"ONEHOP DEMO");
    put(54, b"FAT16   ");
    put(510, &[0x55, 0xaa]);
    out
}

fn table(shape: &FatGeometry, chain: &[u64]) -> Vec<u8> {
    let mut next = vec![0_u16; (shape.fat_sectors * SECTOR / 2) as usize];
    (next[0], next[1], next[DIRECTORY as usize]) = (0xfff8, END, END);
    for (i, cluster) in chain.iter().enumerate() {
        next[*cluster as usize] = chain.get(i + 1).map_or(END, |next| *next as u16);
    }
    next.into_iter().flat_map(u16::to_le_bytes).collect()
}

fn entry(name: &[u8; 11], attributes: u8, cluster: u64, bytes: u32) -> Vec<u8> {
    let mut out = vec![0; ENTRY];
    out[..11].copy_from_slice(name);
    out[11] = attributes;
    // A fixed date, 2026-01-01, so that volumes are reproducible.
    for at in [16, 18, 24] {
        out[at..at + 2].copy_from_slice(&((46_u16 << 9) | (1 << 5) | 1).to_le_bytes());
    }
    out[26..28].copy_from_slice(&(cluster as u16).to_le_bytes());
    out[28..32].copy_from_slice(&bytes.to_le_bytes());
    out
}

/// The entries of the long name: thirteen characters each, the last part first.
fn long_entries() -> Vec<u8> {
    const OFFSETS: [usize; 13] = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
    let sum = SHORT_NAME.iter().fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
    let units: Vec<u16> = LONG_NAME.encode_utf16().chain([0]).collect();
    let parts: Vec<_> = units.chunks(OFFSETS.len()).collect();
    let mut out = Vec::new();
    for (i, part) in parts.iter().enumerate().rev() {
        let mut entry = vec![0; ENTRY];
        let last = if i + 1 == parts.len() { 0x40 } else { 0 };
        (entry[0], entry[11], entry[13]) = ((i as u8 + 1) | last, 0x0f, sum);
        for (j, at) in OFFSETS.into_iter().enumerate() {
            let unit = part.get(j).copied().unwrap_or(0xffff);
            entry[at..at + 2].copy_from_slice(&unit.to_le_bytes());
        }
        out.extend(entry);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use onehop_files::{Blocks, Place, Volume, Which};

    use super::*;

    #[test]
    fn the_volume_contains_the_file_in_two_extents() {
        for bytes in [100_000, 20 << 20] {
            let file: Vec<u8> = (0..bytes).map(|i: u32| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
            let image = generate(&file);
            let mut disk = vec![0; image.bytes as usize];
            for (at, data) in &image.ranges {
                disk[*at as usize..][..data.len()].copy_from_slice(data);
            }
            let blocks: Arc<dyn Blocks> = Arc::new(disk);
            let volume = Volume::open(blocks, Which::Auto).unwrap();
            let found = volume.lookup(PATH).unwrap();
            assert_eq!(found.id.len, u64::from(bytes));
            let extents = volume.extents(&found).unwrap();
            assert_eq!(extents.iter().filter(|e| matches!(e.place, Place::Drive(_))).count(), 2);
            let mut back = vec![0; bytes as usize];
            assert_eq!(volume.read(&found, 0, &mut back).unwrap(), bytes as usize);
            assert!(back == file);
        }
    }

    #[test]
    fn large_files_have_larger_clusters() {
        let shape = FatGeometry::of(1 << 30);
        assert!(CLUSTERS.contains(&shape.clusters) && shape.per_cluster == 8, "{}", shape.per_cluster);
    }
}
