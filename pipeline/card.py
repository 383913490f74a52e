"""The model card of an export: what it drafts for, how to serve it, what it measured, how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.drafter import DrafterConfig
from pipeline.interchange_config import FULL, SLIDING, Form, TargetInfo

FLOAT8 = "float8"
"""How `stored` begins for a quantised export."""
FLOAT8_NOTE = (
    "Float8 weights are in the `compressed-tensors` form. Through transformers (dflash, specforge) they were run and "
    "agree with the trainer's own float8 arithmetic bit for bit. For vLLM 0.33.0 and SGLang 0.5.23 the support was "
    "read in their source, not run; vLLM 0.26 is reported to fail at start with such drafters (its issue 51581)."
)

SCALED_NOTE = (
    "This target scales its embedding by {scale:g}. dflash takes the number from `config.json`. vLLM 0.33.0 and SGLang "
    "0.5.23 (source read, not run) give the drafter rows that are not scaled: text stays right, fewer tokens are "
    "accepted."
)


def serving_lines(config: DrafterConfig, target: TargetInfo, export: str, form: Form = "union") -> dict[str, str]:
    """The exact command of each engine that reads this form, by the engine's name.

    vLLM counts drafted tokens (B - 1) and must be told; SGLang and dflash read the block size B from the files.
    """
    drafted = config.block_size - 1
    speculative = f'{{"method": "dflash", "model": "{export}", "num_speculative_tokens": {drafted}}}'
    mixed = {SLIDING, FULL} <= set(config.layer_types)
    lines = {
        "vLLM": ("VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "")
        + f"vllm serve {target.name} --speculative-config '{speculative}'"
    }
    if form == "speculators":
        return lines
    lines["SGLang"] = (
        f"python -m sglang.launch_server --model-path {target.name} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {export}"
    )
    lines["dflash"] = f'dflash generate transformers --model {target.name} --draft {export} "Why is the sky blue?"'
    return lines


def write_card(
    name: str,
    config: DrafterConfig,
    target: TargetInfo,
    export: str,
    form: Form,
    stored: str,
    facts: Mapping[str, Any],
    evaluations: Iterable[Mapping[str, Any]],
) -> str:
    """Markdown of the card. `stored` says in which numbers the weights are; `facts` are rows of the table of origins;
    `evaluations` are bodies of `eval/<drafter>/<benchmark>.json`."""
    sections = [
        _front_matter(target),
        f"# {name}: a DFlash drafter for {target.name}",
        f"Drafts {config.block_size - 1} tokens a pass for `{target.name}`; the target verifies them, so that accepted "
        "text is the target's own. Embedding and LM head are the target's and are not in this file.",
        "## Serving",
        _serving(config, target, export, form),
        *([FLOAT8_NOTE] if stored.startswith(FLOAT8) else []),
        *([SCALED_NOTE.format(scale=target.embedding_scale)] if target.embedding_scale != 1.0 else []),
        "## Acceptance",
        _acceptance(facts, list(evaluations)),
        "## How it was made",
        _table(("what", "value"), _origins(config, stored, facts)),
        "Everything else that shaped these weights is in `draftmill.json`.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(target: TargetInfo) -> str:
    """`license` stays empty: it follows from the target's and the data's, and is the publisher's to say."""
    base = f"base_model: {target.name}\n" if _is_hub_id(target.name) else ""
    tags = "".join(f"\n- {tag}" for tag in ("dflash", "speculative-decoding", "draftmill"))
    return f"---\nlicense:  # fill in: the target's and the data's licences decide\n{base}tags:{tags}\n---"


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _serving(config: DrafterConfig, target: TargetInfo, export: str, form: Form) -> str:
    lines = serving_lines(config, target, export, form)
    blocks = [f"{engine}:\n\n```bash\n{line}\n```" for engine, line in lines.items()]
    size, drafted = config.block_size, config.block_size - 1
    others = "" if form == "speculators" else f" SGLang and dflash read {size} from `config.json`."
    return "\n\n".join(
        [*blocks, f"A block is {size} tokens, the anchor counted: vLLM is told {drafted} drafted ones.{others}"]
    )


def _acceptance(facts: Mapping[str, Any], evaluations: list[Mapping[str, Any]]) -> str:
    note = (
        "Acceptance length: tokens a target pass, the bonus token counted. Pooled over all blocks, with a 95 % "
        "bootstrap interval over prompts; *per response* averages each answer's own mean."
    )
    rows = [
        (
            body["benchmark"],
            body["prompts"],
            _interval(body["pooled"]),
            _interval(body["per_response"]),
            "{temperature:g}".format(**body["record"]["sampling"]) if "record" in body else "",
        )
        for body in evaluations
    ]
    walked = facts.get("validation acceptance")
    lines = [note]
    if rows:
        lines.append(_table(("benchmark", "prompts", "pooled", "per response", "temperature"), rows))
    if walked is not None:
        lines.append(f"On held-out training rows (validation walk): {walked}.")
    if not rows:
        lines.append("No benchmark was measured before this export.")
    return "\n\n".join(lines)


def _interval(body: Mapping[str, Any]) -> str:
    if body["value"] is None:
        return "-"
    return f"{body['value']:.2f} ({body['low']:.2f}-{body['high']:.2f})"


def _origins(config: DrafterConfig, stored: str, facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    window = f", window {config.sliding_window} in sliding layers" if config.sliding_window else ""
    rope = "" if config.rope_scaling is None else f", scaling {config.rope_scaling}"
    shape = [
        ("layers", f"{config.num_layers} of width {config.hidden_size}{window}"),
        ("heads", f"{config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim}"),
        ("target layers read", ", ".join(map(str, config.target_layer_ids)) + f" of {config.num_target_layers}"),
        ("mask token id", config.mask_token_id),
        ("RoPE base", f"{config.rope_theta:g}{rope}"),
        ("weights stored as", stored),
    ]
    return [*shape, *((key, value) for key, value in facts.items() if key != "validation acceptance")]


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
