"""Rotary: equal to the models that use it, and true to what a rotation promises."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import GPTJConfig, GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from saccade import UnsupportedError, positions
from saccade.positions import NTK, Linear, Llama3, Rotary, YaRN

SCALINGS = {
    "linear": (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 512),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn": (YaRN(4.0, 512), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
    "yarn-own": (
        YaRN(16.0, 256, beta_fast=20.0, beta_slow=2.0, attention_factor=1.5, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "truncate": False,
        },
    ),
    "yarn-short": (YaRN(4.0, 32), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
}


def _llama(head_dim: int, parameters: dict[str, object], max_len: int = 2048) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=max_len,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )


def _defined(x: Tensor, place: Tensor, base: float, layout: str) -> Tensor:
    """Float64, one pair at a time, as complex numbers."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(width // 2):
        a, b = (i, i + width // 2) if layout == "half" else (2 * i, 2 * i + 1)
        angle = place.double() * base ** (-2.0 * i / width)
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


# --- equal to the models


@pytest.mark.parametrize("name", [None, *SCALINGS])
def test_llama_s_rotation_with_every_scaling(name: str | None) -> None:
    scaling, parameters = (None, {"rope_type": "default"}) if name is None else SCALINGS[name]
    q, k = torch.randn(2, 2, 5, 64), torch.randn(2, 2, 5, 64)
    place = torch.tensor([[0, 1, 7, 500, 1999], [3, 4, 5, 6, 2047]])
    theirs = modeling_llama.LlamaRotaryEmbedding(_llama(64, parameters))
    expected = modeling_llama.apply_rotary_pos_emb(q, k, *theirs(q, place))
    rotary = Rotary(64, scaling=scaling)
    for own, other in zip((rotary(q, place), rotary(k, place)), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "base"), [(64, 10000.0), (128, 500000.0), (6, 100.0)])
def test_frequencies_and_magnitude_are_transformers(name: str, head_dim: int, base: float) -> None:
    scaling, parameters = SCALINGS[name]
    config = _llama(head_dim, {**parameters, "rope_theta": base})
    expected, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    torch.testing.assert_close(scaling.frequencies(base, head_dim, torch.float32), expected, rtol=1e-6, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("length", [10, 512, 700, 4096])
def test_ntk_at_a_length_is_transformers_dynamic_at_that_length(length: int) -> None:
    config = _llama(64, {"rope_type": "dynamic", "factor": 2.0}, max_len=512)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    scaling = NTK.at_length(2.0, length, 512)
    torch.testing.assert_close(scaling.frequencies(10000.0, 64, torch.float32), expected, rtol=1e-6, atol=0)


def test_ntk_keeps_the_fastest_wave_and_slows_the_slowest_by_its_factor() -> None:
    plain = Linear(1.0).frequencies(10000.0, 64, torch.float64)
    scaled = NTK(8.0).frequencies(10000.0, 64, torch.float64)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 8.0)


def test_gpt_neox_turns_the_first_channels_only() -> None:
    config = GPTNeoXConfig(hidden_size=128, num_attention_heads=2, rope_parameters={"partial_rotary_factor": 0.25})
    q, place = torch.randn(2, 2, 6, 64), torch.arange(1000, 1006)
    theirs = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)
    expected, _ = modeling_gpt_neox.apply_rotary_pos_emb(q, q, *theirs(q, place[None]))
    turned = Rotary(64, rotary_dim=16)(q, place)
    torch.testing.assert_close(turned, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(turned[..., 16:], q[..., 16:])
    assert not torch.isclose(turned[..., :16], q[..., :16]).all(-2).any()


def test_gpt_j_turns_neighbours() -> None:
    config = GPTJConfig(n_embd=64, n_head=2, rotary_dim=16)
    x, place = torch.randn(2, 2, 6, 32), torch.arange(1000, 1006)
    table = modeling_gptj.create_sinusoidal_positions(config.n_positions, 16)[place].expand(2, 6, 16)
    sin, cos = table.chunk(2, -1)
    turned = modeling_gptj.apply_rotary_pos_emb(x[..., :16].transpose(1, 2), sin, cos).transpose(1, 2)
    expected = torch.cat([turned, x[..., 16:]], -1)
    own = Rotary(32, rotary_dim=16, layout="interleaved")(x, place)
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)


# --- true to the definition


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_float64_is_the_definition(layout: str) -> None:
    x = torch.randn(2, 3, 4, 10, dtype=torch.float64)
    place = torch.tensor([[0, 1, 17, 100_000], [5, 3, 3, 1_000_000]])
    own = Rotary(10, base=777.0, layout=layout)(x, place)
    torch.testing.assert_close(own, _defined(x, place[:, None], 777.0, layout), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_lengths_stay_and_products_know_the_distance_only(layout: str) -> None:
    rotary = Rotary(16, rotary_dim=12, layout=layout)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)
    everywhere = q.expand(1, 1, 50, 16)
    torch.testing.assert_close(rotary(everywhere, range(50)).norm(dim=-1), everywhere.norm(dim=-1))
    products = rotary(everywhere, range(50)) @ rotary(k.expand(1, 1, 50, 16), range(50)).mT
    for distance in (-7, 0, 12):
        along = products[0, 0].diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert not torch.isclose(products[0, 0, 7, 0], products[0, 0, 0, 0])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, NTK(4.0), YaRN(4.0, 512), YaRN(4.0, 512, attention_factor=3.0)])
def test_unrotate_turns_back(scaling: positions.Scaling | None, layout: str) -> None:
    rotary = Rotary(32, rotary_dim=24, layout=layout, scaling=scaling)
    x, place = torch.randn(2, 3, 5, 32, dtype=torch.float64), torch.tensor([0, 3, 100, 4000, 70_000])
    torch.testing.assert_close(rotary.unrotate(rotary(x, place), place), x)
    moved = rotary(rotary.unrotate(rotary(x, place), place), range(5))
    torch.testing.assert_close(moved, rotary(x, range(5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_are_never_in_half_precision(dtype: torch.dtype) -> None:
    rotary = Rotary(64).to(dtype)
    x, place = torch.randn(1, 2, 8, 64), torch.arange(100_000, 100_008)
    half = x.to(dtype)
    own = rotary(half, place)
    assert own.dtype == dtype
    exact = rotary(half.float(), place)
    torch.testing.assert_close(own.float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(exact, _defined(half.double(), place, 10000.0, "half").float(), rtol=0, atol=0.05)


def test_autocast_changes_nothing() -> None:
    rotary, x = Rotary(64, scaling=YaRN(4.0, 512)), torch.randn(1, 2, 8, 64)
    expected = rotary(x, range(90_000, 90_008))
    with torch.autocast("cpu", torch.bfloat16):
        own = rotary(x, range(90_000, 90_008))
    torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_pieces_equal_the_whole() -> None:
    for scaling in (None, *(scaling for scaling, _ in SCALINGS.values()), NTK(4.0)):
        rotary, x = Rotary(16, scaling=scaling), torch.randn(2, 2, 9, 16)
        whole = rotary(x, range(9))
        pieces = [rotary(x[:, :, a:b], range(a, b)) for a, b in ((0, 5), (5, 8), (8, 9))]
        torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=0, atol=0)


def test_positions_come_as_a_range_one_row_or_a_row_for_each_item() -> None:
    rotary, x = Rotary(8), torch.randn(2, 3, 4, 8)
    expected = rotary(x, range(2, 6))
    row = torch.arange(2, 6)
    for place in (row, row[None], row.expand(2, 4)):
        torch.testing.assert_close(rotary(x, place), expected, rtol=0, atol=0)
    both = rotary(x, torch.stack([row, row + 10]))
    torch.testing.assert_close(both[1], rotary(x[1:], row + 10)[0], rtol=0, atol=0)


def test_no_token_is_turned_as_if_at_0() -> None:
    rotary, x = Rotary(8), torch.randn(1, 3, 2, 8)
    own = rotary(x, torch.tensor([-1, 5]))
    torch.testing.assert_close(own[:, :, 0], x[:, :, 0], rtol=0, atol=0)
    assert rotary(x[:, :, :0], range(0)).shape == (1, 3, 0, 8)


def test_gradients_turn_back() -> None:
    rotary, x = Rotary(6, rotary_dim=4, layout="interleaved"), torch.randn(1, 2, 3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotary(x, range(3)), (x.requires_grad_(),))


def test_it_holds_nothing_and_compiles_in_one_piece() -> None:
    rotary, x, place = Rotary(16, rotary_dim=8, scaling=YaRN(4.0, 512)), torch.randn(1, 2, 6, 16), torch.arange(6)
    assert rotary.state_dict() == {}
    expected = rotary(x, place)
    torch.testing.assert_close(copy.deepcopy(rotary)(x, place), expected, rtol=0, atol=0)
    compiled = torch.compile(rotary, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, place), expected, rtol=0, atol=0)
    assert str(rotary) == (
        "Rotary(16, base=10000, rotary_dim=8, layout='half', scaling=YaRN(factor=4.0, trained_len=512, "
        "beta_fast=32.0, beta_slow=1.0, attention_factor=None, truncate=True))"
    )


def test_a_ramp_of_yarn_between_no_two_pairs_is_a_step() -> None:
    plain = Linear(1.0).frequencies(10000.0, 8, torch.float64)
    everything = YaRN(4.0, 4).frequencies(10000.0, 8, torch.float64)  # trained for less than one turn of any pair
    torch.testing.assert_close(everything[1:], plain[1:] / 4)
    steep = YaRN(4.0, 512).frequencies(1.0001, 8, torch.float64)  # all pairs turn faster than any limit
    torch.testing.assert_close(steep, Linear(1.0).frequencies(1.0001, 8, torch.float64))


# --- what it refuses


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rotary(0), "Rotary: head_dim must be an int of at least 1; got 0."),
        (lambda: Rotary(7), "Rotary: rotary_dim must be even; got 7."),
        (lambda: Rotary(8, rotary_dim=0), "Rotary: rotary_dim must be an int of at least 1; got 0."),
        (lambda: Rotary(8, rotary_dim=10), "Rotary: rotary_dim must be at most head_dim 8; got 10."),
        (lambda: Rotary(8, rotary_dim=0.5), "Rotary: rotary_dim must be an int of at least 1; got 0.5."),
        (lambda: Rotary(8, base=1.0), "Rotary: base must be a finite number above 1; got 1.0."),
        (lambda: Rotary(8, base=float("nan")), "Rotary: base must be a finite number above 1; got nan."),
        (lambda: Rotary(8, layout="neox"), "Rotary: layout must be one of 'half', 'interleaved'; got 'neox'."),
        (lambda: Linear(0.5), "Linear: factor must be a finite number of at least 1; got 0.5."),
        (lambda: NTK(float("inf")), "NTK: factor must be a finite number of at least 1; got inf."),
        (lambda: NTK("2"), "NTK: factor must be a finite number of at least 1; got '2'."),
        (lambda: NTK.at_length(0.0, 8, 8), "NTK.at_length: factor must be a finite number of at least 1; got 0.0."),
        (lambda: NTK.at_length(2.0, 0, 8), "NTK.at_length: length must be an int of at least 1; got 0."),
        (lambda: NTK.at_length(2.0, 8, 0), "NTK.at_length: trained_len must be an int of at least 1; got 0."),
        (lambda: Llama3(0, 1, 4, 8), "Llama3: factor must be a finite number of at least 1; got 0."),
        (lambda: Llama3(8, 0, 4, 8), "Llama3: low_freq_factor must be a finite number above 0; got 0."),
        (lambda: Llama3(8, 4, 4, 8), "Llama3: high_freq_factor must be a finite number above 4; got 4."),
        (lambda: Llama3(8, 1, 4, 8.0), "Llama3: trained_len must be an int of at least 1; got 8.0."),
        (lambda: YaRN(True, 8), "YaRN: factor must be a finite number of at least 1; got True."),
        (lambda: YaRN(4, None), "YaRN: trained_len must be an int of at least 1; got None."),
        (lambda: YaRN(4, 8, beta_slow=-1), "YaRN: beta_slow must be a finite number above 0; got -1."),
        (lambda: YaRN(4, 8, beta_fast=1), "YaRN: beta_fast must be a finite number above 1; got 1."),
        (lambda: YaRN(4, 8, attention_factor=0), "YaRN: attention_factor must be a finite number above 0; got 0."),
        (lambda: YaRN(4, 8, truncate=None), "YaRN: truncate must be True or False; got None."),
    ],
)
def test_sizes_and_factors_are_refused_in_sentences(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        make()
    assert str(caught.value).split("\n")[0] == sentence


def test_a_scaling_of_another_kind_or_for_other_sizes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Rotary: scaling must be a scaling, or None; got dict\."):
        Rotary(8, scaling={"rope_type": "linear"})
    with pytest.raises(UnsupportedError, match="NTK needs at least 4 rotated channels"):
        Rotary(8, rotary_dim=2, scaling=NTK(2.0))


@pytest.mark.parametrize("method", ["forward", "unrotate"])
def test_inputs_of_another_kind_are_refused(method: str) -> None:
    call, x = getattr(Rotary(8), method), torch.randn(2, 3, 4, 8)
    with pytest.raises(TypeError, match=r"Rotary[.\w]*: x must be a float tensor; got int64\."):
        call(x.long(), range(4))
    with pytest.raises(TypeError, match=r"Rotary[.\w]*: x must be a float tensor; got list\."):
        call([1.0], range(4))
    with pytest.raises(ValueError, match=r"Rotary[.\w]*: x must have shape .*, len, 8\]; got \[2, 3, 4, 6\]\."):
        call(x[..., :6], range(4))
    with pytest.raises(ValueError, match=r"Rotary[.\w]*: x must have shape"):
        call(x[0], range(4))
    with pytest.raises(ValueError, match=r"positions must have shape \[4\] or \[2, 4\]; got \[5\]"):
        call(x, range(5))
    with pytest.raises(ValueError, match=r"positions must have shape \[4\] or \[2, 4\]; got \[3, 4\]"):
        call(x, torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions must be at least -1; got a smaller position"):
        call(x, torch.tensor([0, 1, -5, 2]))
    with pytest.raises(ValueError, match=r"positions must start at 0 or later; got range\(-1, 3\)"):
        call(x, range(-1, 3))
    with pytest.raises(TypeError, match=r"positions must be a range, an int64 tensor or a list of ints; got int32"):
        call(x, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"positions must be a range, an int64 tensor or a list of ints; got NoneType"):
        call(x, None)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: Rotary(4, base=10**400), "Rotary: base"),
        (lambda: positions.Sinusoidal(4, base=10**400), "Sinusoidal: base"),
        (lambda: positions.YaRN(10**400, 16), "YaRN: factor"),
        (lambda: positions.YaRN(2.0, 16, attention_factor=10**400), "YaRN: attention_factor"),
        (lambda: positions.Linear(10**400), "Linear: factor"),
        (lambda: positions.Llama3(2.0, 1.0, 10**400, 16), "Llama3: high_freq_factor"),
    ],
)
def test_a_number_that_no_float_holds_is_refused(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite number .*; got 1000"):
        make()
