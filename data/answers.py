"""Answers as they arrive, kept in a file that survives any death: what is answered once is never asked again."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Reply:
    """An answer's token ids; `finished`: it ends in its end of turn; `retokenised`: it came as text."""

    ids: tuple[int, ...]
    finished: bool
    retokenised: bool = False


class AnswerLog:
    """Replies by question, one JSON line each. Lines that a kill cut off, and logs made from other settings, count for
    nothing."""

    def __init__(self, path: Path, made_from: str) -> None:
        self.path = path
        self.made_from = made_from
        self.replies: dict[str, Reply] = {}

    def __enter__(self) -> AnswerLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._read()
        self._file = self.path.open("r+b" if whole else "wb")
        self._file.seek(whole)
        self._file.truncate()
        if not whole:
            self._write({"made_from": self.made_from})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.sync()
        self._file.close()

    def _read(self) -> int:
        """Load replies; returns the bytes that are whole lines of this log, 0 when it is another's."""
        if not self.path.exists():
            return 0
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                try:
                    body = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    body = None
                if body is None or (whole == 0 and body.get("made_from") != self.made_from):
                    break
                if whole:
                    self.replies[body["key"]] = Reply(tuple(body["ids"]), body["finished"], body["retokenised"])
                whole += len(line)
        return whole

    def add(self, key: str, reply: Reply) -> None:
        self.replies[key] = reply
        self._write({"key": key, "ids": reply.ids, "finished": reply.finished, "retokenised": reply.retokenised})
        self._file.flush()  # a killed process loses none; a power cut, those since `sync`

    def _write(self, body: dict[str, object]) -> None:
        self._file.write(json.dumps(body, separators=(",", ":")).encode() + b"\n")

    def sync(self) -> None:
        """Make all replies so far durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
