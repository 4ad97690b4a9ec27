"""The planted bugs of tests/mutants fit the code as it is, so that `make mutants` can plant each of them."""

import pytest
from mutants.run import ROOT, all_mutants, apply_patch, can_run, read_mutant


def test_every_patch_fits() -> None:
    mutants = all_mutants()
    assert len(mutants) >= 40
    assert {mutant.needs for mutant in mutants} == {None, "avx512", "avx512_bf16", "amx"}
    errors = {mutant.name: apply_patch(ROOT, mutant.patch, "--check").stderr for mutant in mutants}
    assert {name: error for name, error in errors.items() if error} == {}


def test_every_patch_names_tests_that_are_there() -> None:
    named = {argument.split("::")[0] for mutant in all_mutants() for argument in mutant.pytest_arguments}
    files = {name for name in named if name.startswith("tests/")}
    assert len(files) >= 40
    assert {name for name in files if not (ROOT / name).exists()} == set()


def test_a_patch_without_tests_is_refused(tmp_path) -> None:
    patch = tmp_path / "a.patch"
    patch.write_text("What is wrong.\n--- a/x.py\n+++ b/x.py\n")
    with pytest.raises(ValueError, match="Tests:"):
        read_mutant(patch)


def test_a_bug_in_a_kernel_that_the_machine_lacks_is_left_out(tmp_path) -> None:
    patch = tmp_path / "a.patch"
    changes = "--- a/x.cpp\n+++ b/x.cpp\n"
    for needs, runs in (("", True), ("Needs: default\n", True), ("Needs: sse9\n", False)):
        patch.write_text(f"What is wrong.\n{needs}Tests: tests/x.py\n{changes}")
        mutant = read_mutant(patch)
        assert (mutant.description, can_run(mutant)) == ("What is wrong.", runs)
