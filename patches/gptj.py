"""GPT-J and CodeGen, which have their own attention code before transformers 5.24."""

from importlib.metadata import version

from packaging.version import Version

from trl_packfa.patches.base import InterfacePatch, ModulePatch, Patch

_TYPES = ("gptj", "codegen")
PATCH: Patch = (
    InterfacePatch(model_types=_TYPES)
    if Version(version("transformers")) >= Version("5.24")
    else ModulePatch(model_types=_TYPES, masked_mixers=("GPTJAttention", "CodeGenAttention"))
)
