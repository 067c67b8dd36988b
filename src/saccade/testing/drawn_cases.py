"""`DRAWN_CASES`: cases whose lengths, widths, heads and masks are drawn from a seed and not known in advance."""

from __future__ import annotations

import dataclasses
import random

from saccade.masks import Causal, Documents, Mask, Padding, Window
from saccade.testing.case import Case

DRAWN_CASES = tuple(Case(f"drawn-{number}", seed=number) for number in range(1, 9))
"""Cases that consist of a name and a seed; `drawn` draws their masks and sizes."""

_LENGTHS = (range(13, 63), range(66, 127), range(130, 330))


def is_drawn(case: Case) -> bool:
    """Return whether a case is one of `DRAWN_CASES`, whose mask and sizes must still be drawn."""
    return any(case.name == each.name for each in DRAWN_CASES)


def drawn(case: Case) -> Case:
    """Draw the mask, lengths, widths and numbers of heads of a case from its seed."""
    rng = random.Random(case.seed)
    batch, num_kv_heads = rng.randint(1, 3), rng.randint(1, 3)
    q_len = rng.choice(rng.choice(_LENGTHS))
    kv_len = q_len + rng.choice((0, 0, rng.randint(1, 90)))
    head_dim = 8 * rng.randint(1, 17)
    return dataclasses.replace(
        case,
        mask=_mask(rng, batch, kv_len),
        batch=batch,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * rng.choice((1, 1, 2, 3, 5)),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=rng.choice((head_dim, head_dim, 8 * rng.randint(1, 17))),
    )


def _mask(rng: random.Random, batch: int, kv_len: int) -> Mask | None:
    """Draw a causal, window, padding or document mask at random, or None for no mask."""
    cut = rng.randint(1, kv_len - 1)
    masks: tuple[Mask | None, ...] = (
        None,
        Causal(),
        Causal() & Window(rng.randint(0, kv_len), 0),
        Window(rng.randint(0, 70), rng.randint(0, 70)),
        Padding([rng.randint(1, kv_len) for _ in range(batch)]),
        Documents((cut, kv_len - cut), rule=Causal()),
    )
    return rng.choice(masks)
