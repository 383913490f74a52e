"""Decoding: many prompts in flight, each row with its own length, with a drafter or without one.

    engine = Engine(target, drafter, batch_size=32, max_length=1024, sampling=Sampling(), stop_ids=stop_ids(target))
    for answer in engine.generate([Prompt("p0", ids)], max_new_tokens=256):
        ...

Rows finish and are replaced. On a CUDA device prefill, plain and drafted steps are CUDA graphs, one for each number of
visible positions (of a target spread over several, plain launches); tokens are judged on the device, and the host
waits once a step, for the rows' lengths. Without a
drafter the same engine makes the plain baseline and on-policy answers. What an answer is depends on its prompt, the
sampling seed and rounding alone, not on order (rounding may depend on the batch's shape).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from data.errors import BadInput
from pipeline.capture import Graphs
from pipeline.drafter import Drafter
from pipeline.passes import Rows, Steps
from pipeline.sampling import Sampling, text_key
from pipeline.target import Target

CHUNK = 128
"""Tokens a row in one prefill pass."""
GROUP = 64
"""Rows prefilled together, at most."""
SPAN_STEP = 64
"""Visible positions are rounded up to a multiple of this."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, the id that names them (and seeds their random numbers), and most new tokens, if they are
    fewer than the call's."""

    id: str
    ids: Sequence[int]
    limit: int | None = None


@dataclass(frozen=True)
class Block:
    """One verified block. `start_position` is the anchor's position and so the number of context states; `drafted` =
    B - 1 tokens were guessed; `length` new tokens were kept, the first `accepted` of which were drafts. They are
    equal when a stop or the limit cut the block before its bonus token, else `length` = `accepted` + 1."""

    start_position: int
    drafted: int
    accepted: int
    length: int


@dataclass(frozen=True)
class Answer:
    """New tokens of a prompt of `prompt_tokens`, the stop token included when `finished`; else the limit ended it. The
    first token comes from the prefill, the others from `blocks` (empty without a drafter)."""

    id: str
    ids: tuple[int, ...]
    finished: bool
    blocks: tuple[Block, ...] = ()
    prompt_tokens: int = 0


class Advances(Protocol):
    """Something with a progress bar's `advance`."""

    def advance(self, n: float = 1, note: str | None = None) -> None: ...


@dataclass
class Counts:
    """Work done so far: prefill passes, steps of all rows together, new tokens."""

    prefills: int = 0
    steps: int = 0
    tokens: int = 0


def stop_ids(target: Target) -> tuple[int, ...]:
    """Ids that end an answer: all that the checkpoint's generation settings, its config and its tokenizer name."""
    generation = getattr(target.model, "generation_config", None)
    named = [getattr(generation, "eos_token_id", None), getattr(target.config, "eos_token_id", None)]
    named.append(getattr(target.tokenizer, "eos_token_id", None))
    flat = (value for group in named for value in (group if isinstance(group, list | tuple) else [group]))
    return tuple(sorted({int(value) for value in flat if value is not None}))


class Engine:
    """Decodes with `target`, and with drafts when there is a `drafter`.

    `batch_size` rows in flight; `max_length` tokens at most in a prompt and its answer together; `block_size` up to the
    drafter's own. `graphs`: CUDA graphs on, off, or on when the device is a GPU.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        batch_size: int,
        max_length: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        block_size: int | None = None,
        graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        trained = 1 if drafter is None else drafter.config.block_size
        self.block_size = trained if block_size is None or drafter is None else block_size
        if not (self.block_size == 1 if drafter is None else 2 <= self.block_size <= trained):
            raise BadInput(f"block size {self.block_size} is not between 2 and the drafter's {trained}")
        self.max_length, self.batch_size = max_length, batch_size
        device = torch.device(target.device)
        rope = (getattr(target.config, "rope_parameters", None) or {}).get("rope_type", "default")
        spread = len({weight.device for weight in target.model.parameters()}) > 1  # a graph is of one device
        replays = device.type == "cuda" and not spread and rope not in ("dynamic", "longrope")  # read on the host
        capacity = _round_up(max_length + self.block_size + 1, SPAN_STEP)
        self.rows = Rows(batch_size, capacity, device)
        self.enough = max(1, min(batch_size // 8, GROUP))
        enabled = replays if graphs == "auto" else graphs
        self.group = self.enough if enabled else min(batch_size, GROUP)
        self.steps = Steps(target, drafter, self.rows, self.group, sampling, stop_ids, self.block_size)
        self.step = self.steps.plain if drafter is None else self.steps.drafted
        fuse = (self.steps.target.decoder,) if drafter is None else (self.steps.target.decoder, drafter)
        self.graphs = Graphs(enabled, fuse)
        self.counts = Counts()
        self._status = _host(2, batch_size, dtype=torch.int64, device=device)
        self._lengths = [1] * batch_size

    @torch.no_grad()
    def generate(
        self, prompts: Iterable[Prompt], max_new_tokens: int, progress: Advances | None = None
    ) -> Iterator[Answer]:
        """Answers as they finish.

        Raises BadInput for a prompt that is empty or leaves no room for an answer.
        """
        queue, more = iter(prompts), True
        held: list[tuple[Prompt, int] | None] = [None] * self.batch_size
        leaving: deque[_Leaving] = deque()
        while True:
            free = [row for row, prompt in enumerate(held) if prompt is None]
            idle = len(free) == self.batch_size
            if more and (len(free) >= self.enough or idle):
                taken = _take(queue, len(free) if idle else len(free) - len(free) % self.enough)
                more = len(taken) > 0
                self._admit(taken, free, held, max_new_tokens)
                idle = idle and not taken
            if not idle:
                self._advance()
            self._wait()
            while leaving:
                yield from leaving.popleft().answers(self.block_size, self.counts, progress)
            if idle:
                return
            done = [row for row, prompt in enumerate(held) if prompt is not None and not self._status[1, row]]
            if done:
                leaving.append(self._leave(done, held))

    def _advance(self) -> None:
        """One step of all rows, then their lengths and flags on their way to the host."""
        span = self._span(max(self._lengths) + self.block_size)
        live = [row for row, length in enumerate(self._lengths) if length > 1]
        if self.graphs.enabled or len(live) == self.batch_size:
            self.graphs.run(("step", span), partial(self.step, span), self.rows.idle)
        else:
            self.step(span, torch.tensor(live, device=self.rows.ids.device))
        self.counts.steps += 1
        self._status[0].copy_(self.rows.length[:-1], non_blocking=True)
        self._status[1].copy_(self.rows.active[:-1], non_blocking=True)

    def _wait(self) -> None:
        """The one wait of a step."""
        if self.rows.ids.is_cuda:
            torch.cuda.current_stream().synchronize()
        live = self._status[1].tolist()
        self._lengths = [n if on else 1 for n, on in zip(self._status[0].tolist(), live, strict=True)]

    def _admit(
        self, taken: list[Prompt], free: list[int], held: list[tuple[Prompt, int] | None], max_new_tokens: int
    ) -> None:
        """Put prompts into free rows and run them up to their first new token, in groups of similar length."""
        taken.sort(key=lambda prompt: len(prompt.ids))
        for first in range(0, len(taken), self.group):
            group = taken[first : first + self.group]
            slots = free[first : first + len(group)]
            for prompt, slot in zip(group, slots, strict=True):
                if not 0 < len(prompt.ids) < self.max_length:
                    raise BadInput(
                        f"prompt `{prompt.id}` has {len(prompt.ids)} tokens; it needs at least 1 and at most "
                        f"{self.max_length - 1}, so that an answer fits into {self.max_length}"
                    )
                held[slot] = (prompt, len(prompt.ids))
                self._lengths[slot] = len(prompt.ids) + 1
            self._load(group, slots, max_new_tokens)
            self._prefill(len(group), max(len(prompt.ids) for prompt in group))

    def _load(self, group: list[Prompt], slots: list[int], max_new_tokens: int) -> None:
        rows, device = self.rows, self.rows.ids.device
        where = slots + [rows.count] * (self.group - len(slots))
        lengths = [len(prompt.ids) for prompt in group]
        room = [min(max_new_tokens, prompt.limit or max_new_tokens) for prompt in group]
        limits = [min(length + new, self.max_length) for length, new in zip(lengths, room, strict=True)]
        facts = torch.tensor([slots, lengths, limits, [text_key(prompt.id) for prompt in group]]).to(device)
        ids = np.zeros((len(group), max(lengths)), dtype=np.int64)
        for row, prompt in zip(ids, group, strict=True):
            row[: len(prompt.ids)] = prompt.ids
        at, rows.length[facts[0]], rows.limit[facts[0]], rows.key[facts[0]] = facts
        rows.ids[at, : ids.shape[1]] = torch.from_numpy(ids).to(device)
        rows.blocks[at], rows.stopped[at] = 0, False
        rows.active[at] = rows.limit[at] > rows.length[at]
        self.steps.slots.copy_(torch.tensor(where))

    def _prefill(self, count: int, longest: int) -> None:
        """Run the first `count` rows of the group. Graphs have one shape; without them nothing is padded far."""
        fixed = self.graphs.enabled
        count = self.group if fixed else count
        for start in range(0, longest, CHUNK):
            tokens = CHUNK if fixed else min(CHUNK, _round_up(longest - start, 16))
            span = self._span(start + tokens)
            self.steps.start.fill_(start)
            work = partial(self.steps.prefill, span, count, tokens)
            self.graphs.run(("prefill", span), work, self.rows.idle)
            self.counts.prefills += 1
        self.steps.begin()

    def _span(self, least: int) -> int:
        """Visible positions: `least` rounded up, coarsely under graphs so that few are captured."""
        span = _round_up(least, SPAN_STEP)
        if self.graphs.enabled:
            power = 1 << (span - 1).bit_length()
            span = max(256, power * 3 // 4 if span <= power * 3 // 4 else power)
        return min(span, self.rows.capacity)

    def _leave(self, done: list[int], held: list[tuple[Prompt, int] | None]) -> _Leaving:
        """Start copying finished rows to the host; the next wait covers it."""
        rows = self.rows
        at = torch.tensor(done).to(rows.ids.device)
        widest = int(max(self._status[0, done]))
        left = _Leaving(
            [held[row] for row in done],
            _fetch(rows.ids[at, :widest]),
            _fetch(torch.stack((rows.length[at], rows.stopped[at].long(), rows.blocks[at]))),
            _fetch(rows.log[at]) if self.block_size > 1 else None,
        )
        for row in done:
            held[row] = None
        return left


@dataclass(frozen=True)
class _Leaving:
    """Finished rows on their way to the host: [n, T] ids, [3, n] length, stopped and block count, [n, S] accepted."""

    held: list[tuple[Prompt, int]]
    ids: Tensor
    facts: Tensor
    log: Tensor | None

    def answers(self, block_size: int, counts: Counts, progress: Advances | None) -> Iterator[Answer]:
        lengths, stopped, blocks = self.facts.tolist()
        for row, (prompt, begin) in enumerate(self.held):
            new = tuple(self.ids[row, begin : lengths[row]].tolist())
            log = [] if self.log is None else self.log[row, : blocks[row]].tolist()
            counts.tokens += len(new)
            if progress is not None:
                progress.advance(1)
            blocks_of = _blocks(begin, lengths[row] - 1, log, block_size - 1)
            yield Answer(prompt.id, new, bool(stopped[row]), blocks_of, begin)


def _blocks(start: int, last: int, log: list[int], drafted: int) -> tuple[Block, ...]:
    """Blocks from the accepted counts in `log`, the first anchored at `start`, the answer ending at position `last`."""
    blocks = []
    for matches in log:
        length = min(matches + 1, last - start)
        blocks.append(Block(start, drafted, min(matches, length), length))
        start += length
    return tuple(blocks)


def _take(queue: Iterator[Prompt], count: int) -> list[Prompt]:
    return [prompt for _, prompt in zip(range(count), queue, strict=False)]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _host(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def _fetch(tensor: Tensor) -> Tensor:
    """A copy on the host, complete at the next wait."""
    host = _host(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return host.copy_(tensor, non_blocking=True)
