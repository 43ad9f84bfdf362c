"""Context manager that hides progress bars, deprecations and log lines of the libraries in commands like the demo."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet() -> Iterator[None]:
    """Show errors only and no bars; restore every level afterwards, because the process may have other work to log."""
    own = logging.getLogger("trl_packfa")
    level, verbosity = own.level, transformers_logging.get_verbosity()
    bars, dataset_bars = transformers_logging.is_progress_bar_enabled(), is_progress_bar_enabled()
    own.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            yield
    finally:
        own.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        if dataset_bars:
            enable_progress_bar()
