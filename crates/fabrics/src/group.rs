//! The Diffie-Hellman groups of RFC 7919; DH-HMAC-CHAP has five.

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd, Resize};

/// Bits of an exponent: more than twice the strength of the largest group.
const EXPONENT_BITS: u32 = 512;
/// Bytes of an exponent.
pub(crate) const EXPONENT_BYTES: usize = EXPONENT_BITS as usize / 8;

/// A group, with 2 as its generator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DhGroup {
    /// Its number in messages.
    pub id: u8,
    bits: u32,
    /// What RFC 7919 adds to the digits of e to get a prime.
    offset: u64,
}

impl DhGroup {
    pub(crate) const ALL: [Self; 5] = [
        Self { id: 1, bits: 2048, offset: 560_316 },
        Self { id: 2, bits: 3072, offset: 2_625_351 },
        Self { id: 3, bits: 4096, offset: 5_736_041 },
        Self { id: 4, bits: 6144, offset: 15_705_020 },
        Self { id: 5, bits: 8192, offset: 10_965_728 },
    ];

    pub(crate) fn of(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.id == id)
    }

    /// Bytes of a public value, and of a shared one.
    pub(crate) fn bytes(self) -> usize {
        self.bits as usize / 8
    }

    /// The prime: 2^b - 2^(b-64) + (floor(2^(b-130) e) + offset) 2^64 - 1.
    fn prime(self) -> Odd<BoxedUint> {
        let mut limbs = vec![u64::MAX];
        limbs.extend(digits_of_e(self.bits - 130, self.offset - 1));
        limbs.push(u64::MAX);
        Odd::new(BoxedUint::from_words(limbs)).expect("its lowest bits are ones")
    }

    fn power(self, base: &BoxedUint, exponent: &[u8; EXPONENT_BYTES]) -> Vec<u8> {
        let exponent = BoxedUint::from_be_slice(exponent, EXPONENT_BITS).expect("it has so many bytes");
        let params = BoxedMontyParams::new(self.prime());
        let power = BoxedMontyForm::new(base.clone(), &params).pow(&exponent).retrieve();
        power.to_be_bytes().into_vec()
    }

    /// The public value of an exponent.
    pub(crate) fn public(self, exponent: &[u8; EXPONENT_BYTES]) -> Vec<u8> {
        self.power(&BoxedUint::from(2u64).resize(self.bits), exponent)
    }

    /// The shared secret; `None` if the other side's public value is invalid or makes it predictable.
    pub(crate) fn shared(self, exponent: &[u8; EXPONENT_BYTES], other: &[u8]) -> Option<Vec<u8>> {
        let other = BoxedUint::from_be_slice(other, self.bits).ok()?;
        let one = BoxedUint::one_with_precision(self.bits);
        let most = self.prime().get().wrapping_sub(&one);
        (other > one && other < most).then(|| self.power(&other, exponent))
    }
}

/// floor(2^bits e) + more, the lowest word first; `bits` is 2 less than a multiple of 64.
fn digits_of_e(bits: u32, more: u64) -> Vec<u64> {
    // One extra word absorbs the truncation of each term.
    let words = bits as usize / 64 + 2;
    let mut term = vec![0; words];
    term[words - 1] = 1 << (bits % 64);
    // 1/0! + 1/1!
    let mut sum: Vec<u64> = term.clone();
    add(&mut sum, &term);
    for n in 2.. {
        let mut rest = 0_u128;
        for word in term.iter_mut().rev() {
            let part = rest << 64 | u128::from(*word);
            *word = (part / n) as u64;
            rest = part % n;
        }
        if term.iter().all(|word| *word == 0) {
            break;
        }
        add(&mut sum, &term);
    }
    sum.remove(0);
    add(&mut sum, &[more]);
    sum
}

fn add(sum: &mut [u64], term: &[u64]) {
    let mut carry = false;
    for (word, more) in sum.iter_mut().zip(term.iter().copied().chain(std::iter::repeat(0))) {
        let (first, over) = word.overflowing_add(more);
        let (second, over_again) = first.overflowing_add(carry.into());
        (*word, carry) = (second, over | over_again);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_primes_are_those_of_the_standard() {
        for group in DhGroup::ALL {
            let bytes = group.prime().get().to_be_bytes();
            assert_eq!(bytes.len(), group.bytes());
            // All start with the digits of e, and differ at the end.
            assert_eq!(bytes[..16], 0xffff_ffff_ffff_ffff_adf8_5458_a2bb_4a9a_u128.to_be_bytes());
            assert_eq!(bytes[bytes.len() - 8..], [0xff; 8]);
        }
        // The last words before the ones, from RFC 7919.
        let ends = [
            0x886b_4238_6128_5c97_u64,
            0x25e4_1d2b_66c6_2e37,
            0xc68a_007e_5e65_5f6a,
            0xa40e_329c_d0e4_0e65,
            0xd68c_8bb7_c5c6_424c,
        ];
        for (group, end) in DhGroup::ALL.iter().zip(ends) {
            let bytes = group.prime().get().to_be_bytes();
            assert_eq!(bytes[bytes.len() - 16..bytes.len() - 8], end.to_be_bytes(), "{group:?}");
        }
    }

    #[test]
    fn both_sides_share_a_value() {
        let group = DhGroup::ALL[0];
        let [ours, theirs] = [[0xa5; EXPONENT_BYTES], [0x3c; EXPONENT_BYTES]];
        let shared = group.shared(&ours, &group.public(&theirs)).unwrap();
        assert_eq!(shared.len(), group.bytes());
        assert_eq!(Some(shared), group.shared(&theirs, &group.public(&ours)));
        // Values with known powers, and a value that is too long.
        let last = group.prime().get().wrapping_sub(BoxedUint::one_with_precision(group.bits));
        let known = [vec![0; 256], vec![1], last.to_be_bytes().into_vec(), vec![0xff; 256], vec![2; 257]];
        for value in known {
            assert_eq!(group.shared(&ours, &value), None);
        }
        assert!(DhGroup::of(0).is_none() && DhGroup::of(6).is_none());
    }

    /// By Fermat's test, which a composite number hardly passes.
    #[test]
    fn the_primes_are_prime() {
        for group in &DhGroup::ALL[..2] {
            let prime = group.prime();
            let params = BoxedMontyParams::new(prime.clone());
            let less = prime.get().wrapping_sub(BoxedUint::one_with_precision(group.bits));
            let three = BoxedUint::from(3u64).resize(group.bits);
            let power = BoxedMontyForm::new(three, &params).pow(&less).retrieve();
            assert_eq!(power, BoxedUint::one_with_precision(group.bits));
        }
    }
}
