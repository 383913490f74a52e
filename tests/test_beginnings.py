"""One rendering of the whole gives the same texts, rows and masks as a rendering for every turn, or is not used."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from data.conversations import Rejected
from data.settings import Data
from data.sources import Chunk
from pipeline.beginnings import reads_in_order
from pipeline.preparer import Preparer
from pipeline.template import Template
from tests.template_kinds import CHATML, KINDS, tokenizer_of
from tests.test_prepare import BAD, GOOD

BODY = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SYSTEM = "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
IN_ORDER = {
    "tail": f"{SYSTEM}{{% set rest = messages[1:] %}}{{% else %}}{{% set rest = messages %}}{{% endif %}}"
    f"{{% for m in rest %}}{BODY}{{% endfor %}}{PROMPT}",
    "filtered": f"{SYSTEM}{{% endif %}}{{% for m in messages if m.role != 'system' %}}{BODY}{{% endfor %}}{PROMPT}",
    "past": "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}"
    f"{{{{ '\n' }}}}{{% endif %}}{{{{ loop.index0 }}}}{BODY}{{% endfor %}}{PROMPT}",
    "macro": f"{{% macro turn(m) %}}{BODY}{{% endmacro %}}{{% for m in messages %}}{{{{ turn(m) }}}}{{% endfor %}}"
    f"{{{{ '<|im_end|>' }}}}{PROMPT}",
    "calls": "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    f"{{{{ call.function.name + ('' if loop.last else ',') }}}}{{% endfor %}}{BODY}{{% endfor %}}{PROMPT}",
}
LOOKING_AHEAD = {
    "last": f"{{% for m in messages %}}{BODY}{{% if loop.last %}}!{{% endif %}}{{% endfor %}}{PROMPT}",
    "length": f"{{% for m in messages %}}{BODY}{{{{ messages | length }}}}{{% endfor %}}{PROMPT}",
    "index": f"{{% for m in messages %}}{BODY}{{{{ messages[loop.index0 - 1].role }}}}{{% endfor %}}{PROMPT}",
    "from-the-end": f"{{{{ messages[-1].role }}}}{{% for m in messages %}}{BODY}{{% endfor %}}{PROMPT}",
    "twice": f"{{% for m in messages %}}x{{% endfor %}}{{% for m in messages %}}{BODY}{{% endfor %}}{PROMPT}",
    "state": "{% set ns = namespace(last='') %}{% for m in messages %}"
    f"{BODY}{{% set ns.last = m.content %}}{{% endfor %}}{{{{ ns.last }}}}{PROMPT}",
    "prompt": f"{{% for m in messages %}}{{{{ 'x' if add_generation_prompt else 'y' }}}}{BODY}{{% endfor %}}{PROMPT}",
    "prompt-in-macro": f"{{% macro turn(m) %}}{{{{ add_generation_prompt }}}}{BODY}{{% endmacro %}}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "reversed": f"{{% for m in messages[::-1] %}}{BODY}{{% endfor %}}{PROMPT}",
    "cut": f"{{% set some = messages[:2] %}}{{% for m in some %}}{BODY}{{% endfor %}}{PROMPT}",
    "tail-of-unknown-length": f"{{% set some = messages[-2:] %}}{{% for m in some %}}{BODY}{{% endfor %}}{PROMPT}",
    "break": f"{{% for m in messages %}}{BODY}{{% if m.role == 'tool' %}}{{% break %}}{{% endif %}}{{% endfor %}}"
    f"{PROMPT}",
    "shortened": "{% set first = messages[0] %}{% set messages = messages[1:] %}{{ messages[0].role }}"
    f"{{% for m in messages %}}{BODY}{{% endfor %}}{PROMPT}",
    "loop-by-another-name": f"{{% for m in messages %}}{{% set l = loop %}}{BODY}{{{{ l.last }}}}{{% endfor %}}"
    f"{PROMPT}",
    "inside": f"{{% if true %}}{{% for m in messages %}}{BODY}{{% endfor %}}{{% endif %}}{PROMPT}",
    "emptiness": f"{{% if messages %}}{{% for m in messages %}}{BODY}{{% endfor %}}{{% endif %}}{PROMPT}",
}
TEXTS = ("a", " b ", "\n\nc", "<think>\nhm\n</think>\n\nd", "é 🙂", "x <|im_end|> y", "the the", "{{ 1 }}")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def template_from(source: str) -> Template:
    template = Template(tokenizer_of("chatml"))
    template.source = source
    return template


def templates() -> Iterator[tuple[str, Template]]:
    yield from ((kind, Template(tokenizer_of(kind))) for kind in KINDS)
    yield from ((name, template_from(source)) for name, source in {**IN_ORDER, **LOOKING_AHEAD}.items())


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(TEXTS)}] * rng.choice((0, 0, 1))
    for _ in range(rng.randint(1, 4)):
        turns += [{"role": "user", "content": rng.choice(TEXTS)}] * rng.choice((1, 1, 1, 2))
        answer = {"role": "assistant", "content": rng.choice(TEXTS)}
        if rng.random() < 0.2:
            turns += [{**answer, "tool_calls": [CALL]}, {"role": "tool", "content": rng.choice(TEXTS)}]
        if rng.random() < 0.2:
            answer["reasoning_content"] = rng.choice(TEXTS)
        turns.append(answer)
    return turns


def said(template: Template, count: int, messages: list[dict[str, Any]], texts: Any, prompt: bool) -> str:
    """A text, or why there is none."""
    try:
        return texts(count, prompt) if texts else template.text(messages[:count], (), prompt)
    except Rejected as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    ("name", "template"), list(templates()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_texts_of_all_beginnings_are_those_rendered_one_by_one(name: str, template: Template) -> None:
    rng = random.Random(name)
    for _ in range(60):
        messages = conversation(rng)
        texts = template.texts(messages)
        for count in range(1, len(messages) + 1):
            for prompt in (False, True):
                assert said(template, count, messages, texts, prompt) == said(template, count, messages, None, prompt)


def test_which_templates_read_in_order() -> None:
    published = {kind: Template(tokenizer_of(kind)).in_order[False] for kind in KINDS}
    assert {kind for kind, in_order in published.items() if not in_order} == {"qwen3", "gpt-oss"}
    assert all(template_from(source).in_order[False] for source in IN_ORDER.values())
    assert not any(template_from(source).in_order[False] for source in LOOKING_AHEAD.values())


@pytest.mark.parametrize(
    "source",
    [
        CHATML.replace("m.content", "strftime_now('%f')"),
        "{% block a %}{% endblock %}" + CHATML,
        CHATML.replace("for m in messages", "for m in messages recursive"),
        CHATML.replace("{% endfor %}", "{% else %}nothing{% endfor %}"),
        "{% set c = cycler('a', 'b') %}" + CHATML.replace("m.content", "c.next()"),
        "{% set other = [] %}{% set messages = other %}" + CHATML,
    ],
)
def test_time_state_and_branches_are_not_in_order(source: str) -> None:
    compiled = template_from(source)._compiled(False)
    assert not reads_in_order(compiled.environment.parse(source))


def rows_of(preparer: Preparer, rows: list[bytes]) -> list[Any]:
    """Everything that is said of rows."""
    kept, dropped = preparer.chunk(Chunk(0, 0, "rows", 0, rows))  # type: ignore[arg-type]
    pieces = [
        (row.row_id, row.notes, [(p.ids.tolist(), p.supervised.tolist(), p.finished, p.turn) for p in row.pieces])
        for row in kept
    ]
    return [pieces, dropped]


@pytest.mark.parametrize("supervise", ["all", "last", "none-of-thinking"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "endless"])
def test_rows_and_masks_are_those_of_the_turn_by_turn_rendering(
    kind: str, supervise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{kind} {supervise}")
    rows = [
        row if isinstance(row, bytes) else json.dumps(row).encode() for row in [*GOOD.values(), *(b for b, _ in BAD)]
    ]
    rows += [
        json.dumps(
            {
                "messages": conversation(rng),
                "tools": [CALL] * rng.choice((0, 1)),
                "finished": rng.choice((True, False, None)),
            }
        ).encode()
        for _ in range(60)
    ]
    settings = Data.model_validate({"train": [{"path": "-"}], "max_length": 128, "supervise": supervise})
    preparer = Preparer(tokenizer_of(kind), settings)
    quick = rows_of(preparer, rows)
    monkeypatch.setattr(preparer, "template", Template(tokenizer_of(kind)))
    monkeypatch.setattr(preparer.template, "in_order", {False: False, True: False})
    assert rows_of(preparer, rows) == quick
    assert sum(map(len, quick)) == len(rows)
    assert kind == "forgetful" or any(np.any(piece[1]) for row in quick[0] for piece in row[2])
