"""Claims of the page on peers about other libraries, each shown by the smallest example and without the kit."""

import contextlib
import io

import numpy as np
import pytest
import torch
from benchmarks.peers.peer import imported

from benchmarks.peers import bigbird, fla, flex

TOKENS = torch.tensor([[False, False, True, True]])  # two tokens, padded on the left


def package(name):
    """Import a module of a package without its warnings, or skip the test if it is not installed."""
    try:
        return imported(name)
    except ModuleNotFoundError:
        pytest.skip("needs pip install 'saccade-attention[bench]'")


def test_attend_with_the_causal_flag_lets_padding_see_the_future():
    attend, x, value = (
        package("x_transformers.attend").Attend,
        torch.zeros(1, 1, 4, 1),
        torch.arange(4.0).view(1, 1, 4, 1),
    )
    rows = {flash: attend(causal=True, flash=flash)(x, x, value, mask=TOKENS)[0].flatten().tolist() for flash in (0, 1)}
    assert rows == {0: [1.5, 1.5, 2.0, 2.5], 1: [0.0, 0.0, 2.0, 2.5]}


def test_attend_gives_groups_to_heads_in_turn():
    query, key, value = torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    assert package("x_transformers.attend").Attend()(query, key, value)[0].flatten().tolist() == [0, 1, 0, 1]


def test_attend_clamps_the_bias_as_well():
    attend, x, value = package("x_transformers.attend").Attend, torch.zeros(1, 1, 1, 1), torch.eye(2).view(1, 1, 2, 2)
    module = attend(softclamp_logits=True, logit_softclamp_value=1.0)
    bias = torch.tensor([0.0, 100.0]).view(1, 1, 1, 2)
    out, _ = module(x, x.expand(1, 1, 2, 1), value, attn_bias=bias)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([0.0, 1.0]).softmax(0))  # a bias of 100 counts as 1


def test_local_attention_attends_to_the_padding_that_it_adds():
    x = torch.ones(1, 5, 8)
    layer = package("local_attention").LocalAttention(4, autopad=True, use_rotary_pos_emb=False)
    assert layer(x, x, x).max() < 0.97
    torch.testing.assert_close(layer(x, x, x, mask=torch.ones(1, 5, dtype=torch.bool)), x)


def test_local_attention_lets_padding_see_the_future_and_what_is_before_the_first_window():
    x, value = torch.zeros(1, 4, 1), torch.arange(4.0).view(1, 4, 1)
    layer = package("local_attention").LocalAttention(4, causal=True, use_rotary_pos_emb=False)
    # The mean of 0, 1, 2, 3 and of four values of -1 that stand for the window before the first.
    assert layer(x, x, value, mask=TOKENS).flatten().tolist() == [0.25, 0.25, 2.0, 2.5]


def test_longformer_makes_no_chunks_of_the_narrowest_window():
    config = package("transformers").LongformerConfig(
        hidden_size=8, num_attention_heads=1, attention_window=[2], num_hidden_layers=1
    )
    layer = package("transformers.models.longformer.modeling_longformer").LongformerSelfAttention(config, 0)
    marks = torch.zeros(1, 8)
    with pytest.raises(RuntimeError, match="expanded size of the tensor"):
        layer(torch.randn(1, 8, 8), marks, marks < 0, marks > 0, False)


def test_bigbird_in_evaluation_counts_its_first_block_twice():
    package("transformers")
    case = next(iter(bigbird.BIGBIRD.peers[1].cases()))
    problem = case.problem()
    scores = problem.query @ problem.key.transpose(2, 3) * problem.query.shape[3] ** -0.5
    scores = scores.masked_fill(~problem.allowed, -torch.inf)
    scores[:, :, 2:-2, :2] += np.log(2.0)  # blocks of two tokens; neither the first nor the last row of blocks
    got = bigbird.attend(problem.query, problem.key, problem.value, problem.allowed, training=False)
    torch.testing.assert_close(got, scores.softmax(-1) @ problem.value, rtol=0.0, atol=1e-12)


def test_bigbird_in_training_seeds_numpy():
    model, module = package("transformers").BigBirdModel, bigbird.module(8).train()
    masks = model.create_masks_for_block_sparse_attn(torch.ones(1, 18), 2)
    blocked, *others = masks
    state, after = np.random.get_state(), []
    for _ in range(2):
        module(torch.randn(1, 18, 24), *others, blocked, blocked)
        after.append(np.random.rand())
    np.random.set_state(state)
    assert after[0] == after[1]


def test_the_future_changes_the_past_of_a_causal_performer():
    with contextlib.redirect_stdout(io.StringIO()):
        layer = package("performer_pytorch").FastAttention(8, nb_features=16, causal=True)
    query, key, value = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    later = key.clone()
    later[:, :, 3] *= 4.0
    assert (layer(query, later, value) - layer(query, key, value))[:, :, 0].abs().max() > 1e-4


def test_a_gated_delta_rule_answers_in_float32():
    package("fla")
    x = torch.ones(1, 2, 1, 4, dtype=torch.float64)
    gates = {"beta": x[..., 0], "g": -x[..., 0]}
    functions = fla.naive("gated_delta_rule")
    for form in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"):
        assert getattr(functions, form)(x, x, x, **gates)[0].dtype == torch.float32


def test_flex_attention_hides_a_nan_in_a_key_but_not_in_a_value():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    query, key, value = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    last = torch.zeros(1, 1, 4, 1, dtype=torch.bool)
    last[:, :, 3] = True
    for given, reached in (
        ((key.masked_fill(last, torch.nan), value), [False, False, False, True]),
        ((key, value.masked_fill(last, torch.nan)), [True, True, True, True]),
    ):
        assert flex.attend(query, *given, mask).isnan().any(-1)[0, 0].tolist() == reached
