"""Rotations as checkpoints hold them: tables and frequencies, read and written, equal to what they were made of."""

import pytest
import torch
from torch import Tensor
from transformers import GPTJConfig, LlamaConfig
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from saccade import caches, masks, mechanisms
from saccade.nn import MultiHeadAttention
from saccade.positions import NTK, Frequencies, Rotary, RotaryTables, YaRN

LAYOUTS = ("half", "interleaved")
CASES = {
    "plain": {},
    "partly": {"rotary_dim": 4},
    "yarn": {"scaling": YaRN(4.0, trained_len=64)},
    "ntk": {"scaling": NTK(2.0), "base": 500.0},
}


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Pair by pair."""
    out, pairs = x.clone(), cos.shape[-1]
    for i in range(pairs):
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        c, s = cos[..., i], sin[..., i]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_tables_say_what_pairs_are_turned_by(name: str, layout: str) -> None:
    rotary = Rotary(8, layout=layout, **CASES[name])
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    places = [range(3, 9), torch.tensor([5, 0, -1, 7, 2, 2]), torch.tensor([[0, 1, 2, 3, 4, 5], [9, 8, -1, 6, 5, 4]])]
    for positions in places:
        cos, sin = rotary.tables(positions, dtype=torch.float64)
        lead = (2, 6) if isinstance(positions, Tensor) and positions.dim() == 2 else (6,)
        assert cos.shape == sin.shape == (*lead, rotary.rotary_dim // 2)
        each = (table.reshape(-1, 1, *table.shape[-2:]) for table in (cos, sin))
        torch.testing.assert_close(rotary(x, positions), _turned(x, *each, layout))
    assert rotary.tables(range(4)).cos.dtype == torch.float32
    with pytest.raises(ValueError, match=r"Rotary\.tables: dtype must be one of torch\.float32, torch\.float64"):
        rotary.tables(range(4), dtype=torch.float16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_rotation_made_of_tables_or_frequencies_is_the_same(name: str, layout: str) -> None:
    rotary = Rotary(8, layout=layout, **CASES[name])
    read = RotaryTables(*rotary.tables(range(20)), head_dim=8, layout=layout)
    make = rotary.scaling.frequencies if rotary.scaling is not None else None
    radians = (
        make(rotary.base, rotary.rotary_dim, torch.float32)
        if make is not None
        else 1.0 / rotary.base ** (torch.arange(0, rotary.rotary_dim, 2) / rotary.rotary_dim)
    )
    magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
    told = Rotary(8, rotary_dim=rotary.rotary_dim, layout=layout, scaling=Frequencies(radians, magnitude))
    x = torch.randn(2, 3, 6, 8)
    table = torch.tensor([[0, 1, 2, 3, 4, 5], [9, 8, -1, 6, 5, 4]])
    for positions in (range(3, 9), table):
        expected = rotary(x, positions)
        for own in (read, told):
            torch.testing.assert_close(own(x, positions), expected)
            torch.testing.assert_close(own.unrotate(expected, positions), x)
            torch.testing.assert_close(own.tables(positions), rotary.tables(positions))


def test_tables_of_llama_and_gpt_j_are_taken_as_they_are() -> None:
    x = torch.randn(1, 2, 9, 8)
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_theta=500.0)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = (own[0, :, :4] for own in theirs(x, torch.arange(9)[None]))
    torch.testing.assert_close(RotaryTables(cos, sin)(x, range(9)), Rotary(8, base=500.0)(x, range(9)))
    told = Rotary(8, scaling=Frequencies(theirs.inv_freq))
    torch.testing.assert_close(told(x, range(9)), Rotary(8, base=500.0)(x, range(9)))
    sin, cos = create_sinusoidal_positions(GPTJConfig().n_positions, 8).chunk(2, 1)
    own = RotaryTables(cos, sin, layout="interleaved")
    torch.testing.assert_close(own(x, range(9)), Rotary(8, layout="interleaved")(x, range(9)))


def test_tables_keep_their_type_and_travel_with_the_state() -> None:
    rotary = RotaryTables(*Rotary(8).tables(range(20)))
    exact = rotary.cos.clone()
    for moved in (rotary.bfloat16(), rotary.double(), rotary.half().float()):
        assert moved.cos.dtype == torch.float32
        assert torch.equal(moved.cos, exact)
    assert list(rotary.state_dict()) == ["cos", "sin"]
    assert RotaryTables(exact.half(), exact.half()).cos.dtype == torch.float32
    assert RotaryTables(exact.double(), exact.double()).cos.dtype == torch.float64
    x = torch.randn(1, 1, 5, 8).bfloat16()
    torch.testing.assert_close(rotary(x, range(5)), Rotary(8)(x, range(5)), atol=0, rtol=0)


def test_layers_decode_with_tables() -> None:
    rotary = RotaryTables(*Rotary(4).tables(range(12)))
    layer = MultiHeadAttention(16, 4, mask=masks.Causal(), rotary=rotary).eval()
    x, cache = torch.randn(2, 12, 16), layer.new_cache()
    split = torch.cat([layer(x[:, :7], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in range(7, 12))], 1)
    torch.testing.assert_close(split, layer(x))
    with pytest.raises(ValueError, match="RotaryTables: positions must be below 12"):
        layer(x[:, :1], cache=cache)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_caches_that_turn_keys_are_saved_with_frequencies_and_refused_with_tables(tmp_path) -> None:
    qkv = [torch.randn(1, heads, 9, 8) for heads in (4, 2, 2)]
    given = Rotary(8, scaling=Frequencies([1.0, 0.3, 0.1, 0.01], 1.25))
    cache = caches.SinkWindowCache(2, 4, rotary=given)
    for i in range(9):
        cache.attend(mechanisms.Softmax(), *(x[:, :, i : i + 1] for x in qkv), mask=masks.Causal())
    caches.save_cache(cache, tmp_path / "cache")
    read = caches.load_cache(tmp_path / "cache")
    assert read.rotary.scaling == given.scaling
    step = [x[:, :, :1] for x in qkv]
    torch.testing.assert_close(
        read.attend(mechanisms.Softmax(), *step, mask=masks.Causal()),
        cache.attend(mechanisms.Softmax(), *step, mask=masks.Causal()),
    )
    tables = caches.SinkWindowCache(2, 4, rotary=RotaryTables(*given.tables(range(9))))
    with pytest.raises(
        NotImplementedError, match="its rotary is a RotaryTables, whose tables cannot be saved in a cache file"
    ):
        caches.save_cache(tables, tmp_path / "cache")


def test_a_wrong_rotation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="there are 3 frequencies, but 8 channels have 4 pairs"):
        Rotary(8, scaling=Frequencies([1.0, 0.1, 0.01]))
    with pytest.raises(TypeError, match="Frequencies: radians must be finite numbers, one for each pair; got str"):
        Frequencies("abc")
    with pytest.raises(TypeError, match="Frequencies: radians must be finite numbers"):
        Frequencies(torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match=r"Frequencies: radians must have shape \[pairs\]; got \[2, 2\]"):
        Frequencies(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"RotaryTables: sin must have shape \[positions, pairs\] = \[3, 4\]"):
        RotaryTables(torch.ones(3, 4), torch.ones(3, 5))
    with pytest.raises(TypeError, match="RotaryTables: cos must be a float tensor; got int64"):
        RotaryTables(torch.ones(3, 4).long(), torch.ones(3, 4))
