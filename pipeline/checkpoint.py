"""Checkpoints of a drafter: `step-000400/` with weights, optimizer, configuration, and `meta.json` written last.

A folder without a `meta.json` that fits its files does not exist, and no file is read before its checksum was compared.
Weights are the float32 masters under the names of released checkpoints. Saving costs the step one copy to the host; a
thread writes the rest.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.errors import BadInput, Failure
from data.manifest import crc32c, file_record, fingerprint, fsync_folder, read_json, understood, write_json
from pipeline.console import say
from pipeline.drafter import Drafter, DrafterConfig
from pipeline.tensor_file import save_tensors

WEIGHTS, OPTIMIZER, CONFIG, META = "drafter.safetensors", "optimizer.safetensors", "config.json", "meta.json"
FILES = (WEIGHTS, OPTIMIZER, CONFIG)
"""What `meta.json` records."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint."""

    step: int
    path: Path
    meta: dict[str, Any]

    @property
    def acceptance(self) -> float | None:
        """Acceptance length of its validation walk; None when it was saved without one."""
        validation = self.meta.get("validation")
        return None if validation is None else validation["acceptance"]

    @property
    def weights(self) -> str:
        """What identifies its weights: trainings of equal settings may differ in theirs."""
        return fingerprint(_record(self.meta, WEIGHTS))


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Complete checkpoints, oldest first. What is not complete is named and left out."""
    found = []
    for path in sorted(folder.glob("step-*")):
        meta = _meta(path)
        if meta is None:
            say(f"{path} is not a complete checkpoint: left out")
        else:
            found.append(CheckpointInfo(int(path.name.removeprefix("step-")), path, meta))
    return found


def _meta(path: Path) -> dict[str, Any] | None:
    if not re.fullmatch(r"step-\d{6,}", path.name) or not (path / META).is_file():
        return None
    try:
        with understood(path / META, ""):
            meta = read_json(path / META, "")
            sizes = {path / name: _record(meta, name)["bytes"] for name in FILES}
    except BadInput:
        return None
    return meta if all(file.is_file() and file.stat().st_size == size for file, size in sizes.items()) else None


def _record(meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {file["path"]: file for file in meta["files"]}[name]


def choose(folder: Path, which: str) -> list[CheckpointInfo]:
    """`best` (by validation acceptance; of equals the newest), `last`, `all` or `step-N`.

    Raises BadInput when there is none.
    """
    every = list_checkpoints(folder)
    if not every:
        raise BadInput(f"{folder}: no complete checkpoint: run `draftmill train` first")
    if which == "all":
        return every
    if which == "last":
        return every[-1:]
    if which == "best":
        return _by_acceptance(every)[-1:] or every[-1:]
    match = re.fullmatch(r"step-(\d+)", which)
    named = [info for info in every if match and info.step == int(match[1])]
    if not named:
        have = ", ".join(f"step-{info.step}" for info in every)
        raise BadInput(f"{folder}: no checkpoint `{which}`; there are best, last, all, {have}")
    return named


def _by_acceptance(every: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those that have a validation, the best last: of equals the newest, so that none depends on which are kept."""
    return sorted((info for info in every if info.acceptance is not None), key=lambda info: info.acceptance or 0.0)


def damage(path: Path, names: Sequence[str]) -> str:
    """The first of a checkpoint's files `names` that is not what its `meta.json` records; empty when all are."""
    meta = _meta(path)
    if meta is None:
        return f"{path} is not a complete checkpoint"
    for name in names:
        if crc32c(path / name) != _record(meta, name).get("crc32c"):
            return f"{path / name} has another crc32c than its {META} says"
    return ""


def require_sound(path: Path, *names: str) -> None:
    """Refuse a checkpoint of which one of the files `names` was changed.

    Raises BadInput naming the file.
    """
    if found := damage(path, names):
        raise BadInput(f"{found}: {_remedy(path)}")


def _remedy(path: Path) -> str:
    return (
        f"choose another with --checkpoint, or delete {path} to do with the others; once none is sound, "
        "`draftmill train` trains again"
    )


def load_config(path: Path) -> DrafterConfig:
    """A checkpoint's configuration.

    Raises BadInput when it is damaged.
    """
    require_sound(path, CONFIG)
    with understood(path / CONFIG, _remedy(path)):
        return DrafterConfig.from_record(read_json(path / CONFIG, _remedy(path)))


def load_drafter(path: Path, device: str | torch.device, dtype: torch.dtype) -> Drafter:
    """A checkpoint's drafter, ready to draft.

    Raises BadInput when a file is damaged, and when weights are missing, renamed or of other shapes.
    """
    with understood(path, _remedy(path)):
        drafter = Drafter(load_config(path))
    load_weights(drafter, read_weights(path), path / WEIGHTS)
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


def load_weights(drafter: Drafter, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy weights into a drafter; every name and shape must fit.

    Raises BadInput naming the first that does not.
    """
    own = dict(drafter.named_parameters())
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors or name not in own:
            raise BadInput(f"{source}: {'missing' if name in own else 'unexpected'} tensor `{name}`")
        if own[name].shape != tensors[name].shape:
            raise BadInput(
                f"{source}: `{name}` is {list(tensors[name].shape)}, this drafter needs {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint, float32.

    Raises BadInput when they are damaged.
    """
    require_sound(path, WEIGHTS)
    return read_tensors(path, WEIGHTS)


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a checkpoint's file, whose checksum was compared before: of all files it is gigabytes.

    Raises BadInput when they cannot be read.
    """
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise BadInput(f"{path / name}: not a whole safetensors file ({error}): {_remedy(path)}") from None


def newest_sound(folder: Path, names: Sequence[str]) -> CheckpointInfo | None:
    """Newest checkpoint whose files `names` are intact; damaged ones are named and passed over."""
    for info in reversed(list_checkpoints(folder)):
        if not (found := damage(info.path, names)):
            return info
        say(f"{found}: passed over")
    return None


def _to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def record_validation(info: CheckpointInfo, validation: Mapping[str, Any]) -> None:
    """Add the validation walk to a checkpoint that was saved without one."""
    write_json(info.path / META, {**info.meta, "validation": dict(validation)})


class CheckpointWriter:
    """Writes checkpoints of one drafter in a thread, one at a time, and keeps the newest and the best."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, step: int, config: DrafterConfig, weights: Mapping[str, Tensor], state: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Copy tensors to the host and hand them to the thread. Raises Failure when the save before went wrong."""
        self.wait(say_so=True)
        arguments = (step, config.record(), _to_host(weights), _to_host(state), dict(meta))
        self._thread = threading.Thread(target=self._guarded, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self, say_so: bool = False) -> None:
        """Wait for the save under way."""
        if self._thread is not None:
            start = time.monotonic()
            self._thread.join()
            waited = time.monotonic() - start
            if say_so and waited > 0.1:
                say(f"waited {waited:.1f} s for the checkpoint before to reach the disk")
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise Failure when a save went wrong; to be asked often, since what is trained on top of it may be lost."""
        if self._error is not None:
            raise Failure(
                f"{self.folder}: a checkpoint could not be written ({self._error}): see to the disk and run the same "
                "command again, it goes on from the checkpoint before"
            ) from self._error

    def _guarded(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:
            self._sweep()
            self._error = error

    def _sweep(self) -> None:
        """Free the disk of a save or a removal that did not come to its end."""
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, step: int, config: dict, weights: dict, state: dict, meta: dict) -> None:
        self._sweep()
        path = self.folder / f"step-{step:06d}"
        temporary = _temporary(path)
        temporary.mkdir(parents=True)
        save_tensors(weights, temporary / WEIGHTS)
        save_tensors(state, temporary / OPTIMIZER)
        (temporary / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        files = [temporary / name for name in FILES]
        for file in files:
            fsync_folder(file)  # a file's descriptor is synced the same way
        write_json(temporary / META, {**meta, "step": step, "files": [file_record(f, temporary) for f in files]})
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        fsync_folder(self.folder)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Keep the newest and the best up to `step`. Later ones were passed over as damaged: they count for nothing,
        and go when training has come past them."""
        every = [info for info in list_checkpoints(self.folder) if info.step <= step]
        kept = {info.step for info in [*every[-self.keep_last :], *_by_acceptance(every)[-self.keep_best :]]}
        for info in every:
            if info.step not in kept:
                info.path.rename(_temporary(info.path))
        self._sweep()


def _temporary(path: Path) -> Path:
    """What a checkpoint is called while it comes or goes."""
    return path.with_name(f".{path.name}.tmp")
