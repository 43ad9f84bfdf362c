"""A small vision-language model of real config classes, its processor and its data."""

import tiny
import torch
from datasets import Dataset
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

_SIZE, _PATCH = 16, 8


def processor():
    """Build a processor with images of four tokens each."""
    tokenizer = tiny.tokenizer(["<image>", "USER", "ASSISTANT"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": _SIZE, "width": _SIZE}
    images = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False, do_convert_rgb=True)
    template = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ '<image> ' }}{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return LlavaProcessor(
        images, tokenizer, patch_size=_PATCH, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    )  # fmt: skip


def model():
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=_SIZE,
        patch_size=_PATCH, projection_dim=16,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    image_token = processor().tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image_token,
                         vision_feature_select_strategy="default", vision_feature_layer=-1)  # fmt: skip
    return LlavaForConditionalGeneration(config)


def images(count):
    from PIL import Image

    return [Image.new("RGB", (_SIZE, _SIZE), (i * 10 % 256, i * 40 % 256, 90)) for i in range(count)]


def messages(count=12):
    """Return conversations about an image, in TRL's format."""
    return Dataset.from_dict({
        "images": [[image] for image in images(count)],
        "messages": [[{"role": "user", "content": tiny.words(2 + i % 7, seed=i)},
                      {"role": "assistant", "content": tiny.words(1 + i % 3, seed=-i - 1)}] for i in range(count)],
    })  # fmt: skip


def prompts(count=12):
    """Return prompts and completions about an image, one image per row."""
    return Dataset.from_dict({
        "image": images(count),
        "prompt": [[{"role": "user", "content": tiny.words(2 + i % 7, seed=i)}] for i in range(count)],
        "completion": [[{"role": "assistant", "content": tiny.words(1 + i % 3, seed=-i - 1)}] for i in range(count)],
    })  # fmt: skip
