"""What a person asks about a machine and a run: doctor, status, clean."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.layout import Layout
from data.manifest import publish
from data.settings import Run, load_run
from pipeline import devices, preflight
from pipeline.job import job
from pipeline.targets_tiny import make_tiny
from stages import cli, doctor, status
from tests.finished import finish, make
from tests.flow import run_body


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(run_body()))
    Path("rows.jsonl").write_text('{"turns": ["Say a word."]}\n')
    return "run.yaml"


def test_status_counts_what_is_done_and_names_the_next_command(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(run_file)
    layout = Layout.of(run)
    make(run, *map(layout.prompts, range(2)), layout.tokens(0))
    assert cli.exit_code(["status", run_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  prepare    done 2/2" in lines
    assert "  regenerate      1/2" in lines
    assert lines[-1].startswith(
        "next: snakemake --cores all --configfile run.yaml    (or by hand: draftmill regenerate"
    )


def test_status_shows_running_and_failed_jobs_with_the_end_of_the_log(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(run_file)
    with pytest.raises(ZeroDivisionError), job(run, "extract", "part-0001"):
        raise ZeroDivisionError("ours")
    with job(run, "extract", "part-0000"):
        capsys.readouterr()
        cli.exit_code(["status", run_file])
        text = capsys.readouterr().out
    assert f"running extract part-0000 pid {os.getpid()} on cpu" in text
    assert "failed extract part-0001 (attempt 1): ZeroDivisionError: ours" in text
    assert "    | ZeroDivisionError: ours" in text
    assert "next: wait: jobs are at work" in text


def test_status_is_json_for_machines(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.exit_code(["status", run_file, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["stages"]["train"] == {"done": 0, "total": 2, "stale": 0, "why": None, "needed": True}


NEXT = "next: snakemake --cores all --configfile run.yaml    (or by hand: draftmill {} run.yaml)"
STALE: list[tuple[str, Any, str, str]] = [
    ("train", {"learning_rate": 1e-3}, "train", "2 stale, first .*train.learning_rate = 0.0006, this run wants 0.001"),
    ("drafters", {"base": {}, "wide": {"layers": 3}}, "train", "1/2  1 stale, first .*drafter.layers = 5, .* wants 3"),
    (
        "extract",
        {"parts": 2, "codec": "bf16"},
        "extract",
        "2 stale, first .*extract.codec = 'fp8', this run wants 'bf16'",
    ),
    (
        "data",
        {"regenerate": {"temperature": 1.0}},
        "regenerate",
        "0/2  2 stale, first .*data.regenerate.temperature = 0.0",
    ),
    ("data", {"max_length": 9}, "prepare", "0/2  2 stale, first .*data.max_length = 3072, this run wants 9"),
    ("data", {"template_arguments": {"a": 1}}, "prepare", "data.template_arguments.a = None, this run wants 1"),
    ("eval", {"max_new_tokens": 9}, "eval", "0/2  2 stale, first .*eval.max_new_tokens = 512, this run wants 9"),
]


@pytest.mark.parametrize(("section", "change", "stage", "text"), STALE, ids=[f"{s[0]}-{s[2]}" for s in STALE])
def test_status_names_the_setting_that_changed_and_what_makes_it_good(
    run_file: str, capsys: pytest.CaptureFixture[str], section: str, change: dict[str, Any], stage: str, text: str
) -> None:
    finish(load_run(run_file))
    body = run_body()
    body[section] = change if section == "drafters" else {**body.get(section, {}), **change}
    Path(run_file).write_text(yaml.safe_dump(body))
    assert cli.exit_code(["status", run_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(text, next(line for line in lines if line.startswith(f"  {stage} ")))
    assert lines[-1].startswith(f"next: draftmill {stage} run.yaml    (it was made by hand")
    (Layout.of(load_run(run_file)).benchmarks / stage).mkdir(parents=True)  # as Snakemake makes it
    assert cli.exit_code(["status", run_file]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == NEXT.format(stage)
    stale = [line.split()[0] for line in lines if " stale" in line]
    order = list(status.survey(load_run(run_file), run_file)["stages"])
    assert stale == order[order.index(stage) :], "and all that follows"


def test_status_of_a_finished_run_wants_nothing(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    finish(load_run(run_file))
    Path(run_file).write_text(yaml.safe_dump(run_body(train={"log_every": 3}, jobs={"memory_mb": 9})))
    assert cli.exit_code(["status", run_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == ["done"] * 7
    assert lines[-1].startswith("next: nothing: read ")


def test_status_wants_no_cache_that_no_drafter_needs(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(run_file)
    finish(run)
    assert cli.exit_code(["clean", run_file, "--cache", "--yes"]) == 0
    assert status.survey(run, run_file)["next"].startswith("nothing")
    capsys.readouterr()
    cli.exit_code(["status", run_file])
    assert "  extract    gone 0/2  no drafter needs it any more" in capsys.readouterr().out
    Layout.of(run).train_manifest("wide").unlink()
    assert "draftmill extract" in status.survey(run, run_file)["next"]


@pytest.mark.parametrize(
    ("path", "stage"),
    [("prompts/part-0001.json", "regenerate"), ("tokens/part-0001.json", "extract"), ("cache/part-0001.json", "train"),
     ("drafters/wide/train.json", "eval"), ("eval/wide/manifest.json", "export")],
)  # fmt: skip
def test_status_sees_what_was_made_from_something_else(run_file: str, path: str, stage: str) -> None:
    run = load_run(run_file)
    finish(run)
    changed = run.folder / path
    body = json.loads(changed.read_text())
    changed.write_text(json.dumps({**body, "fingerprint": "another"}))
    state = status.survey(run, run_file)
    assert f"draftmill {stage} " in state["next"]
    assert "another now" in state["stages"][stage]["why"] or stage == "train"


def test_status_counts_a_manifest_that_cannot_be_read_as_stale(run_file: str) -> None:
    run = load_run(run_file)
    finish(run)
    Layout.of(run).cache_part(0).write_text("{")
    state = status.survey(run, run_file)
    assert state["stages"]["extract"]["stale"] == 1
    assert "part-0000.json: not readable as JSON" in state["stages"]["extract"]["why"]
    assert "draftmill extract" in state["next"]


def test_status_names_a_state_that_cannot_be_read(run_file: str) -> None:
    run = load_run(run_file)
    finish(run)
    layout = Layout.of(run)
    layout.cache_part(0).unlink()
    layout.cache_state(0).parent.mkdir(parents=True, exist_ok=True)
    layout.cache_state(0).write_text('{"sta')
    state = status.survey(run, run_file)
    assert str(layout.cache_state(0)) in state["stages"]["extract"]["why"]
    assert "extract" in state["next"]


def test_status_sees_a_report_that_is_older_than_what_it_shows(run_file: str) -> None:
    run = load_run(run_file)
    finish(run)
    os.utime(Layout.of(run).report, (1, 1))
    assert "draftmill report" in status.survey(run, run_file)["next"]


def test_ten_thousand_shards_are_counted_in_under_a_second(run_file: str) -> None:
    Path(run_file).write_text(yaml.safe_dump(run_body(extract={"parts": 200})))
    run = load_run(run_file)
    shard = {"name": "shard-00000.zarr", "counts": {"rows": 9, "bytes": 1}, "files": [{"path": "a", "bytes": 1}] * 9}
    for part in range(200):
        publish(Layout.of(run).cache_part(part), "cache", {"shards": [shard] * 50})
    began = time.process_time()
    state: dict[str, Any] = status.survey(run, run_file)
    shards = sum(len(json.loads(Layout.of(run).cache_part(p).read_bytes())["shards"]) for p in range(200))
    assert time.process_time() - began < 1.0
    assert (state["stages"]["extract"]["done"], shards) == (200, 10_000)


def test_clean_shows_sizes_and_deletes_only_when_told(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(run_file)
    layout = Layout.of(run)
    make(run, layout.cache_part(0), layout.train_manifest("base"))
    monkeypatch.setattr("click.confirm", lambda text: False)
    assert cli.exit_code(["clean", run_file, "--cache"]) == 0
    assert layout.cache_part(0).exists()
    assert cli.exit_code(["clean", run_file, "--cache", "--yes"]) == 0
    assert not layout.cache.exists()
    assert layout.train_manifest("base").exists()


def test_clean_empties_a_cache_that_lies_on_another_disk(run_file: str, tmp_path: Path) -> None:
    run = load_run(run_file)
    layout, other = Layout.of(run), tmp_path / "other"
    other.mkdir()
    layout.folder.mkdir(parents=True, exist_ok=True)
    layout.cache.symlink_to(other)
    make(run, layout.cache_part(0), layout.cache / "part-0000" / "shard-00000.zarr" / "zarr.json")
    assert cli.exit_code(["clean", run_file, "--cache", "--yes"]) == 0
    assert layout.cache.is_symlink()
    assert not list(other.iterdir())


def test_clean_keeps_the_best_and_the_last_checkpoint(run_file: str) -> None:
    layout = Layout.of(load_run(run_file))
    for name in ("base", "wide"):
        for step in (1, 2, 3, 4):
            make(load_run(run_file), layout.checkpoints(name) / f"step-{step:06d}" / "meta.json")
    aside = layout.drafter("base").with_name(".base.old-1")
    make(load_run(run_file), aside / "checkpoints" / "step-000009" / "meta.json")
    publish(layout.train_manifest("base"), "drafter", {"best": {"step": 2}, "last": {"step": 4}})
    assert cli.exit_code(["clean", run_file, "--checkpoints", "--yes"]) == 0
    left = {name: sorted(path.name for path in layout.checkpoints(name).iterdir()) for name in ("base", "wide")}
    assert left["base"] == ["step-000002", "step-000004"]
    assert len(left["wide"]) == 4, "not trained to the end: it resumes from them"
    assert not aside.exists(), "what a forced re-run set aside"


def test_clean_leaves_a_run_at_work_alone(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(run_file)
    with job(run, "extract", "part-0000"):
        assert cli.exit_code(["clean", run_file, "--all", "--yes"]) == 2
    assert "is at work" in capsys.readouterr().err
    assert run.folder.exists()


def test_clean_of_the_cache_goes_on_beside_stages_that_do_not_read_it(run_file: str) -> None:
    """With `extract.keep: false` the flow drops the cache while it evaluates."""
    run = load_run(run_file)
    make(run, Layout.of(run).cache_part(0))
    with job(run, "eval", "base"):
        assert cli.exit_code(["clean", run_file, "--checkpoints", "--yes"]) == 2
        assert cli.exit_code(["clean", run_file, "--cache", "--yes"]) == 0
    assert not Layout.of(run).cache.exists()


def test_clean_leaves_a_cache_alone_that_another_run_trains_from(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(run_file)
    make(run, Layout.of(run).cache_part(0))
    Path("other.yaml").write_text(yaml.safe_dump(run_body(name="other", cache={"from": run.name})))
    with job(load_run("other.yaml"), "train", "base"):
        for what in ("--cache", "--all"):
            assert cli.exit_code(["clean", run_file, what, "--yes"]) == 2
        assert "train base of run other is at work" in capsys.readouterr().err
    assert Layout.of(run).cache_part(0).exists()


@pytest.mark.parametrize("what", ["--cache", "--all"])
def test_clean_says_which_other_runs_read_the_cache_before_it_asks(
    run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def other(name: str, **sections: Any) -> Run:
        Path(f"{name}.yaml").write_text(yaml.safe_dump(run_body(name=name, **sections)))
        return load_run(f"{name}.yaml")

    run = load_run(run_file)
    finish(run)
    with job(other("begun", cache={"from": run.name}), "train", "base"):
        pass
    trained, alone = other("trained", cache={"from": run.name}), other("alone")
    make(trained, Layout.of(trained).train_manifest("base"), cache={"run": run.name})
    make(alone, Layout.of(alone).train_manifest("base"), cache={"run": "alone"})
    torn = Layout.of(alone).train_manifest("wide")
    torn.parent.mkdir()
    torn.write_text("{")
    asked: list[str] = []
    monkeypatch.setattr("click.confirm", lambda text: asked.append(capsys.readouterr().err))
    assert cli.exit_code(["clean", run_file, what]) == 0
    assert "other runs read this cache (cache.from) and cannot train without it: begun, trained\n" in asked[0]
    assert cli.exit_code(["clean", "alone.yaml", "--all"]) == 0
    assert "other runs" not in asked[1]


def test_clean_wants_to_know_what(run_file: str) -> None:
    assert cli.exit_code(["clean", run_file]) == 2
    assert cli.exit_code(["clean", run_file, "--cache", "--all"]) == 2


def test_doctor_is_a_table_or_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "describe", list)
    monkeypatch.setattr(devices, "visible", list)
    assert cli.exit_code(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "gpu", "memory", "disk"} <= set(checks)
    assert checks["gpu"]["status"] == "warning"
    assert all(check["remedy"] for check in checks.values() if check["status"] == "failure")


def test_doctor_fails_on_files_that_are_not_there(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").unlink()
    assert cli.exit_code(["doctor", run_file, "--json"]) == 1
    found = [check for check in json.loads(capsys.readouterr().out) if check["name"] == "file"]
    assert found[0]["found"] == "rows.jsonl does not exist"


def test_doctor_reads_benchmarks(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("good.jsonl").write_text('{"turns": ["Say a word."]}\n')
    Path("twin.jsonl").write_text('{"conversations": [{"from": "human", "value": "Say a word."}]}\n')
    Path("other.jsonl").write_text('{"text": "A word."}\n')
    paths = {name: {"path": f"{name}.jsonl"} for name in ("good", "twin", "other")}
    checks = asked(run_file, capsys, eval={"benchmarks": paths})
    assert checks["benchmark good"]["found"] == checks["benchmark twin"]["found"] == "1 prompts"
    assert checks["benchmark other"]["status"] == "failure"
    assert "other.jsonl, line 1: no prompt that the target" in checks["benchmark other"]["found"]


def test_doctor_chooses_mask_tokens(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(run_file).write_text(yaml.safe_dump(run_body(drafters={"base": {}, "wide": {"mask_token": "<none>"}})))
    assert cli.exit_code(["doctor", run_file, "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert "mask token 265: the lowest embedding row" in checks["drafter base"]["found"]
    assert checks["drafter wide"]["status"] == "failure"
    assert checks["drafter wide"]["found"].startswith("drafters.wide: mask_token: '<none>' is not a special token")


def asked(run_file: str, capsys: pytest.CaptureFixture[str], **sections: Any) -> dict[str, dict[str, str]]:
    """What the doctor, who must find a failure, says of a run."""
    Path(run_file).write_text(yaml.safe_dump(run_body(**sections)))
    assert cli.exit_code(["doctor", run_file, "--json"]) == 1
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def test_doctor_says_once_what_is_wrong_with_a_target(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("model")
    make_tiny(folder, 0)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checks = asked(run_file, capsys, target={"model": "model"})
    assert "are missing, first model-00002-of-00002.safetensors" in checks["target"]["found"]
    assert [name for name, check in checks.items() if check["status"] == "failure"] == ["target"]


def test_doctor_looks_at_what_drafters_start_from(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    checks = asked(run_file, capsys, train={"warm_start": "nowhere"})
    assert checks["drafter base"]["status"] == "failure"
    assert "drafters.base: train.warm_start: nowhere: not a folder" in checks["drafter base"]["found"]


def test_doctor_counts_the_gpus_that_are_asked_for(
    run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "describe", list)
    monkeypatch.setattr(devices, "visible", lambda: ["GPU-1"])
    # Not tried: it would lease that GPU, for as long as this process of tests lives.
    monkeypatch.setattr(doctor, "_selftest", lambda: preflight.Check("compile and capture", "ok", "not tried"))
    checks = asked(run_file, capsys, drafters={"base": {"gpus": 2}})
    assert checks["drafters.base.gpus"]["found"] == "2 GPUs wanted, 1 here"
    assert "target.gpus" not in checks
    checks = asked(run_file, capsys, drafters={"base": {"gpus": 4}, "wide": {"gpus": 2}}, jobs={"nodes": 2})
    assert checks["drafters.base.gpus"]["found"] == "2 GPUs wanted on each of 2 machines (`jobs.nodes`), 1 here"
    assert checks["drafters.base.gpus"]["remedy"] == "set drafters.base.gpus to at most 2"
    assert "drafters.wide.gpus" not in checks


@pytest.mark.parametrize(
    ("used", "capability", "status_", "text"),
    [
        (1 << 30, (9, 0), "ok", "capability 9.0"),
        (50 << 30, (9, 0), "warning", "by pids 77"),
        (1 << 30, (7, 5), "warning", "no bfloat16"),
        (1 << 30, (8, 0), "ok", "no float8 products"),
    ],
)
def test_doctor_judges_devices(
    used: int, capability: tuple[int, int], status_: str, text: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(devices, "LOCKS", tmp_path)
    device = devices.Device("GPU-1", "H200", 100 << 30, used, capability, (77,))
    found = preflight._device(device, 0.1, usable=True)
    assert found.status == status_
    assert text in found.found
    assert "hidden by CUDA_VISIBLE_DEVICES" in preflight._device(device, 0.1, usable=False).found


def test_a_cpu_build_of_torch_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed", lambda name: "2.13.0+cpu")
    preflight.require_torch_build(devices.Lease(()))
    with pytest.raises(Exception, match="CPU build on a machine with GPUs"):
        preflight.require_torch_build(devices.Lease(("GPU-1",)))
