"""Wrong kernels whose mistakes are drawn from a seed: distinct, and found by the laws."""

import pytest
import torch

from saccade.testing import check_laws, history, oracle
from saccade.testing.blocked_kernel import Block, BlockedKernel
from saccade.testing.plain_kernel import attend
from saccade.testing.seeded_mutants import BLOCK_LOCATIONS, CONDITIONS, EDGES, TENSOR_PARTS, mutants

FEW = mutants(12, seed=7)
Q, K, V = (
    torch.randn(2, 4, 150, 24, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3)
)
CAUSAL = torch.ones(2, 4, 150, 150, dtype=torch.bool).tril()


def test_mutants_are_distinct_and_come_from_the_seed():
    drawn = mutants(200, seed=3)
    assert len({str(mutant) for mutant in drawn}) == 200
    assert [str(mutant) for mutant in drawn] == [str(mutant) for mutant in mutants(200, seed=3)]
    assert {str(mutant) for mutant in drawn} != {str(mutant) for mutant in mutants(200, seed=4)}
    assert {mutant.name.split()[0] for mutant in drawn} >= {"scores", "mask", "group", "blocks", "delta", "lse"}


def test_more_mutants_than_a_thousand_are_refused():
    with pytest.raises(ValueError, match=r"count must be from 0 to 1000; got 1001"):
        mutants(1001)


@pytest.mark.ci
@pytest.mark.parametrize("mutant", FEW, ids=str)
def test_a_drawn_mutant_is_found(mutant):
    found = check_laws.find_mutant(mutant)
    assert found is not None
    assert not found.message.startswith("raised")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_one_of_200_drawn_mutants_is_found(seed, capsys):
    assert history.main(["--mutants", "200", "--seed", str(seed)]) == 0
    assert capsys.readouterr().out.endswith(f"200 mutants of seed {seed}, 0 not found\n")


def test_the_command_prints_a_table_of_mutants(capsys, monkeypatch):
    assert history.main(["--mutants", "2", "--seed", "7"]) == 0
    assert str(FEW[1]) in capsys.readouterr().out
    monkeypatch.setattr(history, "find_mutant", lambda mutant, seed: None)
    assert history.main(["--mutants", "2"]) == 1
    assert capsys.readouterr().out.endswith("2 mutants of seed 0, 2 not found\n")


@pytest.mark.parametrize("block", [32, 100])
def test_the_kernel_without_a_mistake_is_the_definition(block):
    out = BlockedKernel(block)(Q, K[:, :2], V[:, :2], CAUSAL)
    torch.testing.assert_close(out, oracle.attention(Q, K[:, :2], V[:, :2], CAUSAL)[0])


def test_a_mutant_is_right_where_its_condition_does_not_hold():
    mutant = next(mutant for mutant in mutants(200) if mutant.condition == "for fewer queries than keys")
    torch.testing.assert_close(mutant.kernel()(Q, K, V, CAUSAL), attend(Q, K, V, CAUSAL))


def test_conditions_and_places_tell_sizes_and_blocks_apart():
    sizes = [(1, 1, 1, 1, 65, 32), (2, 8, 2, 192, 192, 96)]
    assert {name for name, holds in CONDITIONS.items() if holds(sizes[0]) == holds(sizes[1])} == {"always"}
    inner = Block(1, 3, 1, 3)
    assert {name for name, holds in BLOCK_LOCATIONS.items() if holds(inner)} == {"everywhere"}
    assert all(holds(Block()) for holds in BLOCK_LOCATIONS.values())
    assert all(part(Q).expand_as(Q).any() and not part(Q).all() for part in TENSOR_PARTS.values())


@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_wrong_edges_do_not_cover_the_tokens_once(edges):
    covered = [place for block in edges(150, 64) for place in range(150)[block]]
    assert covered != list(range(150))
