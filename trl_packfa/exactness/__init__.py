"""The proof on the user's own model: no document sees another, and packed training computes what separate training
does.

It measures a few documents, short and long, and gives a number for each measurement. A control must fail: with the
boundaries removed, the same measurement must show a leak, or it proves nothing.

`documents` draws the documents, `probe` runs them, `scoring` runs the LM head, and `following` gives layers the same
input. `rounding` makes the noise, and `engine` compares. `parity` and `unpadding` say what is compared, `isolation`
measures leaks, and `report` gives the verdict. `first_batch` and `first_padded_batch` repeat the
comparison on the first training batch, and `head` compares the LM head there. `sharded_rows` compares a row that
several processes share with the same row on one.
"""

from .first_batch import BatchProof, check_batch
from .measure import check
from .probe import vocabulary_of
from .quiet import quiet
from .report import ExactnessReport
from .reuse import proof_identity, reusable_proof
from .sharded_rows import ShardedRowProof, check_sharded_row
from .unpadding import check_unpadding
from .unpadding_report import UnpaddingReport

__all__ = [
    "BatchProof",
    "ExactnessReport",
    "ShardedRowProof",
    "UnpaddingReport",
    "check",
    "check_batch",
    "check_sharded_row",
    "check_unpadding",
    "proof_identity",
    "quiet",
    "reusable_proof",
    "vocabulary_of",
]
