# The whole path of one run, over manifests:
#
#     snakemake --cores all                               the quickstart
#     snakemake --cores all --configfile my.yaml          any run, and only what that file says
#     snakemake --cores all --configfile my.yaml -R train   train again, and what follows
#     snakemake --configfile my.yaml --report out.html    page and pictures in Snakemake's own report, offline
#
# One rule a command and of its name. `params` hold the settings that shape a rule's output (data/shaping.py), so a
# change re-runs exactly the stages that it touches. Devices are leased by the stages themselves; GPUs are counted here.
import gc
import os
import shlex
import sys
import time
from base64 import urlsafe_b64encode
from pathlib import Path

from snakemake.exceptions import WorkflowError

from data.errors import BadInput
from data.layout import Layout
from data.manifest import SINCE, State
from data.settings import load_run
from data.shaping import benchmark_files, shaping, source_files
from pipeline.devices import visible

# A flow of thousands of parts is many small objects that stay: looking for cycles among them takes an eighth of the time.
gc.set_threshold(100_000, 50, 100)

if len(workflow.configfiles) > 1:
    raise WorkflowError("one run file at a time: Snakemake would merge several into one, give a single --configfile")
if set(config) and not workflow.configfiles:
    raise WorkflowError("--config is not used: settings stand in the run file, give it with --configfile")

RUN_FILE = os.path.relpath((workflow.configfiles or [Path(workflow.basedir) / "data/recipes/quickstart.yaml"])[0])
try:
    RUN = load_run(RUN_FILE)
except BadInput as error:
    raise WorkflowError(str(error)) from None

HERE = Layout.of(RUN)
CACHE = Layout.of_cache(RUN)
PARTS = range(RUN.extract.parts)
REGENERATE = RUN.data.responses == "regenerate"
COMMAND = f"{shlex.quote(str(Path(sys.executable).with_name('draftmill')))}"
FILE = shlex.quote(RUN_FILE)
GPUS = len(visible())
# On a cluster there is no number of cores to share out; a job of one there is a Snakemake of its own.
CLUSTER = workflow.global_resources["_cores"].value is None or not workflow.is_main_process
NODES = RUN.jobs.nodes
BEGAN = time.time()
# Jobs share a terminal: plain lines, no bars.
os.environ["DRAFTMILL_LINES"] = "1"


def since():
    """When this work began, in seconds since the epoch: now, or with jobs that a killed Snakemake left. Snakemake keeps
    a mark of each, named after its output. What `-R` and its like force was done before this call."""
    settings = workflow.dag_settings
    if settings.forcerun or settings.forceall or settings.forcetargets:
        return BEGAN
    outputs = [HERE.prepared, *each(HERE.tokens), *each(HERE.cache_part)]
    outputs += [path(name) for name in RUN.drafters for path in (HERE.train_manifest, HERE.eval_manifest)]
    names = {urlsafe_b64encode(bytes(path)).decode() for path in outputs}
    marks = Path(".snakemake/incomplete").rglob("*")
    left = [mark for mark in marks if "".join(mark.parts[2:]).replace("@", "") in names]
    return min((mark.stat().st_mtime for mark in left), default=BEGAN)


def needs(*paths):
    """An input function. Snakemake's settings exist only now, while it builds the DAG, and three are ours to make."""

    def inputs(wildcards):
        # Manifests are whole or absent, so what a killed Snakemake left is never half of one: no --rerun-incomplete.
        workflow.dag_settings.force_incomplete = True
        # Work done since then is nobody's to force: a stage puts its manifest back, should Snakemake have deleted it.
        if SINCE not in os.environ:
            os.environ[SINCE] = str(since())
        # A touched file of any size is compared by content before anything runs again.
        workflow.dag.max_checksum_file_size = 1 << 50
        # Without a limit Snakemake does not count GPUs at all. A cluster counts its own, and a dry run for one, which
        # is local to Snakemake, would say `gpu=0` of every job on a login node.
        if workflow.local_exec and not workflow.dryrun and "gpu" not in workflow.global_resources:
            workflow.register_resource("gpu", GPUS)
        return [path(wildcards) if callable(path) else path for path in paths]

    return inputs


def prepared(path):
    """Path of a part, known only once `prepare` has run: what it writes of parts lies beside what it declares."""

    def of_part(wildcards):
        # A dry run of a new run need not try: what it cannot know would make it plan all of it twice.
        if workflow.dryrun and not HERE.prepared.exists():
            return HERE.prepared
        checkpoints.prepare.get()
        return path(int(wildcards.part))

    return of_part


def unended():
    """Manifests of rows, tokens and cache whose work was begun and has no end: a job that failed, or a manifest that was
    deleted to force one. Snakemake itself takes what is missing before a later output for what was cleaned away."""
    if RUN.cache.run is not None or not HERE.folder.exists():
        return []
    work = [(HERE.prepared, HERE.prepare_state)]
    for part in PARTS:
        work += [(HERE.tokens(part), HERE.tokens_state(part))] if REGENERATE else []
        work += [(HERE.cache_part(part), HERE.cache_state(part))]
    try:
        return [manifest for manifest, state in work if State(state).wanted(manifest, RUN.extract.keep)]
    except BadInput as error:
        raise WorkflowError(str(error)) from None


def share_of_cores(jobs):
    """Cores for one of `jobs` that run side by side: a GPU's share where there are GPUs, else the machine's."""
    return RUN.jobs.cpus_per_gpu if CLUSTER else max(1, workflow.cores // (GPUS or jobs))


def each(path):
    """Paths of all parts."""
    return [path(part) for part in PARTS]


def drafter_gpus(wildcards):
    return RUN.drafter(wildcards.drafter).gpus


def drafter_cores(wildcards):
    """A drafter on several GPUs takes the cores of each; on several machines `threads` are those of one."""
    return share_of_cores(len(RUN.drafters)) * (drafter_gpus(wildcards) // NODES if GPUS or CLUSTER else 1)


TRAIN = "{COMMAND} train {FILE} --drafter {wildcards.drafter}"
MACHINES = {}
if NODES > 1:
    # One SLURM job over several machines: `mpi` makes the plugin leave `srun` to us, one torchrun a machine.
    MACHINES = {"nodes": NODES, "tasks": NODES, "tasks_per_gpu": 0, "mpi": "srun"}
    TRAIN = (
        "srun --nodes={NODES} --ntasks={NODES} --ntasks-per-node=1 --kill-on-bad-exit=1 sh -c '"
        + TRAIN
        + " --nnodes {NODES} --node-rank $SLURM_NODEID"
        + ' --rdzv-endpoint $(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1):29400\''
    )


# What stands before the results in `snakemake --report`.
report: "stages/captions/run.rst"


wildcard_constraints:
    part=r"\d\d\d\d+",
    drafter="|".join(RUN.drafters),


rule all:
    input:
        needs(
            HERE.report,
            # What a failed job has lost lies before outputs that are there: it is asked for by its own name.
            *map(HERE.train_manifest, RUN.drafters),
            *(map(HERE.eval_manifest, RUN.drafters) if RUN.eval.benchmarks else ()),
            *map(HERE.export_manifest, RUN.drafters),
            *unended(),
            *([] if RUN.extract.keep or RUN.cache.run else [HERE.dropped]),
        ),


if RUN.cache.run is None:

    # A checkpoint: parts are looked at once they are there, so parts that did not change run no further.
    checkpoint prepare:
        input:
            needs(*source_files(RUN)),
        output:
            HERE.prepared,
        log:
            HERE.logs / "prepare" / "prepare.log",
        benchmark:
            HERE.benchmarks / "prepare.tsv"
        params:
            settings=shaping(RUN, "prepare"),
        retries: RUN.jobs.retries
        threads: share_of_cores(1)
        resources:
            mem_mb=RUN.jobs.memory_mb,
            runtime=RUN.jobs.runtime_minutes,
        shell:
            "{COMMAND} prepare {FILE}"

    if REGENERATE:

        rule regenerate:
            input:
                needs(prepared(HERE.prompts)),
            output:
                HERE.folder / "tokens" / "part-{part}.json",
            log:
                HERE.logs / "regenerate" / "part-{part}.log",
            benchmark:
                HERE.benchmarks / "regenerate" / "part-{part}.tsv"
            params:
                settings=shaping(RUN, "regenerate"),
            retries: RUN.jobs.retries
            threads: share_of_cores(len(PARTS))
            resources:
                gpu=0 if RUN.data.regenerate.server else RUN.target.gpus,
                mem_mb=RUN.jobs.memory_mb,
                runtime=RUN.jobs.runtime_minutes,
            shell:
                "{COMMAND} regenerate {FILE} --part {wildcards.part}"

    rule extract:
        input:
            needs(prepared(HERE.prompts if REGENERATE else HERE.tokens)),
            *([needs(lambda wildcards: HERE.tokens(int(wildcards.part)))] if REGENERATE else []),
        output:
            (lambda path: path if RUN.extract.keep else temp(path))(HERE.cache / "part-{part}.json"),
        log:
            HERE.logs / "extract" / "part-{part}.log",
        benchmark:
            HERE.benchmarks / "extract" / "part-{part}.tsv"
        params:
            settings=shaping(RUN, "extract"),
        retries: RUN.jobs.retries
        threads: share_of_cores(len(PARTS))
        resources:
            gpu=RUN.target.gpus,
            mem_mb=RUN.jobs.memory_mb,
            runtime=RUN.jobs.runtime_minutes,
        shell:
            "{COMMAND} extract {FILE} --part {wildcards.part}"

    rule verify:
        input:
            needs(*each(HERE.cache_part)),
        output:
            touch(HERE.verified),
        log:
            HERE.logs / "verify" / "verify.log",
        benchmark:
            HERE.benchmarks / "verify.tsv"
        threads: share_of_cores(1)
        resources:
            gpu=RUN.target.gpus,
            mem_mb=RUN.jobs.memory_mb,
            runtime=RUN.jobs.runtime_minutes,
        shell:
            "{COMMAND} verify {FILE}"

    if not RUN.extract.keep:

        rule clean:
            input:
                needs(*map(HERE.train_manifest, RUN.drafters)),
            output:
                touch(HERE.dropped),
            log:
                HERE.logs / "clean" / "clean.log",
            benchmark:
                HERE.benchmarks / "clean.tsv"
            shell:
                "{COMMAND} clean {FILE} --cache --yes"


rule train:
    input:
        needs(*each(CACHE.cache_part)),
    output:
        HERE.train_manifest("{drafter}"),
    log:
        HERE.logs / "train" / "{drafter}.log",
    benchmark:
        HERE.benchmarks / "train" / "{drafter}.tsv"
    params:
        settings=lambda wildcards: shaping(RUN, "train", wildcards.drafter),
        # The cache may be gone by now, or another run's: its own rule does not tell then.
        cache=shaping(RUN, "extract"),
    retries: RUN.jobs.retries
    threads: drafter_cores
    resources:
        **MACHINES,
        gpu=drafter_gpus,
        mem_mb=RUN.jobs.memory_mb,
        runtime=RUN.jobs.runtime_minutes,
    shell:
        TRAIN


rule eval:
    input:
        needs(lambda wildcards: HERE.train_manifest(wildcards.drafter), *benchmark_files(RUN)),
    output:
        HERE.eval_manifest("{drafter}"),
    log:
        HERE.logs / "eval" / "{drafter}.log",
    benchmark:
        HERE.benchmarks / "eval" / "{drafter}.tsv"
    params:
        settings=lambda wildcards: shaping(RUN, "eval", wildcards.drafter),
    retries: RUN.jobs.retries
    threads: share_of_cores(1)  # without a GPU alone: what it times would be other jobs' doing
    resources:
        gpu=RUN.target.gpus,
        mem_mb=RUN.jobs.memory_mb,
        runtime=RUN.jobs.runtime_minutes,
    shell:
        "{COMMAND} eval {FILE} --drafter {wildcards.drafter}"


rule export:
    input:
        # The model card shows what evaluation found.
        needs(
            lambda wildcards: (
                HERE.eval_manifest(wildcards.drafter)
                if RUN.eval.benchmarks
                else HERE.train_manifest(wildcards.drafter)
            )
        ),
    output:
        HERE.export_manifest("{drafter}"),
    log:
        HERE.logs / "export" / "{drafter}.log",
    benchmark:
        HERE.benchmarks / "export" / "{drafter}.tsv"
    params:
        settings=lambda wildcards: shaping(RUN, "export", wildcards.drafter),
    retries: RUN.jobs.retries
    resources:
        mem_mb=RUN.jobs.memory_mb,
        runtime=RUN.jobs.runtime_minutes,
    shell:
        "{COMMAND} export {FILE} --drafter {wildcards.drafter}"


rule report:
    input:
        needs(
            *map(HERE.export_manifest, RUN.drafters),
            *(map(HERE.eval_manifest, RUN.drafters) if RUN.eval.benchmarks else ()),
        ),
    output:
        report(HERE.report, caption="stages/captions/page.rst", category="Report", labels={"what": "page"}),
        # A folder, because which pictures there are depends on what the run has: those of a dropped cache are not.
        report(
            directory(HERE.pictures),
            caption="stages/captions/pictures.rst",
            category="Pictures",
            labels={"picture": "{picture}"},
            patterns=["{picture}.svg"],
        ),
    log:
        HERE.logs / "report" / "report.log",
    benchmark:
        HERE.benchmarks / "report.tsv"
    params:
        settings=shaping(RUN, "report"),
    retries: RUN.jobs.retries
    shell:
        "{COMMAND} report {FILE}"


onerror:
    shell("{COMMAND} status {FILE} --failed 1>&2")
