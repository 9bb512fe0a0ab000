//! The names of routes, their order, and why one could not be had.

use onehop_drive::{Error, Placement};
use serde::Serialize;

use crate::error::{CliError, Result};

/// A way for bytes to go that this build has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Route {
    /// GPU threads ring the doorbells; SQ, CQ and data lie as the placement says.
    Gpu(Placement),
    /// The CPU commands, the drive writes into GPU memory.
    CpuDirect,
    /// The CPU commands, the drive writes into host memory, and the bytes are copied from there.
    CpuPinned,
}

impl Route {
    /// Every route, the best first. `gpu/posted` comes as two: its entries lie in the drive's own memory, or in host
    /// memory where the drive has none.
    pub(crate) const BEST_FIRST: [Self; 7] = [
        Self::Gpu(Placement::TIER3),
        Self::Gpu(Placement::POSTED_CMB),
        Self::Gpu(Placement::POSTED),
        Self::Gpu(Placement::TIER2),
        Self::Gpu(Placement::TIER1),
        Self::CpuDirect,
        Self::CpuPinned,
    ];

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gpu(placement) => placement.route().unwrap_or("gpu"),
            Self::CpuDirect => "cpu/direct",
            Self::CpuPinned => "cpu/pinned",
        }
    }

    /// Who gives the commands.
    pub(crate) fn initiator(self) -> &'static str {
        if matches!(self, Self::Gpu(_)) { "gpu" } else { "cpu" }
    }

    /// Where the parts lie that the drive reaches.
    pub(crate) fn placement(self) -> Places {
        match self {
            Self::Gpu(p) => Places { sq: p.sq.name(), cq: p.cq.name(), data: p.data.name() },
            Self::CpuDirect => Places { sq: "host", cq: "host", data: "vram" },
            Self::CpuPinned => Places { sq: "host", cq: "host", data: "host" },
        }
    }
}

/// Where the submission queue, the completion queue and the data lie, as the drive reaches them.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Places {
    pub sq: &'static str,
    pub cq: &'static str,
    pub data: &'static str,
}

/// A route that was tried, or looked at, and could not be had.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct WhyNot {
    pub route: String,
    pub reason: String,
    pub fix: String,
}

/// What is asked for by `--route`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum RouteRequest {
    /// The best that works.
    Auto,
    /// One of the routes of this name, and no other.
    Only(&'static str),
    /// A route that this build does not have, and why.
    NotHere(&'static str, &'static str, &'static str),
}

/// Routes of the design that cannot be had here.
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

/// Reads the value of `--route`.
pub(crate) fn parse(text: &str) -> std::result::Result<RouteRequest, String> {
    if text == "auto" {
        return Ok(RouteRequest::Auto);
    }
    if let Some(route) = Route::BEST_FIRST.iter().find(|route| route.name() == text) {
        return Ok(RouteRequest::Only(route.name()));
    }
    if let Some((name, reason, fix)) = NOT_HERE.iter().find(|(name, ..)| *name == text) {
        return Ok(RouteRequest::NotHere(name, reason, fix));
    }
    let mut names: Vec<_> = Route::BEST_FIRST.iter().map(|route| route.name()).collect();
    names.dedup();
    names.extend(NOT_HERE.iter().map(|(name, ..)| name));
    Err(format!("routes are auto, {}", names.join(", ")))
}

impl RouteRequest {
    /// As people write it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Only(name) | Self::NotHere(name, ..) => name,
        }
    }

    /// The routes to try, in order.
    pub(crate) fn candidates(&self) -> Result<Vec<Route>> {
        match self {
            Self::Auto => Ok(Route::BEST_FIRST.to_vec()),
            Self::Only(name) => Ok(Route::BEST_FIRST.into_iter().filter(|r| r.name() == *name).collect()),
            Self::NotHere(name, reason, fix) => {
                Err(CliError::not_possible(format!("route {name}"), *reason, *fix))
            }
        }
    }
}

/// What would mend a route that failed with this error; nothing if the error is the drive's and no other route helps.
pub(crate) fn remedy(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::Placement { place: "cmb", .. } => {
            "Use a drive with a controller memory buffer (simulated: &cmb=16M)"
        }
        Error::Placement { .. } => "Use a route with another placement",
        Error::NoQueue { .. } => "Ask for fewer queues (--queues 1), or use a drive that grants more",
        Error::Unsupported { .. } => "Use a cpu/ route",
        Error::Memory(_) => {
            "Move less at a time, or use cpu/pinned, for which the drive need not reach GPU memory"
        }
        Error::Gpu(_) => "Use a cpu/ route",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_the_table_is_known() {
        for name in ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned"] {
            assert!(!parse(name).unwrap().candidates().unwrap().is_empty(), "{name}");
        }
        for name in ["cpu/cached", "cufile"] {
            assert_eq!(parse(name).unwrap().candidates().unwrap_err().code(), 3);
        }
        assert_eq!(parse("auto").unwrap().candidates().unwrap().len(), 7);
        assert!(parse("gpu/tier9").unwrap_err().contains("gpu/tier1"));
    }
}
