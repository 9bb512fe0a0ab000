//! Namespaces: blocks with their metadata, their write cache, and unreadable blocks.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use crate::cache::{Cache, Unit};
use crate::config::{Config, Media, metadata_path};
use crate::engine::Blocks;
use crate::protect;
use crate::store::{LockedImage, Store, open_image};
use crate::{Error, Result};

/// A namespace and its content.
pub(crate) struct NamespaceMedia {
    /// Its size in blocks.
    pub blocks: u64,
    /// Data bytes of a block.
    pub lba: u32,
    /// Metadata bytes of a block.
    pub ms: u16,
    /// The last bytes of each block's metadata are protection information, which is stored inverted: unwritten and
    /// deallocated blocks read as ones, which exempts it from checks.
    protected: bool,
    data: Store,
    meta: Option<Store>,
    cache: Cache,
    bad: BTreeSet<u64>,
    touched: u64,
    /// How often it was recreated.
    pub life: u32,
}

/// Makes the namespaces of a configuration.
pub(crate) fn namespaces(config: &Config, engine: Option<Arc<dyn Blocks>>) -> Result<Vec<NamespaceMedia>> {
    let count = u64::from(config.namespaces);
    let (total, image) = match &config.media {
        Media::Memory(bytes) => (*bytes, None),
        Media::Image { path, size } => {
            let (file, len) = open_image(path, *size)?;
            (len, Some((file, path)))
        }
    };
    let blocks = total / count / u64::from(config.lba);
    if blocks == 0 {
        return Err(Error::Contradiction(format!(
            "{total} bytes are too few for {count} namespaces of at least one block of {} bytes",
            config.lba
        )));
    }
    let meta_bytes = blocks * u64::from(config.ms);
    let meta_file = match &image {
        Some((_, path)) if config.ms != 0 => {
            Some(open_image(&metadata_path(path), Some(meta_bytes * count))?.0)
        }
        _ => None,
    };
    let part = |file: &Arc<LockedImage>, start| Store::File { file: file.clone(), start };
    Ok((0..count)
        .map(|i| {
            let bytes = blocks * u64::from(config.lba);
            let data = match (&engine, &image) {
                (Some(blocks), _) => Store::Engine(blocks.clone()),
                (None, Some((file, _))) => part(file, i * bytes),
                (None, None) => Store::memory(bytes),
            };
            let meta = meta_file.as_ref().map(|f| part(f, i * meta_bytes));
            let meta = meta.or_else(|| (config.ms != 0).then(|| Store::memory(meta_bytes)));
            NamespaceMedia { blocks, data, meta, ..NamespaceMedia::empty(config) }
        })
        .collect())
}

impl NamespaceMedia {
    fn empty(config: &Config) -> Self {
        Self {
            blocks: 0,
            lba: config.lba,
            ms: config.ms,
            protected: config.pi != 0,
            data: Store::memory(0),
            meta: None,
            cache: Cache::new(config.lba),
            bad: BTreeSet::new(),
            touched: 0,
            life: 0,
        }
    }

    /// Replaces it with another namespace of the same size and format.
    pub(crate) fn recreate(&mut self) -> io::Result<()> {
        self.zero(0, self.blocks, true)?;
        (self.touched, self.life) = (0, self.life.wrapping_add(1));
        Ok(())
    }

    /// Bytes of data.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.lba)
    }

    /// Upper limit of written blocks: the utilisation in Identify.
    pub(crate) fn used(&self) -> u64 {
        self.touched.min(self.blocks)
    }

    fn at(&self, block: u64) -> u64 {
        block * u64::from(self.lba)
    }

    fn meta_at(&self, block: u64) -> u64 {
        block * u64::from(self.ms)
    }

    /// Reads whole blocks; `meta` is empty or as long as their metadata.
    pub(crate) fn read(&self, slba: u64, data: &mut [u8], meta: &mut [u8]) -> io::Result<()> {
        self.data.read(self.at(slba), data)?;
        if let Some(store) = self.meta.as_ref().filter(|_| !meta.is_empty()) {
            store.read(self.meta_at(slba), meta)?;
            self.invert_protection(meta);
        }
        Ok(())
    }

    fn invert_protection(&self, meta: &mut [u8]) {
        if self.protected {
            for block in meta.chunks_exact_mut(self.ms.into()) {
                let others = block.len() - protect::BYTES;
                block[others..].iter_mut().for_each(|byte| *byte = !*byte);
            }
        }
    }

    /// Writes whole blocks; `durable` ones survive a power loss. Without `meta` the metadata becomes zero, and
    /// protection information ones.
    pub(crate) fn write(&mut self, slba: u64, data: &[u8], meta: &[u8], durable: bool) -> io::Result<()> {
        let count = data.len() as u64 / u64::from(self.lba);
        self.before_write(slba, count, durable)?;
        self.data.write(self.at(slba), data)?;
        let (at, bytes) = (self.meta_at(slba), self.meta_at(count));
        let mut meta = meta.to_vec();
        self.invert_protection(&mut meta);
        match &mut self.meta {
            Some(store) if meta.is_empty() => store.zero(at, bytes),
            Some(store) => store.write(at, &meta),
            None => Ok(()),
        }
    }

    /// Makes blocks read as zero.
    pub(crate) fn zero(&mut self, slba: u64, count: u64, durable: bool) -> io::Result<()> {
        self.before_write(slba, count, durable)?;
        self.data.zero(self.at(slba), self.at(count))?;
        let (at, bytes) = (self.meta_at(slba), self.meta_at(count));
        self.meta.as_mut().map_or(Ok(()), |store| store.zero(at, bytes))
    }

    fn before_write(&mut self, slba: u64, count: u64, durable: bool) -> io::Result<()> {
        self.touched = self.touched.max(slba + count);
        if !self.bad.is_empty() {
            self.clear_bad(slba, count);
        }
        if durable {
            self.cache.settled(slba, count);
            return Ok(());
        }
        self.remember(slba, count)
    }

    /// Saves the blocks' present content, for a power loss.
    fn remember(&mut self, slba: u64, count: u64) -> io::Result<()> {
        let (lba, ms) = (self.lba as usize, usize::from(self.ms));
        let per = self.cache.unit_blocks();
        for part in self.cache.parts(slba, count) {
            let unknown = self.cache.unknown(&part);
            if unknown == 0 {
                continue;
            }
            let unit = self.cache.unit(part.unit, || Unit {
                dirty: 0,
                data: vec![0; lba * per as usize].into(),
                meta: vec![0; ms * per as usize].into(),
            });
            for (first, len) in runs(unknown) {
                let block = part.unit * per + first as u64;
                self.data.read(block * lba as u64, &mut unit.data[first * lba..(first + len) * lba])?;
                if let Some(store) = &self.meta {
                    store.read(block * ms as u64, &mut unit.meta[first * ms..(first + len) * ms])?;
                }
            }
            unit.dirty |= unknown;
        }
        Ok(())
    }

    /// Makes everything written durable.
    pub(crate) fn flush(&mut self) {
        self.cache.flush();
    }

    /// Undoes every unflushed write.
    pub(crate) fn lose_power(&mut self) -> io::Result<()> {
        let (lba, ms) = (self.lba as usize, usize::from(self.ms));
        for (number, unit) in self.cache.lose() {
            for (first, len) in runs(unit.dirty) {
                let block = number * self.cache.unit_blocks() + first as u64;
                self.data.write(block * lba as u64, &unit.data[first * lba..(first + len) * lba])?;
                if let Some(store) = &mut self.meta {
                    store.write(block * ms as u64, &unit.meta[first * ms..(first + len) * ms])?;
                }
            }
        }
        Ok(())
    }

    /// Makes blocks unreadable until they are written again.
    pub(crate) fn spoil(&mut self, slba: u64, count: u64) {
        self.bad.extend(slba..slba + count);
    }

    /// The first unreadable block of a range.
    pub(crate) fn bad_block(&self, slba: u64, count: u64) -> Option<u64> {
        self.bad.range(slba..slba + count).next().copied()
    }

    fn clear_bad(&mut self, slba: u64, count: u64) {
        let good: Vec<u64> = self.bad.range(slba..slba + count).copied().collect();
        for block in good {
            self.bad.remove(&block);
        }
    }

    /// Writes data bytes anywhere, durable at once, bypassing the controller.
    pub(crate) fn write_bytes(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let lba = u64::from(self.lba);
        let (first, end) = (offset / lba, (offset + data.len() as u64).div_ceil(lba));
        self.cache.settled(first, end - first);
        self.clear_bad(first, end - first);
        self.touched = self.touched.max(end);
        self.data.write(offset, data)
    }

    /// Reads data bytes anywhere, bypassing the controller.
    pub(crate) fn read_bytes(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.data.read(offset, out)
    }
}

/// The runs of ones in a mask: start and length of each.
fn runs(mut mask: u64) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let first = mask.trailing_zeros();
        let len = (mask >> first).trailing_ones();
        let ones = if len == 64 { u64::MAX } else { (1 << len) - 1 };
        mask &= !(ones << first);
        Some((first as usize, len as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(spec: &str) -> NamespaceMedia {
        let config = Config::parse(spec).unwrap();
        namespaces(&config, None).unwrap().remove(0)
    }

    #[test]
    fn power_loss_takes_back_what_was_not_flushed() {
        for spec in ["mem:1M?lba=512&ms=8", "mem:1M?lba=4096", "mem:1M?lba=65536"] {
            let mut ns = one(spec);
            let (lba, ms) = (ns.lba as usize, usize::from(ns.ms));
            let block = |v: u8, n: usize| (vec![v; n * lba], vec![v; n * ms]);
            let put = |ns: &mut NamespaceMedia, at, v, n, durable| {
                let (data, meta) = block(v, n);
                ns.write(at, &data, &meta, durable).unwrap();
            };
            put(&mut ns, 0, 1, 10, false);
            ns.flush();
            put(&mut ns, 3, 2, 5, false);
            put(&mut ns, 4, 3, 1, true);
            put(&mut ns, 4, 4, 1, false);
            put(&mut ns, 7, 5, 1, true);
            ns.zero(9, 1, false).unwrap();
            ns.lose_power().unwrap();
            let want = [1, 1, 1, 1, 3, 1, 1, 5, 1, 1];
            for (i, want) in want.into_iter().enumerate() {
                let (mut data, mut meta) = block(0xee, 1);
                ns.read(i as u64, &mut data, &mut meta).unwrap();
                assert_eq!((data, meta), block(want, 1), "{spec} block {i}");
            }
        }
    }

    #[test]
    fn spoiled_blocks_heal_when_written() {
        let mut ns = one("mem:1M?lba=512");
        ns.spoil(5, 3);
        assert_eq!(ns.bad_block(0, 6), Some(5));
        ns.write(5, &[1; 512], &[], false).unwrap();
        assert_eq!(ns.bad_block(0, 10), Some(6));
        ns.zero(6, 2, true).unwrap();
        assert_eq!(ns.bad_block(0, 10), None);
    }

    #[test]
    fn runs_of_a_mask() {
        assert_eq!(runs(0b1110_0101).collect::<Vec<_>>(), [(0, 1), (2, 1), (5, 3)]);
        assert_eq!(runs(u64::MAX).collect::<Vec<_>>(), [(0, 64)]);
    }
}
