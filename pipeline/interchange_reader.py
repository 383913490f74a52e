"""Reads `config.json` of other people's DFlash checkpoints: z-lab's form, speculators', or the union of both.

A reader takes whatever places of a value are there, demands that they agree, and names what is missing. Nothing is
guessed: another design is refused by the key that gives it away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from data import rope
from data.errors import BadInput
from pipeline.drafter import DrafterConfig
from pipeline.interchange_config import DIMENSIONS, FULL, LAYER, SCALES, SLIDING, TargetInfo

DFLASH_KEYS = {"block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "causal", *SCALES}
EXACT = {  # what the drafter computes; another value is another function
    "hidden_act": "silu",
    "attention_bias": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "use_gemma_norm": False,
    "partial_rotary_factor": 1.0,
    "use_aux_hidden_state": True,
    "sample_from_anchor": False,
}
OTHER_DESIGNS = ("projector_type", "conv_", "selector_", "markov_", "lilicorr", "shift_label", "pure_draft_prefix_len")


class Reader:
    """Looks keys up in a parsed `config.json` at `where`; every error names file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def find(self, path: str) -> tuple[bool, Any]:
        """(present, value) of a dotted path."""
        node: Any = self.raw
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return False, None
            node = node[key]
        return True, node

    def agreed(self, *paths: str) -> Any:
        """The one value at all of these paths that exist; None when none does or all are null.

        Raises BadInput when two of them differ.
        """
        found = [(path, value) for path in paths for present, value in (self.find(path),) if present]
        for path, value in found[1:]:
            if value != found[0][1]:
                self.fail(f"`{found[0][0]}` is {found[0][1]!r} but `{path}` is {value!r}")
        return found[0][1] if found else None

    def number(self, *paths: str, kind: type[int] | type[float] = int) -> Any:
        """A positive (ids: non-negative) number at these paths.

        Raises BadInput when it is missing or something else.
        """
        value = self.agreed(*paths)
        if value is None:
            self.fail(f"`{paths[0]}` is missing")
        wrong = isinstance(value, bool) or not isinstance(value, int if kind is int else int | float)
        if wrong or value < 0 or (value == 0 and not paths[0].endswith("_id")):
            self.fail(f"`{paths[0]}` is {value!r}, expected a positive number")
        return kind(value)

    def fail(self, text: str) -> None:
        raise BadInput(f"{self.where}: {text}")


def read_config(raw: Mapping[str, Any], where: str, num_target_layers: int | None = None) -> DrafterConfig:
    """The drafter that a z-lab, speculators or union `config.json` describes.

    `num_target_layers` stands in for the key where a form does not carry it (speculators), and is compared otherwise.
    Raises BadInput naming the key that is missing, contradictory, or of another design.
    """
    reader = Reader(raw, where)
    refuse_other_designs(raw, where)
    if num_target_layers is not None and reader.agreed("num_target_layers", "dflash_config.num_target_layers") is None:
        layers = num_target_layers
    else:
        layers = reader.number("num_target_layers", "dflash_config.num_target_layers")
    if num_target_layers not in (None, layers):
        reader.fail(f"`num_target_layers` is {layers}, the target has {num_target_layers} layers")
    theta, scaling = _rope(reader)
    fields = {field: reader.number(key, f"{LAYER}.{key}") for field, key in DIMENSIONS.items()}
    types, window = _attention(reader, fields["num_layers"])
    draft_vocabulary = reader.agreed("draft_vocab_size")
    if draft_vocabulary not in (None, fields["vocab_size"]):
        reader.fail(f"`draft_vocab_size` {draft_vocabulary} is a reduced vocabulary, which is not supported")
    config = DrafterConfig(
        **fields,
        rms_norm_eps=reader.number("rms_norm_eps", f"{LAYER}.rms_norm_eps", kind=float),
        block_size=reader.number("block_size", "dflash_config.block_size"),
        mask_token_id=reader.number("mask_token_id", "dflash_config.mask_token_id"),
        target_layer_ids=_taps(reader, layers),
        num_target_layers=layers,
        rope_theta=theta,
        rope_scaling=scaling,
        layer_types=types,
        sliding_window=window,
    )
    tokens = speculative_tokens(raw)
    if tokens not in (None, config.block_size - 1):
        reader.fail(f"`speculative_tokens` is {tokens}, a block of {config.block_size} drafts {config.block_size - 1}")
    return config


def speculative_tokens(raw: Mapping[str, Any]) -> Any:
    """Drafted tokens a block that a speculators section promises; None when it has none."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def refuse_other_designs(raw: Mapping[str, Any], where: str) -> None:
    """Raises BadInput naming the key that makes this something else than the DFlash that is trained here."""
    inner = raw.get("dflash_config") or {}
    kind = raw.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise BadInput(f"{where}: `speculators_model_type` is {kind!r}; only `dflash` is read")
    for prefix, section in (("", raw), ("dflash_config.", inner), (f"{LAYER}.", raw.get(LAYER) or {})):
        for key, value in section.items():
            if key in EXACT and value not in (None, EXACT[key]):
                raise BadInput(f"{where}: `{prefix}{key}` is {value!r}; this design is not supported")
            if key.startswith(OTHER_DESIGNS) and value not in (None, False, 0):
                raise BadInput(f"{where}: `{prefix}{key}` = {value!r} belongs to another design (not plain DFlash)")
    for key, value in inner.items():
        if key not in DFLASH_KEYS and key not in EXACT and value not in (None, False):
            raise BadInput(f"{where}: `dflash_config.{key}` = {value!r} belongs to another design (not plain DFlash)")
    width = raw.get("target_hidden_size")
    if width not in (None, raw.get("hidden_size", (raw.get(LAYER) or {}).get("hidden_size"))):
        raise BadInput(f"{where}: `target_hidden_size` {width} differs from the drafter's width; not supported")


def _taps(reader: Reader, layers: int) -> tuple[int, ...]:
    ids = reader.agreed("dflash_config.target_layer_ids", "target_layer_ids")
    shifted = reader.agreed("aux_hidden_state_layer_ids")
    for key, value in (("dflash_config.target_layer_ids", ids), ("aux_hidden_state_layer_ids", shifted)):
        whole = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        if value is not None and not (whole and value):
            reader.fail(f"`{key}` is {value!r}, expected a list of layer numbers")
    if ids is None and shifted is None:
        reader.fail("`dflash_config.target_layer_ids` is missing (and `aux_hidden_state_layer_ids` too)")
    if ids is not None and shifted is not None and [i + 1 for i in ids] != shifted:
        reader.fail(f"`aux_hidden_state_layer_ids` {shifted} is not `dflash_config.target_layer_ids` {ids} plus one")
    ids = ids if ids is not None else [i - 1 for i in shifted]
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > layers - 2:
        reader.fail(f"target_layer_ids {ids}: must be ascending, unique and in 0..{layers - 2}")
    return tuple(ids)


def _rope(reader: Reader) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling from the flat keys, from `rope_parameters`, or from both when they agree."""
    roots = [prefix for prefix in ("", f"{LAYER}.") if not prefix or reader.find(LAYER)[0]]
    places = [f"{prefix}{key}" for prefix in roots for key in ("rope_theta", "rope_parameters.rope_theta")]
    theta = reader.number(*places, kind=float)
    seen: list[tuple[str, dict[str, Any] | None]] = []
    for path in (f"{prefix}{key}" for prefix in roots for key in ("rope_scaling", "rope_parameters")):
        present, value = reader.find(path)
        if present and value is not None and not isinstance(value, Mapping):
            reader.fail(f"`{path}` is {value!r}, expected a mapping")
        if present:
            seen.append((path, _scaling(value)))
    for path, scaling in seen[1:]:
        if scaling != seen[0][1]:
            reader.fail(f"`{seen[0][0]}` says {seen[0][1]} but `{path}` says {scaling}")
    for path, scaling in seen[:1]:
        if problem := rope.problem(scaling or {"rope_type": "default"}):
            reader.fail(f"`{path}`: {problem}: not supported")
    return theta, seen[0][1] if seen else None


def _scaling(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    body = {key: item for key, item in (value or {}).items() if key != "rope_theta" and item is not None}
    if body.get("partial_rotary_factor") == 1.0:  # what it is without saying so
        del body["partial_rotary_factor"]
    if "type" in body:  # the name before transformers 4.43
        body.setdefault("rope_type", body["type"])
        del body["type"]
    body.setdefault("rope_type", "default")
    return None if body == {"rope_type": "default"} else body


def _attention(reader: Reader, layers: int) -> tuple[tuple[str, ...], int | None]:
    types = reader.agreed("layer_types", f"{LAYER}.layer_types")
    if types is None:
        if reader.agreed("use_sliding_window", f"{LAYER}.use_sliding_window"):
            reader.fail("`layer_types` is missing although `use_sliding_window` is set")
        types = [FULL] * layers
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL, SLIDING}:
        reader.fail(f"`layer_types` is {types!r}, expected {layers} of `{FULL}` or `{SLIDING}`")
    sliding = SLIDING in types
    for path in ("is_causal", "dflash_config.causal"):
        _, causal = reader.find(path)
        if causal or (causal is not None and sliding):
            reader.fail(f"`{path}` is {causal!r}: read are full layers that see both ways and sliding ones that do not")
    if not sliding:
        return tuple(types), None
    if reader.find("sliding_window_non_causal")[1]:
        reader.fail("`sliding_window_non_causal` is true: sliding layers that see both ways are not supported")
    return tuple(types), reader.number("sliding_window", f"{LAYER}.sliding_window")


def differences(have: Any, want: Any, path: str = "", shared: bool = False) -> Iterator[str]:
    """One line for every key whose value is not the wanted one, dotted paths first to last.

    `shared` compares keys that both have, and nothing else.
    """
    if isinstance(have, Mapping) and isinstance(want, Mapping):
        for key in (*want, *(key for key in have if key not in want)):
            inner = f"{path}.{key}" if path else key
            if key in have and key in want:
                yield from differences(have[key], want[key], inner, shared)
            elif not shared:
                yield f"`{inner}` is missing" if key in want else f"`{inner}` does not belong there"
    elif have != want or type(have) is not type(want):
        yield f"`{path}` is {have!r}, expected {want!r}"


def target_from_config(raw: Mapping[str, Any], config: DrafterConfig) -> TargetInfo:
    """What a checkpoint itself says of its target; `name` is empty when it does not say."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    inner = raw.get("dflash_config") or {}
    scale, multiplier, softcap = (inner.get(key, default) for key, default in SCALES.items())
    return TargetInfo(
        name=verifier.get("name_or_path") or "",
        architecture=(verifier.get("architectures") or [""])[0],
        num_layers=config.num_target_layers,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        embedding_scale=scale,
        logit_multiplier=multiplier,
        softcap=softcap,
    )
