"""Pages of recordings show what was kept: everything of queries and keys, else what the answers say."""

import numpy as np
import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.integrations import recurrent_models
from tests.recording.eager_weights import ids_of, weights_of
from tests.viz.page.page_reader import written

import saccade as sc
from saccade import masks
from saccade.recording import record
from saccade.statistics import Pooled, TopK

WORDS = ["you", "can", "look", "at", "all", "of", "it", "and", "at", "all"]


@pytest.fixture(scope="module")
def llama():
    return zoo.model("llama", "sdpa")


def recorded(model, keep, *, steps=0):
    ids = ids_of()
    with torch.no_grad(), record(model, keep=keep) as recording:
        if steps:
            model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None)
        else:
            model(ids)
    return recording


def check_maps(page, weights, *, side=0):
    """Small maps of every layer against ``[heads, q_len, kv_len]`` weights."""
    for layer, own in enumerate(weights):
        for head, dense in enumerate(own.double().numpy()):
            cells = page.small(layer, head, side)[0]
            np.testing.assert_allclose(np.nan_to_num(cells), dense, rtol=0.06, atol=2e-6)


def check_rows(close, weights):
    """Rows that were kept in part hold the largest weights, each at its key."""
    values, keys = close.rows
    k = min(values.shape[1], weights.shape[1])
    largest = -np.sort(-weights, -1)[:, :k]
    np.testing.assert_allclose(-np.sort(-values, -1)[:, :k], largest, rtol=2e-3, atol=1e-6)
    for line, own, names in zip(weights, values, keys, strict=True):
        np.testing.assert_allclose(line[names[names >= 0].astype(int)], own[names >= 0], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("item", [0, 1])
def test_queries_and_keys_show_everything(llama, tmp_path, item):
    recording = recorded(llama, "qk")
    page = written(tmp_path, recording, tokens=[*WORDS, "times"], batch=item)
    assert [layer["name"] for layer in page.side()["layers"]] == list(recording)
    check_maps(page, [weights[item] for weights in weights_of("llama", ids_of())])
    assert page.tokens() == ([*WORDS, "times"], [*WORDS, "times"])
    measured = recording[1].summary().named("entropy").values[item]
    assert page.layer(1)["values"]["entropy"] == pytest.approx(measured.tolist(), rel=1e-5)


def test_a_prompt_and_its_steps_are_one_matrix(llama, tmp_path):
    recording = recorded(llama, "qk", steps=5)
    assert len(recording[0].calls) == 5
    page = written(tmp_path, recording, batch=1)
    check_maps(page, [run.matrix.to_dense()[1] for run in recording.values()])
    assert (page.layer()["queries"], page.layer()["keys"], page.layer()["first"]) == (15, 15, 0)


def test_statistics_have_measures_and_what_keys_receive(llama, tmp_path):
    recording, weights = recorded(llama, "statistics"), weights_of("llama", ids_of())
    page = written(tmp_path, recording)
    for place, run in enumerate(recording.values()):
        layer = page.layer(place)
        for measure in run.summary().measures:
            assert layer["values"][measure.name] == pytest.approx(measure.values[0].tolist(), rel=1e-5)
        assert page.small(place, 0) is None
        assert not layer["signed"]
        for head in range(4):
            close = page.close(place, head)
            assert (close.k, close.map) == (0, None)
            np.testing.assert_allclose(close.received, weights[place][0, head].sum(0), rtol=2e-3)


def test_statistics_of_a_generation_are_means_over_all_queries(llama, tmp_path):
    recording = recorded(llama, "statistics", steps=4)
    layer = written(tmp_path, recording).layer()
    statistics = recording[0].statistics
    assert layer["values"]["entropy"] == pytest.approx(statistics["entropy"][0].mean(-1).tolist(), rel=1e-5)
    largest = statistics["largest_logit"][0].amax(-1).tolist()
    assert layer["values"]["largest_logit"] == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("statistic", ["pooled", Pooled(4, "max"), Pooled(5, "sum")], ids=str)
def test_pooled_maps_are_shown_as_they_were_kept(llama, tmp_path, statistic):
    recording = recorded(llama, statistic)
    page = written(tmp_path, recording)
    kept = [run.compute(run.kept[0])[0][0] for run in recording.values()]
    check_maps(page, kept)
    assert page.layer()["values"] == {}
    assert page.close(0, 0).received is None


def test_the_pooled_map_with_largest_weights_is_shown(llama, tmp_path):
    recording = recorded(llama, (Pooled(6), Pooled(3, "max"), Pooled(4, "max")))
    check_maps(written(tmp_path, recording), [run.compute(Pooled(4, "max"))[0][0] for run in recording.values()])


@pytest.mark.parametrize("bins, is_known", [(64, True), (4, False)])
def test_columns_without_sinks_are_there_where_they_are_known(tmp_path, bins, is_known):
    mask = masks.Causal() & (masks.Window(1, 0) | masks.Global([3]))
    model = sc.nn.MultiHeadAttention(16, 2, mask=mask)
    with torch.no_grad(), record(model, keep=("statistics", Pooled(bins, "max"))) as recording:
        model(torch.randn(1, 40, 16))
    page = written(tmp_path, recording)
    layer = page.layer()
    assert layer["sinks"] == [3]
    assert layer["sinkColumns"] == ([3] if is_known else [])
    beside = page.small(0, 1)[1]
    assert beside.shape == (min(bins, 40), len(layer["sinkColumns"]))
    assert not beside.any()


def test_pooled_maps_of_several_calls_make_no_map(llama, tmp_path):
    page = written(tmp_path, recorded(llama, ("pooled", "topk"), steps=3))
    assert page.small(0, 0) is None
    assert page.close(0, 0).k == 8


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(
    "keep", ["topk", ("topk", TopK(3)), ("statistics", "topk"), ("pooled", TopK(20), "statistics")]
)
def test_strongest_keys_are_those_that_were_kept(llama, tmp_path, keep, steps):
    recording, everything = recorded(llama, keep, steps=steps), recorded(llama, "qk", steps=steps)
    page = written(tmp_path, recording)
    for place, run in enumerate(everything.values()):
        dense = run.matrix.to_dense()[0].double().numpy()
        for head in range(4):
            close = page.close(place, head)
            check_rows(close, dense[head])
            assert close.columns[0].size == 0
            assert (close.received is None) == ("statistics" not in keep)


@pytest.mark.parametrize("keep", ["statistics", ("statistics", Pooled(4, "sum")), Pooled(4, "sum")], ids=str)
def test_weights_of_any_sign_are_shown_with_their_signs(tmp_path, keep):
    network, inputs = recurrent_models.model("qwen3_next"), recurrent_models.batch()
    with torch.no_grad(), record(network, keep=keep) as recording:
        network(**inputs)
    layer = next(iter(recurrent_models.recurrent_layers(network)))
    place = list(recording).index(layer)
    page = written(tmp_path, recording)
    assert page.layer(place)["signed"]
    if keep != "statistics":
        cells = recording[layer].compute(Pooled(4, "sum"))[0][0].double().numpy()
        assert (cells < 0).any()
        for head, own in enumerate(cells):
            np.testing.assert_allclose(page.small(place, head)[0], own, rtol=0.12, atol=2e-6 * np.abs(own).max())


def test_a_softmax_with_a_sink_has_no_signs(tmp_path):
    recording = recorded(zoo.model("gpt_oss", "eager"), "statistics")
    assert "given_mass" in recording[0].statistics
    assert not written(tmp_path, recording).layer()["signed"]


def test_three_kinds_of_layers_of_an_encoder_decoder(tmp_path):
    model = zoo.model("bart", "sdpa")
    source, target = ids_of(9), ids_of(5)
    with torch.no_grad(), record(model, keep="qk") as recording:
        model(input_ids=source, decoder_input_ids=target)
    texts = {"read": [f"s{i}" for i in range(9)], "said": [f"t{i}" for i in range(5)]}
    tokens = {"encoder*": texts["read"], "*self_attn": texts["said"], "*": (texts["said"], texts["read"])}
    page = written(tmp_path, recording, tokens=tokens)
    assert len(page.side()["texts"]) == 2
    seen = set()
    for place, (name, run) in enumerate(recording.items()):
        layer = page.layer(place)
        kind = "encoder" if name.startswith("encoder") else "self" if "self" in name else "cross"
        queries, keys = {
            "encoder": (texts["read"],) * 2,
            "self": (texts["said"],) * 2,
            "cross": (texts["said"], texts["read"]),
        }[kind]
        assert page.tokens(place) == (queries, keys)
        assert [layer["queries"], layer["keys"]] == list(run.shape[2:])
        seen.add((kind, layer["queries"], layer["keys"]))
    assert seen == {("encoder", 9, 9), ("self", 5, 5), ("cross", 5, 9)}
    check_maps(page, [run.matrix.to_dense()[0] for run in recording.values()])


def test_two_recordings_stand_side_by_side(llama, tmp_path):
    one, other = recorded(llama, "qk"), recorded(llama, "statistics")
    page = written(
        tmp_path, one, other=other, names=("before", "after"), tokens=[*WORDS, "b"], other_tokens=[*WORDS, "c"]
    )
    assert [side["name"] for side in page.index["sides"]] == ["before", "after"]
    assert page.tokens(0, 0)[1][-1] == "b"
    assert page.tokens(0, 1)[1][-1] == "c"
    assert page.small(0, 0, 1) is None
    check_maps(page, [weights[0] for weights in weights_of("llama", ids_of())])
