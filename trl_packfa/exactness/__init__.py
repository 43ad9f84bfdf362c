"""The proof: on the user's own model, does any document see another, and is packing what training alone would be?

Measurements on a few documents, short ones and long, each with its number, and a control that must fail: with the
boundaries removed the same measurement has to show a leak, otherwise they prove nothing.

`documents` says what is packed, `probe` runs it, `scoring` its LM head, `following` holds layers to the same input,
`rounding` makes the noise, `parity` and `isolation` measure, `report` judges, `first_batch` does it again on what is
trained, and `head` compares the LM head there. `unpadding` compares padded batches with and without their pads.
"""

from .first_batch import BatchProof, check_batch
from .measure import check
from .probe import vocabulary_of
from .quiet import quiet
from .report import ExactnessReport
from .reuse import proof_identity, reusable_proof
from .unpadding import check_unpadding
from .unpadding_report import UnpaddingReport

__all__ = [
    "BatchProof",
    "ExactnessReport",
    "UnpaddingReport",
    "check",
    "check_batch",
    "check_unpadding",
    "proof_identity",
    "quiet",
    "reusable_proof",
    "vocabulary_of",
]
