"""Predict a training step on a GPU from its operators, on a machine without one: operators, peak memory, milliseconds.

    python benchmarks/gpu/model.py [--json FILE] [--only TEXT] [--table] [--interface]

The forward and the backward of a micro-batch run on fake tensors, which have shapes and no data. Every operator is
counted, with its arithmetic and the bytes that it reads and writes; storages are followed from their allocation to
their end (`counting.py`, `fake_cuda.py`). Not counted: launches that the host is too slow for, optimizer state,
workspaces, fragmentation.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM
from trl.trainer import utils as trl_utils

from trl_packfa import PackedLayout, candidates, patch
from trl_packfa.bench.presets import preset_config
from trl_packfa.kernels.lm_head.chunked import ChunkedHead
from trl_packfa.patches.base import InterfacePatch
from trl_packfa.patching.inspect import inner_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.counting import H100, H200, Counted, Recorder
from gpu.fake_cuda import on_fake_cuda

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """A model, a side and its options: one row of the table."""

    side: str  # of `SIDES`
    preset: str = "llama-3-8b"
    adapters: str = "float32"  # dtype; TRL has float32 on a bfloat16 base, and bfloat16 on a 4-bit one
    dropout: float = 0.0
    four_bits: bool = False
    checkpointed: bool = False
    documents: tuple[int, ...] = (256,) * 32
    layers: int | None = None  # instead of the preset's
    logs: bool = False  # the step is logged, so ours measures entropy and accuracy; TRL does so in every step
    attention_speed: float = 1.0  # times the rates of FlashAttention 2
    interface: bool = False  # ours runs the model's own attention forward, through transformers' interface


SIDES = ("trl-bfd", "trl-bfd-liger", "bfd")


def build(setting: Setting, fakes: FakeTensorMode) -> Any:
    """Build the model of a setting with its adapter, with fakes of this mode as weights."""
    config = preset_config(setting.preset)
    config.num_hidden_layers = setting.layers or config.num_hidden_layers
    ours = setting.side == "bfd"
    lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=setting.dropout, task_type="CAUSAL_LM")
    with torch.device("meta"):  # PEFT moves layers, and bitsandbytes has a class of weights: fakes can neither
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa" if ours else "flash_attention_2"
        )
        trl_utils.add_fused_lm_head(model, outputs=("entropy", "is_top1"))
        if setting.four_bits:
            _quantize(model)
        model: Any = get_peft_model(model, lora)
    for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
        weight.data = weight.data.to(getattr(torch, setting.adapters))
    if setting.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    with fakes:
        _make_fake(model)
        if ours:
            inner: Any = inner_model(model)
            inner.forward = head = ChunkedHead(inner, inner.forward)
            head.measures = setting.logs
            with MonkeyPatch.context() as patched:
                if setting.interface:
                    patched.setattr(candidates, "get_patch", lambda model: InterfacePatch(model_types=("llama",)))
                patch(model, backend="varlen")
    return model.train()


def _quantize(model: Any) -> None:
    """Replace the linear layers by 4-bit ones, as transformers does."""
    functional: Any = import_module("bitsandbytes.functional")
    kinds: Any = import_module("bitsandbytes.nn")
    for name, linear in list(model.named_modules()):
        if type(linear) is torch.nn.Linear and name != "lm_head":
            packed, state = functional.quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=False)
            new = kinds.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
            new.weight = kinds.Params4bit(
                packed, requires_grad=False, quant_state=state, bnb_quantized=True, module=new
            )
            model.set_submodule(name, new)


def _make_fake(model: Any) -> None:
    """Replace weights of the meta device by fakes of a CPU."""
    fakes: dict[int, Any] = {}  # tied weights stay one
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in fakes:
                    fakes[id(weight)] = _fake_of(weight)
                module._parameters[name] = fakes[id(weight)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="cpu")


def _fake_of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    data = torch.empty_like(weight.data, device="cpu")
    state = getattr(weight, "quant_state", None)
    if state is None:
        return torch.nn.Parameter(data, requires_grad=weight.requires_grad)
    state.absmax, state.code = (torch.empty_like(x, device="cpu") for x in (state.absmax, state.code))
    packed: Any = torch.nn.Parameter(data, requires_grad=False)  # bitsandbytes' class takes no fake
    packed.quant_state = state
    return packed


def count(setting: Setting, hooks: AbstractContextManager[Any] | None = None) -> Counted:
    """Run the forward and the backward of one micro-batch on fake tensors, and count.

    `hooks` see what the forward saves for the backward, as those that offload activations do.
    """
    recorder = Recorder(setting.documents, attention_speed=setting.attention_speed)
    tokens = sum(setting.documents)
    layout = PackedLayout.from_lengths(setting.documents)
    layout.attention  # noqa: B018 (made outside of the fakes, from the lengths)
    with ExitStack() as stack:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(on_fake_cuda(recorder, by_liger=setting.side == "trl-bfd-liger"))
        model = build(setting, fakes)
        stack.enter_context(fakes)
        ids = torch.zeros((1, tokens), dtype=torch.long)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids, "position_ids": layout.position_ids()}
        if setting.side == "bfd":
            batch["packed_layout"] = layout
        else:  # as TRL's collator gives them
            offsets, longest = layout.cu_seqlens, max(setting.documents)
            batch |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        recorder.follow((list(model.parameters()), list(model.buffers()), batch))
        counted = recorder.counted
        counted.weight_bytes = recorder.live
        with recorder:
            with torch.autocast("cpu", torch.bfloat16), hooks or nullcontext():
                loss = model(**batch, fused_lm_head=True, use_cache=False, num_items_in_batch=tokens).loss
            counted.forward, counted.kept_bytes = len(counted.operators), recorder.live - counted.weight_bytes
            loss.backward()
    gc.collect()
    return counted


LORA = Setting("bfd")
# The lengths of the recipes: a token sees 727 tokens of its document.
_UNEVEN = (736,) * 11 + (96,)
# Name of a configuration, and its setting of each side.
CONFIGURATIONS = {
    "8 B": LORA,
    "8 B, the recipe's lengths": replace(LORA, documents=_UNEVEN),
    # On Hopper, from the lower end of its authors' 1.5 to 2 times (arXiv 2407.08608).
    "8 B, the recipe's lengths, FlashAttention 3": replace(LORA, documents=_UNEVEN, attention_speed=1.5),
    "8 B, lora_dropout=0.05": replace(LORA, dropout=0.05),
    "8 B, adapters in bfloat16": replace(LORA, adapters="bfloat16"),
    "8 B, adapters in bfloat16, lora_dropout=0.05": replace(LORA, adapters="bfloat16", dropout=0.05),
    "8 B, checkpointed": replace(LORA, checkpointed=True),
    "8 B, NF4, checkpointed, 4,096 tokens": replace(
        LORA, four_bits=True, adapters="bfloat16", checkpointed=True, documents=(256,) * 16
    ),
    "1 B, 4,096 tokens": replace(LORA, preset="llama-3.2-1b", documents=(256,) * 16),
    "1 B, checkpointed": replace(LORA, preset="llama-3.2-1b", checkpointed=True),
}  # fmt: skip
RESULTS = HERE / "results" / "model.json"


def figures(counted: Counted) -> dict[str, float]:
    """Return the counts and the predicted milliseconds of a micro-batch, in all and on an H100 by kind of operator."""
    found: dict[str, float] = {
        "operators": len(counted.operators),
        "forward_operators": counted.forward,
        "calls": counted.calls,
        "host_waits": counted.waits,
        "peak_bytes": counted.peak_bytes,
        "kept_bytes": counted.kept_bytes,
    }
    found |= {on.name: counted.seconds(on) * 1e3 for on in (H100, H200)}
    return found | {kind: seconds * 1e3 for kind, seconds in sorted(counted.by_kind(H100).items())}


def by_layer(setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures outside of layers and those of each layer: layers are alike, so two and three are counted."""
    small, large = (figures(count(replace(setting, layers=layers))) for layers in (2, 3))
    each = {name: large[name] - small[name] for name in small}
    return {name: small[name] - 2 * each[name] for name in small}, each


def measure(name: str, side: str, **options: Any) -> dict[str, Any]:
    """Return the row of one side of a configuration; `options` are fields of its [`Setting`]."""
    setting = replace(CONFIGURATIONS[name], side=side, **options)
    outside, each = by_layer(setting)
    layers = preset_config(setting.preset).num_hidden_layers
    whole = {figure: round(outside[figure] + layers * each[figure], 1) for figure in outside}
    return {"configuration": name, "side": side, **whole}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the rows: a line for each configuration, in each cell the sides in the order of `SIDES`."""
    lines = [
        "| 8,192 tokens, forward and backward | operators | peak, GB | H100, ms | times | H200, ms | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["configuration"] for row in rows):
        sides = {row["side"]: row for row in rows if row["configuration"] == name}
        trl, liger, ours = (sides[side] for side in SIDES)
        cells = [", ".join(f"{row['operators']:,.0f}" for row in (trl, liger, ours))]
        cells.append(", ".join(f"{row['peak_bytes'] / 1e9:.1f}" for row in (trl, liger, ours)))
        for on in (H100.name, H200.name):
            cells.append(", ".join(f"{row[on]:,.0f}" for row in (trl, liger, ours)))
            cells.append(", ".join(f"{row[on] / ours[on]:.2f}" for row in (trl, liger)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the rows")
    parser.add_argument("--only", default="", help="count only configurations with this text in their name")
    parser.add_argument("--table", action="store_true", help="count nothing, print the table of the file")
    parser.add_argument("--interface", action="store_true", help="count ours at level interface, and write nothing")
    given = parser.parse_args(argv)
    if given.interface:
        for name in (name for name in CONFIGURATIONS if given.only in name):
            print(*(f"{name}: {measure(name, 'bfd', interface=through)}" for through in (False, True)), sep="\n")
        return 0
    if given.table:
        print(markdown(json.loads(given.json.read_text())["rows"]))
        return 0
    known = json.loads(given.json.read_text())["rows"] if given.only else []
    rows = []
    for name in CONFIGURATIONS:
        if given.only in name:
            for side in SIDES:
                rows.append(measure(name, side))
                print(rows[-1], file=sys.stderr)
        else:
            rows += [row for row in known if row["configuration"] == name]
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
    given.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
