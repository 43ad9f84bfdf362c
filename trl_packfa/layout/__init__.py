"""The documents of a packed row, shared prefixes and padded rows, and how a call carries them to its modules.

This package uses torch and numpy only. `packed.py` holds the layout, `from_call.py` finds it in a forward call,
`call_context.py` brings it to the modules below.
"""

from .packed import AttentionLayout as AttentionLayout
from .packed import PackedLayout as PackedLayout
