"""Folds are walks, families follow their Potts model, baselines count as their formulas say; the model learns."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "find_contacts.py"


@pytest.fixture(scope="module")
def planted(example):
    return example.planted_folds


@pytest.fixture(scope="module")
def baselines(example):
    return example.contact_baselines


@pytest.fixture(scope="module")
def readers(example):
    torch.manual_seed(0)
    made = {}
    for name in example.MODELS:
        settings = dataclasses.replace(example.QUICK, num_blocks=2)
        made[name] = example.Reader(settings, has_triangles=name == "triangles").double().eval()
        # Fresh layers add nothing.
        for own in made[name].modules():
            if isinstance(own, example.nn.MultiHeadAttention):
                torch.nn.init.normal_(own.output_projection.weight)
    return made


# --- what is planted -------------------------------------------------------------------------------------------------


def test_a_fold_is_a_walk_that_never_meets_itself(planted):
    for seed in range(5):
        places = planted.fold(24, np.random.default_rng(seed))
        assert len({tuple(place) for place in places.tolist()}) == 24
        apart = np.linalg.norm(places[:, None] - places, axis=2)
        np.testing.assert_allclose(np.diag(apart, 1), 2**0.5)
        # On this lattice nobody is nearer than neighbours are.
        assert (apart + 9 * np.eye(24)).min() == pytest.approx(2**0.5)
        np.testing.assert_array_equal(planted.touching(places), np.isclose(apart, 2**0.5))


def test_sequences_are_as_frequent_as_the_potts_model_says(planted):
    draw = torch.Generator().manual_seed(0)
    letters, residues = planted.LETTERS, 2
    pair = torch.randn(letters, letters, generator=draw)
    fields = torch.randn(residues, letters, generator=draw)
    couplings = torch.zeros(residues, residues, letters, letters)
    couplings[0, 1], couplings[1, 0] = pair, pair.T
    given = couplings.permute(0, 2, 1, 3).flatten(2)[None]
    start = torch.zeros(1, 20_000, residues, dtype=torch.int64)
    found = planted._evolved(start, given, fields[None], 20.0, draw)[0]
    counted = torch.bincount(found[:, 0] * letters + found[:, 1], minlength=letters**2) / len(found)
    wanted = torch.softmax((fields[0][:, None] + fields[1] + pair).flatten(), 0)
    assert float((counted - wanted).abs().sum()) < 0.06


def test_relatives_agree_more_than_strangers(planted):
    few, many = (planted.families(range(4), 16, 4, sweeps=own) for own in (0.1, 3.0))
    alike = [(own.letters[:, :, None] == own.letters[:, None]).double().mean() for own in (few, many)]
    assert alike[0] > alike[1] + 0.2
    assert few.letters.shape == (4, 16, 16)
    torch.testing.assert_close(few.touches, many.touches)


def test_no_fold_that_is_measured_was_learned_from(example):
    settings = dataclasses.replace(example.QUICK, residues=32, doublings=0, train_families=30, test_families=16)
    folds = [{own.numpy().tobytes() for own in part.touches} for part in example.load(settings)]
    assert [len(own) for own in folds] == [30, 8, 16]
    assert not folds[0] & folds[1] | folds[0] & folds[2] | folds[1] & folds[2]


# --- baselines -------------------------------------------------------------------------------------------------------


def test_mutual_information_is_that_of_the_two_columns(baselines):
    letters = torch.randint(8, (40, 3), generator=torch.Generator().manual_seed(0))
    letters[:, 1] = torch.where(letters[:, 2] > 3, letters[:, 0], letters[:, 1])
    alike = [sum(float((own == other).double().mean()) >= 0.8 for other in letters) for own in letters]
    weight = 1 / np.array(alike)
    weight /= weight.sum()
    found = np.zeros((3, 3))
    for i, j in itertools.permutations(range(3), 2):
        for a, b in itertools.product(range(8), repeat=2):
            has_a, has_b = (letters[:, i] == a).numpy(), (letters[:, j] == b).numpy()
            both, of_a, of_b = (float(weight[has].sum()) for has in (has_a & has_b, has_a, has_b))
            both, of_a, of_b = 0.8 * both + 0.2 / 64, 0.8 * of_a + 0.2 / 8, 0.8 * of_b + 0.2 / 8
            found[i, j] += both * np.log(both / (of_a * of_b))
    columns = found.sum(1) / 2
    corrected = found - columns[:, None] * columns / columns.mean()
    mine = baselines.mutual_information(letters, 0.2).numpy()
    off = ~np.eye(3, dtype=bool)
    np.testing.assert_allclose(mine[off], corrected[off])


@pytest.mark.ci
@pytest.mark.parametrize("pseudocount, ridge", [(0.3, 0.0), (0.0, 0.1)])
def test_couplings_see_through_what_a_third_column_passes_on(planted, baselines, pseudocount, ridge):
    draw = torch.Generator().manual_seed(1)
    alike = 2.0 * torch.eye(8)
    # The other nine are for themselves: among fewer letters, most sequences would be taken for relatives.
    chain = torch.zeros(12, 12, 8, 8)
    for i, j in ((0, 1), (1, 2)):
        chain[i, j] = chain[j, i] = alike
    given = chain.permute(0, 2, 1, 3).flatten(2)[None]
    start = torch.randint(8, (1, 1500, 12), generator=draw)
    letters = planted._evolved(start, given, torch.zeros(1, 12, 8), 20.0, draw)[0]
    single, pair = baselines.frequencies(letters, pseudocount)
    covariance = (pair - single[:, :, None, None] * single).square().sum((1, 3)).sqrt()
    found = baselines.couplings(letters, pseudocount, ridge)
    strong = found.square().sum((1, 3)).sqrt()
    torch.testing.assert_close(found, found.permute(2, 3, 0, 1), atol=1e-6, rtol=1e-6)
    assert float(strong[0, 2] / strong[0, 1]) < 0.6 * float(covariance[0, 2] / covariance[0, 1])


def test_sequences_that_are_the_same_count_as_one(baselines):
    letters = torch.tensor([[0] * 10, [0] * 10, [1] * 10, [0] * 8 + [1] * 2])
    torch.testing.assert_close(
        baselines.weights(letters), torch.tensor([1 / 3, 1 / 3, 1.0, 1 / 3], dtype=torch.float64)
    )


def test_precision_counts_the_best_pairs_that_are_far_enough_apart(baselines):
    scores, touches = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.bool)
    for rank, (i, j) in enumerate([(0, 1), (0, 6), (1, 7), (0, 7)]):
        scores[i, j] = 9 - rank
    touches[0, 1] = touches[0, 6] = touches[0, 7] = True
    found = [baselines.precision(scores, touches, count, 6) for count in (1, 2, 3)]
    assert found == pytest.approx([1, 1 / 2, 2 / 3])
    often = baselines.separations(torch.stack([touches | touches.T, torch.zeros_like(touches)]))
    assert float(often[7, 0]) == pytest.approx(1 / 2)
    assert float(often[2, 1]) == pytest.approx(1 / 14)


# --- the model -------------------------------------------------------------------------------------------------------


def test_both_models_have_as_many_weights(example):
    counts = [
        sum(own.numel() for own in example.Reader(example.Settings(), has_triangles=has).parameters())
        for has in (True, False)
    ]
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


@pytest.mark.parametrize("name", ["triangles", "rows"])
def test_a_map_is_symmetric_and_the_order_of_sequences_says_nothing(example, readers, name):
    letters = torch.randint(8, (2, 6, 16))
    said = torch.stack(example.maps(readers[name], letters))
    torch.testing.assert_close(said, said.transpose(1, 2))
    torch.testing.assert_close(torch.stack(example.maps(readers[name], letters[:, torch.randperm(6)])), said)
    torch.testing.assert_close(example.maps(readers[name], letters[1:])[0], said[1])


def test_outer_starts_from_covariances(example):
    outer = example.Outer(4, 3, 5).double()
    x = torch.randn(1, 9, 2, 4, dtype=torch.float64)
    normed = outer.norm(x)[0].detach()
    left, right = (own(normed).detach().numpy() for own in (outer.left, outer.right))
    wanted = [np.cov(left[:, 0, c], right[:, 1, d], ddof=0)[0, 1] for c in range(3) for d in range(3)]
    torch.testing.assert_close(outer(x)[0, 0, 1], outer.out(torch.tensor(np.array(wanted))))


def test_a_pair_looks_at_pairs_as_the_formula_says(example, readers):
    module, letters = readers["triangles"], torch.randint(8, (5, 16))
    found = example.looks(module, letters)
    with torch.no_grad():
        alignment, pairs = module.blocks[0](*module.start(letters[None]))
        _, pairs = module.blocks[1].read(alignment, pairs)
        for around, layer in zip(("start", "end"), module.blocks[1].triangles, strict=True):
            x = layer.norm(pairs)[0]
            query, key = (
                own(x).unflatten(-1, (2, -1))
                for own in (layer.attention.query_projection, layer.attention.key_projection)
            )
            bias, i, j = layer.bias_projection(x), 3, 11
            key, third = (key[i], bias[j]) if around == "start" else (key[:, j], bias[:, i])
            scores = torch.einsum("hd,khd->hk", query[i, j], key) / query.shape[-1] ** 0.5 + third.T
            torch.testing.assert_close(found[around][:, i, j], torch.softmax(scores, -1))
            pairs = pairs + layer(pairs)


# --- the run ---------------------------------------------------------------------------------------------------------


def test_a_family_that_is_not_there_is_refused(example, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--quick", "--out", str(tmp_path), "--family", "10"])
    assert "--family must be at least 0 and below 10; got 10." in capsys.readouterr().err


@pytest.mark.slow
def test_it_learns_to_find_contacts_of_folds_it_never_saw(example, monkeypatch, tmp_path):
    more = {"steps": 150, "batch_size": 8, "learning_rate": 5e-3, "warm_up": 10, "embed_dim": 16, "pair_dim": 16}
    more |= {"train_families": 400, "test_families": 60, "doublings": 5, "residues": 18}
    monkeypatch.setattr(example, "QUICK", dataclasses.replace(example.QUICK, **more))
    rows = example.main(["--quick", "--out", str(tmp_path)])
    by_name = {row["who"]: row["mean"] for row in rows}
    assert by_name[example.MODELS["triangles"]] > by_name["distance along the chain"] + 0.1
    assert all(by_name[name] > by_name["distance along the chain"] for name in example.contact_baselines.READERS)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"] == rows
