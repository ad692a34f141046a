"""The command line of ``kvq eval``."""

from __future__ import annotations

import functools
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sglang_kvq.evaluation.tasks import KINDS, TASK_NAMES
from sglang_kvq.interruption import exit_status, terminable

#: Options that take several words, such as those to which a shell expands ``*``.
SEVERAL = ("--map", "--report", "--text")

EPILOG = """
Examples:

kvq eval --server http://127.0.0.1:30000 --reference-server http://127.0.0.1:30001 --out results --text held_out.txt

kvq eval --model M --methods none,hadamard,oscar@my-rotations --tasks kl,needle --text held_out.txt --out results
-- --mem-fraction-static 0.8

kvq eval --model M --methods none,oscar --gpus 0,1,2,3 --chunked-prefill-size 128,own --tasks kl,multi_key
--text held_out.txt --out results

kvq eval --map results more-results --out precise_M.json

kvq eval --report results/accuracy_*.json precise_M.json --out accuracy.md

Words after -- go to every server that is started. The same `kvq eval` resumes where it stopped.
"""


class Style(str, Enum):
    """Forms of a prompt."""

    auto = "auto"
    chat = "chat"
    completion = "completion"


class Words(TyperCommand):
    """Command class that repeats an option of ``SEVERAL`` before each of its words; keeps all words in ``ctx.obj``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's context, or that of typer's copy of click
        ctx.obj = list(args)
        spread: list[str] = []
        option = ""
        for word in args[: args.index("--")] if "--" in args else args:
            if word.startswith("--"):
                option = word
            elif option in SEVERAL and spread[-1] != option:
                spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


def _group(panel: str) -> Any:
    return functools.partial(typer.Option, rich_help_panel=panel)


_what, _run = _group("What to do: one of --server, --model, --map, --report"), _group("How to run")
_kl, _needle, _retrieval = _group("kl"), _group("needle"), _group(", ".join(KINDS))
_problems = _group("humaneval, gsm8k and math")


def evaluate(
    ctx: typer.Context,
    server: Annotated[str, _what(metavar="URL", help="A running server.")] = "",
    reference_server: Annotated[str, _what(metavar="URL", help="With --server: the same model in BF16, for kl.")] = "",
    name: Annotated[str, _what(help="With --server: the row's name; default: the server's own method.")] = "",
    model: Annotated[str, _what(help="Folder or hub name: start a server for each of --methods.")] = "",
    methods: Annotated[
        str,
        _what(metavar="SPEC,...", help="NAME[:BITS]\\[@ROTATIONS]\\[#CHUNK][ --flag value], fp8[:e5m2], none."),
    ] = "none,oscar,hadamard",
    map: Annotated[
        list[Path] | None,
        _what(
            metavar="SOURCE...",
            help="Write the accuracy map --out (precise_MODEL.json) of result folders and files, and its plot.",
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        _what(
            metavar="FILE...",
            help="Write the page --out from accuracy_*.json and precise_*.json files, and their plots next to them; "
            "the page begins each model with its map.",
        ),
    ] = None,
    tasks: Annotated[str, _what(metavar="TASK,...", help=f"Some of {','.join(TASK_NAMES)}.")] = "kl",
    *,
    out: Annotated[Path, _what(help="Folder of results; with --map and --report: the file to write.")],
    label: Annotated[
        str, _what(help="The model's name in file names; default: the last part of its path, in lower case.")
    ] = "",
    gpus: Annotated[
        str,
        _run(metavar="N,...", help="GPUs to use, one server on each at a time; named as in CUDA_VISIBLE_DEVICES."),
    ] = "",
    parallel: Annotated[
        int, _run(help="Servers at once (per GPU of --gpus); limit each by --max-total-tokens after --.")
    ] = 1,
    chunked_prefill_size: Annotated[
        str, _run(metavar="N,...", help="Run each method with each of these: tokens, or own for SGLang's choice.")
    ] = "128",
    concurrency: Annotated[int, _run(help="Requests at once per server.")] = 32,
    server_command: Annotated[str, _run(help="Starts a server.")] = "python -m sglang.launch_server",
    plain_flags: Annotated[str, _run(metavar="FLAGS", help="Further flags for none and fp8 only.")] = "",
    start_timeout: Annotated[float, _run(metavar="SECONDS", help="For a server to be ready.")] = 600.0,
    request_timeout: Annotated[float, _run(metavar="SECONDS", help="For one request.")] = 900.0,
    tokenizer: Annotated[str, _run(metavar="PATH", help="Default: the model's, or else the server's own.")] = "",
    json: Annotated[bool, _run("--json", help="Print the results as one JSON value, not as a table.")] = False,
    overwrite: Annotated[
        bool, _run("--overwrite", help="Measure again if existing results have other settings.")
    ] = False,
    text: Annotated[
        list[Path] | None, _kl(metavar="FILE...", help="Held-out text, which calibration did not use.")
    ] = None,
    text_skip: Annotated[float, _kl(metavar="SHARE", help="Share of each text to skip, at its beginning.")] = 0.0,
    kl_lengths: Annotated[str, _kl(metavar="N[xCOUNT],...", help="Tokens per context.")] = "2048",
    kl_contexts: Annotated[int, _kl(help="Contexts per length without its own count.")] = 8,
    kl_first: Annotated[int, _kl(help="First position measured.")] = 640,
    kl_top: Annotated[int, _kl(help="Tokens compared one by one.")] = 64,
    needle_text: Annotated[Path | None, _needle(metavar="FILE", help="Filler; default: the first --text.")] = None,
    needle_lengths: Annotated[
        str, _needle(metavar="N,...", help="Tokens of a request.")
    ] = "2048,4096,8192,16384,32768",
    needle_depths: Annotated[str, _needle(metavar="PERCENT,...", help="Filler before the needle.")] = "0,25,50,75,100",
    needle_trials: Annotated[int, _needle(help="Per cell of length and depth.")] = 5,
    needle_seed: Annotated[int, _needle(help="Seed of the numbers and the filler's start.")] = 0,
    retrieval_lengths: Annotated[
        str, _retrieval(metavar="N,...", help="Tokens of a request.")
    ] = "2048,4096,8192,16384",
    retrieval_cases: Annotated[int, _retrieval(help="Per length.")] = 40,
    retrieval_seed: Annotated[int, _retrieval(help="Seed of the generated texts.")] = 0,
    style: Annotated[Style, _problems(help="auto is chat if the model has a template.")] = Style.auto,
    humaneval: Annotated[Path | None, _problems(metavar="FILE", help="HumanEval.jsonl or .jsonl.gz.")] = None,
    humaneval_problems: Annotated[int, _problems(help="Number of first problems to use; 0 is all.")] = 0,
    humaneval_max_tokens: Annotated[int, _problems(help="Tokens of an answer.")] = 768,
    allow_unsandboxed: Annotated[
        bool, _problems("--allow-unsandboxed", help="Run generated programs even if they cannot be sandboxed.")
    ] = False,
    gsm8k: Annotated[Path | None, _problems(metavar="FILE", help="test.jsonl.")] = None,
    gsm8k_train: Annotated[Path | None, _problems(metavar="FILE", help="For the worked examples.")] = None,
    gsm8k_shots: Annotated[int, _problems(help="Worked examples; 0 for none.")] = 8,
    gsm8k_problems: Annotated[int, _problems(help="Number of first problems to use; 0 is all.")] = 200,
    gsm8k_max_tokens: Annotated[int, _problems(help="Tokens of an answer.")] = 400,
    math: Annotated[
        Path | None, _problems(metavar="FILE", help="test.jsonl of MATH-500; default: generated problems.")
    ] = None,
    math_problems: Annotated[int, _problems(help="Number of first problems to use; 0 is all.")] = 120,
    math_seed: Annotated[int, _problems(help="Seed of generated problems.")] = 0,
    math_max_tokens: Annotated[int, _problems(help="Tokens of an answer.")] = 1024,
) -> None:
    """Compare methods on one model through servers: divergence from BF16, retrieval, HumanEval, GSM8K, MATH."""
    options = SimpleNamespace(**{**locals(), "style": style.value, "text": text or []})
    from sglang_kvq.evaluation.comparison import run

    try:
        with terminable():
            raise typer.Exit(run(options, ctx.obj))
    except KeyboardInterrupt as error:
        raise typer.Exit(exit_status(error)) from None
