"""Relevance of a recorded model is Chefer's, computed from the weights and gradients that eager attention builds."""

import pytest
import torch
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

from saccade import viz
from saccade.recording import record
from saccade.statistics import gradient_rollout, relevance

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}


def vit(implementation):
    torch.manual_seed(0)
    config = ViTConfig(**SIZES, image_size=24, patch_size=4, num_labels=5, attn_implementation=implementation)
    return ViTForImageClassification(config).eval(), {"pixel_values": torch.rand(2, 3, 24, 24)}, "logits"


def bert(implementation):
    torch.manual_seed(0)
    config = BertConfig(**SIZES, vocab_size=50, attn_implementation=implementation)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return BertModel(config).eval(), {"input_ids": ids, "attention_mask": mask}, "pooler_output"


def by_eager(make, item):
    """The relevance of all tokens to the first, as in the paper: ``R = I``, then ``R += mean((A * dA)+) @ R``."""
    network, inputs, output = make("eager")
    result = network(**inputs, output_attentions=True)
    for weights in result.attentions:
        weights.retain_grad()
    getattr(result, output)[:, item].sum().backward()
    length = result.attentions[0].shape[-1]
    total, shares = (torch.eye(length).repeat(2, 1, 1) for _ in range(2))
    for weights in result.attentions:
        mean = (weights * weights.grad).clamp(min=0).mean(1).detach()
        total = total + mean @ total
        sums = mean.sum(-1, keepdim=True)
        own = torch.where(sums > 0, mean / sums, torch.eye(length))
        shares = 0.5 * shares + 0.5 * own @ shares
    return total[:, 0], shares[:, 0]


@pytest.mark.parametrize("make", [vit, bert], ids=["vit", "bert"])
def test_relevance_of_a_recorded_model(make):
    network, inputs, output = make("sdpa")
    with record(network, keep=("qk", "gradients")) as recording:
        result = getattr(network(**inputs), output)
    result[:, 2].sum().backward()
    matrices = [recording[layer].matrix for layer in recording]
    gradients = [recording.gradients[layer] for layer in recording]
    total, shares = by_eager(make, 2)
    scale = float((total - torch.eye(total.shape[-1])[0]).abs().max())
    found = relevance(matrices, gradients, [0])[:, 0]
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-4 * scale)
    torch.testing.assert_close(gradient_rollout(matrices, gradients, [0])[:, 0], shares, rtol=1e-3, atol=1e-5)
    if make is vit:
        viz.overlay(inputs["pixel_values"][1], found[1]).canvas.draw()
