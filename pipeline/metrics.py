"""Where numbers of a training go: `metrics.jsonl` always, TensorBoard, W&B and trackio when asked for and installed.

Rates of a line are those of its log interval, over all ranks: `context_tokens_per_s` counts tokens of rows that are
there for blocks to see, each once an epoch; `labels_per_s` counts what slots had to say, so that a token counts in
every block that holds it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import BadInput
from data.manifest import write_bytes
from pipeline.batches import BatchShape
from pipeline.console import say
from pipeline.drafter import DrafterConfig


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
    """Appends lines to `path` and mirrors scalars to the loggers."""

    def __init__(self, path: Path, loggers: Sequence[str], folder: Path) -> None:
        self.path, self.loggers, self.folder = path, loggers, folder
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sinks = [sink for name in loggers if (sink := _sink(name, folder)) is not None]
        self.file = path.open("a", encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Drop lines after `step`: a resumed run writes them again."""
        self.file.close()
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                body = json.loads(line)
            except ValueError:
                say(f"{self.path}: a torn line is dropped")
                continue
            if body["step"] <= step:
                kept.append(line + "\n")
        write_bytes(self.path, "".join(kept).encode())
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        scalars = _scalars(line)
        for sink in self.sinks:
            sink(scalars, line["step"])

    def close(self) -> None:
        self.file.close()


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


def _sink(name: str, folder: Path) -> Any:
    """A function (scalars, step), or None for TensorBoard where it is not installed."""
    module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    try:
        library = importlib.import_module(module)
    except ImportError:
        if name == "tensorboard":
            return None
        raise BadInput(f"train.loggers: `{name}` is not installed: pip install 'draftmill[{name}]'") from None
    if name == "tensorboard":
        writer = library.SummaryWriter(folder / "tensorboard")
        return lambda scalars, step: [writer.add_scalar(key, value, step) for key, value in scalars.items()]
    library.init(project="draftmill", name=folder.name)
    return lambda scalars, step: library.log(scalars, step=step)
