"""Benchmarks run from end to end at their smallest: what they import moves, and nobody would see them break."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import extract, loss, reading, step


def run(main: object, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    main()  # type: ignore[operator]


def test_extraction_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(extract.main, monkeypatch, "--shape", "tiny", "--rows", "4", "--lengths", "20", "60", "--root", str(tmp_path))
    cells = capsys.readouterr().out.splitlines()[-1].split("|")
    assert cells[1:3] == [" tiny ", " fp8 "]
    assert float(cells[4].replace(",", "")) > 0


def test_a_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "step.json"
    run(step.main, monkeypatch, "--shape", "tiny", "--modes", "eager", "--steps", "1", "--json", str(out))
    (row,) = json.loads(out.read_text())
    assert row["who"] == "draftmill eager"
    assert row["ms"] > 0


def test_the_loss_is_measured_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    case = loss.make_case(loss.SHAPES["tiny"], "cpu")
    monkeypatch.setattr(loss, "compiler", lambda mode: lambda function: function)
    measured = loss.contend(loss.ours, case, True, "cpu")
    assert measured["ms"] > 0
    assert measured["loss_error"] < 1e-5
    assert measured["gradient_error"] < 1e-5


def test_reading_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "opening", lambda root: 0.0)  # 100,000 rows take their time
    run(reading.main, monkeypatch, "--folder", str(tmp_path), "--rows", "2", "--reads", "2", "--width", "64")
    assert capsys.readouterr().out.count(" GB/s") == 6
