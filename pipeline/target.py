"""The target: a Hugging Face causal LM whose decoder layers are tapped from outside.

Layer id i is the output of decoder layer i, `hidden_states[i + 1]`; the last layer is refused as a tap, because
libraries disagree on whether its state is normed. Nothing here knows a model family: layers are found as the list of
`num_hidden_layers` modules, taps are forward hooks, and what the head does to a state is measured, not looked up.

Shapes: B rows, T tokens (right-padded; causal targets need no padding mask), K taps, H width, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, masking_utils

from data.errors import BadInput, Failure
from data.settings import Run
from pipeline.head import TargetHead
from pipeline.mask_token import mask_record
from pipeline.weights import resolve_target as resolve_target
from pipeline.weights import target_record as target_record

PROBE = 16
"""Tokens of the forward pass that measures the head."""


def tap_layers(layers: Literal["auto"] | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer ids to tap of a target with `num_layers` layers.

    `auto` is five, `round(1 + j (N - 4) / 4)` with half to even, fewer when they coincide.

    Raises BadInput for the last layer or one beyond it.
    """
    if layers == "auto":
        ids = sorted({round(1 + j * (num_layers - 4) / 4) for j in range(5)})
        return tuple(i for i in ids if 0 <= i <= num_layers - 2) or (num_layers // 2,)
    wrong = [i for i in layers if not 0 <= i <= num_layers - 2]
    if wrong:
        raise BadInput(
            f"extract.layers: {wrong} out of range: the target has {num_layers} layers, ids go from 0 to "
            f"{num_layers - 2} (the last layer, {num_layers - 1}, cannot be tapped)"
        )
    return tuple(layers)


def model_record(run: Run, config: Any, tokenizer: PreTrainedTokenizerBase, embedding_rows: int) -> dict[str, Any]:
    """What drafters take from the target besides states and head: the sizes of its layers, and its mask tokens.

    Raises BadInput when its configuration does not tell.
    """
    try:
        sizes = _sizes(config)
    except AttributeError as error:
        raise BadInput(f"target.model: {run.target.model}: {error}: not supported") from None
    return {
        "name": run.target.model,
        "architectures": list(getattr(config, "architectures", None) or []),
        **sizes,
        "mask": mask_record(tokenizer, embedding_rows),
    }


def _sizes(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "rope_theta": float(_rope(config).get("rope_theta", 10000.0)),
        "max_position_embeddings": config.max_position_embeddings,
    }


def rope_scaling(config: Any) -> dict[str, Any] | None:
    """How a target scales RoPE in its full layers, in Hugging Face's form; None when it does not.

    A drafter turns whole heads, whatever share of a head the target turns.
    """
    apart = ("rope_theta", "partial_rotary_factor", "type")
    body = {name: value for name, value in _rope(config).items() if name not in apart and value is not None}
    return None if body.get("rope_type", "default") == "default" else body


def rope_turn(config: Any) -> int | None:
    """Length beyond which RoPE turns heads otherwise, for all rows of the forward pass that a longer one is in."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return config.max_position_embeddings if rope.get("rope_type") == "dynamic" else None


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def load_tokenizer(run: Run) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises BadInput when its folder has none.
    """
    folder = resolve_target(run)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=run.target.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder}: no usable tokenizer: {' '.join(str(error).split())[:200]}") from None


def load_config(run: Run) -> Any:
    """The text part of the target's configuration (`get_text_config()`), without loading weights."""
    folder = resolve_target(run)
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=run.target.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder}: no usable config.json: {' '.join(str(error).split())[:200]}") from None
    return config.get_text_config()


def load_target(run: Run, device: str, dtype: torch.dtype | None = None) -> Target:
    """The run's target, in evaluation mode, on `device` (on `target.gpus` devices when there are more than one).

    Raises BadInput when transformers cannot load it as a causal LM, Failure when it does not fit.
    """
    folder = resolve_target(run)
    settings = run.target
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype or getattr(torch, settings.dtype),
                device_map=_device_map(device, settings.gpus),
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = " ".join(str(error).split())[:300]
        raise BadInput(f"{folder}: transformers cannot load this as a causal LM: {text}") from None
    except torch.OutOfMemoryError:
        raise _too_large(settings.gpus) from None
    if any(weight.is_meta for weight in model.parameters()):  # left in the host's memory, to be fetched for every batch
        raise _too_large(settings.gpus)
    return Target(model, load_tokenizer(run), device)


def _too_large(gpus: int) -> Failure:
    return Failure(
        f"target.gpus: the target is too large for what is free of {gpus} GPU{'s' * (gpus > 1)}: raise it, or free them"
    )


def _device_map(device: str, gpus: int) -> dict[str, str] | str:
    if gpus == 1 or device == "cpu":
        return {"": device}
    if torch.cuda.device_count() < gpus:
        raise BadInput(f"target.gpus is {gpus}, but this job sees {torch.cuda.device_count()} GPUs")
    return "balanced"


class Target:
    """A causal LM in evaluation mode, without gradients."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, device: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.config = model.config.get_text_config()
        self.stack, self.layers_name = find_stack(model, self.config.num_hidden_layers)
        for layer in self.decoder_layers():
            _unhook_inside(layer)
        self.layers: int = self.config.num_hidden_layers
        self.width: int = self.config.hidden_size
        self.vocab: int = model.get_input_embeddings().weight.shape[0]
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self._head: TargetHead | None = None

    def decoder_layers(self) -> nn.ModuleList:
        return self.stack.get_submodule(self.layers_name)

    @torch.inference_mode()
    def tap(self, input_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """States [B, T, K, H] after `layer_ids` of right-padded ids [B, T]; layers above the last are not run."""
        with Taps(self, layer_ids) as taps:
            return torch.stack(taps(input_ids), 2)

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of a full forward pass."""
        return self.model(input_ids=input_ids.to(self.device), use_cache=False).logits

    @torch.inference_mode()
    def last_hidden(self, input_ids: Tensor) -> Tensor:
        """Post-norm states [B, T, H] of a full forward pass: what the LM head reads."""
        return self.stack(input_ids=input_ids.to(self.device), use_cache=False).last_hidden_state

    def head(self) -> TargetHead:
        """Embedding and LM head, with the scales and soft-cap that this model applies (measured once, on a few tokens).

        Raises BadInput when the embedding is not a scaled look-up or the head is not a linear map.
        """
        if self._head is not None:
            return self._head
        embedding, lm_head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            raise BadInput(f"target: its LM head is a {type(lm_head).__name__}, not a linear map: not supported")
        weight = embedding.weight.data
        tied = lm_head.weight.data_ptr() == weight.data_ptr()
        bias = None if lm_head.bias is None else lm_head.bias.data
        self._head = _measured(self, TargetHead(weight, weight if tied else lm_head.weight.data, bias))
        return self._head


class Taps:
    """A target cut after its last tap. Called with ids [B, T], it gives one [B, T, H] tensor a tap.

    The cut shares the target's modules. Hooks live until `close` (or the end of a `with` block). With `whole` all
    layers run, and `last` holds the post-norm last hidden state [B, T, H] of the newest call.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], whole: bool = False) -> None:
        self.device = target.device
        self.layer_ids = tap_layers(tuple(layer_ids), target.layers)
        self.last: Tensor | None = None
        self.caught: dict[int, Tensor] = {}
        layers = target.decoder_layers()
        depth = len(layers) if whole else self.layer_ids[-1] + 1
        self.whole, self.layers = whole, list(layers)[:depth]
        self.stack = target.stack if whole else truncated(target.stack, target.layers_name, depth)
        self.handles = [layers[i].register_forward_hook(self._catcher(i)) for i in self.layer_ids]

    def __enter__(self) -> Taps:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _catcher(self, layer: int) -> Any:
        def catch(module: nn.Module, arguments: Any, output: Any) -> None:
            self.caught[layer] = output[0] if isinstance(output, tuple) else output

        return catch

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor) -> list[Tensor]:
        self.caught.clear()
        with one_document_a_row():
            output = self.stack(input_ids=input_ids.to(self.device), use_cache=False)
        if self.whole:
            self.last = output.last_hidden_state.to(self.device)
        return [self.caught.pop(i).to(self.device) for i in self.layer_ids]


def find_stack(model: nn.Module, layers: int) -> tuple[nn.Module, str]:
    """The module that embeds tokens, runs the decoder layers and norms, and the name of its list of layers.

    Raises BadInput when the model has no such list.
    """
    decoder = model.get_decoder()
    for name, child in decoder.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == layers:
            owner, _, attribute = name.rpartition(".")
            return decoder.get_submodule(owner), attribute
    raise BadInput(f"target: {type(model).__name__} has no list of its {layers} decoder layers: not supported")


def _unhook_inside(layer: nn.Module) -> None:
    """Take a device map's hooks off the parts of a decoder layer: its own moves what comes in to where all of it lies.

    With them a compiler takes every layer for code of its own.
    """
    if hasattr(layer, "_hf_hook") and len({parameter.device for parameter in layer.parameters()}) == 1:
        for part in layer.children():
            remove_hook_from_module(part, recurse=True)


def truncated(stack: nn.Module, layers_name: str, depth: int) -> nn.Module:
    """`stack` with its first `depth` layers only; all modules shared."""
    cut = copy.copy(stack)
    cut._modules = dict(stack._modules)
    cut._modules[layers_name] = nn.ModuleList(list(stack.get_submodule(layers_name))[:depth])
    cut.__dict__.pop("forward", None)  # a device map's wrapper is bound to the uncut stack
    return cut


@contextmanager
def one_document_a_row() -> Iterator[None]:
    """Within, transformers does not look for several documents in a row of positions.

    It would wait for the device to find out, once a forward pass: a third of the time at 8B size. Rows here are one
    document each.
    """
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice, which belong to notebooks."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


@torch.inference_mode()
def _measured(target: Target, head: TargetHead) -> TargetHead:
    """`head` with its scales, from what goes into the first layer and comes out of the model for a few tokens."""
    ids = (torch.arange(PROBE) * 7919 % target.vocab).unsqueeze(0)
    entered: list[Tensor] = []
    hook = target.decoder_layers()[0].register_forward_pre_hook(
        lambda module, arguments, keywords: entered.append(arguments[0] if arguments else keywords["hidden_states"]),
        with_kwargs=True,
    )
    logits = target.logits(ids)[0].float().cpu()
    hook.remove()
    plain = head.to("cpu", torch.float32)
    scale = _ratio(plain.embedding[ids[0]], entered[0][0].float().cpu(), "embedding is not a scaled look-up")
    raw = plain.logits(target.last_hidden(ids)[0].float().cpu())
    cap = getattr(target.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6))
    multiplier = _ratio(raw, logits, "LM head is not a linear map of the last hidden state")
    return TargetHead(head.embedding, head.lm_head, head.bias, scale, multiplier, cap)


def _ratio(given: Tensor, seen: Tensor, problem: str) -> float:
    """The number that `seen` is of `given`: exactly 1 when within rounding.

    Raises BadInput with `problem` when there is no such number.
    """
    ratio = float((given * seen).sum() / (given * given).sum())
    if not torch.allclose(seen, ratio * given, rtol=0.02, atol=0.02 * float(seen.abs().max())):
        raise BadInput(f"target: its {problem}: not supported")
    return 1.0 if abs(ratio - 1.0) < 2e-3 else ratio
