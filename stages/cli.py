"""The `draftmill` command: a group that loads a verb's module only when that verb is called.

`--help` imports click and nothing heavier. Exit codes: 0 done, 1 failed, 2 bad use or bad settings, 75 stopped on a
signal with everything saved. Errors are one line, `error: ...`, on stderr.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from data.errors import BadInput, Failure, Stopped

COMMANDS = {
    "doctor": "Check this machine, and what a run needs of it.",
    "plan": "Say what a run will cost in tokens, bytes, memory and time, before anything runs.",
    "prepare": "Read, check, split and render the conversations.",
    "regenerate": "Let the target answer the prompts.",
    "extract": "Run the target and write the hidden-state cache.",
    "verify": "Check the cache: files, counts, and states against a fresh forward.",
    "train": "Train drafters from the cache.",
    "eval": "Measure acceptance, losslessness and speed of trained drafters.",
    "export": "Write drafters in the form that serving engines load.",
    "report": "Write one page about the run.",
    "status": "Say what is done, running and failed, and what to run next.",
    "clean": "Free the disk of caches or checkpoints.",
    "import": "Turn somebody else's drafter into one of ours.",
}
"""Every verb and its line of help, in the order of a run. Kept here so that `--help` loads no stage."""


NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""What the system answers for a path that is not ours to use."""


class Verbs(click.Group):
    """The stages by name, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"stages.{'import_' if cmd_name == 'import' else cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command '{args[0]}'; did you mean `{near[0]}`?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="draftmill", prog_name="draftmill")
def group() -> None:
    """Train DFlash drafters for speculative decoding in two offline stages, and prove what they are worth.

    Every command takes the run file that describes the whole run. `snakemake --cores all --configfile RUN.yaml`
    does all of them in order.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(exit_code(arguments))


def exit_code(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; what it ended with, as an exit code. Errors are printed here and nowhere else."""
    try:
        result = group.main(args=arguments, prog_name="draftmill", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "draftmill"
        return _fail(2, f"{error.format_message()} (see `{where} --help`)")
    except click.Abort:
        return _fail(1, "interrupted")
    except BadInput as error:
        return _fail(2, error)
    except Failure as error:
        return _fail(1, error)
    except Stopped as error:
        return _fail(75, f"stopped: {error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if text := shortage(error):
            return _fail(1, text)
        if text := lost_device(error):
            leave(_fail(1, text))
        text = no_access(error)
        return _unexpected(error) if text is None else _fail(2, text)


def shortage(error: BaseException) -> str | None:
    """A clear line for a machine that ran out of something, else None."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full while writing {error.filename or 'a file'}: free some space, then run the same command again"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, named rather than imported
        return f"out of GPU memory ({str(error).splitlines()[0]}): lower the batch sizes of this stage in the run file"
    if isinstance(error, MemoryError):
        return "out of memory: lower the batch sizes of this stage in the run file"
    return None


def lost_device(error: BaseException) -> str | None:
    """A clear line for a GPU on which nothing runs any more in this process, else None."""
    if type(error).__name__ != "AcceleratorError":  # torch's, named rather than imported
        return None
    log = getattr(error, "draftmill_log", None)
    return (
        f"the GPU failed ({str(error).splitlines()[0]}){f', traceback in {log}' if log else ''}: run the same command "
        "again, it goes on from what is saved; if that fails too, `CUDA_LAUNCH_BLOCKING=1` and `train.graphs: compile` "
        "name the kernel"
    )


def leave(code: int) -> NoReturn:
    """End the process here and now: to take down what lies on a lost GPU aborts it, with another exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def no_access(error: BaseException) -> str | None:
    """A clear line for a path that this user may not use or that runs through a file, else None."""
    if isinstance(error, OSError) and error.filename and error.errno in NO_ACCESS:
        remedy = "give this user access, or set `root` in the run file to a folder that can be written"
        return f"{error.filename}: {(error.strerror or 'no access').lower()}: {remedy}"
    return None


def _fail(code: int, message: object) -> int:
    # One line, whatever the message holds: logs are grepped by line.
    click.echo(f"error: {' '.join(str(message).split())}", err=True)
    return code


def _unexpected(error: Exception) -> int:
    log = getattr(error, "draftmill_log", None)
    if log is None:
        traceback.print_exception(error)
        return _fail(1, f"{type(error).__name__}: {error}")
    return _fail(1, f"{type(error).__name__}: {error} (traceback in {log})")


if __name__ == "__main__":  # ranks are started as a module
    sys.exit(main())
