"""The command line of ``kvq eval``. Plain argparse: hosts without typer run ``python -m sglang_kvq.evaluation``."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.arguments import check_least, check_new
from sglang_kvq.errors import KVQuantError, unknown
from sglang_kvq.evaluation import map_table, plots, precise, provenance, report
from sglang_kvq.evaluation.base import Bench, ReferenceTask, Task
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.map_rows import is_map
from sglang_kvq.evaluation.material import Material, write_whole
from sglang_kvq.evaluation.progress import Display
from sglang_kvq.evaluation.runner import Launch, Runner, server_identity
from sglang_kvq.evaluation.specs import (
    CHUNK,
    CHUNK_FLAG,
    OWN_CHUNK,
    REFERENCE,
    MethodSpec,
    chunk_size,
    in_chunks,
    parse,
    parse_list,
)
from sglang_kvq.evaluation.store import Store, read, write_json
from sglang_kvq.evaluation.tasks import KINDS, TASK_NAMES
from sglang_kvq.usage import Parser

#: The least values of numbers that no task looks at before it runs.
LEAST = {
    "parallel": 1,
    "concurrency": 1,
    "start-timeout": 1e-3,
    "request-timeout": 1e-3,
    "humaneval-problems": 0,
    "humaneval-max-tokens": 1,
    "gsm8k-shots": 0,
    "gsm8k-problems": 0,
    "gsm8k-max-tokens": 1,
}

EPILOG = """
examples:
  kvq eval --server http://127.0.0.1:30000 --reference-server http://127.0.0.1:30001 --out results --text held_out.txt
  kvq eval --model M --methods none,hadamard,oscar@my-rotations --tasks kl,needle --text held_out.txt --out results \\
      -- --mem-fraction-static 0.8
  kvq eval --model M --methods none,oscar --gpus 0,1,2,3 --chunked-prefill-size 128,own --tasks kl,multi_key \\
      --text held_out.txt --out results
  kvq eval --map results more-results --out benchmarks/results/precise_M.json
  kvq eval --report benchmarks/results/accuracy_*.json --out docs/accuracy.md
Words after -- go to every server that is started. The same `kvq eval` resumes where it stopped.
"""


def parser() -> argparse.ArgumentParser:
    root = Parser(
        prog="kvq eval",
        description="Compare methods on one model: divergence from BF16, retrieval, HumanEval, GSM8K.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = root.add_argument_group("what to do: one of --server, --model, --map, --report")
    what.add_argument("--server", metavar="URL", help="a running server")
    what.add_argument("--reference-server", metavar="URL", help="with --server: the same model in BF16, for kl")
    what.add_argument("--name", help="with --server: the row's name (default: the server's own method)")
    what.add_argument("--model", help="folder or hub name: start a server for each of --methods")
    what.add_argument(
        "--methods",
        default="none,oscar,hadamard",
        metavar="SPEC,...",
        help="NAME[:BITS][@ROTATIONS][#CHUNK][ --flag value], fp8[:e5m2], none; default %(default)s",
    )
    what.add_argument(
        "--map",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help="write the accuracy map --out (precise_MODEL.json) from result folders and result files, and its plot "
        "next to it",
    )
    what.add_argument(
        "--report",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="write the page --out from accuracy_*.json and precise_*.json files, and their plots next to them; from "
        "precise_*.json files alone, only their blocks in the page",
    )
    what.add_argument(
        "--tasks", default="kl", metavar="TASK,...", help=f"some of {','.join(TASK_NAMES)}; default %(default)s"
    )
    what.add_argument(
        "--out", type=Path, required=True, help="folder of results; with --map and --report: the file to write"
    )
    what.add_argument(
        "--label", help="the model's name in file names (default: the last part of its path, in lower case)"
    )

    run = root.add_argument_group("how to run")
    run.add_argument(
        "--gpus",
        default="",
        metavar="N,...",
        help="GPUs that run a server each at the same time, named as in CUDA_VISIBLE_DEVICES",
    )
    run.add_argument(
        "--parallel",
        type=int,
        default=1,
        help="servers at once (per GPU of --gpus); limit each by --max-total-tokens after --",
    )
    run.add_argument(
        CHUNK_FLAG,
        default=str(CHUNK),
        metavar="N,...",
        help=f"run each method with each of these: tokens, or {OWN_CHUNK} for SGLang's choice; default %(default)s",
    )
    run.add_argument("--concurrency", type=int, default=32, help="requests at once per server; default %(default)s")
    run.add_argument("--server-command", default="python -m sglang.launch_server", help="default: %(default)s")
    run.add_argument("--plain-flags", default="", metavar="FLAGS", help="further flags for none and fp8 only")
    run.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    run.add_argument("--request-timeout", type=float, default=900.0, metavar="SECONDS")
    run.add_argument("--tokenizer", metavar="PATH", help="default: the model's, or else the server's own")
    run.add_argument("--json", action="store_true", help="print the results as one JSON value, not as a table")
    run.add_argument("--overwrite", action="store_true", help="measure again if existing results have other settings")

    kl = root.add_argument_group("kl")
    kl.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE", help="held-out text, which calibration did not use"
    )
    kl.add_argument(
        "--text-skip", type=float, default=0.0, metavar="SHARE", help="share of each text to skip, at its beginning"
    )
    kl.add_argument(
        "--kl-lengths", default="2048", metavar="N[xCOUNT],...", help="tokens per context; default %(default)s"
    )
    kl.add_argument(
        "--kl-contexts", type=int, default=8, help="contexts per length without its own count; default %(default)s"
    )
    kl.add_argument("--kl-first", type=int, default=640, help="first position measured; default %(default)s")
    kl.add_argument("--kl-top", type=int, default=64, help="tokens compared one by one; default %(default)s")

    needle = root.add_argument_group("needle")
    needle.add_argument("--needle-text", type=Path, metavar="FILE", help="filler; default: the first --text")
    needle.add_argument(
        "--needle-lengths", default="2048,4096,8192,16384,32768", metavar="N,...", help="default %(default)s"
    )
    needle.add_argument("--needle-depths", default="0,25,50,75,100", metavar="PERCENT,...", help="default %(default)s")
    needle.add_argument(
        "--needle-trials", type=int, default=5, help="per cell of length and depth; default %(default)s"
    )
    needle.add_argument(
        "--needle-seed", type=int, default=0, help="seed of the numbers and the filler's start; default %(default)s"
    )

    retrieval = root.add_argument_group(", ".join(KINDS))
    retrieval.add_argument(
        "--retrieval-lengths", default="2048,4096,8192,16384", metavar="N,...", help="tokens; default %(default)s"
    )
    retrieval.add_argument("--retrieval-cases", type=int, default=40, help="per length; default %(default)s")
    retrieval.add_argument(
        "--retrieval-seed", type=int, default=0, help="seed of the generated texts; default %(default)s"
    )

    tests = root.add_argument_group("humaneval and gsm8k")
    tests.add_argument(
        "--style", choices=("auto", "chat", "completion"), default="auto", help="default: chat if there is a template"
    )
    tests.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl or .jsonl.gz")
    tests.add_argument(
        "--humaneval-problems", type=int, default=0, help="number of first problems to use; 0, the default, is all"
    )
    tests.add_argument("--humaneval-max-tokens", type=int, default=768, help="default %(default)s")
    tests.add_argument(
        "--allow-unsandboxed", action="store_true", help="run generated programs even if they cannot be sandboxed"
    )
    tests.add_argument("--gsm8k", type=Path, metavar="FILE", help="test.jsonl")
    tests.add_argument("--gsm8k-train", type=Path, metavar="FILE", help="for the worked examples")
    tests.add_argument("--gsm8k-shots", type=int, default=8, help="worked examples; 0 for none; default %(default)s")
    tests.add_argument(
        "--gsm8k-problems", type=int, default=200, help="number of first problems to use; 0 is all; default %(default)s"
    )
    tests.add_argument("--gsm8k-max-tokens", type=int, default=400, help="default %(default)s")
    return root


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Returns the requested tasks, in the order of ``TASK_NAMES``.

    Raises:
        KVQuantError: a task is unknown, or a setting is wrong or missing.
    """
    names = options.tasks.split(",")
    if wrong := set(names) - set(TASK_NAMES):
        raise unknown("--tasks", sorted(wrong)[0], TASK_NAMES)
    makers = {"kl": _kl, "needle": _needle, "humaneval": _humaneval, "gsm8k": _gsm8k}
    return [
        makers[name](options) if name in makers else _retrieval(name, options) for name in TASK_NAMES if name in names
    ]


def _kl(options: argparse.Namespace) -> Task:
    from sglang_kvq.evaluation.tasks.kl import KLTask

    contexts = []
    for word in options.kl_lengths.split(","):
        length, times, count = word.partition("x")
        try:
            contexts.append((int(length), int(count) if times else options.kl_contexts))
        except ValueError:
            raise KVQuantError(f"--kl-lengths {word}: give N or NxCOUNT, whole numbers, separated by commas.") from None
    return KLTask(tuple(options.text), options.text_skip, tuple(contexts), options.kl_first, options.kl_top)


def _needle(options: argparse.Namespace) -> Task:
    from sglang_kvq.evaluation.tasks.needle import NeedleTask

    return NeedleTask(
        _given(
            options.needle_text or next(iter(options.text), None),
            "the needle task needs filler text: --text FILE or --needle-text FILE.",
        ),
        0.0 if options.needle_text else options.text_skip,
        tuple(_whole("--needle-lengths", word) for word in options.needle_lengths.split(",")),
        tuple(_whole("--needle-depths", word) for word in options.needle_depths.split(",")),
        options.needle_trials,
        options.style,
        options.needle_seed,
    )


def _retrieval(name: str, options: argparse.Namespace) -> Task:
    from sglang_kvq.evaluation.tasks.retrieval import RetrievalTask

    lengths = tuple(_whole("--retrieval-lengths", word) for word in options.retrieval_lengths.split(","))
    return RetrievalTask(name, lengths, options.retrieval_cases, options.style, options.retrieval_seed)


def _humaneval(options: argparse.Namespace) -> Task:
    from sglang_kvq.evaluation.tasks.humaneval import HumanEvalTask

    return HumanEvalTask(
        _given(options.humaneval, "the humaneval task needs its problems: --humaneval HumanEval.jsonl.gz."),
        options.humaneval_problems,
        options.style,
        options.humaneval_max_tokens,
        allow_unsandboxed=options.allow_unsandboxed,
    )


def _gsm8k(options: argparse.Namespace) -> Task:
    from sglang_kvq.evaluation.tasks.gsm8k import GSM8KTask

    return GSM8KTask(
        _given(options.gsm8k, "the gsm8k task needs its problems: --gsm8k test.jsonl."),
        options.gsm8k_train,
        options.gsm8k_shots,
        options.gsm8k_problems,
        options.style,
        options.gsm8k_max_tokens,
    )


def _given(path: Path | None, otherwise: str) -> Path:
    """Returns a file that a task requires.

    Raises:
        KVQuantError: it was not given; the message is ``otherwise``.
    """
    if path is None:
        raise KVQuantError(otherwise)
    return path


def _whole(flag: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise KVQuantError(f"{flag} {word!r}: give whole numbers separated by commas.") from None


def main(words: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if a method or task gave no value.

    Raises:
        KVQuantError: settings, files or servers cannot be used.
    """
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    options, flags = parser().parse_args(words[:cut]), words[cut + 1 :]
    chosen = [name for name in ("server", "model", "map", "report") if getattr(options, name)]
    if len(chosen) != 1:
        raise KVQuantError("give one of --server URL, --model PATH, --map SOURCE ... and --report FILE ....")
    command = ["kvq", "eval", *words]
    if options.report:
        return write_page(options)
    if options.map:
        return write_map(options, command)
    if flags and not options.model:
        raise KVQuantError(f"{' '.join(flags)}: flags after -- are for servers that --model starts.")
    for name, least in LEAST.items():
        check_least(f"--{name}", getattr(options, name.replace("-", "_")), least)
    check_new("--out", options.out, folder=True)
    for flag, value in (("--gpus", options.gpus), (CHUNK_FLAG, options.chunked_prefill_size)):
        if options.server and value not in ("", str(CHUNK)):
            raise KVQuantError(f"{flag} {value}: it is for servers that --model starts; leave it out.")
    tasks = tasks_of(options)
    signal.signal(signal.SIGTERM, _interrupt)
    if options.server:
        model, failures = evaluate_server(options, tasks, _noted(command))
    else:
        model, failures = compare_methods(options, tasks, flags, _noted(command))
    return finish(options, model, command, failures)


def _noted(command: list[str]) -> str:
    """Formats a command for results, without this machine's paths."""
    return shlex.join(map(provenance.without_paths, command))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def model_label(options: argparse.Namespace, path: str) -> str:
    return options.label or Path(path).name.lower() or "model"


def evaluate_server(options: argparse.Namespace, tasks: list[Task], command: str) -> tuple[str, list[str]]:
    """Measures on the given running server (``--server``)."""
    identity, facts = server_identity(options.server, options.name or "")
    label = options.name or facts.method
    model = model_label(options, facts.model_path)
    store = Store(options.out, options.overwrite, command)
    material = Material(options.out / "material", model, options.tokenizer)
    slug = _slug(label)
    with Display() as display:
        runner = Runner(
            tasks, store, material, display, concurrency=options.concurrency, timeout=options.request_timeout
        )
        wanted = [task for task in tasks if not store.finished(slug, task.name, {**identity, "task": task.identity()})]
        for task in wanted:
            if options.reference_server and isinstance(task, ReferenceTask):
                reference = Client(options.reference_server, timeout=options.request_timeout)
                if reference.facts.method != REFERENCE:
                    raise KVQuantError(
                        f"--reference-server {options.reference_server} serves {reference.facts.method}, not BF16."
                    )
                runner.record_reference(task, reference, Bench(material, options.concurrency))
        material.settle_reference()
        runner.measure(options.server, slug, label, identity, wanted, is_reference=label == REFERENCE)
    return model, runner.failures


def _slug(name: str) -> str:
    from sglang_kvq.evaluation.specs import MethodSpec

    return MethodSpec(name, "none").slug


def specs_of(options: argparse.Namespace, tasks: list[Task], flags: list[str]) -> list[MethodSpec]:
    """Returns ``--methods`` in each of the chunk sizes; adds BF16 first if a task needs it.

    Raises:
        KVQuantError: specs or chunk sizes are wrong, or no chunk size suits a task.
    """
    chunks = [chunk_size(word) for word in options.chunked_prefill_size.split(",")]
    if any(flag.startswith(CHUNK_FLAG) for flag in flags) and chunks != [CHUNK]:
        raise KVQuantError(f"{CHUNK_FLAG} before and after --: give it once, before --.")
    specs = parse_list(options.methods, chunks)
    for task in tasks:
        if isinstance(task, ReferenceTask) and not any(spec.is_reference for spec in specs):
            fitting = [spec.chunk for spec in specs if spec.fits(task.largest_chunk)]
            if not fitting:
                raise KVQuantError(
                    f"{task.name} is measured in chunks of at most {task.largest_chunk}: add {CHUNK} to {CHUNK_FLAG}, "
                    "or leave it out of --tasks."
                )
            specs.insert(0, in_chunks(parse(REFERENCE), fitting[0]))
    return specs


def gpus_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns ``--gpus``, each once.

    Raises:
        KVQuantError: a name is empty or repeated.
    """
    gpus = tuple(options.gpus.split(",")) if options.gpus else ()
    if not all(gpus) or len(set(gpus)) < len(gpus):
        raise KVQuantError(f"--gpus {options.gpus}: give each once, separated by single commas, such as 0,1,2,3.")
    return gpus


def _split(flag: str, words: str) -> tuple[str, ...]:
    """The words of a command line that is one word of ours.

    Raises:
        KVQuantError: a quote that does not end.
    """
    try:
        return tuple(shlex.split(words))
    except ValueError as error:
        raise KVQuantError(f"{flag} {words}: {error}; close every quote.") from None


def compare_methods(
    options: argparse.Namespace, tasks: list[Task], flags: list[str], command: str
) -> tuple[str, list[str]]:
    """Starts a server for each method and measures on it (``--model``)."""
    specs = specs_of(options, tasks, flags)
    _split("--server-command", options.server_command)
    model = model_label(options, options.model)
    where = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    launch = Launch(
        where,
        options.server_command,
        tuple(flags),
        _split("--plain-flags", options.plain_flags),
        options.parallel,
        options.start_timeout,
        gpus_of(options),
    )
    store = Store(options.out, options.overwrite, command)
    material = Material(options.out / "material", model, options.tokenizer)
    with Display() as display:
        runner = Runner(
            tasks, store, material, display, concurrency=options.concurrency, timeout=options.request_timeout
        )
        runner.compare(specs, launch)
    return model, runner.failures


def finish(options: argparse.Namespace, model: str, command: list[str], failures: list[str]) -> int:
    """Writes the report of everything in the output folder and returns the exit status."""
    content = report.collect(Store(options.out), model, command)
    path = report.write(options.out, content)
    drawn = plots.draw(content, path)
    print((path if options.json else path.with_suffix(".md")).read_text())
    for written in (path, path.with_suffix(".md"), *(drawn or [])):
        print(f"written: {written}", file=sys.stderr)
    if drawn is None:
        print(plots.MISSING, file=sys.stderr)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def write_map(options: argparse.Namespace, command: list[str]) -> int:
    """Runs ``--map``: writes the JSON file and, with matplotlib, its plot; prints its block of Markdown."""
    path = options.out
    model = path.stem.removeprefix("precise_")
    if path.is_dir() or path.suffix != ".json" or model in ("", path.stem):
        raise KVQuantError(f"--out {path}: with --map, the file to write: precise_MODEL.json.")
    content = precise.collect(options.map, model, command)
    write_json(path, content)
    drawn = plots.draw(content, path)
    if options.json:
        print(path.read_text())
    else:
        print(map_table.block(content, path.name, None, "docs/accuracy.md"))
    for written in (path, *(drawn or [])):
        print(f"written: {written}", file=sys.stderr)
    if drawn is None:
        print(plots.MISSING, file=sys.stderr)
    return 0


def write_page(options: argparse.Namespace) -> int:
    """Runs ``--report``: draws plots next to the files, with matplotlib, then writes the page."""
    contents = {path: read(path) for path in options.report}
    mapped = [content.get("model") for content in contents.values() if is_map(content)]
    for path, content in contents.items():
        headed = not is_map(content) and content.get("model") in mapped
        if headed:  # the first report of a model shows the map's plot instead of its own
            mapped.remove(content.get("model"))
        if plots.draw(content, path, with_map=not headed) is None:
            print(plots.MISSING, file=sys.stderr)
            break
    if options.out.is_dir() or options.out.suffix != ".md":
        raise KVQuantError(f"--out {options.out}: with --report, the page to write, such as docs/accuracy.md.")
    text = report.page(options.report, options.out)
    write_whole(options.out, lambda file: file.write(text))
    print(f"written: {options.out}", file=sys.stderr)
    if options.json:
        print(json.dumps({"page": str(options.out)}))
    return 0
