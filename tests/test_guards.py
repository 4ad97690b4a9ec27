"""The command that says which tests guard a file."""

import guards
import pytest
from mutants.run import ROOT
from warm_python import run_python


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("python/pagedattn_serve/scheduling/block_manager.py", "tests/serving/scheduling"),
        ("python/pagedattn_serve/server/http/metrics.py", "tests/serving/server/http"),
        ("python/pagedattn_serve/engine.py", "tests/serving/engine"),
        ("python/pagedattn_serve/progress.py", "tests/serving/test_progress.py"),
        ("python/pagedattn_simulate/systems/orca.py", "tests/simulate"),
        ("csrc/layernorm/layernorm_cpu.cpp", "tests/ops/test_layernorm.py"),
        ("src/pagedattn_ext/ops/activation.py", "tests/ops/test_activation.py"),
        ("src/pagedattn_ext/flash_attn/_attention.py", "tests/test_flash_attn.py"),
        ("tests/test_docs.py", "tests/test_docs.py"),
    ],
)
def test_where_a_file_lies_says_who_tests_it(file: str, expected: str) -> None:
    assert expected in guards.tests_by_layout(file)


def test_planted_bugs_come_with_their_tests() -> None:
    mutant = next(mutant for mutant in guards.all_mutants() if not mutant.needs_build)
    done = run_python(guards.__file__, ROOT / mutant.files[0])
    assert f"{' '.join(mutant.pytest_arguments)}  # {mutant.name}" in done.stdout.splitlines(), done.stderr


def test_a_file_that_is_not_there() -> None:
    done = run_python(guards.__file__, "none.py")
    assert done.returncode == 2 and "FILE: expected a file in" in done.stderr
