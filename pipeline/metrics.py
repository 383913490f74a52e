"""Numbers of a training: `metrics.jsonl`, and what people and loggers (`pipeline/loggers.py`) see of its lines.

Rates of a line are those of its log interval, over all ranks: `context_tokens_per_s` counts tokens of rows that are
there for blocks to see, each once an epoch; `labels_per_s` counts what slots had to say, so that a token counts in
every block that holds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from data.manifest import write_bytes
from pipeline.batches import BatchShape
from pipeline.console import say
from pipeline.drafter import DrafterConfig
from pipeline.loggers import Training, open_loggers


def step_flops(config: DrafterConfig, shape: BatchShape, batches: int) -> float:
    """Floating-point operations of the matrix products of one optimizer step, attention left out.

    Two a multiply-add; three passes over trained weights (forward, input gradient, weight gradient), two over the
    frozen LM head. `fc` has no input gradient.
    """
    H, D = config.hidden_size, config.head_dim
    S, Q = shape.context, shape.blocks * shape.block_size
    block = H * D * config.num_heads * 2 + 3 * H * config.intermediate_size
    layers = config.num_layers * 3 * (Q * block + (S + Q) * 2 * H * D * config.num_kv_heads)
    fc = 2 * S * len(config.target_layer_ids) * H * H
    head = 2 * shape.blocks * (shape.block_size - 1) * H * config.vocab_size
    return 2.0 * batches * (layers + fc + head)


def told(line: Mapping[str, Any], walked: tuple[int, float] | None) -> str:
    """A line of metrics.jsonl for people; `walked`: step and acceptance length of the newest validation."""
    slots = " ".join(f"{100 * rate:.0f}" for rate in line["accuracy"])
    parts = [f"epoch {line['epoch'] + 1}", f"loss {line['loss']:.4f}", f"slots {slots} % right"]
    if walked is not None:
        parts.append(f"validation acceptance {walked[1]:.3f} at step {walked[0]}")
    parts += [
        f"{1e3 * line['seconds_per_step']:.1f} ms/step",
        f"{line['context_tokens_per_s']:,.0f} context tokens/s",
        f"{line['tflops']:.3g} TFLOP/s",
        f"waiting for data: {100 * line['wait_share']:.0f} %",
    ]
    if line["memory_gib"] is not None:
        parts.append(f"{line['memory_gib']:.1f} GiB")
    return ", ".join(parts)


class Metrics:
    """Appends lines to `path` and mirrors their scalars to the loggers, until the end of a `with`."""

    def __init__(self, path: Path, loggers: Sequence[str], training: Training, walks_again: bool = False) -> None:
        """What `path` holds after the step that training goes on from is dropped: it comes again, and so does the
        validation at that step when it `walks_again`."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.loggers = open_loggers(loggers, training)
        if path.exists():
            self._rewind(training.step, walks_again)
        self.file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()
        for logger in self.loggers:
            logger.close(failed=kind is not None)

    def _rewind(self, step: int, walks_again: bool) -> None:
        kept = []
        for line in filter(None, self.path.read_bytes().split(b"\n")):
            try:
                body = json.loads(line)
                at, walked = body["step"], "validation" in body
            except (ValueError, TypeError, KeyError):
                say(f"{self.path}: a torn line is dropped")
                continue
            if at < step or (at == step and not (walked and walks_again)):
                kept.append(line + b"\n")
        write_bytes(self.path, b"".join(kept))

    def write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        scalars = _scalars(line)
        for logger in self.loggers:
            logger.log(scalars, line["step"])


def _scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a line by a slash-separated name; lists count from slot 1."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            flat |= {f"{prefix}{name}/{i}": v for i, v in enumerate(value, start=1) if v is not None}
        elif value is not None and name != "step":
            flat[prefix + name] = float(value)
    return flat
