"""The proof: on the user's own model, does any document see another, and is packing what training alone would be?

Measurements on one small packed batch, each with its number, and a control that must fail: with the boundaries removed
the same measurement has to show a leak, otherwise they prove nothing.
"""

from .measure import check
from .probe import vocabulary_of
from .quiet import quiet
from .report import ExactnessReport

__all__ = ["ExactnessReport", "check", "quiet", "vocabulary_of"]
