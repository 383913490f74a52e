"""What a run will take, before it runs: rows, tokens, bytes by stage and codec, memory, hours. Writes nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from data.layout import Layout
from data.manifest import read_manifest
from data.settings import Run, Train, load_run

if TYPE_CHECKING:
    from pipeline.forecast import Amounts, Model
    from pipeline.preparer import Kept, Preparer

SAMPLE = 256
"""Rows that are rendered to guess lengths when nothing is prepared."""


@click.command("plan")
@click.argument("run_file", type=click.Path())
def command(run_file: str) -> None:
    """Print rows, tokens, bytes, memory and hours of a run, before anything runs."""
    run = load_run(run_file)
    from pipeline.devices import describe
    from pipeline.forecast import Model

    config, tokenizer = described(run)
    model = Model.of(run, config)
    amounts = amounts_of(run)
    gpus = describe()
    for line in (*lines(run, model, amounts, [gpu.memory for gpu in gpus]), *drafters(run, config, tokenizer)):
        click.echo(line)


def described(run: Run) -> tuple[Any, Any]:
    """The target's configuration and tokenizer; of a hub model only their files are fetched."""
    from transformers import AutoConfig, AutoTokenizer

    from data.errors import BadInput
    from pipeline.target import load_config, load_tokenizer

    model = run.target.model
    if ":" in model or Path(model).expanduser().exists() or model.count("/") != 1:
        return load_config(run), load_tokenizer(run)
    where = {"revision": run.target.revision, "trust_remote_code": run.target.trust_remote_code}
    try:
        return AutoConfig.from_pretrained(model, **where).get_text_config(), AutoTokenizer.from_pretrained(
            model, **where
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"target.model: {model}: {' '.join(str(error).split())[:200]}") from None


def drafters(run: Run, config: Any, tokenizer: Any) -> Iterator[str]:
    """What contradicts the target, and what is said of the others' mask token and RoPE."""
    from data.errors import BadInput
    from pipeline.fitness import known_target, require_drafter

    known = known_target(run, config, tokenizer)
    for name in run.drafters:
        try:
            made = require_drafter(run, name, known)
        except BadInput as error:
            yield f"drafter   NOT possible: {error}"
            continue
        yield f"drafter   {name}: mask token {made.config.mask_token_id}, {made.mask_reason}"
        if made.rope_reason:
            yield f"drafter   {name}: {made.rope_reason}"


def amounts_of(run: Run) -> Amounts:
    """Counted from the token tables when all are there, else guessed from the first rows of the sources."""
    from data.tokens import read_tokens

    layout = Layout.of(run)
    parts = [layout.tokens(part) for part in range(run.extract.parts)]
    if all(path.exists() for path in parts):
        for path in parts:
            read_manifest(path, "tokens")
        tables = (read_tokens(path.with_suffix(".parquet")) for path in parts)
        rows = ((row.supervised, 1.0, float(not row.validation)) for table in tables for row in table)
        return count(run, rows, from_tokens=True)
    return count(run, guessed_rows(run), from_tokens=False)


def guessed_rows(run: Run) -> Iterator[tuple[Any, float, float]]:
    """Masks of token rows from the first rows of each source, how many rows of the whole each stands for, and which
    share of them is not held out. Rows that prepare will drop stand for their like."""
    from data.conversations import Rejected
    from data.sources import chunks, decode
    from pipeline.workers import start

    preparer = start(run, {})
    held_out = run.data.validation
    sources = (*run.data.train, *(held_out if isinstance(held_out, tuple) else ()))
    total: Counter[int] = Counter()
    looked: Counter[int] = Counter()
    sample: list[tuple[Any, int]] = []
    for chunk in chunks(sources, Layout.of(run).folder.parent / ".datasets"):
        at = chunk.source
        total[at] += len(chunk.rows)
        for raw in chunk.rows[: max(1, SAMPLE // len(sources)) - looked[at]]:
            looked[at] += 1
            try:
                row = preparer.row(decode(raw), sources[at].format)
            except Rejected:
                continue
            regenerated = run.data.responses == "regenerate"
            masks = [answered(row, preparer)] if regenerated else [piece.supervised for piece in row.pieces]
            sample += [(mask, at) for mask in masks]
    answers = run.data.regenerate.answers if run.data.responses == "regenerate" else 1
    share = 0.0 if isinstance(held_out, tuple) else held_out
    trained = [1.0 - share if at < len(run.data.train) else 0.0 for at in range(len(sources))]
    return ((mask, answers * total[at] / looked[at], trained[at]) for mask, at in sample)


def answered(row: Kept, preparer: Preparer) -> Any:
    """The mask that a row will have once all its questions are answered, at the length that answers are assumed to
    have."""
    import numpy as np

    from data.conversations import asked
    from pipeline.forecast import ANSWER_SHARE

    answer = round(ANSWER_SHARE * preparer.settings.regenerate.max_new_tokens)
    later = (sum(len(preparer.plain(turn["content"])) for turn in turns) for turns in asked(row.conversation)[1:])
    turns = [np.repeat([False, True], [asking, answer]) for asking in (row.prompt_tokens, *later)]
    return np.concatenate(turns)[: preparer.settings.max_length]


def count(run: Run, rows: Iterator[tuple[Any, float, float]], from_tokens: bool) -> Amounts:
    """Sums over `rows` of (supervised mask, how many rows it stands for, which share of them is not held out)."""
    from data.anchors import eligible
    from data.errors import BadInput
    from pipeline.forecast import Amounts

    seen = tokens = states = anchors = supervised = trained_states = 0.0
    longest = most_states = most_anchors = 0
    most = max(run.train_of(name).anchors_per_row for name in run.drafters)
    for mask, weight, trained in rows:
        found = eligible(mask)
        end = int(found[-1]) if len(found) else 0
        seen += weight
        tokens += weight * len(mask)
        supervised += weight * int(mask.sum())
        states += weight * end
        trained_states += weight * trained * end
        anchors += weight * trained * min(most, len(found))
        longest = max(longest, len(mask))
        most_states = max(most_states, end)
        most_anchors = max(most_anchors, len(found) if trained else 0)
    if not seen:
        raise BadInput("data.train: no usable row to plan with; run `draftmill prepare` to see why")
    sums = map(round, (seen, tokens, states, anchors, supervised))
    return Amounts(
        *sums,
        longest=longest,
        from_tokens=from_tokens,
        trained_states=round(trained_states),
        most_states=most_states,
        most_anchors=most_anchors,
    )


def lines(run: Run, model: Model, amounts: Amounts, gpu_memory: list[int]) -> Iterator[str]:
    """The report, line by line."""
    from data.codec import CODECS
    from pipeline import forecast
    from pipeline.console import size

    kind = "counted from the token tables" if amounts.from_tokens else f"estimated from at most {SAMPLE} rows"
    yield f"rows      {amounts.rows:,} ({kind}), {amounts.tokens:,} tokens, {amounts.supervised:,} supervised"
    yield (
        f"target    {millions(model.parameters)} parameters, layers {list(model.taps)} of "
        f"{model.config.num_hidden_layers}, width {model.config.hidden_size}"
    )
    yield f"states    {amounts.states:,} ({amounts.states / max(amounts.tokens, 1):.0%} of the tokens)"
    for name in CODECS:
        bytes_ = forecast.cache_bytes(amounts, model, name, run)
        mark = "  <- this run" if name == run.extract.codec else ""
        yield f"cache     {name:14} {size(bytes_):>10}, {bytes_ / max(amounts.tokens, 1):,.0f} bytes a token{mark}"
    yield f"tokens    {size(2.5 * amounts.tokens)}; head {size(forecast.head_bytes(model, run))}"
    checkpoints = 0
    for name, drafter in run.drafters.items():
        train = run.train_of(name)
        parameters = forecast.drafter_parameters(model, drafter)
        one = parameters * forecast.SAVED
        kept = one * (train.keep_last + train.keep_best + 1)
        checkpoints += kept
        yield (
            f"drafter   {name}: {millions(parameters)} parameters; checkpoints {size(one)} each, {size(kept)} kept "
            f"at once, {size(parameters * 4)} of host memory while one is written; export {size(parameters * 2)}"
        )
        yield from _batches(name, train, drafter.block_size, amounts)
    yield from _disk(run, forecast.cache_bytes(amounts, model, run.extract.codec, run) + checkpoints)
    yield from _memory(run, model, gpu_memory)
    assumed = f"{forecast.GPU_FLOPS / 1e12:.0f} TFLOP/s a GPU" if gpu_memory else "two CPU cores"
    for stage, spent in forecast.hours(amounts, model, run, bool(gpu_memory)).items():
        yield f"hours     {stage}: {spent:.2f} (assumed: {assumed}, disk never waited for)"


def millions(count: int) -> str:
    """`194208` -> `0.19 M`: two digits at least, whatever the model's size."""
    return f"{count / 1e6:,.{0 if count >= 1e7 else 1 if count >= 1e6 else 2}f} M"


def _batches(name: str, train: Train, block_size: int, amounts: Amounts) -> Iterator[str]:
    from data.errors import BadInput
    from pipeline import forecast
    from pipeline.batches import require_room

    batches, states, anchors = forecast.batches_per_epoch(amounts, train)
    most = "" if train.max_steps is None else f", at most {train.max_steps:,} in all"
    yield (
        f"batches   {name}: {batches:,.0f} an epoch, {train.epochs} epochs of "
        f"{batches / train.batches_per_step:,.0f} steps{most}; context {states:.0%} full, "
        f"anchor slots {anchors:.0%} full"
    )
    try:
        require_room(train, block_size, amounts.most_states, amounts.most_anchors)
    except BadInput as error:
        yield f"batches   {name}: NOT possible: {error}"


def _disk(run: Run, need: int) -> Iterator[str]:
    from pipeline.console import size

    folder = run.folder
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    where = f"{run.extract.store} and {folder}" if run.extract.store else str(folder.resolve())
    verdict = "enough" if need < free else "NOT enough: choose a smaller codec, fewer checkpoints or another root"
    yield f"disk      {size(need)} wanted in all, {size(free)} free in {where}: {verdict}"


def _memory(run: Run, model: Model, gpu_memory: list[int]) -> Iterator[str]:
    from pipeline import forecast
    from pipeline.console import size

    device, ring = forecast.extract_memory(model, run)
    have = f"; GPUs here: {', '.join(size(memory) for memory in gpu_memory)}" if gpu_memory else "; no GPU here"
    each = f" over {run.target.gpus} GPUs" if run.target.gpus > 1 else ""
    yield f"memory    extract {size(device)}{each} on the device, {size(ring)} of pinned host memory{have}"
    for name, drafter in run.drafters.items():
        need = forecast.train_memory(model, drafter, run.train_of(name))
        yield f"memory    train {name}: {size(need)} on each device"
