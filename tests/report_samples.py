"""A finished run as files, with numbers like a real one's: what the report is made of, without the hours."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from data.accounting import Accounting
from data.layout import Layout
from data.manifest import publish, write_json
from data.settings import Run

BLOCK = 16
DRAFTERS = {"base": 0.80, "dpace": 0.83}
BENCHMARKS = {"gsm8k": 0.0, "humaneval": 0.03, "mt-bench": -0.12}
ANSWER = (
    "Natalia sold 48/2 = 24 clips in May. Altogether she sold 48 + 24 = 72 clips in April and May.\n\n"
    "So the answer is <b>72</b> & nothing else."
)


def sample_run(root: Path, name: str = "smollm2-gsm8k") -> Run:
    source = {"train": [{"path": "rows.jsonl"}]}
    benchmarks = {benchmark: {"path": f"{benchmark}.jsonl"} for benchmark in BENCHMARKS}
    return Run.model_validate({
        "name": name,
        "root": str(root),
        "target": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "data": source,
        "extract": {"parts": 2},
        "drafters": {drafter: {} for drafter in DRAFTERS},
        "eval": {"benchmarks": benchmarks},
    })  # fmt: skip


def write_training(run: Run, drafter: str, steps: int = 1400) -> None:
    """metrics.jsonl and train.json."""
    layout, rate, noise = Layout.of(run), DRAFTERS[drafter], random.Random(drafter)
    lines: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        share = 1 - math.exp(-4 * step / steps)
        accuracy = [rate * share * 0.92 ** (k - 1) for k in range(1, BLOCK)]
        speed = {"seconds_per_step": 0.045, "context_tokens_per_s": 9e4 * noise.uniform(0.97, 1.0), "tflops": 310.0}
        loss = 5.5 - 3.4 * share + noise.gauss(0, 0.04)
        more = {"wait_share": noise.uniform(0, 0.03), "lr": 1e-3, "grad_norm": 1.0, "epoch": step // 234}
        more |= {"labels_per_s": 6e5, "memory_gib": 22.25}
        lines.append({"step": step, "loss": loss, "accuracy": accuracy, **speed, **more})
        if step % 200 == 0:
            lines.append({"step": step, "validation": walk(rate * share), "seconds": 2.0})
    layout.metrics(drafter).parent.mkdir(parents=True, exist_ok=True)
    layout.metrics(drafter).write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = {"step": steps, "validation": walk(rate * (1 - math.exp(-4)))}
    body = {
        "fingerprint": "3f" * 16,
        "config": {"block_size": BLOCK},
        "steps": steps,
        "best": best,
        "last": best,
        "rows": {"train": 7323, "validation": 150},
        "mask_token": {"id": 5, "reason": "lowest spare row"},
    }
    publish(layout.train_manifest(drafter), "drafter", body)


def walk(rate: float) -> dict[str, Any]:
    per_slot = [min(0.99, rate * 0.985 ** (k - 1)) for k in range(1, BLOCK)]
    return {"acceptance": sum(lengths(per_slot)), "per_slot": per_slot, "blocks": 4100, "tokens": 15000}


def lengths(per_slot: list[float]) -> list[float]:
    """Share of blocks that keep at least 1, 2, ... B tokens."""
    kept = [1.0]
    for rate in per_slot:
        kept.append(kept[-1] * rate)
    return kept


def write_evaluation(run: Run, drafter: str) -> None:
    """One file a benchmark, and the manifest."""
    folder, files = Layout.of(run).eval(drafter), []
    for benchmark, shift in BENCHMARKS.items():
        per_slot = [min(0.99, (DRAFTERS.get(drafter, 0.75) + shift) * 0.98 ** (k - 1)) for k in range(1, BLOCK)]
        kept = [*lengths(per_slot), 0.0]
        pooled = sum(kept)
        past = {"tokens": 448, "prompts_share": 0.0, "responses_share": 0.125, "blocks_share": 0.0421}
        speed = {"plain": {"tokens_per_s": 410.0}, "drafted": {"tokens_per_s": 410.0 * pooled / 1.6}}
        body = {
            "benchmark": benchmark,
            "drafter": drafter,
            "checkpoint": "step-001400",
            "block_size": BLOCK,
            "prompts": 128,
            "responses": 128,
            "blocks": 8211,
            "definition": "...",
            "pooled": {"value": pooled, "low": pooled - 0.14, "high": pooled + 0.15},
            "per_response": {"value": pooled + 0.1, "low": pooled - 0.05, "high": pooled + 0.26},
            "per_slot": per_slot,
            "histogram": [0, *(round(8211 * (kept[k] - kept[k + 1])) for k in range(BLOCK))],
            "by_context": [
                {"from": 0, "to": 256, "blocks": 6000, "pooled": pooled + 0.02},
                {"from": 256, "to": 512, "blocks": 2211, "pooled": pooled - 0.06},
                *([{"from": 512, "to": 1024, "blocks": 0, "pooled": None}] if benchmark == "mt-bench" else []),
            ],
            "past_trained_length": past if drafter in DRAFTERS else None,
            "validation": {"acceptance": 3.6, "per_slot": per_slot, "gaps": []},
            "lossless": {"checked": 128, "exact": 126, "tie_count": 3},
            "speed": [
                {"batch_size": size, "prompts": 8, **speed, "speedup": pooled / 1.6 / size**0.2} for size in (1, 32)
            ],
            "examples": [example()],
            "warnings": [],
            "record": {"device": "NVIDIA H200", "dtype": "bfloat16", "versions": {"torch": "2.11.0"}},
        }
        write_json(folder / f"{benchmark}.json", body)
        files.append({"path": f"{benchmark}.json"})
    publish(folder / "manifest.json", "eval", {"files": files})


def example() -> dict[str, Any]:
    words = ANSWER.split(" ")
    spans: list[dict[str, Any]] = [{"kind": "first", "block": -1, "text": words[0]}]
    blocks, at = [], 1
    for index, accepted in enumerate((3, 0, 5, 2, 1, 4, 6)):
        text = "".join(f" {word}" for word in words[at : at + accepted])
        if text:
            spans.append({"kind": "accepted", "block": index, "text": text})
        spans.append({"kind": "bonus", "block": index, "text": " " + "".join(words[at + accepted : at + accepted + 1])})
        blocks.append({"length": accepted + 1, "accepted": accepted})
        at += accepted + 1
    question = "Natalia sold clips to 48 of her friends in April, and half as many in May. How many altogether?"
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return {"id": "gsm8k-0", "prompt": prompt, "spans": spans, "blocks": blocks}


def write_data(run: Run) -> None:
    """Manifests of prompts, tokens and cache, and the status files of their jobs."""
    layout = Layout.of(run)
    pieces = [["<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", False], ["4.<|im_end|>", True]]
    account = Accounting(rows_in=7473, kept=7472, token_rows=7472, tokens=2_408_000, supervised=1_622_000, longest=511)
    account.dropped["too_few_supervised"] = 1
    account.notes["end_of_turn_added"] = 3100
    account.lengths.update({7: 1200, 8: 6272})
    account.contaminated = {"gsm8k": ["row-7", "row-<9>"], "humaneval": []}
    repeats = {"same_content": 2, "same_prompt": 5, "validation_prompts_trained_on": 0}
    alone = {"compared_alone": {"token_ids": 40}}
    publish(layout.prepared, "accounting", {**account.body(), "repeats": repeats, **alone})
    for part in range(run.extract.parts):
        publish(layout.prompts(part), "prompts", {"counts": {"rows": 3736, "dropped": 1}})
        tokens = {"counts": {"rows": 3736, "tokens": 1_204_000, "supervised": 811_000}}
        publish(layout.tokens(part), "tokens", {**tokens, "example": {"row_id": "r", "pieces": pieces}})
        counts = {"shards": 4, "rows": 3735, "tokens": 1_204_000, "states": 1_150_000, "bytes": 3_335_000_000}
        cache = {"layer_ids": [1, 8, 14, 20, 27], "width": 576, "compressor": "none", "fingerprint": "ab" * 16}
        cache |= {"on_policy": {"rows": 32, "tokens": 1000 * (part + 1), "share": 0.99 - 0.03 * part}}
        cache |= {"codec": {"name": "fp8"}, "target": {"weights": "cd" * 16}, "template": {"hash": "ef" * 16}}
        publish(layout.cache_part(part), "cache", {"counts": counts, **cache})
    minutes = [("prepare", "", 0, 1), ("regenerate", "part-0000", 1, 9), ("regenerate", "part-0001", 9, 17)]
    minutes += [("extract", "part-0000", 17, 19), ("extract", "part-0001", 19, 22), ("train", "base", 22, 25)]
    minutes += [("train", "dpace", 22, 26), ("eval", "base", 26, 27)]
    for stage, label, start, end in minutes:
        moments = {"started": f"2030-01-01T10:{start:02d}:00Z", "seen": f"2030-01-01T10:{end:02d}:30Z"}
        body = {"stage": stage, "label": label, "status": "done", **moments}
        write_json(layout.logs / stage / f"{label or stage}.status.json", body)


def write_everything(root: Path) -> Run:
    run = sample_run(root)
    write_data(run)
    for drafter in DRAFTERS:
        write_training(run, drafter)
        write_evaluation(run, drafter)
    return run
