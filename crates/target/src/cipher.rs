//! AES-256-GCM by two libraries: graviola where the CPU supports it, which is four times as fast, and the `aes-gcm`
//! crate elsewhere. Both produce the same bytes, so the two sides may use different ones.

use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes256Gcm, Tag};

/// The length of a tag in bytes.
pub(crate) const TAG: usize = 16;

/// An expanded key.
pub(crate) enum Cipher {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Fast(Box<graviola::aead::AesGcm>),
    Portable(Box<Aes256Gcm>),
}

impl Cipher {
    pub fn new(key: &[u8; 32]) -> Self {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if graviola::util::is_cpu_supported() {
            return Self::Fast(Box::new(graviola::aead::AesGcm::new(key)));
        }
        Self::portable(key)
    }

    fn portable(key: &[u8; 32]) -> Self {
        Self::Portable(Box::new(Aes256Gcm::new(&(*key).into())))
    }

    /// Encrypts in place. Returns the tag, or `None` if the text is too long for AES-GCM.
    pub fn seal(&self, nonce: [u8; 12], text: &mut [u8]) -> Option<[u8; TAG]> {
        match self {
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Self::Fast(cipher) => {
                let mut tag = [0; TAG];
                cipher.encrypt(&nonce, &[], text, &mut tag);
                Some(tag)
            }
            Self::Portable(cipher) => {
                cipher.encrypt_inout_detached(&nonce.into(), &[], text.into()).ok().map(Into::into)
            }
        }
    }

    /// Decrypts in place. Returns whether the tag is right; otherwise the text must not be used.
    #[must_use]
    pub fn open(&self, nonce: [u8; 12], text: &mut [u8], tag: [u8; TAG]) -> bool {
        match self {
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Self::Fast(cipher) => cipher.decrypt(&nonce, &[], text, &tag).is_ok(),
            Self::Portable(cipher) => {
                let tag = Tag::from(tag);
                cipher.decrypt_inout_detached(&nonce.into(), &[], text.into(), &tag).is_ok()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Test case 16 of McGrew and Viega's GCM specification without its additional data, which is test case 15.
    #[test]
    fn a_published_test_vector_matches() {
        let hex = |text: &str| -> Vec<u8> {
            (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
        };
        let key: [u8; 32] = hex(&"feffe9928665731c6d6a8f9467308308".repeat(2)).try_into().unwrap();
        let nonce: [u8; 12] = hex("cafebabefacedbaddecaf888").try_into().unwrap();
        let text = hex(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525\
             b16aedf5aa0de657ba637b391aafd255",
        );
        let sealed = hex(
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838\
             c5f61e6393ba7a0abcc9f662898015ad",
        );
        for cipher in [Cipher::new(&key), Cipher::portable(&key)] {
            let mut bytes = text.clone();
            let tag = cipher.seal(nonce, &mut bytes).unwrap();
            assert_eq!((&bytes, &tag[..]), (&sealed, &hex("b094dac5d93471bdec1a502270e3cc6c")[..]));
            assert!(cipher.open(nonce, &mut bytes, tag));
            assert_eq!(bytes, text);
        }
    }

    proptest! {
        #[test]
        fn both_libraries_agree(
            key: [u8; 32],
            nonce: [u8; 12],
            text in prop::collection::vec(any::<u8>(), 0..5000),
            bit: prop::sample::Index,
        ) {
            let (one, other) = (Cipher::new(&key), Cipher::portable(&key));
            let (mut by_one, mut by_other) = (text.clone(), text.clone());
            let tag = one.seal(nonce, &mut by_one).unwrap();
            prop_assert_eq!(Some(tag), other.seal(nonce, &mut by_other));
            prop_assert_eq!(&by_one, &by_other);
            let mut changed = [&by_one[..], &tag].concat();
            let bit = bit.index(changed.len() * 8);
            changed[bit / 8] ^= 1 << (bit % 8);
            for cipher in [&one, &other] {
                let mut opened = by_one.clone();
                prop_assert!(cipher.open(nonce, &mut opened, tag));
                prop_assert_eq!(&opened, &text);
                let mut changed = changed.clone();
                let (text, tag) = changed.split_at_mut(by_one.len());
                let tag: [u8; TAG] = (&*tag).try_into().unwrap();
                prop_assert!(!cipher.open(nonce, text, tag));
            }
        }
    }
}
