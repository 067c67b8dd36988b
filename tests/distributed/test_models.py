"""Models of ours and of transformers over ranks give the outputs and gradients of one process."""

import copy

import pytest
import torch
import transformers
from tests.distributed.gloo_processes import on_ranks
from transformers.masking_utils import causal_mask_function

import saccade as sc
from saccade import masks, mechanisms, nn
from saccade.distributed import ContextParallel, parallelize
from saccade.distributed.transformers_ranks import _Attention, _SequenceInfo
from saccade.models import Decoder, DecoderConfig

N = 32
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8, "max_position_embeddings": 64}


def difference(cp, out, own, want, whole):
    """Return the largest difference of this rank's rows, and of all parameters' gradients summed over ranks."""
    worst = float((out - cp.shard_sequence(want)).detach().abs().max())
    torch.manual_seed(7)
    grad = torch.randn(want.shape, dtype=want.dtype)
    want.backward(grad)
    out.backward(cp.shard_sequence(grad))
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for mine, theirs in zip(own.parameters(), whole.parameters(), strict=True):
        total = torch.zeros(mine.shape, dtype=mine.dtype) if mine.grad is None else mine.grad.contiguous()
        torch.distributed.all_reduce(total, group=cp.group)
        expected = torch.zeros_like(total) if theirs.grad is None else theirs.grad
        worst = max(worst, float((total - expected).abs().max()) / max(1.0, float(expected.abs().max())))
    return worst


def ours():
    """Return our models by name, and the mask of the call."""
    documents = masks.Documents([20, 12])
    config = {
        "vocab_size": 50, "max_len": N, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2,
        "feed_forward_dim": 40,
    }  # fmt: skip
    torch.manual_seed(0)
    layers = {
        "delta": nn.Recurrence(32, 4, mechanisms.Delta(), decay="token"),
        "ssd": nn.Recurrence(32, 4, mechanisms.SSD(4)),
        "state space": nn.StateSpace(32, 8),
        "linear": nn.MultiHeadAttention(32, 4, mechanism=mechanisms.Linear(), mask=masks.Causal()),
        "differential": nn.DifferentialAttention(32, 2, mask=masks.Causal()),
        "latent": nn.LatentAttention(32, 4, head_dim=8, rotary_dim=4, latent_dim=16, mask=masks.Causal()),
    }
    stacks = {name: nn.DecoderStack([nn.DecoderLayer(layer, nn.FeedForward(32, 40))]) for name, layer in layers.items()}
    decoders = {
        f"decoder, {kind}": Decoder(DecoderConfig(**config, position_encoding=kind, mask=masks.sliding_window(9)))
        for kind in ("rotary", "alibi", "learned")
    }
    return {name: (model.double(), documents) for name, model in (decoders | stacks).items()}


def over_ranks(rank, layout):
    found, tokens = {}, torch.arange(2 * N).view(2, N) % 50
    vectors = torch.linspace(-3, 3, 2 * N * 32, dtype=torch.float64).sin().view(2, N, 32)
    cp = ContextParallel(layout=layout)
    for name, (whole, mask) in ours().items():
        own = parallelize(copy.deepcopy(whole), cp)
        own.load_state_dict(whole.state_dict())
        x = tokens if isinstance(whole, Decoder) else vectors
        out = own(cp.shard_sequence(x), mask=mask, positions=cp.positions(N))
        found[name] = difference(cp, out, own, whole(x, mask=mask), whole)
    return found


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_models_of_ours(layout):
    for found in on_ranks(2, over_ranks, layout):
        assert isinstance(found, dict), found
        assert {name: error for name, error in found.items() if not error < 1e-9} == {}


def theirs(names):
    """Return the models of transformers by name; all if no names are given."""
    t = transformers
    made = {
        "llama": t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
        "mistral": t.MistralForCausalLM(t.MistralConfig(**LLAMA, sliding_window=7)),
        "gemma 2": t.Gemma2ForCausalLM(t.Gemma2Config(**LLAMA, sliding_window=7, query_pre_attn_scalar=8)),
        "gpt-oss": t.GptOssForCausalLM(
            t.GptOssConfig(
                **LLAMA, sliding_window=7, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"
            )
        ),
        "gpt-2": t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)),
        "bert": t.BertModel(t.BertConfig(**SMALL, intermediate_size=40), add_pooling_layer=False),
    }
    return {name: model.double().eval() for name, model in made.items() if name in names or not names}


def their_calls(name):
    """Return the keyword arguments of each call of a model, for the whole sequence."""
    restarting = torch.cat([torch.arange(11), torch.arange(N - 11)]).expand(2, -1)
    there = torch.ones(2, N, dtype=torch.int64)
    there[1, 28:] = 0
    # Packed by positions alone, these two let texts see one another (`saccade.audit` says so); eager is no oracle.
    packed = [] if name in ("gpt-oss", "bert") else [{"position_ids": restarting}]
    return [{}, {"attention_mask": there}, *packed]


def with_transformers(rank, layout, names):
    found, cp = {}, ContextParallel(layout=layout)
    torch.manual_seed(0)
    tokens = torch.randint(50, (2, N))
    for name, whole in theirs(names).items():
        whole.set_attn_implementation("eager")
        for given in their_calls(name):
            own = parallelize(copy.deepcopy(whole), cp)
            whole.zero_grad()
            own = copy.deepcopy(own)  # a copy runs over the same ranks
            facts = {key: cp.shard_sequence(x) for key, x in given.items()}
            out = own(cp.shard_sequence(tokens), output_hidden_states=True, **facts)[0]
            found[name, *given] = difference(cp, out, own, whole(tokens, use_cache=False, **given)[0], whole)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "names"), [("zigzag", ["llama", "mistral"]), ("contiguous", []), ("zigzag", [])])
def test_models_of_transformers(layout, names):
    for found in on_ranks(2, with_transformers, layout, names):
        assert isinstance(found, dict), found
        assert {name: error for name, error in found.items() if not error < 1e-5} == {}  # norms are float32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("texts", [None, [[11, N - 11], [N - 4, 4]]])
def test_a_pattern_counts_from_the_start_of_each_text(texts, side):
    pattern = masks.streaming(2, 3)
    there = torch.ones(2, N, dtype=torch.bool)
    there[1, slice(5) if side == "left" else slice(-5, None)] = False
    function = _Attention(None, pattern)  # makes masks without the other ranks
    function.sequence = _SequenceInfo(texts, None if texts else there)
    lazy = function.mask(2, N // 2, N // 2, causal_mask_function)
    padding = [[5, N - 5], [5, N - 5]] if side == "left" else [[N], [N]]
    starts = torch.tensor(
        [[sum(row[:i]) for i, size in enumerate(row) for _ in range(size)] for row in texts or padding]
    )
    if not texts:
        starts[0] = 0
    q, kv = torch.arange(N)[:, None], torch.arange(N)
    near = (kv > q - 3) | (kv - starts[:, None, :] < 2)
    expected = (kv <= q) & near & (starts[:, :, None] == starts[:, None, :])
    expected = expected if texts else expected & there[:, None, :]
    rows = expected.any(2, keepdim=True) if texts is None else True  # of padding, whatever it sees
    assert torch.equal(lazy.placed.rule.to_dense(N, batch=2)[:, 0] & rows, expected)


def dropped(rank):
    """Compare attention dropout with one process; it is drawn anew in each layer of each pass."""
    cp = ContextParallel()
    config = DecoderConfig(
        vocab_size=50, max_len=N, embed_dim=32, num_heads=4, num_layers=2, feed_forward_dim=40, attention_dropout_p=0.3
    )
    torch.manual_seed(0)
    whole = Decoder(config).double()
    own, tokens = parallelize(copy.deepcopy(whole), cp), torch.arange(N)[None]
    torch.manual_seed(1)
    want = whole(tokens)
    torch.manual_seed(1 + rank)  # the first rank's counts
    out = own(cp.shard_sequence(tokens), positions=cp.positions(N))
    quiet = own.eval()(cp.shard_sequence(tokens), positions=cp.positions(N))
    return [float((out - cp.shard_sequence(x)).detach().abs().max()) for x in (want, whole.eval()(tokens))], float(
        (quiet - cp.shard_sequence(whole(tokens))).detach().abs().max()
    )


@pytest.mark.slow
def test_dropout_is_that_of_one_process():
    for found in on_ranks(2, dropped):
        assert isinstance(found, tuple), found
        (same, without), quiet = found
        assert same < 1e-10
        assert quiet < 1e-10
        assert without > 1e-3


def refused(rank):
    cp, told = ContextParallel(), []
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    parallelize(llama, cp)
    layer = nn.EncoderLayer(nn.MultiHeadAttention(8, 2), nn.FeedForward(8, 16))
    twice = parallelize(copy.deepcopy(layer), cp)
    cross = nn.DecoderLayer(
        nn.MultiHeadAttention(8, 2), nn.FeedForward(8, 16), cross_attention=nn.MultiHeadAttention(8, 2)
    )
    linformer = nn.MultiHeadAttention(8, 2, mechanism=mechanisms.Linformer(8, 4))
    t5 = transformers.T5Model(transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    bert = transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=40))
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9))
    t, tiny = transformers, {**LLAMA, "num_hidden_layers": 1}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    whole = (
        t.LlamaForCausalLM(t.LlamaConfig(**tiny, rope_parameters=dynamic)),
        t.RobertaForMaskedLM(t.RobertaConfig(**SMALL, intermediate_size=40)),
        t.OPTForCausalLM(t.OPTConfig(**small, ffn_dim=16)),
        t.MiniMaxForCausalLM(t.MiniMaxConfig(**tiny, num_local_experts=2, layer_types=["linear_attention"])),
        llama,
    )
    clip = parallelize(t.CLIPTextModel(t.CLIPTextConfig(**small, intermediate_size=16)), cp)
    mixers = (
        torch.nn.MaxPool1d(2),
        torch.nn.BatchNorm1d(8),
        torch.nn.ConvTranspose1d(8, 8, 3),
        torch.nn.GroupNorm(2, 8),
    )
    for call in (
        *(lambda model=model: parallelize(model, cp) for model in whole),
        lambda: llama.model(tokens),
        lambda: llama(tokens, logits_to_keep=1),
        lambda: clip(tokens),
        *(lambda part=part: parallelize(torch.nn.Sequential(layer, part), cp) for part in mixers),
        lambda: llama(tokens, labels=tokens),
        lambda: llama(tokens, use_cache=True),
        lambda: llama(tokens, attention_mask=torch.ones(1, 1, 4, 4)),
        lambda: llama(tokens, position_ids=torch.tensor([[3, 4, 5, 7]])),
        lambda: parallelize(twice, cp),
        lambda: parallelize(cross, cp),
        lambda: parallelize(linformer, cp),
        lambda: parallelize(torch.nn.Linear(2, 2), cp),
        lambda: parallelize(layer, cp, mask=masks.Causal()),
        lambda: parallelize(torch.nn.Sequential(layer, torch.nn.Conv1d(8, 8, 3), torch.nn.LSTM(8, 8)), cp),
        lambda: parallelize(t5, cp),
        lambda: parallelize(bert, cp),
        lambda: parallelize(mamba, cp),
    ):
        try:
            call()
            told.append("nothing")
        except sc.UnsupportedError as error:
            told.append(str(error))
    return told, not isinstance(layer.attention.mechanism, type(twice.attention.mechanism))


@pytest.mark.slow
def test_inexact_models_are_refused():
    for found in on_ranks(2, refused):
        assert isinstance(found, tuple), found
        told, is_unchanged = found
        assert is_unchanged
        for message, part in zip(
            told,
            [
                "its dynamic positions depend on the length",
                "it computes its own positions from the padding token",
                "it computes positions from attention_mask",
                "its linear_attention layers see only this rank's rows",
                "it already runs over ranks",
                "its arguments were not collected from all ranks",
                "logits_to_keep would count this rank's rows",
                "pooler_output combines all tokens",
                *(
                    f"1 is a {kind}, which mixes"
                    for kind in ("MaxPool1d", "BatchNorm1d", "ConvTranspose1d", "GroupNorm")
                ),
                "the model shifts labels",
                "without a cache",
                "attention_mask is not [batch, rows]",
                "position_ids neither count the whole sequence nor restart at 0 with each text",
                "attention is a MultiHeadAttention that already runs over ranks",
                "DecoderLayer with cross-attention",
                "Linformer needs all keys at once",
                "no attention layer",
                "mask= is only for transformers models",
                "2 is a LSTM, which mixes tokens of all rows",
                "cross-attention is not supported over ranks",
                "pooler combines all tokens into one vector",
                "Conv1d, which mixes tokens",
            ],
            strict=True,
        ):
            assert part in message, (part, message)
