//! Derives from the steps which routes work.

use serde::Serialize;

use super::steps::{StepResult, StepState};

/// Whether a route works.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct RouteVerdict {
    pub route: &'static str,
    pub direction: &'static str,
    pub verdict: &'static str,
    pub reason: String,
}

/// Routes, their directions, and the steps that they need.
const NEEDS: [(&str, &str, &[&str]); 8] = [
    ("gpu/tier3", "to_gpu", &["gpu-rings", "vram-write", "cq-vram", "sq-vram"]),
    ("gpu/posted", "to_gpu", &["gpu-rings", "vram-write", "cq-vram"]),
    ("gpu/tier2", "to_gpu", &["gpu-rings", "vram-write", "data-vram"]),
    ("gpu/tier1", "to_gpu", &["gpu-rings"]),
    ("cpu/direct", "to_gpu", &["vram-write"]),
    ("cpu/direct", "from_gpu", &["vram-read"]),
    ("cpu/pinned", "to_gpu", &["host-read"]),
    ("cpu/pinned", "from_gpu", &["host-read"]),
];

/// The verdicts for all routes.
pub(crate) fn verdicts(rows: &[StepResult]) -> Vec<RouteVerdict> {
    NEEDS.iter().map(|(route, direction, needs)| verdict(rows, route, direction, needs)).collect()
}

fn verdict(
    rows: &[StepResult],
    route: &'static str,
    direction: &'static str,
    needs: &[&str],
) -> RouteVerdict {
    let first = |state| rows.iter().find(|row| needs.contains(&row.id) && row.state == state);
    let (verdict, reason) = if let Some(row) = first(StepState::No) {
        ("no", format!("{}: {}", row.what, row.why))
    } else if let Some(row) = first(StepState::Untested) {
        ("untested", row.why.clone())
    } else if direction == "from_gpu" && route == "cpu/pinned" {
        (
            "untested",
            "this check does not write to the drive; reading through the same memory works".to_owned(),
        )
    } else {
        ("yes", "every step worked, with compared bytes".to_owned())
    };
    RouteVerdict { route, direction, verdict, reason }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn row(id: &'static str, state: StepState) -> StepResult {
        let why = if state == StepState::Yes { String::new() } else { format!("{id} failed") };
        StepResult { id, what: "a step", state, why, took: Duration::ZERO, wrong_bytes: false }
    }

    #[test]
    fn a_route_needs_all_of_its_steps() {
        let mut rows: Vec<_> =
            ["host-read", "gpu-rings", "vram-write", "vram-read", "data-vram", "cq-vram", "sq-vram"]
                .map(|id| row(id, StepState::Yes))
                .into();
        let names = |rows: &[StepResult]| verdicts(rows).iter().map(|v| v.verdict).collect::<Vec<_>>();
        assert_eq!(names(&rows), ["yes", "yes", "yes", "yes", "yes", "yes", "yes", "untested"]);
        // With a root complex that forwards writes only.
        rows[3] = row("vram-read", StepState::No);
        rows[6] = row("sq-vram", StepState::No);
        assert_eq!(names(&rows), ["no", "yes", "yes", "yes", "yes", "no", "yes", "untested"]);
        rows[1] = row("gpu-rings", StepState::Untested);
        assert_eq!(names(&rows)[1..4], ["untested"; 3]);
        assert!(verdicts(&rows)[0].reason.contains("sq-vram failed"));
    }
}
