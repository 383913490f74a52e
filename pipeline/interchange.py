"""Checkpoints that other programs load, and theirs read here.

An export is a folder: `model.safetensors` (names and shapes of released DFlash checkpoints, 11 x layers + 3 tensors),
`config.json`, a model card, and `draftmill.json`, the manifest, written last. The folder appears by one rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.errors import BadInput
from data.manifest import crc32c, file_record, fingerprint, publish, read_json, read_manifest, understood
from pipeline.checkpoint import FILES as TRAINED
from pipeline.drafter import Drafter, DrafterConfig
from pipeline.float8 import QUANTIZATION, SCALE, quantise, widen
from pipeline.interchange_config import LAYER, Form, TargetInfo, write_config
from pipeline.interchange_folder import MANIFEST, new_beside, put_in_place
from pipeline.interchange_reader import differences, read_config, target_from_config
from pipeline.tensor_file import save_tensors

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FLAT_SIGNS = ("model_type", "hidden_size", "dflash_config")
SPECULATORS_SIGNS = ("speculators_model_type", "speculators_config", LAYER)
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""The target's tensors that speculators keeps in its checkpoints: not the drafter's, left out."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: `tensors` as stored (dequantised to float32 where they were quantised), `raw` config.json,
    `manifest` of one of our exports or None."""

    path: Path
    config: DrafterConfig
    tensors: dict[str, Tensor]
    raw: dict[str, Any]
    manifest: dict[str, Any] | None

    @property
    def target(self) -> TargetInfo:
        """What the checkpoint says of its target; the name is empty when it does not say."""
        return target_from_config(self.raw, self.config)

    def drafter(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Drafter:
        """The module with these weights."""
        drafter = Drafter(self.config)
        drafter.load_state_dict(self.tensors, strict=True)
        return drafter.to(device, dtype).eval().requires_grad_(False)


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape, in the order of the file."""
    H, I, D = config.hidden_size, config.intermediate_size, config.head_dim  # noqa: E741
    A, G = config.num_heads * D, config.num_kv_heads * D
    layer = {
        "self_attn.q_proj": (A, H),
        "self_attn.k_proj": (G, H),
        "self_attn.v_proj": (G, H),
        "self_attn.o_proj": (H, A),
        "self_attn.q_norm": (D,),
        "self_attn.k_norm": (D,),
        "input_layernorm": (H,),
        "post_attention_layernorm": (H,),
        "mlp.gate_proj": (I, H),
        "mlp.up_proj": (I, H),
        "mlp.down_proj": (H, I),
    }
    shapes = {"fc.weight": (H, len(config.target_layer_ids) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Names, shapes and values: engines do not notice missing tensors, so nobody else will.

    Raises BadInput naming the first tensors that are missing, unexpected, of another shape or not finite.
    """
    shapes = tensor_shapes(config)
    for what, names in (("missing", shapes.keys() - tensors.keys()), ("unexpected", tensors.keys() - shapes.keys())):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
            raise BadInput(f"{where}: {len(names)} {what} tensor(s): {listed}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise BadInput(f"{where}: {name} has shape {list(tensors[name].shape)}, config.json means {list(shape)}")
        if not torch.isfinite(tensors[name]).all():
            raise BadInput(f"{where}: {name} holds values that are not finite")


def read_checkpoint(
    folder_or_hub_id: str | Path, num_target_layers: int | None = None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of a DFlash checkpoint: z-lab's, speculators' or one of our exports.

    `num_target_layers` is compared, or stands in where the form does not carry it (speculators). Raises BadInput.
    """
    checkpoint = open_checkpoint(folder_or_hub_id, num_target_layers)
    return checkpoint.config, checkpoint.tensors


def open_checkpoint(folder_or_hub_id: str | Path, num_target_layers: int | None = None) -> Checkpoint:
    """Read and check a checkpoint folder, or download one from the hub first. Raises BadInput."""
    folder = _locate(folder_or_hub_id)
    with understood(folder, "get the checkpoint again"):
        return _open(folder, num_target_layers)


def _open(folder: Path, num_target_layers: int | None) -> Checkpoint:
    if all((folder / name).exists() for name in TRAINED):
        raise BadInput(f"{folder} is a checkpoint of our own training: give what `draftmill export` makes of it")
    raw = read_json(folder / CONFIG, "a DFlash checkpoint has a config.json beside its weights")
    where = str(folder / CONFIG)
    manifest = read_manifest(folder / MANIFEST, "export") if (folder / MANIFEST).exists() else None
    if manifest is not None:
        _check_manifest(folder, raw, manifest)
        num_target_layers = num_target_layers or manifest["drafter"]["num_target_layers"]
    config = read_config(raw, where, num_target_layers)
    if all(any(key in raw for key in signs) for signs in (FLAT_SIGNS, SPECULATORS_SIGNS)):
        _check_union(raw, config, where)
    if (folder / "mask_embedding.pt").exists():
        raise BadInput(f"{folder}: `mask_embedding.pt` replaces the mask token's row, which is another design")
    stored = _read_tensors(folder)
    _check_dtype(raw, stored, where)
    tensors = _unfuse(widen(stored, raw, where), config)
    check_tensors(config, tensors, str(folder))
    return Checkpoint(folder, config, tensors, raw, manifest)


def write_union(
    folder: Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    target_info: TargetInfo,
    form: Form = "union",
    dtype: str = "bfloat16",
    quantize: str | None = None,
    card: str = "",
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write an export folder, whole or not at all; `folder` is replaced, whatever it holds (see `destination`).

    `quantize="fp8"` stores the layers' matrices as float8 (`pipeline/float8.py`). Raises BadInput when a rule of
    interchange is broken.
    """
    body = write_config(config, target_info, form, dtype)
    check_tensors(config, tensors, "this drafter")
    stored = {name: tensors[name].detach().to("cpu", DTYPES[dtype]).contiguous() for name in tensor_shapes(config)}
    if quantize == "fp8":
        stored, body["quantization_config"] = quantise(stored), QUANTIZATION
    temporary = new_beside(folder)
    save_tensors(stored, temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / CARD).write_text(card, encoding="utf-8")
    (temporary / CONFIG).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    for name in (WEIGHTS, CARD, CONFIG):
        _fsync(temporary / name)
    files = [file_record(temporary / name, temporary) for name in (WEIGHTS, CONFIG, CARD)]
    made = {"drafter": config.record(), "config": body, "files": files, **(provenance or {})}
    publish(temporary / MANIFEST, "export", {"fingerprint": fingerprint(made), **made})
    put_in_place(temporary, folder)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _locate(name: str | Path) -> Path:
    """A folder as it is; anything of the form `owner/name` from the hub's cache or the hub."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or str(name).count("/") != 1 or str(name).startswith((".", "/", "~")):
        raise BadInput(f"{name}: not a folder with a DFlash checkpoint")
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "mask_embedding.pt"]
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{name}: neither a folder here nor reachable on the hub ({reason})") from None


def _check_manifest(folder: Path, raw: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    remedy = f"export again, or delete {MANIFEST} to have the folder read like anybody's checkpoint"
    for line in differences(raw, manifest["config"]):
        raise BadInput(f"{folder / CONFIG}: {line} by {MANIFEST}: {remedy}")
    for record in manifest["files"]:
        if record["path"] != WEIGHTS:
            continue
        path = folder / WEIGHTS
        if not path.exists():
            raise BadInput(f"{path} does not exist: {remedy}")
        if path.stat().st_size != record["bytes"] or crc32c(path) != record["crc32c"]:
            raise BadInput(f"{path}: not the bytes that {MANIFEST} records: {remedy}")


def _check_union(raw: Mapping[str, Any], config: DrafterConfig, where: str) -> None:
    """A union says everything twice: rebuild it from what was read and compare key by key.

    Keys may be missing: saving a union again through transformers or speculators drops some that are said elsewhere.
    """
    want = write_config(config, target_from_config(raw, config), "union", raw.get("dtype", ""))
    for line in differences(raw, want, shared=True):
        raise BadInput(f"{where}: {line}")


def _check_dtype(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> None:
    """`dtype` (`torch_dtype` of old) is what the weights, scales of a quantised file aside, are stored in."""
    said = raw.get("dtype", raw.get("torch_dtype"))
    stored = {str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items() if not name.endswith(SCALE)}
    if "quantization_config" in raw:
        stored -= {"float8_e4m3fn"}
    if said is not None and stored != {said}:
        raise BadInput(f"{where}: `dtype` is {said!r} but the weights are {', '.join(sorted(stored))}")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index, "the index of the weights is damaged")["weight_map"].values()))
    else:
        names = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.exists():
            raise BadInput(f"{path} does not exist: weights are read from safetensors only")
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: not a whole safetensors file ({error})") from None
    for key in ("d2t", "t2d"):
        if key in tensors:
            raise BadInput(f"{folder / WEIGHTS}: tensor `{key}` maps a reduced vocabulary, which is not supported")
    return {name: tensor for name, tensor in tensors.items() if name not in TARGETS_OWN}


def _unfuse(tensors: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Split `qkv_proj` and `gate_up_proj`, as some trainers store them, into the parts that everybody loads."""
    A, G = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    I = config.intermediate_size  # noqa: E741
    parts = {
        "qkv_proj": (("q_proj", A), ("k_proj", G), ("v_proj", G)),
        "gate_up_proj": (("gate_proj", I), ("up_proj", I)),
    }
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        fused = next((key for key in parts if f".{key}." in name), None)
        sizes = [size for _, size in parts.get(fused, ())]
        if fused is None or tensor.shape[0] != sum(sizes):
            split[name] = tensor
            continue
        for (part, _), rows in zip(parts[fused], tensor.split(sizes), strict=True):
            split[name.replace(fused, part)] = rows.contiguous()
    return split
