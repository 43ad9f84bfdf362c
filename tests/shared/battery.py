"""Functions of `tests/test_gpu.py` for any device. On a CPU they run with the CPU's backends, so that no line is first
executed on a GPU."""

from contextlib import contextmanager

import oracle
import pytest
import tiny
import torch
from compiling import compile_anew
from peft import get_peft_model
from torch.nn.utils.rnn import pad_sequence
from training import lora_config

from trl_packfa import PackedLayout, describe, patch
from trl_packfa.attention import AttentionArguments, AttentionRequest, get_backend
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.errors import NoBackend

# Of one tile and of many, of one token, equal ones.
SHORT, LONG = (11, 1, 37, 5, 19), (300, 1, 129, 128, 700, 64, 2)
# name: document lengths, query heads, key/value heads, head dim, value dim, options
KERNEL_CASES = {
    "short": (SHORT, 8, 2, 64, 64, {}),
    "one token each": ((1, 1, 1), 8, 2, 64, 64, {}),
    "one document": ((1000,), 8, 2, 64, 64, {}),
    "long": (LONG, 8, 2, 128, 128, {}),
    "long, no GQA": (LONG, 4, 4, 64, 64, {}),
    "long, 8 to 1": (LONG, 8, 1, 64, 64, {}),
    "window of 8": (LONG, 8, 2, 64, 64, {"sliding_window": 8}),
    "window of 200": (LONG, 8, 2, 64, 64, {"sliding_window": 200}),
    "softcap": (LONG, 8, 2, 64, 64, {"softcap": 30.0}),
    "softcap, short": (SHORT, 8, 2, 64, 64, {"softcap": 30.0}),
    "softcap, window, heads of 256": (LONG, 8, 4, 256, 256, {"softcap": 50.0, "sliding_window": 200}),
    "sinks": (LONG, 8, 2, 64, 64, {"sinks": True}),
    "sinks, window": (LONG, 8, 2, 64, 64, {"sinks": True, "sliding_window": 128}),
    "heads of 80": (LONG, 8, 2, 80, 80, {}),
    "heads of 96": (LONG, 8, 2, 96, 96, {}),
    "heads of 256": (LONG, 4, 1, 256, 256, {}),
    "heads of 512": (SHORT, 4, 1, 512, 512, {}),
    "MLA": (LONG, 4, 4, 192, 128, {}),
    "8k tokens": ((37, 2000, 1, 4096, 900, 1158), 2, 1, 128, 128, {}),
}
# Documents of a compiled model's batches: few and many, one alone, of one token, one long.
BATCHES = ((13, 1, 29), (40,), (2, 30, 3, 3, 18, 5), (60, 5), (1, 1, 70))


def require_device(device, backend, dtype=torch.bfloat16):
    """Skip the test if the device does not exist, with the backend's own reasons."""
    if device == "cuda" and not torch.cuda.is_available():
        first_there = "varlen" if backend == "auto" else backend
        reasons = get_backend(first_there).refusals(AttentionRequest(torch.device("cpu"), dtype, 16, 4, 2))
        pytest.skip(f"{backend}: {'; '.join(reasons) or 'no GPU; this test tries it on the CPU'}")


class KernelCase:
    """A case of `KERNEL_CASES` on a device: its tensors, and three ways to compute it."""

    def __init__(self, name, device, dtype):
        self.lengths, heads, kv_heads, dim, self.value_dim, options = KERNEL_CASES[name]
        self.layout = PackedLayout.from_lengths(self.lengths, device=torch.device(device))
        shapes = ((heads, dim), (kv_heads, dim), (kv_heads, self.value_dim))
        self.shapes = [(self.layout.num_tokens, *shape) for shape in shapes] + [(heads,)] * ("sinks" in options)
        self.device, self.dtype = device, dtype
        self.options = {**options, "scaling": dim**-0.5}
        self.upstream = torch.randn(self.layout.num_tokens, heads, self.value_dim, device=device, dtype=torch.float64)

    def tensors(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator) for shape in self.shapes)
        return [x.to(self.device, self.dtype).requires_grad_() for x in drawn]

    def backend(self, name):
        tensors = self.tensors()
        request = AttentionRequest.of(*tensors[:3], self.call(tensors))._replace(named=True)
        if reasons := get_backend(name).refusals(request):
            pytest.skip(f"{name}: {'; '.join(reasons)}")
        return get_backend(name)

    def run(self, backend, tensors):
        out = backend(*tensors[:3], self.call(tensors))
        return [out, *torch.autograd.grad(out, tensors, self.upstream.to(out.dtype))]

    def run_exactly(self, tensors):
        """Return the output and the gradients in float64, by the formula."""
        exact = [x.detach().double().requires_grad_() for x in tensors]
        options = {**self.options, "sinks": exact[3] if "sinks" in self.options else None}
        out = oracle.attention_of_documents(*exact[:3], self.lengths, **options)
        return [out, *torch.autograd.grad(out, exact, self.upstream)]

    def replace_longest(self, tensors):
        """Return tensors with other values in the longest document, and a mask of the other documents' tokens."""
        which = max(range(len(self.lengths)), key=lambda i: self.lengths[i])
        start = sum(self.lengths[:which])
        span = slice(start, start + self.lengths[which])
        others = torch.ones(self.layout.num_tokens, dtype=torch.bool, device=self.device)
        others[span] = False
        after = [x.detach().clone() for x in tensors]
        for x, other in zip(after[:3], self.tensors(seed=1)[:3], strict=True):
            x[span] = other[span].detach()
        return [x.requires_grad_() for x in after], others

    def call(self, tensors):
        arguments = AttentionArguments(**{**self.options, "sinks": tensors[3] if "sinks" in self.options else None})
        return arguments.on(self.layout.attention)


def patched_model(
    architecture, device, dtype, backend, *, lora=False, nf4=False, kernels=True, autocast=False, **config
):
    """Return a patched model on the device that has run once; skip with the backend's reasons if it cannot."""
    require_device(device, backend, torch.bfloat16 if autocast else dtype)
    model = tiny.model(architecture, **config).to(device, dtype)
    if nf4:
        quantize(model, dtype)
    if lora:
        model = get_peft_model(model, lora_config()).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator(device).manual_seed(0))
    try:
        model = patch(model, backend=backend, fused_kernels=kernels)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            model(**batch_on(device, tiny.LENGTHS))
    except NoBackend as refusal:
        pytest.skip(" ".join(str(refusal).split()))
    return model


def batch_on(device, lengths, *, seed=0):
    """Return a packed batch of documents of these lengths; no kernel has seen its boundaries before."""
    batch = tiny.batch(tiny.documents(lengths, seed=seed))
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}


def padded_documents(batch):
    """Return the documents of a packed batch as a padded batch on the host, as TRL's own trainer gets it."""
    lengths = [*batch["packed_layout"].lengths]
    if batch["packed_layout"].padding:
        lengths.pop()
    fields = {"input_ids": 0, "labels": -100}
    rows = {name: batch[name].flatten().cpu()[: sum(lengths)].split(lengths) for name in fields}
    padded = {name: pad_sequence(rows[name], batch_first=True, padding_value=pad) for name, pad in fields.items()}
    true = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {**padded, "attention_mask": true.long()}


def logits_and_gradients(model, batch):
    model.zero_grad()
    logits = model(**batch).logits.float()
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]


def quantize(model, dtype):
    """Quantize every linear layer but the head to NF4 in place, as BitsAndBytesConfig does when a file is loaded."""
    bnb = pytest.importorskip("bitsandbytes")
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not torch.nn.Linear or name == "lm_head":
                continue
            kind = {"quant_type": "nf4", "compress_statistics": True}
            sizes = (linear.in_features, linear.out_features)
            layer = bnb.nn.Linear4bit(*sizes, bias=linear.bias is not None, compute_dtype=dtype, device="meta", **kind)
            weight = bnb.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, module=layer, **kind)
            layer.weight, layer.bias = weight.to(linear.weight.device), linear.bias
            setattr(parent, name, layer)
    model.is_loaded_in_4bit = True


def graphs_after_each_batch(model, device):
    """Count the compiled graphs after each of the batches has run forward and backward."""
    compile_anew()
    compiled, seen = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager"), []
    for seed, lengths in enumerate(BATCHES):
        compiled(**batch_on(device, lengths, seed=seed)).logits.float().square().mean().backward()
        seen.append(compiled_graphs())
    return seen


@contextmanager
def no_waits(device):
    """Raise, on a GPU, if an operation makes the host wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def was_fused(model):
    return "x LoRA: fused" in describe(model)
