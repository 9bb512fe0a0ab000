//! The limit of open files. A model of a thousand files needs more than most shells allow initially.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Limits of this process's descriptors; `None` means unlimited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DescriptorLimit {
    /// The soft limit, which is enforced.
    pub now: Option<u64>,
    /// The hard limit, to which the soft one may be raised.
    pub most: Option<u64>,
}

/// The limits of this process.
#[must_use]
pub fn descriptor_limit() -> DescriptorLimit {
    let limit = getrlimit(Resource::Nofile);
    DescriptorLimit { now: limit.current, most: limit.maximum }
}

/// Raises this process's soft limit to `wanted`, or as far as allowed; never lowers it. Descriptors beyond 1023 are too
/// high for `select`, so a library leaves this to its caller.
pub fn raise_descriptor_limit(wanted: u64) -> DescriptorLimit {
    let limit = descriptor_limit();
    let target = limit.most.map_or(wanted, |most| most.min(wanted));
    if limit.now.is_some_and(|now| now < target) {
        // The result below shows what the system allowed.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum: limit.most });
    }
    descriptor_limit()
}

/// The number of this process's open descriptors; `None` without /proc.
#[must_use]
pub fn open_descriptors() -> Option<u64> {
    // Minus the directory's own.
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
        // Other tests open and close descriptors meanwhile.
        assert!(open_descriptors().unwrap() + 100 >= before + files.len() as u64);
    }
}
