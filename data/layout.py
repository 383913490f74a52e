"""Where everything of a run lies on disk. The one place that spells these names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.settings import Run


def part_name(part: int) -> str:
    return f"part-{part:04d}"


@dataclass(frozen=True)
class Layout:
    """Paths under `<root>/<name>` (`folder`)."""

    folder: Path

    @classmethod
    def of(cls, run: Run) -> Layout:
        return cls(run.folder)

    @classmethod
    def of_cache(cls, run: Run) -> Layout:
        """Layout of the run whose cache `run` reads: its own, or `cache.from`."""
        return cls.of(run) if run.cache.run is None else cls(Path(run.root) / run.cache.run)

    @property
    def targets(self) -> Path:
        """Target weights that were downloaded, made or converted once, for all runs under this root."""
        return self.folder.parent / ".targets"

    @property
    def compiled(self) -> Path:
        """Inductor's cache of compiled kernels, shared by all runs under this root."""
        return self.folder.parent / ".inductor"

    def prompts(self, part: int) -> Path:
        """Manifest of a part's normalised conversations; the table lies beside it with suffix `.parquet`."""
        return self.folder / "prompts" / f"{part_name(part)}.json"

    @property
    def prepared(self) -> Path:
        """Manifest of what `prepare` read, kept and dropped; written after those of all parts."""
        return self.folder / "prompts" / "accounting.json"

    @property
    def prepare_state(self) -> Path:
        """Whether the work of `prepare` is done, or was begun (`State` of data/manifest.py); likewise the next two."""
        return self.folder / "prompts" / "state.json"

    def tokens_state(self, part: int) -> Path:
        return self.folder / "tokens" / f".{part_name(part)}.state.json"

    def cache_state(self, part: int) -> Path:
        return self.cache / part_name(part) / "state.json"

    def tokens(self, part: int) -> Path:
        """Manifest of a part's token rows; the table lies beside it with suffix `.parquet`."""
        return self.folder / "tokens" / f"{part_name(part)}.json"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def cache_part(self, part: int) -> Path:
        """Manifest of a part of the hidden-state cache; its shards lie in the folder of the same stem."""
        return self.cache / f"{part_name(part)}.json"

    @property
    def head(self) -> Path:
        """What training needs of the target: embedding, LM head, scales."""
        return self.cache / "head.safetensors"

    def drafter(self, name: str) -> Path:
        return self.folder / "drafters" / name

    def train_manifest(self, name: str) -> Path:
        return self.drafter(name) / "train.json"

    def metrics(self, name: str) -> Path:
        return self.drafter(name) / "metrics.jsonl"

    def checkpoints(self, name: str) -> Path:
        return self.drafter(name) / "checkpoints"

    def eval(self, drafter: str) -> Path:
        return self.folder / "eval" / drafter

    def eval_manifest(self, drafter: str) -> Path:
        return self.eval(drafter) / "manifest.json"

    def export(self, drafter: str) -> Path:
        return self.folder / "export" / drafter

    def export_manifest(self, drafter: str) -> Path:
        """The last file of an export; a re-export replaces the folder as a whole."""
        return self.export(drafter) / "draftmill.json"

    @property
    def verified(self) -> Path:
        """Mark of a cache that `verify` found sound."""
        return self.folder / "cache.verified"

    @property
    def dropped(self) -> Path:
        """Mark of a cache whose shards were deleted after training (`extract.keep: false`)."""
        return self.folder / "cache.dropped"

    @property
    def benchmarks(self) -> Path:
        """Snakemake's times and memory of jobs."""
        return self.folder / "benchmarks"

    @property
    def report(self) -> Path:
        return self.folder / "report" / "report.html"

    @property
    def pictures(self) -> Path:
        """Folder of the report's pictures and of nothing else: Snakemake deletes it before each attempt."""
        return self.folder / "report" / "pictures"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"
