"""The sessions in docs/ give what they print; docs/ops.md has every op with its schema and its wrapper's signature;
links between the documents lead somewhere."""

import dataclasses
import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedattn_ext
from pagedattn_ext import ops
from pagedattn_serve.engine_args import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
TEXT = (DOCS / "ops.md").read_text()
FLAT_TEXT = " ".join(TEXT.split())  # a schema may be broken over lines

# (heading, text) of every section; text before the first heading belongs to none.
SECTIONS = re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##+ |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
NAMESPACE = "pagedattn_ext::"
OP_NAMES = sorted(
    name.removeprefix(NAMESPACE) for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)
)


def sessions(text: str) -> list[str]:
    return re.findall(r"^```pycon\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


# The first session of the first section is the start that all examples share.
START = sessions(SECTIONS[0][1])[0]


@pytest.mark.parametrize(
    ("heading", "text"), [pytest.param(*section, id=section[0]) for section in SECTIONS if sessions(section[1])]
)
def test_sessions(heading, text):
    run_session("\n".join([START, *(session for session in sessions(text) if session != START)]), heading)


@pytest.mark.parametrize("name", ["adopt.md", "from-vllm.md", "serving.md", "transformers.md"])
def test_sessions_of_page(name):
    run_session("\n".join(sessions((DOCS / name).read_text())), f"docs/{name}")


def test_commands_of_serving():
    """As a shell runs them, with this installation's `pagedattn`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    text = (DOCS / "serving.md").read_text()
    commands = re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert commands
    for command, expected in commands:
        result = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert (result.stdout, result.stderr) == (expected, ""), command


def run_session(code, name):
    # doctest wants the traceback's header, which the document leaves out for the reader.
    code = re.sub(r"^([\w.]+Error: )", r"Traceback (most recent call last):\n\1", code, flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(code, {}, name, name, 0)
    report = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session, out=report.append)
    assert results.attempted > 0 and results.failed == 0, "".join(report)


@pytest.mark.parametrize("name", OP_NAMES)
def test_op_is_documented(name):
    schema = str(getattr(torch.ops.pagedattn_ext, name).default._schema).removeprefix(NAMESPACE)
    assert schema in FLAT_TEXT
    assert f"ops.{signature(getattr(ops, name))}" in FLAT_TEXT
    assert any(name in heading.split(", ") and sessions(text) for heading, text in SECTIONS)


@pytest.mark.parametrize("name", ["allocate_kv_cache", "build_info", "cpu_capability", "padded_head_size"])
def test_function_is_documented(name):
    assert f"pagedattn_ext.{signature(getattr(pagedattn_ext, name))}" in FLAT_TEXT


def signature(function) -> str:
    """Without annotations: name(query, *, scale=None)."""
    bare = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in bare.parameters.values()]
    return function.__name__ + str(bare.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_every_op_is_found():
    assert set(OP_NAMES) == set(ops.__all__)


def anchors(page: Path) -> set[str]:
    """Of each heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_the_table_of_options_is_that_of_engine_args():
    """docs/serving.md, "Options": the lines that are missing there are in the message of a failure."""
    rows = [f"| `{name}` | {default_of(option)} | {option.help} |" for name, option in OPTIONS.items()]
    table = re.search(r"^\| option \| default \|.*?\n\n", (DOCS / "serving.md").read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None and table[0].splitlines()[2:-1] == rows, "\n".join(rows)


def default_of(option):
    return "" if option.default is dataclasses.MISSING else f"`{option.default!r}`"


def test_the_readme_leads_to_every_document():
    linked = set(re.findall(r"\((docs/[\w-]+\.md)", PAGES[0].read_text()))
    assert linked == {f"docs/{page.name}" for page in DOCS.glob("*.md")}
