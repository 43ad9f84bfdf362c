"""Models with random weights in the shapes that the paper and this project measure.

Speed does not depend on trained weights. Shapes are those of the published configs. Rotary scaling costs nothing, so
it is left out.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..errors import PackingError, first_line

# By name: model type, hidden size, intermediate size, layers, heads, key/value heads, vocabulary, tied embeddings.
_SHAPES = {
    "tiny": ("llama", 64, 128, 2, 4, 2, 512, False),
    "cpu-reference": ("llama", 512, 1408, 8, 8, 8, 16_384, False),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 128_256, True),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128_256, True),
    "llama-3-8b": ("llama", 4096, 14_336, 32, 32, 8, 128_256, False),
    "mistral-7b": ("mistral", 4096, 14_336, 32, 32, 8, 32_768, False),
    "granite-8b": ("granite", 4096, 12_800, 40, 32, 8, 49_159, True),
    "phi-3-mini": ("phi3", 3072, 8192, 32, 32, 32, 32_064, False),
}
PRESETS = tuple(_SHAPES)
_POSITIONS = 131_072


def preset_config(name: str, *, vocab_size: int = 0) -> PreTrainedConfig:
    """Return the config of a preset; its vocabulary grows to `vocab_size` if that is larger."""
    model_type, hidden, intermediate, layers, heads, key_value_heads, vocabulary, tied = _SHAPES[name]
    special = {"sliding_window": None} if model_type == "mistral" else {}
    return AutoConfig.for_model(
        model_type,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=max(vocabulary, vocab_size),
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **special,
    )


def save_preset(name: str, folder: str | Path, *, dtype: str, tokenizer: str | None = None, seed: int = 0) -> None:
    """Save a preset with random weights and its tokenizer; every side loads it like a real model."""
    words = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else _placeholder()
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = preset_config(name, vocab_size=len(words))
        wanted = torch.float32 if dtype in ("auto", "float32") else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def save_preset_apart(name: str, folder: Path, **options: Any) -> None:
    """Run [`save_preset`] in a process of its own, so that this one uses no GPU memory; raise an error if it fails."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        try:
            apart.submit(save_preset, name, folder, **options).result()
        except Exception as error:
            raise PackingError(f"the preset '{name}' could not be made.", why=[first_line(error)]) from error


def _placeholder() -> PreTrainedTokenizerBase:
    """Return a tokenizer for data that already has token ids: it can only pad."""
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
