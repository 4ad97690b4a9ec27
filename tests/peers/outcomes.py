"""What became of each test: passed, refused by name, missing, failed."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from names import PACKAGE, Missing

KINDS = ("passed", "refused", "missing", "failed")
REFUSAL = re.compile(r"^[\w.]+: ")  # function: argument: expected ..., got ...


@dataclass
class Outcomes:
    """A plugin of pytest. Tests that skip themselves, because of their arguments or of the GPU, are not counted."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, test, reason) of all that has not passed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "call" and report.passed:
            self.counts["passed"] += 1
        elif report.failed and call.excinfo is not None:
            self._add(item.nodeid, call.excinfo)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self.reasons.append(("failed", report.nodeid, str(report.longrepr)[-300:]))

    def _add(self, test: str, error: pytest.ExceptionInfo[BaseException]) -> None:
        in_ours = Path(error.traceback[-1].path).is_relative_to(PACKAGE)
        reason = f"{error.type.__name__}: {error.value}"
        if error.errisinstance(Missing) or error.errisinstance(ImportError):
            kind = "missing"
        elif error.errisinstance((ValueError, NotImplementedError)) and in_ours and REFUSAL.match(str(error.value)):
            kind, reason = "refused", str(error.value)
        else:
            kind = "failed"
        self.counts[kind] += 1
        self.reasons.append((kind, test, reason))
