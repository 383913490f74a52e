"""Loads exports with other programs' own code and says what came out. Runs alone, in a fresh process:

    python pipeline/consumer_probe.py JOBS.json     -> one JSON line on stdout, `{consumer: {"version", "answers"}}`

It imports nothing of draftmill, so that it also runs in an environment that has only the consumers. Torch and
transformers, which take seconds to import, are imported once; then each consumer gets a fork of its own, so that none
sees what another one imported or patched, and one that crashes takes nobody along.

JOBS.json maps consumers to lists of jobs. A job is `{"kind": "logits", "export": DIR, "case": FILE}`, `{"kind":
"generate", "export", "target", "prompts", "max_new_tokens", "stop"}` or `{"kind": "skip"}`. A case holds `taps`
[T, K * H], `anchors` [N], `blocks` [N, B, H] (rows of the embedding, not scaled) and `rows` [R, H] (rows of the LM
head); the answer goes to `FILE.CONSUMER` as `logits` [N, B - 1, R].
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = {"autoconfig": "transformers"}
"""Where the package is named otherwise than the consumer."""


def main(plan: dict[str, list[dict[str, Any]]], scratch: str) -> dict[str, Any]:
    """Version of each consumer and one answer a job; `version` is None where it is not installed.

    Files whose names begin with `scratch` are written.
    """
    packages = {consumer: PACKAGES.get(consumer, consumer) for consumer in plan}
    here = {consumer for consumer, package in packages.items() if importlib.util.find_spec(package) is not None}
    if here:
        _import_what_all_need()
    running = {
        consumer: _fork(consumer, jobs, f"{scratch}.{consumer}") for consumer, jobs in plan.items() if consumer in here
    }
    told: dict[str, Any] = {consumer: {"version": None, "answers": []} for consumer in plan}
    for consumer, child in running.items():
        answers = _result(child, f"{scratch}.{consumer}", len(plan[consumer]))
        told[consumer] = {"version": importlib.metadata.version(packages[consumer]), "answers": answers}
    return told


def _import_what_all_need() -> None:
    try:
        import torch  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: F401
        from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    except ImportError:  # the consumers that need it say so themselves
        pass


def _fork(consumer: str, jobs: list[dict[str, Any]], out: str) -> int:
    """Answer in a child process, whose own output goes to `OUT.log` and whose answers go to `OUT`."""
    child = os.fork()
    if child:
        return child
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        Path(out).write_text(json.dumps(_answers(consumer, jobs)))
    finally:
        os._exit(not Path(out).exists())


def _result(child: int, out: str, jobs: int) -> list[dict[str, Any]]:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return json.loads(Path(out).read_text())
    said = " ".join(Path(f"{out}.log").read_text(errors="replace").split())[-300:]
    return [{"error": f"its process ended with {code}: {said}"}] * jobs


def _answers(consumer: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    run = {"dflash": _torch_model, "specforge": _torch_model, "speculators": _torch_model}.get(consumer, _config_only)
    answers: list[dict[str, Any]] = []
    for job in jobs:
        try:
            answers.append({} if job["kind"] == "skip" else run(consumer, job))
        except Exception as error:  # whatever another program's loader raises is its answer
            answers.append({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    return answers


def _torch_model(consumer: str, job: dict[str, Any]) -> dict[str, Any]:
    model, loading = _load(consumer, job["export"])
    if job["kind"] == "generate":
        return _generate(model, job)
    compare = _speculators_logits if consumer == "speculators" else _flat_logits
    compare(model, Path(job["case"]), consumer)
    told = {key: sorted(loading[key]) for key in ("missing_keys", "unexpected_keys")}
    return {**told, "drafted": model.block_size - 1, "note": loading.get("note", "")}


def _load(consumer: str, folder: str) -> tuple[Any, dict[str, Any]]:
    import torch

    arguments: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    if consumer == "speculators":
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

        config = DFlashSpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "sdpa"
        return _Plain.load(DFlashDraftModel, folder, config, arguments)
    if consumer == "dflash":
        from dflash.model import DFlashDraftModel
    else:
        from specforge.modeling.draft.dflash import DFlashDraftModel
    model, loading = DFlashDraftModel.from_pretrained(folder, attn_implementation="sdpa", **arguments)
    return model.eval(), loading


class _Plain:
    """speculators' own `from_pretrained` returns a model only; transformers' below it also tells what it loaded."""

    @staticmethod
    def load(model_class: Any, folder: str, config: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from transformers import PreTrainedModel

        model, loading = PreTrainedModel.from_pretrained.__func__(model_class, folder, config=config, **arguments)
        try:
            model.load_verifier_weights()
            note = "" if model.lm_head.weight.isfinite().all() else "the target's LM head came out as NaN"
        except Exception as error:  # a target that is not on this machine: the drafter itself is judged all the same
            note = f"target's weights not loaded ({type(error).__name__})"
        return model.eval(), {**loading, "note": note}


def _flat_logits(model: Any, case: Path, consumer: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    body = load_file(case)
    answers, blocks = [], body["blocks"]
    if consumer == "dflash":
        from dflash.model import _draft_value

        blocks = blocks * float(_draft_value(model.config, "input_embedding_scale", 1.0))
    with torch.no_grad():
        for anchor, block in zip(body["anchors"].tolist(), blocks, strict=True):
            positions = torch.arange(anchor + block.shape[0])[None]
            hidden = model(
                position_ids=positions, noise_embedding=block[None], target_hidden=body["taps"][:anchor][None]
            )
            answers.append(_head(model, hidden[0, 1:], body["rows"]))
    save_file({"logits": torch.stack(answers)}, f"{case}.{consumer}")


def _speculators_logits(model: Any, case: Path, consumer: str) -> None:
    """The layers as speculators builds them, on one unpadded block at a time, so that sums run in the same order."""
    import torch
    from safetensors.torch import load_file, save_file

    body = load_file(case)
    answers = []
    with torch.no_grad():
        for anchor, block in zip(body["anchors"].tolist(), body["blocks"], strict=True):
            context = model.hidden_norm(model.fc(body["taps"][:anchor][None]))
            rope = model.rotary_emb(block[None], torch.arange(anchor + block.shape[0])[None])
            hidden = block[None]
            for layer in model.layers:
                hidden = layer(hidden_states=hidden, target_hidden=context, position_embeddings=rope)
            answers.append(torch.nn.functional.linear(model.norm(hidden)[0, 1:], body["rows"]))
    save_file({"logits": torch.stack(answers)}, f"{case}.{consumer}")


def _head(model: Any, hidden: Any, rows: Any) -> Any:
    import torch

    linear = lambda x: torch.nn.functional.linear(x, rows)  # noqa: E731
    return model.compute_logits(hidden, linear) if hasattr(model, "compute_logits") else linear(hidden)


def _generate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy speculative decoding by dflash's own loop: whole sequences and acceptance lengths."""
    import dflash.model
    import torch
    from transformers import AutoModelForCausalLM

    dflash.model._cuda_time = time.perf_counter  # it times with CUDA events, which a CPU has not
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    outputs, lengths = [], []
    for prompt in job["prompts"]:
        answer = dflash.model.dflash_generate(
            model,
            target,
            torch.tensor([prompt]),
            job["max_new_tokens"],
            job["stop"],
            return_stats=True,
        )
        outputs.append(answer.output_ids[0, len(prompt) :].tolist())
        lengths.append(answer.acceptance_lengths)
    return {"outputs": outputs, "lengths": lengths}


def _config_only(consumer: str, job: dict[str, Any]) -> dict[str, Any]:
    read = {"autoconfig": _autoconfig, "vllm": _vllm, "sglang": _sglang}[consumer]
    return {"config": read(job["export"])}


def _autoconfig(folder: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    return {
        "block_size": config.block_size,
        "target_layer_ids": config.dflash_config["target_layer_ids"],
        "mask_token_id": config.dflash_config["mask_token_id"],
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "layer_types": list(config.layer_types),
        "rope_theta": config.rope_parameters["rope_theta"],
    }


def _vllm(folder: str) -> dict[str, Any]:
    """vLLM's own resolution of what it would run; layers of the target count from 1 there.

    `drafted` is there only where it takes the number from the files, in the speculators form.
    """
    from types import SimpleNamespace

    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    config, told = get_config(folder, trust_remote_code=False), {}
    if isinstance(config, SpeculatorsConfig):
        raw = json.loads((Path(folder) / "config.json").read_text())
        told["drafted"] = SpeculatorsConfig.extract_vllm_speculative_config(raw)["num_speculative_tokens"]
    else:
        config = EAGLEConfig(config, method="dflash", model_type="eagle")
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    return {
        **told,
        "target_layer_ids": [layer - 1 for layer in get_eagle3_aux_layers_from_config(speculative)],
        "mask_token_id": config.dflash_config["mask_token_id"],
        "causal": [_dflash_layer_causal(config, layer) for layer in range(config.num_hidden_layers)],
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_parameters["rope_theta"],
    }


def _sglang(folder: str) -> dict[str, Any]:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from transformers import AutoConfig

    parsed = parse_dflash_draft_config(draft_hf_config=AutoConfig.from_pretrained(folder))
    return {
        "block_size": parsed.resolve_block_size(default=16),
        "target_layer_ids": list(parsed.target_layer_ids),
        "mask_token_id": parsed.mask_token_id,
        "num_target_layers": parsed.num_target_layers,
    }


if __name__ == "__main__":
    sys.path[0] = ""  # not this file's folder: its module names are not the consumers'
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answer = json.dumps(main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1]))
    print(f"\n{answer}", flush=True)
