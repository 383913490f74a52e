"""The report page: from everything, from nothing, and from what lies between."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from data.accounting import Accounting
from data.layout import Layout
from data.manifest import publish, write_json
from data.settings import Data, Run, load_run
from pipeline.report import gather, metrics_lines, out_of_date
from stages.report import command
from tests.benchmarks import reference
from tests.finished import finish
from tests.flow import ROOT
from tests.report_samples import (
    DRAFTERS,
    sample_run,
    write_data,
    write_evaluation,
    write_everything,
    write_training,
)

VOID = {"meta", "br", "hr", "path", "use", "rect", "circle", "image", "stop"}


class Page(HTMLParser):
    """Open tags that were never closed, what the page would fetch, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in VOID else [tag]
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(run: Run, folder: Path, *options: str) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
    done = CliRunner().invoke(command, [str(path), *options], catch_exceptions=False)
    assert done.exit_code == 0
    page = Path(options[1]) if options else Layout.of(run).report
    return page.read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    root = tmp_path_factory.mktemp("report")
    run = write_everything(root)
    return run, report(run, root)


def test_the_page_is_whole_and_fetches_nothing(finished: tuple[Run, str]) -> None:
    page = Page(finished[1])
    assert page.open == []
    assert page.fetched == []
    assert "url(http" not in finished[1]
    assert "<script" not in finished[1]


def test_every_section_stands_there_with_its_pictures(finished: tuple[Run, str]) -> None:
    run, html = finished
    assert re.findall(r'<h2 id="(\w+)"', html) == [
        "stale",  # these manifests are samples, no run's
        "acceptance", "slots", "context", "training", "speed", "time", "data", "examples", "settings", "missing"
    ]  # fmt: skip
    assert html.count("<svg") == 5 + 3 * len(DRAFTERS)
    assert {path.stem for path in Layout.of(run).pictures.iterdir()} == {
        "acceptance", "curves", "throughput", "times", "codecs",
        *(f"{kind}-{name}" for kind in ("slots", "histogram", "context") for name in DRAFTERS),
    }  # fmt: skip


def test_pictures_follow_the_page_and_files_stand_alone(finished: tuple[Run, str]) -> None:
    run, html = finished
    assert "var(--s1)" in html
    assert not re.search(r"#(0[1-4]){3}\b", html)  # no stand-in colour is left
    alone = (Layout.of(run).pictures / "acceptance.svg").read_text()
    assert "var(--" not in alone
    assert not re.search(r"#(0[1-4]){3}\b", alone)


def test_every_kind_of_picture_has_a_caption_in_snakemakes_report(finished: tuple[Run, str]) -> None:
    text = (ROOT / "stages" / "captions" / "pictures.rst").read_text()
    kinds = {path.stem.partition("-")[0] for path in Layout.of(finished[0]).pictures.iterdir()}
    assert set(re.findall(r'^    "(\w+)": ', text, re.MULTILINE)) == kinds


def test_pictures_of_what_is_gone_are_gone(tmp_path: Path) -> None:
    run = write_everything(tmp_path)
    Layout.of(run).pictures.mkdir(parents=True)
    (Layout.of(run).pictures / "slots-renamed.svg").write_text("<svg/>")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "mine.svg").write_text("<svg/>")
    report(run, tmp_path, "--to", str(tmp_path / "page.html"))
    assert (tmp_path / "pictures" / "curves.svg").exists()
    assert (tmp_path / "pictures" / "mine.svg").exists(), "a folder that is not the run's keeps what it has"
    report(run, tmp_path)
    assert "slots-renamed" not in {path.stem for path in Layout.of(run).pictures.iterdir()}


def test_text_of_answers_is_text_never_markup(finished: tuple[Run, str]) -> None:
    assert "&lt;b&gt;72&lt;/b&gt; &amp; nothing" in finished[1]
    assert "<b>72</b>" not in finished[1]


def test_numbers_are_those_of_the_files(finished: tuple[Run, str]) -> None:
    run, html = finished
    body = json.loads((Layout.of(run).eval("base") / "gsm8k.json").read_text())
    text = Page(html).text
    assert f"{body['pooled']['value']:.2f} {body['pooled']['low']:.2f} to {body['pooled']['high']:.2f}" in text
    assert "6.2 GiB" in text
    assert re.search(r"base1400140.*45 ms8\d,\d{3}31022.2 GiB7,323 / 150", text)
    assert "756/768" in text


def test_what_became_of_the_rows_stands_on_the_page(finished: tuple[Run, str]) -> None:
    text = Page(finished[1]).text
    for line in (
        "rows read7,473",
        "kept7,472",
        "dropped: too few supervised1",
        "noted: end of turn added3,100",
        "repeats: same prompt5",
        "not compared with rows of messages: token ids40",
        "asked by benchmark gsm8k too (row-7, row-<9>, ...)2",
        "asked by benchmark humaneval too0",
        "256 to 511 tokens6,272",
    ):
        assert line in text, line


def test_acceptance_by_context_and_what_lies_past_training_stand_on_the_page(finished: tuple[Run, str]) -> None:
    run, html = finished
    body = json.loads((Layout.of(run).eval("dpace") / "mt-bench.json").read_text())
    found = [f"{bucket['pooled']:.2f} {bucket['blocks']:,}" for bucket in body["by_context"][:2]]
    text = Page(html).text
    assert "benchmarkdrafter0 to 255256 to 511512 to 1,023" in text
    assert f"mt-benchdpace{found[0]}{found[1]}-" in text
    assert "trained up toprompts past itanswersblocks" in text
    assert "mt-benchdpace4480.0 %12.5 %4.2 %" in text


def test_drafters_of_unknown_training_claim_nothing_of_their_trained_length(tmp_path: Path) -> None:
    run = sample_run(tmp_path)
    write_evaluation(run, "path-z-lab--other")
    text = Page(report(run, tmp_path)).text
    assert "0 to 255" in text
    assert "trained up to" not in text


def test_the_on_policy_share_is_pooled_over_the_tokens_of_all_parts(finished: tuple[Run, str]) -> None:
    text = Page(finished[1]).text
    assert "97.0 % of the supervised tokens" in text
    assert "of 3,000 tokens of 64 rows" in text
    assert "data.responses: regenerate lets it answer itself" in text


@pytest.mark.parametrize(
    ("temperature", "rest"),
    [
        (0.0, "The rest teaches drafts that it will not accept."),
        (0.7, "The rest it drew itself, at temperature 0.7: drafts that it accepts where it is sampled so"),
    ],
)
def test_what_the_target_drew_itself_is_not_called_what_it_will_not_accept(
    tmp_path: Path, temperature: float, rest: str
) -> None:
    answered = {"responses": "regenerate", "regenerate": {"temperature": temperature}}
    run = write_everything(tmp_path).model_copy(update={"data": Data(train=[{"path": "x"}], **answered)})
    for part in (0, 1):
        publish(Layout.of(run).tokens(part), "tokens", Accounting().body())
    assert rest in Page(report(run, tmp_path)).text


def test_rows_dropped_after_answering_are_on_the_account_too(tmp_path: Path) -> None:
    run = write_everything(tmp_path).model_copy(update={"data": Data(train=[{"path": "x"}], responses="regenerate")})
    layout = Layout.of(run)
    for part, kept in ((0, 3736), (1, 3733)):
        answers = Accounting(rows_in=3736, kept=kept, token_rows=kept, lengths=Counter({7: kept}))
        answers.dropped["unfinished"] = 3736 - kept
        publish(layout.tokens(part), "tokens", answers.body())
    account = gather(run).account
    assert account["counts"]["kept"] == 7469
    assert account["dropped"] == {"too_few_supervised": 1, "unfinished": 3}
    assert account["counts"]["rows_in"] == account["counts"]["kept"] + sum(account["dropped"].values())
    assert account["lengths"] == [[128, 7469]]


def test_several_answers_a_prompt_stand_on_the_account_beside_the_rows_read(tmp_path: Path) -> None:
    sampled = {"responses": "regenerate", "regenerate": {"answers": 2, "temperature": 1.0}}
    run = write_everything(tmp_path).model_copy(update={"data": Data(train=[{"path": "x"}], **sampled)})
    for part in (0, 1):
        answers = Accounting(rows_in=7472, kept=7470, token_rows=7470)
        answers.dropped["unfinished"] = 2
        publish(Layout.of(run).tokens(part), "tokens", answers.body())
    text = Page(report(run, tmp_path)).text
    for line in ("rows read7,473", "answers asked for, several a prompt14,944", "kept14,940", "dropped: unfinished4"):
        assert line in text, line


def test_the_same_files_give_the_same_page(finished: tuple[Run, str], tmp_path: Path) -> None:
    again = report(finished[0], tmp_path)
    assert again == finished[1]


def test_a_run_that_has_nothing_yet_says_what_is_missing(tmp_path: Path) -> None:
    text = Page(report(sample_run(tmp_path), tmp_path)).text
    for name in ("prompts/part-0000.json", "cache/part-0000.json", "drafters/base/train.json", "metrics.jsonl"):
        assert name in text
    assert "Settings and fingerprints" in text


@pytest.mark.parametrize("parts", [("training",), ("evaluation",), ("data",), ("training", "data")])
def test_any_part_of_a_run_makes_a_page(tmp_path: Path, parts: tuple[str, ...]) -> None:
    run = sample_run(tmp_path)
    if "data" in parts:
        write_data(run)
    for drafter in DRAFTERS if "training" in parts else ():
        write_training(run, drafter, steps=20)
    if "evaluation" in parts:
        write_evaluation(run, "base")
        write_evaluation(run, "path-z-lab--other")
    html = report(run, tmp_path)
    assert ('id="training"' in html) == ("training" in parts)
    assert ('id="acceptance"' in html) == ("evaluation" in parts)
    assert ("path-z-lab--other" in html) == ("evaluation" in parts)
    assert ('id="time"' in html) == ("data" in parts)


def test_what_a_server_said_stands_there(tmp_path: Path) -> None:
    run = sample_run(tmp_path)
    body = {"benchmark": "gsm8k", "server": "http://box:8000/v1", "model": "target", "concurrency": 8}
    body |= {"tokens_per_s": 1234.5, "served": {"acceptance": 4.321, "source": "vllm:spec_decode"}}
    write_json(Layout.of(run).eval("server-box-8000") / "gsm8k.json", body)
    text = Page(report(run, tmp_path)).text
    assert "target at http://box:8000/v1" in text
    assert "4.32" in text


def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_everything(tmp_path)
    (Layout.of(run).eval("base") / "gsm8k.json").write_text("{")
    Layout.of(run).train_manifest("dpace").write_text("{}")
    story = gather(run)
    assert any("gsm8k.json" in line for line in story.missing)
    assert any("dpace/train.json" in line for line in story.missing)
    assert [len(drafter.evaluations) for drafter in story.drafters] == [2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 2, "validation": {"acceptance": 1.5}', b"\xff\0}"])
def test_a_line_torn_at_any_byte_is_left_out(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + torn)
    assert list(metrics_lines(tmp_path / "metrics.jsonl")) == [{"step": 1, "loss": 2.0}]


def test_what_older_runs_did_not_count_is_a_gap(tmp_path: Path) -> None:
    run = sample_run(tmp_path)
    for drafter in DRAFTERS:
        write_training(run, drafter, steps=20)
        path = Layout.of(run).metrics(drafter)
        path.write_text(path.read_text().replace("context_tokens_per_s", "tokens_per_s"))
    assert "45 ms-31022.2 GiB" in Page(report(run, tmp_path)).text


def test_a_run_without_benchmarks_and_with_odd_slots_is_drawn(tmp_path: Path) -> None:
    run = write_everything(tmp_path)
    path = Layout.of(run).eval("base") / "gsm8k.json"
    body = json.loads(path.read_text())
    nothing = {"value": None, "low": None, "high": None}
    body |= {"per_slot": [None] * 15, "histogram": [0] * 17, "pooled": nothing, "per_response": nothing}
    body |= {"examples": [], "lossless": None, "blocks": 0, "validation": None}
    path.write_text(json.dumps(body))
    assert Page(report(run, tmp_path)).open == []


def test_the_reference_table_pairs_every_record_with_the_first(tmp_path: Path) -> None:
    run = write_everything(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
    for drafter, gain in (("base", 0), ("dpace", 30)):
        record = Layout.of(run).eval(drafter) / "gsm8k.json"
        body = json.loads(record.read_text())
        body["by_prompt"] = [[f"p{i}", 300 + gain, 100] for i in range(40)]
        write_json(record, body)
    rows = reference.of_runs([path], 32)
    assert [row["drafter"] for row in rows] == ["base", "dpace"]
    assert [row["first"]["acceptance"] for row in rows] == pytest.approx([3.0, 3.3])
    assert list(rows[1]["compared"].values()) == pytest.approx([1.1, 1.1, 1.1])
    other = reference.of_runs([path, path], 32)[2:]
    assert [list(row["compared"].values()) for row in other] == [[1.0, 1.0, 1.0]] * 2  # each with its own namesake


def test_a_codec_study_changes_name_and_codec_only(tmp_path: Path) -> None:
    run = sample_run(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
    made = [load_run(one) for one in reference.of_codecs(path, ["bf16", "klt5"])]
    assert [(one.name, one.extract.codec) for one in made] == [
        (f"{run.name}-bf16", "bf16"),
        (f"{run.name}-klt5", "klt5"),
    ]
    same = {"name": run.name, "extract": run.extract}
    assert all(one.model_copy(update=same) == run for one in made)


def test_what_is_out_of_date_is_told(tmp_path: Path) -> None:
    run = sample_run(tmp_path)
    finish(run)
    assert list(out_of_date(run)) == []
    changed = run.model_copy(update={"train": run.train.model_copy(update={"learning_rate": 1e-5})})
    first = next(out_of_date(changed))
    assert first.startswith("train: ")
    assert "learning_rate" in first
