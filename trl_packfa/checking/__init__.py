"""The check on the user's own model: no document sees another, and packed training computes what separate training
does.

It measures a few documents, short and long, and gives a number for each measurement. A control must fail: with the
boundaries removed, the same measurement must show a leak, or it proves nothing.
"""

from .first_batch import check_batch as check_batch
from .measure import check as check
from .modes import without_random_numbers as without_random_numbers
from .probe import vocabulary_of as vocabulary_of
from .report import CheckReport as CheckReport
from .reuse import check_identity as check_identity
from .reuse import check_of_machine as check_of_machine
from .reuse import keep_check as keep_check
from .reuse import reusable_check as reusable_check
from .sharded_rows import check_sharded_row as check_sharded_row
from .unpadding import check_unpadding as check_unpadding
