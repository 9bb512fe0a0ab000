//! From steps to routes: which of them this machine and this drive have.

use serde::Serialize;

use super::steps::{Row, State};

/// A route, and whether it can be had.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Verdict {
    pub route: &'static str,
    pub direction: &'static str,
    pub verdict: &'static str,
    pub reason: String,
}

/// A route, its direction, and the steps that it is made of.
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

/// What follows from the steps.
pub(crate) fn of(rows: &[Row]) -> Vec<Verdict> {
    NEEDS.iter().map(|(route, direction, needs)| verdict(rows, route, direction, needs)).collect()
}

fn verdict(rows: &[Row], route: &'static str, direction: &'static str, needs: &[&str]) -> Verdict {
    let of = |state| rows.iter().find(|row| needs.contains(&row.id) && row.state == state);
    let (verdict, reason) = if let Some(row) = of(State::No) {
        ("no", format!("{}: {}", row.what, row.why))
    } else if let Some(row) = of(State::Untested) {
        ("untested", row.why.clone())
    } else if direction == "from_gpu" && route == "cpu/pinned" {
        (
            "untested",
            "this check does not write to the drive; reading through the same memory works".to_owned(),
        )
    } else {
        ("yes", "every step worked, and its bytes were compared".to_owned())
    };
    Verdict { route, direction, verdict, reason }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn row(id: &'static str, state: State) -> Row {
        let why = if state == State::Yes { String::new() } else { format!("{id} failed") };
        Row { id, what: "a step", state, why, took: Duration::ZERO, wrong_bytes: false }
    }

    #[test]
    fn a_route_needs_all_of_its_steps() {
        let mut rows: Vec<_> =
            ["host-read", "gpu-rings", "vram-write", "vram-read", "data-vram", "cq-vram", "sq-vram"]
                .map(|id| row(id, State::Yes))
                .into();
        let told = |rows: &[Row]| of(rows).iter().map(|v| v.verdict).collect::<Vec<_>>();
        assert_eq!(told(&rows), ["yes", "yes", "yes", "yes", "yes", "yes", "yes", "untested"]);
        // A root complex that forwards writes only.
        rows[3] = row("vram-read", State::No);
        rows[6] = row("sq-vram", State::No);
        assert_eq!(told(&rows), ["no", "yes", "yes", "yes", "yes", "no", "yes", "untested"]);
        rows[1] = row("gpu-rings", State::Untested);
        assert_eq!(told(&rows)[1..4], ["untested"; 3]);
        assert!(of(&rows)[0].reason.contains("sq-vram failed"));
    }
}
