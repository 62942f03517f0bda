"""A comparison as one HTML file that needs nothing else: chart, heat maps, worst tokens, all stages."""

from collections.abc import Iterator, Sequence
from html import escape

from moonvit.trace.chart import stage_chart
from moonvit.trace.compare import Comparison, StageResult
from moonvit.trace.heatmap import heat_maps
from moonvit.trace.text import verdict

STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1c1c1a; --soft: #62625c;
  --line: #dededa; --good: #2f7d4f; --bad: #c2362b; --heat: #b3261e; --budget: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --page: #161615; --card: #20201e; --ink: #ecece8;
  --soft: #a3a39b; --line: #3a3a36; --good: #6cc490; --bad: #ff7d6e; --heat: #ff7d6e; --budget: #d9b53f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 18px;
  margin-top: 16px; overflow-x: auto; }
.verdict { font-weight: 600; border-left: 5px solid var(--good); padding-left: 12px; margin: 14px 0 0;
  overflow-wrap: anywhere; }
.verdict.bad { border-color: var(--bad); }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 12px 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, "DejaVu Sans", sans-serif; }
.maps { display: flex; flex-wrap: wrap; gap: 22px; } figure { margin: 0; }
figcaption { font-size: 13px; margin-bottom: 6px; }
"""


def comparison_page(comparison: Comparison) -> str:
    """The whole page; every word that comes from a dump is escaped."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{'agrees' if comparison.good else 'diverges'}: {escape(comparison.mine)}</title>",
            f"<style>{STYLE}</style></head><body><main>",
            *_head(comparison),
            *_section("Relative L2 error by stage", stage_chart(comparison)),
            *_section("Error over the picture's patches", heat_maps(comparison)),
            *_worst(comparison),
            *_stages(comparison),
            "</main></body></html>",
        ]
    )


def _head(comparison: Comparison) -> Iterator[str]:
    grids = ", ".join("x".join(map(str, grid)) for grid in comparison.grids[:8])
    facts = {
        "mine": comparison.mine,
        "reference": comparison.reference,
        "judged as": comparison.dtype,
        "order of patches": comparison.order,
        "grids (txhxw)": grids + (" …" if len(comparison.grids) > 8 else ""),
        "only in mine": ", ".join(comparison.only_mine[:12]),
        "only in reference": ", ".join(comparison.only_reference[:12]),
    }
    yield "<h1>Stages of the vision tower, compared</h1>"
    yield f'<p class="verdict{"" if comparison.good else " bad"}">{escape(verdict(comparison))}</p><dl>'
    for key, value in facts.items():
        if value:
            yield f"<dt>{key}</dt><dd>{escape(value)}</dd>"
    yield "</dl>"


def _section(title: str, content: str) -> Iterator[str]:
    if content:
        yield f"<section><h2>{escape(title)}</h2>{content}</section>"


def shown_stage(comparison: Comparison) -> StageResult | None:
    """The stage whose tokens are listed: the first diverging one, or else the one nearest its budget."""
    measured = [stage for stage in comparison.stages if stage.distance is not None]
    bad = [stage for stage in measured if not stage.good]
    return bad[0] if bad else max(measured, key=_use, default=None)


def _use(stage: StageResult) -> float:
    return stage.distance.relative_l2 / stage.allowed if stage.distance else 0.0


def _worst(comparison: Comparison) -> Iterator[str]:
    stage = shown_stage(comparison)
    if stage is None or not stage.worst:
        return
    rows = [
        [
            str(place.row),
            str(place.picture),
            ", ".join(map(str, place.at)) if place.at else "-",
            f"{place.error:.2e}",
            str(place.channel),
            f"{place.value:.6g}",
            f"{place.expected:.6g}",
        ]
        for place in stage.worst
    ]
    heads = ["token", "picture", "t, row, column", "relative error", "worst channel", "mine", "reference"]
    yield from _section(f"Worst tokens of {stage.name}", _table(heads, rows))


def _stages(comparison: Comparison) -> Iterator[str]:
    rows = []
    for stage in comparison.stages:
        mark = '<span class="good">within</span>' if stage.good else '<span class="bad">over</span>'
        d = stage.distance
        numbers = ["-"] * 4
        if d is not None:
            pcc = "-" if d.pcc is None else f"{d.pcc:.7f}"
            numbers = [f"{d.max_abs:.2e}", f"{d.relative_l2:.2e}", f"{1 - d.min_cosine:.1e}", pcc]
        name = escape(stage.name) + (f' <span class="soft">{escape(stage.note)}</span>' if stage.note else "")
        rows.append([name, *numbers, f"{stage.allowed:.1e}", mark])
    heads = ["stage", "max abs", "rel. L2", "1 - min cosine", "PCC", "allowed", "budget"]
    yield from _section("All stages", _table(heads, rows))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` are HTML already."""
    head = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
