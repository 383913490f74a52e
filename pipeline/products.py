"""Matrix products of training: float32 masters, narrow operands.

The forward and the input gradient read a narrow copy of each weight, refreshed once an optimizer step. The weight
gradient is formed in float32 straight from the product, so that nothing is cast twice and nothing is rounded to bf16
before it is summed. The float8 variant scales each tensor by its largest magnitude (Micikevicius et al. 2022,
section 3): e4m3 forward, e5m2 for gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.errors import BadInput
from pipeline.drafter import Drafter, Linear

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
    """x [..., I] times a narrow copy of a float32 weight [O, I]; the gradient goes to the float32 weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, narrow: Tensor) -> Tensor:
        ctx.save_for_backward(x, narrow)
        return F.linear(x, narrow)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, narrow = ctx.saved_tensors
        dx = dy @ narrow if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(dy.flatten(0, -2), x.flatten(0, -2)), None


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x -> float8 x / scale and the float32 scale of one element, from x's largest magnitude."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] row-major times b [K, N] column-major, float8, in `out` dtype."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out, use_fast_accum=fast)


class Float8Product(torch.autograd.Function):
    """The same with float8 operands; `rows` [O, I] and `columns` [I, O] hold the quantised weight both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        x8, x_scale = quantise(flat, E4M3)
        ctx.save_for_backward(x8.t().contiguous(), x_scale, columns, scale)
        y = scaled_product(x8, rows.t(), x_scale, scale, x.dtype, fast=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x8_t, x_scale, columns, scale = ctx.saved_tensors
        flat = dy.flatten(0, -2)
        dy8, dy_scale = quantise(flat, E5M2)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = scaled_product(dy8, columns.t(), dy_scale, scale, dy.dtype, fast=False).unflatten(0, dy.shape[:-1])
        dw = scaled_product(dy8.t().contiguous(), x8_t.t(), dy_scale, x_scale, torch.float32, fast=False)
        return dx, dw, None, None, None


class NarrowWeights:
    """The narrow copies of a drafter's matrices, installed as its linears' products.

    `refresh` rewrites them from the masters (it can be captured). bf16 copies that the optimizer itself refreshes are
    named in `copies`. Raises BadInput when a float8 matrix has a side that 16 does not divide.
    """

    def __init__(self, drafter: Drafter, dtype: torch.dtype, fp8: bool, wrap: Callable[[Callable], Callable]) -> None:
        linears = {name: module for name, module in drafter.named_modules() if isinstance(module, Linear)}
        self.linears, self.fp8 = list(linears.values()), fp8
        self.run_refresh = wrap(refresh_float8)
        for name, linear in linears.items():
            weight = linear.weight.detach()
            if not fp8:
                linear.narrow, linear.product = torch.empty_like(weight, dtype=dtype), _narrow_product
                continue
            require_float8_sides(name, weight)
            linear.rows = torch.empty_like(weight, dtype=E4M3)
            linear.columns = torch.empty_like(weight.t(), dtype=E4M3, memory_format=torch.contiguous_format)
            linear.scale, linear.product = torch.ones((), device=weight.device), _float8_product
        self.copies = {} if fp8 else {f"{name}.weight": linear.narrow for name, linear in linears.items()}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        if not self.fp8:
            torch._foreach_copy_([linear.narrow for linear in self.linears], [x.weight for x in self.linears])
            return
        for linear in self.linears:
            self.run_refresh(linear.weight, linear.rows, linear.columns, linear.scale)


def require_float8_sides(name: str, weight: Tensor) -> None:
    """Raises BadInput when cuBLAS cannot multiply `weight` in float8."""
    if any(side % 16 for side in weight.shape):
        raise BadInput(
            f"train.fp8: `{name}` is {list(weight.shape)}; float8 needs sides that 16 divides: set fp8: false"
        )


def refresh_float8(weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor) -> None:
    """Write a weight [O, I] as float8 both ways, and its scale."""
    quantised, new_scale = quantise(weight, E4M3)
    rows.copy_(quantised)
    columns.copy_(quantised.t())
    scale.copy_(new_scale)


def _narrow_product(linear: Linear, x: Tensor) -> Tensor:
    return NarrowProduct.apply(x, linear.weight, linear.narrow)


def _float8_product(linear: Linear, x: Tensor) -> Tensor:
    return Float8Product.apply(x, linear.weight, linear.rows, linear.columns, linear.scale)
