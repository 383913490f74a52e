"""Pictures of a run as SVG text: light and dark by the page's own colours, text as text, no scripts.

Matplotlib draws with stand-in colours, one for each role; `themed` turns them into CSS variables for the page, and
`plain` into fixed colours for a file that stands alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from pipeline.report import CacheFacts, DrafterStory, StageTime

ROLES = {  # stand-in: (CSS variable, colour on white)
    "#010101": ("--text", "#1f2328"),
    "#020202": ("--muted", "#6b7280"),
    "#030303": ("--grid", "#e3e6ea"),
    "#040404": ("--surface", "#ffffff"),
    "#110000": ("--s1", "#3b6fd4"),
    "#220000": ("--s2", "#e08214"),
    "#330000": ("--s3", "#2a9d74"),
    "#440000": ("--s4", "#b5489b"),
    "#550000": ("--s5", "#7a5cd0"),
    "#660000": ("--s6", "#c0504d"),
}
TEXT, MUTED, GRID, SURFACE, *SERIES = ROLES
WIDTH = 8.0
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "draftmill",
    "font.size": 9.5,
    "text.color": TEXT,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def themed(svg: str) -> str:
    """For inlining in the page: colours are the page's variables, the font is the page's."""
    for stand_in, (variable, _) in ROLES.items():
        svg = svg.replace(stand_in, f"var({variable})")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def plain(svg: str) -> str:
    """For a file of its own: fixed colours on white."""
    for stand_in, (_, colour) in ROLES.items():
        svg = svg.replace(stand_in, colour)
    return svg


@contextmanager
def _canvas(columns: int = 1, height: float = 2.7, salt: str = "") -> Any:
    with pyplot.rc_context({**STYLE, "svg.hashsalt": f"draftmill {salt}"}):
        figure, axes = pyplot.subplots(1, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False)
        try:
            yield figure, list(axes[0])
        finally:
            pyplot.close(figure)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # Sizes stay, the family is the reader's own.
    return re.sub(r"font: ([^;\"]*?)([\d.]+px)[^;\"]*", r"font-size: \2; font-family: inherit", buffer.getvalue())


def colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def curves(drafters: Sequence[DrafterStory]) -> str:
    """Loss, and the validation walk's acceptance, over steps."""
    with _canvas(2, salt="curves") as (figure, (left, right)):
        for index, drafter in enumerate(drafters):
            steps = [line["step"] for line in drafter.steps]
            losses, style = [line["loss"] for line in drafter.steps], _line(index, len(steps))
            left.plot(steps, losses, label=drafter.name, **style)
            walked = [(line["step"], line["validation"]["acceptance"]) for line in drafter.walks]
            if walked:
                right.plot(*zip(*walked, strict=True), color=colour(index), marker="o", markersize=3.5)
                best = drafter.trained["best"]["step"] if drafter.trained else None
                for step, value in walked:
                    if step == best:
                        right.annotate(f"{value:.2f}", (step, value), (0, 7), textcoords="offset points", ha="center")
                        right.plot([step], [value], "o", color=colour(index), markersize=7)
        left.set_title("Training loss")
        right.set_title("Tokens a pass, validation walk")
        for axes in (left, right):
            axes.set_xlabel("optimizer step")
            axes.margins(y=0.15)
            axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        _legend(left, len(drafters))
        return _svg(figure)


def _line(index: int, points: int) -> dict[str, Any]:
    """How a drafter's curve is drawn: with its points where they are few enough to be told apart."""
    return {"color": colour(index), "marker": "o" if points < 30 else "", "markersize": 3.5}


def slots(drafter: DrafterStory) -> str:
    """Per-slot rates: training accuracy, validation walk, and each benchmark as it is decoded, beside each other."""
    size = drafter.block_size or 2
    with _canvas(salt=f"slots {drafter.name}") as (figure, (axes,)):
        if drafter.steps:
            _rates(axes, drafter.steps[-1]["accuracy"], MUTED, "training accuracy (each slot by itself)", "--")
        if drafter.walk is not None:
            _rates(axes, drafter.walk["per_slot"], TEXT, "validation walk", "-")
        for index, (name, body) in enumerate(zip(names(drafter), drafter.evaluations, strict=True)):
            _rates(axes, body["per_slot"], colour(index), f"decoding {name}", "-")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0.7, size - 0.7)
        axes.set_xticks(range(1, size))
        axes.set_xlabel("slot (tokens after the anchor)")
        axes.set_title("Share of right drafts, given that the slots before were right")
        axes.legend(loc="best", fontsize=8.5, handlelength=1.6)
        return _svg(figure)


def _rates(axes: Axes, rates: Sequence[float | None], shade: str, label: str, line: str) -> None:
    known = [(slot, rate) for slot, rate in enumerate(rates, start=1) if rate is not None]
    if known:
        axes.plot(*zip(*known, strict=True), line, color=shade, label=label, marker="o", markersize=3.5)


def names(drafter: DrafterStory) -> list[str]:
    """The benchmarks of a drafter, with the checkpoint where several were measured."""
    checkpoints = {body["checkpoint"] for body in drafter.evaluations}
    return [
        f"{body['benchmark']} {body['checkpoint']}" if len(checkpoints) > 1 else body["benchmark"]
        for body in drafter.evaluations
    ]


def histogram(drafter: DrafterStory) -> str:
    """How many blocks gave 1, 2, ... B tokens, as a share, by benchmark."""
    bodies = drafter.evaluations
    size = max(len(body["histogram"]) for body in bodies) - 1
    with _canvas(salt=f"histogram {drafter.name}") as (figure, (axes,)):
        wide = 0.82 / len(bodies)
        for index, (name, body) in enumerate(zip(names(drafter), bodies, strict=True)):
            total = sum(body["histogram"]) or 1
            places = [length - 0.41 + (index + 0.5) * wide for length in range(1, len(body["histogram"]))]
            shares = [100 * count / total for count in body["histogram"][1:]]
            axes.bar(places, shares, wide * 0.92, color=colour(index), label=name)
        axes.set_xticks(range(1, size + 1))
        axes.set_xlabel("acceptance length of a block (bonus token counted)")
        axes.set_title("Share of blocks, %")
        _legend(axes, len(bodies))
        return _svg(figure)


def context(drafter: DrafterStory) -> str:
    """Acceptance by the context that a block starts from, a line a benchmark; dashed: the longest row of training."""
    buckets = max((body["by_context"] for body in drafter.evaluations), key=len)
    with _canvas(height=2.4, salt=f"context {drafter.name}") as (figure, (axes,)):
        for index, (name, body) in enumerate(zip(names(drafter), drafter.evaluations, strict=True)):
            known = [(place, found["pooled"]) for place, found in enumerate(body["by_context"]) if found["blocks"]]
            if known:
                axes.plot(*zip(*known, strict=True), color=colour(index), label=name, marker="o", markersize=3.5)
        lengths = {body["past_trained_length"]["tokens"] for body in drafter.evaluations if body["past_trained_length"]}
        for length in lengths:
            for place, found in enumerate(buckets):
                if found["from"] <= length < found["to"]:
                    at = place - 0.5 + (length - found["from"]) / (found["to"] - found["from"])
                    axes.axvline(at, color=MUTED, linestyle="--", linewidth=1.2)
                    where = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "bottom"}
                    axes.annotate(f"trained up to {length:,}", (at, 0), (5, 3), color=MUTED, fontsize=8.5, **where)
        axes.set_xlim(-0.5, len(buckets) - 0.5)
        axes.margins(y=0.15)
        axes.set_ylim(bottom=1)
        axes.set_xticks(range(len(buckets)), [f"{found['from']:,}-{found['to'] - 1:,}" for found in buckets])
        axes.set_xlabel("context states at the block's start")
        axes.set_title(f"Tokens a target pass, {drafter.name}")
        _legend(axes, len(drafter.evaluations))
        return _svg(figure)


def acceptance(drafters: Sequence[DrafterStory]) -> str:
    """Pooled acceptance with its interval, a row a benchmark, a colour a drafter."""
    benchmarks = list(dict.fromkeys(name for drafter in drafters for name in names(drafter)))
    rows = len(benchmarks) * len(drafters)
    with _canvas(height=0.8 + 0.28 * rows + 0.12 * len(benchmarks), salt="acceptance") as (figure, (axes,)):
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        for index, drafter in enumerate(drafters):
            for name, body in zip(names(drafter), drafter.evaluations, strict=True):
                pooled, row = body["pooled"], benchmarks.index(name)
                if pooled["value"] is None:
                    continue
                height = row + (index - (len(drafters) - 1) / 2) * 0.7 / len(drafters)
                axes.plot([pooled["low"], pooled["high"]], [height] * 2, color=colour(index), linewidth=2.4, alpha=0.55)
                axes.plot([pooled["value"]], [height], "o", color=colour(index), markersize=7, clip_on=False)
                where = (max(pooled["high"], pooled["value"]), height)
                axes.annotate(f"{pooled['value']:.2f}", where, (6, 0), textcoords="offset points", va="center")
        for index, drafter in enumerate(drafters):
            axes.plot([], [], "o", color=colour(index), label=drafter.name)
        axes.set_yticks(range(len(benchmarks)), benchmarks)
        axes.tick_params(axis="y", labelcolor=TEXT)
        axes.set_ylim(len(benchmarks) - 0.4, -0.6)
        axes.margins(x=0.12)
        axes.set_xlim(1, max(2.0, axes.get_xlim()[1]))
        axes.set_xlabel("tokens a target pass (1 is no gain)")
        _legend(axes, len(drafters))
        return _svg(figure)


def times(stages: Sequence[StageTime]) -> str:
    """Wall-clock span of each stage, and the work of all its jobs when that is more."""
    with _canvas(height=0.75 + 0.33 * len(stages), salt="times") as (figure, (axes,)):
        axes.grid(visible=False)
        axes.barh([stage.stage for stage in stages], [stage.span for stage in stages], 0.62, color=SERIES[0])
        for row, stage in enumerate(stages):
            jobs = f" ({len(stage.jobs)} jobs, {duration(stage.work)} of work)" if stage.work > 1.1 * stage.span else ""
            text = f"{duration(stage.span)}{jobs}" + (", unfinished" if stage.unfinished else "")
            axes.annotate(text, (stage.span, row), (5, 0), textcoords="offset points", va="center")
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", labelcolor=TEXT)
        axes.margins(x=0.45)
        return _svg(figure)


def throughput(drafters: Sequence[DrafterStory]) -> str:
    """Context tokens a second and the share of time that the device waited for data, over steps."""
    with _canvas(2, 2.3, "throughput") as (figure, (left, right)):
        for index, drafter in enumerate(drafters):
            steps = [line["step"] for line in drafter.steps]
            # Older runs did not count them: a gap.
            rates = [line.get("context_tokens_per_s", math.nan) for line in drafter.steps]
            style = _line(index, len(steps))
            left.plot(steps, rates, label=drafter.name, **style)
            right.plot(steps, [100 * line["wait_share"] for line in drafter.steps], **style)
        left.set_title("Context tokens a second")
        right.set_title("Waiting for data, % of time")
        left.yaxis.set_major_formatter(EngFormatter(sep=""))
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        _legend(left, len(drafters))
        return _svg(figure)


def codecs(cache: CacheFacts) -> str:
    """Size of this run's states under every codec; the one in use stands out."""
    sizes = dict(sorted(cache.codecs.items(), key=lambda item: -item[1]))
    with _canvas(height=0.75 + 0.33 * len(sizes), salt="codecs") as (figure, (axes,)):
        axes.grid(visible=False)
        shades = [SERIES[0] if name == cache.codec else GRID for name in sizes]
        axes.barh(list(sizes), list(sizes.values()), 0.62, color=shades)
        for row, (name, size) in enumerate(sizes.items()):
            used = " (this cache)" if name == cache.codec else ""
            axes.annotate(f"{amount(size)}{used}", (size, row), (5, 0), textcoords="offset points", va="center")
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", labelcolor=TEXT)
        axes.margins(x=0.25)
        return _svg(figure)


def _legend(axes: Axes, entries: int) -> None:
    """Above the axes, at the right: never over the data."""
    if entries > 1:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "borderaxespad": 0.0}
        axes.legend(**place, ncols=min(entries, 4), fontsize=8.5, handlelength=1.2, columnspacing=1.2)


def amount(count: float) -> str:
    """Bytes for people: `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: `41 s`, `3 min 20 s`, `25 min`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def pictures(
    drafters: Sequence[DrafterStory], cache: CacheFacts | None, stages: Sequence[StageTime]
) -> Mapping[str, str]:
    """Every picture that there is matter for, by file stem."""
    trained = [drafter for drafter in drafters if drafter.steps]
    measured = [drafter for drafter in drafters if drafter.evaluations]
    drawn: dict[str, str] = {}
    if measured:
        drawn["acceptance"] = acceptance(measured)
    if trained:
        drawn["curves"] = curves(trained)
        drawn["throughput"] = throughput(trained)
    for drafter in drafters:
        if drafter.block_size is not None and (drafter.steps or drafter.evaluations):
            drawn[f"slots-{drafter.name}"] = slots(drafter)
        if drafter.evaluations:
            drawn[f"histogram-{drafter.name}"] = histogram(drafter)
        if any(len(body["by_context"]) > 1 for body in drafter.evaluations):
            drawn[f"context-{drafter.name}"] = context(drafter)
    if stages:
        drawn["times"] = times(stages)
    if cache is not None:
        drawn["codecs"] = codecs(cache)
    return drawn
