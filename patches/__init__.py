"""The patches that ship with trl-packfa, one file per transformers modelling folder.

The tuple below is the support list.
"""

from trl_packfa.declaration import Patch
from trl_packfa.patches import gemma2, gemma3, granite, interface, llama, mistral, phi, phi3, qwen2, qwen3, rebatch

PATCHES: tuple[Patch, ...] = (
    llama.PATCH,
    mistral.PATCH,
    granite.PATCH,
    phi.PATCH,
    phi3.PATCH,
    qwen2.PATCH,
    qwen3.PATCH,
    gemma2.PATCH,
    gemma3.PATCH,
    interface.PATCH,
    rebatch.PATCH,
)
