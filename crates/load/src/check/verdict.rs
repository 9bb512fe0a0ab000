//! The combined result of verifying a load.

use super::Compared;

/// How files were compared with GPU memory.
pub const BY_FILES: &str = "every byte compared with the files, read once more";

/// The result of each requested comparison; `None` if not requested. `E` is the caller's error for differing bytes.
pub struct Verdict<E> {
    /// The comparison with the files.
    pub compared: Option<Result<(), E>>,
    /// How that was done.
    pub compared_by: &'static str,
    /// The comparison with a manifest.
    pub manifest: Option<Result<Compared, E>>,
}

impl<E> Verdict<E> {
    /// Whether the bytes are correct. `None` if nothing was compared, or the manifest lacks checksums of loaded
    /// tensors.
    pub fn verified(&self) -> Option<bool> {
        match (&self.compared, &self.manifest) {
            (Some(Err(_)), _) | (_, Some(Err(_))) => Some(false),
            (Some(Ok(())), _) => Some(true),
            (None, Some(Ok(compared))) => compared.is_all().then_some(true),
            (None, None) => None,
        }
    }

    /// Which comparison decided: the one that found a difference, if any.
    pub fn by(&self) -> Option<String> {
        match (&self.compared, &self.manifest) {
            (Some(Err(_)), _) | (Some(Ok(())), None | Some(Ok(_))) => Some(self.compared_by.into()),
            (_, Some(Err(_))) => Some("the manifest's checksums".into()),
            (None, Some(Ok(compared))) => Some(compared.words()),
            (None, None) => None,
        }
    }

    /// The first difference.
    pub fn failure(self) -> Option<E> {
        let compared = self.compared.and_then(Result::err);
        compared.or_else(|| self.manifest.and_then(Result::err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_outweighs_what_is_right() {
        let all = Compared { whole: 3, parts: 0 };
        let some = Compared { whole: 1, parts: 2 };
        let verdict = |compared, manifest| Verdict { compared, compared_by: BY_FILES, manifest };
        type Found = (Option<bool>, Option<String>, Option<u32>);
        let found = |v: Verdict<u32>| -> Found { (v.verified(), v.by(), v.failure()) };
        let files = || Some(BY_FILES.to_owned());
        assert_eq!(found(verdict(None, None)), (None, None, None));
        assert_eq!(found(verdict(Some(Ok(())), None)), (Some(true), files(), None));
        assert_eq!(found(verdict(Some(Ok(())), Some(Ok(some)))), (Some(true), files(), None));
        assert_eq!(found(verdict(Some(Err(1)), Some(Ok(all)))), (Some(false), files(), Some(1)));
        assert_eq!(found(verdict(Some(Err(1)), Some(Err(2)))), (Some(false), files(), Some(1)));
        assert_eq!(found(verdict(None, Some(Ok(all)))), (Some(true), Some(all.words()), None));
        assert_eq!(found(verdict(None, Some(Ok(some)))), (None, Some(some.words()), None));
        let manifest = Some("the manifest's checksums".to_owned());
        assert_eq!(found(verdict(Some(Ok(())), Some(Err(2)))), (Some(false), manifest, Some(2)));
    }
}
