"""The text of every beginning of a conversation from one rendering of the whole, for templates that read in order.

Such a template looks at `messages` in one loop at its top level and nowhere else, but for the first message; it keeps
no state across turns, never looks ahead, and minds the generation prompt behind the loop only. What it prints for the
first n messages is then, by how Jinja runs, what it has printed for all of them when it takes message n, followed by
what it prints behind the loop. Whether a template is of this kind is read off its syntax tree; what is not plainly so
is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

from jinja2 import Template as Compiled
from jinja2 import nodes

Message = Mapping[str, Any]

LOOP = {"first", "index", "index0", "previtem"}
"""What a turn may ask its loop without looking ahead."""
STATEFUL = {"namespace", "cycler", "joiner", "lipsum", "strftime_now", "self", "caller"}
"""Names through which a turn could reach what comes after it, or time and chance could enter."""
REFUSED = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.NSRef)


def reads_in_order(template: nodes.Template) -> bool:
    """Whether a parsed template is of this kind."""
    names = {name.name for name in template.find_all(nodes.Name)}
    if names & STATEFUL or any(True for _ in template.find_all(REFUSED)):
        return False
    aliases = {"messages"} | {a.target.name for a in template.find_all(nodes.Assign) if _is_tail(a)}
    loops = [node for node in template.body if isinstance(node, nodes.For) and _named(node.iter, aliases)]
    if len(loops) != 1 or not _takes_each_once(loops[0]):
        return False
    until = template.body[: template.body.index(loops[0]) + 1]
    if any(name.name == "add_generation_prompt" for node in until for name in _names(node)):
        return False
    allowed = {id(loops[0].iter)}
    allowed |= {id(node) for assign in template.find_all(nodes.Assign) if _is_tail(assign) for node in _names(assign)}
    reassigned = any(name.name == "messages" and name.ctx != "load" for name in template.find_all(nodes.Name))
    if not reassigned:
        allowed |= {id(item.node) for item in template.find_all(nodes.Getitem) if _is_first(item)}
    mentions = [name for name in template.find_all(nodes.Name) if name.name in aliases]
    return all(id(name) in allowed for name in mentions) and not _assigns_in(loops[0], aliases)


def _is_tail(assign: nodes.Assign) -> bool:
    """`set x = messages`, or `= messages[1:]` and the like."""
    value = assign.node
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        cut = value.arg
        start = cut.start is None or (isinstance(cut.start, nodes.Const) and type(cut.start.value) is int)
        if not start or cut.stop is not None or cut.step is not None or (cut.start and cut.start.value < 0):
            return False
        value = value.node
    return isinstance(assign.target, nodes.Name) and _named(value, {"messages"})


def _is_first(item: nodes.Getitem) -> bool:
    return _named(item.node, {"messages"}) and isinstance(item.arg, nodes.Const) and item.arg.value == 0


def _named(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    return node.find_all(nodes.Name)


def _assigns_in(loop: nodes.For, aliases: set[str]) -> bool:
    return any(name.name in aliases and name is not loop.iter for name in _names(loop) if name.ctx != "load")


def _takes_each_once(loop: nodes.For) -> bool:
    """No look ahead through `loop`, no early end, no second branch."""
    if loop.recursive or loop.else_ or any(type(node).__name__ == "Break" for node in loop.find_all(nodes.Stmt)):
        return False
    parts = [*loop.body, *([loop.test] if loop.test is not None else [])]
    return all(_asks_loop_for_past(node) for node in parts)


def _asks_loop_for_past(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr) and _named(node.node, {"loop"}):
        return node.attr in LOOP
    if _named(node, {"loop"}):
        return False
    inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()  # an inner loop has its own `loop`
    return all(_asks_loop_for_past(child) for child in inner)


class Turns(Sequence[Message]):
    """Messages that note in `taken` how many `chunks` of text there were when each was asked for, the end included."""

    def __init__(self, messages: Sequence[Message], chunks: list[str], taken: list[int]) -> None:
        self.messages, self.chunks, self.taken = messages, chunks, taken

    def __len__(self) -> int:
        return len(self.messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Turns: ...
    def __getitem__(self, index: int | slice) -> Message | Turns:
        if isinstance(index, slice):
            return Turns(self.messages[index], self.chunks, self.taken)
        return self.messages[index]

    def __iter__(self) -> Iterator[Message]:
        for message in self.messages:
            self.taken.append(len(self.chunks))
            yield message
        self.taken.append(len(self.chunks))


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation; `edges` are where in its text each message was taken, and where none was left."""

    text: str
    edges: list[int]

    @classmethod
    def of(cls, compiled: Compiled, messages: Sequence[Message], values: Mapping[str, Any]) -> Rendering:
        chunks: list[str] = []
        taken: list[int] = []
        context = compiled.new_context({**values, "messages": Turns(messages, chunks, taken)})
        for chunk in compiled.root_render_func(context):
            chunks.append(chunk)
        ends = [0, *accumulate(map(len, chunks))]
        return cls("".join(chunks), [ends[count] for count in taken])


def beginnings(
    compiled: Compiled, messages: Sequence[Message], values: Mapping[str, Any]
) -> Callable[[int, bool], str] | None:
    """For a template that reads in order: `f(n, prompt)` is the text of the first n >= 1 messages, with the generation
    prompt if `prompt`. None when no message was taken.

    Raises what the template raises.
    """
    whole = Rendering.of(compiled, messages, {**values, "add_generation_prompt": False})
    first = Rendering.of(compiled, messages[:1], {**values, "add_generation_prompt": True})
    if not whole.edges:
        return None
    skipped = len(messages) + 1 - len(whole.edges)
    behind = {False: whole.text[whole.edges[-1] :], True: first.text[first.edges[-1] :]}

    def text(count: int, prompt: bool) -> str:
        return whole.text[: whole.edges[max(count - skipped, 0)]] + behind[prompt]

    return text
