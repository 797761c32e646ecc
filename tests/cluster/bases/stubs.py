"""Small libraries in the place of CUDA's large ones, for machines that have no GPU.

`python3 stubs.py PACKAGES CUDA OUT` reads which functions the libraries of PyTorch and vLLM in
PACKAGES want of those in CUDA, and writes to OUT libraries of the same names with nothing else in
them. They are asked for when PyTorch is loaded, and called only where there is a GPU. Two
gigabytes less in every copy of the image.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory


def symbols(library: Path, kind: str) -> set[str]:
    """The dynamic symbols of a library, each with its version where it has one."""
    command = ["nm", "--dynamic", "--no-sort", f"--{kind}", str(library)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].replace("@@", "@") for line in found.splitlines()}


def write(target: Path, wanted: set[str]) -> None:
    """A shared library that defines these symbols; called, each returns an error code."""
    by_version = defaultdict(list)
    for symbol in sorted(wanted):
        name, _, version = symbol.partition("@")
        by_version[version].append(name)
    names = [name for group in by_version.values() for name in group]
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        code, versions = Path(folder, "stub.c"), Path(folder, "stub.map")
        code.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names))
        versions.write_text(
            "".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in by_version.items() if v)
        )
        command = ["cc", "-shared", "-fPIC", "-w", "-nostdlib", "-fno-builtin", "-o", str(target)]
        command += [f"-Wl,-soname,{target.name}", str(code)]
        if any(by_version):
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run(command, check=True)


def main() -> None:
    packages, cuda, out = map(Path, sys.argv[1:])
    users = [*packages.glob("torch/lib/*.so"), *packages.glob("vllm/*.so")]
    wanted = set().union(*(symbols(user, "undefined-only") for user in users))
    for library in cuda.rglob("*.so*"):
        write(out / library.relative_to(cuda), symbols(library, "defined-only") & wanted)


if __name__ == "__main__":
    main()
