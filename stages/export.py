"""`draftmill export RUN`: drafters in the form that serving engines load.

    draftmill export my.yaml --drafter base --check
    draftmill export my.yaml --drafter base --push-to-hub me/my-drafter

`export/<name>/` holds `model.safetensors`, `config.json`, `README.md` and, written last, `draftmill.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from data.errors import BadInput, Failure
from data.layout import Layout
from data.manifest import read_json, read_manifest, require_equal
from data.provenance import refuse, stale_drafter, stale_eval
from data.settings import Run, load_run
from pipeline.interchange_folder import destination

if TYPE_CHECKING:
    from pipeline.consumers import Verdict
    from pipeline.interchange_config import TargetInfo


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    checkpoint: str
    form: str
    dtype: str
    quantize: str | None
    to: Path | None
    push: str | None
    private: bool


@click.command("export")
@click.argument("run_file", type=click.Path())
@click.option("--drafter", metavar="NAME", help="One drafter of the run; all of them when omitted.")
@click.option("--checkpoint", metavar="WHICH", default="best", show_default=True, help="best, last or step-N.")
@click.option(
    "--format", "form", type=click.Choice(["union", "zlab", "speculators"]), default="union", show_default=True,
    help="union is read by all of vLLM, SGLang, dflash, speculators and specforge.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True,
    help="Numbers that the weights are stored in.",
)  # fmt: skip
@click.option("--quantize", type=click.Choice(["fp8"]), help="Store the layers' matrices as float8 for serving.")
@click.option("--to", type=click.Path(path_type=Path), help="Folder to write instead of the run's own.")
@click.option("--check", is_flag=True, help="Load it with every program that is installed here, and compare logits.")
@click.option(
    "--check-python", metavar="PATH", default=sys.executable,
    help="Interpreter whose environment has those programs; this one when omitted.",
)  # fmt: skip
@click.option("--push-to-hub", "push", metavar="OWNER/NAME", help="Upload the folder to the Hugging Face hub.")
@click.option("--private", is_flag=True, help="With --push-to-hub: make the repository private.")
def command(
    run_file: str, drafter: str | None, to: Path | None, check: bool, check_python: str, **options: Any
) -> None:
    """Write drafters in the form that serving engines load."""
    run = load_run(run_file)
    request = Request(to=None if to is None else destination(to), **options)
    names = list(run.drafters) if drafter is None else [drafter]
    run.drafter(names[0])
    if len(names) > 1 and (request.to or request.push):
        raise BadInput("--to and --push-to-hub take one drafter: give --drafter too")
    if request.checkpoint == "all":
        raise BadInput("--checkpoint all: an export holds one checkpoint; give best, last or step-N")
    from pipeline.job import job

    for name in names:
        with job(run, "export", label=name):
            folder = export(run, name, request)
            if check:
                check_folder(run, folder, check_python)
            if request.push:
                push(folder, request.push, request.private)


def export(run: Run, name: str, request: Request) -> Path:
    """Write one drafter's folder and print how to serve it."""
    from pipeline.card import FLOAT8, serving_lines, write_card
    from pipeline.checkpoint import choose, load_config, read_weights
    from pipeline.console import say
    from pipeline.interchange import write_union

    layout = Layout.of(run)
    trained = read_manifest(layout.train_manifest(name), "drafter")
    refuse(stale_drafter(run, name, trained))
    chosen = choose(layout.checkpoints(name), request.checkpoint)[0]
    config = load_config(chosen.path)
    remedy = "the checkpoint and train.json belong to different trainings: run `draftmill train` again"
    require_equal(chosen.path, config.record(), trained["config"], remedy)
    weights = read_weights(chosen.path)
    target = target_info(run, trained["head"])
    folder = request.to or layout.export(name)
    evaluations = list(_evaluations(run, name, chosen.path.name))
    served = request.push or str(folder)
    stored = f"{FLOAT8} (compressed-tensors), the rest {request.dtype}" if request.quantize else request.dtype
    facts = _facts(trained, chosen.step, chosen.acceptance)
    write_union(
        folder,
        config,
        weights,
        target,
        request.form,  # type: ignore[arg-type]
        request.dtype,
        request.quantize,
        write_card(name, config, target, served, request.form, stored, facts, evaluations),  # type: ignore[arg-type]
        _provenance(run, name, chosen.step, trained, evaluations, request),
    )
    say(f"{folder}: step {chosen.step} of `{name}`, {request.form} form, {stored}")
    for engine, line in serving_lines(config, target, served, request.form).items():  # type: ignore[arg-type]
        say(f"{engine}: {line}")
    return folder


def target_info(run: Run, scales: Mapping[str, Any]) -> TargetInfo:
    """What an export says of the run's target. `scales` of its head stand in train.json: the cache may be gone."""
    from pipeline.interchange_config import TargetInfo
    from pipeline.target import load_config, resolve_target

    folder, config = resolve_target(run), load_config(run)
    architectures = read_json(folder / "config.json", "the target has no config.json").get("architectures") or []
    return TargetInfo(
        name=run.target.model if folder.parent.name == "snapshots" else str(folder.resolve()),
        architecture=architectures[0] if architectures else "",
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        **scales,
    )


def _evaluations(run: Run, name: str, checkpoint: str) -> Iterator[dict[str, Any]]:
    """Finished evaluations of this checkpoint, benchmark by benchmark; those of other checkpoints and of an earlier
    training are left out."""
    from pipeline.console import say

    layout = Layout.of(run)
    if not layout.eval_manifest(name).exists():
        return
    manifest = read_manifest(layout.eval_manifest(name), "eval")
    stale = stale_eval(run, name, manifest)
    if stale is not None and not stale.setting:
        say(f"no evaluation in the card: {stale}")
        return
    for record in manifest["files"]:
        body = read_json(layout.eval(name) / record["path"], "run `draftmill eval` again")
        if "pooled" in body and body["checkpoint"] == checkpoint:
            yield body
        elif "pooled" in body:
            say(f"not in the card: {body['benchmark']} of {body['checkpoint']}, because {checkpoint} is exported")


def _facts(trained: Mapping[str, Any], step: int, acceptance: float | None) -> dict[str, Any]:
    """Rows of the card's table, and the validation walk's number."""
    train = trained["settings"].get("settings", trained["settings"])
    recipe = train.get("train", {}) if isinstance(train, Mapping) else {}
    rate, epochs, loss = recipe.get("learning_rate"), recipe.get("epochs"), recipe.get("loss", {})
    facts = {
        "checkpoint": f"step {step} of {trained['steps']}",
        "rows": f"{trained['rows']['train']} trained, {trained['rows']['validation']} held out",
        "recipe": f"{loss.get('kind')}, {epochs} epochs, peak rate {rate}" if recipe else None,
        "cache fingerprint": trained["inputs"]["cache"],
        "training fingerprint": trained["fingerprint"],
        "validation acceptance": None if acceptance is None else f"{acceptance:.2f}",
    }
    return {key: value for key, value in facts.items() if value is not None}


def _provenance(
    run: Run, name: str, step: int, trained: Mapping[str, Any], evaluations: list[dict[str, Any]], request: Request
) -> dict[str, Any]:
    from pipeline.journal import installed

    manifest = Layout.of(run).eval_manifest(name)
    evaluated = {"eval": read_manifest(manifest, "eval").get("fingerprint")} if evaluations else {}
    return {
        "run": run.name,
        "drafter_name": name,
        "step": step,
        "form": request.form,
        "dtype": request.dtype,
        "quantize": request.quantize,
        "inputs": {"drafter": trained["fingerprint"], **trained["inputs"], **evaluated},
        "training": {key: trained[key] for key in ("settings", "mask_token", "target", "template", "codec", "rows")},
        "evaluation": [
            {key: body[key] for key in ("benchmark", "checkpoint", "prompts", "pooled", "per_response", "definition")}
            for body in evaluations
        ],
        "versions": {package: installed(package) for package in ("draftmill", "torch", "transformers", "safetensors")},
    }


def check_folder(run: Run, folder: Path, python: str) -> None:
    """Print what every consumer made of an export.

    Raises Failure when one that is installed reads it otherwise than it was meant.
    """
    from pipeline.consumers import check_exports
    from pipeline.head import load_head

    head_file = Layout.of_cache(run).head
    verdicts = check_exports([folder], load_head(head_file) if head_file.exists() else None, python)[folder]
    click.echo(table(verdicts))
    failed = [verdict for verdict in verdicts if verdict.failed]
    if failed:
        raise Failure(f"{folder}: {failed[0].consumer} {failed[0].version}: {failed[0].problem}")
    if all(verdict.difference is None for verdict in verdicts):
        click.echo("nobody's logits were compared: no engine that computes them is installed beside draftmill")


def table(verdicts: list[Verdict]) -> str:
    """Consumer, version and result in columns."""
    rows = [("consumer", "version", "result")]
    for verdict in verdicts:
        good = "read as meant" if verdict.difference is None else f"logits differ by {verdict.difference:g}"
        result = verdict.problem or ("-" if verdict.version is None else good)
        rows.append(
            (verdict.consumer, verdict.version or "-", f"{result} ({verdict.note})" if verdict.note else result)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {version:<{widths[1]}}  {result}" for name, version, result in rows)


def push(folder: Path, repository: str, private: bool) -> None:
    """Upload an export; the hub's own login (`hf auth login` or HF_TOKEN) is used.

    Raises BadInput for a name that the hub does not take, Failure when the hub refuses or is out of reach.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from pipeline.console import say

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        where = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by draftmill")
    except HFValidationError as error:
        raise BadInput(f"--push-to-hub {repository}: {error}") from None
    except (*HfHubHTTPError.__bases__, OSError) as error:  # the error of its HTTP library, httpx or httpx2 by version
        reason = " ".join(str(error).split())[:200]
        raise Failure(f"{repository}: upload failed ({reason}); the export itself is whole in {folder}") from None
    say(f"uploaded to {where}")
