"""Measures one drafter on one benchmark: plain and drafted decoding with the same engine, in the same process.

`measure` gives the body of `eval/<drafter>/<benchmark>.json`:

    benchmark, drafter, checkpoint, block_size, trained_block_size, definition
    ... everything of `pipeline.acceptance.summary`
    validation {acceptance, per_slot, gaps}     the training walk's numbers beside ours, or null
    lossless {checked, exact, tokens, tie_count, largest_gap, ties [{prompt, position, plain, drafted, gap, allowed}]}
                                                or null when tokens are sampled
    speed [{batch_size, prompts, plain, drafted {seconds, tokens, steps, tokens_per_s}, speedup}]
    examples [{id, prompt, spans [{kind: first | accepted | bonus, block, text, ids}], blocks [{length, accepted}]}]
    record {template, target, prompt {id, text, ids}, versions, settings, sampling, device}
    warnings [text]

Turns of a conversation are answered one after the other; the plain answer of a turn is put before the next, so that
plain and drafted decoding see the same prompts.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.benchmarks import BenchmarkPrompt
from data.conversations import Message
from data.errors import BadInput, Failure
from data.settings import Run
from pipeline import acceptance, lossless
from pipeline.console import Progress, say
from pipeline.decode import Answer, Engine, Prompt, stop_ids
from pipeline.drafter import Drafter, DrafterConfig
from pipeline.journal import installed
from pipeline.sampling import Sampling
from pipeline.target import Target
from pipeline.template import render_prompt, template_of

DEFINITION = (
    "acceptance length: new tokens of a block, the bonus token counted, cut after a stop and at the limit; the token "
    "that the prefill gives is in no block"
)
EXAMPLES = 4
"""Answers kept with their accepted spans."""
PACKAGES = ("draftmill", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Subject:
    """A drafter to be measured: `validation` is its walk's numbers (None for others' drafters), `trained_length` the
    longest row it has seen (None when unknown)."""

    name: str
    checkpoint: str
    drafter: Drafter
    block_size: int
    validation: Mapping[str, Any] | None = None
    trained_length: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timed:
    """Answers by prompt id and what they cost. Capturing graphs is not counted: it happens once."""

    answers: dict[str, Answer]
    seconds: float
    steps: int

    def record(self) -> dict[str, Any]:
        tokens = sum(len(answer.ids) for answer in self.answers.values())
        return {
            "seconds": self.seconds,
            "tokens": tokens,
            "steps": self.steps,
            "tokens_per_s": acceptance.ratio(tokens, self.seconds),
        }


@dataclass(frozen=True)
class Wave:
    """One turn of all conversations that have it, answered plainly. `groups` names each prompt's conversation."""

    prompts: list[Prompt]
    groups: list[str]
    plain: Timed


def fit(drafter: DrafterConfig, target: Any, where: str) -> None:
    """Raise BadInput, with both numbers, when a drafter was not made for a target of this (text) configuration."""
    facts = (
        ("width", drafter.hidden_size, target.hidden_size),
        ("vocabulary", drafter.vocab_size, target.vocab_size),
        ("target layers", drafter.num_target_layers, target.num_hidden_layers),
    )
    for what, mine, its in facts:
        if mine != its:
            raise BadInput(f"{where}: made for a target with {what} {mine}, this target has {its}")


class Conversations:
    """A benchmark's prompts as token ids, turn by turn."""

    def __init__(self, run: Run, tokenizer: Any, prompts: Sequence[BenchmarkPrompt]) -> None:
        self.arguments, self.tokenizer, self.prompts = dict(run.data.template_arguments), tokenizer, prompts
        self.system = run.data.system_prompt
        self.histories: dict[str, list[Message]] = {prompt.id: [] for prompt in prompts}

    @property
    def turns(self) -> int:
        return max(len(prompt.turns) for prompt in self.prompts)

    def ask(self, turn: int) -> tuple[list[Prompt], list[str]]:
        """Prompts of a turn, and the conversations that they belong to."""
        asked, groups = [], []
        for prompt in self.prompts:
            if turn >= len(prompt.turns):
                continue
            history = self.histories[prompt.id]
            history += self._opened(prompt.turns[turn]) if turn == 0 else prompt.turns[turn]
            ids = self._rendered(prompt, history)
            asked.append(Prompt(prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}", ids))
            groups.append(prompt.id)
        return asked, groups

    def _rendered(self, prompt: BenchmarkPrompt, messages: Sequence[Message]) -> list[int]:
        return render_prompt(self.tokenizer, messages, self.arguments, prompt.tools)

    def _opened(self, messages: Sequence[Message]) -> list[Message]:
        opens = self.system is not None and messages[0]["role"] not in ("system", "developer")
        return [{"role": "system", "content": self.system or ""}, *messages] if opens else list(messages)

    def reply(self, group: str, text: str) -> None:
        """Put an answer into its conversation."""
        self.histories[group].append({"role": "assistant", "content": text})

    def longest(self, max_new_tokens: int) -> int:
        """Tokens that the longest conversation may take. Answers are rendered again, which may lengthen them a bit."""
        answer = max_new_tokens + max_new_tokens // 8 + 64
        return max(
            sum(len(self._rendered(prompt, self._opened(turn))) + answer for turn in prompt.turns)
            for prompt in self.prompts
        )


class Evaluation:
    """Holds the target and the plain answers, which all drafters share."""

    def __init__(
        self,
        run: Run,
        target: Target,
        benchmarks: Mapping[str, Sequence[BenchmarkPrompt]],
        check_stop: Callable[[], None],
    ) -> None:
        self.run, self.target, self.settings, self.check_stop = run, target, run.eval, check_stop
        self.sampling = Sampling(run.eval.temperature, run.eval.top_p, run.eval.top_k, run.eval.seed)
        self.benchmarks = benchmarks
        ends = template_of(target.tokenizer, run.data.template_arguments).end_of_turn()
        self.stops = tuple(sorted({*stop_ids(target), ends}))
        talks = [Conversations(run, target.tokenizer, prompts) for prompts in benchmarks.values()]
        self.capacity = max((talk.longest(self.settings.max_new_tokens) for talk in talks), default=1)
        self._waves: dict[str, list[Wave]] = {}
        self._plain_speed: dict[tuple[str, int], Timed] = {}
        self._plain_engines: dict[int, Engine] = {}

    def measure(self, subject: Subject, benchmark: str) -> dict[str, Any]:
        """All numbers of a drafter on a benchmark. Raises Failure when greedy output is not the target's own."""
        waves = self.waves(benchmark)
        engine = self._engine(subject, self.settings.batch_size)
        prompts = [prompt for wave in waves for prompt in wave.prompts]
        groups = [group for wave in waves for group in wave.groups]
        drafted = self._time(engine, prompts, f"{benchmark}: drafted, {subject.name}")
        plain = merged(wave.plain for wave in waves)
        answers = [drafted.answers[prompt.id] for prompt in prompts]
        numbers = acceptance.summary(answers, groups, subject.block_size, subject.trained_length, self.settings.seed)
        verdict = None
        if self.sampling.greedy:
            try:
                checked = lossless.check(engine, self.target, prompts, plain.answers, drafted.answers, self.check_stop)
                verdict = checked.record()
            except Failure:
                say(f"{benchmark}: acceptance lengths are void, the output is not the target's: {numbers['pooled']}")
                raise
        validation = compared(numbers, subject)
        return {
            "benchmark": benchmark,
            "drafter": subject.name,
            "checkpoint": subject.checkpoint,
            "block_size": subject.block_size,
            "trained_block_size": subject.drafter.config.block_size,
            "definition": DEFINITION,
            **numbers,
            "validation": validation,
            "lossless": verdict,
            "speed": [
                compare(self.settings.batch_size, len(prompts), plain, drafted),
                *(self._speed(subject, benchmark, size) for size in self.settings.speed_batch_sizes),
            ],
            "examples": [example(self.target.tokenizer, p, drafted.answers[p.id]) for p in prompts[:EXAMPLES]],
            "warnings": [*subject.warnings, *(gap_warnings(validation) if validation else ())],
        }

    def waves(self, benchmark: str) -> list[Wave]:
        """The benchmark answered plainly, turn by turn; once for all drafters."""
        if benchmark not in self._waves:
            talk = Conversations(self.run, self.target.tokenizer, self.benchmarks[benchmark])
            waves = []
            for turn in range(talk.turns):
                prompts, groups = talk.ask(turn)
                engine = self._engine(None, self.settings.batch_size)
                plain = self._time(engine, prompts, f"{benchmark}: plain, turn {turn + 1} of {talk.turns}")
                for prompt, group in zip(prompts, groups, strict=True):
                    template = template_of(self.target.tokenizer, talk.arguments)
                    talk.reply(group, template.visible(plain.answers[prompt.id].ids))
                waves.append(Wave(prompts, groups, plain))
            self._waves[benchmark] = waves
        return self._waves[benchmark]

    def _speed(self, subject: Subject, benchmark: str, size: int) -> dict[str, Any]:
        """Wall-clock speedup at a batch size, over the first prompts (enough to fill the batch)."""
        prompts = self.waves(benchmark)[0].prompts[: max(self.settings.speed_prompts, size)]
        key = (benchmark, size)
        if key not in self._plain_speed:
            engine = self._engine(None, size)
            self._plain_speed[key] = self._time(engine, prompts, f"{benchmark}: plain, batch {size}")
        drafted = self._time(self._engine(subject, size), prompts, f"{benchmark}: drafted, batch {size}")
        return compare(size, len(prompts), self._plain_speed[key], drafted)

    def _engine(self, subject: Subject | None, size: int) -> Engine:
        if subject is None and size in self._plain_engines:
            return self._plain_engines[size]
        engine = Engine(
            self.target,
            None if subject is None else subject.drafter,
            batch_size=size,
            max_length=self.capacity,
            sampling=self.sampling,
            stop_ids=self.stops,
            block_size=None if subject is None else subject.block_size,
        )
        if subject is None:
            self._plain_engines[size] = engine
        return engine

    def _time(self, engine: Engine, prompts: Sequence[Prompt], title: str) -> Timed:
        captured, steps, started = engine.graphs.seconds, engine.counts.steps, time.perf_counter()
        with Progress(len(prompts), title, unit="answers") as bar:
            answers = {}
            for answer in engine.generate(prompts, self.settings.max_new_tokens, bar):
                self.check_stop()
                answers[answer.id] = answer
        seconds = time.perf_counter() - started - (engine.graphs.seconds - captured)
        return Timed(answers, seconds, engine.counts.steps - steps)

    def record(self, benchmark: str, target: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
        """What was measured with: everything that a reader needs to measure it again."""
        first = self.waves(benchmark)[0].prompts[0]
        device = torch.device(self.target.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
        return {
            "target": dict(target),
            "template": dict(template),
            "prompt": {"id": first.id, "ids": list(first.ids), "text": self.target.tokenizer.decode(first.ids)},
            "versions": {"python": platform.python_version()} | {package: installed(package) for package in PACKAGES},
            "device": name,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "sampling": asdict(self.sampling),
            "stop_ids": list(self.stops),
            "settings": self.settings.model_dump(mode="json"),
        }


def merged(parts: Iterable[Timed]) -> Timed:
    parts = list(parts)
    answers = {name: answer for part in parts for name, answer in part.answers.items()}
    return Timed(answers, sum(part.seconds for part in parts), sum(part.steps for part in parts))


def compare(size: int, prompts: int, plain: Timed, drafted: Timed) -> dict[str, Any]:
    """Speedup in new tokens a second."""
    one, other = plain.record(), drafted.record()
    speedup = acceptance.ratio(other["tokens_per_s"] or 0.0, one["tokens_per_s"] or 0.0)
    return {"batch_size": size, "prompts": prompts, "plain": one, "drafted": other, "speedup": speedup}


def compared(numbers: Mapping[str, Any], subject: Subject) -> dict[str, Any] | None:
    """The training walk's numbers, and the slots at which ours lie below them by more than is expected."""
    if subject.validation is None:
        return None
    per_slot = subject.validation["per_slot"][: subject.block_size - 1]
    gaps = acceptance.slot_gaps(numbers["per_slot"], numbers["per_slot_reached"], per_slot)
    return {"acceptance": subject.validation["acceptance"], "per_slot": per_slot, "gaps": gaps}


def gap_warnings(validation: Mapping[str, Any]) -> list[str]:
    return [
        f"slot {gap['slot']}: served acceptance {gap['served']:.2f}, validation walk {gap['validation']:.2f}: other "
        "prompts explain some of it; if these prompts are like the training rows, training and serving disagree"
        for gap in validation["gaps"]
    ]


def example(tokenizer: Any, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """An answer cut into spans: what drafts gave, and what the target added itself."""
    cuts: list[tuple[str, int, int]] = [("first", -1, min(1, len(answer.ids)))]
    for index, block in enumerate(answer.blocks):
        end = cuts[-1][2]
        cuts += [("accepted", index, end + block.accepted), ("bonus", index, end + block.length)]
    spans, start, text = [], 0, ""
    for kind, index, end in cuts:
        if end > start:
            whole = tokenizer.decode(answer.ids[:end])  # pieces of whole texts: a character may span tokens
            piece = whole[len(text) :]
            spans.append({"kind": kind, "block": index, "text": piece, "ids": list(answer.ids[start:end])})
            start, text = end, whole
    return {
        "id": answer.id,
        "prompt": tokenizer.decode(prompt.ids),
        "spans": spans,
        "blocks": [{"length": block.length, "accepted": block.accepted} for block in answer.blocks],
    }


def differences(made: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """One warning, with both values, for each entry of `made` that `now` has otherwise."""
    flat_made, flat_now = dict(_flat(made)), dict(_flat(now))
    return [
        f"{where}: {name} was {flat_made.get(name)!r} in training, is {flat_now.get(name)!r} here"
        for name in sorted(flat_made.keys() & flat_now.keys())
        if flat_made[name] != flat_now[name]
    ]


def _flat(body: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in body.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
