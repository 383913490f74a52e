"""One contract for all codecs: bytes as stated, errors within what they state, static shapes, no waiting."""

import warnings

import pytest
import torch

from data.codec import CODECS, codec_from_record, make_codec
from data.errors import BadInput
from data.klt import GROUP, pack, unpack

LAYERS, WIDTH, STATES = 3, 64, 96


def residual_stream(states: int = STATES, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    """Bf16 states like real ones: channels of unequal size, a few that carry nearly all energy, layers alike."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(width, generator=torch.Generator().manual_seed(7)))
    sizes[[5, 40]] *= torch.tensor([800.0, 300.0])
    steps = torch.randn(states, LAYERS, width, generator=random) * sizes
    return steps.cumsum(1).bfloat16()


def bits_a_value(codec) -> float:
    return 8 * codec.bytes_per_state() / (codec.layers * codec.width)


def relative_error(got: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """L2 error of each token's state at each layer, over its norm: [T, K]."""
    norm = states.float().norm(dim=-1)
    return (got.float() - states.float()).norm(dim=-1) / norm.clamp_min(1e-30)


@pytest.fixture(params=sorted(CODECS))
def codec(request):
    return make_codec(request.param, LAYERS, WIDTH, residual_stream(4096, seed=1))


class TestContract:
    def test_arrays_are_what_is_stated(self, codec):
        arrays = codec.encode(residual_stream())
        specs = codec.arrays()
        assert arrays.keys() == specs.keys()
        for name, spec in specs.items():
            assert arrays[name].shape == (STATES, *spec.shape)
            assert arrays[name].dtype == spec.torch_dtype
            assert arrays[name].numpy().dtype == spec.dtype
        assert sum(array.numpy().nbytes for array in arrays.values()) == STATES * codec.bytes_per_state()

    def test_round_trip_stays_within_the_stated_error(self, codec):
        states = residual_stream()
        got = codec.decode(codec.encode(states))
        assert got.shape == states.shape
        assert got.dtype == codec.decoded
        assert relative_error(got, states).max() <= codec.error
        if codec.error == 0:
            assert torch.equal(got.float(), states.float())

    def test_hostile_states_come_back_finite(self, codec):
        states = residual_stream()
        states[0] = 0
        states[1] *= 2.0**100
        states[2] *= 2.0**-100
        states[3, :, 1:] = 0
        states[4] = 0
        states[4, :, 9] = 1000
        got = codec.decode(codec.encode(states)).float()
        assert got.isfinite().all()
        assert (got[0] == 0).all()

    def test_taps_pick_layers(self, codec):
        arrays = codec.encode(residual_stream())
        assert torch.equal(codec.decode(arrays, taps=(0, 2)), codec.decode(arrays)[:, [0, 2]])

    def test_states_do_not_touch_each_other(self, codec):
        states = residual_stream()
        loud = states.clone()
        loud[11:] *= 1000
        first, second = (codec.decode(codec.encode(each))[:11] for each in (states, loud))
        assert torch.equal(first, second)

    def test_no_states_at_all(self, codec):
        arrays = codec.encode(residual_stream()[:0])
        assert codec.decode(arrays).shape == (0, LAYERS, WIDTH)

    def test_record_brings_it_back(self, codec):
        again = codec_from_record(codec.record(), codec.tables)
        arrays = codec.encode(residual_stream())
        assert torch.equal(again.decode(arrays), codec.decode(arrays))

    def test_compiles_whole_without_asking_the_device(self, codec):
        """Traced with fake tensors and no graph break: a branch on data or an `.item()` would end it."""
        states = residual_stream()
        arrays = codec.encode(states)
        for name, array in compiled(codec.encode)(states).items():
            assert torch.equal(array.int(), arrays[name].int()), name
        assert torch.equal(compiled(codec.decode)(arrays, (0, 2)), codec.decode(arrays, (0, 2)))


def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnDevice:
    def test_decoding_is_captured_and_replayed(self, codec):
        codec = codec.to("cuda")
        states = residual_stream().cuda()
        arrays = codec.encode(states)
        static = {name: torch.zeros_like(array) for name, array in arrays.items()}
        codec.decode(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = codec.decode(static)
        for name, array in arrays.items():
            static[name].copy_(array)
        graph.replay()
        assert torch.equal(got, codec.decode(arrays))

    def test_compiled_agrees_with_eager(self, codec):
        """At one fixed number of states, as extraction encodes and training decodes."""
        torch._dynamo.reset()
        codec = codec.to("cuda")
        states = residual_stream().cuda()
        encode, decode = (torch.compile(f, fullgraph=True, dynamic=False) for f in (codec.encode, codec.decode))
        wanted = codec.decode(codec.encode(states))
        assert relative_error(decode(encode(states)), wanted).max() <= codec.error / 2 + 1e-3

    def test_encoding_does_not_wait(self, codec):
        codec = codec.to("cuda")
        states = residual_stream().cuda()
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            codec.decode(codec.encode(states))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fitted_codecs_need_a_sample():
    with pytest.raises(ValueError, match="sample"):
        make_codec("int8-outlier", LAYERS, WIDTH)


def test_int8_outlier_takes_width_plus_outliers_plus_scale_bytes():
    codec = make_codec("int8-outlier", 5, 576, torch.randn(8, 5, 576))
    assert codec.bytes_per_state() == 5 * (576 + 4 + 2)


def test_int8_outlier_channels_are_the_loudest():
    codec = make_codec("int8-outlier", LAYERS, WIDTH, residual_stream())
    for channels in codec.record()["channels"]:
        assert {5, 40} <= set(channels)


def test_fp8_stays_under_its_bar_in_bits():
    assert bits_a_value(make_codec("fp8", 5, 576)) <= 8.1


def test_tables_of_another_codec_are_refused():
    one = make_codec("int8-outlier", LAYERS, WIDTH, residual_stream())
    other = {"channels": one.tables["channels"] + 1}
    with pytest.raises(ValueError, match="do not fit"):
        codec_from_record(one.record(), other)


class TestKlt:
    @pytest.mark.parametrize(("name", "limit"), [("klt6", 6.25), ("klt5", 4.8), ("klt4", 3.8)])
    @pytest.mark.parametrize("width", [576, 1024, 4096])
    def test_bits_a_value_stay_under_the_bar(self, name, limit, width):
        assert limit - 0.1 < bits_a_value(CODECS[name](5, width)) <= limit

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_packing_takes_its_bits_and_loses_half_a_step(self, bits):
        unit = torch.linspace(-1, 1, 2 * 3 * 4 * GROUP).view(2, 3, 4, GROUP)
        packed = pack(unit, bits)
        assert packed.shape == (2, 3, 4 * GROUP * bits // 8)
        assert (unpack(packed, bits) - unit).abs().max() <= 2.0**-bits + 1e-6

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_every_code_comes_back(self, bits):
        codes = torch.randint(0, 2**bits, (2, 3, 4, GROUP))
        unit = (codes + 0.5) * 2.0 ** (1 - bits) - 1
        assert torch.equal(unpack(pack(unit, bits), bits), unit)

    def test_more_bits_lose_less(self):
        states, sample = residual_stream(width=256), residual_stream(4096, width=256, seed=1)
        codecs = [make_codec(name, LAYERS, 256, sample) for name in ("klt4", "klt5", "klt6")]
        errors = [relative_error(c.decode(c.encode(states)), states).mean() for c in codecs]
        assert errors[0] > 1.5 * errors[1] > 3 * errors[2]

    def test_correlated_channels_cost_less(self):
        """The same bits leave less error where the sample shows what channels share."""
        random = torch.Generator().manual_seed(3)
        mix = torch.randn(16, 256, generator=random)

        def correlated(count):
            common = torch.randn(count, 1, 16, generator=random) @ mix
            return (common + 0.3 * torch.randn(count, 1, 256, generator=random)).bfloat16()

        states, sample = correlated(64), correlated(4096)
        blind = make_codec("klt5", 1, 256, torch.randn(4096, 1, 256, generator=random))
        fitted = make_codec("klt5", 1, 256, sample)
        lost = [relative_error(c.decode(c.encode(states)), states).mean() for c in (fitted, blind)]
        assert lost[0] < 0.6 * lost[1]

    def test_states_unlike_the_sample_keep_a_bounded_error(self):
        """Scales belong to each token: a poor fit costs bits, it never clips."""
        codec = make_codec("klt5", LAYERS, WIDTH, residual_stream(512, seed=1))
        strange = torch.randn(64, LAYERS, WIDTH, generator=torch.Generator().manual_seed(5)) * 50
        assert relative_error(codec.decode(codec.encode(strange)), strange).max() < 0.25

    @pytest.mark.parametrize("states", [1, 2, 5, 40])
    def test_a_sample_smaller_than_the_width_still_fits(self, states):
        codec = make_codec("klt6", LAYERS, WIDTH, residual_stream(states))
        got = codec.decode(codec.encode(residual_stream()))
        assert relative_error(got, residual_stream()).max() < 0.3

    def test_states_of_another_shape_are_refused(self):
        codec = make_codec("klt5", LAYERS, WIDTH, residual_stream())
        with pytest.raises(ValueError, match="do not fit klt5"):
            codec.encode(torch.zeros(4, LAYERS + 1, WIDTH))

    def test_width_that_groups_do_not_divide_is_refused(self):
        with pytest.raises(BadInput, match="width 32 divides, not 48"):
            make_codec("klt5", 1, 48, torch.randn(8, 1, 48))


def test_every_codec_has_a_setting():
    from typing import get_args

    from data.settings import Codec

    assert set(get_args(Codec)) == set(CODECS)
