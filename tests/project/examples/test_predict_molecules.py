"""Molecules become graphs that say what is between atoms; the model sees nothing else, and learns what paths say."""

import dataclasses
import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "predict_molecules.py"

# Atoms by their element and hydrogens, bonds by their ends and order.
ACETIC_ACID = ([("C", 3), ("C", 0), ("O", 0), ("O", 1)], [(0, 1, 1), (1, 2, 2), (1, 3, 1)])
CYCLOBUTANE = ([("C", 2)] * 4, [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1)])
ELEMENTS = {"C": 1, "N": 2, "O": 3}


def _line(atoms, bonds, scaffold="", targets=None):
    """A line of a file of molecules."""
    neighbours = np.bincount([end for bond in bonds for end in bond[:2]], minlength=len(atoms))
    kinds = [(ELEMENTS[name], hydrogens, int(n), 1) for (name, hydrogens), n in zip(atoms, neighbours, strict=True)]
    angles = 2 * np.pi * np.arange(len(atoms)) / len(atoms)
    counts = np.bincount([8 * element + n for element, _, n, _ in kinds])
    return {
        "smiles": scaffold,
        "scaffold": scaffold,
        "atoms": kinds,
        "bonds": bonds,
        "targets": targets or {"balaban": 0.0, "logp": 0.0},
        "fragments": {str(i): int(count) for i, count in enumerate(counts) if count},
        "pairs": {"1": len(bonds)},
        "places": np.stack([np.cos(angles), np.sin(angles)], 1).tolist(),
    }


def _balaban(n, bonds):
    """Balaban's J of a graph, with the lengths of its paths by Floyd and Warshall."""
    apart = np.full((n, n), np.inf)
    np.fill_diagonal(apart, 0)
    for a, b, _ in bonds:
        apart[a, b] = apart[b, a] = 1
    for k in range(n):
        apart = np.minimum(apart, apart[:, k, None] + apart[k])
    sums = apart.sum(1)
    return len(bonds) / (len(bonds) - n + 2) * sum((sums[a] * sums[b]) ** -0.5 for a, b, _ in bonds)


def _made(count):
    """Chains of 14 atoms with 5 branches of one, each arrangement once: alike but for where the branches are."""
    arrangements = {min(own, tuple(13 - i for i in reversed(own))) for own in combinations(range(1, 13), 5)}
    chosen = sorted(arrangements)
    for index in np.random.default_rng(0).permutation(len(chosen))[:count]:
        places = chosen[index]
        bonds = [(k - 1, k, 1) for k in range(1, 14)] + [(place, 14 + k, 1) for k, place in enumerate(places)]
        targets = {"balaban": _balaban(19, bonds), "logp": float(places[0])}
        yield _line([("C", 1)] * 19, bonds, " ".join(map(str, places)), targets)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    def write(lines):
        path = tmp_path_factory.mktemp("data") / "molecules.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def few(example, written):
    return example.molecules.read(written([_line(*ACETIC_ACID), _line(*CYCLOBUTANE)]))


@pytest.fixture(scope="module")
def module(example):
    torch.manual_seed(0)
    settings = dataclasses.replace(example.QUICK, num_layers=2)
    return example.Predictor(settings, "both").double().eval()


def test_a_graph_says_bonds_and_how_far_atoms_are_apart(example, few):
    acid, ring = example.graphs(few, reach=20)
    assert acid[1].tolist() == [[0, 1, 0, 0], [1, 0, 2, 1], [0, 2, 0, 0], [0, 1, 0, 0]]
    assert acid[2].tolist() == [[0, 1, 2, 2], [1, 0, 1, 1], [2, 1, 0, 2], [2, 1, 2, 0]]
    assert ring[2].tolist() == [[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]]
    assert acid[0][:, :3].tolist() == [[1, 3, 1], [1, 0, 3], [3, 0, 1], [3, 1, 1]]


def test_the_bias_is_what_the_tables_say_of_bonds_and_distances(example, few, module):
    graph = example.graphs(few, reach=20)[0]
    bias = module.bias(example.batch_of([graph]))
    for i in range(4):
        for j in range(4):
            wanted = module.of_bonds.weight[graph[1][i, j]] + module.of_paths.weight[graph[2][i, j]]
            torch.testing.assert_close(bias[0, :, i, j], wanted)
    assert example.Predictor(example.QUICK, "none").bias(example.batch_of([graph])) is None


def test_neither_padding_nor_the_order_of_atoms_changes_what_is_said(example, written, module):
    lines = [*_made(2), _line(*ACETIC_ACID)]
    shuffled = []
    for line in lines:
        order = np.random.default_rng(0).permutation(len(line["atoms"]))
        where = np.argsort(order)
        bonds = [(int(where[a]), int(where[b]), kind) for a, b, kind in line["bonds"]]
        shuffled.append({**line, "atoms": [line["atoms"][i] for i in order], "bonds": bonds})
    known, other = (example.graphs(example.molecules.read(written(own)), 20) for own in (lines, shuffled))
    together = example.said(module, known)
    assert len({len(atoms) for atoms, _, _ in known}) > 1
    np.testing.assert_allclose(np.concatenate([example.said(module, [own]) for own in known]), together)
    np.testing.assert_allclose(example.said(module, other), together)


def test_no_scaffold_is_in_two_parts(example, written):
    found = example.molecules.read(written(_made(390)))
    often = [own._replace(scaffold="often") for own in found[:30]]
    parts = example.split([*often, *found[30:], *found[30:]])
    scaffolds = [{own.scaffold for own in part} for part in parts]
    assert sum(map(len, parts)) == 750
    assert min(map(len, parts)) >= 0.09 * 750
    assert "often" in scaffolds[0]
    assert all(not a & b for i, a in enumerate(scaffolds) for b in scaffolds[:i])


def test_baselines_count_what_they_say_they_count(example, few):
    baselines = example.molecule_baselines
    counts = baselines.path_counts(example.graphs(few, 5), 5)
    # Atoms, bonds and rings, distances 0 to 6, kinds of bonds, elements, numbers of neighbours.
    assert counts[:, :3].tolist() == [[4, 3, 0], [4, 4, 1]]
    assert counts[0, 3:10].tolist() == [4, 6, 6, 0, 0, 0, 0]
    assert counts[1, 3:10].tolist() == [4, 8, 4, 0, 0, 0, 0]
    assert counts[0, 10:15].tolist() == [10, 4, 2, 0, 0]
    assert counts[0, 15:19].tolist() == [0, 2, 0, 2]
    assert counts[1, 27:].tolist() == [0, 0, 4, 0, 0, 0, 0]
    hashed = baselines.hashed(few, "fragments", 512)
    assert hashed[:, -1].tolist() == [4, 4]
    # Two carbons and two oxygens, of three kinds with their neighbours; four that are alike.
    assert [sorted(row[row > 0].tolist()) for row in hashed[:, :-1]] == [[1, 1, 2], [4]]


def test_the_second_part_chooses_and_the_last_is_only_asked(example):
    def constants(x, y):
        return iter([lambda asked, value=value: np.full(len(asked), value) for value in (0.0, 2.0, 5.0)])

    x = [np.zeros((n, 1)) for n in (3, 4, 2)]
    y = [np.zeros((3, 2)), np.tile([1.9, 4.0], (4, 1)), np.full((2, 2), 99.0)]
    assert example.molecule_baselines.best(constants, x, y).tolist() == [[2.0, 5.0], [2.0, 5.0]]


def test_r2_is_1_for_right_predictions_and_0_for_the_mean(example):
    wanted = np.random.default_rng(0).normal(size=(50, 2))
    mean = np.tile(wanted.mean(0), (50, 1))
    row = example.row_of("who", {"0": wanted, "1": mean}, wanted)
    assert (row["lowest"], row["highest"]) == (pytest.approx(0.0), pytest.approx(1.0))
    assert row["logp"] == pytest.approx(0.5)


def test_looks_are_shares_of_which_the_sink_takes_the_rest(example, written, module):
    graph = example.graphs(example.molecules.read(written(_made(1))), 20)[0]
    pool, *heads = example.looks(module, graph).values()
    assert float(pool.sum()) == pytest.approx(1.0)
    assert all(0 < float(own.sum()) < 1 for own in heads)
    far = [float((own * graph[2][int(graph[2].float().mean(1).argmax())]).sum() / own.sum()) for own in heads]
    assert far[0] < far[1]


def test_without_rdkit_it_says_what_to_install(example, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(SystemExit, match="pip install rdkit"):
        example.molecules.made(tmp_path)


def test_rdkit_says_what_one_counts_by_hand(example, tmp_path, monkeypatch):
    pytest.importorskip("rdkit", reason="the molecules come with RDKit, which is no dependency")
    named = ["CC(=O)O", "OC(C)=O", "C1CCC1", "CC(=O)O.O", "no molecule"]
    monkeypatch.setattr(example.molecules, "_shipped", lambda: iter(named))
    read = example.molecules.read(example.molecules.made(tmp_path, fewest_atoms=2))
    found = {own.smiles: own for own in read}
    assert set(found) == {"CC(=O)O", "C1CCC1"}
    ring = found["C1CCC1"]
    assert ring.targets["balaban"] == pytest.approx(_balaban(4, CYCLOBUTANE[1]))
    assert ring.scaffold == "C1CCC1"
    acid = found["CC(=O)O"]
    assert acid.scaffold == ""
    assert acid.atoms[:, :3].tolist() == [[1, 3, 1], [1, 0, 3], [3, 0, 1], [3, 1, 1]]
    assert acid.bonds.tolist() == [[0, 1, 0, 0], [1, 0, 2, 1], [0, 2, 0, 0], [0, 1, 0, 0]]


@pytest.mark.slow
def test_it_learns_from_paths_what_atoms_do_not_say(example, written, monkeypatch, tmp_path):
    short = {"steps": 200, "warm_up": 20, "embed_dim": 32, "num_layers": 2, "most_molecules": None}
    monkeypatch.setattr(example, "QUICK", dataclasses.replace(example.QUICK, **short))
    monkeypatch.setattr(example.molecule_baselines, "MOST_TREES", 25)
    rows = example.main(["--quick", "--data", str(written(_made(390))), "--out", str(tmp_path)])
    by_name = {row["who"]: row["mean"] for row in rows}
    both, _, none = (by_name[name] for name in example.MODELS.values())
    assert both > 0.6
    # All molecules have the same atoms.
    assert none < 0.05
    assert by_name["the mean"] < 0.05
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"] == rows
