"""Time the parts of a layer, forward and backward: transformers and PEFT, torch.compile, Liger, TRL, and ours.

    python benchmarks/gpu/parts.py [--json parts.json] [--small]

Shapes are those of Llama 3 8B with LoRA r=16 on bfloat16 and NF4 weights, and one row of 8,192 tokens in documents of
FLAN-like lengths. Milliseconds come from the device's own clock. `--small` uses tiny shapes, also on a CPU. For
attention use `benchmarks/attention_speed.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available
from trl.trainer.utils import add_fused_lm_head

sys.path.insert(0, str(Path(__file__).parents[1]))

from attention_speed import document_lengths

from trl_packfa import PackedLayout, patch
from trl_packfa.bench.presets import preset_config
from trl_packfa.data.flops import best_seconds
from trl_packfa.layout.call_context import packed_call
from trl_packfa.trainers.sft.lm_head import ensure_own_loss

Act = Callable[[], Any]
# Part, side, and the function to time.
Timed = tuple[str, str, Act]


class Setting(NamedTuple):
    """Device, sizes and duration of the measurements."""

    preset: str  # with the shapes
    tokens: int  # of the row
    device: torch.device
    dtype: torch.dtype  # of weights and activations
    seconds: float  # of one measurement, approximately

    def hidden(self) -> torch.Tensor:
        """Return random hidden states `(1, tokens, width)` that require a gradient."""
        width = preset_config(self.preset).hidden_size
        return torch.randn(1, self.tokens, width, device=self.device, dtype=self.dtype, requires_grad=True)


def setting(*, small: bool) -> Setting:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if small or device.type == "cpu":
        return Setting("tiny", 96, device, torch.float32, 0.01)
    return Setting("llama-3-8b", 8192, device, torch.bfloat16, 0.5)


def save_model(on: Setting, folder: Path, *, layers: int) -> None:
    """Save a model of the preset with `layers` layers and random weights."""
    config = preset_config(on.preset)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    with on.device:
        AutoModelForCausalLM.from_config(config, dtype=on.dtype).save_pretrained(folder)


def load(on: Setting, folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=on.dtype, device_map={"": on.device}, **options)


def layer_parts(on: Setting, folder: Path) -> Iterator[Timed]:
    """Yield the norm and the MLP of a layer with an adapter, as they run inside a packed call."""
    layout = PackedLayout.from_lengths(document_lengths("uneven", on.tokens, seed=0), device=on.device)
    lora = {"r": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=on.dtype)
    sides: list[tuple[str, Callable[[Any], Any]]] = [("transformers, PEFT", lambda model: model), ("ours", patch)]
    if on.device.type == "cuda":
        sides.append(("torch.compile", lambda model: model))
        sides += [("Liger", _with_liger)] * is_liger_kernel_available()
    for weights, options in (("", {}), (", NF4", {"quantization_config": nf4})):
        for side, change in sides:
            model: Any = change(get_peft_model(load(on, folder, **options), LoraConfig(**lora)).train())
            layer = model.get_base_model().model.layers[0]
            for part, module in (("RMSNorm", layer.input_layernorm), ("MLP, LoRA", layer.mlp)):
                if not (weights and part == "RMSNorm"):  # a norm has no 4-bit weights
                    forward = torch.compile(module) if side == "torch.compile" else module
                    yield part + weights, side, _both_ways(forward, module, on.hidden(), layout)


def _with_liger(model: Any) -> Any:
    apply_liger_kernel(model, {"fused_linear_cross_entropy": False})  # TRL's choice
    return model


def _both_ways(forward: Any, module: torch.nn.Module, x: torch.Tensor, layout: PackedLayout) -> Act:
    """Return a function that runs the forward of `x` and the gradients of `x` and of the trained parameters."""
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]

    def act() -> Any:
        with packed_call(layout):
            out = forward(x)
        return torch.autograd.grad(out, wanted, torch.ones_like(out))

    return act


def heads(on: Setting, folder: Path) -> Iterator[Timed]:
    """Yield the final norm with a frozen LM head that scores every position, as a model without layers."""
    for side in ("TRL", "ours"):
        model = load(on, folder).requires_grad_(False)
        ids = torch.randint(model.config.vocab_size, (1, on.tokens), device=on.device)
        add_fused_lm_head(model, outputs=("entropy", "is_top1"))
        if side == "ours":
            ensure_own_loss(model, seed=0)
        x = on.hidden()

        def act(model: Any = model, ids: torch.Tensor = ids, x: torch.Tensor = x) -> Any:
            return torch.autograd.grad(model(inputs_embeds=x, labels=ids, fused_lm_head=True).loss, x)

        yield "LM head", side, act


def measure(on: Setting, folder: Path) -> list[dict[str, Any]]:
    """Measure and return a row for each part and side: milliseconds, or the reason of its failure."""
    save_model(on, folder / "layer", layers=1)
    save_model(on, folder / "head", layers=0)
    rows: list[dict[str, Any]] = []
    for timed in (layer_parts(on, folder / "layer"), heads(on, folder / "head")):
        for part, side, act in timed:
            row: dict[str, Any] = {"part": part, "side": side}
            try:
                act()  # the first call compiles and selects kernels
                row["ms"] = round(best_seconds(act, on.seconds) * 1e3, 4)
            except (RuntimeError, ValueError) as error:
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            rows.append(row)
            print(f"{part:20s} {side:20s} {row.get('ms', row.get('failed'))}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file for all rows")
    parser.add_argument("--small", action="store_true", help="use tiny shapes, also on a CPU")
    given = parser.parse_args(argv)
    on = setting(small=given.small)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(on, Path(folder))
    if given.json:
        device = torch.cuda.get_device_name(on.device) if on.device.type == "cuda" else "CPU"
        facts = {"device": device, "preset": on.preset, "tokens": on.tokens, "torch": torch.__version__, "rows": rows}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
