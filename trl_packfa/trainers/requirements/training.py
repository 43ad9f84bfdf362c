"""A run with its model and data: the context of requirements before weights are read, and of the built model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from datasets import IterableDataset
from transformers import PretrainedConfig

from ...config.common import CommonConfig
from ...config.requirements import Run
from ...data.dataset import named_datasets, without_format
from ...data.image_rows import image_columns
from ...data.templates import load_tokenizer, with_template
from ...errors import PackingError
from ...patching import inspect
from ..loading import config_of


@dataclass(frozen=True)
class Training(Run):
    """A run with its model, data, and the trainer's other arguments by name; `trainer` once its model is built."""

    model: Any = None  # a name or a model
    given: Mapping[str, Any] = field(default_factory=dict)
    user_args: Any = None  # the config that the user has passed
    formats: tuple[tuple[str, ...], ...] = ()  # of columns that a preference trainer takes
    takes_images: bool = True
    knows_data: bool = True  # `False` before a command has loaded it
    trainer: Any = None

    @cached_property
    def datasets(self) -> list[tuple[str, Any]]:
        """The datasets with the names that TRL gives them."""
        return named_datasets(self.given.get("train_dataset"), self.given.get("eval_dataset"))

    @cached_property
    def examples(self) -> list[tuple[str, dict[str, Any]]]:
        """The first example of each dataset, in plain Python values; an empty one of an empty dataset."""
        return [(name, next(iter(without_format(dataset)), {})) for name, dataset in self.datasets]

    def first(self, has: Callable[[Any], Any], *, of: str = "examples") -> Any:
        """Return the first example (or of `"datasets"`) that has something, as its dataset's name and what it has."""
        found = ((name, has(one)) for name, one in getattr(self, of))
        return next(((name, what) for name, what in found if what), None)

    def with_args(self, args: Any) -> Training:
        """Return the run with other arguments; its data is not read again, as a stream would begin anew."""
        other, read = replace(self, args=args), {"datasets", "examples", "images"} & vars(self).keys()
        vars(other).update({name: vars(self)[name] for name in read})
        return other

    @property
    def is_on_images(self) -> bool:
        """`True` for SFT on images: its padded batches run without their pads."""
        return bool(self.is_sft and self.packing and self.images[1])

    @property
    def packs_rows(self) -> bool:
        """`True` for SFT on text, whose documents share rows; `False` if the data is not known."""
        return bool(self.is_sft and self.packing and self.knows_data) and not self.is_on_images

    @property
    def is_stream(self) -> bool:
        """`True` if the training data is a stream."""
        return isinstance(self.given.get("train_dataset"), IterableDataset)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The model's config, read without its weights."""
        return config_of(self.model, self.args) if isinstance(self.model, str) else inspect.model_config(self.model)

    @cached_property
    def images(self) -> tuple[str, str]:
        """The first dataset with images and their column; empty names if none has."""
        return self.first(lambda example: next(iter(image_columns([example])), "")) or ("", "")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer or processor with its chat template; `None` if TRL finds its name in the model or config."""
        given = self.given.get("processing_class")
        if given is None and not (isinstance(self.model, str) and isinstance(self.args, CommonConfig)):
            return None
        return with_template(given or load_tokenizer(self.model, self.args), self.args)

    @property
    def makes_text(self) -> bool:
        """`True` if TRL makes texts of the examples, and labels them."""
        skips = (self.dataset_kwargs or {}).get("skip_prepare_dataset", False)
        return self.given.get("formatting_func") is None and not skips


def error_of(check: Callable[..., Any], *given: Any) -> PackingError | None:
    """Return the error that the table of another part of the package raises, `None` if it raises none."""
    try:
        check(*given)
    except PackingError as error:
        return error
    return None
