"""The results of bench_peers.py as a Markdown table and a plot. As a script, it rewrites the docs."""

import json
import re
import textwrap
from html import escape
from pathlib import Path

DOCS = Path("docs/performance.md")
PLOT = Path("docs/peers.svg")
NAMES = {
    "ours": "this project",
    "hf_hook": "HF hook, stops",
    "hf_hook_sorted": "HF hook, documents sorted by length",
    "hf_hidden_states": "HF output_hidden_states",
    "transformer_lens_cache": "TransformerLens",
    "saelens_cache": "SAELens",
    "nnsight_trace": "nnsight",
}
BAR, GAP, LEFT, WIDTH = 16, 26, 250, 800


def write_table(result: dict) -> str:
    """One line per workload and tool; the ratio is this project's rate divided by the tool's."""
    lines = [
        "| | tool | tokens/s | all runs | ours / theirs | CPU s per 1000 tokens | peak, MiB | bytes per token "
        "| also stored | isolated | max difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, peers in result["workloads"].items():
        ours = peers.get("ours")
        for peer, measured in peers.items():
            runs = ", ".join(f"{rate:.0f}" for rate in sorted(measured["tokens_per_s_all"]))
            ratio = f"{_ratio(ours, measured):.2f}" if ours and peer != "ours" else ""
            difference = "other rows" if measured["difference"] is None else f"{measured['difference']:.1e}"
            lines.append(
                f"| {name} | {NAMES[peer]} | {measured['tokens_per_s']:.0f} | {runs} | {ratio} "
                f"| {measured['cpu_s_per_1000_tokens']:.2f} | {measured['peak_mib']} "
                f"| {measured['bytes_per_token']:.0f} | {measured['alignment']} | "
                f"{'yes' if measured['isolates'] else 'no'} "
                f"| {difference} |"
            )
    return "\n".join(lines)


def _ratio(ours: dict, theirs: dict) -> float:
    """The median over the repetitions, whose runs are close in time."""
    ratios = sorted(a / b for a, b in zip(ours["tokens_per_s_all"], theirs["tokens_per_s_all"], strict=True))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2


def plot(result: dict) -> str:
    """Draws bars for the medians and ticks for the runs. Every workload has its own scale."""
    parts, y = [], 10
    for name, peers in result["workloads"].items():
        most = max(max(measured["tokens_per_s_all"]) for measured in peers.values())
        scale = (WIDTH - LEFT - 70) / most
        y += GAP
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{name}, useful tokens/s</text>')
        for peer, measured in peers.items():
            y += BAR + 5
            end = LEFT + measured["tokens_per_s"] * scale
            fill = "#2f6db3" if peer == "ours" else "#9aa5b1"
            parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{escape(NAMES[peer])}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y - 12}" width="{end - LEFT:.1f}" height="{BAR}" fill="{fill}"/>')
            for rate in measured["tokens_per_s_all"]:
                x = LEFT + rate * scale
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 13}" y2="{y + 5}" stroke="#222"/>')
            furthest = LEFT + max(measured["tokens_per_s_all"]) * scale
            shared = "" if measured["isolates"] else " (documents mixed)"
            parts.append(f'<text x="{furthest + 6:.1f}" y="{y}">{measured["tokens_per_s"]:.0f}{shared}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    size = f'viewBox="0 0 {WIDTH} {y + 20}" width="{WIDTH}" height="{y + 20}"'
    background = '<rect width="100%" height="100%" fill="#fff" stroke="none"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


def write_docs(result: dict) -> None:
    """Writes the plot, and the table between its two marks in docs/performance.md."""
    PLOT.write_text(plot(result))
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    facts = (
        f"{machine['date']}, {machine['cores']} cores of {machine['processor']}, Python {machine['python']}, "
        f"{versions}; medians of {result['repetitions']}."
    )
    text = (
        f"<!-- bench-peers -->\n{textwrap.fill(facts, 119)}\n\n![tokens/s]({PLOT.name})\n\n"
        f"{write_table(result)}\n<!-- /bench-peers -->"
    )
    before = DOCS.read_text()
    after, count = re.subn(r"<!-- bench-peers -->.*<!-- /bench-peers -->", lambda _: text, before, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{DOCS} has {count} sections between <!-- bench-peers --> and <!-- /bench-peers -->")
    DOCS.write_text(after)


if __name__ == "__main__":
    write_docs(json.loads(Path("build/bench-peers.json").read_text()))
