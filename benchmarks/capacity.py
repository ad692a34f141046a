"""Compares how many tokens a GPU holds with ``--kv-quant`` and without; both servers must answer in CUDA graphs.

    python benchmarks/capacity.py --out benchmarks/results/serving_h200.json
    python benchmarks/capacity.py --method transform --bits 1.6 --out benchmarks/results/serving_h200.json
    python benchmarks/capacity.py --model benchmarks/models/qwen3-next-80b-a3b --layers 24 --out FILE
    python benchmarks/capacity.py --model benchmarks/models/qwen3-30b-a3b --out FILE
    python benchmarks/capacity.py --model benchmarks/models/gpt-oss-120b --layers 12 --plain-backend fa3 \\
        --max-running-requests 64 --out FILE

Uses Qwen3-8B's geometry with dummy weights and random rotations, so that nothing is downloaded. Takes about 2 minutes.
``--model`` takes another model of ``benchmarks/models``; ``--layers`` uses only its first layers, if the whole model
does not fit one GPU. A hybrid's memory is also divided between its states and its cache; its row has ``states`` and
``requests`` of both servers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import record
from launch.server import Server
from sglang_kvq.rotations import RotationMeta, Rotations, save_rotations
from sglang_kvq.rotations.identity import Geometry, geometry_of

MODEL = Path(__file__).parent / "models" / "qwen3-8b"
FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init")
#: Few graph sizes: capturing graphs is most of a start, and does not affect the memory that is divided here.
GRAPHS = ("--cuda-graph-max-bs-decode", "8")


def geometry_and_flags(model: Path, layers: int | None) -> tuple[Geometry, tuple[str, ...]]:
    """Returns the geometry of a model's first ``layers`` layers, and the flags with which a server uses only these."""
    config = json.loads((model / "config.json").read_text())
    changes = {} if layers is None else {"num_hidden_layers": layers}
    flags = ("--json-model-override-args", json.dumps(changes)) if changes else ()
    return geometry_of(config | changes), flags


def existing_folder(path: str) -> Path:
    """Returns the absolute path of a folder, because servers run elsewhere.

    Raises:
        argparse.ArgumentTypeError: there is no such folder.
    """
    if not (found := Path(path).resolve()).is_dir():
        raise argparse.ArgumentTypeError(f"{path}: not a folder")
    return found


def random_rotations(folder: Path, layers: int, kv_heads: int, head_dim: int) -> Path:
    """Writes a file of random orthogonal matrices, which cost the same to serve as calibrated ones."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.linalg.qr(torch.randn(layers, kv_heads, head_dim, head_dim, generator=generator))[0] for _ in "kv")
    save_rotations(Rotations(k.contiguous(), v.contiguous()), folder, kv_heads=kv_heads, overwrite=True)
    return folder


def random_transform(folder: Path, layers: int, kv_heads: int, head_dim: int) -> Path:
    """Writes a file for transform coding: random bases, and energies that fall by 10 dB per plane as measured."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers, kv_heads, head_dim)
    k, v = (torch.linalg.qr(torch.randn(*shape, head_dim, generator=generator))[0].contiguous() for _ in "kv")
    importance = torch.rand(2, layers, generator=generator) + 0.1
    energies = torch.logspace(0, -4, head_dim).expand(shape).contiguous()
    meta = RotationMeta("transform", importance={part: x.tolist() for part, x in zip("kv", importance)})
    rest = {"q": k.clone(), "o": v.clone(), "k_mean": torch.zeros(shape), "k_energies": energies}
    rotations = Rotations(k, v, meta, **rest, v_energies=energies.clone())
    save_rotations(rotations, folder, kv_heads=kv_heads, overwrite=True)
    return folder


def name_of(model: Path, layers: int | None, scenario: str) -> str:
    """Returns the row's name; for other models than ``MODEL`` it begins with the model's name."""
    if model.name == MODEL.name:
        return scenario
    return f"{model.name}/{scenario}" + (f", {layers} layers" if layers else "")


def capacity(model: Path, *flags: str) -> tuple[dict, dict]:
    """Returns a server's capacity and its kv_quant state; fails unless the server decodes inside CUDA graphs.

    Returns:
        A dict with ``tokens`` of the cache, ``requests`` that run at most, and ``states`` (None if there are none);
        then the state.
    """
    with Server(model, *FLAGS, *GRAPHS, *flags, cpu=False) as server:
        info = server.info()
        (worker,) = info["internal_states"]
        held = {
            "tokens": info["max_total_num_tokens"],
            "requests": worker["effective_max_running_requests_per_dp"],
            "states": worker["max_mamba_cache_size"],
        }
        for length in (5, 700, 3000):
            ids = server.generate(list(range(10, 10 + length)), 40, sampling_params={"ignore_eos": True})["output_ids"]
            assert len(ids) == 40
        assert "cuda graph: True" in server.log(), server.log_tail()
        state = server.kv_quant() if "--kv-quant" in flags else {}
        return held, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--mem-fraction-static", default="0.85")
    parser.add_argument("--plain-backend", default="flashinfer", help="--attention-backend of the BF16 server")
    parser.add_argument("--method", choices=("oscar", "transform"), default="oscar")
    parser.add_argument("--bits", help="--kv-quant-bits of ours")
    parser.add_argument(
        "--model", type=existing_folder, default=MODEL, help="a folder with a config.json; default %(default)s"
    )
    parser.add_argument("--layers", type=int, help="use only the model's first N layers")
    parser.add_argument("--ours", action="store_true", help="no BF16 server: its tokens are those of --out's row")
    parser.add_argument("--max-running-requests", help="flag of both servers; SGLang's own default if not given")
    args = parser.parse_args()
    name = "capacity" if args.method == "oscar" else " ".join(filter(None, ("capacity", args.method, args.bits)))
    name = name_of(args.model, args.layers, name)
    plain = None
    if args.ours:
        before = next((row for row in record.read_rows(args.out) if row["scenario"] == name), None)
        if before is None:
            parser.error(f"--ours: {args.out} has no row {name!r}, so no tokens of BF16's; measure both once")
        plain = {"tokens": before["none"], **{what: before.get(f"none_{what}") for what in ("requests", "states")}}
    geometry, cut = geometry_and_flags(args.model, args.layers)
    memory = ["--mem-fraction-static", args.mem_fraction_static, *cut]
    if args.max_running_requests:
        memory += ["--max-running-requests", args.max_running_requests]
    with tempfile.TemporaryDirectory() as temporary:
        make = random_transform if args.method == "transform" else random_rotations
        flags = ["--kv-quant", args.method, "--kv-quant-rotations", str(make(Path(temporary) / "rotations", *geometry))]
        ours, state = capacity(args.model, *memory, *flags, *(["--kv-quant-bits", args.bits] if args.bits else []))
    plain = plain or capacity(args.model, *memory, "--attention-backend", args.plain_backend)[0]
    tokens = {"none": plain["tokens"], args.method: ours["tokens"]}
    row = {"scenario": name, "unit": "tokens", **tokens, "ratio": round(ours["tokens"] / plain["tokens"], 3)}
    if ours["states"] is not None:
        for server, held in (("none", plain), (args.method, ours)):
            row |= {f"{server}_states": held["states"], f"{server}_requests": held["requests"]}
    print(row, state, sep="\n")
    row |= {k: v for k, v in state.items() if k not in ("tiers", "rotations")}  # counters; a temporary folder
    record.merge(args.out, "serving", [row], key="scenario")


if __name__ == "__main__":
    main()
