"""Times the commands that a new user waits for: ``kvq doctor``, cold and warm, and ``kvq calibrate``.

    python benchmarks/commands.py --model FOLDER --text FILE --out benchmarks/results/commands_h100.json

If the model's folder has a config.json and a tokenizer but no weights, a copy gets random weights; times do not depend
on them. Ends with status 1 if a command fails. ``kvq doctor`` fails if a kernel or routine is wrong or was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from sglang_kvq.evaluation.provenance import without_paths


def timed(name: str, words: Sequence[str | Path], env: Mapping[str, str]) -> tuple[dict, dict]:
    """Runs ``kvq`` with these words and ``--json``. Returns its answer and a row.

    Raises:
        SystemExit: the command failed; its output is shown.
    """
    begin = time.monotonic()
    command = [sys.executable, "-m", "sglang_kvq.cli", *map(str, words), "--json"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    seconds = time.monotonic() - begin
    if done.returncode:
        raise SystemExit(f"kvq {' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    print(f"{name}: {seconds:.1f} s", flush=True)
    return json.loads(done.stdout), {"case": name, "seconds": round(seconds, 1)}


def with_weights(model: Path, folder: Path) -> Path:
    """Returns the model's folder or, if it has no weights, a copy in ``folder`` with random BF16 weights."""
    if any(model.glob("*.safetensors")):
        return model
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    copy = shutil.copytree(model, folder / model.name)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    made.save_pretrained(copy)
    return copy


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json and a tokenizer")
    parser.add_argument("--text", required=True, type=Path, help="text to calibrate on")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the text (default %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(words)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = {"TRITON_CACHE_DIR": str(folder / "triton")}
        for state in ("cold", "warm"):
            answer, row = timed(f"kvq doctor, {state}", ["doctor"], cache)
            rows.append({**row, **{check["check"]: without_paths(check["found"]) for check in answer["checks"]}})
        model = with_weights(args.model, folder)
        words = ["calibrate", model, "--text", args.text, "--output", folder / "rotations", "--tokens", args.tokens]
        words += ["--composition", "transform", "--device", args.device, "--timings"]
        answer, row = timed("kvq calibrate --composition transform", words, {})
        phases = {f"{name}_s": round(seconds, 1) for name, (seconds, _) in answer["timings"].items()}
        rows.append({**row, "model": args.model.name, "tokens": args.tokens, **phases})
    record.write(args.out, "commands", rows)


if __name__ == "__main__":
    main()
