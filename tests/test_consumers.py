"""What was written, loaded by the programs of others from PyPI in an environment and processes of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pipeline.consumers import CONSUMERS, Verdict, ask, check_exports
from pipeline.decode import Engine, Prompt
from pipeline.interchange import open_checkpoint, write_union
from pipeline.interchange_config import SLIDING
from pipeline.sampling import Sampling
from pipeline.target import Target
from tests.interchange_samples import (
    greedy,
    save_tiny_target,
    tiny_config,
    tiny_target_info,
    tiny_tensors,
    trained_tensors,
)
from tests.throwaway import consumer_python

pytestmark = pytest.mark.slow

SLIDING_LAYERS = {"layer_types": (SLIDING, "full_attention"), "sliding_window": 9}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
SCALES = {"embedding_scale": 8.0, "logit_multiplier": 0.5, "softcap": 30.0}
CASES: dict[str, tuple[bool, int, dict[str, Any], dict[str, Any]]] = {
    # name: target tied, block size, drafter, export
    "tied-4": (True, 4, {}, {}),
    "untied-4": (False, 4, {}, {}),
    "tied-7": (True, 7, {}, {}),
    "untied-16": (False, 16, {}, {"dtype": "float32"}),
    "linear": (True, 4, LINEAR, {}),
    "yarn": (True, 4, YARN, {}),
    "sliding": (True, 7, SLIDING_LAYERS, {}),
    "zlab": (True, 4, {}, {"form": "zlab"}),
    "speculators": (False, 4, {}, {"form": "speculators"}),
    "fp8": (True, 7, {}, {"quantize": "fp8"}),
    "scaled": (False, 7, {}, {}),
}
Verdicts = dict[str, dict[str, Verdict]]
NEW_TOKENS, BLOCK = 40, 4
PROMPTS = [[1, *((7 * n + 13 * i) % 90 + 3 for i in range(6 + n))] for n in range(4)]


@pytest.fixture(scope="session")
def python() -> str:
    return str(consumer_python())


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("consumers")
    targets = {tied: save_tiny_target(root / f"target-{tied}", tied) for tied in (True, False)}
    for name, (tied, block_size, drafter, options) in CASES.items():
        config = tiny_config(block_size, **drafter)
        target = replace(targets[tied], **SCALES) if name == "scaled" else targets[tied]
        write_union(root / name, config, tiny_tensors(config), target, **options)
    return {name: root / name for name in CASES}


@pytest.fixture(scope="session")
def targets(exports: dict[str, Path]) -> dict[bool, LlamaForCausalLM]:
    root = exports["tied-4"].parent
    return {
        tied: AutoModelForCausalLM.from_pretrained(root / f"target-{tied}", dtype=torch.float32).eval()
        for tied in (True, False)
    }


@pytest.fixture(scope="session")
def plain(targets: dict[bool, LlamaForCausalLM]) -> dict[bool, list[list[int]]]:
    """Plain greedy answers to all prompts."""
    return {tied: [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS] for tied, model in targets.items()}


@pytest.fixture(scope="session")
def trained(
    exports: dict[str, Path], targets: dict[bool, LlamaForCausalLM], plain: dict[bool, list[list[int]]]
) -> dict[bool, dict[str, Any]]:
    """Jobs for dflash to generate with an export of a drafter trained for a moment, target tied and not."""
    root, jobs = exports["tied-4"].parent, {}
    for tied, model in targets.items():
        rows = [prompt + answer for prompt, answer in zip(PROMPTS, plain[tied], strict=True)]
        rows = [row for row in rows if len(row) > 2 * BLOCK + 6]
        info, config = tiny_target_info(str(root / f"target-{tied}")), tiny_config(BLOCK)
        write_union(root / f"trained-{tied}", config, trained_tensors(config, model, rows), info, dtype="float32")
        where = {"export": str(root / f"trained-{tied}"), "target": info.name}
        limits = {"prompts": PROMPTS, "max_new_tokens": NEW_TOKENS, "stop": [model.config.eos_token_id]}
        jobs[tied] = {"kind": "generate", **where, **limits}
    return jobs


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for packages with an `sglang` whose import ends the process."""
    folder = tmp_path_factory.mktemp("broken")
    for name in ("sglang", "sglang-0.5.23.dist-info"):
        (folder / name).mkdir()
    (folder / "sglang" / "__init__.py").write_text("import os\nprint('no kernels', flush=True)\nos._exit(3)\n")
    (folder / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    return folder


@pytest.fixture(scope="session")
def asked(exports: dict[str, Path], trained: dict[bool, dict[str, Any]], python: str, broken: Path) -> tuple[Any, Any]:
    """All consumers' verdicts, and dflash's generations: at once, since each process imports for seconds.

    Asked with two threads, as a user would: logits are compared bit for bit all the same.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(broken))
        patch.setenv("OMP_NUM_THREADS", "2")
        judged = pool.submit(check_exports, list(exports.values()), None, python)
        generated = pool.submit(ask, {"dflash": list(trained.values())}, python)
        answers = judged.result(), generated.result()["dflash"]
    torch.set_num_threads(threads)
    return answers


@pytest.fixture(scope="session")
def verdicts(asked: tuple[Any, Any]) -> Verdicts:
    return {path.name: {verdict.consumer: verdict for verdict in every} for path, every in asked[0].items()}


@pytest.fixture(scope="session")
def drafted(asked: tuple[Any, Any], trained: dict[bool, dict[str, Any]]) -> dict[bool, dict[str, Any]]:
    answers = zip(trained.items(), asked[1]["answers"], strict=True)
    return {tied: {**answer, "export": job["export"]} for (tied, job), answer in answers}


@pytest.mark.parametrize("consumer", ["speculators", "dflash", "specforge"])
@pytest.mark.parametrize("case", ["tied-4", "untied-4", "tied-7", "untied-16", "linear", "yarn"])
def test_a_union_loads_whole_with_identical_logits(verdicts: Verdicts, case: str, consumer: str) -> None:
    verdict = verdicts[case][consumer]
    assert (verdict.problem, verdict.difference, verdict.note) == ("", 0.0, "")


@pytest.mark.parametrize("case", list(CASES))
def test_transformers_keeps_every_number_of_the_configuration(verdicts: Verdicts, case: str) -> None:
    verdict = verdicts[case]["autoconfig"]
    assert verdict.problem == ""
    assert verdict.note == ("does not read this form" if case == "speculators" else "configuration only")


@pytest.mark.parametrize(
    ("case", "readers"),
    [
        ("zlab", ("dflash", "specforge")),
        ("speculators", ("speculators",)),
        ("sliding", ("dflash",)),
        ("fp8", ("dflash", "specforge")),
        ("scaled", ("dflash",)),
    ],
)
def test_other_forms_are_identical_where_they_are_read(verdicts: Verdicts, case: str, readers: tuple[str, ...]) -> None:
    compared = {name: verdict.difference for name, verdict in verdicts[case].items() if verdict.difference is not None}
    assert compared == dict.fromkeys(readers, 0.0)
    assert not any(verdict.failed for name, verdict in verdicts[case].items() if name != "sglang")


def test_a_consumer_that_is_not_installed_is_said_to_be_absent(verdicts: Verdicts) -> None:
    assert set(verdicts["tied-4"]) == set(CONSUMERS)
    assert verdicts["tied-4"]["vllm"] == Verdict("vllm", None, note="not installed")


def test_a_consumer_that_crashes_takes_no_other_along(verdicts: Verdicts) -> None:
    crashed = Verdict("sglang", "0.5.23", problem="its process ended with 3: no kernels")
    assert verdicts["tied-4"]["sglang"] == verdicts["zlab"]["sglang"] == crashed


@pytest.mark.parametrize("tied", [True, False])
def test_dflash_and_our_decoder_say_what_the_target_says(
    targets: dict[bool, LlamaForCausalLM],
    plain: dict[bool, list[list[int]]],
    drafted: dict[bool, dict[str, Any]],
    tied: bool,
) -> None:
    theirs = drafted[tied]
    assert theirs["outputs"] == plain[tied]
    drafter = open_checkpoint(theirs["export"]).drafter()
    target = Target(targets[tied], None, "cpu")
    stop = [targets[tied].config.eos_token_id]
    engine = Engine(target, drafter, batch_size=3, max_length=128, sampling=Sampling(), stop_ids=stop)
    prompts = [Prompt(str(number), ids) for number, ids in enumerate(PROMPTS)]
    ours = {int(answer.id): answer for answer in engine.generate(prompts, NEW_TOKENS)}
    kept = []
    for number, (prompt, lengths) in enumerate(zip(PROMPTS, theirs["lengths"], strict=True)):
        answer = ours[number]
        assert list(answer.ids) == plain[tied][number]
        limit = len(prompt) + NEW_TOKENS  # dflash shortens blocks that would pass it, which changes their guesses
        whole = [block.length for block in answer.blocks if block.start_position + BLOCK <= limit]
        assert whole == lengths[: len(whole)]
        kept += whole
    assert len(kept) >= 20
    assert {1, BLOCK} <= set(kept)  # something is drafted, something is missed: equality says something
