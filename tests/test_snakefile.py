"""The flow: which stages run, when, with what, and what a change makes run again. Stages are stand-ins here."""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.settings import Run
from data.shaping import cache_settings, shaping
from tests.flow import ROOT, Flow, Snakemake, run_body, snakemake_server

LATER = {"train": 2, "eval": 2, "export": 2, "report": 1}
WHOLE = {"prepare": 1, "regenerate": 2, "extract": 2, **LATER}


@pytest.fixture(scope="module")
def server() -> Iterator[Snakemake]:
    with snakemake_server() as running:
        yield running


@pytest.fixture
def flow(tmp_path: Path, server: Snakemake) -> Flow:
    return Flow(tmp_path / "flow", server, run_body())


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory, server: Snakemake) -> Path:
    flow = Flow(tmp_path_factory.mktemp("finished") / "flow", server, run_body())
    result = flow()
    assert result.code == 0, result.output
    assert result.planned == WHOLE
    return flow.folder


@pytest.fixture
def finished(finished_folder: Path, tmp_path: Path, server: Snakemake) -> Flow:
    """A finished run, to change and ask again. Times of files are kept."""
    shutil.copytree(finished_folder, tmp_path / "flow", symlinks=True, ignore=shutil.ignore_patterns("bin"))
    return Flow(tmp_path / "flow", server, run_body())


def test_every_stage_runs_once_for_each_part_and_drafter_in_order(finished_folder: Path) -> None:
    calls = [json.loads(line) for line in (finished_folder / "record").read_text().splitlines()]
    assert sorted(map(tuple, calls)) == sorted(
        [("prepare",), ("report",)]
        + [(stage, "--part", part) for stage in ("regenerate", "extract") for part in ("0000", "0001")]
        + [(stage, "--drafter", name) for stage in ("train", "eval", "export") for name in ("base", "wide")]
    )
    order = [call[0] for call in calls]
    assert order.index("train") > max(i for i, stage in enumerate(order) if stage == "extract")
    assert order[0] == "prepare"


def test_every_rule_but_all_is_a_command_with_log_and_benchmark(finished_folder: Path) -> None:
    benchmarks = finished_folder / "runs" / "x" / "benchmarks"
    assert {path.parent.name if path.parent != benchmarks else path.stem for path in benchmarks.rglob("*.tsv")} == {
        "prepare", "regenerate", "extract", "train", "eval", "export", "report",
    }  # fmt: skip


def test_a_finished_run_again_is_no_job(finished: Flow) -> None:
    result = finished("--dry-run")
    assert result.planned == {}
    assert "Nothing to be done" in result.output


CHANGES: list[tuple[str, Any, dict[str, int]]] = [
    ("train.learning_rate", 1e-3, LATER),
    ("drafters.wide", {"layers": 3}, {"train": 1, "eval": 1, "export": 1, "report": 1}),
    ("drafters.wide", {"train": {"seed": 3}}, {"train": 1, "eval": 1, "export": 1, "report": 1}),
    ("drafters.third", {}, {"train": 1, "eval": 1, "export": 1, "report": 1}),
    ("train.log_every", 7, {}),
    ("train.readers", 5, {}),
    ("jobs.memory_mb", 999, {}),
    ("jobs.retries", 0, {}),
    ("extract.keep", True, {}),
    ("extract.codec", "bf16", {"extract": 2, **LATER}),
    ("extract.tokens_per_batch", 512, {"extract": 2, **LATER}),
    ("target.dtype", "float32", {"regenerate": 2, "extract": 2, **LATER}),
    ("target.gpus", 2, {}),
    ("data.regenerate", {"max_new_tokens": 7}, {"regenerate": 2, "extract": 2, **LATER}),
    ("data.regenerate", {"batch_size": 7}, {}),
    ("data.max_length", 99, WHOLE),
    ("data.template_arguments", {"b": 1, "a": 2}, WHOLE),
    ("eval.max_new_tokens", 5, {"eval": 2, "export": 2, "report": 1}),
    ("extract.parts", 3, {**WHOLE, "regenerate": 3, "extract": 3}),
    ("extract.parts", 1, {**WHOLE, "regenerate": 1, "extract": 1}),
]


@pytest.mark.parametrize(("setting", "value", "again"), CHANGES, ids=[f"{c[0]}={c[1]}" for c in CHANGES])
def test_a_change_runs_again_exactly_what_it_touches(
    finished: Flow, setting: str, value: Any, again: dict[str, int]
) -> None:
    finished.set(setting, value)
    assert finished("--dry-run").planned == again


def test_order_of_keys_in_the_run_file_changes_nothing(finished: Flow) -> None:
    finished.body = dict(reversed(finished.body.items()))
    finished.save()
    assert finished("--dry-run").planned == {}


def test_touching_a_file_changes_nothing_and_editing_it_does(finished: Flow) -> None:
    rows = finished.folder / "rows.jsonl"
    later = time.time() + 60
    os.utime(rows, (later, later))
    assert finished("--dry-run").planned == {}
    rows.write_text('{"prompt": "c", "response": "d"}\n')
    os.utime(rows, (later, later))
    assert finished("--dry-run").planned == WHOLE


@pytest.mark.parametrize(
    ("stage", "again"),
    [("extract", {"extract": 2, **LATER}), ("train", LATER), ("eval", {"eval": 2, "export": 2, "report": 1})],
)
def test_forcing_a_stage_runs_it_and_what_follows(finished: Flow, stage: str, again: dict[str, int]) -> None:
    assert finished("--dry-run", "-R", stage).planned == again


def test_snakemakes_own_report_holds_the_page_and_the_pictures_with_captions(finished: Flow) -> None:
    results = {Path(path).name: shown for path, shown in finished.results().items()}
    assert results.keys() == {"report.html", "curves.svg", "slots-base.svg"}
    assert results["report.html"]["mime_type"] == "text/html"
    assert results["slots-base.svg"]["mime_type"] == "image/svg+xml"
    assert results["slots-base.svg"]["labels"] == {"picture": "slots-base"}
    for name, words in (
        ("report.html", "on one page"),
        ("curves.svg", "Training loss"),
        ("slots-base.svg", "base</strong>"),
    ):
        assert words in results[name]["caption"]
        content = (finished.run_folder / "report").rglob(name)
        assert base64.b64decode(results[name]["data_uri"].partition("base64,")[2]) == next(content).read_bytes()
    html = (finished.folder / "out.html").read_text()
    assert "One run of draftmill" in html
    assert all(f'"{category}"' in html for category in ("Report", "Pictures"))
    assert finished("--dry-run").planned == {}


def test_own_answers_need_no_regenerate(flow: Flow) -> None:
    flow.set("data.responses", "keep")
    assert flow("--dry-run").planned == {"prepare": 1, "extract": 2, **LATER}


def test_without_benchmarks_nothing_is_evaluated(flow: Flow) -> None:
    flow.set("eval.benchmarks", {})
    assert "eval" not in flow("--dry-run").planned


def test_another_runs_cache_is_used_not_made(finished: Flow) -> None:
    finished.set("name", "second")
    finished.set("cache", {"from": "x"})
    assert finished("--dry-run").planned == LATER


def test_a_change_of_what_shapes_another_runs_cache_reaches_training_which_refuses_it(finished: Flow) -> None:
    finished.set("name", "second")
    finished.set("cache", {"from": "x"})
    assert finished().code == 0
    assert finished("--dry-run").planned == {}
    finished.set("extract.codec", "bf16")
    assert finished("--dry-run").planned == LATER


def test_a_change_of_what_shapes_a_dropped_cache_makes_it_again(flow: Flow) -> None:
    flow.set("extract.keep", False)
    assert flow().code == 0
    flow.set("extract.codec", "bf16")
    assert flow("--dry-run").planned == {"extract": 2, "clean": 1, **LATER}


def test_a_cache_that_is_not_kept_is_dropped_after_training_and_not_made_again(flow: Flow) -> None:
    flow.set("extract.keep", False)
    assert flow().code == 0
    assert ["clean", "--cache", "--yes"] in flow.calls()
    assert not list((flow.run_folder / "cache").glob("part-*.json"))
    assert flow("--dry-run").planned == {}


def test_a_cache_that_was_cleaned_is_made_again_only_for_a_drafter_that_needs_it(finished: Flow) -> None:
    """What `draftmill status` says too."""
    shutil.rmtree(finished.run_folder / "cache")
    assert finished("--dry-run").planned == {}
    finished.set("train.learning_rate", 1e-3)
    assert finished("--dry-run").planned == {"extract": 2, **LATER}


def test_verify_is_a_target_of_its_own(finished: Flow) -> None:
    assert finished("--dry-run", "verify").planned == {"verify": 1}


def test_only_one_run_file_and_only_what_it_says(flow: Flow) -> None:
    (flow.folder / "other.yaml").write_text(json.dumps(run_body(name="y")))
    result = flow("--dry-run", "--configfile", "run.yaml", "other.yaml")
    assert result.code != 0
    assert "one run file" in result.output


def test_a_bad_run_file_is_one_clear_line(flow: Flow) -> None:
    flow.set("train.learning_rat", 1)
    result = flow("--dry-run")
    assert result.code != 0
    assert "did you mean `learning_rate`?" in result.output


def test_a_damaged_state_is_one_clear_line(finished: Flow) -> None:
    state = finished.run_folder / "prompts" / "state.json"
    state.write_text("{")
    (finished.run_folder / "prompts" / "accounting.json").unlink()
    result = finished("--dry-run")
    assert result.code != 0
    assert "state.json" in result.output
    assert "delete it to start over" in result.output
    assert "Traceback" not in result.output


def test_a_failing_stage_ends_the_flow_and_names_it(flow: Flow) -> None:
    flow.set("jobs.retries", 1)
    result = flow(STUB_FAIL="train")
    assert result.code != 0
    assert "train was told to fail" in result.output
    assert "Error in rule train" in result.output
    assert [call[0] for call in flow.calls()].count("extract") == 2
    assert {"eval", "export", "report"}.isdisjoint(call[0] for call in flow.calls())
    assert flow().code == 0


@pytest.mark.parametrize("stage", ["prepare", "regenerate", "extract", "train", "eval", "export", "report"])
def test_a_finished_run_whose_change_failed_on_the_way_goes_on(finished: Flow, stage: str) -> None:
    """Outputs of before the change are there, after the one that the failed job has lost."""
    finished.set("data.max_length", 300)
    assert finished(STUB_FAIL=stage).code != 0
    again = finished()
    assert again.code == 0, again.output
    stages = list(WHOLE)
    assert set(again.planned) >= set(stages[stages.index(stage) :])
    assert finished().planned == {}


def test_what_a_killed_snakemake_left_needs_no_flag_but_unlock(flow: Flow) -> None:
    killer = f"""
import threading, time
def kill():
    while not os.path.exists({str(flow.record)!r}) or '"extract"' not in open({str(flow.record)!r}).read():
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
"""
    assert flow(prelude=killer, STUB_SLEEP="0.3").code == -9
    time.sleep(1.0)  # the orphan publishes its manifest
    assert flow("--unlock").code == 0
    result = flow()
    assert result.code == 0, result.output
    assert flow("--dry-run").planned == {}


FAKE_NVML = """
import types
class NVMLError(Exception): pass
def no_mig(handle): raise NVMLError
sys.modules["pynvml"] = types.SimpleNamespace(
    NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: {count},
    nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetUUID=lambda i: f"GPU-{{i}}",
    nvmlDeviceGetName=lambda i: "fake",
    nvmlDeviceGetMemoryInfo=lambda i: types.SimpleNamespace(total=80 << 30, used=0),
    nvmlDeviceGetCudaComputeCapability=lambda i: (9, 0), nvmlDeviceGetComputeRunningProcesses=lambda i: [],
    nvmlDeviceGetMigMode=no_mig,
)
"""


@pytest.mark.parametrize(("gpus", "side_by_side"), [(0, 2), (1, 1), (2, 2)])
def test_gpus_of_the_machine_limit_jobs_without_flags(flow: Flow, gpus: int, side_by_side: int) -> None:
    flow.set("extract.parts", 4)
    result = flow(prelude=FAKE_NVML.format(count=gpus), STUB_SLEEP="0.3", STUB_STAMP="1")
    assert result.code == 0, result.output
    spans = [call[-2:] for call in flow.calls() if call[0] == "extract"]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == side_by_side


def test_dry_run_of_2000_parts_is_linear(flow: Flow) -> None:
    flow.set("extract.parts", 2000)
    flow.set("data.responses", "keep")
    result = flow("--dry-run")
    assert result.code == 0
    assert result.planned["extract"] == 2000
    assert result.seconds < 15, "about 2.5 s on an idle core; a quadratic flow takes a minute"


def test_new_rows_cost_only_the_parts_that_they_change(finished: Flow) -> None:
    finished.record.unlink()
    (finished.folder / "rows.jsonl").write_text("other rows")
    result = finished(STUB_CHANGED="1")
    assert result.code == 0, result.output
    assert {tuple(call) for call in finished.calls() if call[0] in ("regenerate", "extract")} == {
        ("regenerate", "--part", "0001"),
        ("extract", "--part", "0001"),
    }


def test_shaping_covers_every_setting_of_the_cache() -> None:
    """A setting that makes consumers refuse a cache also makes Snakemake make it again, and no other does."""
    base = Run.model_validate(run_body())
    changes = {
        "target": {"dtype": "float32", "revision": "a", "gpus": 2},
        "data": {"max_length": 9, "system_prompt": "s", "supervise": "last", "max_dropped": 0.1, "validation": 0.5},
        "extract": {"codec": "bf16", "parts": 5, "keep": False, "window_bytes": 5, "shard_bytes": 7, "top_k": 3},
    }
    for section, fields in changes.items():
        for field, value in fields.items():
            changed = with_setting(section, field, value)
            refused = cache_settings(changed) != cache_settings(base)
            assert refused == (shaping(changed, "extract") != shaping(base, "extract")), f"{section}.{field}"


def test_who_answers_shapes_tokens_and_cache_alike_and_how_many_at_once_neither() -> None:
    def server(**settings: Any) -> Run:
        return with_setting("data", "regenerate", {"server": {"url": "http://a/v1", **settings}})

    base = server()
    for changed, shapes in ((server(model="m"), True), (server(concurrency=3), False), (server(retries=0), False)):
        assert (shaping(changed, "regenerate") != shaping(base, "regenerate")) == shapes
        assert (cache_settings(changed) != cache_settings(base)) == shapes
    kept = {"train": [{"path": "rows.jsonl"}], "regenerate": {"server": {"url": "http://a/v1"}}}
    assert not [name for name in cache_settings(Run.model_validate(run_body(data=kept))) if "regenerate" in name]


def with_setting(section: str, field: str, value: Any) -> Run:
    body = copy.deepcopy(run_body())
    body[section][field] = value
    return Run.model_validate(body)


def test_the_snakefile_is_formatted() -> None:
    done = subprocess.run([sys.executable, "-m", "snakefmt", "--check", ROOT / "Snakefile"], capture_output=True)
    assert done.returncode == 0, done.stderr
