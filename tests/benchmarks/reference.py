"""The reference run's tables: what drafters of one or several runs are worth, from the runs' own records.

    python -m tests.benchmarks.reference RUN.yaml [RUN.yaml ...] [--first 32] [--out FILE.json]
    python -m tests.benchmarks.reference RUN.yaml --codecs bf16 fp8 klt5

The first form runs nothing. One line a drafter, checkpoint and benchmark: the checkpoint's validation walk, pooled
acceptance length with its bootstrap interval, the same over the first prompts alone, and its ratio to what it is
compared with, with the interval of a paired bootstrap over all prompts: in the first run that is the run's first
drafter, in other runs the first run's drafter of the same name. A drafter that is trained and not yet evaluated has
its walk alone. `--codecs` first runs the whole path (Snakemake) once a codec, each from a copy of the run file under
the run's root; a path that fails is said and leaves its line out. `--out` keeps the lines as JSON, from which
`tests.benchmarks.readme` makes the README's table. Do not give `--codecs` a run file whose answers are regenerated
unless each codec shall regenerate them.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.layout import Layout
from data.manifest import read_manifest
from data.settings import Run, load_run
from pipeline.acceptance import compare, pooled

COLUMNS = (
    "run",
    "drafter",
    "checkpoint",
    "codec",
    "bytes a token",
    "extract s",
    "train s",
    "walked",
    "benchmark",
    "prompts",
    "acceptance, 95 %",
    "first prompts",
    "of the first, 95 % (paired)",
)


def of_codecs(path: Path, codecs: Sequence[str]) -> list[Path]:
    """One run file a codec, beside the run's artefacts; each differs from the given one in name and codec."""
    run, body = load_run(path), yaml.safe_load(path.read_text())
    paths = []
    for codec in codecs:
        name = f"{run.name}-{codec}"
        changed = {**body, "name": name, "extract": {**body.get("extract", {}), "codec": codec}}
        paths.append(Path(run.root) / f"{name}.yaml")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(yaml.safe_dump(changed, sort_keys=False))
    return paths


def follow(path: Path) -> bool:
    """The whole path of a run file; False when it failed."""
    command = [sys.executable, "-m", "snakemake", "--cores", "all", "--configfile", str(path)]
    return subprocess.run(command, check=False).returncode == 0


def rows_of(run: Run, first: int, bases: dict[tuple[str, str], Any]) -> Iterator[dict[str, Any]]:
    """A row for each record of the run. `bases` keeps the first run's records, by benchmark and drafter."""
    layout, cache = Layout.of(run), Layout.of_cache(run)
    manifests = [path for part in range(run.extract.parts) if (path := cache.cache_part(part)).exists()]
    counts = [read_manifest(path, "cache")["counts"] for path in manifests]  # none of a cache that is not kept
    tokens = sum(count["tokens"] for count in counts)
    alone = not bases
    for drafter in run.drafters:
        trained = layout.train_manifest(drafter)
        best = read_manifest(trained, "drafter")["best"] if trained.exists() else None
        shared = {
            "run": run.name,
            "drafter": drafter,
            "codec": run.extract.codec,
            "bytes_per_token": sum(count["bytes"] for count in counts) / tokens if tokens else None,
            "extract_s": seconds(layout.benchmarks.glob("extract/*.tsv")),
            "train_s": seconds(layout.benchmarks.glob(f"train/{drafter}.tsv")),
            "walk": best and best["validation"] and best["validation"]["acceptance"],
        }
        records = [json.loads(path.read_text()) for path in sorted(layout.eval(drafter).glob("*.json"))]
        records = [record for record in records if "by_prompt" in record]
        for record in records:
            if alone:
                bases.setdefault((record["benchmark"], drafter), record)
            base = _base(bases, record["benchmark"], "" if alone else drafter)
            few = np.array([counts for _, *counts in record["by_prompt"][:first]], float)
            walked = record.get("validation")  # of this very checkpoint
            yield shared | {
                "walk": walked["acceptance"] if walked else shared["walk"],
                "checkpoint": record["checkpoint"],
                "benchmark": record["benchmark"],
                "prompts": record["prompts"],
                "acceptance": record["pooled"],
                "first": {"prompts": len(few), "acceptance": float(pooled(few))},
                "compared": compare(record["by_prompt"], base["by_prompt"], run.eval.seed) if base else None,
            }
        if best and not records:
            none = dict.fromkeys(("benchmark", "prompts", "acceptance", "first", "compared"))
            yield shared | none | {"checkpoint": f"step-{best['step']:06d}"}


def _base(bases: Mapping[tuple[str, str], Any], benchmark: str, drafter: str) -> Any:
    same = [record for (name, _), record in bases.items() if name == benchmark]
    return bases.get((benchmark, drafter), same[0] if same else None)


def seconds(paths: Iterable[Path]) -> float | None:
    """Sum of the wall-clock that Snakemake measured, starts included; None where it ran nothing."""
    found = [row["s"] for path in paths for row in csv.DictReader(path.open(), delimiter="\t")]
    return sum(map(float, found)) if found else None


def of_runs(paths: Sequence[Path], first: int) -> list[dict[str, Any]]:
    """Rows of several runs. The first run's drafters are compared with its first, those of other runs with the first
    run's drafter of the same name, where there is one."""
    bases: dict[tuple[str, str], Any] = {}
    return [row for path in paths for row in rows_of(load_run(path), first, bases)]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of `rows`."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        whole, ratio, few, walk = row["acceptance"], row["compared"], row["first"], row.get("walk")
        cells = [
            row["run"],
            row["drafter"],
            row["checkpoint"],
            row["codec"],
            *("" if row[name] is None else f"{row[name]:,.0f}" for name in ("bytes_per_token", "extract_s", "train_s")),
            f"{walk:.3f}" if walk else "",
            row["benchmark"] or "",
            str(row["prompts"] or ""),
            f"**{whole['value']:.3f}** [{whole['low']:.3f}, {whole['high']:.3f}]" if whole else "",
            f"{few['acceptance']:.3f} ({few['prompts']})" if few else "",
            f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.yaml")
    parser.add_argument("--codecs", nargs="+", default=[])
    parser.add_argument("--first", type=int, default=32, help="prompts of the column beside the whole benchmark")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    options = parser.parse_args()
    paths = options.runs
    if options.codecs:
        made = [path for run in options.runs for path in of_codecs(run, options.codecs)]
        paths = [path for path in made if follow(path)]
        for path in made:
            if path not in paths:
                print(f"failed, left out: {path}")
    rows = of_runs(paths, options.first)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
