//! The complete diagnosis of a machine.

use onehop_pci::Address;
use serde::Serialize;

use crate::check::{Check, Status};
use crate::facts::Facts;
use crate::routes::{self, Advice, RouteRow};
use crate::{checks, near, topo};

/// All checks and routes of a machine.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// The description of a recorded or composed machine; `None` for the running one.
    pub system: Option<String>,
    /// The checks, by group.
    pub checks: Vec<Check>,
    /// The routes, the best of each pair first.
    pub routes: Vec<RouteRow>,
    /// A recommendation for each GPU, device and direction.
    pub advice: Vec<Advice>,
    /// Names by address, for display.
    #[serde(skip)]
    pub(crate) names: Vec<(String, String)>,
    /// Pairs of a GPU and a device that has a closer GPU, for display.
    #[serde(skip)]
    pub(crate) distant: Vec<(String, String)>,
}

/// Restricts a diagnosis to some devices; `None` means all.
#[derive(Clone, Debug, Default)]
pub struct Only {
    /// This GPU.
    pub gpu: Option<Address>,
    /// This device.
    pub device: Option<Address>,
}

/// Diagnoses a machine.
#[must_use]
pub fn examine(facts: &Facts, only: &Only, system: Option<&str>) -> Diagnosis {
    let wanted = |only: Option<Address>, address: &str| only.is_none_or(|only| only.to_string() == address);
    let mut routes = routes::table(facts);
    routes.retain(|row| wanted(only.gpu, &row.gpu) && wanted(only.device, &row.device));
    let mut checks = checks::all(facts, only);
    checks.sort_by_key(|check| check.group);
    Diagnosis {
        system: system.map(str::to_owned),
        advice: routes::advice(&routes),
        names: topo::names(facts),
        distant: near::distant(facts),
        checks,
        routes,
    }
}

impl Diagnosis {
    /// The worst result of all checks.
    #[must_use]
    pub fn worst(&self) -> Status {
        self.checks.iter().map(|check| check.status).max().unwrap_or(Status::Pass)
    }
}
