"""The facts that belong beside numbers, as JSON: the GPU, versions of packages, the build of pagedattn_ext."""

import importlib.metadata
import json
import platform

import torch

import pagedattn_ext

NAMES = ("torch", "triton", "transformers", "flashinfer-python", "pytest", "hypothesis", "llguidance")


def main() -> None:
    versions = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    facts = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: versions.get(name) for name in NAMES},
        "pagedattn_ext": pagedattn_ext.build_info(),
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
