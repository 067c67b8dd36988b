"""Compiled models: what is compiled is held against the rule from end to end; modules as they are written."""

import pytest
import torch
import transformers
from tests.auditing.small_transformer import small

from saccade import audit, masks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler itself
SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL, NEAR = masks.Causal(), masks.Causal() & masks.Window(2, 0)
TOKENS = torch.randint(3, 101, (1, 24), generator=torch.Generator().manual_seed(0))
HOW = {
    "torch.compile(model)": lambda model, backend: torch.compile(model, backend=backend, fullgraph=True),
    "model.compile()": lambda model, backend: model.compile(backend=backend) or model,
}


class Backend:
    """Runs what was compiled, counts runs, and adds what ``change`` does to outputs."""

    def __init__(self, change=lambda out: out):
        self.change, self.graphs, self.runs = change, 0, 0

    def __call__(self, compiled, inputs):
        self.graphs += 1

        def run(*given):
            self.runs += 1
            return [self.change(out) for out in compiled(*given)]

        return run


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=48)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_compiled_models_run_and_modules_keep_their_names(how):
    backend = Backend()
    model = HOW[how](llama(), backend)
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)  # compiled before, without hooks: it would never see one
    before = backend.runs
    report = audit(model, inputs=TOKENS)
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert report.model == "LlamaForCausalLM, compiled"
    assert report.rule.startswith("assumed from the configuration: ")
    assert report["by layer"].why == "measured on the uncompiled modules"
    assert backend.runs >= before + 14  # the model itself, 12 changes, gradients
    assert backend.graphs <= 4  # tokens; vectors, without and with gradients: nothing is compiled for each test

    found = audit(model, NEAR, inputs=TOKENS)
    assert found["reach"].finding.module == found["by layer"].finding.module == "model.layers.0.self_attn"
    assert found["reach"].finding.row[1] - found["reach"].finding.key[1] > 4
    assert found["by layer"].finding.pair == "output 3 depends on token 0"


@pytest.mark.ci
def test_a_fault_of_the_compiled_code_alone_is_found():
    leaking = Backend(lambda out: out + 0.1 * out.mean(1, keepdim=True) if out.dim() == 3 else out)
    report = audit(torch.compile(llama(), backend=leaking), CAUSAL, inputs=TOKENS)
    assert report["reach"].verdict == "broken"
    assert report["reach"].finding.key[1] > report["reach"].finding.row[1]
    assert report["reach"].finding.module == ""
    assert report["by layer"].verdict == "held"


def test_layers_that_are_compiled_leave_the_table_to_hooks():
    model = small(CAUSAL, layers=2)
    for layer in model.layers:
        layer.compile(backend=(backend := Backend()))
    report = audit(model, CAUSAL, inputs=TOKENS.clamp(max=39))
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert backend.runs >= 14
    report = audit(model, NEAR, inputs=TOKENS.clamp(max=39))
    assert report["by layer"].finding.module == "layers.0.attention"


@pytest.mark.slow
def test_other_ways_of_running_are_those_of_the_modules():
    report = audit(torch.compile(llama(), backend=Backend()), inputs=TOKENS, padded=True)
    assert {claim.verdict for claim in report.claims} == {"held"}, str(report)
    assert "not compiled" in report["padded at the left"].why


def test_compiled_functions_are_functions():
    backend = Backend()

    @torch.compile(backend=backend)
    def mean_so_far(x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    report = audit(mean_so_far, CAUSAL, inputs=torch.randn(1, 10, 3))
    assert [claim.verdict for claim in report.claims] == ["held", "held", "not answered"]
    assert backend.runs > 10


def test_models_without_vector_inputs_are_refused():
    backend = Backend()
    with pytest.raises(ValueError, match="a compiled model must take inputs_embeds, since hooks"):
        audit(torch.compile(small(CAUSAL), backend=backend), CAUSAL, inputs=TOKENS.clamp(max=39))
    hidden = small(CAUSAL)
    hidden.forward = torch.compile(hidden.forward, backend=backend)
    with pytest.raises(ValueError, match="got a table inside compiled code"):
        audit(hidden, CAUSAL, inputs=TOKENS.clamp(max=39))
    sizes = {"vocab_size": 101, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    pair = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    with pytest.raises(ValueError, match="an encoder-decoder must be audited before it is compiled"):
        audit(torch.compile(pair, backend=backend))


@pytest.mark.slow
def test_by_the_compiler_itself():
    model = torch.compile(llama())
    assert audit(model, inputs=TOKENS).ok
    report = audit(model, NEAR, inputs=TOKENS)
    assert (report["reach"].verdict, report["by layer"].verdict) == ("broken", "broken")
