"""Drafter weights in float8 (e4m3) for serving, in the `compressed-tensors` form: FP8 dynamic.

The layers' seven matrices get one scale an output row; activations are scaled a token at serving time. `fc` and the
norms stay as they are, because SGLang 0.5.23 reads `fc` as a plain layer and would take its bytes without the scale.
vLLM 0.33.0 runs quantised context projections through the layer (earlier ones multiplied the raw bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.errors import BadInput
from pipeline.drafter import Drafter, Linear

SCALE = "_scale"
"""`x.weight` is float8, `x.weight_scale` [rows, 1] its scale."""
LARGEST = 448.0
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["fc", "re:.*\\.fc$", "lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_NUMBER, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBER, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layers' matrices as float8 with a float32 scale [rows, 1] beside each; the rest as it was."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.split(".")[-2] not in MATRICES:
            stored[name] = tensor
            continue
        wide = tensor.float()
        scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        stored[name] = (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        stored[name + SCALE] = scale
    return stored


def widen(tensors: dict[str, Tensor], raw: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Undo `quantise`: float32 matrices, scales gone. Tensors that are not quantised pass.

    Raises BadInput for any other quantisation, by its key.
    """
    method = raw.get("quantization_config")
    if method is None:
        return tensors
    groups = method.get("config_groups") if isinstance(method, Mapping) else None
    if groups is None or any(tensor.dtype == torch.int32 for tensor in tensors.values()):
        raise BadInput(f"{where}: `quantization_config` of this kind is not read; only float8 compressed-tensors is")
    wide: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        if tensor.dtype == torch.float8_e4m3fn and name + SCALE not in tensors:
            raise BadInput(f"{where}: `{name}` is float8 but `{name + SCALE}` is missing")
        wide[name] = tensor.float() * tensors[name + SCALE].float() if name + SCALE in tensors else tensor
    return wide


def serve(drafter: Drafter) -> None:
    """Make the layers' products what a server computes: activations rounded to float8 with one scale a token."""
    for name, module in drafter.named_modules():
        if isinstance(module, Linear) and name.split(".")[-1] in MATRICES:
            module.product = _product


def _product(linear: Linear, x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(x.dtype).tiny)
    rounded = (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype)
    return F.linear(rounded * scale, linear.weight)
