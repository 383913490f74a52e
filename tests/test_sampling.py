import numpy as np
import pytest
import torch

from data.errors import BadInput
from pipeline import sampling
from pipeline.passes import Rows
from pipeline.sampling import Sampling

STOP, OTHER_STOP = 9, 8
B, V = 5, 10


def logits_that_say(tokens: list[int]) -> torch.Tensor:
    """[1, B, V]: the target's choice after the anchor and after each draft."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), V).float() * 10


def one_block(drafts: list[int], target: list[int], stops: tuple[int, ...] = (STOP,), limit: int = 100) -> Rows:
    """A row of length 3 after one verified block."""
    rows = Rows(1, 128, torch.device("cpu"))
    rows.length[0], rows.limit[0], rows.active[0] = 3, limit, True
    anchors, keys = torch.tensor([2]), torch.tensor([7])
    logits = logits_that_say(target)
    accepted, tokens = sampling.verify(torch.tensor([drafts]), logits, None, Sampling(), keys, anchors)
    rows.note(torch.tensor([0]), accepted)
    rows.append(torch.tensor([0]), tokens, accepted + 1, torch.tensor(stops))
    return rows


@pytest.mark.parametrize("right", [0, 1, B - 2, B - 1])
def test_accepted_drafts_and_the_bonus_token_are_kept(right: int) -> None:
    drafts = [1 + k if k < right else 7 for k in range(B - 1)]
    rows = one_block(drafts, [1, 2, 3, 4, 5])
    assert rows.log[0, 0] == right
    assert rows.length[0] - 3 == right + 1
    assert rows.ids[0, 3 : rows.length[0]].tolist() == [1, 2, 3, 4, 5][: right + 1]
    assert rows.active[0]


@pytest.mark.parametrize("slot", range(B))
@pytest.mark.parametrize("stop", [STOP, OTHER_STOP])
def test_a_stop_at_any_slot_ends_the_row_after_itself(slot: int, stop: int) -> None:
    target = [1, 2, 3, 4, 5]
    target[slot] = stop
    rows = one_block(target[:-1], target, stops=(OTHER_STOP, STOP))
    assert rows.ids[0, 3 : rows.length[0]].tolist() == target[: slot + 1]
    assert rows.stopped[0]
    assert not rows.active[0]


def test_a_stop_among_rejected_drafts_is_no_stop() -> None:
    rows = one_block([1, STOP, STOP, STOP], [1, 2, 3, 4, 5])
    assert rows.ids[0, 3 : rows.length[0]].tolist() == [1, 2]
    assert rows.active[0]


@pytest.mark.parametrize("room", range(1, B))
def test_the_limit_cuts_in_mid_block(room: int) -> None:
    rows = one_block([1, 2, 3, 4], [1, 2, 3, 4, 5], limit=3 + room)
    assert rows.ids[0, 3 : rows.length[0]].tolist() == [1, 2, 3, 4, 5][:room]
    assert not rows.active[0]
    assert not rows.stopped[0]


def test_rows_that_are_not_active_do_not_change() -> None:
    rows = Rows(2, 128, torch.device("cpu"))
    rows.length[:2], rows.limit[:2], rows.active[1] = 3, 100, True
    rows.note(torch.tensor([0, 1]), torch.tensor([3, 3]))
    rows.append(torch.tensor([0, 1]), torch.tensor([[4, 5], [4, 5]]), torch.tensor([2, 2]), torch.tensor([STOP]))
    assert rows.length.tolist()[:2] == [3, 5]
    assert rows.blocks.tolist()[:2] == [0, 1]
    assert rows.ids[0].sum() == 0


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standardised chi-square: about normal(0, 1) when counts follow `expected`."""
    used = expected > 0
    assert counts[~used].sum() == 0
    degrees = used.sum() - 1
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("plan", [Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=4)])
def test_rejection_sampling_gives_the_targets_distribution(plan: Sampling) -> None:
    R = 40_000
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1, 3, V, generator=generator).expand(R, -1, -1)
    draft = torch.randn(1, 2, V, generator=generator).expand(R, -1, -1)
    keys, anchors = torch.arange(R), torch.full((R,), 5)
    drafts, q = sampling.propose(draft, plan, keys, anchors)
    accepted, tokens = sampling.verify(drafts, target, q, plan, keys, anchors)
    p = sampling.probabilities(target[0], plan).numpy()
    first = np.bincount(tokens[:, 0], minlength=V)
    assert abs(chi_square(first, p[0] * R)) < 4
    went_on = accepted >= 1
    second = np.bincount(tokens[went_on, 1], minlength=V)
    assert abs(chi_square(second, p[1] * int(went_on.sum()))) < 4
    all_right = accepted == 2
    third = np.bincount(tokens[all_right, 2], minlength=V)
    assert abs(chi_square(third, p[2] * int(all_right.sum()))) < 4
    overlap = float(torch.minimum(torch.tensor(p[0]), q[0, 0]).sum())
    assert float(went_on.float().mean()) == pytest.approx(overlap, abs=0.01)


def test_probabilities_keep_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert sampling.probabilities(logits, Sampling(1.0, top_p=0.6)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert sampling.probabilities(logits, Sampling(1.0, top_k=3)).tolist() == pytest.approx(
        [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    )
    cooler = torch.softmax(logits / 0.5, -1).tolist()
    assert sampling.probabilities(logits, Sampling(0.5)).tolist() == pytest.approx(cooler)


def test_uniforms_depend_on_every_argument_and_are_spread() -> None:
    keys, positions, slots = torch.arange(1000)[:, None], torch.tensor([[3, 4]]), torch.zeros(1, dtype=torch.int64)
    base = sampling.uniforms(0, keys, positions, slots, 1)
    assert torch.equal(base, sampling.uniforms(0, keys, positions, slots, 1))
    for other in (
        sampling.uniforms(1, keys, positions, slots, 1),
        sampling.uniforms(0, keys + 1000, positions, slots, 1),
        sampling.uniforms(0, keys, positions + 2, slots, 1),
        sampling.uniforms(0, keys, positions, slots + 1, 1),
        sampling.uniforms(0, keys, positions, slots, 2),
    ):
        assert abs(float(torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1])) < 0.08
    assert 0 <= float(base.min()) < 0.01
    assert 0.99 < float(base.max()) < 1
    assert float(base.mean()) == pytest.approx(0.5, abs=0.02)


def test_draw_never_takes_a_token_of_weight_zero_at_the_ends() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).expand(3, -1)
    drawn = sampling.draw(weights, torch.tensor([0.0, 0.24999, 1 - 2**-24]))
    assert drawn.tolist() == [1, 1, 2]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadInput, match="top_p"):
        Sampling(1.0, top_p=0.0)
