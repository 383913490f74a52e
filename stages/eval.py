"""What a drafter is worth: acceptance, losslessness, speed.

`eval/<name>/<benchmark>.json` per benchmark (its fields: `pipeline/evaluation.py`), `manifest.json` last. Numbers of
another block size, or of fewer prompts or benchmarks than the run file says, go to a folder of their own
(`base+block8+limit16`, `base+only-gsm8k`), and so do others' drafters and servers. Interrupted, the same command goes
on with the benchmarks that are missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from pydantic import ValidationError

from data.benchmarks import BenchmarkPrompt, load_benchmark
from data.errors import BadInput
from data.explain import explain
from data.layout import Layout
from data.manifest import State, file_record, fingerprint, publish, read_json, read_manifest, write_json
from data.provenance import refuse, stale_drafter
from data.settings import Run, Server, load_run
from data.shaping import shaping

if TYPE_CHECKING:
    from pipeline.drafter import DrafterConfig
    from pipeline.evaluation import Evaluation, Subject
    from pipeline.interchange import Checkpoint
    from pipeline.job import Job


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    drafters: tuple[str, ...]
    drafter_path: str | None = None
    checkpoint: str | None = None
    block_size: int | None = None
    limit: int | None = None
    benchmarks: tuple[str, ...] = ()
    """Some of the run's; none: all."""
    server: str | None = None
    model: str | None = None

    @property
    def suffix(self) -> str:
        only = ",".join(self.benchmarks) or None
        parts = {"block": self.block_size, "limit": self.limit, "": self.checkpoint, "only-": only}
        return "".join(f"+{name}{value}" for name, value in parts.items() if value is not None)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to measure. `theirs`: somebody else's, read before anything starts; ours are read when their turn
    comes."""

    name: str
    path: Path
    config: DrafterConfig
    theirs: Checkpoint | None = None


@dataclass(frozen=True)
class Plan:
    """One drafter's folder under `eval/`, its checkpoints, and what fingerprints its numbers."""

    name: str
    checkpoints: tuple[Candidate, ...]
    inputs: Mapping[str, str]
    trained: Mapping[str, Any] | None
    """Body of train.json; None for others' drafters."""
    validations: Mapping[str, Any] = field(default_factory=dict)


@click.command("eval")
@click.argument("run_file", type=click.Path())
@click.option("--drafter", metavar="NAME", help="One drafter of the run; all of them when omitted.")
@click.option("--drafter-path", metavar="DIR", help="A DFlash checkpoint (z-lab's form or an export) instead.")
@click.option("--checkpoint", metavar="WHICH", help="best, last, all or step-N instead of the run file's choice.")
@click.option("--benchmark", "benchmarks", multiple=True, metavar="NAME", help="Only this benchmark; may be repeated.")
@click.option("--block-size", type=click.IntRange(min=2), help="Tokens a block, at most as many as trained.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="First N prompts of each benchmark: a quick look."
)
@click.option("--server", metavar="URL", help="Ask an OpenAI-compatible server and read its own acceptance counters.")
@click.option("--model", metavar="NAME", help="With --server: the model to ask for.")
def command(run_file: str, drafter: str | None, **options: Any) -> None:
    """Measure acceptance, losslessness and speed of trained drafters."""
    run = load_run(run_file)
    if drafter is not None:
        run.drafter(drafter)
    request = Request((drafter,) if drafter else tuple(run.drafters), **options)
    if request.server is not None:
        server = server_settings(run, request)
        serve(run, request, server, read_benchmarks(run, request))
        return
    benchmarks = read_benchmarks(run, request)
    some = () if len(benchmarks) == len(run.eval.benchmarks) else tuple(benchmarks)
    request = replace(request, benchmarks=some)
    plans = list(planned(run, request))
    from pipeline.job import job

    with job(run, "eval", label=label(request), gpus=run.target.gpus) as work:
        evaluate(run, request, benchmarks, plans, work)


def label(request: Request) -> str:
    if request.drafter_path is not None:
        return path_name(request.drafter_path)
    return request.drafters[0] if len(request.drafters) == 1 else ""


def path_name(folder: str) -> str:
    """Name of somebody else's drafter: the last two parts of its path or hub id."""
    return "path-" + "--".join(part for part in Path(folder).parts[-2:] if part not in ("/", ".", ".."))


def read_benchmarks(run: Run, request: Request) -> dict[str, list[BenchmarkPrompt]]:
    """The prompts, read before anything heavy starts."""
    settings = run.eval.benchmarks
    if not settings:
        raise BadInput("the run file names no `eval.benchmarks`: add one, for example `gsm8k: {preset: gsm8k}`")
    unknown = [name for name in request.benchmarks if name not in settings]
    if unknown:
        raise BadInput(f"no benchmark `{unknown[0]}` in this run; it has: {', '.join(settings)}")
    names = [name for name in settings if not request.benchmarks or name in request.benchmarks]
    return {name: load_benchmark(name, settings[name], request.limit) for name in names}


def planned(run: Run, request: Request) -> Iterator[Plan]:
    """What is to be measured. Checkpoints that are not there or damaged, and blocks that are longer than they were
    trained, are refused here: before the device is taken, the target loaded or anything written."""
    from pipeline.checkpoint import WEIGHTS, choose, load_config, require_sound
    from pipeline.weights import checksums

    if request.drafter_path is not None:
        theirs = someones(run, request.drafter_path)
        check_block(request, theirs.config)
        inputs = {"path": request.drafter_path, "weights": checksums(theirs.path)}
        yield Plan(path_name(request.drafter_path) + request.suffix, (theirs,), inputs, None)
        return
    layout = Layout.of(run)
    for drafter in request.drafters:
        trained = read_manifest(layout.train_manifest(drafter), "drafter")
        refuse(stale_drafter(run, drafter, trained))
        chosen = choose(layout.checkpoints(drafter), request.checkpoint or run.eval.checkpoints)
        for info in chosen:
            require_sound(info.path, WEIGHTS)
        candidates = tuple(Candidate(info.path.name, info.path, load_config(info.path)) for info in chosen)
        for candidate in candidates:
            check_block(request, candidate.config)
        yield Plan(
            drafter + request.suffix,
            candidates,
            {"drafter": trained["fingerprint"], **{info.path.name: info.weights for info in chosen}},
            trained,
            {info.path.name: info.meta.get("validation") for info in chosen},
        )


def someones(run: Run, path: str) -> Candidate:
    """A drafter that is none of this run's, whole. Raises BadInput."""
    from pipeline.interchange import open_checkpoint
    from pipeline.target import load_config

    checkpoint = open_checkpoint(path, load_config(run).num_hidden_layers)
    return Candidate("", checkpoint.path, checkpoint.config, checkpoint)


def check_block(request: Request, config: DrafterConfig) -> None:
    trained = config.block_size
    if request.block_size is not None and request.block_size > trained:
        raise BadInput(f"--block-size: {request.block_size} is not between 2 and the drafter's {trained}")


def evaluate(
    run: Run, request: Request, benchmarks: dict[str, list[BenchmarkPrompt]], plans: Sequence[Plan], work: Job
) -> None:
    """Measure every plan with one copy of the target in memory."""
    import torch

    from pipeline.console import say
    from pipeline.evaluation import Evaluation, fit
    from pipeline.target import load_config, load_target, target_record
    from pipeline.template import template_record

    shape = load_config(run)
    for candidate in (candidate for plan in plans for candidate in plan.checkpoints):
        fit(candidate.config, shape, str(candidate.path))
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_target(run, work.device)
    evaluation = Evaluation(run, target, benchmarks, work.check_stop)
    facts = {
        "target": target_record(run),
        "template": template_record(target.tokenizer, dict(run.data.template_arguments)),
    }
    most = getattr(target.config, "max_position_embeddings", None)
    if most is not None and evaluation.capacity > most:
        say(f"warning: prompts and answers may reach {evaluation.capacity} tokens, the target was made for {most}")
    for plan in plans:
        folder = Folder(run, plan, request, benchmarks, facts)
        warnings = folder.warnings()
        for text in warnings:
            say(f"warning: {text}")
        for candidate in plan.checkpoints:
            subject: Subject | None = None
            for benchmark in benchmarks:
                work.check_stop()
                if folder.has(benchmark, candidate.name):
                    continue
                subject = subject or load_subject(run, plan, request, candidate, evaluation, warnings)
                body = evaluation.measure(subject, benchmark)
                body["record"] = evaluation.record(benchmark, facts["target"], facts["template"])
                folder.write(body)
                for line in lines(body):
                    say(line)
        folder.publish()


def load_subject(
    run: Run, plan: Plan, request: Request, candidate: Candidate, evaluation: Evaluation, warnings: Sequence[str]
) -> Subject:
    """A checkpoint's drafter beside the target."""
    from pipeline.checkpoint import load_drafter
    from pipeline.evaluation import Subject

    target = evaluation.target
    if candidate.theirs is None:
        drafter = load_drafter(candidate.path, target.device, target.dtype)
    else:
        drafter = candidate.theirs.drafter(target.device, target.dtype)
    return Subject(
        plan.name,
        candidate.name,
        drafter,
        request.block_size or candidate.config.block_size,
        plan.validations.get(candidate.name),
        run.data.max_length if plan.trained is not None else None,
        tuple(warnings),
    )


class Folder:
    """`eval/<name>`: one file a benchmark and checkpoint, and the manifest."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        request: Request,
        benchmarks: Mapping[str, Sequence[BenchmarkPrompt]],
        facts: Mapping[str, Any],
    ) -> None:
        self.plan, self.benchmarks, self.facts = plan, benchmarks, facts
        layout = Layout.of(run)
        self.path, self.manifest = layout.eval(plan.name), layout.eval_manifest(plan.name)
        prompts = {
            name: [[prompt.id, prompt.turns, *prompt.tools] for prompt in prompts]
            for name, prompts in benchmarks.items()
        }
        self.settings = shaping(run, "eval", plan.name)
        asked = [request.block_size, request.limit, prompts]
        self.identity = fingerprint([self.settings, dict(plan.inputs), dict(facts), *asked])
        self.state = State(self.path / "state.json")
        self.resumed = self.state.recover(self.manifest) or self.state.read().get("status") == "running"
        self.state.running(fingerprint=self.identity)
        self.manifest.unlink(missing_ok=True)

    def file(self, benchmark: str, checkpoint: str) -> Path:
        """`gsm8k.json`, or `gsm8k@step-000400.json` when several checkpoints are measured."""
        several = len(self.plan.checkpoints) > 1
        return self.path / (f"{benchmark}@{checkpoint}.json" if several else f"{benchmark}.json")

    def has(self, benchmark: str, checkpoint: str) -> bool:
        """True when an interrupted attempt has measured this already, with the same settings."""
        path = self.file(benchmark, checkpoint)
        return self.resumed and path.exists() and read_json(path, "delete it").get("fingerprint") == self.identity

    def write(self, body: dict[str, Any]) -> None:
        write_json(self.file(body["benchmark"], body["checkpoint"]), {**body, "fingerprint": self.identity})

    def warnings(self) -> list[str]:
        """How target and template differ from those that the drafter was trained with."""
        from pipeline.evaluation import differences

        trained = self.plan.trained or {}
        return [text for name, fact in self.facts.items() for text in differences(trained.get(name) or {}, fact, name)]

    def publish(self) -> None:
        """The manifest: every file, and the numbers that tables are made of."""
        pairs = [(benchmark, each.name) for each in self.plan.checkpoints for benchmark in self.benchmarks]
        files = [self.file(*pair) for pair in pairs]
        bodies = [read_json(file, "run eval again") for file in files]
        body = {
            "fingerprint": self.identity,
            "settings": json.loads(self.settings),
            "inputs": dict(self.plan.inputs),
            "counts": {"files": len(files), "responses": sum(body["responses"] for body in bodies)},
            "results": [result(body, file.name) for body, file in zip(bodies, files, strict=True)],
            "files": [file_record(file, self.path) for file in files],
        }
        publish(self.manifest, "eval", body)
        self.state.done(self.manifest, fingerprint=self.identity)


def result(body: Mapping[str, Any], file: str) -> dict[str, Any]:
    """What tables show of a benchmark's file."""
    names = ("benchmark", "drafter", "checkpoint", "block_size", "prompts", "pooled", "per_response", "warnings")
    speed = [{name: entry[name] for name in ("batch_size", "speedup")} for entry in body["speed"]]
    verdict = body["lossless"]
    ties = None if verdict is None else {name: verdict[name] for name in ("checked", "exact", "tie_count")}
    return {"file": file, **{name: body[name] for name in names}, "speed": speed, "lossless": ties}


def lines(body: Mapping[str, Any]) -> Iterator[str]:
    """A benchmark's numbers for people."""
    name = " ".join(part for part in (body["drafter"], body["checkpoint"]) if part)
    pooled, response = body["pooled"], body["per_response"]
    yield (
        f"{body['benchmark']}, {name}: acceptance length {amount(pooled)} pooled, {amount(response)} per response "
        f"(bonus counted, cut at stop; {body['prompts']} prompts, {body['blocks']} blocks of {body['block_size']})"
    )
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in body["per_slot"])
    yield f"  per slot, given the slots before: {rates}"
    if body["validation"] is not None:
        rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in body["validation"]["per_slot"])
        yield f"  validation walk, {body['validation']['acceptance']:.2f} pooled: {rates}"
    for speed in body["speed"]:
        yield (
            f"  batch {speed['batch_size']}, {speed['prompts']} prompts: {speed['speedup'] or 0:.2f}x plain decoding "
            f"({speed['drafted']['tokens_per_s'] or 0:.0f} against {speed['plain']['tokens_per_s'] or 0:.0f} tokens/s)"
        )
    verdict = body["lossless"]
    if verdict is not None:
        yield (
            f"  lossless: {verdict['exact']} of {verdict['checked']} answers equal plain decoding's token for token, "
            f"{verdict['tie_count']} ties decided by rounding (largest gap {verdict['largest_gap']:.2g}), nothing else"
        )
    for text in body["warnings"]:
        yield f"  warning: {text}"


def amount(value: Mapping[str, float | None]) -> str:
    if value["value"] is None:
        return "-"
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def server_settings(run: Run, request: Request) -> Server:
    """The server of the command line.

    Raises BadInput for what a server cannot be told, and, without showing it, when its URL holds a secret or cannot be
    asked.
    """
    ours = {"drafter-path": request.drafter_path, "checkpoint": request.checkpoint, "block-size": request.block_size}
    for option in (name for name, value in ours.items() if value is not None):
        raise BadInput(f"--{option}: the server at --server drafts with what it was started with: leave it out")
    try:
        return Server(url=request.server, model=request.model, concurrency=run.eval.batch_size)
    except ValidationError as error:
        raise BadInput(f"--server: {explain(error, Server)}") from None


def serve(run: Run, request: Request, server: Server, benchmarks: Mapping[str, list[BenchmarkPrompt]]) -> None:
    """Drive a server over the benchmarks; its numbers go to `eval/server-<host>`."""
    from pipeline.console import Progress, say
    from pipeline.evaluation import Conversations
    from pipeline.job import job
    from pipeline.sampling import Sampling
    from pipeline.server_metrics import MeasuredServer
    from pipeline.target import load_tokenizer

    name = f"server-{urlsplit(server.url).netloc.replace(':', '-')}{replace(request, benchmarks=()).suffix}"
    folder = Layout.of(run).eval(name)
    with job(run, "eval", label=name) as work:
        client, tokenizer = MeasuredServer(server), load_tokenizer(run)
        plan = Sampling(run.eval.temperature, run.eval.top_p, run.eval.top_k, run.eval.seed)
        for benchmark, prompts in benchmarks.items():
            work.check_stop()
            talk, before = Conversations(run, tokenizer, prompts), client.metrics()
            seconds, tokens = 0.0, 0
            for turn in range(talk.turns):
                asked, groups = talk.ask(turn)
                with Progress(len(asked), f"{benchmark}: turn {turn + 1} of {talk.turns}", unit="answers") as bar:
                    replies, took = client.run(asked, run.eval.max_new_tokens, plan, work.check_stop, bar.advance)
                seconds, tokens = seconds + took, tokens + sum(reply.tokens for reply in replies)
                for group, reply in zip(groups, replies, strict=True):
                    talk.reply(group, reply.text)
            measured = client.metrics().since(before)
            body = {
                "benchmark": benchmark,
                "server": server.url,
                "model": client.model,
                "prompts": len(prompts),
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "concurrency": server.concurrency,
                "served": measured or None,
            }
            write_json(folder / f"{benchmark}.json", body)
            told = f"{measured['acceptance']:.2f} ({measured['source']})" if measured else "not told by its metrics"
            say(f"{benchmark}, {server.url}: acceptance length {told}; {body['tokens_per_s']:.0f} tokens/s")
