//! Shared helpers: files in memory, temporary directories, and seeded random numbers.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use onehop_load::{Error, Result, Source};

/// A file in memory.
pub struct Memory(pub String, pub Vec<u8>);

impl Source for Memory {
    fn name(&self) -> &str {
        &self.0
    }

    fn bytes(&self) -> u64 {
        self.1.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let from = usize::try_from(offset).unwrap();
        let ended = || Error::Ended {
            file: self.0.clone(),
            offset,
            bytes: buffer.len() as u64,
            length: self.bytes(),
        };
        let part = self.1.get(from..from + buffer.len()).ok_or_else(ended)?;
        buffer.copy_from_slice(part);
        Ok(())
    }
}

/// A directory of this test, removed on drop.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let no = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("onehop-load-{}-{no}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file with this header, its length before it, and `data` zeros behind it.
pub fn safetensors(json: &str, data: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

/// Seeded random numbers (xorshift64*).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 |= u64::from(self.0 == 0);
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i as u64 + 1) as usize);
        }
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| (self.next() >> 33) as u8).collect()
    }
}
