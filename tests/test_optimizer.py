"""Optimizers against torch's own, and schedules at their corners."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from data.settings import Train
from pipeline.optimizer import Optimizer, orthogonalise, schedule


def model(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"wide": nn.Linear(24, 8), "tall": nn.Linear(8, 40, bias=False)})


def gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def constant(**changes: Any) -> Train:
    """Settings of a rate that stays at its peak."""
    settings = {"schedule": "linear", "warmup": 0.0, "floor": 1.0, "clip": 1e9, "learning_rate": 1e-2, **changes}
    return Train(**settings)


def test_adamw_follows_torch_step_for_step() -> None:
    ours, theirs = model(), copy.deepcopy(model())
    settings = constant(weight_decay=0.1)
    optimizer = Optimizer(ours.named_parameters(), settings, 10)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=settings.betas)
    for step in range(10):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.update()
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_muon_follows_torch_step_for_step() -> None:
    ours, theirs = model(), copy.deepcopy(model())
    optimizer = Optimizer(ours.named_parameters(), constant(optimizer="muon", muon_learning_rate=2e-2), 10)
    optimizer.muon.dtype = torch.bfloat16  # torch's, on every device
    reference = torch.optim.Muon([p for p in theirs.parameters() if p.ndim == 2], lr=2e-2, weight_decay=0.0)
    for step in range(10):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.update()
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            if a.ndim == 2:
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_muon_multiplies_in_float32_on_a_cpu_and_comes_near_an_orthogonal_matrix() -> None:
    ours = model()
    optimizer = Optimizer(ours.named_parameters(), constant(optimizer="muon"), 10)
    assert optimizer.muon.dtype == torch.float32
    for shape in ((96, 32), (32, 96)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        exact, rough = (orthogonalise(matrix, dtype).float() for dtype in (torch.float32, torch.bfloat16))
        values = torch.linalg.svdvals(exact)
        assert values.min() > 0.5
        assert values.max() < 1.3
        assert (exact - rough).norm() < 0.05 * exact.norm()


def test_clipping_is_torch_s() -> None:
    ours, theirs = model(), copy.deepcopy(model())
    optimizer = Optimizer(ours.named_parameters(), constant(clip=0.5), 10)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.update()
        reference.step()
        assert optimizer.norm.item() == pytest.approx(norm.item())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_narrow_copies_follow_the_masters() -> None:
    ours = model()
    optimizer = Optimizer(ours.named_parameters(), constant(), 10)
    copies = {"wide.weight": torch.empty(8, 24, dtype=torch.bfloat16)}
    optimizer.attach(copies, lambda function: function)
    gradients(ours, 0)
    optimizer.update()
    assert torch.equal(copies["wide.weight"], ours["wide"].weight.bfloat16())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {0: 0.25, 3: 1.0, 51: 0.55, 99: 0.1}),
        ("linear", {0: 0.25, 3: 1.0, 51: 0.55, 99: 0.1}),
        ("wsd", {0: 0.25, 3: 1.0, 79: 1.0, 89: 0.55, 99: 0.1}),
    ],
)
def test_schedules_rise_fall_and_end_at_the_floor(kind: str, expected: dict[int, float]) -> None:
    settings = Train(schedule=kind, warmup=0.04, floor=0.1, decay_share=0.2)
    for step, share in expected.items():
        assert schedule(settings, torch.tensor(step), 100).item() == pytest.approx(share, abs=0.01)


def test_a_tiny_run_has_a_rate_at_every_step() -> None:
    shares = [schedule(Train(), torch.tensor(step), 2).item() for step in range(2)]
    assert shares[0] == pytest.approx(1.0)
    assert shares[1] == pytest.approx(0.0, abs=1e-6)
