"""The planted bugs of tests/mutants fit the code as it is, so that `make mutants` can plant each of them."""

import pytest
from mutants.run import ROOT, all_mutants, apply_patch, read_mutant


def test_every_patch_fits() -> None:
    mutants = all_mutants()
    assert len(mutants) >= 40
    errors = {mutant.name: apply_patch(ROOT, mutant.patch, "--check").stderr for mutant in mutants}
    assert {name: error for name, error in errors.items() if error} == {}


def test_a_patch_without_tests_is_refused(tmp_path) -> None:
    patch = tmp_path / "a.patch"
    patch.write_text("What is wrong.\n--- a/x.py\n+++ b/x.py\n")
    with pytest.raises(ValueError, match="Tests:"):
        read_mutant(patch)
