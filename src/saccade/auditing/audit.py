"""audit: a model held against what is declared of it."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.auditing.bug_script import script_of
from saccade.auditing.by_layer import ByLayer, mixers
from saccade.auditing.compiled_subject import CompiledSubject, bare, eagerly, is_compiled
from saccade.auditing.declared_rules import Declared, from_config, rules_of
from saccade.auditing.default_inputs import check_still, rows_judged, texts, without_cache
from saccade.auditing.encoder_decoder_rules import joint_rules, pair_from_config
from saccade.auditing.encoder_decoder_subject import PairSubject, is_pair
from saccade.auditing.end_to_end import EndToEnd
from saccade.auditing.equivalence import sameness
from saccade.auditing.finding import Finding, Judged, Verdict
from saccade.auditing.float64 import TrueFloat64
from saccade.auditing.inputs import InputFormat
from saccade.auditing.leak_location import first_module
from saccade.auditing.model_under_test import NoGradientError, Subject, rows_of
from saccade.auditing.multi_process import replicated
from saccade.auditing.reachability import Reach
from saccade.auditing.report import DRAWN, Report, reached_by_gradient
from saccade.auditing.rounding_noise import FACTOR, jitter, relative, undisturbed
from saccade.masks import Mask, parse
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import check_int

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@argument_hints({}, mask="rule=, which the model is held against", attention_mask="padding=")
def audit(
    model: Callable[..., Any],
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
    tests: int = 12,
    seed: int = 0,
    group: ProcessGroup | None = None,
) -> Report:
    """Which token reaches which in a model, held against a rule: end to end, and layer by layer.

    The model runs as it is, on whatever kernel it has. Outputs may depend on a token only where the rule, closed over
    the layers with their residual connections, allows it; and each module that mixes tokens must do, run again in its
    place, what the rule of its own layer says. Two probes look: changes of the tokens' vectors, and gradients, of
    which the smallest that is not 0 counts. A compiled model is given vectors; its modules are run as they are written.

    Args:
        model: a module or function from tokens ``[batch, length]``, or from vectors ``[batch, length, width]``, to
            rows ``[batch, length, ...]``.
        rule: a mask for all layers, also as text (`saccade.masks.parse`), a list with one for each, or a mapping from
            patterns of module names to masks. Of an encoder-decoder, "encoder", "decoder" and "cross", each a mask or a
            list. Read from ``model.config`` when None, and then said to be assumed.
        inputs: tokens or vectors, or all keyword arguments of the model; two random texts when None. Of an
            encoder-decoder, ``input_ids`` (the source) and ``decoder_input_ids`` (the target) are among them.
        tokens: name of the keyword argument that holds the tokens or vectors. When None, one of transformers' names,
            the only one that can, or the first parameter of the model.
        batch_first: whether tokens or vectors are ``[batch, length, ...]``; else ``[length, batch, ...]``. It is about
            the inputs alone: modules and outputs of either layout are recognised.
        module: the model that a function calls, whose tables and layers are to be seen.
        length: of random texts.
        layers: how many layers there are; as many as modules that mix tokens when None.
        padding: True where a token stands, bool ``[batch, length]``; rows of padding are not judged. All when None.
            The source and then the target, in one row, of an encoder-decoder.
        outputs: reads the rows of what the model returns; logits, hidden states or the tensor itself by default.
        packed: lengths of texts that the first sequence is cut into: packed, each must say what it says alone.
        padded: whether padding, left and right, must change nothing.
        cache: whether a prompt and steps through a cache must say what the whole text does, in every split.
        against: names of implementations of attention ("eager", "sdpa") that must say the same.
        tests: sets of rows to look at.
        seed: of the random text and of all changes.
        group: processes that run the model together, as with context parallelism. Each calls this with the same inputs,
            and each is told the same. Replicas in DistributedDataParallel need none.

    Returns:
        A `Report`; print it. `Report.ok` says whether all that was asked held.

    Raises:
        TypeError, ValueError: what is no mask, no input that the model takes, no rows of the right shape; a model that
            is being trained with dropout.

    Cost: for each test a forward pass and two backward ones; ten more for noise and to find the modules, and where one
        leaks, log2 of the length to name the pair. Up to 64 tokens, a backward pass for each, for the picture. Memory
        of one forward and backward pass, and a byte for each pair of tokens and distinct rule.

    Example:
        >>> import saccade as sc
        >>> model = sc.models.small_decoder()
        >>> sc.audit(model, sc.masks.Causal()).ok
        True
    """
    check_int("length", length, 2)
    check_int("tests", tests, 1)
    check_int("seed", seed, 0)
    run = replicated(model)
    model = bare(run)
    form = InputFormat.of(model, tokens, batch_first, module)
    looked_at = model if module is None else module
    check_still(looked_at)
    with undisturbed(looked_at) if isinstance(looked_at, nn.Module) else nullcontext():
        given = without_cache(model, texts(looked_at, length, seed, form) if inputs is None else inputs)
        subject = _subject(run, given, outputs, group, form)
        judged = rows_judged(padding, subject.shape)
        told = parse(rule) if isinstance(rule, str) else rule
        declared, is_assumed = (told, False) if told is not None else (_assumed(looked_at), True)
        mixed = mixers(subject.as_written)
        if is_assumed and isinstance(declared, list):  # a layer may have two modules that mix, or none
            layers = layers or len(declared)
        rules, words = _rules(declared, subject, list(mixed), layers)
        reach = Reach(rules, batch=subject.shape[0], length=subject.shape[1])
        probes = EndToEnd(subject, reach, judged, noise=lambda: _noise(subject), tests=tests, seed=seed).run()
        claims = [*_end_to_end(subject, reach, probes), _by_layer(subject.as_written, reach, mixed, judged)]
        if packed is not None or padded or cache or against:
            ways = {"packed": packed, "padded": padded, "cache": cache, "against": against}
            with eagerly():
                claims += _same(model, subject.as_written, ways, outputs, seed)
        if isinstance(subject, CompiledSubject):
            claims = claims[:2] + [dataclasses.replace(one, why=_as_written(one.why)) for one in claims[2:]]
        pictured = _pictured(subject, reach)
        return Report(
            _name(model) + (", compiled" if isinstance(subject, CompiledSubject) else ""),
            ("assumed: " if is_assumed else "") + words,
            tuple(_in_own_texts(claim, subject) for claim in claims),
            subject.shape,
            str(subject.vectors.dtype).removeprefix("torch."),
            seed,
            probes.floor,
            tests,
            probes.covered,
            _versions(model),
            ""
            if isinstance(subject, PairSubject)
            else script_of(model, given, subject.as_written.given, claims, packed or (), seed),
            *pictured,
        )


def _subject(
    model: Callable[..., Any],
    inputs: Tensor | Mapping[str, Any],
    outputs: Callable[[Any], Tensor],
    group: ProcessGroup | None,
    form: InputFormat,
) -> Subject:
    if is_pair(bare(model)):
        if form != InputFormat():
            rule = "be left out for a model that reads two texts"
            raise value_error("tokens, batch_first, module", rule, "given")
        if is_compiled(model):
            raise value_error("a model that reads two texts", "be audited before it is compiled", "one that is")
        return PairSubject(model, inputs, outputs, group)
    if is_compiled(form.module):
        raise value_error("module", "be audited before it is compiled, or by itself", "one that is compiled")
    return (CompiledSubject if is_compiled(model) else Subject)(model, inputs, outputs, group, form)


def _as_written(why: str) -> str:
    return "; ".join(part for part in (why, "of the modules as they are written, not compiled") if part)


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "a function")


def _versions(model: object) -> dict[str, str]:
    """Of what ran: of the package that the model comes from, too."""
    names = dict.fromkeys(("saccade", "torch", type(model).__module__.partition(".")[0]))
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {name: str(version) for name, version in found.items() if version} | {"python": platform.python_version()}


def _assumed(model: object) -> Declared:
    found = pair_from_config(model) if is_pair(model) else from_config(model)
    if found is None:
        hint = "saccade.masks has the words: audit(model, masks.Causal() & masks.Window(127, 0))"
        raise value_error("rule", "be given for a model whose configuration does not say it", None, hint=hint)
    return found


def _noise(subject: Subject) -> float:
    """How much outputs change by noise alone: by running again, and by one unit in what every module returns."""
    again = max(relative(subject.run(), subject.rows) for _ in range(2))
    written = subject.as_written
    moved = 0.0 if written.module is None else jitter(written.module, written.run, base=written.rows)
    return FACTOR * max(again, moved)


def _end_to_end(subject: Subject, reach: Reach, probes: EndToEnd) -> list[Judged]:
    """Two claims: nothing leaks, nothing is blind."""
    leak = next((one for one in probes.findings if one.kind == "leak"), None)
    blind = next((one for one in probes.findings if one.kind == "blind"), None)
    if leak is not None:
        placed = _placed(subject.as_written, reach, probes, leak)
        seen = Judged("reach", "broken", max(probes.largest, leak.size), probes.floor, placed)
    else:
        seen = Judged("reach", "held", probes.largest, probes.floor, why=_unseen(probes))
    if probes.no_gradient:
        return [seen, Judged("sight", "not answered", why=probes.no_gradient)]
    verdict: Verdict = "broken" if blind else "not answered" if probes.doubts.unsure else "held"
    return [seen, Judged("sight", verdict, finding=blind, why=probes.doubts.told(subject))]


def _unseen(probes: EndToEnd) -> str:
    """What a claim that was held does not say."""
    if not probes.hides_something:
        return "the rule forbids nothing"
    return f"by changes alone: {probes.no_gradient}" if probes.no_gradient else ""


def _placed(subject: Subject, reach: Reach, probes: EndToEnd, found: Finding) -> Finding:
    assert found.key is not None
    module = first_module(subject, reach, found.key, probes.swapped(reach.one(*found.key)))
    return dataclasses.replace(found, module=module)


def _by_layer(subject: Subject, reach: Reach, mixed: dict[str, Tensor], judged: Tensor) -> Judged:
    if not mixed:
        return Judged(
            "by layer", "not answered", why="no module was seen to mix tokens: a function, or one that hooks miss"
        )
    layers = len(reach.rules)
    in_order = len(mixed) == layers and not isinstance(subject, PairSubject)
    places = {name: place if in_order else subject.layer_of(name, layers) for place, name in enumerate(mixed)}
    probes = ByLayer(subject, {name: reach.own(place) for name, place in places.items()}, mixed, judged).run()
    found, missed = probes.findings, sorted(set(mixed) - probes.looked_at)
    through = f"no gradient passes through {', '.join(missed)}" if missed else ""
    near = (
        f"without attention, and reach less than the rule, as they may: {', '.join(probes.near)}" if probes.near else ""
    )
    why = "; ".join(part for part in (through, probes.doubts.told(subject), near) if part)
    if not found and (missed or probes.doubts.unsure):
        return Judged("by layer", "not answered", why=why)
    leaks = [one for one in found if one.kind == "leak"]
    first = next(iter([*leaks, *found]), None)
    largest = max((one.size for one in leaks), default=0.0)
    return Judged("by layer", "broken" if found else "held", largest, 0.0, first, why)


def _in_own_texts(claim: Judged, subject: Subject) -> Judged:
    return claim if claim.finding is None else dataclasses.replace(claim, finding=subject.told(claim.finding))


def _same(
    model: Callable[..., Any], subject: Subject, ways: dict[str, Any], outputs: Callable[[Any], Tensor], seed: int
) -> list[Judged]:
    """Ways of running the model that must say the same, each as a claim."""
    refused = subject.given.is_floating_point() or isinstance(subject, PairSubject) or subject.group is not None
    if not isinstance(model, nn.Module) or refused or not subject.form.batch_first:
        rule = "be left out for a function, vectors, a group, batch_first=False and a model that reads two texts"
        raise value_error("packed, padded, cache, against", rule, "given", hint="they run modules on token ids")
    judged = []
    for pair in sameness(model, subject.given, outputs=outputs, seed=seed, **ways):
        answered = pair.verdict != "not answered"
        found = None
        if pair.verdict == "broken" and pair.where is not None:
            found = Finding("differs", pair.where, None, pair.difference, "", pair.name, subject.passes)
        kept = f"saccade's kernel holds it: {pair.remedy}" if pair.remedy else ""
        numbers = (pair.difference, pair.allowed) if answered else (0.0, 0.0)
        judged.append(Judged(pair.name, pair.verdict, *numbers, found, kept if answered else pair.why))
    return judged


def _pictured(subject: Subject, reach: Reach) -> tuple[Tensor | None, Tensor | None]:
    length = subject.shape[1]
    if length > DRAWN:
        return None, None
    try:
        leaf, out = subject.graph()
    except NoGradientError:
        return None, None
    declared = torch.stack([reach.sources(reach.one(0, place))[0] for place in range(length)])
    measured = reached_by_gradient(leaf, out)
    if bool((declared & ~measured).any()) and (wide := subject.in_float64[0]) is not None:
        with TrueFloat64():
            measured = reached_by_gradient(*wide.graph())
    return declared, measured


def _rules(declared: Declared, subject: Subject, names: list[str], layers: int | None) -> tuple[list[Mask], str]:
    """One rule for each layer, and all of them in words."""
    if isinstance(subject, PairSubject):
        if layers is not None:
            raise value_error("layers", "be left out for a model that reads two texts", layers)
        return joint_rules(declared, subject)
    rules = rules_of(declared, names, layers)
    if all(rule == rules[0] for rule in rules):
        return rules, f"{rules[0]} in {len(rules)} layers"
    return rules, "; ".join(f"layer {place}: {rule}" for place, rule in enumerate(rules, 1))
