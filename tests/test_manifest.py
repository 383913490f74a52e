"""Manifests: whole or absent, never leading out of the run, and the difference between forced and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.errors import BadInput
from data.manifest import (
    SINCE,
    State,
    crc32c,
    file_record,
    fingerprint,
    inside,
    publish,
    read_manifest,
    require_equal,
    write_bytes,
)
from data.settings import FORMAT

ROOT = Path(__file__).resolve().parents[1]


def test_a_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint({})) == 32


def test_crc32c_is_castagnolis(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123456789")
    assert crc32c(tmp_path / "a") == 0xE3069283
    assert file_record(tmp_path / "a", tmp_path) == {"path": "a", "bytes": 9, "crc32c": 0xE3069283}


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    publish(tmp_path / "new" / "m.json", "cache", {"fingerprint": "f"})
    assert read_manifest(tmp_path / "new" / "m.json", "cache") == {
        "format": FORMAT, "kind": "cache", "fingerprint": "f",
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "does not exist"),
        ("", "not readable as JSON"),
        ('{"format": 1', "not readable as JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"format": 99, "kind": "cache"}', "format is 99, this version needs 1; make it again"),
        ('{"format": 1, "kind": "tokens"}', "kind is 'tokens', this version needs 'cache'"),
        ("[" * 100000, "not readable as JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str | None, wanted: str) -> None:
    path = tmp_path / "m.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=wanted):
        read_manifest(path, "cache")


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("prompts", "run `draftmill prepare` first"),
        ("tokens", "run `draftmill prepare` (and `draftmill regenerate`, where the target answers) first"),
        ("head", "run `draftmill extract` first"),
        ("drafter", "run `draftmill train` first"),
    ],
)
def test_a_missing_manifest_names_the_command_that_makes_it(tmp_path: Path, kind: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=re.escape(remedy)):
        read_manifest(tmp_path / "m.json", kind)


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "a/../..", ".."])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(BadInput, match="lies outside"):
        inside(tmp_path / "run", path)


def test_a_link_cannot_lead_out_either(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    with pytest.raises(BadInput, match="lies outside"):
        inside(tmp_path / "run", "link/a")
    assert inside(tmp_path / "run", "b/c") == tmp_path / "run" / "b" / "c"


def test_a_difference_is_refused_with_both_values(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"made with layers = \[1, 8\], this run wants \[2\]: run extract again"):
        require_equal(tmp_path, {"layers": [1, 8]}, {"layers": [2]}, "run extract again")
    require_equal(tmp_path, {"layers": [2], "more": 1}, {"layers": [2]}, "")


def test_forced_is_told_from_resumed(tmp_path: Path) -> None:
    state, manifest = State(tmp_path / "state.json"), tmp_path / "m.json"
    assert not state.forced(manifest), "a fresh start"
    state.running(step=3)
    assert not state.forced(manifest), "interrupted"
    publish(manifest, "cache", {})
    assert not state.forced(manifest), "killed between manifest and state: whole, nothing to set aside"
    state.done(manifest)
    assert not state.forced(manifest), "finished"
    manifest.unlink()
    assert state.forced(manifest), "finished, then forced"


def test_the_kill_between_the_two_last_writes_loses_nothing(tmp_path: Path) -> None:
    """Manifest published, state still running: Snakemake deletes the manifest, the retry resumes all of the work."""
    state, manifest = State(tmp_path / "state.json"), tmp_path / "m.json"
    state.running()
    publish(manifest, "cache", {})
    manifest.unlink()
    assert state.read()["status"] == "running"
    assert not state.forced(manifest)


def test_what_was_done_since_snakemake_began_was_not_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orphan's work, or a job whose end Snakemake missed: it deletes the manifest, the next attempt needs it."""
    state, manifest = State(tmp_path / "state.json"), tmp_path / "m.json"
    publish(manifest, "cache", {"counts": 3})
    body = manifest.read_bytes()
    state.done(manifest)
    manifest.unlink()
    for began, recovered in ((None, False), (time.time() + 1, False), (time.time() - 60, True)):
        if began is not None:
            monkeypatch.setenv(SINCE, str(began))
        assert state.recover(manifest) is recovered
        assert manifest.exists() is recovered
    assert manifest.read_bytes() == body
    assert not state.recover(manifest), "there"
    manifest.unlink()
    state.running()
    assert not state.recover(manifest), "not finished"


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"a" * 100_000)
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path; from data.manifest import write_bytes\n"
        f"path = Path({str(path)!r})\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    for letter in (b'b', b'c'): write_bytes(path, letter * 100_000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(200):
        assert len(set(path.read_bytes())) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    body = path.read_bytes()
    assert len(body) == 100_000
    assert len(set(body)) == 1


def test_a_manifest_ends_with_a_line_end_and_sorted_keys(tmp_path: Path) -> None:
    publish(tmp_path / "m.json", "cache", {"b": 1, "a": "ü"})
    text = (tmp_path / "m.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert "ü" in text
