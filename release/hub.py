"""Writes the installed pagedattn_ext as a kernel that Hugging Face's `kernels` loads: a folder for each build.

    python release/hub.py build/hub                  # build/hub/build/torch-stable-abi210-cpu-x86_64-linux/
    python release/hub.py build/hub --cuda 13.0      # of a build with CUDA kernels, by this release of CUDA
    python release/hub.py build/hub --wheel dist/aarch64/pagedattn_ext-...whl  # with the binary of a wheel, CPU alone

The door is `pagedattn_ext.hub_kernel`; the package lies beside it. `kernels` imports it under a name of its own, so all
imports become relative, and modules that other programs know by name stay out. The ops get a namespace of their own by
that name (csrc/python_module.cpp), so an installed pagedattn_ext can be in the same process.
"""

import argparse
import hashlib
import json
import platform
import re
import shutil
from pathlib import Path
from zipfile import ZipFile

import pagedattn_ext

PACKAGE = Path(pagedattn_ext.__file__).parent
BINARY = "pagedattn_ext/_C.abi3.so"
FOR_VLLM = ("vllm_backend.py", "vllm_plugin.py", "vllm_sanitizer.py")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "hub_kernel", "transformers.py", *FOR_VLLM)


def write_variant(out: Path, cuda: str | None = None, wheel: Path | None = None) -> Path:
    """The variant in `out`/build, of what this process imports, with the binary of `wheel` if there is one; the older
    variant is replaced. Returns its folder."""
    info = pagedattn_ext.build_info()
    if wheel is None and (cuda is not None) != bool(info["cuda_arches"]):
        has = "CUDA kernels" if info["cuda_arches"] else "no CUDA kernels"
        raise SystemExit(f"--cuda: expected the release of CUDA of a build that has its kernels; this one has {has}")
    backend = "cpu" if cuda is None else "cu" + cuda.replace(".", "")
    abi = str(info["torch_target"]).replace(".", "")
    machine = platform.machine() if wheel is None else machine_of(wheel)
    binary = None if wheel is None else ZipFile(wheel).read(BINARY)
    folder = out / "build" / f"torch-stable-abi{abi}-{backend}-{machine}-{platform.system().lower()}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PACKAGE, folder / "pagedattn_ext", ignore=LEFT_OUT)
    if binary is not None:
        (folder / BINARY).write_bytes(binary)
    for file in (PACKAGE / "hub_kernel").glob("*.py"):
        shutil.copy(file, folder)
    for file in folder.rglob("*.py"):
        dots = "." * len(file.relative_to(folder).parts)
        file.write_text(re.sub(r"^from (?=pagedattn_ext\b)", f"from {dots}", file.read_text(), flags=re.MULTILINE))
    metadata = json.loads((PACKAGE / "hub_kernel" / "metadata.json").read_text())
    metadata["id"] = f"pagedattn_ext_{backend}_{digest_of(folder)}"  # two builds can be in one process
    if cuda is not None:
        metadata["backend"] = {"type": "cuda", "archs": cuda_archs()}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def machine_of(wheel: Path) -> str:
    """aarch64 of pagedattn_ext-0.1.0-cp311-abi3-manylinux_2_28_aarch64.whl."""
    name = re.fullmatch(r"pagedattn_ext-.+-manylinux_\d+_\d+_(\w+)\.whl", wheel.name)
    if name is None:
        raise SystemExit(f"--wheel: expected a file pagedattn_ext-...-manylinux_..._MACHINE.whl, got {wheel}")
    return name[1]


def digest_of(folder: Path) -> str:
    """What the files say, as 12 letters."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def cuda_archs() -> list[str]:
    """sm_80 as 8.0, and compute_90, which is PTX for later GPUs, as 9.0+PTX."""
    names = [re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)", name) for name in pagedattn_ext.build_info()["cuda_arches"]]
    return [f"{name[2]}.{name[3]}{name[4]}{'+PTX' * (name[1] == 'compute')}" for name in names if name is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of the repository")
    binary = parser.add_mutually_exclusive_group()
    binary.add_argument("--cuda", help="the release of CUDA that compiled the kernels, e.g. 13.0")
    binary.add_argument("--wheel", type=Path, help="a wheel of this version, for any processor, without CUDA kernels")
    arguments = parser.parse_args()
    print(write_variant(arguments.out, arguments.cuda, arguments.wheel))
