"""Sets of tokens move through the layers as the boolean product of their matrices says."""

import pytest
import torch

from saccade import masks
from saccade.auditing import Reach
from saccade.auditing.probe_sets import row_sets, separating_sets

RULES = {
    "one rule": [masks.Causal() & masks.Window(2, 0)] * 3,
    "unlike layers": [masks.Window(1, 0), masks.Strided(3), masks.Window(0, 1)],
    "documents": [masks.Documents([5, 4, 3], rule=masks.Causal())] * 2,
    "documents for each item": [masks.Documents([[5, 7], [12]])] * 2,
    "heads": [masks.bigbird(3)] * 2,
}


def product(rules, batch, length):
    """Return the reachable pairs by definition, layer by layer."""
    found = torch.eye(length).expand(batch, -1, -1)
    for rule in rules:
        own = rule.to_dense(length, batch=batch, heads=rule.shape[1]).any(1) | torch.eye(length, dtype=torch.bool)
        found = (own.float() @ found).clamp_max(1)
    return found.bool()


@pytest.mark.parametrize("name", RULES)
def test_sources_and_reach_are_rows_and_columns_of_the_product(name):
    reach, whole = Reach(RULES[name], batch=2, length=12), product(RULES[name], 2, 12)
    for item in range(2):
        for place in range(12):
            one = reach.one(item, place)
            assert torch.equal(reach.sources(one)[item], whole[item, place])
            assert torch.equal(reach.through(one)[item], whole[item, :, place])
            assert not reach.sources(one)[1 - item].any()


def test_a_power_is_the_same():
    rule = masks.Causal() & masks.Window(2, 0)
    reach = Reach([rule] * 3, batch=1, length=12)
    allowed = (rule**3).to_dense(12)[0, 0]
    for place in range(12):
        assert torch.equal(reach.sources(reach.one(0, place))[0], allowed[place])


def test_few_sets_distinguish_components():
    reach = Reach([masks.Documents([3] * 8)] * 2, batch=2, length=24)
    label, count = reach.components()
    assert count == 16
    sets = list(separating_sets(reach))
    assert len(sets) == 6  # 6 over 3 is 20
    for one in range(count):
        for other in set(range(count)) - {one}:
            assert any(bool(keys[label == one].all()) and not bool(keys[label == other].any()) for keys in sets)


def test_rows_of_a_set_share_no_source():
    reach = Reach([masks.Causal() & masks.Window(2, 0)] * 2, batch=2, length=40)
    judged = torch.ones(2, 40, dtype=torch.bool)
    judged[:, :5] = False
    for own in row_sets(reach, judged, 6, 0):
        assert not (own.rows & ~judged).any()
        counted = sum(reach.sources(reach.one(*row)).int() for row in own.rows.nonzero().tolist())
        assert int(counted.max()) == 1
        assert torch.equal(counted.bool(), own.sources)
        assert int(own.rows.sum()) > 4


@pytest.mark.parametrize(
    "rules, sizes, error, message",
    [
        ([], (1, 4), TypeError, "rules must be masks, one for each layer; got none"),
        (["causal"], (1, 4), TypeError, "rules must be masks"),
        ([masks.Causal()], (0, 4), ValueError, "batch must be an int of at least 1; got 0"),
        ([masks.Causal()], (1, 1 << 20), ValueError, "length must be at most 16,384"),
    ],
)
def test_wrong_arguments_are_refused(rules, sizes, error, message):
    with pytest.raises(error, match=message):
        Reach(rules, batch=sizes[0], length=sizes[1])
