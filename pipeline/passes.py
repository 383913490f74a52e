"""The forward passes of decoding: fixed shapes over static tensors, one set of rows.

Invariant of a decoding row of length L: its tokens 0..L-1 are known; the target's cache holds 0..L-2 and the drafter's
context the states of 0..L-2; token L-1 is the *anchor* of the next block.

Shapes: R rows, C tokens a prefill chunk, B block slots, S positions, K taps, H width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline import sampling
from pipeline.drafter import Drafter
from pipeline.kvcache import (
    Aim,
    RowCache,
    attend_grouped,
    cache_argument,
    grouped,
    hide,
    layer_masks,
    layer_windows,
    read_rows,
    write_rows,
)
from pipeline.sampling import Sampling
from pipeline.target import Target


class Rows:
    """State of all rows, on the device. Row R, the last, is scratch: prefill groups are filled up with it.

    `ids` int64 [R + 1, S] tokens, `length` and `limit` int64 [R + 1], `active` and `stopped` bool [R + 1], `key` int64
    [R + 1] of the prompt, `blocks` int64 [R + 1] blocks verified so far, `log` int16 [R + 1, S] their accepted drafts.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.count, self.capacity = rows, capacity
        self.ids = zeros(rows + 1, capacity)
        self.length, self.limit, self.key, self.blocks = (zeros(rows + 1) for _ in range(4))
        self.length.fill_(1)
        self.active, self.stopped = zeros(rows + 1, dtype=torch.bool), zeros(rows + 1, dtype=torch.bool)
        self.log = zeros(rows + 1, capacity, dtype=torch.int16)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within, no row is active, so that steps change nothing that lasts."""
        before = self.active.clone()
        self.active.zero_()
        try:
            yield
        finally:
            self.active.copy_(before)

    def append(self, slots: Tensor, tokens: Tensor, count: Tensor, stops: Tensor) -> None:
        """Give active rows `slots` [n] the first `count` [n] of `tokens` [n, T], cut after a stop and at the limit."""
        index = torch.arange(tokens.shape[1], device=tokens.device)
        active, length, limit = self.active[slots], self.length[slots], self.limit[slots]
        stop = (tokens.unsqueeze(-1) == stops).any(-1) & (index < count[:, None])
        first = torch.where(stop, index, tokens.shape[1]).amin(-1)
        kept = torch.minimum(torch.minimum(count, first + 1), limit - length) * active
        at = (length[:, None] + index).clamp_max(self.capacity - 1)
        old = self.ids[slots[:, None], at]
        self.ids[slots[:, None], at] = torch.where(index < kept[:, None], tokens, old)
        stopped = active & (first < kept)
        self.length[slots] = length + kept
        self.stopped[slots] = self.stopped[slots] | stopped
        self.active[slots] = active & ~stopped & (length + kept < limit)

    def note(self, slots: Tensor, accepted: Tensor) -> None:
        """Log `accepted` [n] drafts as one more block of each active row among `slots` [n]."""
        active, at = self.active[slots], self.blocks[slots]
        self.log[slots, at] = torch.where(active, accepted.short(), self.log[slots, at])
        self.blocks[slots] = at + active


class TargetPass:
    """Runs the target over cached rows and taps its layers."""

    def __init__(self, target: Target, rows: int, capacity: int, taps: Sequence[int]) -> None:
        self.decoder = target.stack
        self.config = target.config
        self.windows = layer_windows(self.config)
        self.cache = RowCache(target.layers, rows + 1, capacity)
        self.taps, self.layers, self.dtype = tuple(taps), target.decoder_layers(), target.dtype
        self.argument = cache_argument(self.decoder)

    def __call__(self, ids: Tensor, positions: Tensor, span: int, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids and positions [n, T] -> post-norm states [n, T, H] and tapped states [n, T, K * H]."""
        self.cache.aim.point(positions, span, slots)
        masks = layer_masks(self.config, self.windows, positions, span, self.dtype)
        with self._tapped() as states, grouped(self.config):
            made = self.decoder(
                input_ids=ids,
                attention_mask=masks,
                position_ids=positions,
                use_cache=True,
                **{self.argument: self.cache},
            )
        hidden = made.last_hidden_state.to(ids.device)
        taps = [states[layer].to(ids.device) for layer in self.taps]
        return hidden, torch.cat(taps, -1) if taps else hidden[..., :0]

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, Tensor]]:
        states: dict[int, Tensor] = {}

        def keep(layer: int) -> object:
            def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
                states[layer] = output if isinstance(output, Tensor) else output[0]

            return self.layers[layer].register_forward_hook(hook)

        handles = [keep(layer) for layer in self.taps]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


class DraftPass:
    """Runs the drafter over cached context keys and values [R + 1, G, S, D] a layer."""

    def __init__(self, drafter: Drafter, rows: int, capacity: int, block_size: int) -> None:
        config = drafter.config
        weight = drafter.norm.weight
        self.drafter, self.block_size, self.dtype = drafter, block_size, weight.dtype
        shape = (2, rows + 1, config.num_kv_heads, capacity, config.head_dim)
        self.store = [weight.new_zeros(shape) for _ in drafter.layers]
        sliding = ["sliding" in kind for kind in config.layer_types]
        self.windows = [config.sliding_window if slides else None for slides in sliding]

    def learn(self, taps: Tensor, positions: Tensor, slots: Tensor | None = None) -> None:
        """Keep tapped states [n, T, K * H] at `positions` [n, T] as context keys and values."""
        aim = Aim().point(positions, 0, slots)
        context = self.drafter.project(taps.to(self.dtype))
        rope = self.drafter.rope(positions)
        for layer, (keys, values) in zip(self.drafter.layers, self.store, strict=True):
            new_keys, new_values = layer.self_attn.keys_values(context, rope)
            write_rows(keys, new_keys, aim)
            write_rows(values, new_values, aim)

    def __call__(self, block: Tensor, positions: Tensor, span: int, slots: Tensor | None = None) -> Tensor:
        """Embedded slots [n, B, H] at `positions` [n, B], anchor first -> hidden [n, B, H]."""
        aim = Aim().point(positions, span, slots)
        masks = {window: self._mask(positions, span, window) for window in set(self.windows)}
        context = [(read_rows(keys, aim), read_rows(values, aim)) for keys, values in self.store]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_grouped(q, k, v, masks[self.windows[layer]], None)

        return self.drafter(block.to(self.dtype), self.drafter.rope(positions), context, attend)

    def _mask(self, positions: Tensor, span: int, window: int | None) -> Tensor:
        """Additive [R, 1, B, span + B]: context before the anchor, then the block, both ways unless sliding."""
        rows, slots = positions.shape
        keys = torch.arange(span, device=positions.device)
        seen = (keys < positions[:, :1]).unsqueeze(1).expand(rows, slots, span)
        index = torch.arange(slots, device=positions.device)
        gap = index[:, None] - index
        own = torch.ones_like(gap, dtype=torch.bool) if window is None else (gap >= 0) & (gap < window)
        if window is not None:
            seen = seen & (positions.unsqueeze(-1) - keys < window)
        return hide(torch.cat((seen, own.expand(rows, slots, slots)), -1), self.dtype).unsqueeze(1)


class Steps:
    """What happens to rows: a prefill chunk, its end, a plain step, a drafted step."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: Rows,
        group: int,
        plan: Sampling,
        stops: Sequence[int],
        block_size: int,
    ) -> None:
        device = rows.ids.device
        self.rows, self.plan, self.head = rows, plan, target.head().to(device, target.dtype)
        taps = drafter.config.target_layer_ids if drafter is not None else ()
        self.target = TargetPass(target, rows.count, rows.capacity, taps)
        self.drafter = None if drafter is None else DraftPass(drafter, rows.count, rows.capacity, block_size)
        self.stops = torch.tensor(list(stops) or [-1], device=device)
        self.all = torch.arange(rows.count, device=device)
        self.slots = torch.full((group,), rows.count, device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        self.ends = torch.zeros(group, target.width, dtype=target.dtype, device=device)

    def prefill(self, span: int, count: int, tokens: int) -> None:
        """Run tokens start..start+C-1 of the first `count` rows in `slots`; each row's last state goes to `ends`."""
        rows, slots, ends = self.rows, self.slots[:count], self.ends[:count]
        positions = self.start + torch.arange(tokens, device=slots.device)
        positions = positions.clamp_max(rows.capacity - 1).expand(count, tokens)
        hidden, taps = self.target(rows.ids[slots[:, None], positions], positions, span, slots)
        if self.drafter is not None:
            self.drafter.learn(taps, positions, slots)
        last = rows.length[slots] - 1 - self.start
        here = ((last >= 0) & (last < tokens))[:, None]
        found = hidden[torch.arange(count, device=slots.device), last.clamp(0, tokens - 1)]
        ends.copy_(torch.where(here, found, ends))

    def begin(self) -> None:
        """First token of the rows in `slots`, from `ends`."""
        rows, slots = self.rows, self.slots
        logits = self.head.logits(self.ends)
        tokens = sampling.choose(logits, self.plan, rows.key[slots], rows.length[slots])
        rows.append(slots, tokens[:, None], torch.ones_like(slots), self.stops)

    def plain(self, span: int, some: Tensor | None = None) -> None:
        """One more token for every active row, or for the active ones among `some` [n]."""
        rows, slots = self.rows, self.all if some is None else some
        length = rows.length[slots]
        positions = (length - 1)[:, None]
        hidden, _ = self.target(rows.ids[slots[:, None], positions], positions, span, some)
        tokens = sampling.choose(self.head.logits(hidden[:, 0]), self.plan, rows.key[slots], length)
        rows.append(slots, tokens[:, None], torch.ones_like(length), self.stops)

    def drafted(self, span: int, some: Tensor | None = None) -> None:
        """One more block for every active row, or for the active ones among `some` [n]: draft, verify, accept."""
        rows, slots = self.rows, self.all if some is None else some
        keys, anchors = rows.key[slots], rows.length[slots] - 1
        positions = anchors[:, None] + torch.arange(self.drafter.block_size, device=anchors.device)
        anchor_ids = rows.ids[slots[:, None], anchors[:, None]]
        drafts, q = self.draft(anchor_ids, positions, span, some)
        hidden, taps = self.target(torch.cat((anchor_ids, drafts), 1), positions, span, some)
        accepted, tokens = sampling.verify(drafts, self.head.logits(hidden), q, self.plan, keys, anchors)
        self.drafter.learn(taps, positions, some)
        rows.note(slots, accepted)
        rows.append(slots, tokens, accepted + 1, self.stops)

    def draft(
        self, anchor_ids: Tensor, positions: Tensor, span: int, some: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Anchors [n, 1] at `positions` [n, B] -> drafts [n, B - 1] and, when sampling, their distribution."""
        mask = self.drafter.drafter.config.mask_token_id
        unknown = torch.full_like(positions[:, 1:], mask)
        block = self.head.embed(torch.cat((anchor_ids, unknown), 1))
        hidden = self.drafter(block, positions, span, some)[:, 1:]
        logits = self.head.logits(hidden.to(self.target.dtype))
        keys = self.rows.key[self.all if some is None else some]
        return sampling.propose(logits, self.plan, keys, positions[:, 0])
