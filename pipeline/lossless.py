"""Is drafted greedy output the target's own? Token for token, but for ties that rounding decides.

A pass over a block and a pass over one token round differently, so that two tokens with nearly equal logits may change
places. At a first difference both tokens' logits are computed again, from the text alone, in a wider format. In a
float32 run a float64 gap up to 1e-4 is a tie. In a bf16 run transformers' own cache runs the text once with a block
last and once with one token last, and the largest difference of any logit from float32 is what rounding does there:
two logits, each off by no more than that, may swap over a float32 gap of twice as much. (The difference between the
two passes alone is too small a measure: what both round alike does not show in it.) After a tie, decoding goes on
from the plain token and is compared further. Nothing of the engine that is judged takes part in the judgement.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from data.errors import BadInput, Failure
from pipeline.console import Progress
from pipeline.decode import Answer, Engine, Prompt
from pipeline.kvcache import cache_argument
from pipeline.target import Target

FLOAT32_GAP = 1e-4
"""Largest float64 gap between two logits that a float32 run may swap."""
BATCH_TOKENS = 1 << 15
"""Tokens, padding included, of texts that are judged together."""


@dataclass(frozen=True)
class Difference:
    """Where a drafted answer left the plain one: `position` counts from the answer's first token."""

    prompt: str
    position: int
    plain: int
    drafted: int
    gap: float
    """Plain token's logit minus drafted token's, in the wider format."""
    allowed: float
    """What rounding may swap."""

    @property
    def tie(self) -> bool:
        return abs(self.gap) <= self.allowed


@dataclass
class Verdict:
    """`checked` answers, of which `exact` never differed; `ties` by prompt and position."""

    checked: int = 0
    exact: int = 0
    tokens: int = 0
    ties: list[Difference] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        largest = max((abs(tie.gap) for tie in self.ties), default=0.0)
        ties = [asdict(tie) for tie in self.ties]
        return {**asdict(self), "ties": ties, "tie_count": len(ties), "largest_gap": largest}


@dataclass(frozen=True)
class _Text:
    """An answer under comparison: the prompt, the plain answer, and from where in it the drafted tokens are new."""

    prompt: Prompt
    plain: tuple[int, ...]
    begin: int = 0


def check(
    engine: Engine,
    target: Target,
    prompts: Sequence[Prompt],
    plain: Mapping[str, Answer],
    drafted: Mapping[str, Answer],
    check_stop: Callable[[], None],
) -> Verdict:
    """Compare drafted answers with plain ones, resuming `engine` after each tie. `check_stop` may raise to stop.

    Raises Failure naming prompt and position of a difference that is no tie, and BadInput when the wider copy of the
    target does not fit into memory.
    """
    verdict = Verdict(checked=len(prompts), tokens=sum(len(plain[prompt.id].ids) for prompt in prompts))
    judge: Judge | None = None
    texts = [_Text(prompt, plain[prompt.id].ids) for prompt in prompts]
    answers = {prompt.id: drafted[prompt.id].ids for prompt in prompts}
    while texts:
        found = [(text, at) for text in texts if (at := _first_difference(text, answers[text.prompt.id])) is not None]
        if not found:
            break
        judge = judge or Judge(target, engine.block_size)
        with Progress(len(found), "lossless check: differences judged", unit="answers") as bar:
            judged = _judged(judge, found, answers, bar, check_stop)
        torch.cuda.empty_cache()  # a capture, which new lengths may ask for, cannot take what the allocator keeps
        texts = []
        for text, difference in zip(*judged, strict=True):
            if not difference.tie:
                raise Failure(_complaint(difference))
            verdict.ties.append(difference)
            if difference.position + 1 < len(text.plain):
                texts.append(_Text(text.prompt, text.plain, difference.position + 1))
        if not texts:
            break
        resumed = [_resume(text) for text in texts]
        answers = {}
        with Progress(len(resumed), "lossless check: drafted again behind ties", unit="answers") as bar:
            for answer in engine.generate(resumed, max(prompt.limit for prompt in resumed), bar):
                check_stop()
                answers[answer.id] = answer.ids
    verdict.exact = len(prompts) - len({tie.prompt for tie in verdict.ties})
    del judge
    torch.cuda.empty_cache()
    return verdict


def _first_difference(text: _Text, drafted: tuple[int, ...]) -> int | None:
    """Index in the plain answer at which the drafted tokens, which begin at `text.begin`, leave it."""
    expected = text.plain[text.begin :]
    for index, (one, other) in enumerate(zip(expected, drafted, strict=False)):
        if one != other:
            return text.begin + index
    if len(expected) != len(drafted):
        raise Failure(
            f"prompt `{text.prompt.id}`: drafted output is {text.begin + len(drafted)} tokens long and plain output "
            f"{len(text.plain)}, though they agree as far as they go: stop or limit is not handled alike"
        )
    return None


def _resume(text: _Text) -> Prompt:
    ids = [*text.prompt.ids, *text.plain[: text.begin]]
    return Prompt(text.prompt.id, ids, len(text.plain) - text.begin)


def _judged(
    judge: Judge,
    found: Sequence[tuple[_Text, int]],
    answers: Mapping[str, tuple[int, ...]],
    bar: Progress,
    check_stop: Callable[[], None],
) -> tuple[list[_Text], list[Difference]]:
    """Judge differences, shortest texts first; where a batch does not fit into memory, smaller ones are tried."""
    found = sorted(found, key=lambda pair: len(pair[0].prompt.ids) + pair[1])
    pairs = [(text.plain[at], answers[text.prompt.id][at - text.begin]) for text, at in found]
    results: list[tuple[float, float]] = []
    size = max(1, BATCH_TOKENS // (len(found[-1][0].prompt.ids) + found[-1][1]))
    while len(results) < len(found):
        check_stop()
        now = slice(len(results), len(results) + size)
        contexts = [[*text.prompt.ids, *text.plain[:at]] for text, at in found[now]]
        try:
            results += judge.gaps(contexts, pairs[now])
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size = (size + 1) // 2
            continue
        bar.advance(len(contexts))
    differences = [
        Difference(text.prompt.id, at, plain, drafted, gap, allowed)
        for (text, at), (plain, drafted), (gap, allowed) in zip(found, pairs, results, strict=True)
    ]
    return [text for text, _ in found], differences


def _complaint(difference: Difference) -> str:
    return (
        f"not lossless: prompt `{difference.prompt}`, answer position {difference.position}: plain decoding says token "
        f"{difference.plain}, drafted decoding {difference.drafted}; their logits are {difference.gap:.3g} apart and "
        f"rounding explains {difference.allowed:.3g}"
    )


class Judge:
    """Computes logits anew, from token ids alone, with a copy of the target in a wider format.

    Raises BadInput when that copy, twice the target's size, does not fit beside it.
    """

    def __init__(self, target: Target, block_size: int) -> None:
        self.model, self.block_size = target.model, block_size
        self.exact_format = torch.float64 if target.dtype == torch.float32 else torch.float32
        try:
            self.wide = copy.deepcopy(target.model)
            nn.Module.to(self.wide, self.exact_format)  # a device map's own `to` would be the original's
        except torch.OutOfMemoryError:
            size = sum(weight.numel() for weight in target.model.parameters()) * self.exact_format.itemsize
            name = str(self.exact_format).removeprefix("torch.")
            raise BadInput(
                f"eval.batch_size: ties are judged with a {name} copy of the target, {size / 1e9:.0f} GB, which does "
                "not fit beside it: lower it, or spread the target over more GPUs (target.gpus)"
            ) from None
        self.argument = cache_argument(target.stack)

    @torch.no_grad()
    def gaps(self, contexts: Sequence[list[int]], pairs: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """For each text and (plain, drafted) token after it: their gap, and the largest gap that rounding explains."""
        ids, seen = _left_padded(contexts, self.model.device)
        exact = self._logits(self.wide, ids, seen, 0)
        pick = torch.tensor(pairs, device=ids.device)
        gap = exact.gather(1, pick).diff(dim=1).neg().squeeze(1)
        if self.exact_format == torch.float64:
            allowed = torch.full_like(gap, FLOAT32_GAP)
        else:
            one = self._logits(self.model, ids, seen, 1).float()
            block = self._logits(self.model, ids, seen, min(self.block_size, min(map(len, contexts)) - 1)).float()
            allowed = 2 * torch.maximum((one - exact).abs().amax(1), (block - exact).abs().amax(1))
        return list(zip(gap.tolist(), allowed.tolist(), strict=True))

    def _logits(self, model: Any, ids: Tensor, seen: Tensor, last: int) -> Tensor:
        """Logits [n, V] after the last token; `last` tokens run in a pass of their own over cached ones, if any."""
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        cut = ids.shape[1] - last
        if last == 0 or cut == 0:
            made = model(input_ids=ids, attention_mask=seen, position_ids=positions, use_cache=False, logits_to_keep=1)
            return made.logits[:, -1]
        held = {self.argument: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
        model(input_ids=ids[:, :cut], attention_mask=seen[:, :cut], position_ids=positions[:, :cut], **held)
        made = model(input_ids=ids[:, cut:], attention_mask=seen, position_ids=positions[:, cut:], **held)
        return made.logits[:, -1]


def _left_padded(contexts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, contexts))
    ids = [[0] * (longest - len(context)) + list(context) for context in contexts]
    seen = [[0] * (longest - len(context)) + [1] * len(context) for context in contexts]
    return torch.tensor(ids, device=device), torch.tensor(seen, device=device)
