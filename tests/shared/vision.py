"""A small vision-language model of real config classes, its processor and its data."""

import tiny
import torch
import transformers
from datasets import Dataset
from tiny_models.composites import small_composite

_SIZE, _PATCH = 16, 8
TEMPLATE = (
    "{%% for m in messages %%}{{ m['role'] + ' ' }}{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}"
    "{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}{{ '%s ' }}{%% else %%}"
    "{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}{{ ' </s> ' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}assistant {%% endif %%}"
)


def processor():
    """Build a processor with images of four tokens each."""
    tokenizer = tiny.tokenizer(["<image>", "USER", "ASSISTANT"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": _SIZE, "width": _SIZE}
    images = transformers.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False, do_convert_rgb=True)
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=_PATCH, vision_feature_select_strategy="default",
        chat_template=TEMPLATE % "<image>", num_additional_image_tokens=1,
    )  # fmt: skip


def model():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=_SIZE,
        patch_size=_PATCH, projection_dim=16,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    image_token = processor().tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=image_token,
                         vision_feature_select_strategy="default", vision_feature_layer=-1)  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


# Names of a family's special tokens; the first one stands for an image in the chat template.
_TOKENS = {
    "llava_next": ("<image>",), "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>"), "deepseek_vl": ("<image_placeholder>",),
    "qwen3_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
}  # fmt: skip


class _WithoutVideos(transformers.Qwen3VLProcessor):
    """Qwen3-VL's processor without a video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)


def family(name):
    if name == "llava":
        return model(), processor()
    tokenizer = tiny.tokenizer([*_TOKENS[name], "USER", "ASSISTANT"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS[name])})
    built = small_composite(name)
    config = built.config
    ids = dict(zip(_TOKENS[name], tokenizer.convert_tokens_to_ids(list(_TOKENS[name])), strict=True))
    size, template = {"height": 32, "width": 32}, TEMPLATE % _TOKENS[name][0]
    if name == "gemma3":
        names = dict(zip(("boi_token", "image_token", "eoi_token"), _TOKENS[name], strict=True))
        for role, token in names.items():
            setattr(tokenizer, role, token)
            setattr(tokenizer, f"{role}_id", ids[token])
        config.image_token_id = ids["<image_soft_token>"]
        images = transformers.Gemma3ImageProcessorPil(size=size)
        return built, transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    config.image_token_id = ids[_TOKENS[name][0]]
    if name == "qwen3_vl":
        config.vision_config.deepstack_visual_indexes = [0, 2]
        config.video_token_id, config.vision_start_token_id, config.vision_end_token_id = list(ids.values())[1:]
        torch.manual_seed(0)
        size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
        images = transformers.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size)
        template = TEMPLATE % "<|vision_start|> <|image_pad|> <|vision_end|>"
        return type(built)(config), _WithoutVideos(images, tokenizer, chat_template=template)
    if name == "llava_next":
        pinpoints = config.image_grid_pinpoints
        images = transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 32}, crop_size=size, image_grid_pinpoints=pinpoints
        )
        strategy = config.vision_feature_select_strategy
        return built, transformers.LlavaNextProcessor(
            images, tokenizer, 8, strategy, template, num_additional_image_tokens=1
        )
    if name == "idefics3":
        edge = {"longest_edge": 32}
        images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        tokens = (32 // 8) ** 2 // config.scale_factor**2
        return built, transformers.Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=template)
    tokenizer.image_token = _TOKENS[name][0]
    images = transformers.DeepseekVLImageProcessorPil(size=size, min_size=16)
    return built, transformers.DeepseekVLProcessor(images, tokenizer, template, num_image_tokens=(32 // 8) ** 2)


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


def uneven(count=24, *, without=()):
    """Return conversations about one or two images of uneven sizes, with texts of uneven lengths. Rows whose number is
    in `without` have no image."""
    from PIL import Image

    rows = []
    for i in range(count):
        number = 0 if i in without else 2 if i % 5 == 4 else 1
        size, color = (16 * (1 + i % 3), 16 * (1 + i % 2)), (i * 10 % 256, i * 40 % 256, 90)
        ask, answer = tiny.words(1 + i * 7 % 31, seed=i), tiny.words(1 + i % 9, seed=-i - 1)
        rows.append({
            "images": [Image.new("RGB", size, color) for _ in range(number)],
            "messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}],
        })  # fmt: skip
    return Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})


def uneven_pairs(count=24, *, without=()):
    """Return preference pairs about one or two images of uneven sizes, with texts of uneven lengths."""
    rows = uneven(count, without=without)
    messages = [row["messages"] for row in rows]
    return Dataset.from_dict({
        "images": rows["images"],
        "prompt": [[asked] for asked, _ in messages],
        "chosen": [[answer] for _, answer in messages],
        "rejected": [[{**answer, "content": tiny.words(1 + i * 5 % 13, seed=90 + i)}]
                     for i, (_, answer) in enumerate(messages)],
    })  # fmt: skip


def uneven_answers(count=24):
    """Return good and bad answers about images, one each in turn."""
    pairs = uneven_pairs(count)
    return Dataset.from_list([
        {"images": row["images"], "prompt": row["prompt"], "completion": row["rejected" if i % 2 else "chosen"],
         "label": i % 2 == 0}
        for i, row in enumerate(pairs)
    ])  # fmt: skip


def prompts(count=12):
    """Return prompts and completions about an image, one image per row."""
    return Dataset.from_dict({
        "image": images(count),
        "prompt": [[{"role": "user", "content": tiny.words(2 + i % 7, seed=i)}] for i in range(count)],
        "completion": [[{"role": "assistant", "content": tiny.words(1 + i % 3, seed=-i - 1)}] for i in range(count)],
    })  # fmt: skip
