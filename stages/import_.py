"""`draftmill import CHECKPOINT`: somebody else's DFlash drafter, read and checked key by key.

    draftmill import z-lab/Qwen3-8B-DFlash-b16
    draftmill import ./released --to drafters/released --target Qwen/Qwen3-8B
    draftmill import ./released --to drafters/for-vllm --format speculators

Without `--to` it says what the checkpoint is. With it, an export is written in any of the forms: for
`train.warm_start`, for `draftmill eval --drafter-path`, and for the engines that read the form.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from data.errors import BadInput
from pipeline.interchange_folder import destination

if TYPE_CHECKING:
    from pipeline.interchange import Checkpoint
    from pipeline.interchange_config import Form, TargetInfo


@click.command("import")
@click.argument("checkpoint")
@click.option("--to", type=click.Path(path_type=Path), help="Folder to write as one of ours.")
@click.option(
    "--format", "form", type=click.Choice(["union", "zlab", "speculators"]), default="union", show_default=True,
    help="With --to: union is read by all of vLLM, SGLang, dflash, speculators and specforge.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]),
    help="With --to: numbers that the weights are stored in; those that they came in when omitted.",
)  # fmt: skip
@click.option("--target", metavar="MODEL", help="Hub id or folder of its target, where the checkpoint does not say.")
@click.option(
    "--target-layers", type=click.IntRange(min=2), metavar="N",
    help="Layers of its target, where the checkpoint does not say (the speculators form).",
)  # fmt: skip
def command(
    checkpoint: str, to: Path | None, form: Form, dtype: str | None, target: str | None, target_layers: int | None
) -> None:
    """Turn somebody else's drafter into one of ours."""
    from pipeline.interchange import open_checkpoint

    folder = None if to is None else destination(to)
    read = open_checkpoint(checkpoint, target_layers)
    for key, value in described(read).items():
        click.echo(f"{key:<20} {value}")
    if folder is None:
        return
    info = named(read.target, target, checkpoint)
    write(read, info, folder, form, dtype)
    click.echo(f"written to {folder}: use it as train.warm_start, with `draftmill eval --drafter-path`, or serve it")


def described(read: Checkpoint) -> dict[str, Any]:
    """What a person asks first."""
    config = read.config
    count = sum(tensor.numel() for tensor in read.tensors.values())
    return {
        "target": read.target.name or "not said",
        "block size": f"{config.block_size} ({config.block_size - 1} drafted tokens)",
        "layers": f"{config.num_layers} ({', '.join(sorted(set(config.layer_types)))})",
        "width, MLP": f"{config.hidden_size}, {config.intermediate_size}",
        "heads": f"{config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim}",
        "target layers read": f"{list(config.target_layer_ids)} of {config.num_target_layers}",
        "mask token id": config.mask_token_id,
        "vocabulary": config.vocab_size,
        "RoPE": f"base {config.rope_theta:g}, scaling {config.rope_scaling or 'none'}",
        "parameters": f"{count:,} in {len(read.tensors)} tensors, all named and shaped as expected",
    }


def named(info: TargetInfo, target: str | None, checkpoint: str) -> TargetInfo:
    """The checkpoint's target with its name and architecture filled in from `--target`.

    Raises BadInput when neither says which model it is.
    """
    if target is None and info.name:
        return info
    if target is None:
        raise BadInput(f"{checkpoint}: `speculators_config.verifier.name_or_path` is missing: give --target MODEL")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise BadInput(f"--target {target}: no readable config.json ({' '.join(str(error).split())[:200]})") from None
    text = config.get_text_config()
    return replace(
        info,
        name=target,
        architecture=(config.architectures or [""])[0],
        num_layers=text.num_hidden_layers,
        width=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
    )


def write(read: Checkpoint, info: TargetInfo, to: Path, form: Form, dtype: str | None) -> None:
    """Write an export; `dtype` None: weights in the numbers that they came in, float32 where these are several.

    Raises BadInput when the drafter has no such form.
    """
    from pipeline.card import write_card
    from pipeline.interchange import DTYPES, write_union

    found = {tensor.dtype for tensor in read.tensors.values()}
    dtype = dtype or next((name for name, kind in DTYPES.items() if found == {kind}), "float32")
    facts = {"imported from": str(read.path)}
    card = write_card(to.name, read.config, info, str(to), form, dtype, facts, [])
    write_union(to, read.config, read.tensors, info, form, dtype, None, card, {"imported": str(read.path)})
