"""Writes what run.py measured as Markdown: where and how, and a table for each state.

    python3 table.py results.json [RAW]

RAW is what the raw data are linked as, such as history/raw/loaders-2026-11-25.json.
"""

import sys
import textwrap

import loaders
import results

WIDTH = 100


def point(text):
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))


def cell(number, digits):
    """A median with its range, where there is one; nothing where nothing was run."""
    if number is None:
        return ""
    shown = f"{number.median:.{digits}f}"
    if number.samples > 1:
        shown += f" ({number.low:.{digits}f}–{number.high:.{digits}f})"
    return shown


def count(number):
    return str(number.samples) if number else ""


def gib(count_):
    return f"{count_ / 2**30:.1f} GiB"


def conditions(document, raw):
    c = document["conditions"]
    lines = [
        f"**Commit:** {c['commit'][:7]}. **Date:** {c['date']}.",
        f"**Machine:** {c['gpu']}; {c['cpus']} CPUs ({c['cpu']}), {gib(c['memory_kib'] << 10)}, Linux {c['kernel']}.",
        f"**Command:** `{c['command']}`",
        f"**Order:** random, seed {c['seed']}.",
    ]
    if raw:
        lines.append(f"**Raw data:** [JSON]({raw}).")
    return [point(line) for line in lines]


def table(found):
    lines = [
        "| loader | first load, GB/s | n | later loads, GB/s | n | process, s | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        title = f"`{one.title}`" if one.title.startswith("onehop") else f"{one.title} {one.version}"
        title += " †" if one.name in loaders.COMMANDS else ""
        cells = [cell(one.first, 1), count(one.first), cell(one.later, 1), count(one.later)]
        cells += [cell(one.whole, 2), count(one.whole)]
        lines.append(f"| {' | '.join([title, *cells])} |")
    return lines


def notes(state, found):
    """What has no numbers, and why; and what loaders keep between loads."""
    lines = [f"**{one.title}**: no number: {'; '.join(one.problems)}." for one in found if one.problems]
    own = {name for name, loader in loaders.ALL.items() if state in loader.states}
    missing = sorted(loaders.ALL[name].title for name in own - {one.name for one in found})
    if missing:
        lines.append(f"Not run: {', '.join(missing)}.")
    kept = [one for one in found if max(one.kept_gpu, one.kept_host) >= 16 << 20]
    if kept:
        each = [f"{one.title} {gib(one.kept_gpu)} of GPU and {gib(one.kept_host)} of host memory" for one in kept]
        lines.append(f"Kept by the process between loads: {'; '.join(each)}.")
    return [point(line) for line in lines]


def references(found):
    names = {"copy_engine": "the copy engine", "disk": "O_DIRECT reads of the disk, the best shape"}
    each = [f"{names[what]} {cell(number, 1)} GB/s ({number.samples} runs)" for what, number in found.items()]
    return point(f"Reference: {'; '.join(each)}.")


def write(document, states, raw=None):
    lines = conditions(document, raw)
    for state, (beside, found) in states.items():
        lines += ["", f"{results.STATES[state].capitalize() if state != 'tmpfs' else 'tmpfs'}:", "", *table(found), ""]
        lines += [references(beside), *notes(state, found)]
    if any(one.name in loaders.COMMANDS for _, found in states.values() for one in found):
        lines += ["", "† By its own clock, which begins later; the process counts until its exit."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.stdout.write(write(*results.load(sys.argv[1]), *sys.argv[2:]))
