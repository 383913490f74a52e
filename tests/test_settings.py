"""The run file: what is refused, in which words, and what a drafter's overrides do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from data import settings
from data.errors import BadInput
from data.manifest import fingerprint
from data.part import cache_settings
from data.settings import Run, load_run
from data.shaping import shaping
from tests.flow import run_body

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = {"name": "r", "target": {"model": "tiny:0"}, "data": {"train": [{"path": "a.jsonl"}]}}


def write(folder: Path, body: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(body if isinstance(body, str) else yaml.safe_dump(body))
    return path


def changed(path: str, value: Any) -> dict[str, Any]:
    body = yaml.safe_load(yaml.safe_dump(SMALL))
    *sections, last = path.split(".")
    node = body
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value
    return body


REFUSED = [
    ("data.regenerate", {"answers": 2}, "`data.regenerate`: 2 answers a prompt need a temperature above 0"),
    ("data.regenerate", {"answers": 0, "temperature": 1}, "`data.regenerate.answers`: Input should be greater than 0"),
    (
        "data.regenerate",
        {"answers": 3, "temperature": 1},
        "`data`: regenerate.answers 3 with `responses: keep`, which asks for none: set `responses: regenerate`, or",
    ),
    ("data.regenerate", {"server": {"url": "localhost:8000"}}, "needs http:// or https:// and a host, for example"),
    ("train.learning_rat", 1, "unknown key `train.learning_rat`; did you mean `learning_rate`?"),
    ("extract.codek", "fp8", "unknown key `extract.codek`; did you mean `codec`?"),
    ("drafters.base", {"layer": 3}, "unknown key `drafters.base.layer`; did you mean `layers`?"),
    ("target.parallel", "layers", "unknown key `target.parallel`"),
    ("evall", {}, "unknown key `evall`; did you mean `eval`?"),
    ("train.epochs", "six", "`train.epochs`: Input should be a valid integer"),
    ("train.epochs", 0, "`train.epochs`: Input should be greater than 0 (got 0)"),
    ("extract.codec", "fp4", "`extract.codec`: Input should be"),
    ("extract.layers", [3, 1], "layer ids must ascend without repeats, got [3, 1]"),
    ("extract.layers", [3, 3], "layer ids must ascend without repeats"),
    ("drafters.base", {"block_size": 1}, "`drafters.base.block_size`"),
    ("drafters.base", {"train": {"epoch": 1}}, "drafters.base.train: unknown key `epoch`; did you mean `epochs`?"),
    ("extract.layers", [], "give at least one layer id"),
    ("drafters.base", {"gpus": 3}, "drafters.base: batches_per_step 8 does not divide by gpus 3"),
    ("drafters.base", {"taps": [4, 0]}, "`drafters.base.taps`: layer ids must ascend without repeats"),
    ("drafters.base", {"heads": 7, "kv_heads": 3}, "`drafters.base`: heads 7 do not divide by kv_heads 3"),
    ("drafters.base", {"full_layers": 2}, "full_layers 2 needs `sliding_window`: without one all layers are full"),
    ("drafters.base", {"full_layers": 9, "sliding_window": 64}, "full_layers 9 of 5 layers: at most 5"),
    (
        "drafters.base",
        {"rope_scaling": {"rope_type": "foo"}},
        "`rope_type` is 'foo', which is none of default, linear,",
    ),
    ("drafters.base", {"rope_scaling": {"type": "linear", "factor": 2}}, "`rope_type` is None, which is none of"),
    ("drafters.base", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "needs original_max_position_embeddings"),
    ("drafters.base", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "`factor` is '2', expected a number"),
    (
        "drafters.base",
        {"rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 1}},
        "`rope_type: linear` has no m",
    ),
    (
        "train.loss",
        {"kind": "kl"},
        "drafters.base: loss kind `kl` needs a teacher: set extract.extras to [last_hidden]",
    ),
    ("drafters.base", {"train": {"loss": {"kind": "tv"}}}, "loss kind `tv` needs a teacher"),
    ("jobs.nodes", 2, "drafters.base: gpus 1 does not divide by jobs.nodes 2"),
    ("drafters", {}, "`drafters`"),
    ("name", "../up", "`name`"),
    ("name", "", "`name`"),
    ("eval.benchmarks", {"b": {}}, "give exactly one of `path`, `preset` and `hub`"),
    ("eval.benchmarks", {"../b": {"path": "x"}}, "eval.benchmarks"),
    ("eval.benchmarks", {"state": {"path": "x"}}, "`eval.benchmarks`: `state.json` is a file of ours beside the resu"),
    ("eval.benchmarks", {"manifest": {"path": "x"}}, "is a file of ours beside the results: give `manifest` another"),
    ("drafters", {"a/b": {}}, "a name: letters, digits, `.`, `_` and `-`"),
    ("drafters", ["base"], "`drafters`: needs a mapping"),
    ("target", "tiny:3", "`target`: needs a mapping, `key: value` lines below it (got 'tiny:3')"),
    ("data.train", "rows.jsonl", "`data.train`: needs a list, for example `[{path: rows.jsonl}]`"),
    ("data.train", [], "`data.train`"),
    ("data.train", [{"path": "a", "hub": "b"}], "give exactly one of `path` and `hub`"),
    ("data.train", [{"path": "a", "revision": "main"}], "`revision` is of hub data sets; leave it out beside `path`"),
    ("data.validation", 1.5, "`data.validation`: Input should be less than 1, or needs a list, for example"),
    ("data.validation", "rows.jsonl", "or needs a list, for example `[{path: rows.jsonl}]` or `[1, 2]` (got 'rows."),
    ("data.validation", ["rows.jsonl"], "run.yaml: `data.validation.0`: needs a mapping, `key: value` lines below"),
    ("data.validation", [{"pth": "a"}], "run.yaml: unknown key `data.validation.0.pth`; did you mean `path`?"),
    ("extract.layers", 5, "`extract.layers`: Input should be 'auto', or needs a list, for example"),
]


@pytest.mark.parametrize(("path", "value", "text"), REFUSED, ids=[f"{r[0]}={r[1]}" for r in REFUSED])
def test_a_bad_run_file_is_refused_in_one_line_that_names_the_key(
    tmp_path: Path, path: str, value: Any, text: str
) -> None:
    with pytest.raises(BadInput) as caught:
        load_run(write(tmp_path, changed(path, value)))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "run.yaml"))
    assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.lr", "learning_rate"),
        ("train.wd", "weight_decay"),
        ("train.bs", "batches_per_step"),
        ("train.batch_size", "batches_per_step"),
        ("train.seq_len", "context_tokens"),
        ("train.num_train_epochs", "epochs"),
        ("train.warmup_ratio", "warmup"),
        ("train.lr_scheduler", "schedule"),
        ("train.gradient_accumulation_steps", "batches_per_step"),
        ("train.eval_every", "validate_every"),
        ("extract.bs", "tokens_per_batch"),
        ("eval.bs", "batch_size"),
        ("data.seq_len", "max_length"),
        ("data.max_seq_len", "max_length"),
        ("target.model_name", "model"),
        ("target.precision", "dtype"),
        ("evaluation", "eval"),
        ("dataset", "data"),
    ],
)
def test_what_other_programs_call_a_setting_leads_to_ours(tmp_path: Path, typed: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"unknown key `{typed}`; did you mean `{meant}`"):
        load_run(write(tmp_path, changed(typed, 1)))


@pytest.mark.parametrize("typed", ["train.dropout", "data.zz", "target.quantisation"])
def test_a_key_that_is_near_nothing_gets_the_whole_list(tmp_path: Path, typed: str) -> None:
    with pytest.raises(BadInput, match="valid keys here"):
        load_run(write(tmp_path, changed(typed, 1)))


SECTIONS = "name: r\ntarget: {model: tiny:0}\ndata: {train: [{path: a}]}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SECTIONS + "train: {epochs: 2}\neval: {}\ntrain: {seed: 1}\n", "line 6: `train` .* second time, after line 4"),
        (SECTIONS + "train:\n  epochs: 2\n  'epochs': 3\n", "line 6: `epochs` is given a second time, after line 5"),
        (SECTIONS + "drafters: {base: {layers: 1}, base: {layers: 2}}\n", "line 4: `base` is given a second time"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_lines(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=f"run.yaml: {words}"):
        load_run(write(tmp_path, text))


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    text = SECTIONS + "drafters:\n  base: &base {layers: 1, block_size: 4}\n  wide: {<<: *base, layers: 2}\n"
    run = load_run(write(tmp_path, text))
    assert [(drafter.layers, drafter.block_size) for drafter in run.drafters.values()] == [(1, 4), (2, 4)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "a run file is a mapping of sections, found NoneType"),
        ("- a\n- b\n", "found list"),
        ("name: [", "not a YAML file"),
        ("name: r", "is missing"),
        ("!!python/object/apply:os.system ['true']", "not a YAML file"),
        ("a: &a [*a]", "unknown key"),
    ],
)
def test_what_is_no_run_file_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(BadInput, match=wanted):
        load_run(write(tmp_path, text))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_run(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="Is a directory"):
        load_run(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(BadInput, match="not a YAML file"):
        load_run(tmp_path / "run.yaml")


def test_every_path_may_begin_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    body = changed("root", "~/runs")
    body["data"]["train"] = [{"path": "~/rows.jsonl"}]
    body |= {"train": {"warm_start": "~/drafter"}, "eval": {"benchmarks": {"b": {"path": "~/b.jsonl"}}}}
    run = load_run(write(tmp_path, body))
    found = (run.root, run.data.train[0].path, run.train.warm_start, run.eval.benchmarks["b"].path)
    assert found == tuple(f"/home/me/{name}" for name in ("runs", "rows.jsonl", "drafter", "b.jsonl"))


def test_a_run_is_frozen(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, SMALL))
    with pytest.raises(ValidationError):
        run.name = "other"
    with pytest.raises(ValidationError):
        run.train.epochs = 2


def test_taps_that_are_not_kept_are_refused_and_those_that_are_pass(tmp_path: Path) -> None:
    body = changed("extract.layers", [1, 4]) | {"drafters": {"base": {"taps": [0, 4]}}}
    with pytest.raises(BadInput, match=r"drafters\.base: taps \[0, 4\] are not all in extract\.layers \[1, 4\]"):
        load_run(write(tmp_path, body))
    body["drafters"]["base"] = {"taps": [4], "sliding_window": 64, "full_layers": 5, "heads": 6, "kv_heads": 3}
    assert load_run(write(tmp_path, body)).drafters["base"].taps == (4,)


def test_rows_must_be_left_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.validation"):
        load_run(write(tmp_path, changed("data.validation", 1.0)))


def test_a_drafters_overrides_go_over_train_key_by_key(tmp_path: Path) -> None:
    body = changed("train", {"epochs": 3, "loss": {"kind": "dpace", "alpha": 0.3}})
    body["drafters"] = {"base": {}, "other": {"train": {"loss": {"alpha": 0.7}}}}
    run = load_run(write(tmp_path, body))
    assert run.train_of("base").loss.alpha == 0.3
    other = run.train_of("other")
    assert (other.loss.kind, other.loss.alpha, other.epochs) == ("dpace", 0.7, 3)


def test_an_unknown_drafter_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no drafter `x` in this run; it has: base"):
        load_run(write(tmp_path, SMALL)).drafter("x")


def test_what_shapes_a_stage_does_not_depend_on_the_order_of_keys() -> None:
    one = Run.model_validate(SMALL | {"train": {"epochs": 2, "seed": 1}})
    two = Run.model_validate(SMALL | {"train": {"seed": 1, "epochs": 2}})
    assert shaping(one, "train", "base") == shaping(two, "train", "base")


def test_settings_that_do_not_shape_an_artefact_move_no_fingerprint() -> None:
    """What a run made by an earlier version says of its settings. Whoever changes this lets all of it be made again."""
    body = run_body(drafters={"wide": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}})
    body["data"]["train"].append({"hub": "a/b"})
    run = Run.model_validate(body)
    stages = ("prepare", "regenerate", "extract", "train", "eval", "export", "report")
    shaped = [cache_settings(run), *(shaping(run, stage, "wide") for stage in stages)]
    assert fingerprint(shaped) == "5f844419bf1714ff6bc7899613c93da4"


def test_muons_rate_shapes_muons_drafters_alone() -> None:
    def trained(**train: Any) -> str:
        return shaping(Run.model_validate(SMALL | {"train": train}), "train", "base")

    assert trained() == trained(muon_learning_rate=0.5)
    assert trained(optimizer="muon") == trained(optimizer="muon", muon_learning_rate=0.02)
    assert trained(optimizer="muon") != trained(optimizer="muon", muon_learning_rate=0.01)


def test_one_answer_a_prompt_is_no_setting_of_what_was_made_and_several_are() -> None:
    def answered(**settings: Any) -> Run:
        body = run_body()
        body["data"] |= {"responses": "regenerate", "regenerate": {"temperature": 1.0, **settings}}
        return Run.model_validate(body)

    one, named, three = answered(), answered(answers=1), answered(answers=3)
    assert "answers" not in one.data.regenerate.model_dump()
    assert "data.regenerate.answers" not in cache_settings(one)
    assert cache_settings(three) == {**cache_settings(one), "data.regenerate.answers": 3}
    assert shaping(one, "regenerate") == shaping(named, "regenerate") != shaping(three, "regenerate")
    assert shaping(one, "prepare") == shaping(three, "prepare")


def test_every_field_says_what_it_does() -> None:
    models = [
        value for value in vars(settings).values() if isinstance(value, type) and issubclass(value, settings.Section)
    ]
    assert len(models) > 10
    undocumented = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert undocumented == []
    assert all(issubclass(model, BaseModel) and model.model_config.get("frozen") for model in models)


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_load_and_name_themselves(path: Path) -> None:
    assert load_run(path).name == path.stem


def test_the_published_recipe_has_the_published_numbers() -> None:
    run = load_run(ROOT / "data" / "recipes" / "qwen3-8b.yaml")
    train, base = run.train_of("base"), run.drafter("base")
    assert (base.layers, base.block_size, run.data.max_length, train.anchors_per_row) == (5, 16, 3072, 512)
    assert (train.learning_rate, train.schedule, train.warmup, train.epochs) == (6e-4, "cosine", 0.04, 6)
    assert (train.loss.kind, train.loss.decay) == ("cross_entropy", 7)


def test_the_published_recipe_is_commented_line_by_line() -> None:
    lines = (ROOT / "data" / "recipes" / "qwen3-8b.yaml").read_text().splitlines()
    sections = {"target:", "data:", "extract:", "train:", "drafters:", "eval:"}
    bare = [line for line in lines if line.strip() and "#" not in line and line.strip() not in sections]
    assert [line for line in bare if not line.strip().endswith(":")] == []
