import numpy as np
import pytest

from pipeline import acceptance
from pipeline.decode import Answer, Block, _blocks

B = 5


def answer(name: str, log: list[int], tokens: int | None = None, prompt: int = 10, finished: bool = True) -> Answer:
    """An answer from a log of matches; `tokens` cuts it (the prefill's token counted)."""
    whole = 1 + sum(m + 1 for m in log)
    count = tokens or whole
    return Answer(name, tuple(range(count)), finished, _blocks(prompt, prompt + count - 1, log, B - 1), prompt)


def test_accepted_drafts_0_1_and_the_last_two_are_lengths_1_2_and_the_last_two() -> None:
    blocks = answer("a", [0, 1, B - 2, B - 1]).blocks
    assert [block.length for block in blocks] == [1, 2, B - 1, B]
    assert [block.start_position for block in blocks] == [10, 11, 13, 17]


@pytest.mark.parametrize(
    ("cut", "kept", "accepted"), [(1, 1, 1), (3, 3, 3), (4, 4, 4), (5, 5, 4)], ids=["first", "mid", "last", "bonus"]
)
def test_a_block_is_cut_after_its_stop(cut: int, kept: int, accepted: int) -> None:
    (block,) = answer("a", [B - 1], tokens=1 + cut).blocks
    assert (block.length, block.accepted) == (kept, accepted)


def test_a_slot_counts_only_where_the_text_reached_it() -> None:
    hits, reached = acceptance.slot_counts(answer("a", [0, 2, 4]).blocks, B)
    assert hits.tolist() == [2, 2, 1, 1]
    assert reached.tolist() == [3, 2, 2, 1]
    hits, reached = acceptance.slot_counts(answer("a", [4], tokens=3).blocks, B)  # cut after two drafts
    assert hits.tolist() == reached.tolist() == [1, 1, 0, 0]


def test_pooled_and_per_response_are_what_their_names_say() -> None:
    answers = [answer("a", [0, 0, 0, 0]), answer("b", [4])]
    numbers = acceptance.summary(answers, ["a", "b"], B, 12, seed=0)
    assert numbers["pooled"]["value"] == pytest.approx(9 / 5)
    assert numbers["per_response"]["value"] == pytest.approx((1 + 5) / 2)
    assert numbers["histogram"] == [0, 4, 0, 0, 0, 1]
    assert numbers["passes_per_token"] == pytest.approx((2 + 5) / 11)
    assert numbers["past_trained_length"] == {
        "tokens": 12,
        "prompts_share": 0.0,
        "responses_share": 1.0,
        "blocks_share": pytest.approx(2 / 5),
    }


def test_buckets_double_and_hold_every_block() -> None:
    answers = [answer("a", [1, 1], prompt=250), answer("b", [2], prompt=600)]
    rows = acceptance.by_context([block for a in answers for block in a.blocks])
    assert [(row["from"], row["to"], row["blocks"]) for row in rows] == [(0, 256, 2), (256, 512, 0), (512, 1024, 1)]
    assert rows[1]["pooled"] is None


def test_the_interval_holds_the_value_narrows_with_prompts_and_repeats() -> None:
    generator = np.random.default_rng(1)
    logs = generator.integers(0, B, size=(200, 6)).tolist()
    answers = [answer(str(index), log) for index, log in enumerate(logs)]
    widths = []
    for count in (20, 200):
        names = [a.id for a in answers[:count]]
        numbers = acceptance.summary(answers[:count], names, B, None, seed=3)["pooled"]
        assert numbers == acceptance.summary(answers[:count], names, B, None, seed=3)["pooled"]
        assert numbers["low"] < numbers["value"] < numbers["high"]
        widths.append(numbers["high"] - numbers["low"])
    assert widths[1] < widths[0] / 2


def test_turns_of_a_conversation_are_resampled_together() -> None:
    answers = [answer("a", [0] * 10), answer("a#2", [0] * 10), answer("b", [4] * 10), answer("b#2", [4] * 10)]
    together = acceptance.summary(answers, ["a", "a", "b", "b"], B, None, seed=0)
    assert together["prompts"] == 2
    assert together["pooled"]["low"] == 1.0  # both draws may be conversation a
    assert together["pooled"]["high"] == 5.0


def test_answers_without_blocks_give_no_numbers_and_no_error() -> None:
    numbers = acceptance.summary([answer("a", [])], ["a"], B, None, seed=0)
    assert numbers["pooled"] == {"value": None, "low": None, "high": None}
    assert numbers["per_slot"] == [None] * (B - 1)
    assert acceptance.summary([], [], B, None, seed=0)["passes_per_token"] is None


def test_a_served_rate_far_below_the_walk_is_flagged() -> None:
    gaps = acceptance.slot_gaps([0.2, 0.78, None], [500, 500, 0], [0.9, 0.8, 0.7])
    assert gaps == [{"slot": 1, "served": 0.2, "validation": 0.9}]
    assert acceptance.slot_gaps([0.2], [3], [0.6]) == []  # too few blocks to tell


def test_a_full_block_reaches_every_slot() -> None:
    hits, reached = acceptance.slot_counts([Block(0, B - 1, B - 1, B)], B)
    assert hits.tolist() == reached.tolist() == [1] * (B - 1)


def test_paired_comparison_takes_the_same_prompts_for_both() -> None:
    """A drafter that is 10 % better on every prompt is so within a hair, however much prompts differ."""
    base = [(f"p{i}", 100 * (i % 7 + 1), 100) for i in range(50)]
    ours = [(name, kept * 11 // 10, blocks) for name, kept, blocks in reversed(base)]
    found = acceptance.compare(ours, base, seed=0)
    assert found["value"] == pytest.approx(1.1)
    assert found["high"] - found["low"] < 1e-9
    shuffled = [(name, kept, 100) for (name, _, _), (_, kept, _) in zip(base, ours, strict=True)]
    wide = acceptance.compare(shuffled, base, seed=0)
    assert wide["high"] - wide["low"] > 0.1
    with pytest.raises(ValueError, match="2 prompts were answered by one"):
        acceptance.compare(ours, [*base[1:], ("other", 1, 1)], seed=0)


def test_turns_of_a_prompt_count_together_and_prompts_keep_their_order() -> None:
    answers = [answer("z1", [4]), answer("z2", [0, 1]), answer("b", [2])]
    assert acceptance.summary(answers, ["z", "z", "b"], B, 12, 0)["by_prompt"] == [("z", 8, 3), ("b", 3, 1)]
