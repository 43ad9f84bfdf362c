"""The proof on the user's own model: no document sees another, and packed training computes what separate training
does.

It measures a few documents, short and long, and gives a number for each measurement. A control must fail: with the
boundaries removed, the same measurement must show a leak, or it proves nothing.

`documents` draws the documents, `probe` runs them, `scoring` runs the LM head, and `following` gives layers the same
input. `rounding` makes the noise, and `engine` compares. `parity` and `unpadding` say what is compared, `isolation`
measures leaks, and `report` gives the verdict. `first_batch` and `first_padded_batch` repeat the comparison on the
first training batch, with the LM head that trains. `sharded_rows` compares a row that several processes share
with the same row on one.
"""

from .first_batch import check_batch as check_batch
from .measure import check as check
from .probe import vocabulary_of as vocabulary_of
from .quiet import quiet as quiet
from .report import ExactnessReport as ExactnessReport
from .reuse import proof_identity as proof_identity
from .reuse import reusable_proof as reusable_proof
from .sharded_rows import ShardedRowProof as ShardedRowProof
from .sharded_rows import check_sharded_row as check_sharded_row
from .unpadding import check_unpadding as check_unpadding
