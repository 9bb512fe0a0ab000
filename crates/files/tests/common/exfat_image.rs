//! Makes exFAT volumes with files in them, which no tool of exfatprogs does. `fsck.exfat` checks the result.

/// A file or directory to add.
pub enum Item {
    /// Its bytes, the number of valid ones, and whether it is contiguous without a chain.
    File {
        bytes: Vec<u8>,
        valid: usize,
        row: bool,
    },
    Dir(Vec<(String, Item)>),
}

/// A volume under construction.
pub struct Maker {
    sector_shift: u32,
    cluster_shift: u32,
    table: Vec<u32>,
    heap: Vec<u8>,
    used: Vec<bool>,
    /// Steps to the next free cluster of a chain; 1 makes no fragments.
    pub step: usize,
}

const END: u32 = u32::MAX;

impl Maker {
    pub fn new(sector_shift: u32, cluster_shift: u32, clusters: usize) -> Self {
        let heap = vec![0; clusters << (sector_shift + cluster_shift)];
        let (table, used) = (vec![0; clusters], vec![false; clusters]);
        Self { sector_shift, cluster_shift, table, heap, used, step: 1 }
    }

    fn cluster(&self) -> usize {
        1 << (self.sector_shift + self.cluster_shift)
    }

    /// The whole volume with this root directory.
    pub fn build(mut self, label: &str, root: &[(String, Item)]) -> Vec<u8> {
        let bitmap_len = self.used.len().div_ceil(8);
        let bitmap = self.alloc(bitmap_len, false);
        let table = upcase_table();
        let upcase = self.alloc(table.len(), false);
        self.put(&upcase, &table);
        let mut entries = vec![entry(0x83, |e| {
            e[1] = label.len() as u8;
            label.encode_utf16().enumerate().for_each(|(i, u)| put16(e, 2 + 2 * i, u));
        })];
        let extent = |kind, first: &[usize], len: usize, checksum: u32| {
            entry(kind, |e| {
                put32(e, 4, checksum);
                put32(e, 20, first[0] as u32 + 2);
                put32(e, 24, len as u32);
            })
        };
        entries.push(extent(0x81, &bitmap, bitmap_len, 0));
        let sum = table.iter().fold(0_u32, |sum, &b| sum.rotate_right(1).wrapping_add(b.into()));
        entries.push(extent(0x82, &upcase, table.len(), sum));
        let entries = [entries.concat(), self.directory(root)].concat();
        let root = self.alloc(entries.len() + 32, false);
        self.put(&root, &entries);
        let bits: Vec<u8> = self
            .used
            .chunks(8)
            .map(|c| c.iter().enumerate().fold(0, |byte, (i, &used)| byte | u8::from(used) << i))
            .collect();
        self.put(&bitmap, &bits);
        self.image(root[0] as u32 + 2)
    }

    fn directory(&mut self, items: &[(String, Item)]) -> Vec<u8> {
        let mut entries = Vec::new();
        for (name, item) in items {
            let (directory, bytes, valid, row) = match item {
                Item::File { bytes, valid, row } => (false, bytes.clone(), *valid, *row),
                Item::Dir(items) => {
                    let mut list = self.directory(items);
                    list.resize((list.len() + 32).next_multiple_of(self.cluster()), 0);
                    let len = list.len();
                    (true, list, len, false)
                }
            };
            let clusters = self.alloc(bytes.len(), row);
            // Invalid bytes must not be read.
            let mut on_disk = vec![0xA5; bytes.len()];
            on_disk[..valid].copy_from_slice(&bytes[..valid]);
            self.put(&clusters, &on_disk);
            entries.extend(set(name, directory, valid, bytes.len(), clusters.first().copied(), row));
        }
        entries
    }

    /// Allocates clusters: contiguous, or with gaps and a chain.
    fn alloc(&mut self, len: usize, row: bool) -> Vec<usize> {
        let count = len.div_ceil(self.cluster());
        let step = if row { 1 } else { self.step };
        let mut got = Vec::new();
        if row {
            let start =
                self.used.windows(count.max(1)).position(|w| w.iter().all(|u| !u)).expect("room in a row");
            got.extend(start..start + count);
        }
        let mut at = 0;
        while got.len() < count {
            at = (0..self.used.len())
                .map(|i| (at + i) % self.used.len())
                .find(|&i| !self.used[i])
                .expect("room");
            self.used[at] = true;
            got.push(at);
            at = (at + step) % self.used.len();
        }
        got.iter().for_each(|&i| self.used[i] = true);
        for (i, &cluster) in got.iter().enumerate().filter(|_| !row) {
            self.table[cluster] = got.get(i + 1).map_or(END, |&next| next as u32 + 2);
        }
        got
    }

    fn put(&mut self, clusters: &[usize], bytes: &[u8]) {
        let size = self.cluster();
        for (&cluster, part) in clusters.iter().zip(bytes.chunks(size)) {
            self.heap[cluster * size..][..part.len()].copy_from_slice(part);
        }
    }

    fn image(self, root: u32) -> Vec<u8> {
        let sector = 1_usize << self.sector_shift;
        let table_sectors = ((self.table.len() + 2) * 4).div_ceil(sector);
        let heap_at = (24 + table_sectors).next_multiple_of(1 << self.cluster_shift);
        let total = heap_at + (self.used.len() << self.cluster_shift);
        let mut boot = vec![0; 12 * sector];
        boot[..11].copy_from_slice(b"\xEB\x76\x90EXFAT   ");
        for (at, value) in [
            (72, total as u32),
            (80, 24),
            (84, table_sectors as u32),
            (88, heap_at as u32),
            (92, self.used.len() as u32),
            (96, root),
            (100, 0xCAFE_1234),
        ] {
            put32(&mut boot, at, value);
        }
        put16(&mut boot, 104, 0x100);
        (boot[108], boot[109], boot[110], boot[111]) =
            (self.sector_shift as u8, self.cluster_shift as u8, 1, 0x80);
        put16(&mut boot, 510, 0xAA55);
        (1..9).for_each(|i| put16(&mut boot, (i + 1) * sector - 2, 0xAA55));
        fix_boot_checksum(&mut boot, sector);
        let mut image = [&boot[..], &boot].concat();
        let media: [u32; 2] = [0xFFFF_FFF8, END];
        image.extend(media.iter().chain(&self.table).flat_map(|e| e.to_le_bytes()));
        image.resize(heap_at * sector, 0);
        image.extend(self.heap);
        image
    }
}

/// A short table: `a` to `z` have an upper case. FFFFh and a count stand for characters without one.
fn upcase_table() -> Vec<u8> {
    let letters = (b'A'..=b'Z').map(u16::from);
    let units: Vec<u16> = [0xFFFF, 0x61].into_iter().chain(letters).chain([0xFFFF, 0xFF85]).collect();
    units.iter().flat_map(|u| u.to_le_bytes()).collect()
}

fn upper(unit: u16) -> u16 {
    if (0x61..=0x7A).contains(&unit) { unit - 32 } else { unit }
}

fn set(name: &str, directory: bool, valid: usize, len: usize, first: Option<usize>, row: bool) -> Vec<u8> {
    let units: Vec<u16> = name.encode_utf16().collect();
    let hash = units.iter().flat_map(|&u| upper(u).to_le_bytes());
    let hash = hash.fold(0_u16, |hash, b| hash.rotate_right(1).wrapping_add(b.into()));
    let file = entry(0x85, |e| {
        e[1] = 1 + units.len().div_ceil(15) as u8;
        put16(e, 4, if directory { 0x10 } else { 0x20 });
        // 2024-02-29 12:30:10, and 500 ms; the zone is UTC + 1 h.
        [8, 12, 16]
            .iter()
            .for_each(|&at| put32(e, at, ((44 << 9 | 2 << 5 | 29) << 16) | 12 << 11 | 30 << 5 | 5));
        e[21] = 50;
        [22, 23, 24].iter().for_each(|&at| e[at] = 0x84);
    });
    let stream = entry(0xC0, |e| {
        // An empty file has no cluster and is not contiguous either.
        e[1] = 1 | if row && first.is_some() { 2 } else { 0 };
        e[3] = units.len() as u8;
        put16(e, 4, hash);
        put32(e, 8, valid as u32);
        put32(e, 20, first.map_or(0, |f| f as u32 + 2));
        put32(e, 24, len as u32);
    });
    let names = units
        .chunks(15)
        .map(|part| entry(0xC1, |e| part.iter().enumerate().for_each(|(i, &u)| put16(e, 2 + 2 * i, u))));
    let mut set: Vec<u8> = [file, stream].into_iter().chain(names).flatten().collect();
    fix_set_checksum(&mut set);
    set
}

/// Recomputes the checksums of a changed volume, as far as they are in place.
pub fn fix_checksums(image: &mut [u8]) {
    let sector = 1 << image[108].clamp(9, 12);
    if image.len() >= 12 * sector {
        fix_boot_checksum(&mut image[..12 * sector], sector);
    }
    for at in (0..image.len().saturating_sub(32)).step_by(32).skip(24 * 16) {
        let len = 32 * (1 + usize::from(image[at + 1]));
        if image[at] == 0x85 && at + len <= image.len() {
            fix_set_checksum(&mut image[at..at + len]);
        }
    }
}

fn fix_boot_checksum(boot: &mut [u8], sector: usize) {
    let counted = (0..11 * sector).filter(|i| ![106, 107, 112].contains(i));
    let sum = counted.fold(0_u32, |sum, i| sum.rotate_right(1).wrapping_add(boot[i].into()));
    (11 * sector..12 * sector).step_by(4).for_each(|at| put32(boot, at, sum));
}

fn fix_set_checksum(set: &mut [u8]) {
    let counted = set.iter().enumerate().filter(|(i, _)| ![2, 3].contains(i));
    let sum = counted.fold(0_u16, |sum, (_, &b)| sum.rotate_right(1).wrapping_add(b.into()));
    put16(set, 2, sum);
}

fn entry(kind: u8, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut entry = vec![0; 32];
    entry[0] = kind;
    fill(&mut entry);
    entry
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}
