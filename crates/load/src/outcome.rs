//! The report of a load: the route and why, the limit, and why no faster route was used.

use std::time::Duration;

use serde::Serialize;

use crate::engine::Account;
use crate::plan::Plan;

/// The report of a load through the ring.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Bytes of tensors.
    pub bytes: u64,
    /// Bytes that were read for them.
    pub read_bytes: u64,
    /// Bytes of GPU memory that they occupy.
    pub gpu_bytes: u64,
    /// Duration.
    pub seconds: f64,
    /// Bytes of tensors, in 10^9 per second.
    pub gbps: f64,
    /// The route of most bytes.
    pub route: &'static str,
    /// Why this route was taken.
    pub route_why: String,
    /// The bottleneck.
    pub limit: Limit,
    /// Better routes, and why they were not used.
    pub why_not_better: Vec<WhyNot>,
    /// Changes to the files meanwhile that did not affect their bytes: [`Model::still_same`](crate::Model::still_same).
    pub warnings: Vec<String>,
}

/// The bottleneck of a load.
#[derive(Clone, Debug, Serialize)]
pub struct Limit {
    /// Its name.
    pub what: &'static str,
    /// 10^9 bytes per second, if known.
    pub gbps: Option<f64>,
    /// The fraction of it that was reached.
    pub reached: Option<f64>,
}

/// A route that was not used.
#[derive(Clone, Debug, Serialize)]
pub struct WhyNot {
    /// Its name.
    pub route: &'static str,
    /// The reason.
    pub reason: &'static str,
    /// How to fix it.
    pub fix: &'static str,
}

impl WhyNot {
    /// Why a file of a mounted file system takes no route of a drive.
    pub const MOUNTED: Self = Self {
        route: "cpu/direct",
        reason: "Linux has mounted the file system, so its drivers do the reading",
        fix: "If it is on an NVMe drive of this machine, detach the drive from the kernel, and name the file by -d DRIVE --path",
    };
    const REMOTE: Self = Self {
        route: "cpu/direct",
        reason: "the files are on a server",
        fix: "Copy them to a drive of this machine, and load them with -d DRIVE --path",
    };
}

impl Outcome {
    /// Reports a load of this duration, with a plan for each GPU. `copy_rate` is the measured rate of the copy engine.
    /// The caller adds warnings.
    #[must_use]
    pub fn new(plans: &[&Plan], account: &Account, took: Duration, copy_rate: Option<f64>) -> Self {
        let bytes: u64 = plans.iter().map(|plan| plan.tensor_bytes).sum();
        let seconds = took.as_secs_f64();
        let gbps = bytes as f64 / 1e9 / seconds.max(1e-9);
        let Went { route, why, limit, copied } = Went::of(account);
        let limit_gbps = copy_rate.filter(|_| copied).map(|rate| rate / 1e9);
        Self {
            bytes,
            read_bytes: account.read_bytes(),
            gpu_bytes: plans.iter().map(|plan| plan.gpu_bytes).sum(),
            seconds,
            gbps,
            route,
            route_why: why,
            limit: Limit { what: limit, gbps: limit_gbps, reached: limit_gbps.map(|limit| gbps / limit) },
            why_not_better: vec![if route == "cpu/remote" { WhyNot::REMOTE } else { WhyNot::MOUNTED }],
            warnings: Vec::new(),
        }
    }
}

/// The path of most bytes.
struct Went {
    route: &'static str,
    why: String,
    /// Its bottleneck, as far as known.
    limit: &'static str,
    /// Whether that is the copy engine.
    copied: bool,
}

impl Went {
    fn of(account: &Account) -> Self {
        let Account { cached_bytes, cache_miss_bytes, direct_bytes, remote_bytes, asked, .. } = *account;
        let by_cache = cached_bytes + cache_miss_bytes;
        if let Some(way) = account.cufile_way {
            let limit = "the copy engine, should cuFile copy through host memory";
            let mut why = format!("it was requested; {way}");
            if let Some(reason) = &account.why_cached {
                why = format!("{why}; not past the page cache: {reason}");
            }
            if let Some(reason) = &account.why_unregistered {
                why = format!("{why}; it refused the GPU memory: {reason}");
            }
            return Self { route: "cufile", why, limit, copied: true };
        }
        if remote_bytes > by_cache + direct_bytes {
            let why = "a server had the bytes: read by ranges into pinned memory".into();
            return Self { route: "cpu/remote", why, limit: "the server, or the network", copied: false };
        }
        if direct_bytes > by_cache {
            let why = match &account.why_unknown {
                _ if asked => "it was requested: read past the page cache".into(),
                Some(why) => {
                    format!("read past the page cache, because it is unknown which bytes are cached: {why}")
                }
                None => "the disk had the bytes: read past the page cache".into(),
            };
            return Self { route: "cpu/pinned", why, limit: "the disk", copied: false };
        }
        let copied = cached_bytes >= cache_miss_bytes;
        let mut why = String::from(match (asked, copied) {
            (true, _) => "it was requested",
            (false, true) if by_cache > cached_bytes || direct_bytes > 0 => {
                "the page cache had most of the bytes"
            }
            (false, true) => "the page cache had the bytes",
            (false, false) if account.why_unknown.is_some() => {
                "by the page cache, as far as that has the bytes"
            }
            (false, false) => "by the page cache, which did not have most of the bytes",
        });
        if direct_bytes > 0 {
            why += "; others came past it";
        }
        if let Some(reason) = &account.why_cached {
            why = format!("{why}; not past it: {reason}");
        }
        let limit = if copied { "the copy engine" } else { "the disk" };
        Self { route: "cpu/cached", why, limit, copied }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_and_its_limit_are_those_of_most_bytes() {
        let none = Account::default();
        let why = |text: &str| Some(String::from(text));
        let cases = [
            (
                Account { cached_bytes: 9, ..none.clone() },
                ("cpu/cached", "the page cache had the bytes", "the copy engine"),
            ),
            (
                Account { cached_bytes: 9, direct_bytes: 3, why_cached: why("b: no"), ..none.clone() },
                (
                    "cpu/cached",
                    "the page cache had most of the bytes; others came past it; not past it: b: no",
                    "the copy engine",
                ),
            ),
            (
                Account { cached_bytes: 2, cache_miss_bytes: 9, asked: true, ..none.clone() },
                ("cpu/cached", "it was requested", "the disk"),
            ),
            (
                Account { cache_miss_bytes: 9, why_cached: why("b: no"), ..none.clone() },
                (
                    "cpu/cached",
                    "by the page cache, which did not have most of the bytes; not past it: b: no",
                    "the disk",
                ),
            ),
            (
                Account { cache_miss_bytes: 9, why_unknown: why("secret"), ..none.clone() },
                ("cpu/cached", "by the page cache, as far as that has the bytes", "the disk"),
            ),
            (
                Account { direct_bytes: 9, cached_bytes: 3, ..none.clone() },
                ("cpu/pinned", "the disk had the bytes: read past the page cache", "the disk"),
            ),
            (
                Account { direct_bytes: 9, asked: true, ..none.clone() },
                ("cpu/pinned", "it was requested: read past the page cache", "the disk"),
            ),
            (
                Account { direct_bytes: 9, why_unknown: why("secret"), ..none.clone() },
                (
                    "cpu/pinned",
                    "read past the page cache, because it is unknown which bytes are cached: secret",
                    "the disk",
                ),
            ),
            (
                Account {
                    cufile_way: Some("somehow"),
                    why_unregistered: why("full"),
                    why_cached: why("b: no"),
                    ..none
                },
                (
                    "cufile",
                    "it was requested; somehow; not past the page cache: b: no; it refused the GPU memory: full",
                    "the copy engine, should cuFile copy through host memory",
                ),
            ),
        ];
        for (account, expected) in cases {
            let went = Went::of(&account);
            assert_eq!((went.route, &*went.why, went.limit), expected, "{account:?}");
        }
    }
}
