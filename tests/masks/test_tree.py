"""Bounds and plans of trees: the ranges of keys that groups of rows see, compared with paths followed one by one."""

import random

import numpy as np
import pytest
import torch

import saccade as sc
from saccade.masks import Tree
from saccade.masks.rules import tree
from saccade.plan import ALL, Box, Groups, Triangle
from saccade.plan.key_ranges import KeyDomain, Spans

MARGIN = 3


def draw_parents(draw: random.Random, length: int, chain: float) -> list[int]:
    """Return a random forest; ``chain`` is the share of tokens whose parent is the token before."""
    parents = [-1]
    for token in range(1, length):
        other = -1 if draw.random() < 0.1 else draw.randrange(token)
        parents.append(token - 1 if draw.random() < chain else other)
    return parents


def answers(prompt: int, branches: int, tails: int, length: int) -> list[int]:
    """Return a prompt with branches, each of which has tails; all branches and tails have the same length."""
    parents = list(range(-1, prompt - 1))
    for _ in range(branches):
        parents += [prompt - 1, *range(len(parents), len(parents) + length - 1)]
        joint = len(parents) - 1
        for _ in range(tails):
            parents += [joint, *range(len(parents), len(parents) + length - 1)]
    return parents


def pairs_of(parents: list[int]) -> np.ndarray:
    """Return the allowed pairs, bool ``[len, len]``, by following each path."""
    table = np.zeros((len(parents), len(parents)), dtype=bool)
    for row in range(len(parents)):
        token = row
        while token >= 0:
            table[row, token] = True
            token = parents[token]
    return table


DRAW = random.Random(0)
FORESTS = {
    "roots": [[-1] * 9],
    "one chain": [list(range(-1, 80))],
    "comb": [[-1, *(token - 1 - token % 2 for token in range(1, 90))]],
    "many ranges": [[-1, *([0, -1] * 75), 150, *range(151, 170)]],
    "answers": [answers(50, 3, 2, 10)],
    **{f"random, {chain}": [draw_parents(DRAW, 60, chain)] for chain in (0.0, 0.5, 0.9)},
    "two items": [draw_parents(DRAW, 70, 0.8), draw_parents(DRAW, 40, 0.3)],
}


def tables_of(items: list[list[int]]) -> np.ndarray:
    """Return the allowed pairs of each item, bool ``[items, len, len]``, with rows and keys after the last token."""
    length = max(map(len, items)) + MARGIN
    tables = np.zeros((len(items), length, length), dtype=bool)
    for table, parents in zip(tables, items, strict=True):
        table[: len(parents), : len(parents)] = pairs_of(parents)
    return tables


def written(spans: Spans, length: int) -> np.ndarray:
    keys = np.arange(length)
    return ((spans.starts[..., None] <= keys) & (keys < spans.ends[..., None])).any(1)


@pytest.mark.parametrize("name", FORESTS)
def test_pairs_and_depths_follow_the_paths(name):
    items, tables = FORESTS[name], tables_of(FORESTS[name])
    mask = Tree(items)
    assert np.array_equal(mask.to_dense(tables.shape[1])[:, 0].numpy(), tables)
    for depths, parents, table in zip(mask.depths.tolist(), items, tables, strict=True):
        assert depths[: len(parents)] == (table.sum(1)[: len(parents)] - 1).tolist()


@pytest.mark.parametrize("rows", [1, 4, 60])
@pytest.mark.parametrize("name", FORESTS)
def test_bounds_contain_what_some_row_sees_and_only_what_all_rows_see(name, rows, monkeypatch):
    monkeypatch.setattr(tree, "_SMALL", 0)
    tables, draw = tables_of(FORESTS[name]), random.Random(rows)
    count, length, _ = tables.shape
    first = np.asarray([draw.randrange(-MARGIN, length) for _ in range(80)])
    last = np.asarray([min(length - 1, row + draw.randrange(rows)) for row in first])
    batch = np.asarray([draw.randrange(count) for _ in first])
    keys = KeyDomain(np.zeros_like(first), np.full_like(first, length))
    bounds = Tree(FORESTS[name]).bounds(Groups(batch, first, last), keys)
    some, every = written(bounds.any_row, length), written(bounds.all_rows, length)
    for number, (item, start, stop) in enumerate(zip(batch, first, last + 1, strict=True)):
        seen = tables[item, max(start, 0) : max(stop, 0)]
        assert not (seen.any(0) & ~some[number]).any()
        assert not (every[number] & ~(seen.all(0) & (start >= 0))).any()
        if rows == 1:
            assert np.array_equal(some[number], seen.any(0))


def test_bounds_of_a_block_of_rows_are_tight():
    parents = answers(50, 3, 2, 10)
    groups = Groups(*(np.asarray(x) for x in ([0, 0], [112, 50], [117, 79])))
    keys = KeyDomain(np.zeros(2, dtype=np.int64), np.full(2, len(parents)))
    bounds = Tree(parents).bounds(groups, keys)
    some, every = (written(spans, len(parents)) for spans in bounds)
    seen = [pairs_of(parents)[first : last + 1] for first, last in zip(groups.first, groups.last, strict=True)]
    assert [row.nonzero()[0].tolist() for row in some] == [rows.any(0).nonzero()[0].tolist() for rows in seen]
    assert every[0].nonzero()[0].tolist() == seen[0].all(0).nonzero()[0].tolist()[:-1]  # without the first row's own
    assert every[1].nonzero()[0].tolist() == list(range(50))  # the prompt


@pytest.mark.parametrize("name", FORESTS)
def test_a_residual_is_the_content_of_its_box(name):
    mask, tables, draw = Tree(FORESTS[name]), tables_of(FORESTS[name]), random.Random(1)
    kinds = set()
    for _ in range(300):
        item, length = draw.randrange(len(tables)), tables.shape[1]
        rows, keys = (range(*sorted(draw.sample(range(length + 1), 2))) for _ in range(2))
        partial, part = (
            mask.partial(Box(item, rows, keys)),
            tables[item][rows.start : rows.stop, keys.start : keys.stop],
        )
        kinds.add(type(partial))
        if isinstance(partial, bool):
            assert (part == partial).all()
        elif isinstance(partial, Triangle):
            assert np.array_equal(part, np.tri(len(rows), len(keys), partial.offset, dtype=bool))
    assert mask.partial(Box(ALL, range(5), range(5))) is not True
    assert Triangle in kinds or name != "one chain"


@pytest.mark.parametrize("length", [64, 200, 500])
def test_a_plan_of_long_branches_computes_few_masked_pairs(length):
    parents = answers(1024, 4, 2, length)
    plan = Tree(parents).plan(len(parents))
    assert len(plan) == 8  # prompt and first branch, then a tile for each branch or tail that goes on elsewhere
    assert plan.pairs < 1.55 * pairs_of(parents).sum()  # the upper halves of the triangles


def test_attention_to_answers_of_a_prompt_equals_attention_over_each():
    parents = answers(150, 3, 2, 70)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, len(parents), 16, dtype=torch.float64).unbind(0)
    query.requires_grad_()
    out = sc.attention(query, key, value, Tree(parents))
    paths = [row.nonzero()[0] for row in pairs_of(parents)]
    alone = [sc.attention(query[:, :, i : i + 1], key[:, :, path], value[:, :, path]) for i, path in enumerate(paths)]
    expected = torch.cat(alone, 2)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    got, want = (torch.autograd.grad((x * weight).sum(), query)[0] for x in (out, expected))
    torch.testing.assert_close(got, want)
