"""Small random models of real config classes, a tokenizer, and packed batches."""

from contextlib import nullcontext

import torch
from tiny_models import small_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from trl_packfa import DataCollatorForPacking, PackedLayout

LENGTHS = (13, 1, 29, 7, 21)
VOCAB = 97

_BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)], "original_max_position_embeddings": 16,
}  # fmt: skip
# id -> (model type, config): architectures whose attention is rewritten, with what is special about each switched on.
# Every other type is tried as `tools/tiny_models` builds it, which has switches of its own (`special.py`).
ARCHITECTURES = {
    "llama": ("llama", {"attention_bias": True}),
    "llama-dynamic": ("llama", {"max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "granite": ("granite", {"attention_multiplier": 0.1, "embedding_multiplier": 12.0,
                            "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "phi": ("phi", {"num_key_value_heads": 4, "qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3-longrope": ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 16,
                               "rope_parameters": _LONGROPE}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"sliding_window": 8, "head_dim": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "head_dim": 16}),
    # as `tiny_models` builds them
    **{name: (name, None) for name in ("bloom", "falcon", "git", "mpt")},
}  # fmt: skip

# A model of each level, some of two layers: `MODELS[name]()` makes one.
MODELS = {
    "llama": lambda: model(layers=1),
    "qwen2": lambda: model("qwen2", layers=2),
    "gpt2": lambda: small_model("gpt2", num_hidden_layers=1),
    "mamba": lambda: small_model("mamba", num_hidden_layers=1),
    "roformer": lambda: small_model("roformer", num_hidden_layers=1),
}


def model(architecture="llama", *, seed=0, layers=None, **config):
    """Build a model with weights that mix tokens strongly, so that a leak shows."""
    model_type, special = ARCHITECTURES[architecture]
    if special is None:
        return small_model(model_type, seed=seed, **config, **({"num_hidden_layers": layers} if layers else {}))
    values = {**_BASE, **special, **config} | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for name, parameter in built.named_parameters():
        if parameter.dim() > 1:
            std = 1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5
            torch.nn.init.normal_(parameter, std=std)
    return built.eval()


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}


def quantized(folder, quantization=NF4, **sizes):
    """Save a model and load it quantized; skip without bitsandbytes. The sizes divide into NF4's blocks of 64."""
    import pytest  # benchmarks use this file, too

    pytest.importorskip("bitsandbytes")
    model(layers=2, **{"intermediate_size": 128, **sizes}).save_pretrained(folder)
    config = BitsAndBytesConfig(**quantization)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def logits_and_gradients(model, *, forward=None, context=nullcontext):
    """Return the logits of the packed documents, and the gradients of the sum of their sines. `forward` runs the
    model, if it is not called itself."""
    model.zero_grad()
    with context():
        logits = (model if forward is None else forward)(**batch(documents())).logits
    logits.sin().sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def documents(lengths=LENGTHS, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def batch(docs, **options):
    """Return the batch of our collator without labels."""
    collated = DataCollatorForPacking(**options)([{"input_ids": ids.tolist()} for ids in docs])
    del collated["labels"]
    return collated


def split(tensor, lengths=LENGTHS):
    return PackedLayout.from_lengths(lengths).split(tensor)


def tokenizer(words=()):
    """Build a word-level tokenizer for numbers and the given words; its chat template marks the assistant."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "user": 4, "assistant": 5}
    for word in [*map(str, range(80)), *words]:
        vocabulary.setdefault(word, len(vocabulary))
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + ' </s> ' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


def words(count, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(map(str, torch.randint(0, 80, (count,), generator=generator).tolist()))


def save_tokenizer(folder):
    """Save the tokenizer for an encoder, which cuts texts to 64 tokens."""
    made = tokenizer()
    made.model_max_length = 64
    made.save_pretrained(folder)


def save(folder, built=None):
    """Save a model, a Llama of two layers by default, with the tokenizer; return the folder's name."""
    (built or model(layers=2)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def texts(column, count=64):
    """Random texts of 1 to 30 words, others for each column of a dataset."""
    return [words(1 + (7 * i + 5 * column) % 30, seed=100 * column + i) for i in range(count)]
