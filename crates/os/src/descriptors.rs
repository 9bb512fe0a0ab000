//! How many files a process may have open. A model of a thousand files needs more than most shells allow at first.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How many descriptors this process may have: now, and at most without more rights. None is no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DescriptorLimit {
    /// The limit that counts, the soft one.
    pub now: Option<u64>,
    /// What it may be raised to, the hard one.
    pub most: Option<u64>,
}

/// What this process may have.
#[must_use]
pub fn descriptor_limit() -> DescriptorLimit {
    let limit = getrlimit(Resource::Nofile);
    DescriptorLimit { now: limit.current, most: limit.maximum }
}

/// Raises the soft limit of this whole process to `wanted`, or as far as it may be. It is never lowered. Descriptors beyond
/// 1023 are too high for `select`, so a library leaves this to its caller.
pub fn raise_descriptor_limit(wanted: u64) -> DescriptorLimit {
    let limit = descriptor_limit();
    let target = limit.most.map_or(wanted, |most| most.min(wanted));
    if limit.now.is_some_and(|now| now < target) {
        // What it does not give is seen in what there is afterwards.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum: limit.most });
    }
    descriptor_limit()
}

/// How many descriptors this process has open; none where there is no /proc.
#[must_use]
pub fn open_descriptors() -> Option<u64> {
    // One of them is the directory's own.
    Some((std::fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_it_may_be_and_never_lowered() {
        let before = descriptor_limit();
        let (Some(now), Some(most)) = (before.now, before.most) else { return };
        assert_eq!(raise_descriptor_limit(now - 1), before);
        assert_eq!(raise_descriptor_limit(now + 1).now, Some(most.min(now + 1)));
        assert_eq!(raise_descriptor_limit(u64::MAX), DescriptorLimit { now: Some(most), most: Some(most) });
    }

    #[test]
    fn open_files_are_counted() {
        let Some(before) = open_descriptors() else { return };
        let files: Vec<_> = (0..200).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        // Other tests open and close theirs meanwhile.
        assert!(open_descriptors().unwrap() + 100 >= before + files.len() as u64);
    }
}
