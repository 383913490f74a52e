"""A conversation while the target answers it, turn after turn. Ids are kept as ids.

The next question continues the ids of the row so far: only the text that the template puts behind the last answer is
encoded. Where the template renders the history otherwise (drops thinking, trims), the row ends and a new one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.conversations import Rejected, asked, with_system
from data.parts import Prompt
from data.settings import Data
from pipeline.encoding import Rendered
from pipeline.template import Template


class Dialogue:
    """Call `question` and `answer` in turn until `question` gives None; then `rows` has the token rows."""

    def __init__(self, template: Template, prompt: Prompt, settings: Data) -> None:
        self.template = template
        self.row_id = prompt.row_id
        self.number = prompt.number
        self.settings = settings
        self.conversation = with_system(prompt.conversation, settings.system_prompt)
        self.waiting = list(asked(self.conversation))
        self.history: list[dict[str, Any]] = []
        self.turn = -1
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.text = ""
        self.closed: list[Rendered] = []
        self.finished = True
        self.notes: list[str] = []

    @property
    def key(self) -> str:
        """Names the question that is open: row id and number of the turn."""
        return f"{self.row_id}@{self.turn}"

    def question(self) -> Sequence[int] | None:
        """Ids that the target answers next; None when there is nothing more to ask.

        Raises Rejected when the template refuses.
        """
        if not self.waiting or not self.finished:
            self.notes += ["turns_not_answered"] * bool(self.waiting)
            self.waiting.clear()
            return None
        turn = self.waiting[0]
        text = self.template.text([*self.history, *turn], self.conversation.tools, prompt=True)
        continues = self.turn >= 0 and text.startswith(self.text)
        new = self.template.encode(text[len(self.text) :] if continues else text)
        if len(new) + len(self.ids) * continues + self.settings.min_supervised > self.settings.max_length:
            self.notes.append("turns_not_answered")
            self.waiting.clear()
            return None
        if not continues:
            self._close()
        del self.waiting[0]
        self.history += turn
        self.ids += new
        self.mask += [False] * len(new)
        self.text = text
        self.turn += 1
        return self.ids

    def room(self) -> int:
        """Most tokens that the open question's answer may have."""
        return min(self.settings.regenerate.max_new_tokens, self.settings.max_length - len(self.ids))

    def answer(self, ids: Sequence[int], finished: bool) -> None:
        """Take the reply to the open question, int [N]; the end of turn is its last id when `finished`."""
        if not finished and self.settings.regenerate.unfinished == "cut":
            self.notes.append("unfinished_answer_cut")
            self.finished = False
            return
        supervised = np.ones(len(ids), bool)
        if self.settings.supervise == "none-of-thinking":
            supervised = self.template.not_thinking(np.asarray(ids, np.int32), self.text)
        self.ids += ids
        self.mask += supervised.tolist()
        self.text += self.template.decode(list(ids))
        self.history.append({"role": "assistant", "content": self.template.visible(ids)})
        self.finished = finished

    def _close(self) -> None:
        """End the row that has been built, if any answer is in it."""
        if any(self.mask):
            ids, mask = np.asarray(self.ids, np.int32), np.asarray(self.mask, bool)
            last = int(np.flatnonzero(mask)[-1]) + 1  # a question that was not answered is no part of the row
            turn = None if not self.closed else self.turn
            self.closed.append(Rendered(ids[:last], mask[:last], self.finished, turn))
        self.ids, self.mask, self.text = [], [], ""

    def rows(self) -> list[Rendered]:
        """Token rows of the conversation.

        Raises Rejected when none is usable.
        """
        if not self.finished and self.settings.regenerate.unfinished == "drop":
            raise Rejected("unfinished")
        if self.settings.supervise == "last" and self.ids:
            self.closed.clear()
        self._close()
        rows = self.closed
        if self.settings.supervise == "last":
            rows = [only_last(row) for row in rows[-1:]]
        if not rows:
            raise Rejected("unfinished" if "unfinished_answer_cut" in self.notes else "no_answer")
        return rows


def only_last(row: Rendered) -> Rendered:
    """The row with its last answer supervised alone."""
    mask = row.supervised.copy()
    gaps = np.flatnonzero(~mask)
    mask[: gaps[-1] + 1 if len(gaps) else 0] = False
    return Rendered(row.ids, mask, row.finished, None, row.notes)
