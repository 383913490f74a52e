"""The training step against an oracle: float32, eager, dense, one block of one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from data.codec import CODECS
from data.errors import Failure
from data.settings import Loss, Train
from pipeline.batches import BatchPlan, Document, Plan, fill
from pipeline.drafter import Drafter, initialise, rope_frequencies, unset_drafter
from pipeline.graphs import KERNELS, Step, compiler
from pipeline.loss import LossRule, slot_weights
from pipeline.optimizer import Rates, adamw
from pipeline.products import NarrowProduct
from tests.synthetic import MemoryCache, config, make_step

SETTINGS = Train(context_tokens=256, anchor_slots=64, anchors_per_row=64, batches_per_step=1, epochs=1)


def run(step: Step, cache: MemoryCache, plan: BatchPlan, disturb: Callable[[dict], None] = lambda views: None) -> None:
    views = step.shape.host_views(np.zeros(step.shape.offsets()[1], np.uint8))
    fill(cache, step.shape, plan, views)
    disturb(views)
    step.inputs_from(views)


def whole_plan(cache: MemoryCache, plan: Plan) -> BatchPlan:
    (batch,) = plan.step(0)
    assert sum(len(document.anchors) for document in batch.documents) > 0
    return batch


def oracle_logits(step: Step, cache: MemoryCache, document: Document, anchor: int) -> Tensor:
    """Logits [B - 1, V] of one block, from its row alone: nothing is packed, nothing is masked."""
    drafter, head, B = step.drafter, step.head, step.rule.block_size
    tokens = torch.from_numpy(cache.tokens(document.row)[0].astype(np.int64))
    stored = {n: torch.from_numpy(a[:anchor]) for n, a in cache._states[document.row].items()}
    states = step.codec.decode(stored).float().flatten(1)[None]
    context = drafter.project(states)
    rope = drafter.rope(torch.arange(anchor)[None])
    ids = torch.tensor([[int(tokens[anchor])] + [drafter.config.mask_token_id] * (B - 1)])
    known = [layer.self_attn.keys_values(context, rope) for layer in drafter.layers]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        allowed = torch.ones(B, anchor + B, dtype=torch.bool)
        if drafter.config.layer_types[layer] == "sliding_attention":
            key = torch.arange(anchor + B)
            query = anchor + torch.arange(B)[:, None]
            allowed = (query - key >= 0) & (query - key < drafter.config.sliding_window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)

    hidden = drafter(head.embed(ids), drafter.rope(anchor + torch.arange(B)[None]), known, attend)
    return head.logits(hidden)[0, 1:]


def oracle(step: Step, cache: MemoryCache, plan: BatchPlan) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a batch, block by block."""
    step.drafter.zero_grad(set_to_none=True)
    rule, B = step.rule, step.rule.block_size
    decay = torch.exp(-torch.arange(B - 1) / rule.decay)
    total = torch.zeros(())
    for document in plan.documents:
        tokens = torch.from_numpy(cache.tokens(document.row)[0].astype(np.int64))
        for anchor, count in zip(document.anchors.tolist(), document.labels.tolist(), strict=True):
            logits = oracle_logits(step, cache, document, anchor)[:count]
            log_p = logits.log_softmax(1).gather(1, tokens[anchor + 1 : anchor + 1 + count, None])[:, 0]
            valid = torch.arange(B - 1)[None] < count
            p = F.pad(log_p.exp(), (0, B - 1 - count))[None]
            weights = slot_weights(rule, decay, p.detach(), valid)[0, :count]
            total = total - (weights * log_p).sum() * plan.scale
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in step.drafter.named_parameters()}


CASES: dict[str, dict[str, Any]] = {
    "one document": {"lengths": [70]},
    "three documents": {"lengths": [60, 40, 30]},
    "seventeen documents": {"lengths": [8, 6, 9, 7, 5, 12, 6, 8, 7, 9, 10, 5, 6, 7, 8, 11, 6]},
    "anchor at position 0": {"lengths": [20, 12], "prompt": 0},
    "block of 7": {"lengths": [40, 25], "block_size": 7},
    "block of 10": {"lengths": [40, 25], "block_size": 10},
    "block of 16": {"lengths": [40, 25], "block_size": 16},
    "sliding window": {"lengths": [40, 25], "layer_types": ("sliding_attention",) * 2, "sliding_window": 5},
    "sliding and full": {
        "lengths": [40, 25], "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9,
    },
    "yarn": {
        "lengths": [40],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "llama3": {
        "lengths": [40],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear": {"lengths": [40], "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "D-PACE": {"lengths": [60, 40], "loss": Loss(kind="dpace", alpha=0.5)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_packed_step_equals_block_by_block_oracle(name: str) -> None:
    case = dict(CASES[name])
    cache = MemoryCache("float32", 3, 32, 61, case.pop("lengths"), prompt=case.pop("prompt", 3))
    train = SETTINGS.model_copy(update={"loss": case.pop("loss", Loss())})
    step, plan = make_step(cache, config(**case), train)
    batch = whole_plan(cache, plan)
    loss, gradients = oracle(step, cache, batch)
    run(step, cache, batch)
    step.run_micro(first=True, last=True)
    assert step.sums["loss"].item() == pytest.approx(loss.item(), rel=2e-5)
    for parameter, tensor in step.drafter.named_parameters():
        error = (tensor.grad - gradients[parameter]).norm() / gradients[parameter].norm()
        assert error < 2e-4, parameter


def block_hidden(step: Step) -> Tensor:
    """Hidden states [A, B, H] of the batch in the inputs."""
    with torch.no_grad():
        return step.forward()[0][-1][1][0].view(step.shape.blocks, step.rule.block_size, -1)


@pytest.mark.parametrize("sliding", [False, True])
def test_nothing_at_or_after_an_anchor_reaches_its_block(sliding: bool) -> None:
    kinds = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6} if sliding else {}
    cache = MemoryCache("float32", 3, 32, 61, [30, 25, 28])
    step, plan = make_step(cache, config(**kinds), SETTINGS)
    batch = whole_plan(cache, plan)
    run(step, cache, batch)
    clean = block_hidden(step)
    starts, ends = step.inputs["start"].clone(), step.inputs["end"].clone()
    for block in (0, 7, 30, 50):
        low, high = int(starts[block]), int(ends[block])

        def disturb(views: dict[str, np.ndarray], low: int = low, high: int = high, block: int = block) -> None:
            outside = np.ones(step.shape.context, bool)
            outside[low:high] = False
            views["state.hidden"][outside] += 100.0
            others = np.arange(step.shape.blocks) != block
            views["anchor_token"][others] = (views["anchor_token"][others] + 1) % 60

        run(step, cache, batch, disturb)
        assert torch.equal(block_hidden(step)[block], clean[block])
        if high > low:

            def inside(views: dict[str, np.ndarray], high: int = high) -> None:
                views["state.hidden"][high - 1] += 1.0

            run(step, cache, batch, inside)
            assert not torch.equal(block_hidden(step)[block], clean[block])


def test_a_batch_without_anchors_gives_finite_zero_gradients() -> None:
    cache = MemoryCache("float32", 3, 32, 61, [30])
    step, _ = make_step(cache, config(), SETTINGS)
    run(step, cache, BatchPlan((), 0.0))
    step.run_micro(first=True, last=True)
    assert step.sums["loss"].item() == 0.0
    assert all(parameter.grad.abs().max() == 0 for parameter in step.drafter.parameters())


def test_accumulated_batches_sum_to_the_whole_step() -> None:
    cache = MemoryCache("float32", 3, 32, 61, [60, 40, 70, 50, 80, 64])
    halves = SETTINGS.model_copy(update={"context_tokens": 128, "batches_per_step": 8})
    one, one_plan = make_step(cache, config(), SETTINGS.model_copy(update={"context_tokens": 512, "anchor_slots": 512}))
    many, many_plan = make_step(cache, config(), halves)
    run(one, cache, one_plan.step(0)[0])
    one.run_micro(True, True)
    for number, batch in enumerate(many_plan.step(0)):
        run(many, cache, batch)
        many.run_micro(number == 0, number == 7)
    assert many.sums["loss"].item() == pytest.approx(one.sums["loss"].item(), rel=1e-5)
    for a, b in zip(one.drafter.parameters(), many.drafter.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)


def test_a_non_finite_gradient_freezes_weights_and_moments() -> None:
    cache = MemoryCache("float32", 3, 32, 61, [40, 30])
    for optimizer in ("adamw", "muon"):
        step, plan = make_step(cache, config(), SETTINGS.model_copy(update={"optimizer": optimizer}))
        batch = whole_plan(cache, plan)
        run(step, cache, batch)
        step.run_micro(True, True)
        step.run_update()
        before = {n: t.clone() for n, t in [*step.optimizer.tensors().items(), *step.drafter.named_parameters()]}

        def poison(views: dict[str, np.ndarray]) -> None:
            views["state.hidden"][3] = np.nan

        run(step, cache, batch, poison)
        step.run_micro(True, True)
        step.run_update()
        run(step, cache, batch)
        step.run_micro(True, True)
        step.run_update()
        assert int(step.optimizer.bad) == 1
        after = {**step.optimizer.tensors(), **dict(step.drafter.named_parameters())}
        for name, tensor in before.items():
            if name not in ("step_count", "bad"):
                assert torch.equal(after[name], tensor), name


def test_score_counts_hits_in_a_row() -> None:
    cache = MemoryCache("float32", 3, 32, 61, [30, 20])
    step, plan = make_step(cache, config(), SETTINGS)
    batch = whole_plan(cache, plan)
    run(step, cache, batch)
    expected = []
    for document in batch.documents:
        for anchor, count in zip(document.anchors.tolist(), document.labels.tolist(), strict=True):
            guesses = oracle_logits(step, cache, document, anchor).argmax(1)
            tokens = cache.tokens(document.row)[0]
            hits = [int(guesses[k]) == int(tokens[anchor + 1 + k]) for k in range(count)]
            expected.append(next((k for k, hit in enumerate(hits) if not hit), count))
    step.run_score()
    assert step.matches[: len(expected)].tolist() == expected


def test_state_noise_is_a_function_of_seed_and_place() -> None:
    cache = MemoryCache("bf16", 3, 32, 61, [40, 30])
    step, plan = make_step(cache, config(), SETTINGS.model_copy(update={"state_noise": 0.1}))
    batch = whole_plan(cache, plan)
    run(step, cache, batch)
    first, again = block_hidden(step), block_hidden(step)
    assert torch.equal(first, again)
    run(step, cache, BatchPlan(batch.documents, batch.scale, 5))
    assert not torch.equal(first, block_hidden(step))


def train_both(device: str, codec: str, steps: int = 3, **kinds: Any) -> list[dict[str, Tensor]]:
    """Weights after a few steps in modes compile and whole, in one process."""
    results = []
    for mode in ("compile", "whole"):
        torch._dynamo.reset()
        cache = MemoryCache(codec, 3, 64, 256, [100, 80, 120, 90, 60])
        settings = SETTINGS.model_copy(update={"context_tokens": 512, "batches_per_step": 2, "learning_rate": 1e-3})
        step, plan = make_step(cache, config(hidden_size=64, vocab_size=256, **kinds), settings, mode=mode,
                               device=device, dtype=torch.bfloat16, dense=False)  # fmt: skip
        step.prepare(2)
        for number in range(steps):
            for i, batch in enumerate(plan.step(0)):
                run(step, cache, batch)
                step.micro(i == 0, i == 1)
            step.update()
            assert int(step.optimizer.step_count) == number + 1
        results.append({n: p.detach().clone() for n, p in step.drafter.named_parameters()})
    return results


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` that traces and guards as ever and generates no code."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def test_the_optimizer_is_compiled_for_every_shape_of_a_weight(traced: None) -> None:
    step, _ = make_step(MemoryCache("float32", 3, 32, 61, [40]), config(), SETTINGS, mode="compile")
    rates = Rates(*torch.tensor([1e-3, 0.1, 0.05, 2.0]), torch.tensor(False))
    for size in range(2, 40):
        states = []
        for update in (adamw, step.optimizer.run_adamw):
            weight, gradient, mean, square = torch.randn((4, size), generator=torch.Generator().manual_seed(size))
            update(weight, gradient, mean, square.abs_(), None, 0.1, (0.9, 0.95), rates)
            states.append(torch.stack((weight, mean, square)))
        assert torch.equal(*states)


def test_what_compiles_again_and_again_fails_at_torchs_own_limit(traced: None) -> None:
    step, _ = make_step(MemoryCache("float32", 3, 32, 61, [40]), config(), SETTINGS, mode="compile")
    limit = torch._dynamo.config.recompile_limit
    for size in range(2, 2 + limit):
        step.run_norm(torch.relu, torch.ones(size))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        step.run_norm(torch.relu, torch.ones(2 + limit))
    assert limit < KERNELS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo instantiates autograd functions
def test_what_was_compiled_once_is_not_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our autograd functions too: a start with kernels in the cache took a fifth longer without."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(8, 4)
    for counted in ("autograd_cache_saved", "autograd_cache_hit"):
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters["aot_autograd"]
        counts.clear()
        product = compiler("compile")(NarrowProduct.apply)
        product(x, weight.detach(), weight).sum().backward()
        assert (counts[counted], counts["autograd_cache_bypass"]) == (1, 0)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_graphs_replay_what_compile_runs_bit_for_bit(codec: str) -> None:
    compiled, whole = train_both("cuda", codec)
    assert all(torch.equal(compiled[name], whole[name]) for name in compiled)


@pytest.mark.gpu
def test_a_failed_capture_names_what_broke_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MemoryCache("bf16", 3, 64, 256, [60, 40, 30])
    step, _ = make_step(cache, config(hidden_size=64, vocab_size=256), SETTINGS, mode="whole", device="cuda",
                        dtype=torch.bfloat16, dense=False)  # fmt: skip
    monkeypatch.setattr(step.optimizer, "update", lambda: step.optimizer.norm.item())
    with pytest.raises(Failure, match=r"of `update` failed at pipeline/graphs.py:\d+ \(run_update\): .*capturing"):
        step.prepare(1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kinds",
    [{}, {"block_size": 10}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}],
)
def test_flex_step_equals_dense_oracle_on_a_gpu(kinds: dict[str, Any]) -> None:
    results = []
    for mode, dense in (("eager", True), ("whole", False)):
        torch._dynamo.reset()
        cache = MemoryCache("float32", 3, 64, 256, [100, 80, 120, 90, 60])
        settings = SETTINGS.model_copy(update={"context_tokens": 512})
        step, plan = make_step(cache, config(hidden_size=64, vocab_size=256, **kinds), settings, mode=mode,
                               device="cuda", dense=dense)  # fmt: skip
        step.prepare(1)
        run(step, cache, plan.step(0)[0])
        step.micro(True, True)
        results.append((step.sums["loss"].item(), {n: p.grad.clone() for n, p in step.drafter.named_parameters()}))
    (loss, slow), (fast_loss, fast) = results
    assert fast_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in slow.items():
        assert (fast[name] - gradient).norm() / gradient.norm() < 1e-3, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo instantiates autograd functions
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_decodes_inside_the_compiled_step(codec: str) -> None:
    gradients = []
    for mode in ("eager", "compile"):
        torch._dynamo.reset()
        cache = MemoryCache(codec, 3, 64, 256, [60, 40, 30])
        step, plan = make_step(cache, config(hidden_size=64, vocab_size=256), SETTINGS, mode=mode, dtype=torch.bfloat16)
        run(step, cache, whole_plan(cache, plan))
        step.run_micro(first=True, last=True)
        gradients.append({name: p.grad.clone() for name, p in step.drafter.named_parameters()})
    plain, compiled = gradients
    for name, gradient in plain.items():
        assert (compiled[name] - gradient).norm() / gradient.norm() < 0.03, name


def test_rules_resolve_the_published_decays() -> None:
    assert [LossRule.of(Loss(), b).decay for b in (16, 10, 8, 7, 4)] == [7.0, 5.0, 4.0, 4.0, 4.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo instantiates autograd functions
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fp8", "tolerance"), [(False, 0.03), (True, 0.3)])
def test_joint_products_of_narrow_copies_follow_the_oracle(mode: str, fp8: bool, tolerance: float) -> None:
    """bf16 rounds to 3 digits, e5m2 gradients to 1; a matrix in another's place would be wrong by more than 1."""
    torch._dynamo.reset()
    cache = MemoryCache("float32", 3, 64, 256, [60, 40, 30])
    narrow, plan = make_step(cache, config(hidden_size=64, vocab_size=256), SETTINGS, mode=mode, dtype=torch.bfloat16,
                             fp8=fp8)  # fmt: skip
    batch = whole_plan(cache, plan)
    run(narrow, cache, batch)
    narrow.run_micro(first=True, last=True)
    wide, _ = make_step(cache, config(hidden_size=64, vocab_size=256), SETTINGS)
    run(wide, cache, batch)
    wide.run_micro(first=True, last=True)
    for (name, a), b in zip(narrow.drafter.named_parameters(), wide.drafter.parameters(), strict=True):
        assert (a.grad - b.grad).norm() / b.grad.norm() < tolerance, name
    narrow.run_update()
    for name, copy in narrow.narrow.copies.items():
        assert torch.equal(copy, narrow.drafter.get_parameter(name).bfloat16()), name


def test_drafter_has_the_released_names() -> None:
    names = dict(Drafter(config(num_layers=3)).named_parameters())
    assert len(names) == 11 * 3 + 3
    assert names["fc.weight"].shape == (32, 3 * 32)


def initial(seed: int, threads: int | None = None, device: str = "cpu") -> dict[str, Tensor]:
    drafter = unset_drafter(config(num_layers=3), device)
    initialise(drafter, seed, threads=threads)
    return {name: parameter.detach().cpu() for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_initial_weights_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("pipeline.drafter.PIECE", 1000)  # several pieces a matrix, the last of another size
    weights, others = initial(7), initial(7, threads)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_initial_weights_are_normal_and_differ_among_parameters_pieces_and_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.drafter.PIECE", 512)
    weights = initial(7)
    assert all((gain == 1).all() for gain in weights.values() if gain.ndim == 1)
    pieces = [x for weight in weights.values() if weight.ndim == 2 for x in weight.flatten().split(512)]
    pieces += [initial(seed)["fc.weight"].flatten()[:512] for seed in (8, -1)]
    whole = torch.cat(pieces)
    assert abs(whole.std() - 0.02) < 2e-4
    assert abs(whole.mean()) < 2e-4
    assert len({tuple(piece[:4].tolist()) for piece in pieces}) == len(pieces)


@pytest.mark.gpu
def test_initial_weights_are_the_same_on_every_device() -> None:
    weights, others = initial(7), initial(7, device="cuda")
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10000.0), (96, 5e5), (128, 1e6)])
def test_plain_rope_is_that_of_transformers(head_dim: int, theta: float) -> None:
    parameters = {"rope_type": "default", "rope_theta": theta}
    rotary = Qwen3RotaryEmbedding(Qwen3Config(head_dim=head_dim, rope_parameters=parameters))
    frequencies, factor = rope_frequencies(config(head_dim=head_dim, rope_theta=theta))
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=0, atol=0)
    assert factor == rotary.attention_scaling
