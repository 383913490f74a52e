"""Matrix products of training: float32 masters, narrow operands.

The forward and the input gradient read a narrow copy of each weight, refreshed once an optimizer step. Copies of
matrices that multiply one input lie one below another, so that they are one product, forward and backward. The weight
gradient is formed in float32 straight from the product, so that nothing is cast twice and nothing is rounded to bf16
before it is summed. The float8 variant scales each operand by its largest magnitude (Micikevicius et al. 2022,
section 3): e4m3 forward, e5m2 for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.errors import BadInput
from pipeline.drafter import JOINT, Drafter, Linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@torch.library.custom_op("draftmill::weight_gradient", mutates_args=())
def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy [T, O] and x [T, I] -> dy^T x [O, I] in float32, accumulated and stored wide."""
    if dy.is_cuda:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return dy.float().t() @ x.float()


@weight_gradient.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=torch.float32)


class NarrowProduct(torch.autograd.Function):
    """x [..., I] times `rows` [O, I], narrow copies of float32 weights one below another; gradients go to `weights`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, rows)
        ctx.outputs = [weight.shape[0] for weight in weights]
        return F.linear(x, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rows = ctx.saved_tensors
        dx = dy @ rows if ctx.needs_input_grad[0] else None
        return dx, None, *weight_gradient(dy.flatten(0, -2), x.flatten(0, -2)).split(ctx.outputs)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x -> float8 x / scale and the float32 scale of one element, from x's largest magnitude."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] row-major times b [K, N] column-major, float8, in `out` dtype."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out, use_fast_accum=fast)


class Float8Product(torch.autograd.Function):
    """The same with float8 operands; `rows` [O, I] and `columns` [I, O] hold the quantised weights both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, columns: Tensor, scale: Tensor, *weights: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        x8, x_scale = quantise(flat, E4M3)
        ctx.save_for_backward(x8.t().contiguous(), x_scale, columns, scale)
        ctx.outputs = [weight.shape[0] for weight in weights]
        y = scaled_product(x8, rows.t(), x_scale, scale, x.dtype, fast=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x8_t, x_scale, columns, scale = ctx.saved_tensors
        flat = dy.flatten(0, -2)
        dy8, dy_scale = quantise(flat, E5M2)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = scaled_product(dy8, columns.t(), dy_scale, scale, dy.dtype, fast=False).unflatten(0, dy.shape[:-1])
        dw = scaled_product(dy8.t().contiguous(), x8_t.t(), dy_scale, x_scale, torch.float32, fast=False)
        return dx, None, None, None, *dw.split(ctx.outputs)


class NarrowWeights:
    """The narrow copies of a drafter's matrices, installed as its linears' joint products.

    Each linear holds `rows` [O.., I] (float8: also `columns` [I, O..] and `scale` []), views of its group's copies
    that start at its own and run to the group's end. `refresh` rewrites all from the masters (it can be captured);
    bf16 copies that the optimizer itself refreshes are named in `copies`. Raises BadInput when a float8 matrix has a
    side that 16 does not divide.
    """

    def __init__(self, drafter: Drafter, dtype: torch.dtype, fp8: bool, wrap: Callable[[Callable], Callable]) -> None:
        self.groups, self.fp8 = groups(drafter), fp8
        self.run_scale, self.run_refresh = wrap(refresh_scale), wrap(refresh_float8)
        self.copies: dict[str, Tensor] = {}
        for group in self.groups:
            outputs, weight = sum(linear.out_features for linear in group.values()), next(iter(group.values())).weight
            rows = weight.new_empty((outputs, weight.shape[1]), dtype=E4M3 if fp8 else dtype)
            columns = weight.new_empty(rows.shape[::-1], dtype=E4M3) if fp8 else None
            scale, low = torch.ones((), device=weight.device), 0
            for name, linear in group.items():
                linear.rows, linear.joint = rows[low:], _narrow_product
                if columns is not None:
                    require_float8_sides(name, linear.weight)
                    linear.columns, linear.scale, linear.joint = columns[:, low:], scale, _float8_product
                low += linear.out_features
        if not fp8:
            self.copies = {f"{n}.weight": x.rows[: x.out_features] for group in self.groups for n, x in group.items()}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        for group in self.groups:
            linears = list(group.values())
            weights = [linear.weight for linear in linears]
            if not self.fp8:
                torch._foreach_copy_([linear.rows[: linear.out_features] for linear in linears], weights)
                continue
            scale = linears[0].scale
            self.run_scale(weights, scale)
            for linear in linears:
                rows, columns = linear.rows[: linear.out_features], linear.columns[:, : linear.out_features]
                self.run_refresh(linear.weight, rows, columns, scale)


def groups(drafter: Drafter) -> list[dict[str, Linear]]:
    """A drafter's linears by name, those of one `JOINT` group together and in its order."""
    made: dict[str, dict[str, Linear]] = {}
    for name, module in drafter.named_modules():
        if isinstance(module, Linear):
            parent, _, last = name.rpartition(".")
            first = next((names[0] for names in JOINT if last in names), last)
            made.setdefault(f"{parent}.{first}", {})[name] = module
    return list(made.values())


def require_float8_sides(name: str, weight: Tensor) -> None:
    """Raises BadInput when cuBLAS cannot multiply `weight` in float8."""
    if any(side % 16 for side in weight.shape):
        raise BadInput(
            f"train.fp8: `{name}` is {list(weight.shape)}; float8 needs sides that 16 divides: set fp8: false"
        )


def refresh_scale(weights: Sequence[Tensor], scale: Tensor) -> None:
    """The scale [] that float8 copies of `weights` share."""
    largest = torch.stack([weight.abs().amax() for weight in weights]).amax()
    scale.copy_(largest.clamp(min=1e-12) / torch.finfo(E4M3).max)


def refresh_float8(weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor) -> None:
    """Write a weight [O, I] as float8 of `scale` [] both ways."""
    quantised = (weight / scale).to(E4M3)
    rows.copy_(quantised)
    columns.copy_(quantised.t())


def _narrow_product(linears: Sequence[Linear], x: Tensor) -> Tensor:
    weights = [linear.weight for linear in linears]
    outputs = sum(len(weight) for weight in weights)
    return NarrowProduct.apply(x, linears[0].rows[:outputs], *weights)


def _float8_product(linears: Sequence[Linear], x: Tensor) -> Tensor:
    weights, first = [linear.weight for linear in linears], linears[0]
    outputs = sum(len(weight) for weight in weights)
    return Float8Product.apply(x, first.rows[:outputs], first.columns[:, :outputs], first.scale, *weights)
