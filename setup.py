"""Which folder is which package; everything else is in pyproject.toml.

The folder ``triton_kernels`` must not install a module of that name (SGLang's kernels wheel has one), so it
becomes ``sglang_kvq.kernels``; ``rotation_zoo`` becomes ``sglang_kvq.rotation_zoo``.
"""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {"sglang_kvq.kernels": "triton_kernels", "sglang_kvq.rotation_zoo": "rotation_zoo"}


def packages_in(name: str, folder: str) -> list[str]:
    """The package in that folder and all below it, by import name."""
    return [name, *(f"{name}.{inner}" for inner in find_packages(folder))]


present = {name: folder for name, folder in FOLDERS.items() if Path(folder).is_dir()}
setup(
    package_dir=present,
    packages=find_packages(include=["sglang_kvq", "sglang_kvq.*"])
    + [package for name, folder in present.items() for package in packages_in(name, folder)],
)
