"""Recordings that overlap, in one thread and in several: each hears all that begins and ends within it."""

import copy
import io
import itertools
import pickle
import threading

import pytest
import torch
from tests.integrations import model_zoo as zoo
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

import saccade as sc
from saccade import masks
from saccade.recording import record


class Fused(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)


class Through(nn.Module):
    """An attention of torch on one argument."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


def of_each_kind():
    """A model with every kind of layer that is listened to, an input for it, and how many layers there are."""
    shared = sc.mechanisms.Softmax()
    own = [sc.nn.MultiHeadAttention(16, 4, mask=masks.Causal(), mechanism=shared) for _ in range(2)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    return nn.Sequential(Fused(), Through(), encoder, *own).eval(), torch.randn(2, 7, 16), 6


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = zoo.model("llama", "sdpa")

    def forward(self, ids):
        return self.inner(ids, use_cache=False).logits


def of_transformers():
    return Llama(), zoo.batch("llama")["input_ids"], 2


MODELS = {"all kinds": of_each_kind, "transformers": of_transformers}


def interface():
    return AttentionInterface.get_interface


def is_untouched(model, before):
    return not any("forward" in vars(x) or x._forward_hooks for x in model.modules()) and interface() is before


def is_post(function):
    return type(function).__module__.startswith("saccade.")


def counted(recording):
    return {name: sum(len(run.calls) for run in recording.runs(name)) for name in recording}


def begun(model, **options):
    manager = record(model, **options)
    return manager, manager.__enter__()


def ended(manager):
    manager.__exit__(None, None, None)


def joined(*threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_recordings_end_in_any_order(name, order):
    model, x, layers = MODELS[name]()
    before = interface()
    with torch.no_grad():
        expected = model(x)
        recordings = []
        for _ in range(3):
            recordings.append(begun(model, keep="qk"))
            assert torch.equal(model(x), expected)
        for number in order:
            ended(recordings[number][0])
            assert torch.equal(model(x), expected)
    assert is_untouched(model, before)
    for number, (_, recording) in enumerate(recordings):
        calls = 3 - number + order.index(number)
        assert counted(recording) == dict.fromkeys(recording, calls)
        assert len(recording) == layers
        assert not recording.not_recorded


@pytest.mark.parametrize("name", MODELS)
def test_a_part_and_the_whole(name):
    model, x, layers = MODELS[name]()
    part = model.inner.model.layers[1] if name == "transformers" else model[2]
    whole, all_heard = begun(model, keep="qk")
    inner, some = begun(part, keep="qk")
    with torch.no_grad():
        model(x)
        ended(whole)
        model(x)
    ended(inner)
    assert counted(all_heard) == dict.fromkeys(all_heard, 1)
    assert counted(some) == dict.fromkeys(some, 2)
    assert (len(all_heard), len(some)) == (layers, layers // 2 if name == "transformers" else 2)
    prefix = "inner.model.layers.1." if name == "transformers" else "2."
    assert {prefix + own for own in some} <= {*all_heard}


@pytest.mark.parametrize("name", MODELS)
def test_a_thread_in_the_middle_of_a_call_silences_no_other(name):
    model, x, layers = MODELS[name]()
    before, waiting, go_on = interface(), threading.Event(), threading.Event()
    first = threading.Thread(target=lambda: model(x))

    def callback(layer, matrix):
        if threading.current_thread() is first and not waiting.is_set():
            waiting.set()
            assert go_on.wait(30)

    with record(model, keep="qk", callback=callback) as recording:
        first.start()
        assert waiting.wait(30)
        joined(*(threading.Thread(target=lambda: model(x)) for _ in range(2)))
        go_on.set()
        first.join(30)
    assert counted(recording) == dict.fromkeys(recording, 3)
    assert len(recording) == layers
    assert is_untouched(model, before)


class Paused(nn.Module):
    """A layer that waits in the middle of its own call."""

    def __init__(self):
        super().__init__()
        self.at, self.go_on = threading.Event(), threading.Event()

    def wait(self):
        self.at.set()
        assert self.go_on.wait(30)


class PausedProduct(Paused):
    def forward(self, x):
        self.wait()
        return F.scaled_dot_product_attention(x, x, x)


class PausedMechanism(Paused):
    def __init__(self):
        super().__init__()
        self.mechanism = sc.mechanisms.Softmax()

    def forward(self, x):
        self.wait()
        x = x[:, None]
        return (self.mechanism(x, x) @ x)[:, 0]


class PausedAndShared(PausedMechanism):
    """Two layers with one mechanism."""

    def __init__(self):
        super().__init__()
        self.other = PausedMechanism()
        self.other.mechanism = self.mechanism


@pytest.mark.parametrize("edge", ["begins before", "ends after"])
@pytest.mark.parametrize("pause", [PausedProduct, PausedMechanism, PausedAndShared])
def test_calls_that_begin_before_or_end_after_are_not_recorded(pause, edge):
    pause, x = pause(), torch.randn(1, 5, 16)
    model = nn.Sequential(pause, Fused())
    thread = threading.Thread(target=lambda: model(x))
    if edge == "begins before":
        thread.start()
        assert pause.at.wait(30)
        with record(model, keep="qk") as recording:
            pause.go_on.set()
            thread.join(30)
        assert counted(recording) == {"1": 1}
    else:
        with record(model, keep="qk") as recording:
            model[1](x)
            thread.start()
            assert pause.at.wait(30)
        pause.go_on.set()
        thread.join(30)
        assert counted(recording) == {"1": 1}
    assert not thread.is_alive()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_mechanism_that_is_called_by_itself_has_its_own_name():
    model, _, _ = of_each_kind()
    x = torch.randn(2, 7, 16)
    with record(model, keep="qk") as recording:
        model[3](x)
        model[4].matrix(x)
    assert counted(recording) == {"3": 1, "3.mechanism": 1}


def test_one_that_raises_does_not_deafen_the_others():
    model, x, _ = of_each_kind()

    def refuse(name, matrix):
        raise ZeroDivisionError(name)

    outer, heard = begun(model, keep="qk")
    inner, _ = begun(model, keep=(), callback=refuse)
    last, heard_last = begun(model, keep="qk")
    with torch.no_grad(), pytest.raises(ZeroDivisionError, match=r"^0$"):
        model(x)
    for manager in (outer, inner, last):
        assert manager.__exit__(ZeroDivisionError, ZeroDivisionError(), None) in (None, False)
    assert counted(heard) == counted(heard_last) == {"0": 1}
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_patch_by_other_code_stays():
    model, x = nn.Sequential(Fused()), torch.randn(2, 7, 16)
    seen = []
    first, heard = begun(model, keep="qk")
    below = model[0].forward
    model[0].forward = lambda x: seen.append("theirs") or below(x)
    second, later = begun(model, keep="qk")
    expected = model(x)
    ended(first)
    model(x)
    ended(second)
    assert torch.equal(model(x), expected)
    assert (counted(heard), counted(later), len(seen)) == ({"0": 1}, {"0": 2}, 3)
    with record(model, keep="qk") as third:
        model(x)
    assert counted(third) == {"0": 1}
    assert not is_post(model[0].forward)
    del model[0].forward
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), "saved"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_copy_of_a_model_that_is_recorded_is_one_of_its_own(copied, others):
    model, x, _ = of_each_kind()

    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    with torch.no_grad():
        expected = model(x)
        with record(model, keep="qk") as recording:
            others = [begun(model, keep="qk")[0] for _ in range(others)]
            other = (saved if copied == "saved" else copied)(model)
            calls = counted(recording)
            for parameter in other.parameters():
                parameter.zero_()
            assert not torch.equal(other(x), expected)
            assert counted(recording) == calls
            assert torch.equal(model(x), expected)
            for manager in others:
                ended(manager)
    assert not any(is_post(vars(module).get("forward")) for module in other.modules())


def test_texts_that_threads_write_side_by_side_are_runs_of_their_own():
    network = zoo.model("llama", "sdpa")
    texts = [torch.randint(3, zoo.WORDS, (1, length)) for length in (5, 6, 7)]
    turn = threading.Barrier(len(texts))

    def write(ids):
        cache = None
        with torch.no_grad():
            for part in ids.split([ids.shape[1] - 3, 1, 1, 1], 1):
                turn.wait(30)
                cache = network(part, past_key_values=cache, use_cache=True).past_key_values

    with record(network, keep="qk") as recording:
        joined(*(threading.Thread(target=write, args=(ids,)) for ids in texts))
    for layer in recording:
        assert [len(run.calls) for run in recording.runs(layer)] == [4, 4, 4]
        assert sorted(run.shape[2] for run in recording.runs(layer)) == [5, 6, 7]


def test_a_text_that_goes_on_in_another_thread_is_one_run():
    network, cache = zoo.model("llama", "sdpa"), []
    parts = zoo.batch("llama")["input_ids"].split([6, 1, 1, 3], 1)

    def write(part):
        with torch.no_grad():
            cache[:] = [network(part, past_key_values=cache[0] if cache else None, use_cache=True).past_key_values]

    with record(network, keep="qk") as recording:
        for part in parts:
            joined(threading.Thread(target=write, args=(part,)))
    assert [len(run.calls) for run in recording.runs(0)] == [4]


def test_more_threads_than_are_remembered(monkeypatch):
    monkeypatch.setattr("saccade.recording.call_matching._REMEMBERED", 2)
    network, x = Fused(), torch.randn(1, 5, 16)
    with record(network, keep="qk") as recording:
        joined(*(threading.Thread(target=lambda: network(x)) for _ in range(5)))
    assert counted(recording) == {"Fused": 5}
