"""Random mask expressions."""

import torch
from hypothesis import strategies as st

from saccade import masks

MAX_LEN = 40


def _every_third(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (3 * q + 5 * kv + b) % 4 != 0


def anywhere(mask: masks.Mask) -> masks.Mask:
    """The same pairs, by a rule that is about all positions: joined with one that nothing keeps to anywhere."""
    return mask | ~masks.Full()


def _atoms(batch: int, rules: st.SearchStrategy[masks.Mask] | None) -> st.SearchStrategy[masks.Mask]:
    width = st.one_of(st.none(), st.integers(0, 12))
    length = st.integers(0, MAX_LEN)
    lengths = st.lists(length, min_size=batch, max_size=batch)
    side = st.integers(1, 7)
    documents = st.lists(st.integers(0, MAX_LEN // 3), min_size=1, max_size=5)
    tensor = st.tuples(st.sampled_from([1, batch]), st.integers(1, MAX_LEN), st.integers(0, 99)).map(_random_tensor)
    return st.one_of(
        st.just(masks.Full()),
        st.just(masks.Causal()),
        st.builds(masks.Window, width, width),
        st.builds(masks.Global, st.lists(length, min_size=1, max_size=4), st.just(True), st.booleans()),
        st.builds(masks.Global, st.lists(length, min_size=1, max_size=4), st.just(False), st.just(True)),
        st.builds(masks.Padding, lengths),
        st.builds(masks.Padding, lengths, st.just("left"), st.just(MAX_LEN)),
        st.builds(
            masks.Documents, documents, st.none() if rules is None else st.one_of(st.none(), rules.map(anywhere))
        ),
        st.builds(masks.Documents, st.lists(documents, min_size=batch, max_size=batch)),
        st.just(masks.Predicate(_every_third)),
        st.builds(masks.Strided, st.integers(1, 7)),
        st.builds(masks.Prefix, length),
        st.builds(masks.Segments, st.integers(1, 9), st.integers(0, 12)),
        st.builds(masks.Random, st.integers(1, 3), st.integers(1, 6), st.integers(0, 9)),
        st.builds(masks.Neighborhood, side, side, st.tuples(st.integers(0, 3), st.integers(0, 3))),
        st.builds(masks.Axial, side, side, st.sampled_from(["rows", "columns", "both"])),
        st.builds(masks.ShiftedWindows, side, side, st.just(3), st.integers(0, 2)),
        st.builds(_random_blocks, st.integers(1, 6), st.integers(1, 9), st.integers(0, 99)),
        tensor,
    )


def _random_tensor(drawn: tuple[int, int, int]) -> masks.Mask:
    batch, size, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    return masks.Dense(torch.rand(batch, 1, size, size, generator=generator) < 0.5)


def _random_blocks(count: int, size: int, seed: int) -> masks.Mask:
    generator = torch.Generator().manual_seed(seed)
    return masks.Blocks(torch.rand(count, count, generator=generator) < 0.5, size)


def _moved(rules: st.SearchStrategy[masks.Mask]) -> st.SearchStrategy[masks.Mask]:
    return st.tuples(rules, st.integers(1, 5)).map(lambda pair: pair[0].after(pair[1]))


def expressions(batch: int) -> st.SearchStrategy[masks.Mask]:
    """Masks joined by ``&``, ``|`` and ``~``, for one batch size."""
    simple = _atoms(batch, None)
    atoms = st.one_of(_atoms(batch, simple), st.builds(masks.Coarse, simple, st.integers(1, 5)), _moved(simple))
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
            inner.map(lambda mask: ~mask),
        ),
        max_leaves=5,
    )
