"""What was written, loaded by the programs of others from PyPI in an environment and processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.consumers import CONSUMERS, Verdict, check_exports
from pipeline.interchange import write_union
from pipeline.interchange_config import SLIDING
from tests.interchange_samples import save_tiny_target, tiny_config, tiny_tensors
from tests.throwaway import consumer_python

SLIDING_LAYERS = {"layer_types": (SLIDING, "full_attention"), "sliding_window": 9}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
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
}
Verdicts = dict[str, dict[str, Verdict]]


@pytest.fixture(scope="session")
def python() -> str:
    return str(consumer_python())


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("consumers")
    targets = {tied: save_tiny_target(root / f"target-{tied}", tied) for tied in (True, False)}
    for name, (tied, block_size, drafter, options) in CASES.items():
        config = tiny_config(block_size, **drafter)
        write_union(root / name, config, tiny_tensors(config), targets[tied], **options)
    return {name: root / name for name in CASES}


@pytest.fixture(scope="session")
def verdicts(exports: dict[str, Path], python: str) -> Verdicts:
    found = check_exports(list(exports.values()), None, python)
    return {path.name: {verdict.consumer: verdict for verdict in every} for path, every in found.items()}


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
    ],
)
def test_other_forms_are_identical_where_they_are_read(verdicts: Verdicts, case: str, readers: tuple[str, ...]) -> None:
    compared = {name: verdict.difference for name, verdict in verdicts[case].items() if verdict.difference is not None}
    assert compared == dict.fromkeys(readers, 0.0)
    assert not any(verdict.failed for verdict in verdicts[case].values())


def test_a_consumer_that_is_not_installed_is_said_to_be_absent(verdicts: Verdicts) -> None:
    assert set(verdicts["tied-4"]) == set(CONSUMERS)
    assert verdicts["tied-4"]["vllm"] == Verdict("vllm", None, note="not installed")
