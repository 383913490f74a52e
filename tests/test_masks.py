"""The mask rule: what a block sees, and that its three forms agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from pipeline.masks import TABLES, MaskShape, block_tables, dense, visible

SLOTS = {4: 64, 7: 128, 10: 64, 16: 24}


def random_spans(rng: np.random.Generator, context: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed documents with sorted anchors, some slots left as padding."""
    documents = int(rng.choice([1, 3, 17]))
    cuts = np.sort(np.concatenate([[0], rng.choice(np.arange(1, context), documents - 1, replace=False), [context]]))
    used = int(rng.integers(0, blocks + 1))
    document = np.sort(rng.integers(0, documents, used))
    start, end = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    start[:used] = cuts[document]
    reach = cuts[document + 1] - cuts[document]
    end[:used] = start[:used] + np.minimum(rng.integers(0, context, used), reach) * (rng.random(used) < 0.95)
    order = np.lexsort((end[:used], start[:used]))
    start[:used], end[:used] = start[:used][order], end[:used][order]
    return start, end


def as_sets(tables: dict[str, np.ndarray], kind: str) -> list[set[int]]:
    counts, index = np.asarray(tables[f"{kind}_num"])[0, 0], np.asarray(tables[f"{kind}_index"])[0, 0]
    return [set(row[:count].tolist()) for row, count in zip(index, counts, strict=True)]


@pytest.mark.parametrize("window", [None, 3, 32, 200])
@pytest.mark.parametrize("block_size", sorted(SLOTS))
def test_block_tables_equal_create_block_mask(block_size: int, window: int | None) -> None:
    rng = np.random.default_rng(block_size)
    shape = MaskShape(512, SLOTS[block_size], block_size, window)
    for _ in range(13):  # 4 block sizes x 4 windows x 13 = 208 packs
        start, end = random_spans(rng, shape.context, shape.blocks)
        ours = {name: np.full(size, 7, np.int32) for name, size in shape.table_shapes().items()}
        block_tables(shape, start, end, {name: table[0, 0] for name, table in ours.items()})
        theirs = create_block_mask(
            visible(shape, torch.tensor(start), torch.tensor(end)),
            1, 1, shape.queries, shape.context + shape.queries, device="cpu",
        )  # fmt: skip
        reference = dict(
            zip(
                TABLES,
                (
                    theirs.kv_num_blocks,
                    theirs.kv_indices,
                    theirs.full_kv_num_blocks,
                    theirs.full_kv_indices,
                    theirs.q_num_blocks,
                    theirs.q_indices,
                    theirs.full_q_num_blocks,
                    theirs.full_q_indices,
                ),
                strict=True,
            )
        )
        for kind in ("kv", "full_kv", "q", "full_q"):
            assert as_sets(ours, kind) == as_sets(reference, kind)
        for name in TABLES:
            if name.endswith("index"):
                assert ours[name].min() >= 0
                assert ours[name].max() < ours[name].shape[-1]


def test_a_block_sees_its_own_document_before_its_anchor_and_itself() -> None:
    shape = MaskShape(8, 2, 4)
    mask = dense(shape, torch.tensor([0, 3]), torch.tensor([2, 3]))
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 8, 9, 10, 11]
    assert torch.equal(mask[0], mask[3])
    assert mask[4].nonzero().flatten().tolist() == [12, 13, 14, 15]


def test_a_sliding_layer_is_causal_inside_the_block_and_looks_back_w_positions() -> None:
    shape = MaskShape(8, 1, 4, window=3)
    mask = dense(shape, torch.tensor([1]), torch.tensor([6]))  # anchor at position 5
    assert [row.nonzero().flatten().tolist() for row in mask] == [[4, 5, 8], [5, 8, 9], [8, 9, 10], [9, 10, 11]]


def test_sizes_that_are_not_whole_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        block_tables(MaskShape(100, 8, 16), np.zeros(8, np.int32), np.zeros(8, np.int32), {})
