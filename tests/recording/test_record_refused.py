"""Models that cannot be recorded are refused, before or after they run."""

import subprocess
import sys

import pytest
import torch
from tests.recording.eager_weights import ids_of
from torch import nn
from torch.nn import functional as F

import saccade as sc
from saccade.recording import record
from saccade.statistics import Entropy, TopK


class Own(nn.Module):
    """Attention in plain operations, of which nothing can be recorded."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_a_model_that_cannot_be_recorded():
    with (
        pytest.raises(
            sc.UnsupportedError, match=r"record: Own cannot run(.|\n)*no attention layer(.|\n)*\nHint: calls of torch"
        ),
        record(Own()) as _,
    ):
        Own()(torch.zeros(1, 2, 3))


@pytest.mark.parametrize(
    "library, way",
    [
        (
            "timm.models.swin",
            r"call timm.layers.set_fused_attn\(True, experimental=True\) before creating the model; calls",
        ),
        ("transformers.models.own", r'model.set_attn_implementation\("sdpa"\) if the model supports it; calls of'),
    ],
)
def test_the_way_out_is_that_of_the_model_s_library(library, way, monkeypatch):
    monkeypatch.setattr(Own, "__module__", library)
    model = nn.Sequential(Own())
    with pytest.raises(sc.UnsupportedError, match=f"Hint: {way}"), record(model):
        model.train()


def test_an_error_of_the_model_comes_first():
    with pytest.raises(ZeroDivisionError, match="own"), record(Own()):
        raise ZeroDivisionError("own")


def test_a_layer_that_never_spoke():
    model = Fused()
    with (
        pytest.raises(sc.UnsupportedError, match=r"7, decoder.* was not recorded; Fused were"),
        record(model, layers=[0, 7, "decoder.*"]),
    ):
        model(torch.zeros(1, 2, 3, 4))


def test_a_head_that_is_not_there(llama):
    with pytest.raises(ValueError, match=r"heads must be from 0 to 3; got \[4\]"), record(llama, heads=4):
        llama(ids_of())
    assert "forward" not in vars(llama)


@pytest.mark.parametrize(
    "options, error, rule",
    [
        ({"keep": "entropy"}, TypeError, 'keep must be statistics from saccade.statistics, or some of "statistics"'),
        ({"keep": Entropy}, TypeError, "got Entropy.\nHint: pass instances"),
        ({"keep": 3}, TypeError, "keep must be statistics"),
        ({"keep": ()}, ValueError, "keep must contain something if there is no callback; got nothing"),
        ({"layers": 1.5}, TypeError, "layers must be ints and names, or None for all; got 1.5"),
        ({"layers": []}, ValueError, "layers must contain at least one; got none"),
        ({"layers": -1}, ValueError, r"layers must be at least 0; got \[-1\]"),
        ({"layers": True}, TypeError, "layers must be ints and names"),
        ({"heads": "0"}, TypeError, "heads must be ints, or None for all; got '0'"),
        ({"heads": [1, 1]}, ValueError, "heads must contain each head once"),
        ({"callback": 3}, TypeError, r"callback must be a function \(name, matrix\), or None; got int"),
    ],
)
def test_bad_arguments_are_caught_before_anything_runs(llama, options, error, rule):
    with pytest.raises(error, match=f"record: .*{rule}" if "Hint" not in rule else rule):
        record(llama, **options)


@pytest.mark.parametrize("model", [None, nn.Linear, lambda x: x])
def test_an_argument_that_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="record: model must be a torch module"):
        record(model)


def test_questions_that_nothing_was_kept_for(llama):
    with torch.no_grad(), record(llama) as recording:
        llama(ids_of())
    with pytest.raises(
        sc.UnsupportedError, match=r'queries and keys of model.layers.0.self_attn were not kept(.|\n)*keep="qk"'
    ):
        recording[0].matrix.entropy()
    with pytest.raises(sc.UnsupportedError, match=r"TopK\(k=3\) was not computed(.|\n)*add it to keep= or keep="):
        recording[0].compute(TopK(3))
    with pytest.raises(KeyError, match=r"layer must be one of model.layers.0.self_attn, .*; got 'decoder'"):
        recording["decoder"]
    with pytest.raises(KeyError, match="got 2"):
        recording[2]
    assert "2 layers" in repr(recording)
    assert "kept=statistics" in repr(recording[0])


@pytest.mark.ci
def test_without_transformers():
    code = """
import sys
sys.modules["transformers"] = None
import torch, saccade
layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
with saccade.record(layer, keep="qk") as recording:
    layer(torch.zeros(1, 3, 8))
print(recording["self_attn"].matrix[0, 0, 0].tolist()[0] > 0.3)
try:
    saccade.integrations.transformers.install()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "install: transformers must be installed; got no such package.",
        "Hint: pip install 'saccade-attention[transformers]'",
    ]
