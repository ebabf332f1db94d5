"""What 24 layers of a transformer keep for absent accelerators, with and without `low_memory`."""

import low_memory
import pytest

import jaxmem

MIB = 2**20


@pytest.mark.parametrize("form", ["plain", "norms", "gelu", "both"])
def test_residual_bytes_of_a_layer(form: low_memory.Form) -> None:
    """As derived by hand, for B T = 8192 positions of width 1024 in bfloat16."""
    models = (low_memory.of(layers, form) for layers in (1, 2))
    one, two = (jaxmem.saved_residuals(loss, *args) for loss, args in models)
    found = {
        name: sum(row.bytes for row in two if row.name == name)
        - sum(row.bytes for row in one if row.name == name)
        for name in ("norm", "norm_rstd", "regelu2")
    }
    positions = 8 * 1024
    norms = form in ("norms", "both")
    assert found == {
        "norm": norms * 2 * positions * 1024 * 2,
        "norm_rstd": norms * 2 * positions * 4,
        "regelu2": (form in ("gelu", "both")) * positions * 4096 // 4,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("target", "most"), [("h100-80g", 23770), ("v5e-16g", 23025)])
def test_temporaries_are_a_quarter_less(target: str, most: int) -> None:
    """Of 31740 and 30551 MiB, where nothing is recomputed."""
    plain, both = (
        jaxmem.memory_report(step, *args, target=target, suggest=False).temp_bytes
        for step, args in (low_memory.gradient(24, "plain"), low_memory.gradient(24, "both"))
    )
    assert both <= most * MIB
    assert both < 0.7550 * plain
