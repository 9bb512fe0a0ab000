"""Draws what run.py measured: a panel for each state, two bars for each loader (first and second load), and the limit.

    python3 plot.py results.json loaders.svg
"""

import html
import json
import statistics
import sys

NAMES = {
    "program": "onehop load",
    "cufile": "onehop load --route cufile",
    "onehop": "onehop.torch.load_file",
    "instanttensor": "InstantTensor",
    "kvikio": "KvikIO, raw read",
    "kvikio-direct": "KvikIO, past the cache",
    "fastsafetensors": "fastsafetensors",
    "fastsafetensors-cached": "fastsafetensors, cached",
    "runai": "Run:ai streamer",
    "safetensors": "safetensors",
}
STATES = {"tmpfs": "tmpfs", "cached": "page cache", "cold": "cold disk"}
WIDTH, LEFT, RIGHT, BAR, GAP, TOP, FOOT = 760, 190, 96, 11, 12, 44, 34
STYLE = """text{font:12px system-ui,sans-serif;fill:#222}.h{font-weight:600;font-size:14px}.v{font-size:11px}.l{font-size:11px;fill:#555}
.first{fill:#9fb8d8}.again{fill:#3f6fae}.ours .first{fill:#f0b27a}.ours .again{fill:#d3691b}.limit{stroke:#333;stroke-dasharray:4 3}.axis{stroke:#bbb}
@media(prefers-color-scheme:dark){text{fill:#ddd}.l{fill:#aaa}.limit{stroke:#ccc}}"""


def figures(result):
    """GB/s of the first load and the median of the later ones; or why there are none."""
    if "error" in result:
        return None, result["error"]
    if any(row.get("wrong") for row in result["loads"]):
        return None, "wrong bytes"
    rates = [row["bytes"] / row["seconds"] / 1e9 for row in result["loads"]]
    return (rates[0], statistics.median(rates[1:]) if rates[1:] else None), None


def limit(state, limits):
    """What no loader can be faster than, and its name: cold, a second disk reads as fast as it likes, so this one is a measure only."""
    if state == "cold":
        return limits.get("disk"), "O_DIRECT, " + limits.get("disk_by", "16 threads")
    return limits.get("copy_engine"), "copy engine"


def panel(state, top):
    """A panel's SVG, and its height."""
    rows = [(name, *figures(result)) for name, result in state["loaders"].items()]
    bound, bound_name = limit(state["state"], state["limits"])
    most = max([bound or 0] + [rate for _, rates, _ in rows if rates for rate in rates if rate])
    step = next((s for s in (0.5, 1, 2, 5, 10, 20, 50, 100) if most / s <= 7), 200)
    scale = (WIDTH - LEFT - RIGHT) / most
    bottom = top + TOP + len(rows) * (2 * BAR + GAP)
    out = [f'<text class="h" x="12" y="{top + 18}">{STATES[state["state"]]}, GB/s</text>']
    for i in range(int(most / step) + 1):
        x = LEFT + i * step * scale
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 6}" y2="{bottom - GAP + 4}"/>')
        out.append(f'<text class="l" x="{x:.1f}" y="{bottom + 8}" text-anchor="middle">{i * step:g}</text>')
    for i, (name, rates, why) in enumerate(rows):
        y = top + TOP + i * (2 * BAR + GAP)
        own = ' class="ours"' if name in ("program", "cufile", "onehop") else ""
        out.append(f'<g{own}><text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{NAMES[name]}</text>')
        if rates is None:
            out.append(f'<text class="l" x="{LEFT + 4}" y="{y + BAR + 4}">{html.escape(why[:70])}</text>')
        for j, (kind, rate) in enumerate(zip(("first", "again"), rates or ())):
            if rate is not None:
                at = y + j * BAR
                out.append(f'<rect class="{kind}" x="{LEFT}" y="{at}" width="{rate * scale:.1f}" height="{BAR - 1}"/>')
                out.append(f'<text class="v" x="{LEFT + rate * scale + 5:.1f}" y="{at + BAR - 2}">{rate:.1f}</text>')
        out.append("</g>")
    if bound:
        x = LEFT + bound * scale
        out.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 10}" y2="{bottom - GAP + 4}"/>')
        out.append(f'<text class="l" x="{min(x, WIDTH - 8):.1f}" y="{top + TOP - 14}" text-anchor="end">{bound_name} {bound:.1f}</text>')
    return out, bottom - top + FOOT


def draw(results):
    height, body = 8, []
    for state in results["states"]:
        more, taken = panel(state, height)
        body += more
        height += taken
    body.append(f'<text class="l" x="12" y="{height + 4}">light: first load in a fresh process; dark: the later ones; seconds from when CUDA is up</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 16}" width="{WIDTH}" height="{height + 16}" role="img">'
    return "\n".join([head, f"<title>Model loaders beside each other</title><style>{STYLE}</style>", *body, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        drawn = draw(json.load(file))
    with open(sys.argv[2], "w") as file:
        file.write(drawn)
