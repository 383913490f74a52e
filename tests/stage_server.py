"""Real stages without their start-up: one process imports torch and the rest once, and forks for each command.

    stage_server.py SOCKET          serve
    stage_server.py SOCKET ARGS...  run `draftmill ARGS...` there, as if it ran here; standard library only

The command runs in a process of its own, whose pid its status file names; that is the one to kill in tests.
"""

import errno
import json
import os
import signal
import socket
import sys
import time


def client(path: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        call = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(call).encode()], [1, 2])
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile().read()
    return int(answer or 1)


def serve(path: str) -> None:
    import torch  # the imports that make a stage start slowly
    import transformers
    import zarr

    from stages import cli

    for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)  # loaded on use
    zarr.config.get("array")
    for verb in cli.COMMANDS:
        cli.group.get_command(None, verb)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handle(connection, torch, cli)
            os._exit(0)
        connection.close()


def handle(connection: socket.socket, torch, cli) -> None:
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    while more := connection.recv(1 << 20):
        message += more
    call = json.loads(message)
    worker = os.fork()
    if worker == 0:
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        connection.close()
        os.chdir(call["folder"])
        os.environ.clear()
        os.environ.update(call["environment"])
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        sys.argv = ["draftmill", *call["arguments"]]
        if "STAGE_FAULT" in os.environ:
            inject(*os.environ["STAGE_FAULT"].split(":"))
        code = cli.exit_code(call["arguments"])
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    connection.sendall(str(code if code >= 0 else 128 - code).encode())


def inject(fault: str, stage: str, number: str) -> None:
    """Let one fault happen in `stage`, once in all calls: at the sign of life, or the write, of this number."""
    from pipeline.job import Job

    mark, left = os.environ["STAGE_FAULT_DONE"], int(number)
    if sys.argv[1] != stage or os.path.exists(mark):
        return

    def due() -> bool:
        nonlocal left
        left -= 1
        if left >= 0 or os.path.exists(mark):
            return False
        open(mark, "w").close()
        return True

    beat, fsync = Job.beat, os.fsync

    def faulty_beat(self: Job) -> None:
        if due():
            if fault == "memory":
                raise MemoryError
            time.sleep(3600)
        beat(self)

    def faulty_fsync(descriptor: int) -> None:
        if due():
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    if fault == "disk":
        os.fsync = faulty_fsync
    else:
        Job.beat = faulty_beat


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    sys.exit(client(sys.argv[1], sys.argv[2:]))
