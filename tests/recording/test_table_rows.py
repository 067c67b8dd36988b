"""A recording as a table: every number is that of the matrix, beside uniform attention, under its layer and head."""

import csv
import math
import os

import pytest
import torch
from tests.integrations import recurrent_models
from tests.recording.eager_weights import ids_of, weights_of

import saccade as sc
from saccade import caches, masks
from saccade.recording import record
from saccade.statistics import (
    Coverage,
    Entropy,
    InductionMass,
    LagMass,
    LargestLogit,
    Parts,
    PositionInformation,
    TopK,
)

COLUMNS = ["layer", "layer_index", "run", "batch", "head", "statistic", "unit", "value", "uniform"]


def found(rows, **named):
    """The value and baseline of the one row with these cells."""
    (row,) = [row for row in rows if all(row[name] == cell for name, cell in named.items())]
    return row["value"], row["uniform"]


def test_each_number_of_each_head_is_a_row(llama):
    ids = ids_of(11)
    with torch.no_grad(), record(llama) as recording:
        llama(ids)
        llama(ids_of(7))
    rows, weights = recording.to_rows(), weights_of("llama", ids)
    assert list(rows[0]) == COLUMNS
    first = [row for row in rows if row["run"] == 0]
    measures = recording.runs(0)[0].summary().measures
    assert len(first) == len(weights) * weights[0].shape[0] * weights[0].shape[1] * len(measures)
    assert len(rows) == 2 * len(first)
    visible = torch.arange(1.0, 12)
    for layer, dense in enumerate(weights):
        for item, head in ((0, 0), (1, 3)):
            where = {"layer_index": layer, "run": 0, "batch": item, "head": head}
            own = dense[item, head].double()
            want = {
                "entropy": (torch.special.entr(own).sum(-1).mean(), visible.log().mean()),
                "first_mass": (own[:, 0].mean(), (1 / visible).mean()),
                "largest_weight": (own.amax(-1).mean(), (1 / visible).mean()),
            }
            for name, numbers in want.items():
                assert found(rows, statistic=name, **where) == pytest.approx([*map(float, numbers)], abs=1e-5)
    assert {row["layer"] for row in rows} == set(recording.layers)


def test_chosen_heads_keep_their_numbers(llama):
    ids = ids_of(9)
    with torch.no_grad(), record(llama, heads=[3, 1], keep=("statistics", LagMass(1))) as recording:
        llama(ids)
    rows, dense = recording.to_rows(), weights_of("llama", ids)[1]
    assert [row["head"] for row in rows if row["statistic"] == "entropy"][:2] == [3, 1]
    before = dense.diagonal(-1, dim1=2, dim2=3).sum(-1) / 9
    for head in (1, 3):
        value, uniform = found(rows, layer_index=1, batch=0, head=head, statistic="lag_mass_1")
        assert value == pytest.approx(float(before[0, head]), abs=1e-5)
        assert uniform == pytest.approx(sum(1 / n for n in range(2, 10)) / 9, abs=1e-6)


STATISTICS = (InductionMass((1, 2, 1, 2, 1, 1, 3, 2)), Coverage((0.5, 0.9)), Parts(1, 2, 1, 2), PositionInformation())


@pytest.mark.parametrize("also", [(), ("qk",), ("statistics",)], ids=["alone", "qk", "statistics"])
def test_statistics_that_were_named_are_means_over_queries_that_see_something(also):
    hidden = masks.Causal() & ~masks.Window(0, 0)  # the first query sees nothing
    layer = sc.nn.MultiHeadAttention(8, 2, mask=hidden)
    x = torch.randn(2, 8, 8)
    with torch.no_grad(), record(layer, keep=(*STATISTICS, TopK(2), LargestLogit(), *also)) as recording:
        layer(x)
    with torch.no_grad():
        matrix = layer.matrix(x)
    rows = recording.to_rows()
    names = ["induction_mass", "coverage_0.5", "coverage_0.9", "sink_part", "local_part", "anchor_part", "rest_part"]
    names += ["position_information", "largest_logit"]
    assert set(names) <= {row["statistic"] for row in rows}
    if not also:
        assert {row["statistic"] for row in rows} == set(names)
    induction, coverage, parts, information = matrix.compute(*STATISTICS)
    even = matrix.uniform().compute(*STATISTICS)
    per_query = {"induction_mass": (induction, even[0]), "coverage_0.9": (coverage[..., 1], even[1][..., 1])}
    per_query |= {"local_part": (parts[..., 1], even[2][..., 1])}
    for name, numbers in per_query.items():
        want = [float(x[1, 1, 1:].double().mean()) for x in numbers]
        assert found(rows, statistic=name, batch=1, head=1) == pytest.approx(want, abs=1e-5)
    want = [float(information[0, 1]), float(even[3][0, 1])]
    assert found(rows, statistic="position_information", batch=0, head=1) == pytest.approx(want, abs=1e-5)
    value, uniform = found(rows, statistic="largest_logit", batch=0, head=1)
    assert value == pytest.approx(float(matrix.scores.to_dense()[0, 1].max()), abs=1e-5)
    assert math.isnan(uniform)


def test_a_generation_is_one_run_with_one_baseline():
    layer = sc.nn.MultiHeadAttention(8, 2, mask=masks.Causal())
    statistic, x = InductionMass((1, 2, 1, 2, 1, 1, 3, 2)), torch.randn(1, 8, 8)
    for keep in ((LagMass(1), "statistics"), (LagMass(1), "qk")):
        cache = caches.KVCache()
        with torch.no_grad(), record(layer, keep=keep) as recording:
            for part in x.split([5, 1, 2], 1):
                layer(part, cache=cache)
        with torch.no_grad():
            whole = layer.matrix(x)
        rows = recording.to_rows()
        assert {row["run"] for row in rows} == {0}
        want = [float(one.compute(LagMass(1))[0][0, 1].mean()) for one in (whole, whole.uniform())]
        assert found(rows, statistic="lag_mass_1", head=1) == pytest.approx(want, abs=1e-6)
        want = [whole.summary().named("position_information")[place][0, 1].item() for place in (3, 4)]
        assert found(rows, statistic="position_information", head=1) == pytest.approx(want, abs=1e-5)
        torch.testing.assert_close(recording.uniform(LagMass(1))[recording.layers[0]][0], LagMass(1).uniform(whole))
    torch.testing.assert_close(recording[0].uniform(statistic)[0], statistic.uniform(whole))


def test_weights_of_any_sign_have_the_baseline_of_their_mask_if_it_was_kept():
    network, inputs = recurrent_models.model("qwen3_next"), recurrent_models.batch()
    for keep in ("statistics", "qk"):
        with torch.no_grad(), record(network, keep=(keep, LagMass(1))) as recording:
            network(**inputs)
        (name,) = [name for name in recording if not recording[name].calls[0].summary and "linear_attn" in name][:1]
        rows = [row for row in recording.to_rows() if row["layer"] == name]
        length, statistics = recording[name].shape[2], recording[name].statistics
        value, uniform = found(rows, batch=0, head=1, statistic="previous_mass")
        assert value == pytest.approx(float(statistics["previous_mass"][0, 1].mean()), abs=1e-5)
        want = sum(1 / n for n in range(2, length + 1)) / length
        assert math.isnan(uniform) if keep == "statistics" else uniform == pytest.approx(want, abs=1e-5)
        value, uniform = found(rows, batch=0, head=1, statistic="lag_mass_1")
        assert value == pytest.approx(float(statistics["previous_mass"][0, 1].mean()), abs=1e-5)
        assert uniform == pytest.approx(want, abs=1e-5)


def test_nothing_with_a_number_for_each_head_is_an_error(llama):
    with torch.no_grad(), record(llama, keep="topk") as recording:
        llama(ids_of(5))
    with pytest.raises(sc.UnsupportedError, match=r'no statistic with one number(.|\n)*keep="statistics"'):
        recording.to_rows()
    with pytest.raises(sc.UnsupportedError, match=r"Entropy.* was not computed while recording"):
        recording[0].uniform(Entropy())
    with pytest.raises(sc.UnsupportedError, match="no uniform baseline of TopK"):
        recording[0].uniform(TopK(8))


def test_csv_has_every_row_and_empty_cells_for_nan(llama, tmp_path):
    with torch.no_grad(), record(llama, keep=("statistics", LargestLogit())) as recording:
        llama(ids_of(6))
    path = recording.to_csv(tmp_path / "heads.csv")
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    rows = recording.to_rows()
    assert list(read[0]) == COLUMNS
    assert len(read) == len(rows)
    for text, row in zip(read, rows, strict=True):
        for name, cell in row.items():
            is_nan = isinstance(cell, float) and math.isnan(cell)
            assert text[name] == ("" if is_nan else str(cell))
    assert os.listdir(tmp_path) == ["heads.csv"]


def test_a_file_is_whole_or_as_it_was(llama, tmp_path, monkeypatch):
    with torch.no_grad(), record(llama) as recording:
        llama(ids_of(6))
    path = tmp_path / "heads.csv"
    path.write_text("as it was")

    def full(handle, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        recording.to_csv(path)
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["heads.csv"]


@pytest.mark.parametrize("write", ["to_csv", "to_parquet"])
def test_a_path_is_checked_before_anything_is_computed(llama, tmp_path, write, monkeypatch):
    with torch.no_grad(), record(llama) as recording:
        llama(ids_of(6))
    monkeypatch.setattr(recording, "to_rows", None)
    with pytest.raises(ValueError, match="path must name a file in an existing folder"):
        getattr(recording, write)(tmp_path / "nowhere" / "heads")
    with pytest.raises(TypeError, match="path must be a path"):
        getattr(recording, write)(3)


def test_parquet_reads_as_the_same_table(llama, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra of its own: saccade-attention[tables]")
    with torch.no_grad(), record(llama, keep=("statistics", LargestLogit())) as recording:
        llama(ids_of(6))
    table = parquet.read_table(recording.to_parquet(tmp_path / "heads.parquet"))
    assert table.column_names == COLUMNS
    for read, row in zip(table.to_pylist(), recording.to_rows(), strict=True):
        assert {name: str(cell) for name, cell in read.items()} == {name: str(cell) for name, cell in row.items()}
