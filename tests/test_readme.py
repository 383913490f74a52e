"""The README is true where a test can tell: tables are their records, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import click

from stages import cli
from tests.benchmarks.readme import README, RECORDS, narrowed, written

TEXT = README.read_text()


def test_tables_are_what_their_records_say() -> None:
    assert written(TEXT) == TEXT
    assert set(re.findall(r"<!-- records: (\S+) -->", TEXT)) == {path.name for path in RECORDS.glob("*.json")}


def test_a_table_says_once_what_is_the_same_in_every_row_and_nothing_that_is_empty() -> None:
    table = "| run | codec | train s | walk |\n|---|---|---|---|\n| a | fp8 |  | 3.1 |\n| b | fp8 |  |  |"
    assert narrowed(table) == "In every row: codec fp8.\n\n| run | walk |\n|---|---|\n| a | 3.1 |\n| b |  |"


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    local = [link for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (README.parent / link).exists()] == []


def test_commands_exist() -> None:
    """Every `draftmill X` is a command, and every option beside it is one of its own; modules can be run."""
    context = click.Context(cli.group)
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", TEXT, re.M | re.S))
    found = re.findall(r"`draftmill ([a-z]+)([^`]*)`", TEXT) + re.findall(r"^draftmill ([a-z]+)([^#\n]*)", blocks, re.M)
    assert len(found) > 12
    for name, rest in found:
        command = cli.group.get_command(context, name)
        assert command is not None, name
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, (name, rest)
    for module in re.findall(r"python -m (tests\.[a-z.]+)", TEXT):
        assert importlib.util.find_spec(module) is not None, module


def test_the_layout_that_it_draws_is_the_layout() -> None:
    top = {path.name for path in Path(README.parent).iterdir() if not path.name.startswith(".")}
    assert top >= {"pyproject.toml", "README.md", "Snakefile", "pipeline", "stages", "data", "tests", "LICENSE"}
