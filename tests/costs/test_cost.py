"""Tests of forecast costs against those of the actual run."""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import saccade as sc
from saccade import masks, mechanisms, scorers
from saccade.costs import Machine, this_machine
from saccade.costs.machine import MachineFile
from saccade.masks import plan_cache as kept_plans
from saccade.models import Decoder, DecoderConfig
from saccade.nn import MultiHeadAttention

CAUSAL = masks.Causal()
SMALL = DecoderConfig(vocab_size=512, embed_dim=64, num_heads=4, num_layers=2, feed_forward_dim=128, max_len=512)


def peak(run):
    """Return the peak memory of a run by torch's allocator, including the plan that is made for the mask and kept."""
    run()
    kept_plans._cached_plan.cache_clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    del result
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mechanism", "mask"),
    [
        (mechanisms.Softmax(), CAUSAL),
        (mechanisms.Softmax(), masks.sliding_window(64)),
        (mechanisms.Softmax(), masks.longformer(64, [0])),
        (mechanisms.Softmax(impl="tiled"), CAUSAL),
        (mechanisms.Softmax(impl="fused"), CAUSAL),
        (mechanisms.Linear(), CAUSAL),
        (mechanisms.Delta(), CAUSAL),
        (mechanisms.GatedLinear(), CAUSAL),
        (mechanisms.Performer(64), CAUSAL),
        (mechanisms.Nystrom(32), None),
    ],
    ids=str,
)
def test_memory_of_a_product(mechanism, mask):
    query, key, value = (torch.randn(1, 4, 1024, 32) for _ in range(3))
    told = sc.cost(mechanism, 1024, mask=mask, num_heads=4, head_dim=32)
    with torch.no_grad():
        held = 3 * query.nbytes + peak(lambda: mechanism(query, key, mask=mask) @ value)
    assert told.forward.peak_bytes == pytest.approx(held, rel=0.1)


def test_memory_of_training_and_operations_of_a_model():
    model, tokens = Decoder(SMALL).train(), torch.randint(512, (1, 384))

    def step():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()

    told = sc.cost(model, 384, optimizer_tensors=0)
    held = tokens.nbytes + sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert told.training.peak_bytes == pytest.approx(held + peak(step), rel=0.1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(tokens)
    told_flops = {name: share.flops for name, share in told.forward.shares().items() if share.flops}
    counted = counter.get_total_flops()
    assert sum(flops for name, flops in told_flops.items() if not name.startswith("attention")) == counted
    assert model.training is False  # as it was left, and not by the cost


@pytest.mark.ci
def test_a_config_costs_what_its_model_does():
    from_config, from_model = sc.cost(SMALL, 256), sc.cost(Decoder(SMALL), 256)
    assert str(from_config) == str(from_model)
    adam, plain = sc.cost(SMALL, 256), sc.cost(SMALL, 256, optimizer_tensors=0)
    assert adam.training.peak_bytes - plain.training.peak_bytes == 2 * sum(
        x.nbytes for x in Decoder(SMALL).parameters()
    )


@pytest.mark.ci
@pytest.mark.parametrize("position_encoding", ["rotary", "learned", "alibi", "relative"])
def test_the_cache_holds_what_is_said(position_encoding):
    config = DecoderConfig(**{**vars(SMALL), "position_encoding": position_encoding})
    model = Decoder(config).eval()
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(2, 100, dtype=torch.long), cache=cache)
    assert sc.cost(config, 100, batch=2).cache_bytes == cache.nbytes


@pytest.mark.parametrize(
    "mechanism",
    [
        mechanisms.Linear(),
        mechanisms.Delta(),
        mechanisms.SSD(4),
        mechanisms.Softmax(),
        mechanisms.Softmax(impl="fused"),
    ],
)
def test_the_cache_of_a_mechanism_holds_what_is_said(mechanism):
    query, key, value = (torch.randn(1, 4, 70, 16) for _ in range(3))
    cache = mechanism.new_cache()
    cache.attend(mechanism, query, key, value, mask=CAUSAL)
    told = sc.cost(mechanism, 70, mask=CAUSAL, num_heads=4, head_dim=16)
    assert told.cache_bytes == cache.nbytes


def test_decoding_reads_what_its_mask_lets_it_see():
    told = sc.cost(masks.sliding_window(256), 65536)
    assert told.decode.flops == 2 * 256 * 8 * (64 + 64)
    assert told.decode.bytes_moved < 2 * 256 * 8 * 128 * 4


def test_a_layer_says_the_same_of_its_cache_whatever_its_kernel():
    told = [
        sc.cost(MultiHeadAttention(64, 4, mechanism=mechanisms.Softmax(impl=impl)), 100, mask=CAUSAL)
        for impl in ("auto", "fused", "tiled")
    ]
    assert len({one.cache_bytes for one in told}) == 1
    assert told[0].cache_bytes == 2 * 100 * 64 * 4
    assert told[1].forward.peak_bytes != told[2].forward.peak_bytes


def test_numbers_are_said_in_few_digits():
    assert "1000 KiB" in str(sc.cost(CAUSAL, 1000, num_heads=4, head_dim=32))


def test_what_fits_into_memory():
    told = sc.cost(MultiHeadAttention(64, 4), 512, mask=CAUSAL)
    assert told.fits(told.forward.peak_bytes + 2**20)
    assert not told.fits(told.forward.peak_bytes - 1)
    assert not told.fits(told.training.peak_bytes - 1, training=True)
    assert told.fits(training=True)  # on this machine


LAYER_OF_SDPA = MultiHeadAttention(16, 2, mechanism=mechanisms.Softmax(impl="sdpa"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sc.cost(3, 10), "cost: subject must be a mask, a score, a mechanism, a module or a model's config"),
        (lambda: sc.cost(CAUSAL, 0), "cost: seq_len must be"),
        (lambda: sc.cost(CAUSAL, 8, num_kv_heads=3), "cost: num_kv_heads must divide num_heads=8; got 3"),
        (lambda: sc.cost(CAUSAL, 8, dtype=torch.int8), "cost: dtype must be a float dtype"),
        (lambda: sc.cost(CAUSAL, 8, mask=CAUSAL), "cost: mask must be left out if the subject is a mask"),
        (lambda: sc.cost(nn.Conv2d(3, 4, 3), 8), "inputs=lambda length"),
        (lambda: sc.cost(mechanisms.TopK(scorers.BlockMeans(), 2, 4), 64, mask=CAUSAL), "depend on the values"),
        (lambda: sc.cost(mechanisms.Softmax(impl="sdpa"), 8), "cost: impl='sdpa' .*(?s:.*)can be one of auto"),
        (lambda: sc.cost(LAYER_OF_SDPA, 8, mask=CAUSAL), "cost: impl='sdpa' .*(?s:.*)can be one of auto"),
        (lambda: sc.cost(CAUSAL, 8).fits(-1), "Cost.fits: memory must be a number of bytes of at least 0; got -1"),
    ],
)
def test_refused_questions(call, message):
    with pytest.raises((TypeError, ValueError, sc.UnsupportedError), match=message):
        call()


def test_any_module_with_inputs():
    told = sc.cost(nn.Conv2d(3, 8, 3), 16, inputs=lambda length: torch.zeros(2, 3, length, length))
    assert told.forward.flops == 2 * (2 * 8 * 14 * 14) * (3 * 3 * 3)
    assert told.decode is told.cache_bytes is None


def test_measurements_are_kept_and_broken_ones_are_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    file = MachineFile.here()
    assert file.path.parent == tmp_path
    file.write({"stream": [[1.0, 2.0]]})
    assert file.read() == {"stream": [[1.0, 2.0]]}
    told = json.loads(file.path.read_text())
    told["measured"]["stream"] = [[1.0, 3.0]]
    file.path.write_text(json.dumps(told))
    assert file.read() == {}
    file.path.write_text("{")
    assert file.read() == {}
    assert [x.name for x in tmp_path.iterdir()] == [file.path.name]


def test_seconds_are_sums_of_what_was_measured():
    machine = Machine()
    assert this_machine().seconds([]) == machine.seconds([]) == 0.0
    told = sc.cost(CAUSAL, 256, num_heads=2, head_dim=32)
    threads = torch.get_num_threads()
    kernel = next(step.kernel for step in told.forward.steps if step.kernel)
    for way in ("forward", "backward"):
        machine._measurements[f"attention/{kernel}/{way}/float32/{threads} threads"] = [[1.0], [0.0], [0.0], [0.0]]
    machine._measurements[f"stream/float32/{threads} threads"] = [[1.0, 0.0]]
    machine._measurements[f"start/{threads} threads"] = [[0.0]]
    machine._measurements[f"elementwise/mean/float32/{threads} threads"] = [[1.0, 0.0]]
    seconds = told.seconds(machine)
    assert (seconds.forward, seconds.training) == (1.0, 2.0)
    assert "(667 ms to 1.5 s)" in str(seconds)


@pytest.mark.slow
def test_seconds_of_other_scores_are_refused():
    told = sc.cost(sc.scores.Additive(16, 16, hidden_dim=8), 64, head_dim=16)
    with pytest.raises(sc.UnsupportedError, match="not those of a function of scores"):
        told.seconds()
