"""An export in z-lab's own decoder, PyPI's `dflash`: does it accept there what it accepts in ours?

    python -m tests.benchmarks.dflash RUN.yaml EXPORT_DIR --prompts 32                   # ours decodes too, float32
    python -m tests.benchmarks.dflash RUN.yaml EXPORT_DIR --dtype bfloat16 --record runs/NAME/eval/base/gsm8k.json

The first prompts of the run file's first benchmark, rendered as `eval` renders them, are answered greedily on a CPU, up
to `eval.max_new_tokens`: by dflash's own loop, one prompt after the other, in the environment of tests/throwaway.py,
and by our engine (`--record`: by whatever eval that file is of). Target and drafter are of `--dtype` on both sides.

*Tokens* are compared as whole answers. *Blocks* are those that start at least a block before the limit, as in
tests/test_consumers.py: dflash shortens later ones, which changes their guesses. Both need our engine's answers. Pooled
acceptance lengths, over all blocks, have the bootstrap interval of these prompts, their ratio that of a paired one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.benchmarks import load_benchmark
from data.settings import load_run
from pipeline.acceptance import compare, interval, pooled
from pipeline.decode import Answer, Engine, Prompt
from pipeline.evaluation import Conversations, Evaluation
from pipeline.interchange import Checkpoint, open_checkpoint
from pipeline.target import load_target, quiet, resolve_target
from tests.throwaway import consumer_python

ROOT = Path(__file__).parents[2]
THERE = """
import json, sys
from tests.benchmarks.dflash import dflash_answers
for answer in dflash_answers(json.load(sys.stdin)):
    print(json.dumps(answer), flush=True)
"""
"""What runs in the environment of tests/throwaway.py."""


def dflash_answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`ids` and acceptance `lengths` of each prompt, by dflash. Runs in an environment that has it."""
    import dflash.model
    from transformers import AutoModelForCausalLM

    dflash.model._cuda_time = time.perf_counter  # it times with CUDA events, which a CPU has not
    torch.set_num_threads(job["threads"])
    how = {"dtype": getattr(torch, job["dtype"]), "attn_implementation": "sdpa"}
    with quiet():
        target = AutoModelForCausalLM.from_pretrained(job["target"], **how).eval()
        drafter = dflash.model.DFlashDraftModel.from_pretrained(job["export"], **how).eval()
    for ids in job["prompts"]:
        prompt = torch.tensor([ids])
        said = dflash.model.dflash_generate(
            drafter, target, prompt, job["max_new_tokens"], job["stop"], return_stats=True
        )
        yield {"ids": said.output_ids[0, len(ids) :].tolist(), "lengths": said.acceptance_lengths}


def ask(job: dict[str, Any]) -> list[dict[str, Any]]:
    """`dflash_answers` from a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    answers: list[dict[str, Any]] = []
    with subprocess.Popen([consumer_python(), "-c", THERE], env=environment, cwd=ROOT, **pipes) as child:
        child.stdin.write(json.dumps(job))
        child.stdin.close()
        for line in child.stdout:
            answers.append(json.loads(line))
            print(f"dflash: {len(answers)} of {len(job['prompts'])}", flush=True)
    if len(answers) < len(job["prompts"]):
        raise SystemExit(f"dflash's process ended with {child.returncode}")
    return answers


def difference(prompt: Prompt, ours: Answer, theirs: dict[str, Any], limit: int, block: int) -> dict[str, Any]:
    """Where tokens (None: nowhere) and blocks of one answer differ."""
    pairs = enumerate(zip_longest(ours.ids, theirs["ids"]))
    whole = [b.length for b in ours.blocks if b.start_position + block <= len(prompt.ids) + limit]
    return {
        "id": prompt.id,
        "first_difference": next((at for at, (one, other) in pairs if one != other), None),
        "blocks": len(whole),
        "same_blocks": whole == theirs["lengths"][: len(whole)],
    }


def amounts(by_prompt: Sequence[Sequence[Any]], seed: int) -> dict[str, float | None]:
    return interval(np.array([counts for _, *counts in by_prompt]), [name for name, *_ in by_prompt], pooled, seed)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    run, dtype = load_run(arguments.run), getattr(torch, arguments.dtype)
    name, settings = next(iter(run.eval.benchmarks.items()))
    prompts = load_benchmark(name, settings, arguments.prompts)
    target = load_target(run, "cpu", dtype)
    evaluation = Evaluation(run, target, {name: prompts}, lambda: None)
    asked, _ = Conversations(run, target.tokenizer, prompts).ask(0)
    limit, export = run.eval.max_new_tokens, open_checkpoint(arguments.export)
    job = {
        "target": str(resolve_target(run).resolve()),
        "export": str(arguments.export.resolve()),
        "prompts": [list(prompt.ids) for prompt in asked],
        "max_new_tokens": limit,
        "stop": list(evaluation.stops),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
    }
    theirs = ask(job)
    body = {"benchmark": name, "prompts": len(asked), "dtype": arguments.dtype, "max_new_tokens": limit}
    there = [[p.id, sum(said["lengths"]), len(said["lengths"])] for p, said in zip(asked, theirs, strict=True)]
    if arguments.record:
        recorded = {row[0]: row for row in json.loads(arguments.record.read_text())["by_prompt"]}
        here = [recorded[prompt.id] for prompt in asked]
    else:
        ours = decode(evaluation, export, dtype, asked)
        here = [[a.id, sum(block.length for block in a.blocks), len(a.blocks)] for a in ours]
        sides = zip(asked, ours, theirs, strict=True)
        body["answers"] = [difference(*side, limit, export.config.block_size) for side in sides]
    seed = run.eval.seed
    numbers = {"dflash": amounts(there, seed), "ours": amounts(here, seed), "ratio": compare(there, here, seed)}
    return {**body, **numbers, "by_prompt": {"dflash": there, "ours": here}}


@torch.no_grad()
def decode(evaluation: Evaluation, export: Checkpoint, dtype: torch.dtype, prompts: Sequence[Prompt]) -> list[Answer]:
    """Our engine's answers, in the order of the prompts."""
    engine = Engine(
        evaluation.target,
        export.drafter("cpu", dtype),
        batch_size=min(len(prompts), evaluation.settings.batch_size),
        max_length=evaluation.capacity,
        sampling=evaluation.sampling,
        stop_ids=evaluation.stops,
    )
    answers = {answer.id: answer for answer in engine.generate(prompts, evaluation.settings.max_new_tokens)}
    return [answers[prompt.id] for prompt in prompts]


def lines(body: dict[str, Any]) -> Iterator[str]:
    """The numbers for people."""
    yield f"{body['benchmark']}, {body['prompts']} prompts, {body['dtype']}, {body['max_new_tokens']} new tokens"
    answers = body.get("answers")
    if answers is not None:
        same = [answer for answer in answers if answer["first_difference"] is None]
        equal = [answer["blocks"] for answer in answers if answer["same_blocks"]]
        yield f"  tokens: {len(same)} of {len(answers)} answers equal"
        yield f"  blocks: those of {len(equal)} of {len(answers)} answers equal ({sum(equal)} blocks)"
        for answer in answers:
            if answer not in same or not answer["same_blocks"]:
                yield f"  differs: {json.dumps(answer)}"
    for side in ("dflash", "ours", "ratio"):
        yield f"  {side}: {body[side]['value']:.4f} [{body[side]['low']:.4f}, {body[side]['high']:.4f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    parser.add_argument("export", type=Path, metavar="EXPORT_DIR")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--record", type=Path, help="an eval's JSON to compare with, instead of decoding ourselves")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep all numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    body = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(body, indent=1) + "\n")
    print("\n".join(lines(body)))


if __name__ == "__main__":
    main()
