"""Prompts of the evaluation are found among rows, whatever is wrapped around them."""

from __future__ import annotations

from typing import Any

import pytest

from data.formats import normalise
from pipeline.contamination import benchmarks_in, prompt_keys
from tests.template_kinds import tokenizer_of

QUESTION = "How many apples are left?"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ASK = "Write a solution to the following problem:\n"


def found(record: dict[str, Any], *prompts: str) -> bool:
    tokenizer = tokenizer_of("chatml")
    return bool(benchmarks_in(normalise(record), {"set": prompt_keys(prompts)}, tokenizer.decode))


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Two."}]}


@pytest.mark.parametrize("wrap", [("", ""), ("", BOXED), (ASK, ""), (ASK, BOXED)])
@pytest.mark.parametrize("asked_as", [("", ""), ("", BOXED), ("Hello!\n", ""), ("Question:\n", "\nAnswer briefly.")])
def test_wrappers_on_either_side_hide_nothing(wrap: tuple[str, str], asked_as: tuple[str, str]) -> None:
    prompts = [f"{wrap[0]}{question}{wrap[1]}" for question in (QUESTION, "Where did she go?", "Who won, and when?")]
    assert found(asked(f"{asked_as[0]}{QUESTION}{asked_as[1]}"), *prompts)
    assert not found(asked(f"{asked_as[0]}How many pears are left?{asked_as[1]}"), *prompts)


def test_what_only_the_wrapper_says_is_no_prompt() -> None:
    prompts = [f"{question}{BOXED}" for question in (QUESTION, "Where did she go?")]
    assert not found(asked(BOXED), *prompts)
    assert not found(asked("?!"), "...", QUESTION)


def test_any_turn_of_a_user_counts_and_no_answer_does() -> None:
    turns = [*asked("Hi.")["messages"], *asked(QUESTION)["messages"]]
    assert found({"messages": turns}, QUESTION)
    assert not found({"messages": turns}, "Two.")


def test_rows_of_text_and_ids_are_looked_up_by_line() -> None:
    text = f"<|im_start|>user\n{QUESTION}\n<|im_end|>"
    ids = tokenizer_of("chatml").encode(text, add_special_tokens=False)
    assert found({"text": text}, QUESTION, "Who won?")
    assert found({"token_ids": ids}, QUESTION, "Who won?")
    assert not found({"token_ids": ids}, "Who won?")
