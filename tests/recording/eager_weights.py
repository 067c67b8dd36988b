"""Texts, and what eager attention says of them."""

import torch
from tests.integrations import model_zoo as zoo


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-6)


def weights_of(name, ids, **changes):
    """Weights of every layer for one text, from eager attention."""
    with torch.no_grad():
        return zoo.model(name, **changes)(input_ids=ids, output_attentions=True, use_cache=False).attentions


def ids_of(length=11):
    return torch.randint(3, zoo.WORDS, (2, length), generator=torch.Generator().manual_seed(3))
