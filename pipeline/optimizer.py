"""Clipping, AdamW, Muon and the schedule, all from device tensors, so that a captured step never asks the host.

AdamW is torch's own fused kernel; it takes `found_inf` (freeze on bad numbers) and `grad_scale` (clipping). Muon is
ours because torch's reads its learning rate on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from data.settings import Train

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients of the orthogonalisation (Jordan et al. 2024, Muon)."""


def schedule(train: Train, step: Tensor, total: int) -> Tensor:
    """float32 []: share of the peak rate at optimizer step `step` (0-based, int64 []), for `total` steps."""
    warm = max(1, round(train.warmup * total)) if train.warmup else 0
    at = step.float()
    rise = ((at + 1) / warm).clamp(max=1.0) if warm else torch.ones_like(at)
    begin = total - max(1, round(train.decay_share * total)) if train.schedule == "wsd" else warm
    gone = ((at + 1 - begin) / max(1, total - begin)).clamp(0.0, 1.0)
    fall = 0.5 * (1 + torch.cos(math.pi * gone)) if train.schedule == "cosine" else 1 - gone
    return rise * (train.floor + (1 - train.floor) * fall)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrix of [O, I], approximately, in bf16 (Newton-Schulz)."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


class Muon:
    """Momentum, orthogonalised, for 2-D matrices; the update is that of `torch.optim.Muon` (Nesterov, 0.95)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: Tensor, weight_decay: float) -> None:
        self.parameters, self.lr, self.weight_decay, self.momentum = list(parameters), lr, weight_decay, 0.95
        self.state = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        """One update with gradients divided by `grad_scale`; nothing moves where `found_inf` is 1."""
        keep = found_inf > 0
        for parameter, average in zip(self.parameters, self.state, strict=True):
            gradient = parameter.grad / grad_scale
            moved = average.lerp(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(moved, self.momentum)).float()
            rate = self.lr * max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            new = parameter * (1 - self.lr * self.weight_decay) - rate * update
            average.copy_(torch.where(keep, average, moved))
            parameter.copy_(torch.where(keep, parameter, new))


class Optimizer:
    """Norm, clip, update. All state is on the device and named for checkpoints.

    `step_count` int64 [] counts attempted updates; `bad` int64 [] holds the first step whose gradient norm was not
    finite, -1 while there is none. After that, weights and moments stay as they were.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], train: Train, total: int) -> None:
        self.named, self.train, self.total = list(named), train, total
        self.parameters = [parameter for _, parameter in self.named]
        device = self.parameters[0].device
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.norm = torch.zeros((), device=device)
        self.found_inf = torch.zeros((), device=device)
        self.grad_scale = torch.ones((), device=device)
        self.lr = torch.zeros((), device=device)
        self.muon_lr = torch.zeros((), device=device)
        self._make_updates(device)

    def _make_updates(self, device: torch.device) -> None:
        train, muon = self.train, self.train.optimizer == "muon"
        matrices = [parameter for parameter in self.parameters if parameter.ndim == 2]
        vectors = [parameter for parameter in self.parameters if parameter.ndim != 2]
        groups = [{"params": vectors, "weight_decay": 0.0}]
        if not muon:
            groups.append({"params": matrices, "weight_decay": train.weight_decay})
        self.adamw = torch.optim.AdamW(
            groups, lr=self.lr, betas=train.betas, fused=True, capturable=device.type == "cuda"
        )
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf
        self.muon = Muon(matrices, self.muon_lr, train.weight_decay) if muon else None
        self._allocate_moments()

    def _allocate_moments(self) -> None:
        """Make AdamW's state now, so that capture finds it at its final address."""
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                state = self.adamw.state[parameter]
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def update(self) -> None:
        """One optimizer step from `.grad`; no host sync, can be captured."""
        share = schedule(self.train, self.step_count, self.total)
        self.lr.copy_(share * self.train.learning_rate)
        self.muon_lr.copy_(share * self.train.muon_learning_rate)
        gradients = [parameter.grad for parameter in self.parameters]
        self.norm.copy_(torch.stack(torch._foreach_norm(gradients)).norm())
        spoilt = ~torch.isfinite(self.norm)
        self.bad.copy_(torch.where((self.bad < 0) & spoilt, self.step_count, self.bad))
        self.found_inf.copy_((self.bad >= 0).float())
        self.grad_scale.copy_(torch.where(spoilt, 1.0, (self.norm / self.train.clip).clamp(min=1.0)))
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(self.grad_scale, self.found_inf)
        self.step_count.add_(1)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name; the tensors themselves, not copies."""
        names = {parameter: name for name, parameter in self.named}
        state = {"step_count": self.step_count, "bad": self.bad}
        for parameter, moments in self.adamw.state.items():
            state |= {f"{names[parameter]}.{key}": value for key, value in moments.items()}
        if self.muon is not None:
            for parameter, average in zip(self.muon.parameters, self.muon.state, strict=True):
                state[f"{names[parameter]}.momentum"] = average
        return state
