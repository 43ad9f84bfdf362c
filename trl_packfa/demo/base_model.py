"""A small Llama to fine-tune: real config class, random weights, a tokenizer trained in seconds."""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

VOCAB_SIZE = 8192
_EOS, _PAD = "<|eos|>", "<|pad|>"


def train_tokenizer(dataset: Dataset) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on prompts and completions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[_PAD, _EOS],  # ids 0 and 1
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [a + b for a, b in zip(dataset["prompt"], dataset["completion"], strict=True)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_PAD)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama of about 19 M parameters: 8 layers, hidden size 384, grouped-query attention, untied LM head."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
