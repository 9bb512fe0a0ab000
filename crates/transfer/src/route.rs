//! Names and order of the routes, and reasons why one cannot be used.

use std::str::FromStr;

use onehop_drive::{Error, Placement};
use serde::Serialize;

use crate::error::Error as Failure;

/// A route of this build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// GPU threads ring the doorbells; SQ, CQ and data are where the placement says.
    Gpu(Placement),
    /// The CPU submits commands, the drive writes into GPU memory.
    CpuDirect,
    /// The CPU submits commands, the drive writes into host memory, and the bytes are copied from there.
    CpuPinned,
}

impl Route {
    /// All routes, the best first. `gpu/posted` occurs twice: with entries in the drive's memory, or in host memory if
    /// it has none.
    pub const BEST_FIRST: [Self; 7] = [
        Self::Gpu(Placement::TIER3),
        Self::Gpu(Placement::POSTED_CMB),
        Self::Gpu(Placement::POSTED),
        Self::Gpu(Placement::TIER2),
        Self::Gpu(Placement::TIER1),
        Self::CpuDirect,
        Self::CpuPinned,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu(placement) => placement.route().unwrap_or("gpu"),
            Self::CpuDirect => "cpu/direct",
            Self::CpuPinned => "cpu/pinned",
        }
    }

    /// What submits commands: `gpu` or `cpu`.
    #[must_use]
    pub fn initiator(self) -> &'static str {
        if matches!(self, Self::Gpu(_)) { "gpu" } else { "cpu" }
    }

    /// The places of queues and data.
    #[must_use]
    pub fn placement(self) -> Places {
        match self {
            Self::Gpu(p) => Places { sq: p.sq.name(), cq: p.cq.name(), data: p.data.name() },
            Self::CpuDirect => Places { sq: "host", cq: "host", data: "vram" },
            Self::CpuPinned => Places { sq: "host", cq: "host", data: "host" },
        }
    }
}

/// Places of submission queue, completion queue and data, as the drive reaches them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Places {
    /// The submission queue.
    pub sq: &'static str,
    /// The completion queue.
    pub cq: &'static str,
    /// The data.
    pub data: &'static str,
}

/// A better route, and why it cannot be used.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BetterRoute {
    /// Its name.
    pub route: String,
    /// The reason.
    pub reason: String,
    /// How to fix it; empty if that is unknown, or a part of the reason.
    pub fix: String,
}

impl BetterRoute {
    /// The reason, and the fix if there is one, with this between them.
    #[must_use]
    pub fn why(&self, between: &str) -> String {
        match self.fix.as_str() {
            "" => self.reason.clone(),
            fix => format!("{}{between}{fix}", self.reason),
        }
    }
}

/// What helps where memory has run out.
pub(crate) const MOVE_LESS: &str = "Move less at a time";

/// The requested route. It parses from `auto` and from the routes' names.
#[derive(Clone, PartialEq, Debug)]
pub enum RouteRequest {
    /// The best that works.
    Auto,
    /// The routes of this name only.
    Only(&'static str),
    /// A route that drives do not have: its name, the reason, and an alternative.
    NotHere(&'static str, &'static str, &'static str),
}

/// Routes of files, which drives do not have.
const NOT_HERE: [(&str, &str, &str); 2] = [
    (
        "cpu/cached",
        "it reads files through the page cache, and this command addresses a drive's blocks past it",
        "Use cpu/pinned, which takes the same way without the page cache",
    ),
    (
        "cufile",
        "cuFile reads files that Linux has mounted, and this command addresses a drive's blocks",
        "Use cpu/direct or cpu/pinned; load, read FILE and bench sweep --file have cufile",
    ),
];

impl FromStr for RouteRequest {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        if let Some(route) = Route::BEST_FIRST.iter().find(|route| route.name() == text) {
            return Ok(Self::Only(route.name()));
        }
        if let Some((name, reason, fix)) = NOT_HERE.iter().find(|(name, ..)| *name == text) {
            return Ok(Self::NotHere(name, reason, fix));
        }
        let mut names: Vec<_> = Route::BEST_FIRST.iter().map(|route| route.name()).collect();
        names.dedup();
        names.extend(NOT_HERE.iter().map(|(name, ..)| name));
        Err(Failure::NoSuchRoute(format!("routes are auto, {}", names.join(", "))))
    }
}

impl RouteRequest {
    /// Its name on the command line.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Only(name) | Self::NotHere(name, ..) => name,
        }
    }

    /// The routes to try, in order.
    ///
    /// # Errors
    /// When drives do not have this route.
    pub fn candidates(&self) -> Result<Vec<Route>, Failure> {
        match self {
            Self::Auto => Ok(Route::BEST_FIRST.to_vec()),
            Self::Only(name) => Ok(Route::BEST_FIRST.into_iter().filter(|r| r.name() == *name).collect()),
            Self::NotHere(name, reason, fix) => {
                Err(Failure::not_possible(format!("route {name}"), *reason, *fix))
            }
        }
    }

    /// The routes to try on which GPU threads command the drive, and their placements.
    ///
    /// # Errors
    /// When there is none.
    pub fn by_gpu(&self) -> Result<Vec<(Route, Placement)>, Failure> {
        let by_gpu = |route: Route| match route {
            Route::Gpu(placement) => Some((route, placement)),
            _ => None,
        };
        let routes: Vec<_> = match self {
            Self::NotHere(..) => Vec::new(),
            _ => self.candidates()?.into_iter().filter_map(by_gpu).collect(),
        };
        if routes.is_empty() {
            let why = format!("GPU threads read rows by a gpu/ route, not by {}", self.name());
            return Err(Failure::NoSuchRoute(why));
        }
        Ok(routes)
    }
}

/// How to fix a route that failed with this error, or nothing if that is unknown; `None` if the drive failed, so that no other
/// route helps.
#[must_use]
pub(crate) fn remedy(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::Placement { place: "cmb", .. } => {
            "Use a drive with a controller memory buffer (simulated: &cmb=16M)"
        }
        Error::Placement { .. } => "Use a route with another placement",
        Error::NoQueue { .. } => "Ask for fewer queues (--queues 1), or use a drive that grants more",
        Error::Unsupported { .. } => "Use a cpu/ route",
        Error::NoMemory(_) => MOVE_LESS,
        // The mapper's reason says what would change it, if anything would.
        Error::Memory(_) => "",
        Error::Gpu(_) => "Use a cpu/ route",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_fits_the_failure_of_memory_or_there_is_none() {
        let (mapper, why) = ("vfio".to_owned(), "raise RLIMIT_MEMLOCK".to_owned());
        let unmapped = onehop_os::Error::CannotMap { mapper: mapper.clone(), why };
        let full = onehop_os::Error::NoMemory { mapper, bytes: 1 << 40 };
        let call = |errno| onehop_os::Error::System {
            call: "mmap".into(),
            source: std::io::Error::from_raw_os_error(errno),
            hint: "",
        };
        for (error, fix) in [(unmapped, ""), (full, MOVE_LESS), (call(12), MOVE_LESS), (call(24), "")] {
            let error = Error::from(error);
            assert_eq!(remedy(&error), Some(fix), "{error}");
            let route = BetterRoute { route: "x".into(), reason: error.to_string(), fix: fix.into() };
            assert!(route.why(". ").ends_with(if fix.is_empty() { &route.reason } else { fix }));
        }
    }

    #[test]
    fn every_name_of_the_table_is_known() {
        for name in ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned"] {
            assert!(!name.parse::<RouteRequest>().unwrap().candidates().unwrap().is_empty(), "{name}");
        }
        for name in ["cpu/cached", "cufile"] {
            let refused = name.parse::<RouteRequest>().unwrap().candidates().unwrap_err();
            assert!(matches!(refused, Failure::NotPossible { .. }), "{refused}");
        }
        assert_eq!("auto".parse::<RouteRequest>().unwrap().candidates().unwrap().len(), 7);
        let unknown = "gpu/tier9".parse::<RouteRequest>().unwrap_err();
        assert!(unknown.to_string().contains("gpu/tier1"), "{unknown}");
    }
}
