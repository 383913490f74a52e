"""Masks of published kinds of chat templates: right to the token, or refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from data.conversations import Rejected
from data.errors import BadInput
from pipeline.encoding import Rendered
from pipeline.template import Template, render_prompt
from tests.template_kinds import tokenizer_of

ASK = {"role": "user", "content": "What is 2+2?"}
SAY = {"role": "assistant", "content": "It is 4."}
MORE = {"role": "user", "content": "And 3+3?"}
LAST = {"role": "assistant", "content": "It is 6."}
TWO_TURNS = [ASK, SAY, MORE, LAST]

PLAIN = ["chatml", "llama3", "gemma", "mistral", "marked", "phi3"]
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "marked": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gpt-oss": "<|return|>",
    "deepseek-r1": "<|eos|>",
    "phi3": "<|end|>",
}


def template_of(kind: str, **arguments: Any) -> Template:
    return Template(tokenizer_of(kind), arguments)


def supervised(template: Template, row: Rendered) -> list[str]:
    """Supervised runs as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.supervised.astype(int), [0]])))
    return [template.decode(row.ids[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("kind", PLAIN)
def test_every_answer_is_supervised_with_its_end_of_turn(kind: str) -> None:
    template = template_of(kind)
    (row,) = template.rows(TWO_TURNS)
    space = " " if kind == "mistral" else ""
    assert supervised(template, row) == [f"{space}It is 4.{ENDS[kind]}", f"{space}It is 6.{ENDS[kind]}"]
    assert row.finished
    assert row.supervised[-1]


@pytest.mark.parametrize("kind", [*PLAIN, "qwen3"])
def test_what_precedes_an_answer_is_the_prompt_that_is_served(kind: str) -> None:
    template = template_of(kind)
    (row,) = template.rows([ASK, SAY])
    prompt = render_prompt(tokenizer_of(kind), [ASK], {})
    assert row.ids[: len(prompt)].tolist() == prompt
    assert not row.supervised[: len(prompt)].any()
    assert row.supervised[len(prompt)]


@pytest.mark.parametrize("kind", ["llama3", "gemma", "mistral"])
def test_one_bos_only(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = render_prompt(tokenizer, [ASK], {})
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("kind", PLAIN)
def test_an_unfinished_answer_ends_in_its_last_token(kind: str) -> None:
    template = template_of(kind)
    (row,) = template.rows(TWO_TURNS, finished=False)
    assert not row.finished
    assert row.supervised[-1]
    assert supervised(template, row)[-1].strip() == "It is 6."
    assert supervised(template, row)[0].endswith(ENDS[kind])


def test_last_supervises_one_answer() -> None:
    template = template_of("chatml")
    (row,) = template.rows(TWO_TURNS, supervise="last")
    assert supervised(template, row) == ["It is 6.<|im_end|>"]


def test_an_answer_that_begins_with_newlines_keeps_the_served_prompt() -> None:
    template = template_of("chatml")
    (row,) = template.rows([ASK, {"role": "assistant", "content": "\nwell"}])
    prompt = render_prompt(tokenizer_of("chatml"), [ASK], {})
    assert row.ids[: len(prompt)].tolist() == prompt
    assert supervised(template, row) == ["\nwell<|im_end|>"]


def test_non_ascii_text_is_masked_by_token() -> None:
    template = template_of("chatml")
    (row,) = template.rows([{"role": "user", "content": "né 🙂"}, {"role": "assistant", "content": "日本語 🙂é"}])
    assert supervised(template, row) == ["日本語 🙂é<|im_end|>"]


def test_qwen3_earlier_thinking_makes_rows_of_their_own() -> None:
    template = template_of("qwen3")
    think = [
        ASK,
        {**SAY, "reasoning_content": "two and two"},
        MORE,
        {**LAST, "content": "<think>\nhm\n</think>\n\nIt is 6."},
    ]
    first, whole = template.rows(think)
    assert first.turn == 0
    assert supervised(template, first) == ["<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>"]
    assert whole.turn is None
    assert supervised(template, whole) == ["<think>\nhm\n</think>\n\nIt is 6.<|im_end|>"]
    assert "two and two" not in template.decode(whole.ids.tolist())


def test_qwen3_inserted_empty_thinking_belongs_to_the_prompt_when_thinking_is_off() -> None:
    template = template_of("qwen3", enable_thinking=False)
    (row,) = template.rows([ASK, SAY])
    assert supervised(template, row) == ["It is 4.<|im_end|>"]
    assert "<think>\n\n</think>\n\nIt is 4." in template.decode(row.ids.tolist())


def test_none_of_thinking_leaves_thinking_out() -> None:
    template = template_of("qwen3")
    (row,) = template.rows([ASK, {**SAY, "reasoning_content": "two and two"}], supervise="none-of-thinking")
    assert supervised(template, row) == ["\n\nIt is 4.<|im_end|>"]


def test_qwen3_tool_calls_are_supervised_and_results_are_not() -> None:
    template = template_of("qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rows = template.rows(
        [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}, SAY]
    )
    texts = [text for row in rows for text in supervised(template, row)]
    assert any('"name": "add"' in text and text.endswith("<|im_end|>") for text in texts)
    assert any(text.endswith("It is 4.<|im_end|>") for text in texts)
    assert not any("tool_response" in text for text in texts)


def test_gpt_oss_channels() -> None:
    template = template_of("gpt-oss")
    first, whole = template.rows([ASK, SAY, MORE, {**LAST, "reasoning_content": "sum"}])
    assert supervised(template, first) == ["<|channel|>final<|message|>It is 4.<|return|>"]
    assert supervised(template, whole) == [
        "<|channel|>analysis<|message|>sum<|end|><|start|>assistant<|channel|>final<|message|>It is 6.<|return|>"
    ]


def test_gpt_oss_without_thinking() -> None:
    template = template_of("gpt-oss")
    (row,) = template.rows([ASK, {**SAY, "reasoning_content": "sum"}], supervise="none-of-thinking")
    assert supervised(template, row) == ["<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"]


def test_thinking_that_the_template_strips_is_put_back_as_it_is_generated() -> None:
    template = template_of("deepseek-r1")
    (row,) = template.rows([ASK, {**SAY, "content": "<think>\nhm\n</think>\n\nIt is 4."}])
    assert supervised(template, row) == ["hm\n</think>\n\nIt is 4.<|eos|>"]
    prompt = render_prompt(tokenizer_of("deepseek-r1"), [ASK], {})
    assert row.ids[: len(prompt)].tolist() == prompt


def test_an_answer_without_the_thinking_that_the_prompt_opens_is_refused() -> None:
    with pytest.raises(Rejected, match="prompt_not_prefix"):
        template_of("deepseek-r1").rows([ASK, SAY])


@pytest.mark.parametrize(
    ("kind", "messages", "reason"),
    [
        ("endless", [ASK, SAY], "no_end_of_turn"),
        ("forgetful", [ASK, SAY], "answer_not_rendered"),
        ("gemma", [{"role": "system", "content": "Be brief."}, ASK, SAY], "template_error"),
        ("gemma", [ASK, MORE, SAY], "template_error"),
        ("mistral", [{"role": "system", "content": "Be brief."}, ASK, SAY], "content_not_rendered"),
        ("chatml", [ASK, {"role": "assistant", "content": "a<|im_end|>b"}], "end_inside_answer"),
        ("chatml", [ASK], "no_answer"),
    ],
)
def test_a_mask_that_cannot_be_derived_is_refused(kind: str, messages: list[dict[str, str]], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        template_of(kind).rows(messages)


@pytest.mark.parametrize("kind", ["qwen3", "marked"])
def test_arguments_that_no_template_can_print_refuse_the_row(kind: str) -> None:
    inner: dict[str, Any] = {}
    for _ in range(5000):
        inner = {"a": inner}
    call = {"type": "function", "function": {"name": "f", "arguments": inner}}
    with pytest.raises(Rejected, match=r"template_error|answer_not_rendered"):
        template_of(kind).rows([ASK, {**SAY, "tool_calls": [call]}])


def test_answer_ids_are_used_as_they_are() -> None:
    template = template_of("chatml")
    odd = np.array([*map(ord, "th"), tokenizer_of("chatml").eos_token_id], np.int32)
    (row,) = template.encoded([template.continued([ASK], odd)])
    assert row.ids[-3:].tolist() == odd.tolist()
    assert row.supervised.sum() == 3


def test_long_thinking_is_masked_in_few_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template(tokenizer_of("qwen3"))
    counts: list[int] = []
    decode = template.decode
    monkeypatch.setattr(template, "decode", lambda ids: counts.append(len(ids)) or decode(ids))
    ids = template.encode("<think>\n" + "né " * 2000 + "</think>\n\nthe end 🙂")
    mask = template.not_thinking(np.asarray(ids, np.int32), "")
    assert decode([token for token, kept in zip(ids, mask, strict=True) if kept]) == "\n\nthe end 🙂"
    assert len(counts) < 60


def test_an_answer_is_sent_back_without_its_thinking_or_with_marks_that_templates_know() -> None:
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
    template = template_of("gpt-oss")
    assert template.visible(template.encode(said)) == "It is 4."
    tokenizer = copy.deepcopy(tokenizer_of("gemma"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|channel>", "<channel|>"]})
    template = Template(tokenizer)
    said = "<|channel>thought\nhm\n<channel|>It is 4."
    assert template.visible(template.encode(f"{said}<end_of_turn>")) == said
    mask = template.not_thinking(np.asarray(template.encode(said), np.int32), "")
    assert template.decode(np.asarray(template.encode(said))[mask].tolist()) == "It is 4."


def test_end_of_turn_is_derived() -> None:
    for kind, end in ENDS.items():
        tokenizer = tokenizer_of(kind)
        assert template_of(kind).end_of_turn() == tokenizer.convert_tokens_to_ids(end)


def test_record_follows_template_and_arguments() -> None:
    plain, off = template_of("qwen3").record(), template_of("qwen3", enable_thinking=False).record()
    assert plain["template"] == off["template"]
    assert plain["arguments"] != off["arguments"]
    assert plain["template"] != template_of("chatml").record()["template"]


def test_taken_argument_names_are_refused() -> None:
    with pytest.raises(BadInput, match="add_generation_prompt"):
        template_of("chatml", add_generation_prompt=True)


def test_a_row_is_ids_and_their_mask() -> None:
    row = template_of("chatml").rows(TWO_TURNS)[-1]
    assert row.ids.dtype == np.int32
    assert row.supervised.dtype == bool
    assert len(row.ids) == len(row.supervised)
