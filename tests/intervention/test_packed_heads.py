"""Edits in steps of a generation in which transformers' "sdpa" packs grouped query heads into rows."""

import copy

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import saccade as sc
from saccade import masks

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
HEAD = 1
STEPS = 4


def model_of(name):
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="sdpa")).eval()
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4, layer_types=layers, attn_implementation="sdpa")
    return Gemma3ForCausalLM(config).eval()


def prompt():
    """Two texts, of which one is padded, so that each step has a mask."""
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": attention_mask}


def scores(model):
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    made = model.generate(**prompt(), max_new_tokens=STEPS, output_scores=True, **settings)
    return torch.stack(made.scores)


def without_head(module, args):
    x = args[0].clone()
    width = x.shape[-1] // SMALL["num_attention_heads"]
    x[..., HEAD * width : (HEAD + 1) * width] = 0
    return (x,)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_ablated_head_is_the_same_head_in_each_step(name):
    model = model_of(name)
    with sc.intervene(model) as edit:
        edit.ablate("*.self_attn", HEAD)
        got = scores(model)
    plain = scores(model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(without_head)
    torch.testing.assert_close(got, scores(model))
    assert not torch.allclose(got, plain, atol=1e-3)


def test_a_mask_and_a_recording_have_all_heads_and_one_query_in_each_step():
    model = model_of("llama")
    with sc.intervene(model) as edit:
        edit.mask("*.1.self_attn", HEAD, masks.Window(2, 0))
        with sc.record(model, keep="qk") as recording:
            scores(model)
    (run,) = recording.runs("model.layers.1.self_attn")
    assert [call.shape for call in run.calls[1:]] == [(2, 4, 1, 8 + step) for step in range(STEPS - 1)]
    rows, allowed = run.matrix.to_dense()[:, :, 7:], masks.Causal().to_dense(7 + STEPS - 1)[0, 0, 7:]
    assert torch.all(rows[:, HEAD, :, :5] == 0)
    assert torch.all((rows[:, HEAD] > 0) == (masks.Window(2, 0).to_dense(7 + STEPS - 1)[0, 0, 7:]))
    assert torch.all((rows[1, HEAD + 1] > 0) == allowed)


def test_calls_that_are_replaced_read_a_window_in_each_step():
    model = model_of("llama")
    changed = copy.deepcopy(model)
    left = "model.layers.0.self_attn"
    sc.replace_attention(changed, mask={"model.layers.1.self_attn": masks.Window(2, 0)}, leave=[left])
    with sc.intervene(model) as edit:
        edit.mask("*.1.self_attn", None, masks.Window(2, 0))
        expected = scores(model)
    torch.testing.assert_close(scores(changed), expected)
    assert not torch.allclose(scores(model), expected, atol=1e-3)
