"""Models of transformers, as they are, hold the rule that their configuration declares; wrong rules are broken."""

import pytest
import torch
import transformers

from saccade import audit, masks, models
from saccade.support.language import in_language
from saccade.testing import assert_reach

SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTS = {"num_key_value_heads": 2, "intermediate_size": 48}
MADE = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **PARTS)),
    "Mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **PARTS, sliding_window=8)),
    "Gemma 3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, **PARTS, sliding_window=8, head_dim=8)
    ),
    "Mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **PARTS, num_local_experts=4)
    ),
    "GPT-OSS": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, **PARTS, sliding_window=8, head_dim=8, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4)
    ),
    "BERT": lambda: transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=48)),
}


def made(name):
    torch.manual_seed(0)
    return MADE[name]().eval()


@pytest.mark.parametrize("name", MADE)
def test_it_holds_what_its_configuration_declares(name):
    report = audit(made(name), length=24)
    assert report.rule.startswith("assumed from the configuration: ")
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_window_declared_one_off_is_named(implementation):
    model = made("Mistral")
    model.set_attn_implementation(implementation)
    for width, kind in ((6, "leak"), (8, "blind")):
        report = audit(model, masks.Causal() & masks.Window(width, 0), length=24)
        assert report["by layer"].verdict == "broken"
        found = report["by layer"].finding
        assert (found.kind, found.module) == (kind, "model.layers.0.self_attn")
        assert found.row[1] - found.key[1] == max(width, 7)


def test_packed_texts_see_one_another_beside_a_mask_of_ones():
    model, tokens = made("Llama"), torch.randint(3, 101, (1, 48))
    packed = {"input_ids": tokens, "position_ids": torch.arange(24).repeat(2)[None]}
    rule = masks.Documents([24, 24], rule=masks.Causal())
    assert audit(model, rule, inputs=packed).ok
    report = audit(model, rule, inputs=packed | {"attention_mask": torch.ones_like(tokens)})
    assert report["reach"].finding.row[1] >= 24 > report["reach"].finding.key[1]


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "GPT-OSS"])
def test_a_mask_of_four_dimensions_takes_windows_away(name):
    tokens = torch.randint(3, 101, (1, 24))
    hidden = torch.full((1, 1, 24, 24), torch.finfo(torch.float32).min).triu(1)
    report = audit(made(name), inputs={"input_ids": tokens, "attention_mask": hidden})
    assert report["by layer"].verdict == "broken"
    assert report["by layer"].finding.kind == "leak"
    assert report["by layer"].finding.module == "model.layers.0.self_attn"


def test_a_leak_is_ten_lines_without_this_library(capsys):
    model, tokens = made("Llama"), torch.randint(3, 101, (1, 32))
    packed = {
        "input_ids": tokens,
        "position_ids": torch.arange(16).repeat(2)[None],
        "attention_mask": torch.ones_like(tokens),
    }
    report = audit(model, masks.Documents([16, 16], rule=masks.Causal()), inputs=packed)
    assert "saccade" not in report.script
    assert len(report.script.splitlines()) == 10
    exec(report.script, {})
    moved = float(capsys.readouterr().out.split("moves by ")[1].split()[0])
    assert moved > 1e-3
    assert audit(model, masks.Causal(), length=16).script == ""


@pytest.mark.parametrize("row", [0, 7])
def test_a_script_that_does_not_show_the_fault_says_so(capsys, row):
    model = made("Llama")

    def leak(module, args, out):
        return out.index_add(1, torch.tensor([row]), 1e-3 * out[:, -1:])

    with torch.no_grad():
        handle = model.model.layers[1].mlp.register_forward_hook(leak)
    state = torch.get_rng_state()
    report = audit(model, masks.Causal(), length=16)
    assert torch.equal(torch.get_rng_state(), state)
    handle.remove()
    assert report["reach"].finding.kind == "leak"
    assert report["reach"].finding.row[1] == row  # an index in the printed line, which is not the effect
    assert [line[:2] for line in report.script.splitlines()[:3]] == ["# ", "# ", "im"]
    assert "Replace the line" in report.script
    assert "moves by" not in capsys.readouterr().out
    exec(report.script, {})
    assert float(capsys.readouterr().out.split("moves by ")[1].split()[0]) <= 1e-5


def test_a_leak_seen_by_gradients_alone_allows_nothing():
    model = made("Llama")

    def leak(module, args, out):
        return out + 1e-7 * out.flip(1)

    with model.model.layers[1].mlp.register_forward_hook(leak):
        report = audit(model, masks.Causal(), length=16)
    assert report["reach"].verdict == "broken"
    assert report["reach"].finding.probe == "gradient"
    assert report["reach"].largest > report["reach"].allowed == 0.0
    assert "found by its gradient" in str(report)


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "labels"])
def test_arguments_of_the_model_belong_in_inputs(name):
    with pytest.raises(TypeError, match=f"got {name}=.*\n.*inputs={{'input_ids': ids"):
        audit(made("Llama"), masks.Causal(), **{name: torch.ones(1, 4, dtype=torch.int64)})


def test_functions_of_vectors_have_no_modules():
    def mean_so_far(x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    x = torch.randn(2, 10, 3)
    report = audit(mean_so_far, masks.Causal(), inputs=x)
    assert report.ok
    assert report["by layer"].verdict == "not answered"
    assert report.unanswered == (report["by layer"],)
    report = audit(lambda x: x.mean(1, keepdim=True) + x, masks.Causal(), inputs=x)
    assert report["reach"].verdict == "broken"


def test_outputs_without_gradients_leave_sight_unanswered():
    x = torch.randn(2, 10, 3)
    report = audit(lambda x: x.cumsum(1).detach(), masks.Causal(), inputs=x)
    assert report["reach"].verdict == "held"
    assert report["reach"].why == "measured only by changing inputs: the outputs have no gradient"
    assert report["sight"].verdict == "not answered"
    assert (
        audit(lambda x: x.mean(1, keepdim=True) + x, masks.Full(), inputs=x[:1])["reach"].why
        == "the rule forbids nothing"
    )
    with pytest.raises(ValueError, match=r"the input must have at most 64 tokens, and outputs with gradients"):
        report.picture()


UNKNOWN = {
    "chunks": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4},
    "convolutions": {"layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_layers_are_not_assumed(name):
    class Told(torch.nn.Module):
        config = transformers.LlamaConfig(**SIZES, **PARTS, architectures=["LlamaForCausalLM"])

        def forward(self, x):
            return x

    Told.config.update(UNKNOWN[name])
    with pytest.raises(ValueError, match="rule must be given, since the model's configuration does not define it"):
        audit(Told(), inputs=torch.ones(1, 4, 3))


def test_windows_of_gpt_neo_have_another_name():
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    neo = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]]))
    with pytest.raises(ValueError, match="rule must be given"):
        audit(neo.eval(), length=12)
    assert audit(neo.eval(), [masks.Causal(), masks.Causal() & masks.Window(3, 0)], length=12).ok


@pytest.mark.ci
def test_ours_and_a_test_of_it():
    report = assert_reach(models.small_decoder(), masks.Causal(), length=20)
    assert report.ok
    assert report.unanswered == ()
    assert (
        assert_reach(models.small_decoder(), length=20).rule == "assumed from the configuration: Causal() in 4 layers"
    )
    assert assert_reach(models.small_decoder(), "causal", length=20).rule == "Causal() in 4 layers"
    with pytest.raises(AssertionError, match="the model does not follow the rule\nDecoder, 2 x 20 tokens"):
        assert_reach(models.small_decoder(), masks.Window(2, 0), length=20)
    with in_language("zh"), pytest.raises(AssertionError, match="rule\nDecoder, 2 x 20 tokens, float32, seed 0\nrule "):
        assert_reach(models.small_decoder(), masks.Window(2, 0), length=20)


def test_a_function_keeps_its_name_in_chinese():
    model = models.small_decoder()
    report = audit(model.forward, masks.Causal(), module=model, length=12)
    with in_language("zh"):
        assert str(report).startswith("forward，")


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rule": [masks.Causal(), 3]}, TypeError, "rule must be masks; got int"),
        ({"rule": [masks.Causal()]}, ValueError, "rule must be one mask for each of 2 layers; got 1 masks"),
        ({"rule": {"nothing": masks.Causal()}}, ValueError, "rule must have a pattern for the module"),
        ({"length": 1}, ValueError, "length must be an int of at least 2; got 1"),
        ({"tests": 0}, ValueError, "tests must be an int of at least 1; got 0"),
        ({"padding": torch.ones(3, 3)}, ValueError, r"padding must have shape \[2, 48\]"),
        ({"outputs": lambda out: out.logits.mean(1)}, ValueError, "the model must return rows"),
        ({"inputs": {"labels": 3}}, ValueError, "inputs must contain token ids"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        audit(made("Llama"), **{"rule": masks.Causal()} | change)


def test_a_model_that_drops_at_random_is_refused():
    model = made("BERT").train()
    with pytest.raises(
        ValueError, match=r"model must have no active dropout; got training mode, with embeddings\.dropout"
    ):
        audit(model, masks.Full())


class OnlyForward(torch.autograd.Function):
    """A sum so far, by a kernel that refuses to be asked for gradients."""

    @staticmethod
    def forward(x):
        return x.cumsum(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        raise NotImplementedError("no backward on this device")


class Summing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 4)

    def forward(self, tokens):
        return OnlyForward.apply(self.table(tokens)) if torch.is_grad_enabled() else self.table(tokens).cumsum(1)


def test_a_kernel_without_a_backward_pass_is_audited_by_changes_alone():
    report = audit(Summing(), masks.Causal(), inputs=torch.randint(20, (2, 9)), layers=1)
    assert report["reach"].verdict == "held"
    assert report["reach"].why == "measured only by changing inputs: NotImplementedError: no backward on this device"
    assert report["sight"].why == "NotImplementedError: no backward on this device"
    assert audit(Summing(), masks.Window(2, 0), inputs=torch.randint(20, (2, 9)), layers=1)["reach"].verdict == "broken"


@pytest.mark.ci
@pytest.mark.parametrize("asked", [{"packed": [20, 12]}, {"padded": True}, {"cache": True}])
def test_two_ways_that_differ_are_ten_lines_without_this_library(capsys, asked):
    makers = {"packed": lambda: made("GPT-OSS"), "padded": convbert, "cache": falcon_mamba}
    rule = masks.Full() if "padded" in asked else masks.Causal()
    report = audit(makers[next(iter(asked))](), rule, length=32, **asked)
    assert report["reach"].verdict == "held"
    assert not report.ok
    assert "saccade" not in report.script
    assert len(report.script.splitlines()) <= 14
    exec(f"import torch\nwith torch.no_grad():\n    exec({report.script!r}, {{}})", {})
    assert float(capsys.readouterr().out) > 1e-3


def convbert():
    sizes = {"embedding_size": 16, "intermediate_size": 32}
    return transformers.ConvBertModel(transformers.ConvBertConfig(**SIZES, **sizes)).eval()


def falcon_mamba():
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2}
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**sizes)).eval()
