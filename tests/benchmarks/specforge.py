"""SpecForge 0.2.0's DFlash training step, the other side of `tests.benchmarks.step --against specforge`.

Needs the PyPI package alone (`pip install --no-deps specforge==0.2.0`): what is imported of it wants torch and
transformers only. Three ways, each with SpecForge's own model, objective (decay 7, 128 blocks a piece), compiled
FlexAttention and block mask, bf16 weights, nothing else compiled, as its trainer has it:

- *trainer, same rows*: its `TrainerCore` and `BF16Optimizer` (fp32 masters, clip) over the batch's rows as SpecForge
  keeps them, one a document with that document's anchors. What ratios refer to. FSDP, which its trainer wraps round a
  single GPU too, is left out, in its favour. The trainer waits for the device to log, so its host is never free.
- *trainer, one row*: the same with all tokens and all anchors in one row (S 4096, A 512 at `8b`).
- *bf16 weights, one row*: forward, backward, clip and torch's fused AdamW without masters or trainer. How the 199 ms
  (`8b`) and 55.6 ms (`small`) on one H200 were taken that bars were set by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from pipeline.drafter import DrafterConfig

if TYPE_CHECKING:
    from tests.benchmarks.step import Shape

Run = Callable[[], None]
"""One whole training step."""


def contenders(shape: Shape, config: DrafterConfig, device: str) -> Mapping[str, Callable[[], Run]]:
    """Name -> what builds that way's step. Building raises ImportError where SpecForge is not installed."""
    whole = (sum(shape.rows),)
    return {
        "specforge trainer, same rows": partial(trainer, shape, config, shape.rows, device),
        "specforge trainer, one row": partial(trainer, shape, config, whole, device),
        "specforge bf16 weights, one row": partial(plain, shape, config, whole, device),
    }


def trainer(shape: Shape, config: DrafterConfig, rows: tuple[int, ...], device: str) -> Run:
    """SpecForge's own step, from the strategy's forward to the scheduler."""
    model = build(shape, config, rows, device)
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import DFlashTrainStrategy

    optimizer = partial(BF16Optimizer, lr=6e-4, max_grad_norm=1.0, total_steps=1000, warmup_ratio=0.04)
    backend = FSDPTrainingBackend(ParallelConfig(), optimizer_factory=optimizer)
    model = backend.prepare_model(model, wrap=False, optimizer_target=model.draft_model)
    core = TrainerCore(DFlashTrainStrategy(model), backend)
    batch = TrainBatch([str(row) for row in range(len(rows))], "dflash", inputs(shape, config, rows, device))

    def run() -> None:
        core.train_step(batch)

    return run


def plain(shape: Shape, config: DrafterConfig, rows: tuple[int, ...], device: str) -> Run:
    """SpecForge's model and loss under torch's fused AdamW."""
    model, batch = build(shape, config, rows, device), inputs(shape, config, rows, device)
    trained = list(model.draft_model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=6e-4, fused=True)

    def run() -> None:
        loss, _, _ = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def build(shape: Shape, config: DrafterConfig, rows: tuple[int, ...], device: str) -> nn.Module:
    """SpecForge's drafter and objective, bf16, with a frozen random embedding and LM head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of flash-attn, which DFlash does not use
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

    attention = "flex_attention" if device == "cuda" else "sdpa"
    settings = Qwen3Config(
        architectures=["DFlashDraftModel"],
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        layer_types=list(config.layer_types),
        tie_word_embeddings=False,
        block_size=config.block_size,
        num_target_layers=config.num_target_layers,
        dflash_config={
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
    )
    settings._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(device):
        drafter = DFlashDraftModel(settings)
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    model = OnlineDFlashModel(
        drafter,
        head.requires_grad_(False),
        embedding.requires_grad_(False),
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        attention_backend=attention,
        num_anchors=shape.anchors // len(rows),
        loss_decay_gamma=7.0,
    )
    return model.to(torch.bfloat16).train()


def inputs(shape: Shape, config: DrafterConfig, rows: tuple[int, ...], device: str) -> dict[str, Tensor]:
    """Random tokens, states and masks of rows of one length, on the device."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (len(rows), rows[0])
    ids = torch.randint(config.vocab_size - 1, sizes, generator=generator, device=device)
    width = len(config.target_layer_ids) * config.hidden_size
    states = torch.randn(*sizes, width, generator=generator, device=device, dtype=torch.bfloat16)
    mask = torch.ones(sizes, device=device)
    mask[:, : shape.prompt] = 0
    return {"input_ids": ids, "hidden_states": states, "loss_mask": mask}
