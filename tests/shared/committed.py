"""Compare a run of the matrix of architectures with the committed one."""

import re

import support_matrix as matrix

from trl_packfa.patches.measured import measured_transformers, results
from trl_packfa.versions import installed_version

COMPARED = ("verdict", "level", "unpatched", "by_document", "why")


def measured(name):
    """Measure one type as `tools/support_matrix.py` does, and return its entry in a results file of its own."""
    versions = {"transformers": installed_version("transformers")}
    return matrix.merged({}, versions, {name: matrix.measure_type(name)})


def assert_is_what_is_committed(found):
    """The levels are those of the newest version that was measured; each version has fingerprints of its own."""
    installed = found["versions"]["transformers"]
    is_newest = installed == measured_transformers()[-1]
    for name, result in found["types"].items():
        committed = results()[name]
        assert result["sources"].get(installed) == committed["sources"].get(installed), name
        assert result["verdict"] == committed["verdict"], name
        if is_newest:
            assert [result.get(key) for key in COMPARED] == [committed.get(key) for key in COMPARED], name


def kind_of(result):
    """Return what the patch of a type does, whatever its name: `BambaMixer` and `MambaMixer` are one kind."""
    by_document = {re.findall("[A-Z][a-z]+", name)[-1].rstrip("s") for name in result.get("by_document", ())}
    return (result["verdict"], result.get("level"), result.get("unpatched"), *sorted(by_document))
