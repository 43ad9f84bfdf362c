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

from tiny_models.build import config_of
from tiny_models.sizes import GENERIC, VOCABULARY
from tiny_models.weights import redraw
from trl_packfa.errors import UnsupportedModel
from trl_packfa.patching.inspect import forward_takes

_MOST_PARAMETERS = 25_000_000
_SIDE, _PATCH = 32, 8  # pixels of an image and of a patch
# Sizes of encoders, by the names that they share.
_ENCODER = {
    "image_size": _SIDE,
    "patch_size": _PATCH,
    "num_channels": 3,
    "in_channels": 3,
    "in_chans": 3,
    "depth": 2,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "projector_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "num_mel_bins": 8,
    "max_source_positions": 40,
    "mm_tokens_per_image": 4,
    "image_seq_length": 16,
    "drop_path_rate": 0.0,
    "window_size": 2 * 2 * _PATCH,
    "image_grid_pinpoints": [[_SIDE, 2 * _SIDE]],
}
# More of single config types.
_SPECIAL: dict[str, dict[str, Any]] = {
    "gemma4_text": {"use_bidirectional_attention": "vision"},
    "gemma4_unified_text": {"use_bidirectional_attention": "vision"},
    "mllama_vision_model": {
        "intermediate_layers_indices": [1, 3],
        "vision_output_dim": 3 * 64,
        "num_global_layers": 1,
    },
    # Four frames of the encoder are one token.
    "voxtral": {"audio_token_id": 90},
    "voxtral_encoder": {"intermediate_size": 4 * 64},
    "glmasr_encoder": {"intermediate_size": 4 * 64},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 70, "audio_start_token_id": 71},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 70, "audio_start_token_id": 71},
}
# Ids of tokens that stand for other modalities; the full-size ones are beyond the small vocabulary.
_TOKEN_ID = re.compile(r"(image|video|audio|vision|img|boi|eoi|boa|eoa|boundary|patch)\w*_(token_)?(id|index)$")


def composite_types() -> tuple[str, ...]:
    """Return every type of transformers that generates text from text and images or sounds."""
    return tuple(sorted({**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}))


def small_composite(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a small random model of this type, in eval mode.

    Raises:
        [`UnsupportedModel`]: if it cannot be built with the small sizes, with the reason.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = config_of(CONFIG_MAPPING[model_type], {"vision_config": {}}, {**GENERIC, **_ENCODER})
            for part in _all_parts(config):
                vars(part).update(_SPECIAL.get(part.model_type, {}))
            _renumber(config)
            _rescale_positions(config)
            with torch.device("meta"):
                model = AutoModelForMultimodalLM.from_config(config)
        except Exception as error:  # a config that needs sizes of its own, or a library that is not installed
            said = (str(error).strip() or type(error).__name__).splitlines()
            raise UnsupportedModel(f"no small model of type {model_type!r}: {said[-1].strip()[:120]}") from error
        parameters = sum(p.numel() for p in model.parameters())
        if parameters > _MOST_PARAMETERS:
            raise UnsupportedModel(f"the model of type {model_type!r} is not small: {parameters:,} parameters.")
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
        redraw(model)
    return model


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
    """Padded rows with images.

    Attributes:
        form (`str`): the form in which the model takes pixels.
        inputs (`dict[str, torch.Tensor]`): arguments of the model, with labels.
    """

    form: str
    inputs: dict[str, torch.Tensor]


# Text tokens and images of each row.
_ROWS = ((9, 2), (5, 1), (14, 0), (3, 1))


def image_batch(model: Any, *, left: bool = False) -> ImageBatch | None:
    """Make padded rows with images that this model runs; `None` if it takes images in none of the known forms."""
    for form, make in _FORMS.items():
        try:
            pixels = make(model.config, sum(images for _, images in _ROWS))
            inputs = (_rows_beside if "aspect_ratio_ids" in pixels else _rows)(model, pixels, left=left)
            key = next(key for key in ("pixel_values", "input_features") if key in inputs)
            with torch.no_grad():
                logits = model(**inputs, use_cache=False).logits
                moved = model(**{**inputs, key: inputs[key].flip(-1) * 0.5}, use_cache=False).logits
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
    config, images = model.config, sum(number for _, number in _ROWS)
    kind = "audio" if "input_features" in pixels else "image"
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
    for text, number in _ROWS:
        ids = torch.randint(6, VOCABULARY - 20, (text,), generator=generator).tolist()
        for place in reversed(range(number)):  # with text between images
            ids[2 + 3 * place : 2 + 3 * place] = [token] * each
        documents.append(ids)
    ids, mask = padded(documents, left=left)
    labels = ids.masked_fill((mask == 0) | (ids == token), -100)
    # A first token is predicted at a pad of a left-padded row, where nothing is computed.
    labels[torch.arange(len(_ROWS)), mask.argmax(1)] = -100
    return ids, mask, labels


def _tokens_of(model: Any, pixels: dict[str, torch.Tensor], kind: str) -> int:
    """Return how many tokens a model makes of these images or sounds."""
    if "feature_attention_mask" in pixels:  # Qwen2-Audio: a convolution and a pooling, each by 2
        return len(pixels["input_features"]) * (pixels["input_features"].shape[2] // 4)
    name, hidden = f"get_{kind}_features", model.config.get_text_config().hidden_size
    holder: Any = next(m for m in (model, getattr(model, "model", None)) if hasattr(m, name))
    with torch.no_grad():
        features = getattr(holder, name)(**pixels, return_dict=True).pooler_output
    features = features if isinstance(features, (list, tuple)) else [features]
    return sum(x.numel() for x in features) // hidden


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


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _grid(config: Any, images: int, *, merged: bool = False) -> dict[str, torch.Tensor]:
    """Flattened patches and the grid of each image, as Qwen's processors make them."""
    encoder = config.vision_config
    side, frames = getattr(encoder, "patch_size", _PATCH), getattr(encoder, "temporal_patch_size", 1)
    grid = torch.tensor([[1, 4, 4]] * images)
    flat = _pixels(int(grid.prod(1).sum()), 3 * frames * side * side)
    return {"pixel_values": flat.unflatten(1, (3, side, side)) if merged else flat, "image_grid_thw": grid}


def _square(config: Any, images: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(images, 3, _SIDE, _SIDE)}


def _sized(config: Any, images: int) -> dict[str, torch.Tensor]:
    return {**_square(config, images), "image_sizes": torch.tensor([[_SIDE, _SIDE]] * images)}


def _tiled(config: Any, images: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _pixels(images, 3, 3, _SIDE, _SIDE),
        "image_sizes": torch.tensor([[_SIDE, 2 * _SIDE]] * images),
    }


def _by_row(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Images of each row, as Idefics' processors make them: rows with fewer get empty ones."""
    most = max(number for _, number in _ROWS)
    pixels = torch.zeros(len(_ROWS), most, 3, _SIDE, _SIDE)
    for row, (_, number) in enumerate(_ROWS):
        pixels[row, :number] = _pixels(number, 3, _SIDE, _SIDE) + row
    return {"pixel_values": pixels}


def _placed(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Patches with their places in the image, as Gemma 4's processor makes them."""
    side = config.vision_config.patch_size
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(1)
    return {
        "pixel_values": _pixels(images, len(places), 3 * side * side).sigmoid(),
        "image_position_ids": places[None].repeat(images, 1, 1),
    }


def _beside(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Tiles of each row's images, as Mllama's processor makes them: rows with fewer get empty ones."""
    tiles, side = config.vision_config.max_num_tiles, config.vision_config.image_size
    made = _by_row(config, images)["pixel_values"]
    there = made.flatten(2).ne(0).any(-1).long()
    made = made[:, :, None, :, :1, :1].expand(-1, -1, tiles, -1, side, side) * torch.linspace(0.5, 1, side)
    return {
        "pixel_values": made.contiguous(),
        "aspect_ratio_ids": there,  # 1: a single tile
        "aspect_ratio_mask": torch.nn.functional.one_hot(torch.zeros_like(there), tiles) * there[..., None],
    }


def _sounds(config: Any, images: int, mask: str | None = None) -> dict[str, torch.Tensor]:
    """Frames of whole sounds, with or without the mask that says so."""
    frames = 80
    made = {"input_features": _pixels(images, 8, frames)}
    return made if mask is None else {**made, mask: torch.ones(images, frames, dtype=torch.long)}


# By the name of the form.
_FORMS = {
    "square": _square,
    "grid": _grid,
    "grid of patches": lambda config, images: _grid(config, images, merged=True),
    "sized": _sized,
    "tiled": _tiled,
    "by row": _by_row,
    "placed": _placed,
    "beside the text": _beside,
    "sounds": _sounds,
    "sounds with a mask": lambda config, images: _sounds(config, images, "input_features_mask"),
    "sounds with an attention mask": lambda config, images: _sounds(config, images, "feature_attention_mask"),
}
