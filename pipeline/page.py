"""The report page: one HTML file with everything in it, readable offline, in light and dark, and on paper."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from pipeline.figures import amount, duration, names
from pipeline.page_data import data_section
from pipeline.page_parts import code, figure, share, table
from pipeline.page_style import STYLE
from pipeline.report import Body, DrafterStory, Story

OPEN = 3
"""Groups of generations that are shown without a click."""
Section = tuple[str, str, str]
"""Anchor, title, body."""


def render(story: Story, pictures: Mapping[str, str]) -> str:
    """The whole page; `pictures` are raw SVG texts of `pipeline/figures.py` by stem."""
    sections = [section for section in _sections(story, pictures) if section[2]]
    body = "".join(f'<h2 id="{anchor}">{escape(title)}</h2>{content}' for anchor, title, content in sections)
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title, _ in sections)
    name = escape(story.run.name)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: draftmill report</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{name}</h1><p class="sub">{_subtitle(story)}</p>{_tiles(story)}<nav>{links}</nav>{body}'
        "</main></body></html>\n"
    )


def _subtitle(story: Story) -> str:
    run = story.run
    what = "drafter" if len(run.drafters) == 1 else "drafters"
    names = ", ".join(escape(name) for name in run.drafters)
    return f"DFlash {what} <b>{names}</b> for <code>{escape(run.target.model)}</code>"


def _sections(story: Story, pictures: Mapping[str, str]) -> Iterable[Section]:
    everyone = [*story.drafters, *story.others]
    yield "stale", "Out of date", _lines(story, story.stale)
    yield "acceptance", "Acceptance", _acceptance(story, everyone, pictures)
    yield "slots", "Slot by slot", "".join(_slots(drafter, pictures) for drafter in everyone)
    yield "context", "Context length", _context(everyone, pictures)
    yield "training", "Training", _training(story, pictures)
    yield "speed", "Speed", _speed(everyone) + _servers(story)
    yield "time", "Time", figure(pictures, "times") + _jobs(story)
    yield "data", "Data and cache", data_section(story, pictures)
    yield "examples", "Generations", _examples(everyone)
    yield "settings", "Settings and fingerprints", _settings(story)
    yield "missing", "Not in this report", _lines(story, story.missing)


def _tiles(story: Story) -> str:
    """The few numbers that people ask for first."""
    tiles: list[tuple[str, str]] = []
    bodies = [body for drafter in story.drafters for body in drafter.evaluations if body["pooled"]["value"]]
    if bodies:
        best = max(bodies, key=lambda body: body["pooled"]["value"])
        tiles.append((f"{best['pooled']['value']:.2f}", f"tokens a target pass, {_of(best)}"))
        speeds = [(speed["speedup"], body, speed) for body in bodies for speed in body["speed"] if speed["speedup"]]
        if speeds:
            value, body, speed = max(speeds, key=lambda item: (item[2]["batch_size"] == 1, item[0]))
            tiles.append((f"{value:.2f}x", f"plain decoding, batch {speed['batch_size']}, {_of(body)}"))
        checked = [body["lossless"] for body in bodies if body["lossless"]]
        if checked:
            same, whole = (sum(verdict[key] for verdict in checked) for key in ("exact", "checked"))
            ties = sum(verdict["tie_count"] for verdict in checked)
            note = "answers equal plain decoding's" + (f"; {ties} ties of rounding" if ties else "")
            tiles.append((f"{same}/{whole}", note))
    else:
        walks = [(drafter.walk["acceptance"], drafter.name) for drafter in story.drafters if drafter.walk]
        if walks:
            value, name = max(walks)
            tiles.append((f"{value:.2f}", f"tokens a pass on held-out rows, {escape(name)}"))
    if story.cache is not None:
        tiles.append((amount(story.cache.counts["bytes"]), f"cache of {story.cache.counts['states']:,} states"))
    if story.times:
        tiles.append((duration(sum(time.span for time in story.times)), "in all stages together"))
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{note}</span></div>' for value, note in tiles)
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _of(body: Body) -> str:
    return escape(f"{body['drafter']} on {body['benchmark']}")


def _lines(story: Story, lines: Iterable[str]) -> str:
    folder = f"{story.run.folder}/"
    items = "".join(f"<li>{escape(line.replace(folder, ''))}</li>" for line in lines)
    return f'<ul class="note">{items}</ul>' if items else ""


def _acceptance(story: Story, everyone: list[DrafterStory], pictures: Mapping[str, str]) -> str:
    rows = []
    for drafter in everyone:
        for name, body in zip(names(drafter), drafter.evaluations, strict=True):
            checked = body["lossless"]
            exact = f"{checked['exact']}/{checked['checked']}" if checked else "-"
            rows.append([
                escape(name),
                escape(drafter.name),
                _interval(body["pooled"]),
                _interval(body["per_response"]),
                body["block_size"],
                body["prompts"],
                f"{body['blocks']:,}",
                exact + (f" (+{checked['tie_count']} ties)" if checked and checked["tie_count"] else ""),
            ])  # fmt: skip
    if not rows:
        return ""
    note = (
        "<p>New tokens that one pass of the target yields: accepted drafts and the bonus token, cut after a stop. "
        "Pooled over all blocks; <i>per response</i> averages each answer's own mean. Intervals are 95 %, bootstrapped "
        "over prompts. <i>Exact</i> counts drafted answers that equal plain decoding token for token.</p>"
    )
    head = ("benchmark", "drafter", "pooled", "per response", "block", "prompts", "blocks", "exact")
    warnings = [text for drafter in everyone for body in drafter.evaluations for text in body["warnings"]]
    told = "".join(f'<p class="warn">{escape(text)}</p>' for text in dict.fromkeys(warnings))
    return note + figure(pictures, "acceptance") + table(head, rows, right=(4, 5, 6)) + told


def _interval(body: Mapping[str, Any]) -> str:
    if body["value"] is None:
        return "-"
    return f'<b>{body["value"]:.2f}</b> <span class="note">{body["low"]:.2f} to {body["high"]:.2f}</span>'


def _slots(drafter: DrafterStory, pictures: Mapping[str, str]) -> str:
    shown = figure(pictures, f"slots-{drafter.name}") + figure(pictures, f"histogram-{drafter.name}")
    if not shown:
        return ""
    gaps = [gap for body in drafter.evaluations if body.get("validation") for gap in body["validation"]["gaps"]]
    note = (
        "" if not gaps else '<p class="warn">Decoding lies further below the validation walk than chance explains.</p>'
    )
    return f"<h3>{escape(drafter.name)}</h3>{shown}{note}"


def _context(everyone: list[DrafterStory], pictures: Mapping[str, str]) -> str:
    """How far acceptance holds as the text grows, and how much of a benchmark lies where training has not been."""
    evaluations = [
        (name, drafter.name, body)
        for drafter in everyone
        for name, body in zip(names(drafter), drafter.evaluations, strict=True)
    ]
    if not evaluations:
        return ""
    buckets = max((body["by_context"] for _, _, body in evaluations), key=len)
    rows = []
    for name, drafter, body in evaluations:
        found = [_bucket(bucket) for bucket in body["by_context"]]
        rows.append([escape(name), escape(drafter), *found, *["-"] * (len(buckets) - len(found))])
    head = ("benchmark", "drafter", *(f"{bucket['from']:,} to {bucket['to'] - 1:,}" for bucket in buckets))
    note = (
        "<p>Tokens a target pass by the number of context states that a block starts from, blocks in grey. Acceptance "
        "that falls along a row says that long texts are served worse than short ones.</p>"
    )
    figures = "".join(figure(pictures, f"context-{drafter.name}") for drafter in everyone)
    return note + figures + table(head, rows, right=range(2, len(head))) + _past(evaluations)


def _bucket(bucket: Body) -> str:
    if bucket["pooled"] is None:
        return "-"
    return f'<b>{bucket["pooled"]:.2f}</b> <span class="note">{bucket["blocks"]:,}</span>'


def _past(evaluations: list[tuple[str, str, Body]]) -> str:
    """What was decoded past the longest row that a drafter was trained on; nothing for drafters of unknown training."""
    rows = [
        [
            escape(name),
            escape(drafter),
            f"{past['tokens']:,}",
            *(share(past[f"{what}_share"]) for what in ("prompts", "responses", "blocks")),
        ]
        for name, drafter, body in evaluations
        if (past := body["past_trained_length"]) is not None
    ]
    if not rows:
        return ""
    head = ("benchmark", "drafter", "trained up to", "prompts past it", "answers", "blocks")
    note = (
        '<h3>Past the trained length</h3><p class="note">Shares that lie past the longest row of training, in tokens: '
        "nothing there was learned, so a large share makes the benchmark a test of something else.</p>"
    )
    return note + table(head, rows, right=range(2, 6))


def _training(story: Story, pictures: Mapping[str, str]) -> str:
    rows = []
    for drafter in story.drafters:
        if drafter.trained is None:
            continue
        made, last = drafter.trained, drafter.steps[-1] if drafter.steps else {}
        walk = drafter.walk
        rows.append([
            escape(drafter.name),
            made["steps"],
            made["best"]["step"],
            f"{walk['acceptance']:.2f}" if walk else "-",
            f"{last['loss']:.3f}" if last else "-",
            f"{1e3 * last['seconds_per_step']:.0f} ms" if last else "-",
            f"{last['context_tokens_per_s']:,.0f}" if "context_tokens_per_s" in last else "-",
            f"{last['tflops']:.3g}" if last else "-",
            f"{last['memory_gib']:.1f} GiB" if last and last["memory_gib"] is not None else "-",
            f"{made['rows']['train']:,} / {made['rows']['validation']:,}",
        ])  # fmt: skip
    head = ("drafter", "steps", "best step", "walk", "last loss", "a step", "context tokens/s", "TFLOP/s", "GPU memory")
    head += ("rows trained / held out",)
    shown = figure(pictures, "curves") + figure(pictures, "throughput")
    return shown + (table(head, rows, right=range(1, 10)) if rows else "")


def _speed(everyone: list[DrafterStory]) -> str:
    rows = [
        [
            escape(name),
            escape(drafter.name),
            speed["batch_size"],
            speed["prompts"],
            f"{speed['plain']['tokens_per_s'] or 0:,.0f}",
            f"{speed['drafted']['tokens_per_s'] or 0:,.0f}",
            f"<b>{speed['speedup']:.2f}x</b>" if speed["speedup"] else "-",
        ]
        for drafter in everyone
        for name, body in zip(names(drafter), drafter.evaluations, strict=True)
        for speed in body.get("speed", ())
    ]
    if not rows:
        return ""
    note = "<p>Wall clock, the same engine with and without the drafter, in one process.</p>"
    head = ("benchmark", "drafter", "batch", "prompts", "plain tokens/s", "drafted tokens/s", "speedup")
    return note + table(head, rows, right=range(2, 7))


def _servers(story: Story) -> str:
    """What servers said of themselves over the same prompts."""
    rows = [
        [
            escape(body["benchmark"]),
            escape(f"{body['model']} at {body['server']}"),
            f"<b>{body['served']['acceptance']:.2f}</b>" if body["served"] else "not told",
            body["concurrency"],
            f"{body['tokens_per_s']:,.0f}",
        ]
        for body in story.servers
    ]
    head = ("benchmark", "server", "acceptance", "at once", "tokens/s")
    return "<h3>Served</h3>" + table(head, rows, right=(2, 3, 4)) if rows else ""


def _jobs(story: Story) -> str:
    """Every job: a part or a drafter each."""
    rows = [
        [
            escape(f"{stage.stage} {job.label}"),
            duration(job.seconds),
            job.attempt,
            escape(job.status),
            escape("; ".join(text for text in (job.rate, job.note) if text)),
        ]
        for stage in story.times
        for job in stage.jobs
    ]
    if not rows:
        return ""
    jobs = table(("job", "took", "attempt", "ended", "last rate"), rows, right=(1, 2))
    return f"<details><summary>{len(rows)} jobs</summary>{jobs}</details>"


def _examples(everyone: list[DrafterStory]) -> str:
    talks = [
        f"<h3>{escape(drafter.name)} on {escape(name)}</h3>{''.join(map(_talk, examples))}"
        for drafter in everyone
        for name, body in zip(names(drafter), drafter.evaluations, strict=True)
        if (examples := (body.get("examples") or [])[:2])
    ]
    if not talks:
        return ""
    legend = (
        '<div class="legend"><span><i class="a">accepted</i> <i class="a2">drafts</i> shaded block by block</span>'
        '<span><i class="b">bonus</i> the target&#39;s own token, one a block</span>'
        '<span><i class="f">first</i> from reading the prompt</span></div>'
    )
    more = "".join(talks[OPEN:])
    rest = f"<details><summary>{len(talks[OPEN:])} more</summary>{more}</details>" if more else ""
    return legend + "".join(talks[:OPEN]) + rest


def _talk(example: Body) -> str:
    kinds = {"bonus": "b", "first": "f"}
    spans = "".join(
        f'<span class="{kinds.get(span["kind"], "a2" if span["block"] % 2 else "a")}">{escape(span["text"])}</span>'
        for span in example["spans"]
    )
    lengths = [block["length"] for block in example["blocks"]]
    mean = f"{sum(lengths) / len(lengths):.2f} tokens a pass over {len(lengths)} blocks" if lengths else "no block"
    prompt = escape(example["prompt"].strip())
    answer = f'<div class="answer">{spans}</div><p class="note">{mean}</p>'
    return f'<div class="talk"><p class="prompt">{prompt}</p>{answer}</div>'


def _settings(story: Story) -> str:
    rows: list[list[str]] = []
    if story.cache is not None:
        rows.append(["cache, part 0", code(story.cache.manifest["fingerprint"])])
        rows.append(["target", code(_brief(story.cache.manifest["target"]))])
        rows.append(["template", code(_brief(story.cache.manifest["template"]))])
    for drafter in story.drafters:
        if drafter.trained is not None:
            mask = drafter.trained["mask_token"]
            rows.append([f"drafter {escape(drafter.name)}", code(drafter.trained["fingerprint"])])
            rows.append(["mask token", f"{mask['id']} ({escape(str(mask['reason']))})"])
        if drafter.exported is not None:
            rows.append([f"export {escape(drafter.name)}", code(drafter.exported["fingerprint"])])
        for body in drafter.evaluations[:1]:
            record = body["record"]
            versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
            rows.append(["measured on", escape(f"{record['device']}, {record['dtype']}; {versions}")])
    whole = json.dumps(
        story.run.model_dump(mode="json", by_alias=True, exclude_unset=True), indent=2, ensure_ascii=False
    )
    shown = table(("what", "value"), rows) if rows else ""
    return f"{shown}<details><summary>The run file</summary><pre>{escape(whole)}</pre></details>"


def _brief(body: Mapping[str, Any]) -> str:
    """The short entries of a record, as text."""
    return ", ".join(f"{key} {value}" for key, value in body.items() if isinstance(value, str) and len(value) <= 80)
