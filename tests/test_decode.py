import copy
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from torch.nn import functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from data.errors import BadInput
from pipeline import validation
from pipeline.decode import Answer, Engine, Prompt, stop_ids
from pipeline.drafter import Drafter, DrafterConfig, initialise
from pipeline.kvcache import layer_windows
from pipeline.sampling import Sampling, probabilities
from pipeline.target import Target

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MASK, STOP, B = 63, 2, 6


def target_of(model: PreTrainedModel) -> Target:
    return Target(model, None, str(model.device))


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    return target_of(LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.15)))


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return make_drafter()


def make_drafter(sliding: int | None = 7, block_size: int = B) -> Drafter:
    """Two layers, one of them sliding, with random weights: its drafts are mostly wrong, sometimes right."""
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        block_size=block_size, mask_token_id=MASK, target_layer_ids=(0, 1, 2), num_target_layers=4, vocab_size=64,
        max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None,
        layer_types=("full_attention", "sliding_attention" if sliding else "full_attention"), sliding_window=sliding,
    )  # fmt: skip
    made = Drafter(config)
    initialise(made, seed=1, std=0.2)
    return made.eval().requires_grad_(False)


def make_prompts(count: int, longest: int = 150) -> list[Prompt]:
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, longest, size=count)
    return [Prompt(f"p{i}", generator.integers(3, 60, size=n).tolist()) for i, n in enumerate(lengths)]


def make_engine(target: Target, drafter: Drafter | None, batch_size: int = 4, **more: Any) -> Engine:
    settings = {"max_length": 200, "sampling": Sampling(), "stop_ids": (STOP,), **more}
    return Engine(target, drafter, batch_size=batch_size, **settings)


def decode(engine: Engine, prompts: list[Prompt], new: int = 20) -> dict[str, Answer]:
    answers = {answer.id: answer for answer in engine.generate(prompts, new)}
    assert sorted(answers) == sorted(prompt.id for prompt in prompts)
    return answers


def reference(model: PreTrainedModel, prompt: Prompt, new: int = 20) -> tuple[int, ...]:
    """Greedy continuation by whole forward passes, without any cache."""
    ids = list(prompt.ids)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == STOP:
                break
    return tuple(ids[len(prompt.ids) :])


def with_drafts(engine: Engine, rule: Callable[[int, int], list[int]]) -> Engine:
    """Replace the drafter's guesses: `rule(row, position of slot 1)` gives the tokens of slots 1 to B - 1."""

    def draft(anchor_ids: torch.Tensor, positions: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        return torch.tensor([rule(row, int(at)) for row, at in enumerate(positions[:, 1])]), None

    engine.steps.draft = draft  # type: ignore[method-assign]
    return engine


def test_plain_and_drafted_greedy_output_is_the_models_own(target: Target, drafter: Drafter) -> None:
    prompts = make_prompts(9)
    expected = {prompt.id: reference(target.model, prompt) for prompt in prompts}
    assert len({len(ids) for ids in expected.values()}) > 1  # some stop early
    for batch_size in (2, 5):
        for made in (None, drafter):
            answers = decode(make_engine(target, made, batch_size), prompts)
            assert {name: answer.ids for name, answer in answers.items()} == expected
            assert all(answer.finished == (answer.ids[-1] == STOP) for answer in answers.values())


def test_blocks_cover_the_answer_after_its_first_token(target: Target, drafter: Drafter) -> None:
    prompts = make_prompts(6)
    answers = decode(make_engine(target, drafter), prompts)
    for prompt in prompts:
        answer = answers[prompt.id]
        assert sum(block.length for block in answer.blocks) == len(answer.ids) - 1
        starts = [block.start_position for block in answer.blocks]
        lengths = [block.length for block in answer.blocks]
        assert starts == [len(prompt.ids) + sum(lengths[:index]) for index in range(len(starts))]
        assert answer.prompt_tokens == len(prompt.ids)


def test_answers_do_not_depend_on_order_or_batch_even_when_sampled(target: Target, drafter: Drafter) -> None:
    prompts = make_prompts(6)
    for made in (None, drafter):
        first = decode(make_engine(target, made, 4, sampling=Sampling(1.0, seed=3)), prompts)
        other = decode(make_engine(target, made, 2, sampling=Sampling(1.0, seed=3)), prompts[::-1])
        assert first == other
        again = decode(make_engine(target, made, 4, sampling=Sampling(1.0, seed=4)), prompts)
        assert {a.ids for a in first.values()} != {a.ids for a in again.values()}


@pytest.mark.parametrize("right", [0, 1, B - 2, B - 1])
def test_known_drafts_give_known_block_lengths(target: Target, drafter: Drafter, right: int) -> None:
    prompt = Prompt("p", [5, 6, 7])
    truth = [*prompt.ids, *reference(target.model, prompt, 40)]

    def rule(row: int, at: int) -> list[int]:
        told = [truth[at + k] if at + k < len(truth) else 0 for k in range(B - 1)]
        return [token if k < right else (token + 1) % 64 for k, token in enumerate(told)]

    answer = decode(with_drafts(make_engine(target, drafter, 1), rule), [prompt], 40)["p"]
    assert [*prompt.ids, *answer.ids] == truth
    whole = [block for block in answer.blocks if block.start_position + B < len(truth)]
    assert whole
    assert {(block.accepted, block.length) for block in whole} == {(right, right + 1)}


@pytest.mark.parametrize("stop_at", range(1, B + 1))
def test_a_stop_ends_the_answer_at_any_slot(target: Target, drafter: Drafter, stop_at: int) -> None:
    prompt = Prompt("p", [5, 6, 7])
    free = decode(make_engine(target, None, 1, stop_ids=()), [prompt], 40)["p"].ids
    stop = free[stop_at]
    first = free.index(stop)
    truth = [*prompt.ids, *free]

    def rule(row: int, at: int) -> list[int]:
        return truth[at : at + B - 1]

    engine = with_drafts(make_engine(target, drafter, 1, stop_ids=(62, stop)), rule)
    answer = decode(engine, [prompt], 30)["p"]
    assert answer.ids == free[: first + 1]
    assert answer.finished


def test_the_limit_cuts_an_answer_in_mid_block(target: Target, drafter: Drafter) -> None:
    prompt = Prompt("p", [5, 6, 7])
    truth = [*prompt.ids, *reference(target.model, prompt, 40)]
    for new in range(1, 10):
        engine = with_drafts(make_engine(target, drafter, 1), lambda row, at: truth[at : at + B - 1])
        answer = decode(engine, [prompt], new)["p"]
        assert list(answer.ids) == truth[3 : 3 + new]
        assert not answer.finished


def test_a_prompts_own_limit_and_the_engines_length_hold(target: Target, drafter: Drafter) -> None:
    prompts = [Prompt("short", [5, 6, 7], limit=4), Prompt("long", [5] * 195)]
    for made in (None, drafter):
        answers = decode(make_engine(target, made, stop_ids=()), prompts, 20)
        assert len(answers["short"].ids) == 4
        assert len(answers["long"].ids) == 5


def test_prompts_that_do_not_fit_are_refused_by_name(target: Target) -> None:
    for bad in (Prompt("bad", [5] * 200), Prompt("bad", [])):
        with pytest.raises(BadInput, match="`bad`"):
            decode(make_engine(target, None), [bad])


def test_no_prompts_give_no_answers(target: Target) -> None:
    assert decode(make_engine(target, None), []) == {}


def test_smaller_blocks_decode_the_same_text_and_larger_ones_are_refused(target: Target, drafter: Drafter) -> None:
    prompts = make_prompts(3)
    whole, small = (
        decode(make_engine(target, drafter), prompts),
        decode(make_engine(target, drafter, block_size=3), prompts),
    )
    assert {a.ids for a in whole.values()} == {a.ids for a in small.values()}
    assert {block.drafted for answer in small.values() for block in answer.blocks} == {2}
    with pytest.raises(BadInput, match="block size 7"):
        make_engine(target, drafter, block_size=B + 1)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_sliding_windows_and_capped_scores_are_the_models_own(family: str) -> None:
    torch.manual_seed(0)
    make: dict[str, Callable[[], PreTrainedModel]] = {
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9, initializer_range=0.15)),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, sliding_window=9, attn_implementation="eager", initializer_range=0.15)
        ),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SIZES,
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention"] * 2,
                initializer_range=0.15,
            )
        ),
    }
    target = target_of(make[family]())
    prompts = make_prompts(4, longest=60)
    expected = {prompt.id: reference(target.model, prompt, 12) for prompt in prompts}
    for made in (None, make_drafter()):
        answers = decode(make_engine(target, made), prompts, 12)
        assert {name: answer.ids for name, answer in answers.items()} == expected
    assert target.config._attn_implementation in ("sdpa", "eager")


def test_targets_whose_state_cannot_roll_back_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="rolled back"):
        layer_windows(MambaConfig(**{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}))


def test_stop_ids_are_all_that_the_checkpoint_names(target: Target) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 6]))
    named = SimpleNamespace(
        model=model, config=SimpleNamespace(eos_token_id=7), tokenizer=SimpleNamespace(eos_token_id=6)
    )
    assert stop_ids(named) == (5, 6, 7)


def states_of(target: Target, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[1, T, K * H], by transformers' own hidden states."""
    hidden = target.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer + 1] for layer in layers], -1)


def dense_matches(target: Target, drafter: Drafter, ids: list[int], states: torch.Tensor, anchor: int) -> int:
    """Hits in a row of the block anchored at `anchor` of `ids`: one dense pass, no cache, no engine."""
    size = drafter.config.block_size
    context = drafter.project(states[:, :anchor])
    places = torch.arange(anchor + size)
    rope = drafter.rope(places[None, :anchor])
    held = [layer.self_attn.keys_values(context, rope) for layer in drafter.layers]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(size, anchor + size, dtype=torch.bool)
        if drafter.config.layer_types[layer] == "sliding_attention":
            gap = places[anchor:, None] - places
            seen = (gap >= 0) & (gap < (drafter.config.sliding_window or 0))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    block = target.head().embed(torch.tensor([[ids[anchor]] + [MASK] * (size - 1)]))
    drafts = target.head().logits(drafter(block, drafter.rope(places[None, anchor:]), held, attend))[0, 1:].argmax(-1)
    labels = ids[anchor + 1 : anchor + size]
    hits = [int(d) == t for d, t in zip(drafts, labels, strict=False)]
    return hits.index(False) if False in hits else len(hits)


@torch.no_grad()
def test_the_validation_walk_predicts_every_block(target: Target, drafter: Drafter) -> None:
    prompts = make_prompts(4, longest=40)
    for answer in decode(make_engine(target, drafter), prompts, 24).values():
        prompt = next(p for p in prompts if p.id == answer.id)
        ids = [*prompt.ids, *answer.ids]
        supervised = np.arange(len(ids)) >= len(prompt.ids)
        matches = np.zeros(len(ids), dtype=np.int32)
        states = states_of(target, ids, drafter.config.target_layer_ids)
        for anchor in range(len(prompt.ids), len(ids) - 1):
            matches[anchor] = dense_matches(target, drafter, ids, states, anchor)
        walked = [(block.anchor, block.length) for block in validation.walk(supervised, matches, B)]
        assert walked == [(block.start_position, block.length) for block in answer.blocks]


def test_sampled_text_follows_the_targets_distribution(target: Target, drafter: Drafter) -> None:
    ids, plan, count = [5, 6, 7], Sampling(0.6, seed=11), 1500
    with torch.no_grad():
        second = probabilities(target.model(torch.tensor([ids])).logits[0, -1], plan)
        paths = torch.tensor([[*ids, token] for token in range(64)])
        third = probabilities(target.model(paths).logits[:, -1], plan)
    joint = (second[:, None] * third).flatten().double().numpy()
    frequent = np.argsort(-joint)[:40]
    expected = np.append(joint[frequent], 1 - joint[frequent].sum()) * count
    prompts = [Prompt(f"s{index}", ids) for index in range(count)]
    for made in (None, drafter):
        answers = decode(make_engine(target, made, 1500, sampling=plan, stop_ids=(), max_length=16), prompts, 3)
        seen = Counter(answer.ids[0] * 64 + answer.ids[1] for answer in answers.values())
        counts = np.array([seen[index] for index in frequent.tolist()])
        counts = np.append(counts, count - counts.sum())
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < len(frequent) + 5 * np.sqrt(2 * len(frequent))


@pytest.mark.gpu2
def test_a_target_over_two_gpus_says_the_same() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.15))
    halves = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    spread = dispatch_model(copy.deepcopy(model), halves | {f"model.layers.{i}": i // 2 for i in range(4)})
    prompts, drafter = make_prompts(12), make_drafter().to("cuda:0")
    for made in (None, drafter):
        one = make_engine(target_of(model.to("cuda:0")), made, 4, graphs=False)
        two = make_engine(Target(spread, None, "cuda:0"), made, 4)
        assert not two.graphs.enabled
        assert decode(two, prompts) == decode(one, prompts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_change_no_token() -> None:
    torch.manual_seed(0)
    target = target_of(LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.15)).cuda())
    drafter = make_drafter().cuda()
    prompts = make_prompts(40)
    for made in (None, drafter):
        for plan in (Sampling(), Sampling(1.0)):
            eager = decode(make_engine(target, made, 16, graphs=False, sampling=plan), prompts)
            graphed = make_engine(target, made, 16, sampling=plan)
            assert decode(graphed, prompts) == eager
            captured = graphed.graphs.count
            decode(graphed, prompts)
            assert graphed.graphs.count == captured > 0
