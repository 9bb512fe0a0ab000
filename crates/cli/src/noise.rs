//! Pseudo-random bytes (xorshift64*) for generated models and files.

/// A generator; the field is its seed.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    fn next(&mut self) -> u64 {
        // From state 0 the generator yields only zeroes.
        let mut x = if self.0 == 0 { 0x9e37_79b9_7f4a_7c15 } else { self.0 };
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.0 = x;
        x.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Fills a buffer.
    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
