"""The function `audit`: check a model against a declared rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from saccade.auditing.by_layer import ByLayer, mixers
from saccade.auditing.claims import check_claims, checked_names
from saccade.auditing.claims.compared import claim_of
from saccade.auditing.claims.model_measurements import ModelMeasurements
from saccade.auditing.compiled_model import CompiledModelUnderTest, is_compiled, run_eagerly, uncompiled
from saccade.auditing.declared_rules import Declared, from_config, ruled_modules, rules_of
from saccade.auditing.encoder_decoder import EncoderDecoderUnderTest, default_rules, is_encoder_decoder, joint_rules
from saccade.auditing.end_to_end import EndToEnd
from saccade.auditing.equivalence import runner_of, sameness
from saccade.auditing.finding import ClaimResult, CounterExample, Verdict
from saccade.auditing.float64 import TrueFloat64
from saccade.auditing.inputs import InputFormat, rows_to_check
from saccade.auditing.leak_location import first_module
from saccade.auditing.model_under_test import ModelUnderTest, NoGradientError, can_cache, check_no_dropout, rows_of
from saccade.auditing.multi_process import unwrap_ddp
from saccade.auditing.reachability import Reach
from saccade.auditing.report import DRAWN, Report, reached_by_gradient, versions_of
from saccade.auditing.reproduction_script import script_of
from saccade.auditing.rounding_noise import FACTOR, jitter, relative, restoring_state
from saccade.auditing.rule_composition import Composition
from saccade.auditing.runner import Runner
from saccade.auditing.sufficient_length import check_length, parts_of
from saccade.masks import Mask, parse
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.language import Message, joined
from saccade.support.validation import check_int

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_OF_MODEL = "inputs={'input_ids': ids, ...} passes arguments to the model"


@argument_hints(
    dict.fromkeys(
        ("input_ids", "position_ids", "token_type_ids", "labels", "inputs_embeds", "pixel_values"), _OF_MODEL
    ),
    mask="rule=, the rule that the model is checked against",
    attention_mask="padding=",
)
def audit(
    model: Callable[..., Any] | Runner,
    rule: Declared | str | None = None,
    *,
    inputs: Tensor | Mapping[str, Any] | None = None,
    tokens: str | None = None,
    batch_first: bool = True,
    module: nn.Module | None = None,
    length: int = 48,
    layers: int | None = None,
    padding: Tensor | None = None,
    outputs: Callable[[Any], Tensor] = rows_of,
    packed: Sequence[int] | None = None,
    padded: bool = False,
    cache: bool = False,
    against: Sequence[str] = (),
    claims: Sequence[str] = (),
    tests: int = 12,
    seed: int = 0,
    group: ProcessGroup | None = None,
) -> Report:
    """Audit a model, end to end and layer by layer, against a rule that says which tokens may influence which outputs.

    The model runs unchanged, on its own kernels. An output may depend on a token only if the rule, composed over all
    layers with their residual connections, allows it. Each module that mixes tokens is also rerun in place, and must
    follow the rule of its layer. There are two probes: one replaces token embeddings; the other computes gradients, and
    any nonzero gradient counts as an influence. If the embedding table is compiled, the model receives embeddings
    instead of tokens. The modules of a compiled model are tested without compilation.

    Args:
        model: a module or function that maps tokens ``[batch, length]``, or embeddings ``[batch, length, width]``, to
            rows ``[batch, length, ...]``; or a `Runner`, which also runs it with padding, packed texts and a cache.
        rule: one mask for all layers, or a mask written as a string (see `saccade.masks.parse`); a list
            with one mask for each layer; or a mapping from patterns of module names to masks. For an encoder-decoder, a
            mapping from "encoder", "decoder" and "cross" to a mask or a list. When None, it is read from
            ``model.config`` and reported as assumed.
        inputs: tokens or embeddings, or all keyword arguments of the model; two random sequences when None. For an
            encoder-decoder, they must include ``input_ids`` (the source) and ``decoder_input_ids`` (the target).
        tokens: name of the keyword argument that holds the tokens or embeddings. When None, the audit uses an argument
            with a common name such as ``input_ids``, the only argument that can hold tokens, or the first parameter.
        batch_first: whether tokens or embeddings are ``[batch, length, ...]`` rather than ``[length, batch, ...]``. The
            layouts of modules and outputs are detected automatically.
        module: the model that ``model`` calls, if ``model`` is a function; its embedding tables and layers are audited.
        length: length of the random sequences. It must exceed the rule's windows: if a window masks nothing at this
            length, the claim "length" is not answered and says which length to pass.
        layers: number of layers; when None, the number of modules that mix tokens.
        padding: bool ``[batch, length]``, True at tokens and False at padding. Rows of padding are not checked. When
            None, there is no padding. For an encoder-decoder, each row holds the source followed by the target.
        outputs: a function that extracts the output rows from the model's result; by default the logits, the hidden
            states or the tensor itself. A `Runner` already has such a function.
        packed: lengths of the texts into which the first sequence is split. Each text must give the same rows packed
            as alone.
        padded: whether to check that padding on the left and on the right does not change the rows of real tokens.
        cache: whether to check, for several splits, that running a text in chunks through a cache gives the same rows
            as running it at once.
        against: names of attention implementations ("eager", "sdpa") that must give the same outputs.
        claims: names of further claims to check: "states", "positions", "window", "sinks", "training",
            "compiled", "batch", "loss", or "all".
        tests: number of sets of rows to test.
        seed: seed for the random sequences and for all random changes.
        group: processes that run the model together, as with context parallelism. Every process must call this function
            with the same inputs, and gets the same report. Not needed for replicas in DistributedDataParallel.

    Returns:
        A `Report`, which can be printed. `Report.ok` is True if at least one claim held and no claim is broken.

    Raises:
        TypeError, ValueError: the rule is not a mask, the model does not accept the inputs, its rows have the wrong
            shape, the model is in training mode with dropout, or ``outputs`` is passed with a `Runner`.

    Cost: one forward pass and two backward passes per test, plus about ten passes to measure noise and find the
        modules. If there is a leak, finding the pair takes log2(length) more passes. With up to 64 tokens, the picture
        takes one backward pass per token. The memory is that of one forward and backward pass, plus one byte per pair
        of tokens for each distinct rule.

    Example:
        >>> import saccade as sc
        >>> model = sc.models.small_decoder()
        >>> sc.audit(model, sc.masks.Causal()).ok
        True
    """
    check_int("length", length, 2)
    check_int("tests", tests, 1)
    check_int("seed", seed, 0)
    names = checked_names(claims)
    runner = runner_of(model, outputs) if isinstance(model, Runner) else None
    outputs = outputs if runner is None else runner.outputs
    run = unwrap_ddp(model.model if isinstance(model, Runner) else model)
    model = cast("Callable[..., Any]", uncompiled(run))
    form = InputFormat.of(model, tokens, batch_first, module)
    audited = model if module is None else module
    check_no_dropout(audited)
    with restoring_state(audited) if isinstance(audited, nn.Module) else nullcontext():
        model_inputs = without_cache(model, random_inputs(audited, length, seed, form) if inputs is None else inputs)
        subject = _subject(run, model_inputs, outputs, group, form)
        checked_rows = rows_to_check(padding, subject.shape)
        mask = parse(rule) if isinstance(rule, str) else rule
        declared, is_assumed = (mask, False) if mask is not None else (assumed_rule(audited), True)
        layered = ByLayer(subject.eager, mixers(subject.eager), checked_rows).measure()
        if is_assumed and isinstance(declared, list):  # a layer may have several modules that mix tokens, or none
            layers = layers or len(declared)
        ruled = ruled_modules(
            declared, layered, layers, is_encoder_decoder=isinstance(subject, EncoderDecoderUnderTest)
        )
        rules, words = _rules(declared, subject, ruled, layers)
        composed = Composition(subject.eager, rules, ruled, layered)
        reach = composed.reach
        noise = partial(_noise, subject)
        probes = EndToEnd(
            subject, reach, checked_rows, noise=noise, tests=tests, seed=seed, required=composed.declared
        ).run()
        results = [*_end_to_end(subject, reach, probes), _by_layer(subject.eager, composed, layered)]
        results += check_length(parts_of(declared, rules, subject, given=inputs is not None))
        if packed is not None or padded or cache or against:
            comparisons = {"packed": packed, "padded": padded, "cache": cache, "against": against}
            with run_eagerly():
                results += _compare_runs(model, runner, subject.eager, comparisons, outputs, seed)
        measurements = ModelMeasurements(
            model,
            runner,
            subject.eager,
            composed,
            layered,
            checked_rows,
            model_inputs,
            outputs,
            packed or (),
            noise,
            seed,
        )
        with run_eagerly() if isinstance(subject, CompiledModelUnderTest) else nullcontext():
            known = {one.name for one in results}
            results += [one for one in check_claims(measurements, names) if one.name not in known]
        if isinstance(subject, CompiledModelUnderTest):
            results = results[:2] + [
                one if one.name == "length" else dataclasses.replace(one, why=_measured_uncompiled(one.why))
                for one in results[2:]
            ]
        pairs = _pairs_for_picture(subject, reach)
        return Report(
            Message("{model}, compiled", model=_name(model)) if subject.eager is not subject else _name(model),
            Message("assumed from the configuration: {rule}", rule=words) if is_assumed else words,
            tuple(_renumbered(claim, subject) for claim in results),
            subject.shape,
            str(subject.vectors.dtype).removeprefix("torch."),
            seed,
            probes.floor,
            tests,
            probes.covered,
            versions_of(model),
            ""
            if isinstance(subject, EncoderDecoderUnderTest)
            else script_of(model, model_inputs, subject.eager.tokens, results, packed or (), seed),
            *pairs,
            {} if isinstance(subject, EncoderDecoderUnderTest) else layered.rules(composed.declared.components()[0]),
        )


def _subject(
    model: Callable[..., Any],
    inputs: Tensor | Mapping[str, Any],
    outputs: Callable[[Any], Tensor],
    group: ProcessGroup | None,
    form: InputFormat,
) -> ModelUnderTest:
    if is_encoder_decoder(uncompiled(model)):
        if form != InputFormat():
            rule = "be left out for an encoder-decoder"
            raise value_error("tokens, batch_first, module", rule, "given")
        if is_compiled(model):
            raise value_error("an encoder-decoder", "be audited before it is compiled", "a compiled one")
        return EncoderDecoderUnderTest(model, inputs, outputs, group)
    if is_compiled(form.module):
        raise value_error("module", "be audited before it is compiled, or on its own", "a compiled module")
    return (CompiledModelUnderTest if is_compiled(model) else ModelUnderTest)(model, inputs, outputs, group, form)


def _measured_uncompiled(why: str) -> str:
    return joined((why, "measured on the uncompiled modules"))


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "a function")


def assumed_rule(model: object) -> Declared:
    """Return the rule that a model's configuration declares; raise an error if it declares none."""
    rule = default_rules(model) if is_encoder_decoder(model) else from_config(model)
    if rule is None:
        hint = "use the masks of saccade.masks: audit(model, masks.sliding_window(128))"
        raise value_error("rule", "be given, since the model's configuration does not define it", None, hint=hint)
    return rule


def _noise(subject: ModelUnderTest) -> float:
    """Return the largest output change due to noise: `FACTOR` times the change from a rerun or from rounding errors."""
    repeated = max(relative(subject.run(), subject.rows) for _ in range(2))
    eager = subject.eager
    rounded = 0.0 if eager.module is None else jitter(eager.module, eager.run, base=eager.rows)
    return FACTOR * max(repeated, rounded)


def _end_to_end(subject: ModelUnderTest, reach: Reach, probes: EndToEnd) -> list[ClaimResult]:
    """Check two claims: outputs depend on no forbidden token ("reach") and on every allowed token ("sight")."""
    leak = next((one for one in probes.findings if one.kind == "leak"), None)
    blind = next((one for one in probes.findings if one.kind == "blind"), None)
    if leak is not None:
        with_module = _with_module(subject.eager, reach, probes, leak)
        by_gradient = leak.probe == "gradient"
        why = "found by its gradient, which rounding does not change from 0" if by_gradient else ""
        allowed = 0.0 if by_gradient else probes.floor
        reached = ClaimResult("reach", "broken", max(probes.largest, leak.size), allowed, with_module, why)
    else:
        reached = ClaimResult("reach", "held", probes.largest, probes.floor, why=_weakness(probes))
    if probes.no_gradient:
        return [reached, ClaimResult("sight", "not answered", why=probes.no_gradient)]
    verdict: Verdict = "broken" if blind else "not answered" if probes.zero_gradients.unsure else "held"
    why = probes.zero_gradients.describe(subject)
    if bool(probes.unread.any()):
        item, position = probes.unread.nonzero()[0].tolist()
        unread = (
            "no output reads the vectors of {count} tokens, such as token {position} of item {item}: the model "
            "replaces these vectors"
        )
        why = joined((why, Message(unread, count=int(probes.unread.sum()), position=position, item=item)))
    return [reached, ClaimResult("sight", verdict, finding=blind, why=why)]


def _weakness(probes: EndToEnd) -> str:
    """Return why a "reach" claim that held is weak (the rule forbids nothing, or no gradients); "" if it is not."""
    if not probes.hides_something:
        return "the rule forbids nothing"
    return Message("measured only by changing inputs: {why}", why=why) if (why := probes.no_gradient) else ""


def _with_module(subject: ModelUnderTest, reach: Reach, probes: EndToEnd, leak: CounterExample) -> CounterExample:
    """Return a leak's counter-example with the name of the module where the leak begins."""
    assert leak.key is not None
    module = first_module(subject, reach, leak.key, probes.swapped(reach.one(*leak.key)))
    return dataclasses.replace(leak, module=module)


def _by_layer(subject: ModelUnderTest, composed: Composition, layered: ByLayer) -> ClaimResult:
    if not layered.mixed:
        return ClaimResult(
            "by layer",
            "not answered",
            why="no module that mixes tokens was found: the model is a function, or hooks do not reach its modules",
        )
    probes = layered.run(composed.allowed, composed.required)
    results, missed = probes.findings, sorted(set(layered.mixed) - probes.differentiable)
    through = Message("no gradient passes through {names}", names=", ".join(missed)) if missed else ""
    others = "modules without attention, checked against the rule of the whole model: {names}"
    others = Message(others, names=", ".join(composed.others)) if composed.others else ""
    why = joined((through, probes.zero_gradients.describe(subject), others))
    if not results and (missed or probes.zero_gradients.unsure):
        return ClaimResult("by layer", "not answered", why=why)
    leaks = [one for one in results if one.kind == "leak"]
    first = next(iter([*leaks, *results]), None)
    largest = max((one.size for one in leaks), default=0.0)
    return ClaimResult("by layer", "broken" if results else "held", largest, 0.0, first, why)


def _renumbered(claim: ClaimResult, subject: ModelUnderTest) -> ClaimResult:
    return claim if claim.finding is None else dataclasses.replace(claim, finding=subject.renumbered(claim.finding))


def _compare_runs(
    model: Callable[..., Any],
    runner: Runner | None,
    subject: ModelUnderTest,
    comparisons: dict[str, Any],
    outputs: Callable[[Any], Tensor],
    seed: int,
) -> list[ClaimResult]:
    """Check that equivalent ways of running the model give the same outputs, and return one claim for each."""
    refused = isinstance(subject, EncoderDecoderUnderTest) or subject.group is not None
    refused = refused or subject.tokens.is_floating_point() or not subject.form.batch_first
    if not isinstance(model, nn.Module) or refused:
        rule = "be left out for functions, vectors, process groups, batch_first=False and encoder-decoders"
        raise value_error(
            "packed, padded, cache, against", rule, "given", hint="these checks run a module on token ids"
        )
    pairs = sameness(runner or model, subject.tokens, outputs=outputs, seed=seed, **comparisons)
    return [claim_of(pair, subject.passes) for pair in pairs]


def _pairs_for_picture(subject: ModelUnderTest, reach: Reach) -> tuple[Tensor | None, Tensor | None]:
    length = subject.shape[1]
    if length > DRAWN:
        return None, None
    try:
        leaf, out = subject.graph()
    except NoGradientError:
        return None, None
    declared = torch.stack([reach.sources(reach.one(0, position))[0] for position in range(length)])
    measured = reached_by_gradient(leaf, out)
    if bool((declared & ~measured).any()) and (wide := subject.in_float64[0]) is not None:
        with TrueFloat64():
            measured = reached_by_gradient(*wide.graph())
    return declared, measured


def _rules(declared: Declared, subject: ModelUnderTest, names: list[str], layers: int | None) -> tuple[list[Mask], str]:
    """Return the declared rule of each layer, and a description of all these rules."""
    if isinstance(subject, EncoderDecoderUnderTest):
        if layers is not None:
            raise value_error("layers", "be left out for an encoder-decoder", layers)
        return joint_rules(declared, subject)
    rules = rules_of(declared, names, layers)
    if all(rule == rules[0] for rule in rules):
        return rules, Message("{rule} in {count} layers", rule=str(rules[0]), count=len(rules))
    return rules, joined(Message("layer {layer}: {rule}", layer=i, rule=str(rule)) for i, rule in enumerate(rules, 1))


def without_cache(model: object, inputs: Tensor | Mapping[str, Any]) -> Tensor | Mapping[str, Any]:
    """Add ``use_cache=False`` to the inputs if the model accepts it, so that rerun modules see no cached keys."""
    if not isinstance(model, nn.Module) or not can_cache(model):
        return inputs
    if isinstance(inputs, Tensor):
        inputs = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
    return {"use_cache": False} | dict(inputs)


def random_inputs(model: object, length: int, seed: int, form: InputFormat) -> Tensor | dict[str, Tensor]:
    """Return two random sequences as inputs for an audit, plus two shorter targets for an encoder-decoder.

    The vocabulary size comes from the model's configuration, or from its first embedding table.
    """
    tables = [own for own in model.modules() if isinstance(own, nn.Embedding)] if isinstance(model, nn.Module) else []
    if not tables:
        hint = "pass inputs=: tokens [batch, length] or embeddings [batch, length, width]"
        raise value_error("inputs", "be given for a model without an embedding table", None, hint=hint)
    text = getattr(model, "config", None)
    size = getattr(text, "vocab_size", None) or tables[0].num_embeddings
    device = tables[0].weight.device
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(min(3, size - 1), size, (2, length), generator=draw).to(device)
    if not is_encoder_decoder(model):
        return tokens if form.batch_first else tokens.mT.contiguous()
    targets = torch.randint(min(3, size - 1), size, (2, max(2, 2 * length // 3)), generator=draw).to(device)
    return {"input_ids": tokens, "decoder_input_ids": targets}
