"""The command ``kvq plan``: parses its options and prints the plan as text or JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from sglang_kvq.errors import KVQuantError

if TYPE_CHECKING:
    from sglang_kvq.planning.plan import Planner, Row

#: Columns that no table needs.
_WIDEST = 1000
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command("plan")(plan)


def plan(
    model: Annotated[str, typer.Argument(help="Hub id, or folder with a config.json; no weights are read.")],
    gpu: Annotated[str, typer.Option(help="h100, h200 or another known name, or GIB:TB/S, such as 80:3.35.")],
    count: Annotated[int | None, typer.Option(help="GPUs in all; default --tp.")] = None,
    tp: Annotated[int, typer.Option(help="GPUs that hold one copy of the model.")] = 1,
    context: Annotated[str | None, typer.Option(help="Wanted load: tokens of a request, such as 32K.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Wanted load: requests at once.")] = None,
    mem_fraction_static: Annotated[float, typer.Option(help="The server's flag.")] = 0.85,
    weights: Annotated[float | None, typer.Option(help="GiB of the weights, if their size is not known.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the code of the model's config.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout instead of text.")] = False,
) -> None:
    """Show what fits on given GPUs, and which method serves a wanted load; needs no GPU.

    Exit status 1 if no method fits, or none serves the load.
    """
    from sglang_kvq.planning import plan as planning
    from sglang_kvq.planning.gpus import GIB, find_gpu
    from sglang_kvq.planning.weights import Weights, find_weights
    from sglang_kvq.sglang.doctor import model as doctor_model

    place = planning.Place(find_gpu(gpu), tp if count is None else count, tp, mem_fraction_static)
    if (context is None) != (concurrency is None):
        named = f"--context {context}" if concurrency is None else f"--concurrency {concurrency}"
        missing = "--concurrency" if concurrency is None else "--context"
        raise KVQuantError(f"{named}: a load needs both. Add {missing}.")
    tokens = None if context is None else parse_tokens("--context", context)
    if concurrency is not None and concurrency < 1:
        raise KVQuantError(f"--concurrency {concurrency}: must be at least 1.")
    if weights is not None and not 0 < weights < 1 << 20:
        raise KVQuantError(f"--weights {weights:g}: must be the GiB of the model's weights, above 0.")
    config = doctor_model.config_of("hadamard", None, None)
    request = doctor_model.Request(model, config, None, tp, trust_remote_code, flag="")
    read, flags = doctor_model.read_config(request)
    doctor_model.check_served(read, request.config, tp)
    if tokens is not None and tokens > read.context_len:
        raise KVQuantError(
            f"--context {context}: {model} supports at most {read.context_len:,} tokens. Choose "
            f"{read.context_len:,} or less."
        )
    if weights is None:
        found = find_weights(model, read.hf_config, trust_remote_code=trust_remote_code)
    else:
        found = Weights(int(weights * GIB), 0, 0, "--weights")
    wish = None if tokens is None or concurrency is None else planning.Wish(tokens, concurrency)
    planner = planning.Planner(model, read, found, place, wish, trust_remote_code)
    methods, best = list(planner.method_rows()), planner.best() if wish else None
    rows = [*planner.plain_rows(), *methods]
    if as_json:
        typer.echo(json.dumps(_to_json(planner, rows, best, flags), indent=2))
    else:
        _show(planner, rows, best, flags)
    raise typer.Exit(int(best is None if wish else all(row.error for row in methods)))


def parse_tokens(flag: str, text: str) -> int:
    """Parses a number of tokens: ``32768``, ``32K``, ``1M``.

    Raises:
        KVQuantError: ``text`` is not such a number, or is 0.
    """
    match = re.fullmatch(r"(\d{1,12})([KM]?)", text.upper())
    tokens = int(match[1]) * _UNITS[match[2]] if match else 0
    if not tokens:
        raise KVQuantError(f"{flag} {text}: must be a number of tokens, at least 1, such as 32K or 32768.")
    return tokens


def short(tokens: int) -> str:
    """Formats a number of tokens, as ``32K`` if it is a multiple of 1024."""
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else f"{tokens:,}"


def serving(planner: Planner, row: Row, flags: list[str]) -> list[str]:
    """Returns the command that serves with a row's settings, after ``kvq calibrate`` if no rotations are known."""
    place, commands = planner.place, []
    words = ["python", "-m", "sglang.launch_server", "--model-path", planner.path, *flags, "--kv-quant", row.name]
    if row.setting is not None:
        words += ["--kv-quant-bits", row.setting]
    if row.rotations == "":
        commands.append(planner.calibrate_command(row.name))
        words += ["--kv-quant-rotations", "rotations"]
    if row.budget is not None:
        words += ["--kv-quant-bf16-budget", f"{row.budget:g}"]
    words += ["--mem-fraction-static", f"{place.fraction:g}"]
    if planner.wish is not None and row.requests is not None and planner.wish.concurrency > row.requests:
        words += ["--max-running-requests", str(place.of_a_copy(planner.wish.concurrency))]
    words += [w for name, n in (("--tp", place.tp), ("--dp", place.copies)) if n > 1 for w in (name, str(n))]
    return [*commands, shlex.join(words)]


def _to_json(planner: Planner, rows: list[Row], best: Row | None, flags: list[str]) -> dict[str, Any]:
    return {
        "model": planner.path,
        **asdict(planner.place),
        "weights": asdict(planner.weights),
        "cache_bytes": planner.memory,
        "wish": planner.wish and asdict(planner.wish),
        "rows": [asdict(row) for row in rows],
        "best": best and {**asdict(best), "commands": serving(planner, best, flags)},
    }


def _show(planner: Planner, rows: list[Row], best: Row | None, flags: list[str]) -> None:
    place, gib = planner.place, 1 << 30
    copies = f", {place.copies} copies on {place.count} GPUs" if place.copies > 1 else ""
    typer.echo(
        f"{planner.path} on {place.tp} x {place.gpu.name}{copies}: of each GPU's {place.gpu.memory / gib:.1f} GiB, "
        f"--mem-fraction-static {place.fraction:g} gives {planner.weights.total / place.tp / gib:.1f} to the weights "
        f"({planner.weights.source}) and {planner.memory / gib:.1f} to the cache"
    )
    table = _table(planner, rows)
    # In fewer columns than the table needs, rich would cut names of methods off.
    Console(emoji=False, width=Console(width=_WIDEST).measure(table).maximum).print(table)
    for why in dict.fromkeys(row.error for row in rows if row.error):
        typer.echo(f"{', '.join(row.name for row in rows if row.error == why)}: {why}")
    for line in _advice(planner, best, flags):
        typer.echo(line)


def _table(planner: Planner, rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    wish = planner.wish
    columns = ["bits", "tokens", *(f"at {short(context)}" for context in planner.contexts)]
    columns += [f"{wish.concurrency} x {short(wish.context)}", "step, ms"] if wish else []
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row.bits:.2f}", f"{row.tokens:,}", *(f"{n:,}" for n in row.at.values())]
        if wish:
            budget = "yes" if row.budget is None else f"budget {row.budget:g}"
            cells += [budget if row.serves else "no", "" if row.step_ms is None else f"> {row.step_ms:.1f}"]
        table.add_row(row.name, *cells)
    return table


def _advice(planner: Planner, best: Row | None, flags: list[str]) -> Iterator[str]:
    """Yields lines that explain the columns and name the method and the command that serve the wish."""
    yield "bits: per element of the history; transform's have 0.03 for first tokens in BF16 beside --kv-quant-bits."
    yield "at: requests of that many tokens that fit at once."
    wish = planner.wish
    if wish is None:
        yield "--context and --concurrency also show which method serves that load, and its command."
        return
    yield "step: a decode step takes longer than reading weights and cache once, at the data sheet's bandwidth."
    name = f"{wish.concurrency} requests of {short(wish.context)} tokens"
    if best is None:
        yield f"No method serves {name}. Add GPUs (--count), or lower --context or --concurrency."
        return
    budget = "" if best.budget is None else f", --kv-quant-bf16-budget {best.budget:g}"
    yield f"To serve {name}: {best.name} at {best.bits:.2f}{budget}:"
    for command in serving(planner, best, flags):
        yield f"  {command}"
