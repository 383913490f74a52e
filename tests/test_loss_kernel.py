"""The kernel of cross entropy against the plain functions that it stands for."""

from __future__ import annotations

import pytest
import torch

from pipeline.head import TargetHead
from pipeline.loss import ChunkedLoss, LossOutput, LossRule

RULE = LossRule("cross_entropy", 4, decay=3.0, alpha=0.5, distill=1.0)


def loss_of(
    head: TargetHead, hidden: torch.Tensor, labels: torch.Tensor, **options: bool
) -> tuple[LossOutput, torch.Tensor]:
    """Two chunks and a rest of five blocks."""
    loss = ChunkedLoss(head, RULE, len(labels), chunk_logits=2 * 4 * len(head.lm_head), **options)
    return loss(hidden, {"labels": labels, "scale": torch.full((1,), 0.02, device=hidden.device)})


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("vocab", [48, 8192, 20_016])
def test_kernel_equals_plain_functions(dtype: torch.dtype, fp8: bool, vocab: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(vocab, 64, device="cuda", dtype=dtype)
    bias = torch.randn(vocab, device="cuda", dtype=dtype)
    rows[7], bias[[5, 7]] = rows[5], 3.0  # a tie at the top where 5 is the label
    head = TargetHead(rows, rows, bias=None if fp8 else bias)
    hidden = torch.randn(5 * 4, 64, device="cuda", dtype=dtype) * 0.2
    hidden[1] = rows[5]
    labels = torch.randint(vocab, (5, 3), device="cuda", dtype=torch.int32)
    labels[0] = torch.tensor([5, -1, 0])
    labels[4, 2] = vocab - 1
    plain, slope = loss_of(head, hidden, labels, fp8=fp8)
    ours, own = loss_of(head, hidden, labels, fp8=fp8, kernel=True)
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-5, atol=0)
    assert ours.hits.tolist() == plain.hits.tolist()
    assert ours.hits[0] > 0
    assert ours.counts.tolist() == plain.counts.tolist()
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2 if fp8 else 1e-2}[dtype]
    assert (own - slope).float().norm() / slope.float().norm() < limit
    assert not own.view(5, 4, 64)[:, 0].any()
    assert not own[2].any()  # of the label that is invalid


@pytest.mark.parametrize("scales", [{"softcap": 5.0}, {"logit_multiplier": 0.5}])
def test_a_target_that_bends_its_logits_goes_without_the_kernel(scales: dict[str, float]) -> None:
    rows = torch.randn(48, 64)
    assert ChunkedLoss(TargetHead(rows, rows), RULE, 5, kernel=True).kernel
    assert not ChunkedLoss(TargetHead(rows, rows, **scales), RULE, 5, kernel=True).kernel
