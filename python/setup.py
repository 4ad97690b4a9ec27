"""The version of pagedattn-serve is that of the ops in this tree, and it works with these alone."""

import re
from pathlib import Path

from setuptools import setup

OPS = Path(__file__).resolve().parents[1] / "src" / "pagedattn_ext" / "__init__.py"
[version] = re.findall(r'^__version__ = "(.+)"$', OPS.read_text(), re.MULTILINE)

setup(
    version=version,
    install_requires=[
        f"pagedattn-ext=={version}",
        "fastapi>=0.132",
        "httptools>=0.6",
        "huggingface-hub>=0.34",
        "jinja2>=3.1",
        "numpy",
        "prometheus-client>=0.20",
        "pydantic>=2.9",
        "safetensors>=0.4",
        "transformers>=4.56,<5.25",  # the last that models through transformers were tried with
        "uvicorn>=0.45",
    ],
    options={"build": {"build_base": "../build/serve"}},  # no copies of modules beside them
)
