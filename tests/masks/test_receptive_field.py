"""Powers of masks against powers of matrices: the same pairs through any number of layers, at any length."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks import brute_force

from saccade import masks
from saccade.masks import (
    Causal,
    Dense,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    Prefix,
    Segments,
    Strided,
    Window,
    longformer,
    prefix_lm,
    sparse_transformer,
    streaming,
)
from saccade.support.errors import UnsupportedError

MOST = 24
TEXTS = Documents([5, 1, 7, 11])
RAGGED = [[5, 9, 10], [7, 0, 12]]
WINDOWS = [
    Window(0, 0),
    Window(2, 1),
    Window(3, 0),
    Window(0, 2),
    Window(None, 2),
    Causal() & Window(3, 0),
    Causal() & Window(2, 5) & Full(),
    Window(1, 3) | Window(2, 0),
    (Window(1, 3) | Window(2, 0)) & Window(4, 2),
]
PREORDERS = [
    Causal(),
    Full(),
    Window(None, None),
    Window(0, None),
    TEXTS,
    Strided(3),
    Causal() & TEXTS,
    Causal() & Strided(3),
    TEXTS & Strided(2) & Causal(),
    Documents(TEXTS.lengths, Causal() & Strided(2)),
    prefix_lm(5),
    Causal() | Prefix(3) | Prefix(5) | Window(4, 0),
    Causal() | Global([0, 1], sees=False),
    Documents(TEXTS.lengths, prefix_lm(3)),
]
NOT_REFLEXIVE = [
    Prefix(4),
    Padding([3, 20]),
    Padding([3, 20], side="left", padded_len=MOST),
    Padding([3, 20]) & Causal(),
    ~Padding([3, 20]),
    Global([1, 4], sees=False),
    Global([1, 4], seen=False),
    Padding([9]) | Window(0, 0),
    ~Full(),
    Dense(torch.arange(MOST)[None] % 3 == 1),
    Causal().after(3),
    Window(2, 1).after(3),
    longformer(1).after(2),
    Documents(RAGGED),
    Documents(RAGGED, Window(1, 1)),
    Documents(RAGGED) & Window(2, 1),
    Causal() & Global([0]),
]
IN_TEXTS = [
    TEXTS & Window(2, 1),
    TEXTS & Causal() & Window(2, 0),
    Documents(TEXTS.lengths, Window(1, 2)),
    Documents(TEXTS.lengths, Window(1, 2)) & Causal(),
    Documents(TEXTS.lengths, Causal() & (Window(1, 0) | Global([0]))),
    Documents(TEXTS.lengths, longformer(1)),
    Documents(TEXTS.lengths, Padding([4])),
    Documents(TEXTS.lengths, Documents([4, 7], Window(1, 1))),
]
HUBS = [
    longformer(2),
    longformer(0, [0, 5, 30]),
    Global([0]),
    Window(2, 0) | Global([7, 0]),
    masks.bigbird(2, random_blocks=1),
    TEXTS | Global([0]),
]
SINKS = [
    Causal() & (Window(2, 0) | Global([0])),
    Causal() & (Window(2, 9) | Global([0, 1, 2])),
    Causal() & (Window(1, 0) | Global([0, 1], sees=False) | Prefix(5)),
    Window(None, 0) & (Window(2, 0) | Global([0])),
    streaming(4, 3),
    streaming(0, 3),
]
STEPS = [
    sparse_transformer(4),
    Causal() & (Window(3, 0) | Strided(4)),
    Causal() & (Window(1, 0) | Strided(2) | Global([9])),
]
EXACT = [*WINDOWS, *PREORDERS, *NOT_REFLEXIVE, *IN_TEXTS, *HUBS, *SINKS, *STEPS]
REFUSED = [
    Causal() & (Strided(2) | Global([3])),
    Causal() & (Window(1, 0) | Global([0])) & (Window(3, 0) | Prefix(2)),
    Window(2, 2) | Global([3]),
    Global([3]),
    Window(2, 2) | Global([0], sees=False),
    Window(2, 2) | Global([0], seen=False),
    Causal() & (Window(2, 0) | Global([3])),
    Causal() & (Window(2, 0) | Global([0], seen=False)),
    Causal() & Window(9, 0) & (Window(2, 0) | Global([0])),
    Causal() & (Window(2, 0) | Strided(4)),
    Window(2, 2) & Padding([3, 5]),
    Window(2, 2) & Strided(2),
    Window(2, 2) | Prefix(3),
    Window(2, 2) | TEXTS,
    Causal() | Padding([3], side="left", padded_len=5),
    TEXTS & (Causal() & (Window(1, 0) | Global([0]))),
    Documents([5, 7], Segments(3, 2)),
    Segments(3, 2),
    Causal() & ~Window(0, 0),
    masks.Random(1, 2),
    masks.Coarse(Window(1, 0), 2),
    masks.Neighborhood(4, 6, 1),
    masks.Predicate(lambda b, h, q, kv: (q + kv) % 3 == 0),
    ~TEXTS,
]


def items(rule: Mask) -> int:
    return max(2, rule.shape[0])


def through(rule: Mask, layers: int, length: int) -> torch.Tensor:
    """bool [batch, n, n]: the matrix of the rule and its diagonal, multiplied as often as there are layers."""
    step = rule.to_dense(length, batch=items(rule))[:, 0].numpy() | np.eye(length, dtype=bool)
    reached = np.broadcast_to(np.eye(length, dtype=bool), step.shape)
    for _ in range(layers):
        reached = (reached.astype(np.int64) @ step.astype(np.int64)) > 0
    return torch.from_numpy(reached)


def lengths_of(rule: Mask) -> range:
    """Lengths at which the rule covers all positions."""
    stops = [span.stop for span in rule.domain if span is not None]
    return range(1, min([MOST, *stops]) + 1)


def differs(power: Mask, rule: Mask, layers: int) -> bool:
    for length in lengths_of(rule):
        if not torch.equal(power.to_dense(length, batch=items(rule))[:, 0], through(rule, layers, length)):
            return True
    return False


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", EXACT, ids=str)
def test_a_power_is_the_power_of_the_matrix(rule: Mask, layers: int) -> None:
    assert not differs(rule**layers, rule, layers)


@pytest.mark.parametrize("rule", REFUSED, ids=str)
def test_one_layer_has_a_form_for_every_rule_and_more_do_not(rule: Mask) -> None:
    assert not differs(rule**1, rule, 1)
    told = r"(?s)\w+: layers=2 cannot.*has no known form as a single mask.*saccade\.auditing\.Reach"
    with pytest.raises(UnsupportedError, match=told) as refused:
        rule**2
    inner = rule.rule if isinstance(rule, Documents) else rule
    assert str(inner) in str(refused.value)


@pytest.mark.parametrize("rule", EXACT, ids=str)
def test_lengths_are_many(rule: Mask) -> None:
    assert len(lengths_of(rule)) >= 22


def test_the_matrix_is_what_loops_say() -> None:
    """The oracle above reads the rule by its tensors, this one by Python ints, and goes step by step."""
    rule = Causal() & (Window(2, 0) | Global([0]))
    allows = brute_force.rule(rule)
    for start in range(12):
        seen = {start}
        for _ in range(3):
            seen |= {key for row in seen for key in range(12) if allows(0, row, key)}
        assert set((rule**3).to_dense(12)[0, 0, start].nonzero()[:, 0].tolist()) == seen


width = st.one_of(st.none(), st.integers(0, 6))
splits = st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(sum)


@settings(deadline=None)
@given(left=width, right=width, layers=st.integers(1, 4), length=st.integers(1, MOST))
def test_windows_of_any_width(left: int | None, right: int | None, layers: int, length: int) -> None:
    rule = Window(left, right)
    found = (rule**layers).to_dense(length, batch=2)[:, 0]
    torch.testing.assert_close(found, through(rule, layers, length))


@pytest.mark.ci
@settings(deadline=None)
@given(lengths=splits, other=splits, left=width, right=width, layers=st.integers(1, 4))
def test_texts_of_any_lengths(lengths: Any, other: Any, left: int | None, right: int | None, layers: int) -> None:
    window = Window(left, right)
    for rule in (
        Documents(lengths, window),
        Documents(lengths) & window,
        Documents(lengths) & Documents(other, window) & Causal(),
        Documents([lengths, other], window),
    ):
        length = max(1, rule.domain.keys.stop) if rule.domain.keys is not None else 1
        found = (rule**layers).to_dense(length, batch=2)[:, 0]
        torch.testing.assert_close(found, through(rule, layers, length))


@settings(deadline=None)
@given(sinks=st.integers(0, 6), window=st.integers(1, 6), layers=st.integers(1, 4), length=st.integers(1, MOST))
def test_first_tokens_and_windows_of_any_size(sinks: int, window: int, layers: int, length: int) -> None:
    for rule in (streaming(sinks, window), Causal() & (Window(window, 0) | Global(range(sinks)))):
        found = (rule**layers).to_dense(length, batch=2)[:, 0]
        torch.testing.assert_close(found, through(rule, layers, length))


WRONG: dict[str, tuple[Mask, Callable[[Mask, int], Mask]]] = {
    "a window stays as it is": (Window(2, 1), lambda rule, layers: rule),
    "a window counts itself again": (Window(2, 1), lambda rule, layers: Window(3 * layers, 2 * layers)),
    "a window grows by a layer less": (Window(2, 1), lambda rule, layers: Window(2 * (layers - 1), layers - 1)),
    "sides are exchanged": (Window(2, 1), lambda rule, layers: Window(layers, 2 * layers)),
    "the residual is forgotten": (Padding([3, 20]), lambda rule, layers: rule),
    "padding is asked of the widened window": (
        Window(2, 2) & Padding([9]),
        lambda rule, layers: (Window(2 * layers, 2 * layers) & Padding([9])) | Window(0, 0),
    ),
    "a global token behind the end": (Window(2, 2) | Global([7]), lambda rule, layers: Full()),
    "seen alone leads everywhere": (Window(2, 2) | Global([0], sees=False), lambda rule, layers: Full()),
    "sees alone leads everywhere": (Window(2, 2) | Global([0], seen=False), lambda rule, layers: Full()),
    "a later sink is as good as the first": (
        Causal() & (Window(2, 0) | Global([7])),
        lambda rule, layers: Causal() & (Window(2 * layers, 0) | Global([7])),
    ),
    "texts leak": (TEXTS & Window(2, 1), lambda rule, layers: Window(2 * layers, layers)),
    "a rule is counted from the start of the line": (
        Documents([5, 9, 10], streaming(1, 2)),
        lambda rule, layers: Documents([5, 9, 10]) & (streaming(1, 2) ** layers),
    ),
    "a stride a window does not fill": (Causal() & (Window(2, 0) | Strided(4)), lambda rule, layers: Causal()),
    "powers go through any &": (Window(2, 2) & Strided(2), lambda rule, layers: Window(2 * layers, 2 * layers)),
    "behind a shorter item is no one": (Documents(RAGGED), lambda rule, layers: rule),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_form_is_seen(name: str) -> None:
    rule, form = WRONG[name]
    assert differs(form(rule, 2), rule, 2)


def test_forms_are_those_that_are_promised() -> None:
    assert (Causal() & Window(4, 0)) ** 3 == Causal() & Window(12, 0)
    assert Causal() ** 9 == Causal()
    assert Documents([2, 3], Window(1, 1)) ** 2 == Documents([2, 3], Window(2, 2))
    assert streaming(4, 8) ** 2 == Causal() & (Window(14, 0) | Prefix(4))
    assert longformer(4) ** 2 == Full()
    assert sparse_transformer(4) ** 2 == Causal()
    assert (Padding([3]) ** 2) ** 2 == Padding([3]) ** 4 == Padding([3]) | Window(0, 0)
    assert Window(1, 1) ** (1 << 62) == Window(None, None)
    assert Window(1, 1) ** np.int64(2) == Window(2, 2)  # type: ignore[operator]


@pytest.mark.parametrize("layers", [0, -1, 1.0, True, "2", None, Causal()], ids=str)
def test_layers_are_a_whole_number(layers: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Causal: layers must be an int of at least 1; got"):
        Causal() ** layers


def test_a_mask_is_no_exponent() -> None:
    with pytest.raises(TypeError, match="a mask must not be used in arithmetic"):
        2 ** Causal()  # type: ignore[operator]
