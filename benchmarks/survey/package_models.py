"""Models of packages other than transformers, as the text that makes and calls each: small, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import metadata

VOCABULARY, LENGTH = 101, 24
_IDS = f"torch.randint(4, {VOCABULARY}, (2, {LENGTH}))"


@dataclasses.dataclass(frozen=True)
class PackageModel:
    """A model of a package, as Python expressions that also stand in the scripts on the page.

    Attributes:
        distribution: the name for pip, such as "x-transformers".
        name: the name of the model on the page.
        imports: the statements that import what the expressions use, besides torch.
        model: makes the model, a `torch.nn.Module`.
        run: its rows ``[batch, len, ...]`` for ``x``.
        rule: the expected rule, as text for `saccade.masks.parse`.
        x: makes the input: token ids ``[batch, len]``, or vectors ``[batch, len, width]``.
        prepare: a statement that runs after the weights are drawn, for parameters that the package leaves empty.
        padded: the rows of padded ``x``, if the model accepts padding; ``mask``, bool ``[batch, len]``, is True at
            tokens.
        step: the rows of ``x`` and the next state, if the model has one; ``state`` is None for the first piece.
        is_bound: whether the model may reach less than the rule.
    """

    distribution: str
    name: str
    imports: str
    model: str
    run: str = "model(x)"
    rule: str = "causal"
    x: str = _IDS
    prepare: str = ""
    padded: str = ""
    step: str = ""
    is_bound: bool = False

    @property
    def key(self) -> str:
        """The name of the package and the model."""
        return f"{self.distribution}: {self.name}"

    def lines(self) -> list[str]:
        """Return lines that make the model and its input, and two functions: one runs the model, one compares."""
        return [
            f"import torch; {self.imports}",
            "torch.manual_seed(0); torch.set_grad_enabled(False)",
            f"model = {self.model}.eval()",
            "drawn = (p for n, p in model.named_parameters() if p.dim() > 1 and 'embed' not in n)",
            "[torch.nn.init.xavier_normal_(p) for p in drawn]",
            *([self.prepare] if self.prepare else []),
            f"x = {self.x}",
            f"run = lambda x: {self.run}",
            "off = lambda a, b: print(((a - b).abs().max() / b.square().mean().sqrt()).item())",
        ]


def package_models() -> list[PackageModel]:
    """Return the models of all packages, whether they are installed or not."""
    makers = (_x_transformers, _local_attention, _performer, _open_clip, _whisper, _esm, _timm, _fla, _fla_models)
    return [one for maker in makers for one in maker()]


def versions(models: list[PackageModel]) -> dict[str, str]:
    """Return the installed version of each package, "not installed" for others."""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    return {name: version(name) for name in dict.fromkeys(one.distribution for one in models)}


def _x_transformers() -> Iterator[PackageModel]:
    imports = "from x_transformers import Decoder, Encoder, TransformerWrapper"

    def model(name: str, options: str, kind: str = "Decoder", outer: str = "") -> PackageModel:
        layers = f"{kind}(dim=64, depth=2, heads=4, attn_dim_head=16{options and ', ' + options})"
        made = (
            f"TransformerWrapper(num_tokens={VOCABULARY}, max_seq_len=64, attn_layers={layers}{outer and ', ' + outer})"
        )
        rule = "causal" if kind == "Decoder" else "full"
        return PackageModel("x-transformers", name, imports, made, rule=rule, padded="model(x, mask=mask)")

    yield model("absolute positions", "")
    yield model("rotary", "rotary_pos_emb=True")
    yield model("rotary, flash", "rotary_pos_emb=True, attn_flash=True")
    yield model("rotary xpos", "rotary_xpos=True")
    yield model("ALiBi", "alibi_pos_bias=True")
    yield model("T5 bias", "rel_pos_bias=True")
    yield model("dynamic bias", "dynamic_pos_bias=True")
    yield model("CoPE", "attn_use_cope=True")
    yield model("data-dependent ALiBi", "attn_data_dependent_alibi=True")
    yield model("grouped heads", "attn_kv_heads=2")
    yield model("memory keys", "attn_num_mem_kv=4")
    yield model("memory tokens", "", outer="num_memory_tokens=4")
    yield model("talking heads", "attn_pre_talking_heads=True, attn_post_talking_heads=True")
    yield dataclasses.replace(model("top-k", "attn_sparse_topk=4"), is_bound=True)
    yield model("shifted tokens", "shift_tokens=1")
    yield model("residual attention", "residual_attn=True")
    yield model("hyper-connections", "num_residual_streams=4")
    yield model("layers combined", "integrate_layers=True")
    yield model("macaron", "macaron=True")
    yield model("softclamp", "attn_softclamp_logits=True")
    yield model("value residual", "add_value_residual=True")
    yield model("encoder", "", "Encoder")
    yield model("encoder, rotary, flash", "rotary_pos_emb=True, attn_flash=True", "Encoder")
    yield model("encoder, T5 bias", "rel_pos_bias=True", "Encoder")
    yield model("encoder, shifted tokens", "shift_tokens=1", "Encoder")


def _local_attention() -> Iterator[PackageModel]:
    def model(name: str, options: str, rule: str = "causal & window(8, 0)") -> PackageModel:
        sizes = f"num_tokens={VOCABULARY}, dim=64, depth=2, heads=4, dim_head=16, max_seq_len=64"
        made = f"LocalTransformer({sizes}, local_attn_window_size=8{options and ', ' + options})"
        imports = "from local_attention import LocalTransformer"
        padded, is_bound = "model(x, mask=mask)", "exact_windowsize=False" in options
        return PackageModel("local-attention", name, imports, made, rule=rule, is_bound=is_bound, padded=padded)

    yield model("causal", "")
    yield model("causal, buckets", "exact_windowsize=False", "causal")
    yield model("xpos", "use_xpos=True, xpos_scale_base=8")
    yield model("dynamic bias", "use_dynamic_pos_bias=True")
    yield model("normed queries", "qk_rmsnorm=True")
    yield model("one stream", "num_residual_streams=1")
    yield model("both directions", "causal=False, exact_windowsize=False", "full")


def _performer() -> Iterator[PackageModel]:
    def model(name: str, options: str, rule: str = "causal") -> PackageModel:
        sizes = f"num_tokens={VOCABULARY}, max_seq_len=64, dim=64, depth=2, heads=4, dim_head=16"
        made = f"PerformerLM({sizes}{options and ', ' + options})"
        imports = "from performer_pytorch import PerformerLM"
        return PackageModel("performer-pytorch", name, imports, made, rule=rule, padded="model(x, mask=mask)")

    yield model("causal", "causal=True")
    yield model("causal, local heads", "causal=True, local_attn_heads=2, local_window_size=8")
    yield model("causal, ReLU features", "causal=True, generalized_attention=True")
    yield model("causal, shifted tokens", "causal=True, shift_tokens=True")
    yield model("causal, reversible", "causal=True, reversible=True")
    yield model("both directions", "", "full")
    yield model("both directions, ReLU features", "generalized_attention=True", "full")


def _open_clip() -> Iterator[PackageModel]:
    imports = "from open_clip.transformer import MultimodalTransformer, TextTransformer"

    def text(name: str, options: str, rule: str = "causal", **more: str) -> PackageModel:
        sizes = f"context_length={LENGTH}, vocab_size={VOCABULARY}, width=64, heads=4, layers=2, output_tokens=True"
        made = f"TextTransformer({sizes}{options and ', ' + options})"
        return PackageModel("open_clip_torch", name, imports, made, "model(x)[1]", rule, **more)

    yield text("text tower", "")
    yield text("text tower of CoCa", "embed_cls=True, pad_id=0")
    yield text("text tower of CoCa, mask corrected", "embed_cls=True, pad_id=0, correct_cls_mask=True")
    both = "no_causal_mask=True, use_pad_mask=True, pad_id=0, pool_type='last'"
    yield text("text tower, both directions", both, "full", padded="model(x * mask)[1]")
    yield PackageModel(
        "open_clip_torch",
        "text decoder of CoCa",
        imports,
        f"MultimodalTransformer(width=64, layers=2, heads=4, context_length={LENGTH}, output_dim={VOCABULARY})",
        "model(torch.ones(len(x), 5, 64), x)",
        x=f"torch.randn(2, {LENGTH}, 64)",
    )


def _whisper() -> Iterator[PackageModel]:
    imports = "from whisper.model import AudioEncoder, TextDecoder"
    yield PackageModel(
        "openai-whisper",
        "text decoder",
        imports,
        f"TextDecoder({VOCABULARY}, {LENGTH}, 64, 4, 2)",
        "model(x, torch.ones(len(x), 5, 64))",
        prepare="torch.nn.init.normal_(model.positional_embedding)",
    )
    yield PackageModel(
        "openai-whisper",
        "audio encoder",
        imports,
        f"AudioEncoder(8, {LENGTH}, 64, 4, 2)",
        "model(x.unflatten(2, (2, 8)).flatten(1, 2).mT)",
        "full",
        f"torch.randn(2, {LENGTH}, 16)",
    )


def _esm() -> Iterator[PackageModel]:
    imports = "import argparse, esm"
    ids = f"torch.randint(4, 24, (2, {LENGTH}))"
    padded = "model(torch.where(mask, x, 1))['logits']"
    common = {"run": "model(x)['logits']", "rule": "full", "x": ids, "padded": padded}
    yield PackageModel(
        "fair-esm", "ESM-2", imports, "esm.model.esm2.ESM2(num_layers=2, embed_dim=64, attention_heads=4)", **common
    )
    args = "layers=2, embed_dim=64, ffn_embed_dim=96, attention_heads=4, token_dropout=True, max_positions=64"
    args += ", emb_layer_norm_before=True, logit_bias=True, final_bias=True"
    for arch, name in (("roberta_large", "ESM-1b"), ("protein_bert_base", "ESM-1")):
        alphabet = f"esm.Alphabet.from_architecture('{name}')"
        made = f"esm.ProteinBertModel(argparse.Namespace(arch='{arch}', {args}), {alphabet})"
        yield PackageModel("fair-esm", name, imports, made, **common)


_TIMM_SIZED = (  # these take img_size
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224"),
    *("xcit_nano_12_p16_224", "swin_tiny_patch4_window7_224", "pit_ti_224", "convit_tiny", "coat_lite_tiny"),
    *("levit_128s", "mixer_s32_224", "gmlp_ti16_224", "hiera_tiny_224", "maxvit_rmlp_pico_rw_256", "mobilevit_xxs"),
    *("nest_tiny", "visformer_tiny"),
)
_TIMM_OTHERS = (
    "crossvit_tiny_240",
    "poolformer_s12",
    "pvt_v2_b0",
    "edgenext_xx_small",
    "tiny_vit_5m_224",
    "convnext_atto",
)


def _timm() -> Iterator[PackageModel]:
    """Yield transformers of patches, and whole image models, whose one row may depend on its own image alone."""
    sizes = "img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=0"
    features = "model.forward_features(torch.nn.functional.fold(x.mT, 32, 8, stride=8){})"
    patches = "torch.randn(2, 16, 192)"
    for name, file, cls, more in (
        ("ViT", "vision_transformer", "VisionTransformer", ""),
        ("EVA", "eva", "Eva", ", use_rot_pos_emb=True"),
    ):
        imports = f"from timm.models.{file} import {cls}"
        made = f"{cls}({sizes}, class_token=False, global_pool='avg'{more})"
        yield PackageModel("timm", name, imports, made, features.format(""), "full", patches)
        yield PackageModel("timm", f"{name}, causal", imports, made, features.format(", is_causal=True"), x=patches)
    for name in (*_TIMM_SIZED, *_TIMM_OTHERS):
        made = f"timm.create_model({name!r}, num_classes=5{', img_size=64' if name in _TIMM_SIZED else ''})"
        run = "model(x.view(-1, 3, 64, 64))[:, None]"
        yield PackageModel("timm", name, "import timm", made, run, "full", "torch.randn(2, 1, 3 * 64 * 64)")


def _fla() -> Iterator[PackageModel]:
    """Yield the reference functions, with projections around each; `naive` loads them without Triton."""
    imports = (
        'import fla, runpy; naive = lambda name: runpy.run_path(f"{fla.__path__[0]}/ops/{name}/naive.py"); '
        "from torch.nn.functional import logsigmoid, normalize; "
        'heads = lambda model, x: {n: model[n](model["e"](x)).unflatten(-1, (4, 16)) for n in "qkvgb"}'
    )
    projections = f'{{"e": torch.nn.Embedding({VOCABULARY}, 64), **{{n: torch.nn.Linear(64, 64) for n in "qkvgb"}}}}'

    def model(
        name: str, arguments: str, *, state: str = "", is_pair: bool = True, heads_first: bool = False
    ) -> PackageModel:
        file, function = name.split(".")
        called = f"naive('{file}')['{function}']({arguments}%s)"
        inner = "(lambda q, k, v, g, b: {})(**heads(model, x))"
        swap = ".transpose(1, 2)" if heads_first else ""
        rows = inner.format(called % "" + ("[0]" if is_pair else ""))
        step = ""
        if state:
            both = inner.format(called % f", {state}=state, output_final_state=True")
            step = f"(lambda o, state: (o{swap}.flatten(2), state))(*{both})"
        made = f"torch.nn.ModuleDict({projections})"
        return PackageModel("fla-core", name, imports, made, f"{rows}{swap}.flatten(2)", step=step)

    forget, one_gate, beta = "logsigmoid(g)", "logsigmoid(g[..., 0])", "b[..., 0].sigmoid()"
    unit = "q, normalize(k, dim=-1), v"
    initial = "initial_state"
    three = ", ".join(f"{one}.transpose(1, 2)" for one in "qkv")
    four = f"{three}, g.transpose(1, 2)"
    yield model("linear_attn.naive_recurrent_linear_attn", "q, k, v", state=initial)
    yield model("gla.naive_recurrent_gla", f"q, k, v, {forget}", state=initial)
    yield model("retention.naive_retention", three, is_pair=False, heads_first=True)
    yield model("simple_gla.naive_recurrent_simple_gla", f"q, k, v, {one_gate}", state=initial)
    yield model("simple_gla.naive_chunk_simple_gla", f"q, k, v, {one_gate}, chunk_size=8")
    yield model("simple_gla.naive_parallel_simple_gla", f"q, k, v, {one_gate}")
    yield model("gated_delta_rule.naive_recurrent_gated_delta_rule", f"{unit}, {beta}, {one_gate}", state=initial)
    yield model(
        "gated_delta_rule.naive_chunk_gated_delta_rule", f"{unit}, {one_gate}, {beta}, chunk_size=8", state=initial
    )
    yield model("kda.naive_recurrent_kda", f"{unit}, {forget}, {beta}", state=initial)
    yield model("kda.naive_chunk_kda", f"{unit}, {forget}, {beta}, chunk_size=8", state=initial)
    yield model("gdn2.naive_recurrent_gdn2", f"{unit}, {forget}, b.sigmoid(), b.sigmoid()", state=initial)
    yield model("gdn2.naive_chunk_gdn2", f"{unit}, {forget}, b.sigmoid(), b.sigmoid(), chunk_size=8", state=initial)
    yield model("comba.naive_recurrent_comba", f"{unit}, normalize(b, dim=-1), {beta}, {one_gate}", state=initial)
    yield model(
        "comba.naive_chunk_comba", f"{unit}, normalize(b, dim=-1), {one_gate}, {beta}, chunk_size=8", state=initial
    )
    heads = ", ".join(f"{one}.transpose(1, 2)" for one in ("q", "normalize(k, dim=-1)", "v", beta))
    yield model("delta_rule.delta_rule_recurrence", heads, heads_first=True)
    yield model("delta_rule.delta_rule_chunkwise", heads + ", chunk_size=8", heads_first=True)
    yield model("abc.naive_recurrent_abc", four, heads_first=True)
    yield model("abc.naive_cumsum_abc", four, heads_first=True)
    yield model("gsa.naive_recurrent_gsa", f"q, k, v, g, {forget}")
    yield model("attn.naive_parallel_attn", "q, k, v, causal=True")
    yield model("forgetting_attn.naive_forgetting_attn", f"q, k, v, {one_gate}", is_pair=False)
    yield model("stickbreaking_attn.naive_stickbreaking_attn", "q, k, v, scale=0.25, attend_current=True")
    yield model("parallax.naive_parallax", "q, b, k, v, causal=True", is_pair=False)
    yield model(
        "path_attn.naive_path_attn",
        f"q, k, v, normalize(b, dim=-1), {beta}, {one_gate}, 0.25, chunk_size=8",
        is_pair=False,
    )
    yield model("deltaformer.naive_deltaformer_attn", "q, k, v", is_pair=False)
    yield model("based.naive_parallel_based", three, is_pair=False, heads_first=True)
    yield model("rebased.naive_parallel_rebased", three, is_pair=False, heads_first=True)
    yield model("log_linear_attn.naive_log_linear_attn", f"q, k, v, {one_gate}, b[..., :6].sigmoid()", is_pair=False)
    window = model("attn.naive_parallel_attn", "q, k, v, causal=True, window_size=8")
    yield dataclasses.replace(window, name=f"{window.name}, window 8", rule="causal & window(7, 0)")


def _fla_models() -> Iterator[PackageModel]:
    """Yield whole models of fla, whose kernels need Triton and a GPU."""
    for name in ("GLA", "DeltaNet", "GatedDeltaNet", "Mamba2", "RWKV7"):
        imports = f"from fla.models import {name}Config, {name}ForCausalLM"
        made = f"{name}ForCausalLM({name}Config(vocab_size={VOCABULARY}, hidden_size=64, num_hidden_layers=2))"
        yield PackageModel("flash-linear-attention", name, imports, made, "model(x).logits")
