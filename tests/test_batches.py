"""What a batch holds: packing, anchors, labels, and that nothing but (cache, settings, step) decides it."""

from __future__ import annotations

import numpy as np
import pytest

from data import anchors
from data.errors import BadInput
from data.settings import Train
from pipeline.batches import BatchShape, Plan, block_labels, decay_weights, fill, padded_sizes
from tests.synthetic import MemoryCache

LENGTHS = [40, 60, 30, 80, 100, 20, 33, 90, 55, 47]
SETTINGS = Train(context_tokens=256, anchor_slots=64, anchors_per_row=12, batches_per_step=2, epochs=3)


def plan_of(settings: Train = SETTINGS, lengths: list[int] = LENGTHS, rows: np.ndarray | None = None) -> Plan:
    cache = MemoryCache("float32", 2, 8, 50, lengths)
    return Plan(cache, np.arange(len(lengths)) if rows is None else rows, settings, 4, decay_weights(4, 4.0))


def chosen(plan: Plan, epoch: int) -> dict[int, list[int]]:
    first = sum(plan.steps_per_epoch[:epoch])
    steps = range(first, first + plan.steps_per_epoch[epoch])
    return {d.row: d.anchors.tolist() for step in steps for batch in plan.step(step) for d in batch.documents}


def test_every_row_comes_once_an_epoch_in_another_order() -> None:
    plan = plan_of()
    orders = []
    for epoch in range(3):
        first = sum(plan.steps_per_epoch[:epoch])
        rows = [
            d.row for s in range(first, first + plan.steps_per_epoch[epoch]) for b in plan.step(s) for d in b.documents
        ]
        assert sorted(rows) == list(range(len(LENGTHS)))
        orders.append(rows)
    assert orders[0] != orders[1]


def test_anchors_do_not_depend_on_packing_or_on_other_rows() -> None:
    wide = SETTINGS.model_copy(update={"context_tokens": 512, "anchor_slots": 128, "batches_per_step": 1})
    assert chosen(plan_of(), 1) == chosen(plan_of(wide), 1)
    few = chosen(plan_of(rows=np.array([2, 5, 7])), 1)
    assert few == {row: places for row, places in chosen(plan_of(), 1).items() if row in few}
    assert chosen(plan_of(), 0) != chosen(plan_of(), 1)


def test_an_epoch_ends_with_empty_batches_not_dropped_rows() -> None:
    plan = plan_of(SETTINGS.model_copy(update={"batches_per_step": 7}))
    batches = plan.step(0)
    assert len(batches) == 7
    assert sum(bool(batch.documents) for batch in batches) < 7


def test_context_states_of_a_step_are_those_of_its_rows() -> None:
    for settings in (SETTINGS, SETTINGS.model_copy(update={"batches_per_step": 7})):
        plan = plan_of(settings)
        for step in range(plan.total_steps):
            assert plan.context_states(step) == sum(d.states for batch in plan.step(step) for d in batch.documents)


def test_scale_is_one_over_the_weights_of_the_whole_step() -> None:
    plan = plan_of()
    for step in range(plan.total_steps):
        total = 0.0
        for batch in plan.step(step):
            for document in batch.documents:
                total += sum(decay_weights(4, 4.0)[:count].sum() for count in document.labels)
        assert plan.step(step)[0].scale == pytest.approx(1 / total)


def test_labels_stop_at_the_document_and_at_the_first_unsupervised_token() -> None:
    supervised = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 1], bool)
    places = anchors.eligible(supervised)
    assert places.tolist() == [2, 3, 6, 7, 8]
    assert anchors.label_counts(supervised, places, 4).tolist() == [2, 1, 3, 2, 1]
    tokens = np.arange(100, 110, dtype=np.int32)

    class Row:
        anchors, labels = places, anchors.label_counts(supervised, places, 4)

    assert block_labels(tokens, Row, 4).tolist() == [
        [103, 104, -1], [104, -1, -1], [107, 108, 109], [108, 109, -1], [109, -1, -1],
    ]  # fmt: skip


def test_choice_is_the_smallest_hashes_and_moves_with_seed_epoch_and_row() -> None:
    places = np.arange(100, dtype=np.int32)
    base = anchors.choose(places, 10, 0, 0, 1)
    assert len(set(base.tolist())) == 10
    assert (np.diff(base) > 0).all()
    for other in (anchors.choose(places, 10, *key).tolist() for key in ((1, 0, 1), (0, 1, 1), (0, 0, 2))):
        assert other != base.tolist()
    assert anchors.choose(places[:7], 10, 0, 0, 1).tolist() == list(range(7))
    assert set(anchors.choose(places, 5, 0, 0, 1)) <= set(base)


def test_a_filled_batch_holds_rows_side_by_side() -> None:
    plan = plan_of()
    cache = plan.cache
    shape = BatchShape(256, 64, 4, {"hidden": ((2, 8), np.dtype(np.float32))})
    views = shape.host_views(np.full(shape.offsets()[1], 255, np.uint8))
    batch = plan.step(0)[0]
    fill(cache, shape, batch, views)
    at = block = 0
    for document in batch.documents:
        tokens, stored = cache.tokens(document.row)[0], cache._states[document.row]["hidden"]
        count = len(stored)
        assert np.array_equal(views["state.hidden"][at : at + count], stored)
        assert views["position"][at : at + count].tolist() == list(range(count))
        last = block + len(document.anchors)
        assert (views["end"][block:last] - views["start"][block:last]).tolist() == document.anchors.tolist()
        assert views["anchor_token"][block:last].tolist() == tokens[document.anchors].tolist()
        assert (views["labels"][block:last, 0] == tokens[document.anchors + 1]).all()
        at, block = at + count, last
    assert not views["state.hidden"][at:].any()
    assert (views["labels"][block:] == -1).all()
    assert not views["end"][block:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_tokens": 64}, "context_tokens 64 is shorter than the longest row"),
        ({"anchor_slots": 8, "anchors_per_row": 70}, "anchor_slots 8 is less than"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_number_to_set(change: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plan_of(SETTINGS.model_copy(update=change), lengths=[40, 200])


def test_sizes_are_rounded_up_to_whole_tiles() -> None:
    assert padded_sizes(1000, 100, 16) == (1024, 104)
    assert padded_sizes(4096, 512, 16) == (4096, 512)
    assert padded_sizes(512, 60, 10) == (512, 64)
    assert padded_sizes(512, 1, 7) == (512, 128)
