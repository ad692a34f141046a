"""The ``kvq`` command: calibrates, converts, shows and shares rotations; evaluates methods; checks the environment.

Results go to stdout as text, as a table, or with ``--json`` as one JSON value. Everything else goes to stderr.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_kvq import __version__
from sglang_kvq.arguments import check_device, check_dtype, check_least, check_new
from sglang_kvq.errors import KVQuantError, unknown
from sglang_kvq.evaluation.command import EPILOG, Words, evaluate
from sglang_kvq.interruption import exit_status, terminable
from sglang_kvq.phases import Phases
from sglang_kvq.planning.command import register as register_plan

app = typer.Typer(
    help="Tools around --kv-quant, SGLang's 2-bit KV cache.", no_args_is_help=True, pretty_exceptions_enable=False
)
console = Console(stderr=True, highlight=False, emoji=False)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on stdout instead of text.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show long texts in full and explain columns.")]


#: Errors of a write to an open file, which do not name the file.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Layout(str, Enum):
    """Rotation folder layouts."""

    safetensors = "safetensors"
    pt = "pt"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def kvq(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id or folder of the model.")],
    text: Annotated[list[Path], typer.Option(help="Text file, or folder of text files, to calibrate on; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder to write; pass it to --kv-quant-rotations.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 32768,
    context: Annotated[int, typer.Option(help="Tokens per context; the longer, the more history is measured.")] = 2048,
    positions: Annotated[
        int, typer.Option(help="Spread contexts over this many positions; 0: the model's own, up to 32768.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed that draws the contexts; 0 spreads them evenly.")] = 0,
    granularity: Annotated[str, typer.Option(help="per-head or per-layer.")] = "per-head",
    composition: Annotated[
        str, typer.Option(help="balanced, offset, or oscar for the paper's order; transform for --kv-quant transform.")
    ] = "balanced",
    clips: Annotated[str, typer.Option(help="Clip ratios: per-layer, or global.")] = "per-layer",
    sensitivity: Annotated[bool, typer.Option(help="Measure each layer's sensitivity (needs gradients).")] = True,
    recommend: Annotated[
        bool, typer.Option(help="With --composition transform, measure budgets of bits and recommend one.")
    ] = True,
    held_out_contexts: Annotated[int, typer.Option(help="Contexts to measure budgets on, from the unused text.")] = 2,
    held_out_length: Annotated[int, typer.Option(help="Tokens of each such context.")] = 1024,
    text_share: Annotated[float, typer.Option(help="Use only the first part of the text, 1 for all.")] = 1.0,
    base_model: Annotated[str | None, typer.Option(help="Name to record, if MODEL is a local folder.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the model on the hub.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:N, cpu or auto (all GPUs, needs accelerate).")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32; on a CPU float32 unless given.")] = "",
    trust_remote_code: Annotated[bool, typer.Option(help="Run the code that comes with the model.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output folder.")] = False,
    restart: Annotated[bool, typer.Option(help="Discard an interrupted run instead of continuing it.")] = False,
    engine: Annotated[
        str, typer.Option(help="transformers, or sglang for models that need several GPUs.")
    ] = "transformers",
    tp: Annotated[int, typer.Option(help="Tensor parallelism of --engine sglang.")] = 1,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for sglang.Engine; VALUE may be JSON. Repeatable.")
    ] = None,
    timings: Annotated[bool, typer.Option(help="Show at the end the time that each phase took.")] = False,
    push: Annotated[str | None, typer.Option(help="Then upload to the hub: ORG/REPO or ORG/REPO/FOLDER.")] = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate rotations and clip ratios on a model and a text. If interrupted, the same command continues."""
    phases = Phases(console, timings=timings)
    phases("importing", 0, 1)
    from sglang_kvq.rotations.calibration.settings import CalibrationSettings
    from sglang_kvq.rotations.calibration.to_folder import calibrate_to_folder, partial_folder
    from sglang_kvq.rotations.inspection.budgets import HeldOut, held_out_starts, measure_held_out
    from sglang_kvq.rotations.inspection.recommend import MODULE as RECOMMEND_MODULE
    from sglang_kvq.rotations.inspection.recommend import divergence_table, recommendation
    from sglang_kvq.rotations.storage.card import describe_clips, describe_gains, model_card, served_by
    from sglang_kvq.rotations.storage.hub import check_push
    from sglang_kvq.rotations.storage.hub import push as upload

    check_device(device)
    check_dtype(dtype)
    check_least("--seed", seed, 0, 2**63 - 1)
    check_least("--positions", positions, 0)
    settings = CalibrationSettings(
        tokens=tokens,
        context=context,
        positions=positions,
        seed=seed,
        granularity=granularity,
        composition=composition,
        clips=clips,
        sensitivity_contexts=CalibrationSettings.sensitivity_contexts if sensitivity else 0,
    )
    held_out = HeldOut(held_out_contexts, held_out_length)
    on_engine = _engine(engine, tp, engine_arg or [], trust_remote_code=trust_remote_code, revision=revision)
    check_new("--output", output, folder=True)
    if push:
        check_push(push, flag="--push ")
    recommend = recommend and composition == "transform"
    made = divergence = None
    try:
        with terminable(), phases:
            made = calibrate_to_folder(
                model,
                text,
                output,
                settings,
                text_share=text_share,
                base_model=base_model,
                revision=revision,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                overwrite=overwrite,
                restart=restart,
                engine=on_engine,
                progress=phases,
                check=(lambda ids: held_out_starts(len(ids), settings, held_out)) if recommend else None,
            )
            rotations = made.rotations
            if recommend:
                divergence = measure_held_out(made.model, made.ids, rotations, output, settings, held_out, phases)
    except KeyboardInterrupt as error:
        kept = partial_folder(output)
        if made:
            went = f"{output} is written, with no recommended budget; python -m {RECOMMEND_MODULE} measures it"
        elif kept.exists():
            went = f"{output} was not written; partial results are in {kept}, and the same command continues from there"
        else:
            went = f"{output} was not written, and nothing was kept; the same command begins again"
        _say(f"interrupted; {went}.", style="yellow")
        raise typer.Exit(exit_status(error)) from None
    meta, address = rotations.meta, None
    if push:
        address = upload(output, push, model_card(rotations, meta.model["num_key_value_heads"], push))
    if as_json:
        _show_json(
            {
                "output": str(output),
                "method": served_by(rotations),
                "granularity": rotations.granularity,
                "clip_k": meta.clip_k,
                "clip_v": meta.clip_v,
                "tokens": meta.tokens,
                "divergence": divergence and divergence.to_json(),
                "uploaded": address,
                "timings": phases.timings() if timings else None,
            }
        )
        return
    measured = f"clip K {describe_clips(meta.clip_k)}, V {describe_clips(meta.clip_v)}"
    if rotations.is_transform:
        measured = f"coding gain {describe_gains(rotations)}"
    _say(f"{output}: {rotations.granularity} rotations, {measured}, {meta.tokens} tokens")
    bits = ""
    if divergence:
        Console(emoji=False).print(divergence_table(divergence))
        _say(recommendation(divergence))
        bits = f" --kv-quant-bits {divergence.recommended:g}" if divergence.recommended else ""
    _say(f"serve with: --kv-quant {served_by(rotations)} --kv-quant-rotations {output}{bits}")
    if address:
        _say(f"uploaded to {address}")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Rotation folder, as `kvq calibrate` writes it.")],
    target: Annotated[str, typer.Argument(help="ORG/REPO or ORG/REPO/FOLDER on the hub.")],
    as_json: AsJson = False,
) -> None:
    """Upload a rotation folder with a model card to the Hugging Face hub."""
    from sglang_kvq.rotations.storage.card import model_card
    from sglang_kvq.rotations.storage.files import read_local
    from sglang_kvq.rotations.storage.hub import check_push
    from sglang_kvq.rotations.storage.hub import push as upload

    rotations, kv_heads = read_local(folder)
    check_push(target)
    address = upload(folder, target, model_card(rotations, kv_heads, target))
    if as_json:
        _show_json({"uploaded": address})
    else:
        _say(f"uploaded to {address}")


@app.command()
def zoo(verbose: Verbose = False, as_json: AsJson = False) -> None:
    """List the models with known rotations, and where these come from."""
    from sglang_kvq.rotations.inspection.zoo_table import known_rotations, zoo_details, zoo_table

    entries = known_rotations()
    if as_json:
        _show_json([entry.to_json() for entry in entries])
    elif verbose:
        for line in zoo_details(entries):
            typer.echo(line)
    else:
        Console(emoji=False).print(zoo_table(entries))


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(help="Rotation folder in either layout, or hub id org/name/folder.")],
    model: Annotated[str | None, typer.Option(help="Measure errors on this model: hub id or folder.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text to measure on; not the calibration text.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write; needs matplotlib.")] = None,
    methods: Annotated[str, typer.Option(help="Methods to compare, with commas; empty for all.")] = "",
    contexts: Annotated[int, typer.Option(help="Contexts of the text to measure on.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens per context.")] = 2048,
    device: Annotated[str, typer.Option(help="cuda, cuda:N, cpu or auto.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "",
    trust_remote_code: Annotated[bool, typer.Option(help="Run the code that comes with the model.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show rotations: their origin, clips and sensitivities per layer; with --model the error of each method."""
    from sglang_kvq.rotations.inspection import plot as drawing
    from sglang_kvq.rotations.inspection import tables
    from sglang_kvq.rotations.inspection.layer_errors import measure
    from sglang_kvq.rotations.storage.files import read_rotations

    check_device(device)
    check_dtype(dtype)
    chosen = _methods(methods)
    if plot:
        drawing.need_matplotlib()
        drawing.check_name(plot)
        check_new("--plot", plot)
    for flag, value in (("--text", text and text[0]), ("--methods", methods)):
        if value and not model:
            raise KVQuantError(f"{flag} {value}: needs --model. Add --model MODEL to measure errors, or leave it out.")
    rotations, kv_heads = read_rotations(folder)
    measured = None
    if model:
        if not text:
            raise KVQuantError(f"--model {model}: needs a text to measure errors on. Pass --text FILE.")
        with Phases(console) as phases:
            measured = measure(
                model,
                text,
                rotations,
                chosen,
                contexts=contexts,
                length=length,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                progress=phases,
            )
    if as_json:
        _show_json(tables.to_json(rotations, kv_heads, measured))
    else:
        terminal = Console(emoji=False)
        for part in tables.report(rotations, kv_heads, measured, width=terminal.width, verbose=verbose):
            terminal.print(part)
            terminal.print()
    if plot:
        drawing.draw(rotations, measured, plot)
        _say(f"{plot}: written")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder in either layout, or hub id org/name/folder.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[Layout, typer.Option(help="Layout to write.")] = Layout.safetensors,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model, if the source does not say.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert rotations between our layout and the published .pt one."""
    from sglang_kvq.rotations.storage.files import convert_rotations

    if kv_heads is not None:
        check_least("--kv-heads", kv_heads, 1)
    convert_rotations(source, output, to=to.value, kv_heads=kv_heads, overwrite=overwrite)
    if as_json:
        _show_json({"output": str(output), "layout": to.value})
    else:
        _say(f"{output}: written")


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Check this model instead, from its config alone: hub id or folder.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="With --model: the --kv-quant to answer for; default oscar.")
    ] = None,
    bits: Annotated[str | None, typer.Option(help="With --model: its --kv-quant-bits.")] = None,
    rotations: Annotated[str | None, typer.Option(help="With --model: its --kv-quant-rotations.")] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            help="With --model: GiB of each GPU for the KV cache, sliding windows and recurrent states; default: this "
            "GPU's."
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="With --model: GPUs that share the heads; default 1.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="With --model: run the code of its config.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that --kv-quant can work in this environment, or that it serves a model; exit status 1 if not."""
    if model is None:
        from sglang_kvq.sglang.doctor.report import report

        given = {"--method": method, "--bits": bits, "--rotations": rotations, "--memory": memory, "--tp": tp}
        for flag, value in {**given, "--trust-remote-code": trust_remote_code or None}.items():
            if value is not None:
                named = flag if value is True else f"{flag} {value}"
                raise KVQuantError(f"{named}: needs --model. Add --model MODEL, or leave it out.")
        raise typer.Exit(report(as_json=as_json))
    from sglang_kvq.sglang.doctor import model as doctor_model

    request = doctor_model.Request(
        model,
        doctor_model.config_of("oscar" if method is None else method, bits, rotations),
        memory,
        1 if tp is None else tp,
        trust_remote_code,
    )
    raise typer.Exit(doctor_model.report(request, as_json=as_json))


register_plan(app)
app.command("eval", cls=Words, epilog=EPILOG)(evaluate)


def _say(text: str, style: str = "") -> None:
    """Prints a line on stderr unchanged: no markup in paths, no wrapping."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def _show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _methods(names: str) -> list[str]:
    """Parses a list of methods with commas, each ``NAME`` or ``NAME:BITS``."""
    from sglang_kvq.methods import METHOD_NAMES, get_method

    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        method, _, bits = name.partition(":")
        if method not in METHOD_NAMES:
            raise unknown("--methods", name, METHOD_NAMES)
        try:
            get_method(method).width(bits or None)
        except KVQuantError as error:
            raise KVQuantError(f"--methods {name}: {error}") from None
    return found


def _engine(name: str, tp: int, arguments: list[str], **model: Any) -> Callable[..., Any] | None:
    """Returns the function that calibrates on ``sglang.Engine``, or None for transformers.

    model: keywords of ``sglang.Engine`` for loading the model.
    """
    if name not in ("transformers", "sglang"):
        raise unknown("--engine", name, ("transformers", "sglang"))
    check_least("--tp", tp, 1)
    if name == "transformers":
        if tp != 1 or arguments:
            given = [f"--tp {tp}"] if tp != 1 else [f"--engine-arg {argument}" for argument in arguments]
            raise KVQuantError(
                f"{given[0]}: --tp and --engine-arg belong to --engine sglang. Add it, or use --device auto."
            )
        return None
    keywords: dict[str, Any] = {key: value for key, value in model.items() if value} | {"tp_size": tp}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key.isidentifier():
            raise KVQuantError(f"--engine-arg {argument}: must be KEY=VALUE with a keyword of sglang.Engine.")
        try:
            keywords[key] = json.loads(value)
        except ValueError:  # a plain word
            keywords[key] = value
    from sglang_kvq.sglang.calibration.calibrate_engine import calibrate_on_engine

    return partial(calibrate_on_engine, **keywords)


def main() -> None:
    """Runs the command line and exits; a user's mistake prints one line on stderr instead of a traceback."""
    sys.exit(_run(sys.argv[1:]))


def _run(words: Sequence[str]) -> int:
    """Runs a command and returns its exit status: 1 for a value that cannot be used, 2 for an invalid command line."""
    try:
        _check_working_folder()
        status = app(args=list(words), prog_name="kvq", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here and not at exit, where Python would print a traceback
        return status
    except KVQuantError as error:
        status, problem = 1, str(error)
    except OSError as error:
        status = 1
        if error.filename is not None:
            problem = f"{error.filename}: {error.strerror}. Check the path and its permissions."
        elif error.errno in _CANNOT_WRITE:
            _drop_output()
            if error.errno == errno.EPIPE:  # the reader, such as `head`, has enough
                return status
            problem = f"cannot write: {error.strerror}. Free some space, or write to another place."
        else:
            raise
    except Exception as error:  # errors of click, or of typer's copy of click, which have no common base class
        if not hasattr(error, "format_message"):
            raise
        status, problem = int(getattr(error, "exit_code", 2)), _described(error, words)
        if "NoArgs" in type(error).__name__:  # the message of this error is the help
            print(error.format_message(), file=sys.stderr)
            return status
    _say(f"error: {problem}", style="red")
    return status


def _check_working_folder() -> None:
    """Refuses a deleted working folder, in which libraries of PyTorch abort with an error that names another cause."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise KVQuantError("the working folder was deleted. Change to a folder that exists.") from None


def _drop_output() -> None:
    """Sends what stdout still holds to /dev/null, so that Python does not try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _described(error: Any, words: Sequence[str]) -> str:
    """Returns click's message on one line as ``flag value: problem``, followed by the command that shows help."""
    message = " ".join(error.format_message().split())
    names = list(getattr(getattr(error, "param", None), "opts", ()))
    value = _value_of(names, words)
    if value is not None and message.startswith("Invalid value for"):
        message = f"{names[-1]} {value}: {' '.join(str(error.message).split())}"
    context = getattr(error, "ctx", None)
    message = message.rstrip(".")
    return f"{message}{'' if message.endswith('?') else '.'} See `{context.command_path if context else 'kvq'} --help`."


def _value_of(names: Sequence[str], words: Sequence[str]) -> str | None:
    """Returns the value of the last of these options on the command line; None if there is none."""
    parts = [(*word.partition("="), following) for word, following in zip(words, [*words[1:], ""])]
    found = [value if equals else following for name, equals, value, following in parts if name in names]
    return found[-1] if found else None


if __name__ == "__main__":
    main()
