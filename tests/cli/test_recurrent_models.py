"""The command line shows the attention layers of a model that also has recurrent layers."""

import pytest
import torch
from tests.integrations import recurrent_models as zoo

import saccade as sc
from saccade.cli.transformers_model import TransformersModel


def test_recurrent_layers_are_left_out():
    ids = zoo.batch()["input_ids"]
    (matrix,) = TransformersModel._recorded(zoo.model("qwen3_next"), ids)
    assert isinstance(matrix, sc.AttentionMatrix)
    with pytest.raises(sc.UnsupportedError, match="layers are recurrences"):
        TransformersModel._recorded(zoo.model("mamba2"), torch.cat([ids, ids], 1))
