"""Context manager that hides progress bars, deprecations and log lines of the libraries in commands like the demo."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

from .progress import without_bars


@contextmanager
def quiet() -> Iterator[None]:
    """Show errors only and no bars; restore every level afterwards, because the process may have other work to log."""
    own = logging.getLogger("trl_packfa")
    level, verbosity = own.level, transformers_logging.get_verbosity()
    own.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    try:
        with without_bars(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            yield
    finally:
        own.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
