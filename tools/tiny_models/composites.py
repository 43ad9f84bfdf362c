"""Small models with images or sounds beside their text decoder, and batches of padded rows with images for them.

Each model takes pixels in its own form. A batch is made by trying the forms that most models share; the model itself
says how many tokens an image has. Other models get text only.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tiny_models.build import built, config_of
from tiny_models.composite_sizes import ENCODER, OF_TYPES
from tiny_models.pixel_forms import FORMS, ROWS
from tiny_models.sizes import GENERIC, VOCABULARY
from trl_packfa.errors import UnsupportedModel
from trl_packfa.patching.inspect import forward_takes

_MOST_PARAMETERS = 25_000_000
# Ids of tokens that stand for other modalities; the full-size ones are beyond the small vocabulary.
_TOKEN_ID = re.compile(r"(image|video|audio|vision|img|boi|eoi|boa|eoa|boundary|patch)\w*_(token_)?(id|index)$")


def composite_types() -> tuple[str, ...]:
    """Return every type of transformers that generates text from text and images or sounds."""
    return tuple(sorted({**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}))


def small_composite(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a small random model of this type, in eval mode; raise [`UnsupportedModel`] with the reason if not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = config_of(CONFIG_MAPPING[model_type], {"vision_config": {}}, {**GENERIC, **ENCODER}, OF_TYPES)
            _renumber(config)
            _rescale_positions(config)
        return built(AutoModelForMultimodalLM, config, _MOST_PARAMETERS, seed=seed)
    except Exception as error:  # a config that needs sizes of its own, or a library that is not installed
        said = (str(error).strip() or type(error).__name__).splitlines()
        raise UnsupportedModel(f"no small model of type {model_type!r}: {said[-1].strip()[:120]}") from error


def _renumber(config: PreTrainedConfig) -> None:
    """Give the tokens of other modalities ids inside the vocabulary, equal ones where they were equal."""
    numbers: dict[int, int] = {}
    for part in _all_parts(config):
        for name, value in vars(part).items():
            if _TOKEN_ID.search(name) and isinstance(value, int) and not isinstance(value, bool):
                setattr(part, name, numbers.setdefault(value, VOCABULARY - 1 - len(numbers)))


def _rescale_positions(config: PreTrainedConfig) -> None:
    """Fit the share of each kind of position (time, height, width) to the small head size."""
    for part in _all_parts(config):
        rope: Any = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and _has_kinds_of_positions(part):
            rope.setdefault("mrope_section", [16, 24, 24])
        if isinstance(rope, dict) and rope.get("mrope_section"):
            head = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            head = int(head * rope.get("partial_rotary_factor", 1))
            shares = rope["mrope_section"]
            sections = [head // 2 * share // sum(shares) for share in shares]
            rope["mrope_section"] = [head // 2 - sum(sections[1:]), *sections[1:]]


def _has_kinds_of_positions(config: PreTrainedConfig) -> bool:
    """Tell whether a model's code has shares of the kinds of positions, for the full-size head by default."""
    if config.get_text_config() is not config or not hasattr(config, "vocab_size"):
        return False
    name = type(config).__module__.replace("configuration_", "modeling_")
    return "mrope_section" in inspect.getsource(importlib.import_module(name))


def _all_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _all_parts(value)


class ImageBatch(NamedTuple):
    """Padded rows with images."""

    form: str  # in which the model takes pixels
    inputs: dict[str, torch.Tensor]  # arguments of the model, with labels


def image_batch(model: Any, *, left: bool = False) -> ImageBatch | None:
    """Make padded rows with images that this model runs; `None` if it takes images in none of the known forms."""
    for form, make in FORMS.items():
        try:
            pixels = make(model.config, sum(images for _, images in ROWS))
            inputs = (_rows_beside if "aspect_ratio_ids" in pixels else _rows)(model, pixels, left=left)
            # In every form the first argument holds the pixels; what else has them is moved too.
            moved_pixels = {key: x.flip(-1) * 0.5 for key, x in pixels.items() if x.is_floating_point()}
            with torch.no_grad():
                logits = model(**inputs, use_cache=False).logits
                moved = model(**{**inputs, **moved_pixels}, use_cache=False).logits
        except Exception:  # this form is not the model's, and its code may raise anything
            continue
        if logits.isfinite().all() and not torch.allclose(logits, moved, atol=1e-4):
            return ImageBatch(form, inputs)
    return None


def _rows_beside(model: Any, pixels: dict[str, torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    """Return rows of text whose tokens see the images that stand before them, as Mllama's processor makes them."""
    token = model.config.image_token_index
    ids, mask, labels = _text(token, 1, left=left)
    # Row by row, token by token: the last image before the token, all of its tiles that are there.
    last = (ids == token).cumsum(1)
    tiles = pixels["aspect_ratio_mask"]
    sees = torch.stack([(last == 1 + i)[..., None] * tiles[:, None, i] for i in range(tiles.shape[1])], dim=2)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "cross_attention_mask": sees, **pixels}


def _rows(model: Any, pixels: dict[str, torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    """Return rows of text with as many image tokens in them as the model makes of each image."""
    config, images = model.config, sum(number for _, number in ROWS)
    kind = "audio" if next(iter(pixels)).startswith("input_") else "image"
    token = getattr(config, f"{kind}_token_id", None) or getattr(config, f"{kind}_token_index")
    each = _tokens_of(model, pixels, kind) // images
    ids, mask, labels = _text(token, each, left=left)
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels, **pixels}
    is_image = ids == token
    # In PaliGemma the tokens up to the last image are a prefix, of type 0.
    types = ~_up_to_last(is_image) if config.model_type == "paligemma" else is_image
    made |= {name: types.long() for name in ("token_type_ids", "mm_token_type_ids") if forward_takes(model, name)}
    return made


def _text(token: int, each: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, mask and labels `(B, L)` of rows of text with `each` image tokens for an image."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for text, number in ROWS:
        ids = torch.randint(6, VOCABULARY - 20, (text,), generator=generator).tolist()
        for place in reversed(range(number)):  # with text between images
            ids[2 + 3 * place : 2 + 3 * place] = [token] * each
        documents.append(ids)
    ids, mask = padded(documents, left=left)
    labels = ids.masked_fill((mask == 0) | (ids == token), -100)
    # A first token is predicted at a pad of a left-padded row, where nothing is computed.
    labels[torch.arange(len(ROWS)), mask.argmax(1)] = -100
    return ids, mask, labels


def _tokens_of(model: Any, pixels: dict[str, torch.Tensor], kind: str) -> int:
    """Return how many tokens a model makes of these images or sounds."""
    if "feature_attention_mask" in pixels:  # Qwen2-Audio: a convolution and a pooling, each by 2
        return len(pixels["input_features"]) * (pixels["input_features"].shape[2] // 4)
    name = f"get_{kind}_features"
    holder: Any = next(m for m in (model, getattr(model, "model", None)) if hasattr(m, name))
    first, *others = pixels  # the forward of some models has another name for the pixels
    with torch.no_grad():
        made = getattr(holder, name)(pixels[first], **{key: pixels[key] for key in others}, return_dict=True)
    features = made.last_hidden_state if made.pooler_output is None else made.pooler_output
    if features is None:  # Granite Vision: for some layers each, of the same size
        _, features = made.deepstack_features[0]
    features = features if isinstance(features, (list, tuple)) else [features]
    return sum(x.shape[:-1].numel() for x in features)


def padded(documents: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad documents on the `left` or on the right, two places more than the longest; return ids and mask `(B, L)`."""
    longest = max(map(len, documents)) + 2
    ids, mask = (torch.zeros(len(documents), longest, dtype=torch.long) for _ in range(2))
    for i, document in enumerate(documents):
        part = slice(longest - len(document), longest) if left else slice(0, len(document))
        ids[i, part], mask[i, part] = torch.tensor(document), 1
    return ids, mask


def _up_to_last(marked: torch.Tensor) -> torch.Tensor:
    """Return which places of a row `(B, L)` are not behind its last marked place."""
    return marked.flip(1).cumsum(1).flip(1) > 0
