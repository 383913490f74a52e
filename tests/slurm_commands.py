"""Stand-ins for SLURM's commands: `sbatch` runs its job at once in the background, `sacct` says how it ended.

    slurm_commands.py FOLDER COMMAND ARGS...

FOLDER gets `sbatch` (one line a submission: its arguments as JSON) and a file `JOBID.state` a job.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path


def sbatch(folder: Path, arguments: list[str]) -> None:
    with (folder / "sbatch").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    number = str(len((folder / "sbatch").read_text().splitlines()))
    script = arguments[-1].removeprefix("--wrap=") if "--wrap" in arguments[-1] else arguments[-1]
    state = folder / f"{number}.state"
    state.write_text("RUNNING")
    quoted = shlex.quote(str(state))
    done = f"({script}) && echo COMPLETED > {quoted} || echo FAILED > {quoted}"
    output = arguments[arguments.index("--output") + 1].replace("%j", number)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with Path(output).open("w") as log:
        environment = os.environ | {"SLURM_JOB_ID": number}
        subprocess.Popen(["sh", "-c", done], stdout=log, stderr=log, env=environment, start_new_session=True)
    print(number)


def sacct(folder: Path, arguments: list[str]) -> None:
    for path in folder.glob("*.state"):
        print(f"{path.stem}|{path.read_text().strip()}")


def srun(folder: Path, arguments: list[str]) -> int:
    with (folder / "srun").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    start = next(i for i, text in enumerate(arguments) if not text.startswith("-"))
    return subprocess.call(arguments[start:], env=os.environ | {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node1"})


def scontrol(folder: Path, arguments: list[str]) -> None:
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2])


def sacctmgr(folder: Path, arguments: list[str]) -> None:
    print("me")


def nothing(folder: Path, arguments: list[str]) -> None:
    """A command whose answer nobody needs."""


squeue = sinfo = scancel = nothing


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:]))
