"""Hooks and forwards that others set on LoRA layers, and on what these call, run in packed calls: results are those of
PEFT's own forward to the bit, whenever they were set."""

import pytest
import tiny
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft.tuners.lora.layer import Linear
from selection import in_full
from test_fused_lora import adapted, packed, patch_beside_peft
from tolerance import assert_recomputed, differs
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from trl_packfa import patch
from trl_packfa.kernels import liger
from trl_packfa.kernels.liger import multiplies_by_liger
from trl_packfa.kernels.lora import decisions, overrides, projections

# One adapter, so that nothing else of the model is fused and all results are comparable to the bit.
TARGETS = ("q_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj")


def parent_of(model, target):
    block = model.base_model.model.model.layers[0]
    return block.mlp if target == "down_proj" else block.self_attn


def layer_of(model, target):
    return getattr(parent_of(model, target), "q_proj" if target is ATTENTION else target)


PARTS = {
    "layer": lambda layer: layer,
    "lora_A": lambda layer: layer.lora_A["default"],
    "lora_B": lambda layer: layer.lora_B["default"],
    "dropout": lambda layer: layer.lora_dropout["default"],
    "base": lambda layer: layer.base_layer,
}


def changed(output):
    return output * 1.5


def set_forward(module):
    own = module.forward
    module.forward = lambda *args, **kwargs: changed(own(*args, **kwargs))


def set_forward_without_ours(module):
    """One that was written before the patch calls the class's own."""
    own = type(module).forward
    module.forward = lambda *args, **kwargs: changed(own(module, *args, **kwargs))


class Changes(ModelHook):
    def post_forward(self, module, output):
        return changed(output)


def turn_into_subclass(module):
    cls = type(module)

    def forward(self, *args, **kwargs):
        return changed(cls.forward(self, *args, **kwargs))

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def compile_in_place(module):
    module._compiled_call_impl = lambda *args, **kwargs: changed(module._call_impl(*args, **kwargs))


ON_A_MODULE = {
    "forward": set_forward,
    "forward of the class inside": set_forward_without_ours,
    "hook": lambda module: module.register_forward_hook(lambda _module, _args, output: changed(output)),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda _module, args: (changed(args[0]), *args[1:])),
    "accelerate's hook": lambda module: add_hook_to_module(module, Changes()),
    "subclass": turn_into_subclass,
    "compiled in place": compile_in_place,
}


class Scaled(nn.Module):
    def forward(self, weight):
        return changed(weight)


class Wrapped(nn.Module):
    """A module around another, as `torch.compile` puts one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def weight(self):
        return self.inner.weight

    bias = None

    def forward(self, x):
        return changed(self.inner(x))


def wrapped(container):
    return {"default": Wrapped(container["default"])}


def scale(module):
    parametrize.register_parametrization(module, "weight", Scaled())


class Variant:
    @staticmethod
    def forward(module, *, active_adapter, x, result, **kwargs):
        return result + module.lora_B[active_adapter](module.lora_A[active_adapter](x)) * 3


IN_A_LAYER = {
    "parametrization of a factor": lambda layer: scale(layer.lora_A["default"]),
    "parametrization of the base": lambda layer: scale(layer.base_layer),
    "wrapped factor": lambda layer: layer.lora_B.update(wrapped(layer.lora_B)),
    "another container": lambda layer: setattr(layer, "lora_B", nn.ModuleDict(wrapped(layer.lora_B))),
    "variant": lambda layer: layer.lora_variant.update(default=Variant()),
    "another dict of variants": lambda layer: setattr(layer, "lora_variant", {"default": Variant()}),
}
CHANGES = {
    f"{what} on {part}": lambda layer, change=change, find=find: change(find(layer))
    for part, find in PARTS.items()
    for what, change in ON_A_MODULE.items()
} | IN_A_LAYER
TIMES = ("before the patch", "after the patch", "after the first batch")
# What is not a forward is read at the first batch, whether it was set before the patch or after it.
CASES = [(change, when) for change in CHANGES for when in TIMES if when != TIMES[1] or "forward" in change]


def result(target, change=None, *, when=TIMES[0], fused=True, find=layer_of):
    """Logits of a packed call and the adapter's gradients, of a model that was changed at some time."""
    model = adapted(base=tiny.model(layers=1), target_modules=list(target) if target is ATTENTION else [target])
    for time in TIMES:
        if change is not None and time == when:
            change(find(model, target))
        if time == TIMES[0]:
            (patch if fused else patch_beside_peft)(model)
        elif time == TIMES[1] and when == TIMES[2]:
            packed(model)
    logits, gradients = tiny.logits_and_gradients(model)
    return [logits, *gradients.values()]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.fixture(scope="module")
def unchanged():
    return {target: result(target) for target in TARGETS}


@pytest.mark.parametrize(("change", "when"), CASES)
@pytest.mark.parametrize("target", ["down_proj", *in_full("q_proj")])
def test_what_others_set_runs(target, change, when, unchanged):
    """The control: it changes the result."""
    theirs = result(target, CHANGES[change], when=when, fused=False)
    assert same(result(target, CHANGES[change], when=when), theirs)
    assert not torch.equal(theirs[0], unchanged[target][0])


@pytest.mark.parametrize("cls", [Linear, nn.Linear])
@pytest.mark.parametrize("when", TIMES)
def test_a_forward_that_a_user_set_on_the_class_runs(when, cls, monkeypatch, unchanged):
    own = cls.forward

    def forward(self, *args, **kwargs):
        return changed(own(self, *args, **kwargs))

    def change(_layer):
        monkeypatch.setattr(cls, "forward", forward)

    ours = result("q_proj", change, when=when)
    monkeypatch.undo()
    assert same(ours, result("q_proj", change, when=when, fused=False))
    monkeypatch.undo()
    assert not torch.equal(ours[0], unchanged["q_proj"][0])


@pytest.mark.parametrize("when", TIMES)
def test_hooks_of_all_modules_run(when, unchanged):
    """torch's global hooks, which profilers and trackers use."""

    def run(fused):
        seen, handles = [], []

        def hook(module, _args, output):
            seen.append(type(module))
            return changed(output) if type(module) is nn.Linear else None

        try:
            change = lambda _layer: handles.append(torch_modules.register_module_forward_hook(hook))  # noqa: E731
            return result("q_proj", change, when=when, fused=fused), seen
        finally:
            handles[0].remove()

    (ours, calls), (theirs, expected) = run(fused=True), run(fused=False)
    assert same(ours, theirs) and calls == expected
    assert not torch.equal(theirs[0], unchanged["q_proj"][0])


@pytest.mark.parametrize("when", TIMES)
def test_a_hook_that_has_been_taken_off_leaves_a_layer_fused(when, unchanged):
    """accelerate leaves the forward behind, on the instance."""

    def change(layer):
        for part in PARTS.values():
            remove_hook_from_module(add_hook_to_module(part(layer), Changes()))
            assert "forward" in vars(part(layer))

    assert same(result("q_proj", change, when=when), unchanged["q_proj"])
    assert not same(result("q_proj", fused=False), unchanged["q_proj"])


@pytest.mark.parametrize("part", ["layer", "lora_B"])
@pytest.mark.parametrize("when", TIMES)
def test_what_is_not_looked_at_is_skipped(when, part, monkeypatch):
    """Negative control: without the look at forwards, one that was set is lost."""
    change = CHANGES[f"forward on {part}"]
    theirs = result("down_proj", change, when=when, fused=False)
    for module in (decisions, projections, overrides):
        monkeypatch.setattr(module, "runs_own_forward", lambda _module: True)
    ours = result("down_proj", change, when=when)
    assert differs(ours[0], theirs[0])


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("part", PARTS)
def test_layers_of_one_input_beside_a_changed_one_stay_right(part, when):
    """Query, key and value are multiplied together, so the others' forwards could skip the changed one's."""
    change = CHANGES[f"forward on {part}"]
    ours, theirs = (result(ATTENTION, change, when=when, fused=fused) for fused in (True, False))
    assert not same(ours, theirs), "nothing was fused"
    for mine, their in zip(ours, theirs, strict=True):
        assert_recomputed(mine, their)


def set_forward_on(module, change):
    own = module.forward
    module.forward = lambda x: change(x, own(x))


def hook(module, change):
    module.register_forward_hook(lambda _module, args, output: change(args[0], output))


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("put", [set_forward_on, hook])
def test_what_is_set_on_an_activation_sees_it_whole_and_once(put, when):
    """A fused MLP computes it in chunks, and again in the backward."""

    def run(fused):
        seen = []
        note = lambda x, output: (seen.append(x.shape), changed(output))[1]  # noqa: E731
        return result("down_proj", lambda mlp: put(mlp.act_fn, note), when=when, fused=fused, find=parent_of), seen

    (ours, shapes), (theirs, expected) = run(fused=True), run(fused=False)
    assert shapes == expected and len(shapes) == 1
    for mine, their in zip(ours, theirs, strict=True):
        assert_recomputed(mine, their)


def test_liger_leaves_a_watched_activation_alone(monkeypatch):
    monkeypatch.setattr(liger, "lies_on_cuda", lambda _x: True)
    monkeypatch.setattr(liger, "liger_kernels", lambda: object())
    mlp = tiny.model(layers=1).model.layers[0].mlp
    multiplies = [multiplies_by_liger(mlp, torch.zeros(1))]
    handle = mlp.act_fn.register_forward_hook(lambda *_: None)
    multiplies.append(multiplies_by_liger(mlp, torch.zeros(1)))
    handle.remove()
    multiplies.append(multiplies_by_liger(mlp, torch.zeros(1)))
    set_forward(mlp.act_fn)
    assert [*multiplies, multiplies_by_liger(mlp, torch.zeros(1))] == [True, False, True, False]
