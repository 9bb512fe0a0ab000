"""Draws what run.py measured. For each state two panels: GB/s of first and later loads of the Python loaders, which have
the same clock, and seconds of a whole process until the first load's last byte, the command's too. A bar is a median; a
line across it goes from the lowest to the highest sample.

    python3 plot.py results.json loaders.svg
"""

import html
import sys

import loaders
import results

WIDTH, LEFT, RIGHT, BAR, GAP, TOP, FOOT = 760, 212, 104, 12, 12, 44, 30
STYLE = """text{font:12px system-ui,sans-serif;fill:#222}.h{font-weight:600;font-size:14px}.v{font-size:11px}
.l{font-size:11px;fill:#555}.first{fill:#9fb8d8}.later{fill:#3f6fae}.ours .first{fill:#f0b27a}.ours .later{fill:#d3691b}
.range{stroke:#222}.reference{stroke:#333;stroke-dasharray:4 3}.axis{stroke:#bbb}
@media(prefers-color-scheme:dark){text{fill:#ddd}.l{fill:#aaa}.reference,.range{stroke:#ccc}}"""
SHADES = ("first", "later")


def step_of(most):
    """A round number of which at most seven reach so far."""
    return next(s for s in (10.0**e * m for e in range(-3, 6) for m in (1, 2, 5)) if most / s <= 7)


def panel(title, rows, reference, digits, top):
    """A panel's SVG and its height. A row is a name, a title and up to two numbers; a reference a name and a rate."""
    most = max([number.high for _, _, numbers in rows for number in numbers if number] + [reference[1] if reference else 0])
    step, scale = step_of(most), (WIDTH - LEFT - RIGHT) / most
    bottom = top + TOP + sum(BAR * len(numbers) + GAP for _, _, numbers in rows)
    out = [f'<text class="h" x="12" y="{top + 18}">{html.escape(title)}</text>']
    for i in range(int(most / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 6}" y2="{bottom - GAP + 4}"/>')
        out.append(f'<text class="l" x="{x:.1f}" y="{bottom + 8}" text-anchor="middle">{i * step:g}</text>')
    y = top + TOP
    for name, shown, numbers in rows:
        own = ' class="ours"' if loaders.ALL[name].title.startswith("onehop") else ""
        middle = y + BAR * len(numbers) / 2 + 4
        out.append(f'<g{own}><text x="{LEFT - 8}" y="{middle}" text-anchor="end">{html.escape(shown)}</text>')
        for shade, number in zip(SHADES, numbers):
            if number:
                end, line = LEFT + number.high * scale, y + (BAR - 1) / 2
                out.append(f'<rect class="{shade}" x="{LEFT}" y="{y}" width="{number.median * scale:.1f}" height="{BAR - 1}"/>')
                out.append(
                    f'<line class="range" x1="{LEFT + number.low * scale:.1f}" x2="{end:.1f}" y1="{line}" y2="{line}"/>'
                )
                words = f"{number.median:.{digits}f}, n = {number.samples}"
                out.append(f'<text class="v" x="{WIDTH - 12}" y="{y + BAR - 2}" text-anchor="end">{words}</text>')
            y += BAR
        out.append("</g>")
        y += GAP
    if reference:
        x = LEFT + reference[1] * scale
        out.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 10}" y2="{bottom - GAP + 4}"/>')
        words = f"{reference[0]} {reference[1]:.1f}"
        out.append(f'<text class="l" x="{min(x + 4, WIDTH - 8):.1f}" y="{top + TOP - 14}" text-anchor="end">{words}</text>')
    return out, bottom - top + FOOT


def panels(state, references, found):
    """The two panels of a state: title, rows, reference, digits. A loader without a number has no row."""
    bound = references.get("disk" if state == "cold" else "copy_engine")
    name = "O_DIRECT reads" if state == "cold" else "copy engine"
    alike = [(o.name, o.title, (o.first, o.later)) for o in found if o.name in loaders.LOADERS and o.first]
    whole = sorted((o for o in found if o.whole), key=lambda o: o.whole.median)
    shown = results.STATES[state]
    both = []
    if alike:
        reference = (name, bound.median) if bound else None
        both.append((f"{shown}: GB/s of a load, imports and CUDA's start before the clock", alike, reference, 1))
    if whole:
        rows = [(o.name, o.title, (o.whole,)) for o in whole]
        both.append((f"{shown}: seconds from the start of the process to the last byte (the command: to its exit)", rows, None, 2))
    return both


def draw(document, states):
    height, body = 8, []
    for state, (references, found) in states.items():
        for one in panels(state, references, found):
            more, taken = panel(*one, height)
            body += more
            height += taken
    c = document["conditions"]
    words = [
        "light: first load in a fresh process; dark: later loads in it; bars are medians, lines go from lowest to highest",
        f"{c['gpu'].split(',')[0]}, {c['cpus']} CPUs, {c['date'][:10]}, onehop {c['commit'][:7]}",
    ]
    for line in words:
        body.append(f'<text class="l" x="12" y="{height + 4}">{html.escape(line)}</text>')
        height += 16
    size = f'viewBox="0 0 {WIDTH} {height + 4}" width="{WIDTH}" height="{height + 4}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>Model loaders beside each other</title><style>{STYLE}</style>", *body, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    drawn = draw(*results.load(sys.argv[1]))
    with open(sys.argv[2], "w") as file:
        file.write(drawn)
