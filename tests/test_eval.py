import copy
import gzip
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from data.benchmarks import PRESETS, load_benchmark
from data.errors import BadInput, Failure, Stopped
from data.layout import Layout
from data.manifest import publish, read_manifest
from data.settings import Benchmark, Run, Server, load_run
from data.shaping import cache_settings, shaping
from pipeline import lossless, sampling
from pipeline.checkpoint import CheckpointWriter
from pipeline.decode import Engine, Prompt
from pipeline.drafter import Drafter, DrafterConfig, initialise
from pipeline.evaluation import Conversations, Evaluation, differences, example
from pipeline.interchange import write_union
from pipeline.interchange_config import TargetInfo
from pipeline.sampling import Sampling
from pipeline.server import KEY
from pipeline.server_metrics import MeasuredServer, Metrics
from pipeline.target import Target, target_record
from pipeline.template import template_record
from stages.cli import exit_code
from tests.benchmarks.reference import COLUMNS, markdown, of_runs
from tests.interchange_samples import change_a_byte

B = 4
PROMPTS = [
    {"id": "one", "turns": ["Say a word."]},
    {"id": "two", "turns": ["Hello there.", "And again?"]},
    {"id": "three", "turns": ["Count the trees in the wood and say how many there are, then say it once more."]},
]


def tiny_drafter(seed: int = 0, width: int = 64) -> Drafter:
    config = DrafterConfig(
        hidden_size=width, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, block_size=B,
        mask_token_id=300, target_layer_ids=(1, 2, 3), num_target_layers=6, vocab_size=320,
        max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None,
        layer_types=("full_attention",), sliding_window=None,
    )  # fmt: skip
    drafter = Drafter(config)
    initialise(drafter, seed, std=0.1)
    return drafter


@pytest.fixture
def trained(make_run: Callable[..., Run], tiny_target: Target, tmp_path: Path) -> Callable[..., Path]:
    """Makes a run file, and a drafter `base` with one checkpoint as training leaves it; gives the run file's path."""

    def make(drafter: Drafter | None = None, prompts: list[dict] | None = None, **sections: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in (PROMPTS if prompts is None else prompts)))
        body = {
            "root": str(tmp_path / "runs"),
            "eval": {
                "benchmarks": {"talk": {"path": str(path)}},
                "max_new_tokens": 12,
                "batch_size": 3,
                "speed_batch_sizes": [1],
                "speed_prompts": 1,
                **sections.pop("eval", {}),
            },
            **sections,
        }
        run = make_run("evaluated", **body)
        link = tmp_path / "runs" / ".targets"
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(Layout.of(make_run("tiny")).targets)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(run.model_dump(mode="json", by_alias=True)))
        leave_training(run, drafter or tiny_drafter(), tiny_target)
        return file

    return make


def leave_training(run: Run, drafter: Drafter, target: Target) -> None:
    layout = Layout.of(run)
    validation = {"acceptance": 1.5, "per_slot": [0.3, 0.2, 0.1], "blocks": 10}
    writer = CheckpointWriter(layout.checkpoints("base"), 1, 1)
    writer.save(40, drafter.config, drafter.state_dict(), {}, {"fingerprint": "f", "validation": validation})
    writer.wait()
    body = {"fingerprint": "f", "target": target_record(run), "template": template_record(target.tokenizer, {})}
    body["best"] = {"step": 40, "validation": validation}
    publish(layout.train_manifest("base"), "drafter", body)


def results(run_file: Path, name: str = "base") -> dict[str, Any]:
    folder = run_file.parent / "runs" / "evaluated" / "eval" / name
    assert read_manifest(folder / "manifest.json", "eval")["counts"]["files"] == 1
    return json.loads((folder / "talk.json").read_text())


def test_eval_records_everything_and_says_it(trained: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    file = trained(data={"train": [{"path": "rows.jsonl"}], "max_length": 60})
    assert exit_code(["eval", str(file)]) == 0
    body = results(file)
    assert (body["prompts"], body["responses"]) == (3, 4)
    manifest = read_manifest(file.parent / "runs" / "evaluated" / "eval" / "base" / "manifest.json", "eval")
    assert manifest["settings"] == json.loads(shaping(load_run(file), "eval", "base")), "what status compares"
    assert body["lossless"]["checked"] == body["lossless"]["exact"] == 4
    assert body["pooled"]["low"] <= body["pooled"]["value"] <= body["pooled"]["high"]
    assert sum(body["histogram"]) == body["blocks"]
    assert body["validation"]["acceptance"] == 1.5
    assert body["past_trained_length"]["tokens"] == 60
    assert 0 < body["past_trained_length"]["responses_share"] < 1
    assert [entry["batch_size"] for entry in body["speed"]] == [3, 1]
    assert all(entry["plain"]["tokens"] == entry["drafted"]["tokens"] for entry in body["speed"])
    record = body["record"]
    assert record["template"]["template"]
    assert "Say a word." in record["prompt"]["text"]
    assert {"torch", "transformers", "python"} <= record["versions"].keys()
    assert record["settings"]["max_new_tokens"] == 12
    said = capsys.readouterr().err
    assert "acceptance length" in said
    assert "4 of 4 answers equal" in said


def test_a_drafter_trained_with_other_settings_is_refused_before_the_target_is_loaded(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = trained()
    manifest = file.parent / "runs" / "evaluated" / "drafters" / "base" / "train.json"
    run = load_run(file)
    cache = {"settings": cache_settings(run), "layer_ids": [1, 2, 3]}
    body = {**json.loads(manifest.read_text()), "settings": json.loads(shaping(run, "train", "base")), "cache": cache}
    manifest.write_text(json.dumps(body))
    monkeypatch.setattr("pipeline.target.load_target", None)
    for section, change, text in (
        ("train", {"learning_rate": 1.0}, "train.learning_rate = 0.0006, this run wants 1.0"),
        ("extract", {**run.extract.model_dump(mode="json"), "codec": "fp8"}, "extract.codec = 'float32', .* 'fp8'"),
    ):
        other = file.with_name("other.yaml")
        other.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), section: change}))
        assert exit_code(["eval", str(other)]) == 2
        assert re.search(f"{text}: run `draftmill train` again, or change it back", capsys.readouterr().err)
    assert not (file.parent / "runs" / "evaluated" / "eval").exists()


def test_an_answer_is_put_before_the_next_turn(trained: Callable[..., Path], tiny_target: Target) -> None:
    file = trained()
    assert exit_code(["eval", str(file)]) == 0
    body = results(file)
    first, second = (next(e for e in body["examples"] if e["id"] == name) for name in ("two", "two#2"))
    said = tiny_target.tokenizer.decode(
        [token for span in first["spans"] for token in span["ids"]], skip_special_tokens=True
    )
    assert f"{said}" in second["prompt"]
    assert "And again?" in second["prompt"]


def test_spans_of_an_example_add_up_to_its_text(trained: Callable[..., Path], tiny_target: Target) -> None:
    engine = Engine(tiny_target, tiny_drafter().eval(), batch_size=1, max_length=64, sampling=Sampling(), stop_ids=())
    prompt = Prompt("p", [10, 20, 30])
    (answer,) = engine.generate([prompt], 20)
    made = example(tiny_target.tokenizer, prompt, answer)
    assert [token for span in made["spans"] for token in span["ids"]] == list(answer.ids)
    assert "".join(span["text"] for span in made["spans"]) == tiny_target.tokenizer.decode(answer.ids)
    assert sum(block["length"] for block in made["blocks"]) == 19


def test_an_interrupted_evaluation_goes_on_where_it_was(
    trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = trained()
    assert exit_code(["eval", str(file)]) == 0
    folder = file.parent / "runs" / "evaluated" / "eval" / "base"
    (folder / "manifest.json").unlink()
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "status": "running"}))

    def never(*arguments: Any) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "measure", never)
        assert exit_code(["eval", str(file)]) == 0
        assert (folder / "manifest.json").exists()
        (folder / "manifest.json").unlink()  # now finished work has lost its manifest: somebody wants it made again
        assert exit_code(["eval", str(file)]) == 1


def test_quick_looks_and_smaller_blocks_have_folders_of_their_own(trained: Callable[..., Path]) -> None:
    file = trained()
    assert exit_code(["eval", str(file), "--limit", "1", "--block-size", "3"]) == 0
    body = results(file, "base+block3+limit1")
    assert (body["prompts"], body["block_size"], body["trained_block_size"]) == (1, 3, B)
    assert len(body["per_slot"]) == 2
    assert not (file.parent / "runs" / "evaluated" / "eval" / "base").exists()


def test_some_of_the_benchmarks_leave_the_numbers_of_all_alone(trained: Callable[..., Path], tmp_path: Path) -> None:
    talk = {"path": str(tmp_path / "prompts.jsonl")}
    file = trained(eval={"benchmarks": {"talk": talk, "more": talk}})
    assert exit_code(["eval", str(file)]) == 0
    folder = Layout.of(load_run(file)).folder / "eval"
    before = (folder / "base" / "manifest.json").read_bytes()
    assert exit_code(["eval", str(file), "--benchmark", "more"]) == 0
    assert (folder / "base" / "manifest.json").read_bytes() == before
    only = read_manifest(folder / "base+only-more" / "manifest.json", "eval")
    assert [result["benchmark"] for result in only["results"]] == ["more"]


def test_another_template_than_in_training_is_warned_of_with_both_values(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture
) -> None:
    file = trained(data={"train": [{"path": "rows.jsonl"}], "template_arguments": {"tone": "kind"}})
    manifest = file.parent / "runs" / "evaluated" / "drafters" / "base" / "train.json"
    body = json.loads(manifest.read_text())
    body["template"]["template"] = "abc"
    manifest.write_text(json.dumps(body))
    assert exit_code(["eval", str(file), "--limit", "1"]) == 0
    assert "template: template was 'abc' in training, is '" in capsys.readouterr().err
    assert differences({"a": {"b": 1}}, {"a": {"b": 2}}, "x") == ["x: a.b was 1 in training, is 2 here"]


def test_sampled_evaluation_makes_no_claim_of_equal_text(trained: Callable[..., Path]) -> None:
    file = trained(eval={"temperature": 1.0, "top_p": 0.9})
    assert exit_code(["eval", str(file)]) == 0
    assert results(file)["lossless"] is None


def test_somebody_elses_drafter_stands_in_the_same_table(trained: Callable[..., Path], tmp_path: Path) -> None:
    file, theirs = trained(), union(tmp_path / "their-drafter", tiny_drafter())
    assert exit_code(["eval", str(file)]) == 0
    assert exit_code(["eval", str(file), "--drafter-path", theirs]) == 0
    (folder,) = (file.parent / "runs" / "evaluated" / "eval").glob("path-*their-drafter")
    ours, theirs = results(file), results(file, folder.name)
    assert theirs["validation"] is None
    assert theirs["past_trained_length"] is None
    assert theirs["pooled"] == ours["pooled"]


@pytest.mark.parametrize("changed", ["theirs", "ours", "target", "nothing"])
def test_what_was_measured_of_other_weights_at_the_same_place_is_not_gone_on_with(
    trained: Callable[..., Path], tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    talk = {"path": str(tmp_path / "prompts.jsonl")}
    target = tmp_path / "target"
    file = trained(eval={"benchmarks": {"first": talk, "second": talk}})
    shutil.copytree(Layout.of(load_run(file)).targets / "tiny-2", target)
    (target / "source.json").unlink()
    run = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(run | {"target": run["target"] | {"model": str(target)}}))
    command = ["eval", str(file)]
    command += [] if changed == "ours" else ["--drafter-path", union(tmp_path / "theirs", tiny_drafter())]
    measured: list[str] = []
    measure = Evaluation.measure

    def stop_at_the_second(self: Evaluation, subject: Any, benchmark: str) -> dict[str, Any]:
        measured.append(benchmark)
        if measured == ["first", "second"]:
            raise Stopped("here")
        return measure(self, subject, benchmark)

    monkeypatch.setattr(Evaluation, "measure", stop_at_the_second)
    assert exit_code(command) == 75
    if changed == "theirs":
        union(tmp_path / "theirs", tiny_drafter(seed=1))
    if changed == "ours":
        shutil.rmtree(Layout.of(load_run(file)).checkpoints("base"))
        leave_training(load_run(file), tiny_drafter(seed=1), tiny_target)
    if changed == "target":
        change_a_byte(target / "model.safetensors")
    assert exit_code(command) == 0
    assert measured == ["first", "second", *(["second"] if changed == "nothing" else ["first", "second"])]


def test_the_reference_table_is_made_of_records_though_the_cache_is_gone(trained: Callable[..., Path]) -> None:
    file = trained()
    (walked,) = of_runs([file], 2)
    assert (walked["checkpoint"], walked["acceptance"]) == ("step-000040", None)
    assert "| 1.500 |  |  |  |  |  |" in markdown(json.loads(json.dumps([walked])))
    assert exit_code(["eval", str(file)]) == 0
    (row,) = of_runs([file], 2)
    assert (row["walk"], row["checkpoint"]) == (1.5, "step-000040")
    assert (row["compared"]["value"], row["first"]["prompts"], row["bytes_per_token"]) == (1.0, 2, None)
    cells = markdown(json.loads(json.dumps([row]))).splitlines()[-1].split("|")[1:-1]
    assert dict(zip(COLUMNS, map(str.strip, cells), strict=True))["of the first, 95 % (paired)"][:6] == "1.000 "


def never(*_: Any) -> None:
    raise AssertionError("the target is loaded")


def union(folder: Path, drafter: Drafter) -> str:
    """Somebody's checkpoint of this drafter."""
    target = TargetInfo("t", "LlamaForCausalLM", 6, drafter.config.hidden_size, 320, 4096)
    write_union(folder, drafter.config, drafter.state_dict(), target, dtype="float32")
    return str(folder)


@pytest.mark.parametrize("theirs", [False, True])
def test_a_drafter_for_another_target_is_refused_with_both_numbers(
    trained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    theirs: bool,
) -> None:
    wide = tiny_drafter(width=32)
    file = trained(drafter=wide)
    monkeypatch.setattr("pipeline.target.load_target", never)
    options = ["--drafter-path", union(tmp_path / "theirs", wide)] if theirs else []
    assert exit_code(["eval", str(file), *options]) == 2
    assert "width 32, this target has 64" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "evaluated" / "eval").exists()


@pytest.mark.parametrize(
    ("drafter", "options", "says"),
    [
        ("/nowhere", [], "/nowhere: not a folder with a DFlash checkpoint"),
        ("whole", ["--block-size", "9"], "--block-size: 9 is not between 2 and the drafter's 4"),
        ("torn", [], "model.safetensors: not the bytes that draftmill.json records"),
    ],
)
def test_somebody_elses_drafter_is_looked_at_before_anything_starts_or_is_written(
    trained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    options: list[str],
    says: str,
) -> None:
    file = trained()
    if drafter != "/nowhere":
        drafter = union(tmp_path / drafter, tiny_drafter())
    if drafter.endswith("torn"):
        os.truncate(Path(drafter) / "model.safetensors", 1000)
    monkeypatch.setattr("pipeline.target.load_target", never)
    assert exit_code(["eval", str(file), "--drafter-path", drafter, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert {path.name for path in (tmp_path / "runs" / "evaluated").iterdir()} == {"drafters"}, "not even a log"


def test_a_damaged_checkpoint_is_refused_before_the_target_is_loaded(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = trained()
    weights = file.parent / "runs" / "evaluated" / "drafters" / "base" / "checkpoints" / "step-000040"
    change_a_byte(weights / "drafter.safetensors")
    monkeypatch.setattr("pipeline.target.load_target", None)
    assert exit_code(["eval", str(file)]) == 2
    assert f"{weights / 'drafter.safetensors'} has another crc32c" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "prompts", "says"),
    [
        ([], [], "holds no prompts"),
        ([], [{"id": "a", "text": "Once upon a time."}], "line 1: no prompt that the target could answer"),
        ([], [{"id": "a", "turns": ["x"]}] * 2, "repeats 1 ids"),
        (["--benchmark", "nope"], None, "no benchmark `nope`"),
        (["--drafter", "nope"], None, "no drafter `nope`"),
        (["--checkpoint", "step-7"], None, "no checkpoint `step-7`"),
        (["--block-size", "9"], None, "--block-size: 9 is not between 2 and the drafter's 4"),
        (["--drafter-path", "no/such/folder"], None, "no/such/folder"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    trained: Callable[..., Path],
    capsys: pytest.CaptureFixture,
    arguments: list[str],
    prompts: list[dict] | None,
    says: str,
) -> None:
    assert exit_code(["eval", str(trained(prompts=prompts)), *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]


def test_output_that_is_not_the_targets_fails_with_prompt_and_position(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = sampling.verify

    def accepts_all(drafts: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, tokens = honest(drafts, *more)
        return torch.full((len(drafts),), B - 1), torch.cat((drafts, tokens[:, -1:]), 1)

    monkeypatch.setattr(sampling, "verify", accepts_all)
    assert exit_code(["eval", str(trained())]) == 1
    said = capsys.readouterr().err
    assert "not lossless: prompt `" in said
    assert "answer position" in said


def go_on() -> None:
    """Nobody asks for a stop."""


class TestTies:
    PROMPTS = (Prompt("a", [10, 20, 30]), Prompt("b", [40, 50]))

    @pytest.fixture
    def engine(self, tiny_target: Target) -> Engine:
        drafter = tiny_drafter().eval()
        return Engine(tiny_target, drafter, batch_size=2, max_length=64, sampling=Sampling(), stop_ids=())

    def test_a_tie_is_counted_and_decoding_goes_on_from_the_plain_token(
        self, tiny_target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = {answer.id: answer for answer in engine.generate(self.PROMPTS, 20)}
        swapped = (*plain["a"].ids[:5], 7, *plain["a"].ids[6:])
        drafted = {**plain, "a": replace(plain["a"], ids=swapped)}
        monkeypatch.setattr(lossless.Judge, "gaps", lambda *_: [(5e-5, lossless.FLOAT32_GAP)])
        verdict = lossless.check(engine, tiny_target, self.PROMPTS, plain, drafted, go_on)
        assert (verdict.checked, verdict.exact, len(verdict.ties)) == (2, 1, 1)
        assert (verdict.ties[0].prompt, verdict.ties[0].position) == ("a", 5)

    def test_the_same_difference_without_a_tie_is_a_failure(self, tiny_target: Target, engine: Engine) -> None:
        plain = {answer.id: answer for answer in engine.generate(self.PROMPTS, 20)}
        drafted = {**plain, "b": replace(plain["b"], ids=(*plain["b"].ids[:3], 7, *plain["b"].ids[4:]))}
        with pytest.raises(Failure, match="prompt `b`, answer position 3"):
            lossless.check(engine, tiny_target, self.PROMPTS, plain, drafted, go_on)

    def test_answers_of_other_lengths_are_a_failure(self, tiny_target: Target, engine: Engine) -> None:
        plain = {answer.id: answer for answer in engine.generate(self.PROMPTS, 20)}
        drafted = {**plain, "b": replace(plain["b"], ids=plain["b"].ids[:9])}
        with pytest.raises(Failure, match="9 tokens long"):
            lossless.check(engine, tiny_target, self.PROMPTS, plain, drafted, go_on)

    def test_batches_that_memory_cannot_hold_are_judged_in_smaller_ones(
        self, tiny_target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = [Prompt(str(i), [10 + i] * (i + 1)) for i in range(7)]
        plain = {answer.id: answer for answer in engine.generate(prompts, 6)}
        drafted = {name: replace(a, ids=(*a.ids[:3], 319 - a.ids[3], *a.ids[4:])) for name, a in plain.items()}
        sizes = []

        def gaps(judge: lossless.Judge, contexts: list, pairs: list) -> list[tuple[float, float]]:
            sizes.append(len(contexts))
            if len(contexts) > 2:
                raise torch.OutOfMemoryError
            assert [pair[0] for pair in pairs] == [plain[str(len(c) - 4)].ids[3] for c in contexts]
            return [(0.0, 1.0)] * len(contexts)

        monkeypatch.setattr(lossless, "BATCH_TOKENS", 70)
        monkeypatch.setattr(lossless.Judge, "gaps", gaps)
        verdict = lossless.check(engine, tiny_target, prompts, plain, drafted, go_on)
        assert (verdict.exact, len(verdict.ties)) == (0, 7)  # though all agree behind their ties
        assert sizes == [7, 4, 2, 2, 2, 1]

    def test_a_copy_that_memory_cannot_hold_is_said(self, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(torch.nn.Module, "to", full)
        with pytest.raises(BadInput, match=r"eval.batch_size: .* float64 copy of the target, 0 GB, .* lower it"):
            lossless.Judge(tiny_target, B)

    def test_a_stop_is_heeded_before_differences_are_judged(self, tiny_target: Target, engine: Engine) -> None:
        plain = {answer.id: answer for answer in engine.generate(self.PROMPTS, 20)}
        drafted = {**plain, "b": replace(plain["b"], ids=(*plain["b"].ids[:3], 7, *plain["b"].ids[4:]))}

        def stop() -> None:
            raise Stopped("at once")

        with pytest.raises(Stopped):
            lossless.check(engine, tiny_target, self.PROMPTS, plain, drafted, stop)

    def test_the_judge_sees_each_text_alone(self, tiny_target: Target) -> None:
        texts = [[10, 20, 30, 40, 50, 60], [70, 80]]
        judge = lossless.Judge(tiny_target, B)
        pairs = [(1, 2), (3, 4)]
        for text, pair, (gap, allowed) in zip(texts, pairs, judge.gaps(texts, pairs), strict=True):
            logits = tiny_target.logits(torch.tensor([text]))[0, -1]
            assert gap == pytest.approx(float(logits[pair[0]] - logits[pair[1]]), abs=1e-4)
            assert allowed == lossless.FLOAT32_GAP

    def test_in_bf16_the_judge_measures_what_rounding_does(self, tiny_target: Target) -> None:
        coarse = Target(copy.deepcopy(tiny_target.model).to(torch.bfloat16), tiny_target.tokenizer, "cpu")
        texts = [list(range(10, 40)), list(range(60, 70))]
        pairs = [tuple(tiny_target.logits(torch.tensor([text]))[0, -1].topk(2).indices.tolist()) for text in texts]
        exact = lossless.Judge(tiny_target, B).gaps(texts, pairs)
        for (gap, _), (seen, allowed) in zip(exact, lossless.Judge(coarse, B).gaps(texts, pairs), strict=True):
            assert seen == pytest.approx(gap, abs=0.5)
            assert 0 < allowed < 0.5


@dataclass
class Stub:
    """A stub of a server, its address, the keys that it was shown, and the one that it wants."""

    url: str
    shown: list[str | None] = field(default_factory=list)
    wants: str | None = None


class TestServer:
    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
        """It counts as vLLM does, 2 accepted of 3 drafts a step."""
        monkeypatch.delenv(KEY, raising=False)
        counts, stub = {"steps": 5}, Stub("")

        class Handler(BaseHTTPRequestHandler):
            def answer(self, text: str, status: int = 200, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def welcome(self) -> bool:
                stub.shown.append(self.headers["Authorization"])
                if stub.wants is None or stub.shown[-1] == stub.wants:
                    return True
                self.answer(f"{stub.shown[-1]} is no key", 401)
                return False

            def do_GET(self) -> None:
                if self.path == "/moved":
                    self.answer("", 302, Location=f"{stub.url}/metrics")
                if self.path == "/moved" or not self.welcome():
                    return
                if self.path == "/v1/models":
                    self.answer(json.dumps({"data": [{"id": "stub"}]}))
                    return
                n = counts["steps"]
                lines = [
                    "# TYPE vllm:spec_decode_num_drafts counter",
                    f'vllm:spec_decode_num_drafts_total{{model_name="stub"}} {n}.0',
                    f'vllm:spec_decode_num_draft_tokens_total{{model_name="stub"}} {3 * n}.0',
                    f'vllm:spec_decode_num_accepted_tokens_total{{model_name="stub"}} {2 * n}.0',
                    *(
                        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {hits * n}'
                        for k, hits in enumerate((1, 1, 0))
                    ),
                ]
                self.answer("\n".join(lines))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self.welcome():
                    return
                assert all(isinstance(token, int) for token in body["prompt"])
                counts["steps"] += 4
                choice = {"text": "yes", "finish_reason": "stop"}
                self.answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": 12}}))

            def log_message(self, *arguments: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stub.url = f"http://127.0.0.1:{http.server_address[1]}"
        yield stub
        http.shutdown()
        thread.join()
        http.server_close()

    def test_a_servers_own_counters_give_its_acceptance(
        self, trained: Callable[..., Path], server: Stub, capsys: pytest.CaptureFixture
    ) -> None:
        file = trained()
        assert exit_code(["eval", str(file), "--server", server.url]) == 0
        (path,) = (file.parent / "runs" / "evaluated" / "eval").glob("server-*/talk.json")
        body = json.loads(path.read_text())
        assert body["model"] == "stub"
        assert body["tokens"] == 48  # four turns
        assert body["served"]["acceptance"] == 3.0
        assert body["served"]["drafts"] == 16
        assert body["served"]["per_slot"] == [1.0, 1.0, 0.0]
        assert "acceptance length 3.00" in capsys.readouterr().err
        assert set(server.shown) == {None}, "no key was set"

    def test_the_environments_key_goes_to_the_server_and_nowhere_else(
        self, trained: Callable[..., Path], server: Stub, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, server.wants = trained(), "Bearer sk-aSecret"
        monkeypatch.setenv(KEY, " sk-aSecret\n")
        assert exit_code(["eval", str(file), "--server", server.url]) == 0
        assert set(server.shown) == {server.wants}
        assert f"with the key in {KEY}" in capsys.readouterr().err
        files = [path for path in (file.parent / "runs" / "evaluated").rglob("*") if path.suffix in (".json", ".log")]
        assert len(files) > 4
        assert not any("sk-aSecret" in path.read_text() for path in files)

    @pytest.mark.parametrize(
        ("key", "says"),
        [
            ("sk-other", f"HTTP 401: Bearer [{KEY}] is no key; set {KEY} to a key that this server takes"),
            ("", f"HTTP 401: None is no key; set {KEY} to a key"),
            ("sk-\nother", f"{KEY} holds characters that no key has"),
        ],
    )
    def test_a_wrong_key_is_told_by_the_name_of_its_variable(
        self,
        trained: Callable[..., Path],
        server: Stub,
        capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        key: str,
        says: str,
    ) -> None:
        server.wants = "Bearer sk-aSecret"
        monkeypatch.setenv(KEY, key)
        assert exit_code(["eval", str(trained()), "--server", server.url]) == 2
        said = capsys.readouterr().err
        assert says in said.splitlines()[-1]
        assert "sk-" not in said

    def test_a_key_does_not_follow_where_a_server_sends_us(self, server: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(KEY, "sk-aSecret")
        connection = MeasuredServer(Server(url=server.url))
        assert connection.request(f"{server.url}/moved", read=bytes.decode)
        assert server.shown == ["Bearer sk-aSecret", None]

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("http://user:aSecret@127.0.0.1:9/v1", f"give keys by environment variables ({KEY}, AWS_*)"),
            ("localhost:8000", "needs http:// or https:// and a host, for example `http://localhost:8000/v1`"),
            ("http://localhost:http/v1", "(got 'http://localhost:http/v1')"),
        ],
    )
    def test_an_address_that_cannot_be_asked_is_refused_at_once_and_tells_no_secret(
        self, trained: Callable[..., Path], capsys: pytest.CaptureFixture, url: str, says: str
    ) -> None:
        file = trained()
        assert exit_code(["eval", str(file), "--server", url]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: --server: ")
        assert says in line
        assert "aSecret" not in line
        assert not (file.parent / "runs" / "evaluated" / "logs").exists()

    def test_a_server_that_is_not_there_is_one_clear_line(
        self, trained: Callable[..., Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.server.FIRST_PAUSE", 0.0)
        assert exit_code(["eval", str(trained()), "--server", "http://127.0.0.1:9", "--model", "m"]) == 1
        assert "Connection refused); is the server up?" in capsys.readouterr().err

    def test_a_server_that_says_nothing_is_given_up_soon(
        self, trained: Callable[..., Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.server.FIRST_PAUSE", 0.0)
        monkeypatch.setattr("pipeline.server.FIRST_TIMEOUT", 0.02)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            assert exit_code(["eval", str(trained()), "--server", url]) == 1
        assert "/v1/models: no answer in 6 attempts (timed out); is the server up?" in capsys.readouterr().err

    def test_sglangs_gauge_is_read_and_named(self) -> None:
        after = Metrics.parse('sglang:spec_accept_length{tp_rank="0"} 2.5\n')
        assert after.since(Metrics())["acceptance"] == 2.5
        assert Metrics.parse("nothing here\n").since(Metrics()) == {}

    def test_ranks_of_sglang_are_averaged_and_idle_ones_left_out(self) -> None:
        ranks = enumerate((3.0, 2.0, 0.0))
        text = "".join(f'sglang:spec_accept_length{{dp_rank="{rank}"}} {length}\n' for rank, length in ranks)
        measured = Metrics.parse(text).since(Metrics())
        assert measured["acceptance"] == 2.5
        assert "2 ranks" in measured["source"]

    @pytest.mark.parametrize("late", [True, False])
    def test_a_stop_ends_the_asking(self, server: Stub, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
        monkeypatch.delenv(KEY, raising=False)
        client, prompts = (
            MeasuredServer(Server(url=server.url, concurrency=1)),
            [Prompt(str(i), [i]) for i in range(99)],
        )
        begun = len(server.shown)

        def stop() -> None:
            raise Stopped("at once")

        ways = ((lambda: None), stop) if late else (stop, (lambda: None))
        with pytest.raises(Stopped):
            client.run(prompts, 4, Sampling(), *ways)
        assert len(server.shown) - begun < 20

    def test_metrics_are_asked_for_with_patience_after_the_prompts(
        self, server: Stub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = MeasuredServer(Server(url=server.url))
        client.run([Prompt("a", [1])], 4, Sampling(), lambda: None, lambda: None)
        assert not client.stopping.is_set()

    def test_a_signal_is_heard_while_the_server_says_nothing(
        self, server: Stub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, silent, looks = MeasuredServer(Server(url=server.url)), threading.Event(), iter(range(3))
        monkeypatch.setattr(client, "complete", lambda *_: silent.wait(60))

        def stop() -> None:
            if next(looks) == 2:
                raise Stopped("at once")

        began = time.monotonic()
        with pytest.raises(Stopped):
            client.run([Prompt("a", [1])], 4, Sampling(), stop, lambda: None)
        assert time.monotonic() - began < 10
        silent.set()

    @pytest.mark.parametrize("option", ["--checkpoint", "--drafter-path", "--block-size"])
    def test_what_a_server_cannot_be_told_is_refused(
        self, trained: Callable[..., Path], capsys: pytest.CaptureFixture, option: str
    ) -> None:
        assert exit_code(["eval", str(trained()), "--server", "http://127.0.0.1:9", option, "3"]) == 2
        assert f"error: {option}: the server" in capsys.readouterr().err


def test_messages_without_a_last_answer_are_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    path.write_text(json.dumps({"messages": talk}) + "\n\n" + json.dumps({"turns": ["x", "y"]}) + "\n")
    first, second = load_benchmark("b", Benchmark(path=str(path)))
    assert (first.id, [m["role"] for m in first.turns[0]]) == ("b-0", ["system", "user"])
    assert (second.id, len(second.turns)) == ("b-2", 2)
    assert len(load_benchmark("b", Benchmark(path=str(path), limit=1))) == 1


SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
ANSWER, MORE = {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}
FUNCTION = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
CALL, RESULT = {"role": "assistant", "content": "", "tool_calls": [FUNCTION]}, {"role": "tool", "content": "r"}
SHAREGPT = [{"from": who, "value": text} for who, text in (("human", "u"), ("gpt", "a"), ("human", "v"), ("gpt", "b"))]
ASKED = [
    ({"turns": ["u", "v"]}, [[USER], [MORE]]),
    ({"turns": ["u"], "messages": [MORE], "input_ids": [1]}, [[USER]]),
    ({"turns": ["u", "v"], "system": "s"}, [[SYSTEM, USER], [MORE]]),
    ({"turns": [USER, ANSWER, MORE]}, [[USER, ANSWER, MORE]]),
    ({"messages": [SYSTEM, USER, ANSWER, MORE, ANSWER]}, [[SYSTEM, USER, ANSWER, MORE]]),
    ({"messages": [USER, MORE], "turns": 2, "input_ids": [1]}, [[USER, MORE]]),
    ({"conversations": SHAREGPT}, [[USER, ANSWER, MORE]]),
    ({"conversations": [{"from": "system", "value": "s"}, *SHAREGPT[:1]]}, [[SYSTEM, USER]]),
    ({"instruction": "u", "input": "", "output": "b"}, [[USER]]),
    ({"instruction": "v", "history": [["u", "a"]], "output": "b", "system": "s"}, [[SYSTEM, USER, ANSWER, MORE]]),
    ({"question": "u", "answer": "b"}, [[USER]]),
    ({"prompt": [USER, ANSWER, MORE], "completion": "b"}, [[USER, ANSWER, MORE]]),
    ({"prompt": [USER, ANSWER, MORE], "completion": [CALL, RESULT, ANSWER]}, [[USER, ANSWER, MORE]]),
    ({"messages": [USER, CALL, RESULT]}, [[USER, CALL, RESULT]]),
]
EMPTY = {"role": "assistant", "content": ""}
PLACEHOLDERS = [
    {"messages": [USER, EMPTY]},
    {"messages": [USER, {"role": "assistant", "content": None}]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "image", "image": "x"}]}]},
    {"messages": [USER, CALL, {**RESULT, "content": " "}, {"role": "tool", "content": None}]},
    {"messages": [USER, ANSWER], "response_ids": ["not", "ids"]},
    {"messages": json.dumps([USER, EMPTY])},
    {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": ""}]},
    {"conversations": [{"from": "human", "value": "u"}, {"from": "function_call", "value": ""}]},
    {"turns": ["u", EMPTY]},
    {"instruction": "u", "output": ""},
    {"instruction": "u", "output": {"text": "b"}},
    {"question": "u", "answer": ""},
    {"question": "u", "answer": 4},
    {"question": "u", "answer": ["4"]},
    {"problem": "u", "solution": [{"role": "assistant", "content": ""}], "output": 4.5},
    {"prompt": [USER, EMPTY]},
]


def asked_in(path: Path, **settings: Any) -> list[tuple[str, list[list[dict[str, Any]]]]]:
    prompts = load_benchmark("b", Benchmark(path=str(path), **settings))
    return [(prompt.id, [list(turn) for turn in prompt.turns]) for prompt in prompts]


@pytest.mark.parametrize(("row", "turns"), ASKED)
def test_a_prompt_is_read_from_any_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], turns: list[Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row) + "\r\n" + json.dumps({"id": 7} | row) + "\n")
    assert asked_in(path) == [("b-1", turns), ("7", turns)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"id": 7} | row])
    (prompt,) = load_benchmark("b", Benchmark(hub="some/set"))
    assert (prompt.id, [list(turn) for turn in prompt.turns]) == ("b-0", turns)


@pytest.mark.parametrize("row", PLACEHOLDERS)
def test_an_answer_that_is_left_out_may_be_anything(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert asked_in(path) == [("b-0", [[USER]])]


def test_tools_stand_before_what_is_asked(tmp_path: Path, tiny_run: Run, tiny_target: Target) -> None:
    call = {"function": {"name": "look_up", "arguments": {"word": "u"}}}
    talk = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        ANSWER,
    ]
    rows = [{"messages": talk, "tools": [{"name": "look_up"}]}, {"turns": ["u", "v"], "tools": [{"name": "count"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.name }};{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}(){% endfor %};"
        "{% endfor %}"
    )
    conversations = Conversations(tiny_run, tokenizer, load_benchmark("b", Benchmark(path=str(path))))
    first, second = (tokenizer.decode(prompt.ids) for prompt in conversations.ask(0)[0])
    assert (first, second) == ("look_up;u;look_up();r;", "count;u;")
    conversations.reply("b-1", "a")
    assert tokenizer.decode(conversations.ask(1)[0][0].ids) == "count;u;a;v;"


def test_prompts_lie_in_any_file_that_training_reads(tmp_path: Path) -> None:
    rows = [{"id": None, "conversations": SHAREGPT}, {"id": "own", "conversations": SHAREGPT}]
    wanted = [("b-0", [[USER, ANSWER, MORE]]), ("own", [[USER, ANSWER, MORE]])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "1.jsonl").write_text(lines)
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(lines.replace("own", "other").encode()))
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    for path in (folder / "1.jsonl", tmp_path / "rows.json", tmp_path / "rows.parquet", tmp_path / "saved"):
        assert asked_in(path) == wanted
    assert [id for id, _ in asked_in(folder / "2.jsonl.gz")] == ["b-0", "other"]
    assert [id for id, _ in asked_in(folder)] == ["b-0", "own", "b-2", "other"]
    assert asked_in(folder, limit=1) == wanted[:1]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"turns": ["u"]}\n{"turns": ["v"]}\n' + os.urandom(4 << 20))
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert asked_in(tmp_path / "rows.jsonl.gz", limit=2) == [("b-0", [[USER]]), ("b-1", [[MORE]])]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "u"}, "no prompt that the target could answer (text or token ids ask no question)"),
        ({"input_ids": [1, 2]}, "no prompt that the target could answer (text or token ids ask no question)"),
        ({"title": "u"}, "none of the known fields is there (fields: title)"),
        ({"turns": []}, "no messages"),
        ({"conversations": SHAREGPT[1:]}, "the assistant speaks before any user (first: assistant)"),
        ([1], "the row is not an object with fields (found list)"),
        (
            {"question": 4, "answer": 4},
            "the fields of the row's format are not there, or have the wrong types (expected a list, found int)",
        ),
        (
            {"messages": [USER, CALL, RESULT, {"role": "tool", "content": ""}]},
            "a user turn or tool result with nothing in it (tool)",
        ),
        (
            {"turns": [USER, RESULT, MORE]},
            "a message that no question takes in (message 2 of 3, of role tool; each "
            "question ends with the user's text)",
        ),
        (
            {"turns": ["u", SYSTEM]},
            "a message that no question takes in (message 2 of 2, of role system; each question "
            "ends with the user's text)",
        ),
    ],
)
def test_a_row_that_asks_nothing_is_named_with_a_remedy(tmp_path: Path, row: Any, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"turns": ["u"]}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(BadInput) as refused:
        load_benchmark("b", Benchmark(path=str(path)))
    assert str(refused.value) == (
        f"benchmark `b`: {path}, line 3: {why}; correct the row or take it out: a prompt needs one of messages, "
        "conversations, turns, instruction, prompt (and response)"
    )
    pq.write_table(pa.table({"text": ["u"]}), tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match=r"benchmark `b`: .*rows\.parquet, row 1: no prompt"):
        load_benchmark("b", Benchmark(path=str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize(
    ("name", "why"), [("none.jsonl", "does not exist: correct the path"), ("rows.xml", "unknown kind of file")]
)
def test_a_file_that_cannot_be_read_names_its_benchmark(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "rows.xml").write_text("<a/>")
    with pytest.raises(BadInput, match=f"benchmark `b`: .*{name}.* ?{why}"):
        load_benchmark("b", Benchmark(path=str(tmp_path / name)))


def test_presets_name_what_is_missing_where_the_hub_is_out_of_reach() -> None:
    assert set(PRESETS) >= {
        "gsm8k",
        "math500",
        "humaneval",
        "mbpp",
        "mt-bench",
        "alpaca",
        "livecodebench",
        "arena-hard",
    }
    with pytest.raises(BadInput, match=r"openai/gsm8k main, split test cannot be loaded .* give `path:`"):
        load_benchmark("g", Benchmark(preset="gsm8k"))
    with pytest.raises(BadInput, match="no preset `gsm9k`; there are: gsm8k"):
        load_benchmark("g", Benchmark(preset="gsm9k"))


def test_presets_word_prompts_as_others_do() -> None:
    assert PRESETS["gsm8k"].turns({"question": "Q?"}) == [
        "Q?\nPlease reason step by step, and put your final answer within \\boxed{}."
    ]
    assert PRESETS["humaneval"].turns({"prompt": "def f():"})[0].endswith("passes the tests:\n```python\ndef f():\n```")
    assert PRESETS["alpaca"].turns({"instruction": "Do.", "input": "x"}) == ["Do.\n\nInput:\nx"]
    assert PRESETS["mt-bench"].turns({"prompt": ["a", "b"]}) == ["a", "b"]
