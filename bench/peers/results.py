"""What run.py measured, as numbers: medians with their range and how many samples they are of. Needs nothing but Python."""

import json
import statistics
import sys
from dataclasses import dataclass, field

import loaders

VERSION = 1
STATES = {"tmpfs": "tmpfs", "cached": "page cache", "cold": "cold disk"}
WRONG = "wrong bytes"


@dataclass(frozen=True)
class Number:
    """A median, its range, and how many samples it is of."""

    median: float
    low: float
    high: float
    samples: int


def number(samples):
    """Of an even count the mean of the middle two; none of nothing."""
    if not samples:
        return None
    return Number(statistics.median(samples), min(samples), max(samples), len(samples))


@dataclass
class Summary:
    """One loader in one state, over all rounds."""

    name: str
    title: str
    version: str = ""
    first: Number = None
    later: Number = None
    whole: Number = None
    kept_gpu: int = 0
    kept_host: int = 0
    problems: list = field(default_factory=list)


def rate(row):
    return row["bytes"] / row["seconds"] / 1e9


def problem(one):
    """Why a run of a loader has no numbers, if it has none."""
    if "error" in one:
        return one["error"]
    wrong = [row for row in one["loads"] if row["wrong"]]
    return f"{WRONG}, first in {wrong[0]['first_wrong'][0]}" if wrong else None


def told(one):
    """A run of a loader in one line."""
    why = problem(one)
    if why:
        return why[:90]
    loads = "  ".join(f"{rate(row):6.2f}" for row in one["loads"])
    whole = ", ".join(f"{row['whole_seconds']:.2f}" for row in one["loads"] if "whole_seconds" in row)
    return f"GB/s: {loads}   process: {whole} s"


def summary(name, runs):
    """One loader, of its runs in one state. A run with wrong bytes voids all of them."""
    found = Summary(name, loaders.ALL[name].title)
    good = []
    for one in runs:
        why = problem(one)
        if why and why not in found.problems:
            found.problems.append(why)
        if not why:
            good.append(one["loads"])
            found.version = one["version"]
    if any(why.startswith(WRONG) for why in found.problems):
        good = []
    rows = [row for loads in good for row in loads]
    found.whole = number([row["whole_seconds"] for row in rows if "whole_seconds" in row])
    if name in loaders.COMMANDS:
        # Each of its loads is the first of a process, by its own clock.
        found.first = number([rate(row) for row in rows])
        return found
    found.first = number([rate(loads[0]) for loads in good])
    found.later = number([rate(row) for loads in good for row in loads[1:]])
    found.kept_gpu = max((row["kept_gpu_bytes"] for row in rows), default=0)
    found.kept_host = max((row["kept_host_bytes"] for row in rows), default=0)
    return found


def by_state(document):
    """For each state that was measured: its references, and a summary of each loader, the fastest first loads first."""
    if document.get("onehop_peers") != VERSION:
        raise ValueError(f"no results of run.py, or of another version than {VERSION}")
    states = {}
    for state in STATES:
        runs = [run for run in document["runs"] if run["state"] == state]
        if not runs:
            continue
        names = {name: None for run in runs for name in run["loaders"]}
        found = [summary(name, [run["loaders"][name] for run in runs if name in run["loaders"]]) for name in names]
        # The command last: its clock is another.
        found.sort(key=lambda one: (one.name in loaders.COMMANDS, -one.first.median if one.first else 0))
        references = {}
        for what in ("copy_engine", "disk"):
            best = [run["references"][what] for run in runs if what in run["references"]]
            if best:
                references[what] = number(best)
        states[state] = (references, found)
    return states


def load(path):
    with open(path) as file:
        document = json.load(file)
    try:
        return document, by_state(document)
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: {error}")
