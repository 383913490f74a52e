"""`draftmill report RUN`: one page about a run, from whatever is there; and its pictures as files.

`report/report.html` holds everything and needs nothing else. `report/pictures/*.svg` are the same pictures, for
`snakemake --report` and for papers.
"""

from __future__ import annotations

from pathlib import Path

import click

from data.layout import Layout
from data.manifest import write_bytes
from data.settings import load_run


@click.command("report")
@click.argument("run_file", type=click.Path())
@click.option(
    "--to",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write instead of the run's own; `pictures/` beside it.",
)
def command(run_file: str, to: Path | None) -> None:
    """Write one page about the run."""
    run = load_run(run_file)
    from pipeline.job import job

    with job(run, "report"):
        from pipeline.console import say
        from pipeline.figures import pictures, plain
        from pipeline.page import render
        from pipeline.report import gather

        story = gather(run)
        drawn = pictures([*story.drafters, *story.others], story.cache, story.times)
        layout = Layout.of(run)
        page = to or layout.report
        folder = page.with_name(layout.pictures.name)
        folder.mkdir(parents=True, exist_ok=True)
        for stem, svg in drawn.items():
            write_bytes(folder / f"{stem}.svg", plain(svg).encode())
        for left in layout.pictures.glob("*.svg") if to is None else ():
            if left.stem not in drawn:  # of a drafter or a cache that is gone
                left.unlink()
        write_bytes(page, render(story, drawn).encode())
        for line in story.missing:
            say(f"not in the report: {line}")
        for line in story.stale:
            say(f"warning: out of date, and shown as it is: {line}")
        say(f"{page}: {len(drawn)} pictures")
