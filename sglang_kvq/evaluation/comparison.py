"""Runs ``kvq eval`` with its options: measures on servers, or writes a map or a page from results."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_kvq.arguments import check_least, check_new, find_model
from sglang_kvq.errors import KVQuantError, unknown
from sglang_kvq.evaluation import provenance
from sglang_kvq.evaluation.client import Client, RequestRefused, ServerFacts
from sglang_kvq.evaluation.files import read, write_json, write_whole
from sglang_kvq.evaluation.material import Material
from sglang_kvq.evaluation.progress import Display
from sglang_kvq.evaluation.report import plots
from sglang_kvq.evaluation.report.page import page, section
from sglang_kvq.evaluation.report.results import collect, collect_map, write
from sglang_kvq.evaluation.report.rows import is_map
from sglang_kvq.evaluation.runner import Runner, server_identity, server_record, whole_identity
from sglang_kvq.evaluation.servers import PYTHON, Launch
from sglang_kvq.evaluation.specs import (
    CHUNK,
    CHUNK_FLAG,
    REFERENCE,
    MethodSpec,
    chunk_size,
    in_chunks,
    parse,
    parse_list,
)
from sglang_kvq.evaluation.store import Store, common_settings
from sglang_kvq.evaluation.tasks import KINDS, TASK_NAMES
from sglang_kvq.evaluation.tasks.base import Bench, ReferenceTask, Task
from sglang_kvq.evaluation.tasks.gsm8k import GSM8KTask
from sglang_kvq.evaluation.tasks.humaneval import HumanEvalTask
from sglang_kvq.evaluation.tasks.kl import KLTask
from sglang_kvq.evaluation.tasks.mathematics import MathTask
from sglang_kvq.evaluation.tasks.needle import NeedleTask
from sglang_kvq.evaluation.tasks.retrieval import RetrievalTask

#: Options that apply only to servers that ``--model`` starts, and those that apply only to ``--server``.
OF_MODEL = ("--methods", "--gpus", "--parallel", CHUNK_FLAG, "--server-command", "--plain-flags", "--start-timeout")
OF_SERVER = ("--reference-server", "--name")
#: Least values of numeric options that no task checks before it runs.
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
    "math-problems": 0,
    "math-max-tokens": 1,
}


def run(options: SimpleNamespace, words: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if a method or task gave no value.

    Args:
        words: the command line after ``kvq eval``; flags of servers follow ``--``.

    Raises:
        KVQuantError: settings, files or servers cannot be used.
    """
    flags = list(words[words.index("--") + 1 :]) if "--" in words else []
    actions = [f"--{name}" for name in ("server", "model", "map", "report") if getattr(options, name)]
    if len(actions) != 1:
        raise KVQuantError(
            "give one of --server URL, --model PATH, --map SOURCE... or --report FILE..."
            + (f", not {' and '.join(actions)} together." if actions else ".")
        )
    command = ["kvq", "eval", *words]
    if options.report:
        return write_page(options)
    if options.map:
        return write_map(options, command)
    if flags and not options.model:
        raise KVQuantError(
            f"{' '.join(flags)}: flags after -- apply only to servers that --model starts. Leave them out."
        )
    for name, least in LEAST.items():
        check_least(f"--{name}", getattr(options, name.replace("-", "_")), least)
    check_new("--out", options.out, folder=True)
    given = {word.partition("=")[0] for word in words[: len(words) - len(flags)]}
    others, place = (OF_MODEL, "servers that --model starts") if options.server else (OF_SERVER, "--server")
    for flag in others:
        if flag in given:
            value = getattr(options, flag[2:].replace("-", "_"))
            raise KVQuantError(f"{flag} {value}: applies only to {place}. Leave it out.")
    model, failures = measure(options, tasks_of(options), flags, shlex.join(map(provenance.without_paths, command)))
    content = collect(Store(options.out), model, command)
    path = write(options.out, content)
    print((path if options.json else path.with_suffix(".md")).read_text())
    _draw(content, path, path.with_suffix(".md"))
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def tasks_of(options: SimpleNamespace) -> list[Task]:
    """Returns the requested tasks, in the order of ``TASK_NAMES``.

    Raises:
        KVQuantError: a task is unknown, or a setting is wrong or missing.
    """
    names = options.tasks.split(",")
    if wrong := set(names) - set(TASK_NAMES):
        raise unknown("--tasks", sorted(wrong)[0], TASK_NAMES)
    return [_task(name, options) for name in TASK_NAMES if name in names]


def _task(name: str, given: SimpleNamespace) -> Task:
    if name == "kl":
        contexts = tuple(_context(word, given.kl_contexts) for word in given.kl_lengths.split(","))
        _check_once("--kl-lengths", given.kl_lengths, [length for length, _ in contexts])
        return KLTask(tuple(given.text), given.text_skip, contexts, given.kl_first, given.kl_top)
    if name == "needle":
        filler = given.needle_text or next(iter(given.text), None)
        return NeedleTask(
            _file(filler, "the needle task needs filler text: --text FILE or --needle-text FILE."),
            0.0 if given.needle_text else given.text_skip,
            _numbers("--needle-lengths", given.needle_lengths),
            _numbers("--needle-depths", given.needle_depths),
            given.needle_trials,
            given.style,
            given.needle_seed,
        )
    if name in KINDS:
        lengths = _numbers("--retrieval-lengths", given.retrieval_lengths)
        return RetrievalTask(name, lengths, given.retrieval_cases, given.style, given.retrieval_seed)
    if name == "humaneval":
        return HumanEvalTask(
            _file(given.humaneval, "the humaneval task needs its problems: --humaneval HumanEval.jsonl.gz."),
            given.humaneval_problems,
            given.style,
            given.humaneval_max_tokens,
            allow_unsandboxed=given.allow_unsandboxed,
        )
    if name == "math":
        return MathTask(given.math, given.math_problems, given.math_seed, given.style, given.math_max_tokens)
    return GSM8KTask(
        _file(given.gsm8k, "the gsm8k task needs its problems: --gsm8k test.jsonl."),
        given.gsm8k_train,
        given.gsm8k_shots,
        given.gsm8k_problems,
        given.style,
        given.gsm8k_max_tokens,
    )


def _context(word: str, usual: int) -> tuple[int, int]:
    """Parses ``N`` or ``NxCOUNT``: tokens, and the number of contexts."""
    length, times, count = word.partition("x")
    try:
        return int(length), int(count) if times else usual
    except ValueError:
        raise KVQuantError(f"--kl-lengths {word}: must be N or NxCOUNT, whole numbers, separated by commas.") from None


def _numbers(flag: str, words: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, words.split(",")))
    except ValueError:
        raise KVQuantError(f"{flag} {words!r}: must be whole numbers, separated by commas.") from None
    _check_once(flag, words, found)
    return found


def _check_once(flag: str, words: str, values: Sequence[object]) -> None:
    """Refuses a value that is given twice: equal samples would count as independent ones."""
    for value in values:
        if values.count(value) > 1:
            raise KVQuantError(f"{flag} {words}: {value} twice. Give it once.")


def _file(path: Path | None, otherwise: str) -> Path:
    """Returns ``path``, a file that a task requires; if it is None, raises an error with the text ``otherwise``."""
    if path is None:
        raise KVQuantError(otherwise)
    return path


def measure(options: SimpleNamespace, tasks: list[Task], flags: list[str], command: str) -> tuple[str, list[str]]:
    """Measures on the given server (``--server``), or on one that it starts for each method (``--model``).

    Returns:
        The model's name, and a line per method or task that gave no value.
    """
    if options.server:
        facts = _facts("--server", Client(options.server))
        identity = server_identity(facts, options.name)
        path, known_as = facts.model_path, facts.model_path
    else:
        specs, launch, path = specs_of(options, tasks, flags), launch_of(options, flags), options.model
        known_as = launch.known_as
    model = options.label or Path(path).name.lower() or "model"
    for task in tasks:
        task.identity()  # refuses files that cannot be read, before the folder exists
    if options.model and _is_here_or_on_the_hub(options):
        try:
            find_model(options.model)
        except KVQuantError as error:
            raise KVQuantError(f"--model {error}") from None
    store = Store(options.out, options.overwrite, command)
    material = Material(options.out / "material", known_as, options.tokenizer or None)
    with store.locked(), Display() as display:
        runner = Runner(
            tasks, store, material, display, concurrency=options.concurrency, timeout=options.request_timeout
        )
        try:
            if options.server:
                _check_model(options, store, facts)
                _measure_running(options, runner, identity, options.name or facts.method)
            else:
                runner.compare(specs, launch)
        except KeyboardInterrupt:
            display.say(f"interrupted; {options.out} has what was measured: the same command continues from there.")
            raise
    return model, runner.failures


def _is_here_or_on_the_hub(options: SimpleNamespace) -> bool:
    """Returns False if SGLang may find the model where ``find_model`` does not look."""
    elsewhere = "://" in options.model or os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("true", "1")
    in_container = shlex.split(options.server_command)[0] not in PYTHON
    return not (elsewhere or in_container or options.model.endswith(".gguf"))


def _facts(flag: str, client: Client) -> ServerFacts:
    """Returns a server's facts; refuses one that does not give them."""
    try:
        return client.facts
    except RequestRefused as error:
        fix = "Set OPENAI_API_KEY to its key" if error.status in (401, 403) else "Give a running SGLang server"
        raise KVQuantError(f"{flag} {client.url}: {error}. {fix}.") from None


def _check_model(options: SimpleNamespace, store: Store, facts: ServerFacts) -> None:
    """Refuses a running server of another model than those of the folder's results."""
    served = server_record(facts)["model_path"]
    for slug, files in store.methods().items():
        measured = files.get("server", {}).get("model_path", served)
        if measured != served:
            raise KVQuantError(
                f"--server {options.server}: serves {served}, but runs/{slug} was measured on {measured}. Give "
                "another --out."
            )


def _measure_running(options: SimpleNamespace, runner: Runner, identity: dict[str, Any], label: str) -> None:
    slug = MethodSpec(label, REFERENCE).slug
    whole = {task.name: whole_identity(identity, task) for task in runner.tasks}
    wanted = [task for task in runner.tasks if not runner.store.finished(slug, task.name, whole[task.name])]
    common_settings(runner.store.methods(), {(slug, name): one for name, one in whole.items()})
    for task in wanted:
        if options.reference_server and isinstance(task, ReferenceTask):
            reference = Client(options.reference_server, timeout=options.request_timeout)
            method = _facts("--reference-server", reference).method
            if method != REFERENCE:
                raise KVQuantError(f"--reference-server {options.reference_server} serves {method}, not BF16.")
            runner.record_reference(task, reference, Bench(runner.material, options.concurrency))
    runner.material.settle_reference()
    runner.measure(options.server, slug, label, identity, wanted, is_reference=label == REFERENCE)


def specs_of(options: SimpleNamespace, tasks: list[Task], flags: list[str]) -> list[MethodSpec]:
    """Returns ``--methods`` in each of the chunk sizes; adds BF16 first if a task needs it.

    Raises:
        KVQuantError: specs or chunk sizes are wrong, or no chunk size suits a task.
    """
    words = options.chunked_prefill_size.split(",")
    _check_once(CHUNK_FLAG, options.chunked_prefill_size, words)
    chunks = [chunk_size(word) for word in words]
    if any(flag.startswith(CHUNK_FLAG) for flag in flags) and chunks != [CHUNK]:
        raise KVQuantError(f"{CHUNK_FLAG} is before and after --. Give it once, before --.")
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


def launch_of(options: SimpleNamespace, flags: list[str]) -> Launch:
    """Returns the settings for starting servers.

    Raises:
        KVQuantError: a GPU is empty or repeated, a quote does not end, or the program does not exist.
    """
    gpus = tuple(options.gpus.split(",")) if options.gpus else ()
    if not all(gpus) or len(set(gpus)) < len(gpus):
        raise KVQuantError(f"--gpus {options.gpus}: must name each GPU once, such as 0,1,2,3.")
    words = {"--server-command": options.server_command, "--plain-flags": options.plain_flags}
    for flag, given in words.items():
        try:
            shlex.split(given)
        except ValueError as error:
            raise KVQuantError(f"{flag} {given}: {error}. Close every quote.") from None
    program = shlex.split(options.server_command)[:1]
    if not program or (program[0] not in PYTHON and shutil.which(program[0]) is None):
        raise KVQuantError(
            f"--server-command {options.server_command}: no such program. Check its name, or give its path."
        )
    return Launch(
        # A link keeps its name, by which published rotations are found.
        str(Path(options.model).absolute()) if Path(options.model).is_dir() else options.model,
        options.server_command,
        tuple(flags),
        tuple(shlex.split(options.plain_flags)),
        options.parallel,
        options.start_timeout,
        gpus,
    )


def write_map(options: SimpleNamespace, command: list[str]) -> int:
    """Runs ``--map``: writes the JSON file and, if matplotlib is installed, its plot; prints its table."""
    path = options.out
    model = path.stem.removeprefix("precise_")
    if path.is_dir() or path.suffix != ".json" or model in ("", path.stem):
        raise KVQuantError(f"--out {path}: with --map, the file to write: precise_MODEL.json.")
    content = collect_map(options.map, model, command)
    write_json(path, content)
    print(path.read_text() if options.json else section(content))
    _draw(content, path)
    return 0


def _draw(content: dict[str, Any], path: Path, *others: Path) -> None:
    """Draws a result file's plots if matplotlib is installed, and prints the paths of all files that were written."""
    drawn = plots.draw(content, path)
    for written in (path, *others, *(drawn or [])):
        print(f"written: {written}", file=sys.stderr)
    if drawn is None:
        print(plots.MISSING, file=sys.stderr)


def write_page(options: SimpleNamespace) -> int:
    """Runs ``--report``: draws plots next to the files if matplotlib is installed, then writes the page."""
    if options.out.is_dir() or options.out.suffix != ".md":
        raise KVQuantError(f"--out {options.out}: with --report, the page to write, such as docs/results/accuracy.md.")
    contents = {path: read(path) for path in options.report}
    mapped = [content.get("model") for content in contents.values() if is_map(content)]
    text = page(options.report, options.out)  # refuses other files before anything is drawn
    for path, content in contents.items():
        headed = not is_map(content) and content.get("model") in mapped
        if headed:  # the first report of a model shows the map's plot instead of its own
            mapped.remove(content.get("model"))
        if plots.draw(content, path, with_map=not headed) is None:
            print(plots.MISSING, file=sys.stderr)
            break
    else:
        text = page(options.report, options.out)  # with the plots
    write_whole(options.out, lambda file: file.write(text))
    print(f"written: {options.out}", file=sys.stderr)
    if options.json:
        print(json.dumps({"page": str(options.out)}))
    return 0
