"""Chat templates: prompts as the target is served them, and rows whose supervised mask is verified, not guessed.

An answer is supervised where all of this holds: the conversation rendered up to the answer, with the generation prompt,
is how the text rendered with the answer begins; the answer's own text is in what follows; a special token ends it; and
tokens before it are those that the prompt alone has. A template that rewrites history (drops thinking of earlier
turns, say) makes earlier answers rows of their own. `{% generation %}` marks are used where the template has them.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from data.conversations import REASONS, Rejected
from data.errors import BadInput
from pipeline.beginnings import beginnings, reads_in_order
from pipeline.encoding import Draft, Encoder, Rendered, sha256, tokenizer_hash
from pipeline.thinking import FINAL, MARKS, THINKING, literal_thinking, without_thinking

Supervise = Literal["all", "last", "none-of-thinking"]
Messages = Sequence[Mapping[str, Any]]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
OURS = {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "sanitize_control_tokens", "conversation", "messages"}  # fmt: skip
"""Names that `template_arguments` may not use."""
PROBE = "zyx"
"""An answer that no template prints by itself."""


@dataclass(frozen=True)
class Answer:
    """Text rendered up to and with an answer; the answer with its end of turn is `text[start:end]`.

    `body` is where the end of turn begins; `number` counts the answers of a conversation from 0.
    """

    text: str
    start: int
    body: int
    end: int
    number: int


class Template:
    """A tokenizer's chat template with its arguments.

    Raises BadInput when there is none, or when an argument's name is taken.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        if not tokenizer.chat_template:
            raise BadInput(
                f"target {tokenizer.name_or_path}: its tokenizer has no chat template; take an instruction-tuned one, "
                "or bring rows as `text` or `token_ids`"
            )
        if taken := OURS & set(self.arguments):
            raise BadInput(f"data.template_arguments: `{min(taken)}` is set by draftmill; remove it")
        self.source: str = tokenizer.get_chat_template()
        self.encoder = Encoder(tokenizer)
        self.encode, self.decode = self.encoder.encode, self.encoder.decode
        longest_first = sorted(self.encoder.specials.values(), key=len, reverse=True)
        self.special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._values = {**tokenizer.special_tokens_map, **self.arguments}

    def text(self, messages: Messages, tools: Sequence[Any] = (), prompt: bool = False) -> str:
        """Rendered conversation, with the generation prompt if `prompt`.

        Raises Rejected with the template's own words when it refuses.
        """
        with refusals():
            return self._compiled(bool(tools)).render(
                messages=list(map(with_thinking_names, messages)),
                add_generation_prompt=prompt,
                **self._shared(tools),
            )

    def _shared(self, tools: Sequence[Any]) -> dict[str, Any]:
        return {"tools": list(tools) or None, "documents": None, **self._values}

    def texts(self, messages: Messages, tools: Sequence[Any] = ()) -> Callable[[int, bool], str]:
        """`f(n, prompt)` is `text(messages[:n], tools, prompt)`: rendered when asked for, or one rendering for all
        where the template reads in order.
        """
        compiled, found = self._compiled(bool(tools)), None
        if self.in_order[bool(tools)]:
            with suppress(Rejected), refusals():  # what is refused on the way is refused again, in the order of turns
                found = beginnings(compiled, list(map(with_thinking_names, messages)), self._shared(tools))
        return found or (lambda count, prompt: self.text(messages[:count], tools, prompt))

    @cached_property
    def in_order(self) -> dict[bool, bool]:
        """Whether the template reads in order, without and with tools."""
        sources = {False: self.source, True: self.tokenizer.get_chat_template(tools=[{}])}
        return {tools: reads_in_order(self._compiled(tools).environment.parse(sources[tools])) for tools in sources}

    def marked_text(self, messages: Messages, tools: Sequence[Any] = ()) -> tuple[str, list[tuple[int, int]]]:
        """Rendered conversation, and the spans that the template marks as generated.

        Raises Rejected when the template refuses.
        """
        with refusals():
            texts, spans = render_jinja_template(
                [list(map(with_thinking_names, messages))],
                tools=list(tools) or None,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **self._values,
            )
        return texts[0], spans[0]

    def _compiled(self, tools: bool) -> Any:
        """transformers' sandboxed template; some tokenizers have another one for tools."""
        return self._compiled_for_tools if tools else self._compiled_plain

    @cached_property
    def _compiled_plain(self) -> Any:
        return _compile_jinja_template(self.source)

    @cached_property
    def _compiled_for_tools(self) -> Any:
        return _compile_jinja_template(self.tokenizer.get_chat_template(tools=[{}]))

    def prompt(self, messages: Messages, tools: Sequence[Any] = ()) -> list[int]:
        """Ids that the target is given to answer `messages`."""
        return self.encode(self.text(messages, tools, prompt=True))

    def end_of_turn(self) -> int:
        """Id that ends an answer.

        Raises BadInput when the template does not end answers with a special token.
        """
        try:
            after = self._after_answer(prompt=False)
            body, end = self._end_of_turn(after, 0, len(after) - len(self.closing))
        except Rejected as error:
            raise BadInput(
                f"chat template of {self.tokenizer.name_or_path}: {REASONS[error.reason]}: {error}"
            ) from None
        return self.encode(after[body:end])[-1]

    def _after_answer(self, prompt: bool) -> str:
        """What stands behind an answer, with the generation prompt if `prompt`.

        Raises Rejected.
        """
        text = self.text([{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}], prompt=prompt)
        if PROBE not in text:
            raise Rejected("answer_not_rendered", repr(text[-60:]))
        return text.rpartition(PROBE)[2]

    @cached_property
    def closing(self) -> str:
        """What the template puts behind the end of turn where a conversation ends and nowhere else: no target says it
        (Phi's `<|endoftext|>` after `<|end|>`)."""
        try:
            alone, followed = self._after_answer(prompt=False), self._after_answer(prompt=True)
        except Rejected:
            return ""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, followed, strict=False)))
        ends = [mark.end() for mark in self.special_text.finditer(alone) if mark.end() <= same]
        return alone[ends[-1] :] if ends and same < len(alone) else ""

    def visible(self, ids: Sequence[int]) -> str:
        """An answer as its author would send it back in the next request: what follows gpt-oss's analysis, and of
        special tokens only those around thinking, which templates know by them."""
        text = self.decode(list(ids)).rpartition(FINAL)[2]
        return self.special_text.sub(lambda token: token[0] if token[0] in MARKS else "", text)

    def rows(
        self, messages: Messages, tools: Sequence[Any] = (), supervise: Supervise = "all", finished: bool = True
    ) -> list[Rendered]:
        """Rows of a conversation that ends in an answer: one, or more where the template rewrites history.

        `finished` False: the last answer was cut off; the row then ends in its last token.
        Raises Rejected when a mask cannot be derived.
        """
        return self.encoded(self.drafts(messages, tools, supervise, finished))

    def encoded(self, drafts: Sequence[Draft]) -> list[Rendered]:
        """Rows of drafts.

        Raises Rejected when one cannot be encoded.
        """
        rows = []
        for row in self.encoder.rendered(drafts):
            if isinstance(row, Rejected):
                raise row
            rows.append(row)
        return rows

    def drafts(
        self, messages: Messages, tools: Sequence[Any] = (), supervise: Supervise = "all", finished: bool = True
    ) -> list[Draft]:
        """The rows of `rows`, not encoded yet."""
        if not messages or messages[-1]["role"] != "assistant":
            raise Rejected("no_answer")
        answers = self.answers(messages, tools, last=supervise == "last")
        drafts = []
        for group in grouped(answers):
            last = group[-1]
            whole = last is answers[-1]
            ended = finished or not whole
            text = last.text[: last.end if ended else last.body]
            spans = [(a.start, a.end if a is not last or ended else a.body) for a in group]
            if supervise == "none-of-thinking":
                spans = [piece for span in spans for piece in without_thinking(text, *span)]
            notes = lost_reasoning(messages[-1], text) if whole else ("history_rewritten",)
            drafts.append(Draft(text, tuple(spans), ended, None if whole else last.number, notes))
        return drafts

    def continued(
        self,
        messages: Messages,
        answer: np.ndarray,
        tools: Sequence[Any] = (),
        supervise: Supervise = "all",
        finished: bool = True,
    ) -> Draft:
        """The row in which `messages` are answered by ids that are used as they are, int32 [N].

        Earlier answers are supervised too under `all`, where the prompt leaves them as they were.
        """
        prompt = self.text(messages, tools, prompt=True)
        earlier = []
        if supervise != "last" and any(message["role"] == "assistant" for message in messages):
            last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
            found = self.answers(messages[: last + 1], tools)
            earlier = [(a.start, a.end) for a in found if prompt.startswith(a.text[: a.end])]
            if supervise == "none-of-thinking":
                earlier = [piece for span in earlier for piece in without_thinking(prompt, *span)]
        own = np.ones(len(answer), bool) if supervise != "none-of-thinking" else self.not_thinking(answer, prompt)
        return Draft(prompt, tuple(earlier), finished, tail=answer, tail_mask=own)

    def not_thinking(self, answer: np.ndarray, prompt: str) -> np.ndarray:
        """Mask bool [N] of answer ids that are not thinking, which `prompt` may have opened.

        Raises Rejected when a token holds both.
        """
        ids = answer.tolist()
        text = self.decode(ids)
        counts, mask = range(len(ids) + 1), np.zeros(len(ids), bool)

        def length(count: int) -> int:
            return len(self.decode(ids[:count]))

        for start, end in without_thinking(text, 0, len(text), prompt):
            first, last = bisect_left(counts, start, key=length), bisect_right(counts, end, key=length) - 1
            if (length(first), length(last)) != (start, end):
                raise Rejected("thinking_open", "a token holds the end of thinking and the begin of the answer")
            mask[first:last] = True
        return mask

    def answers(self, messages: Messages, tools: Sequence[Any] = (), last: bool = False) -> list[Answer]:
        """Answers of a conversation (only the last one if `last`), each located and checked.

        Raises Rejected.
        """
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise Rejected("no_answer")
        if GENERATION.search(self.source):
            found = self._marked(messages, tools, places)
        else:
            texts = self.texts(messages[: places[-1] + 1], tools)
            numbered = list(enumerate(places))[-1 if last else 0 :]
            found = [
                self._located(messages[i], texts(i, True), texts(i + 1, False).removesuffix(self.closing), number)
                for number, i in numbered
            ]
        require_rendered(messages[: places[-1]], found[-1].text)
        return found[-1:] if last else found

    def _located(self, message: Mapping[str, Any], before: str, text: str, number: int) -> Answer:
        """The answer `message` in the text rendered up to it, which the prompt `before` must begin."""
        thinking = literal_thinking(message)
        if thinking and thinking.strip() not in text:
            text = self._as_generated(message["content"], before, text)
        if not text.startswith(before):
            raise Rejected("prompt_not_prefix", f"answer {number}: ...{before[-60:]!r}")
        require_answer(message, text[len(before) :])
        body, end = self._end_of_turn(text, len(before), len(text))
        return Answer(text, len(before), body, end, number)

    def _as_generated(self, content: str, before: str, rendered: str) -> str:
        """An answer whose thinking the template strips, as the target generates it: behind the prompt, word for word.

        Where the prompt opens the thinking, the content's own opening is not repeated.
        """
        answer = rendered.rfind(content.rpartition(">")[2].strip())
        body, end = self._end_of_turn(rendered, max(answer, 0), len(rendered))
        opening = next((o for o, _ in THINKING if content.lstrip().startswith(o)), "")
        if opening and before.rstrip().endswith(opening):
            opened = before[before.rindex(opening) :]
            if not content.lstrip().startswith(opened):
                raise Rejected("thinking_open", f"the prompt opens with {opened!r}, the answer does not")
            content = content.lstrip()[len(opened) :]
        return before + content + rendered[body:end]

    def _end_of_turn(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Where the end-of-turn token of the answer `text[start:stop]` begins and ends: its last special token."""
        marks = list(self.special_text.finditer(text, start, stop))
        if not marks or text[marks[-1].end() : stop].strip():
            raise Rejected("no_end_of_turn", repr(text[start:stop][-60:]))
        body, end = marks[-1].span()
        if text.find(text[body:end], start, body) >= 0:
            raise Rejected("end_inside_answer", text[body:end])
        return body, end

    def _marked(self, messages: Messages, tools: Sequence[Any], places: list[int]) -> list[Answer]:
        """Answers as the template's own `{% generation %}` marks give them, with their end of turn."""
        text, spans = self.marked_text(messages, tools)
        spans = [span for span in spans if text[slice(*span)].strip()]
        if len(spans) != len(places):
            raise Rejected("answer_not_rendered", f"{len(places)} answers, {len(spans)} marked by the template")
        found = []
        for number, ((start, stop), place) in enumerate(zip(spans, places, strict=True)):
            require_answer(messages[place], text[start:stop])
            follows = self.special_text.match(text, stop)
            marked_end = re.search(rf"(?:{self.special_text.pattern})\s*\Z", text[start:stop])
            stop = stop if marked_end or not follows else follows.end()
            found.append(Answer(text, start, *self._end_of_turn(text, start, stop), number))
        return found

    def record(self) -> dict[str, Any]:
        """What shaped the ids: hashes of template and tokenizer, and the arguments."""
        return {
            "template": sha256(self.source),
            "tokenizer": tokenizer_hash(self.tokenizer),
            "arguments": self.arguments,
        }


@contextmanager
def refusals() -> Iterator[None]:
    """What a template raises, in its own words, as a reason to drop the row."""
    try:
        yield
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Rejected("template_error", " ".join(str(error).split())[:200]) from None


def with_thinking_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Thinking under every name that templates read it by."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, "reasoning": reasoning, **message}


def lost_reasoning(message: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """A note when the template does not print an answer's reasoning."""
    return ("reasoning_not_rendered",) if message.get("reasoning_content", "").strip() not in text else ()


def grouped(answers: list[Answer]) -> list[list[Answer]]:
    """Answers that fit into one row together: those that the later rendering leaves as they were."""
    groups: list[list[Answer]] = []
    for answer in reversed(answers):
        home = next((g for g in reversed(groups) if g[-1].text.startswith(answer.text[: answer.end])), None)
        if home is None:
            groups.append([answer])
        else:
            home.insert(0, answer)
    return groups[::-1]


def require_rendered(messages: Messages, text: str) -> None:
    """Refuse a template that loses what users, tools or the system said."""
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant" or content in text:
            continue
        if json.dumps(content)[1:-1] in text or json.dumps(content, ensure_ascii=False)[1:-1] in text:
            continue
        raise Rejected("content_not_rendered", f"{message['role']}: {content[:60]!r}")


def require_answer(message: Mapping[str, Any], rendered: str) -> None:
    """Refuse a template that loses the answer: its text after any thinking, or the names of its tool calls."""
    content = message["content"]
    for _, close in THINKING:
        content = content.rpartition(close)[2]
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    for wanted in (content.strip(), *names):
        if wanted not in rendered:
            raise Rejected("answer_not_rendered", repr(wanted[:60]))


_templates: dict[tuple[int, str], Template] = {}


def template_of(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Template:
    """The template of a tokenizer, made once for the same arguments."""
    key = (id(tokenizer), json.dumps(arguments, sort_keys=True, default=str))
    if key not in _templates or _templates[key].tokenizer is not tokenizer:
        _templates[key] = Template(tokenizer, arguments)
    return _templates[key]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, arguments: Mapping[str, Any], tools: Sequence[Any] = ()
) -> list[int]:
    """Ids that the target is given to answer `messages`: one BOS at most, the generation prompt at the end."""
    return template_of(tokenizer, arguments).prompt(messages, tools)


def template_record(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of template and tokenizer, and the arguments: what manifests keep."""
    return template_of(tokenizer, arguments).record()
