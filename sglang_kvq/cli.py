"""The ``kvq`` command: a model's rotations made, converted, shown and shared; evaluation; a check of the environment.

Results go to stdout: a text or table, or with ``--json`` one JSON value. Everything else goes to stderr.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.typer_command import register as register_eval
from sglang_kvq.interruption import exit_status, terminable
from sglang_kvq.phases import Phases

app = typer.Typer(
    help="Tools around --kv-quant, SGLang's 2-bit KV cache.", no_args_is_help=True, pretty_exceptions_enable=False
)
console = Console(stderr=True, highlight=False)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on stdout instead of text.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Long texts whole, and what columns mean.")]


class Layout(str, Enum):
    """Rotation folder layouts."""

    safetensors = "safetensors"
    pt = "pt"


@app.callback()
def kvq() -> None:
    """Keeps subcommand names even while there is one command."""


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id or folder of the model.")],
    text: Annotated[list[Path], typer.Option(help="Text file, or folder of text files, to calibrate on; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder to write; pass it to --kv-quant-rotations.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 32768,
    context: Annotated[int, typer.Option(help="Tokens per context; the longer, the more history is measured.")] = 2048,
    positions: Annotated[
        int, typer.Option(help="Spread contexts over so many positions; 0: the model's own, to 32768.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Which contexts to draw; 0 spreads them evenly.")] = 0,
    granularity: Annotated[str, typer.Option(help="per-head or per-layer.")] = "per-head",
    composition: Annotated[
        str, typer.Option(help="balanced, offset, or oscar for the paper's order; transform for --kv-quant transform.")
    ] = "balanced",
    clips: Annotated[str, typer.Option(help="Clip ratios: per-layer, or global.")] = "per-layer",
    sensitivity: Annotated[bool, typer.Option(help="Measure each layer's sensitivity (needs gradients).")] = True,
    recommend: Annotated[
        bool, typer.Option(help="With --composition transform, measure budgets of bits and recommend one.")
    ] = True,
    held_out_contexts: Annotated[int, typer.Option(help="Contexts to measure budgets on, of those not drawn.")] = 2,
    held_out_length: Annotated[int, typer.Option(help="Tokens of each of them.")] = 1024,
    text_share: Annotated[float, typer.Option(help="Use only the first part of the text, 1 for all.")] = 1.0,
    base_model: Annotated[str | None, typer.Option(help="Name to record, if MODEL is a local folder.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the model on the hub.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto (all GPUs, needs accelerate).")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32; on a CPU float32 unless given.")] = "",
    trust_remote_code: Annotated[bool, typer.Option(help="Run the code that comes with the model.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output folder.")] = False,
    restart: Annotated[bool, typer.Option(help="Discard what an interrupted run left, do not continue it.")] = False,
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
    """Calibrate rotations and clip ratios on a model and a text. Interrupted, the same command continues."""
    phases = Phases(console, timings=timings)
    phases("importing", 0, 1)
    from sglang_kvq.rotations.calibration.settings import CalibrationSettings
    from sglang_kvq.rotations.calibration.to_folder import calibrate_to_folder, partial_folder
    from sglang_kvq.rotations.inspection.budget_tables import divergence_table, recommendation
    from sglang_kvq.rotations.inspection.budgets import MODULE as BUDGETS_MODULE
    from sglang_kvq.rotations.inspection.budgets import BudgetPass, HeldOut
    from sglang_kvq.rotations.storage.card import describe_clips, describe_gains, model_card, served_by
    from sglang_kvq.rotations.storage.hub import check_push
    from sglang_kvq.rotations.storage.hub import push as upload

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
    if push:
        check_push(push)
    budgets = None
    try:
        with terminable(), phases:
            if recommend and composition == "transform":
                budgets = BudgetPass(HeldOut(held_out_contexts, held_out_length), settings, phases)
            rotations = calibrate_to_folder(
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
                engine=_engine(engine, tp, engine_arg or []),
                progress=phases,
                last=budgets,
            )
    except KeyboardInterrupt as error:
        kept = partial_folder(output)
        if budgets and budgets.started:
            went = f"{output} is written, with no recommended budget; python -m {BUDGETS_MODULE} measures it"
        elif kept.exists():
            went = f"{output} was not written; what was done is in {kept}: the same command continues from there"
        else:
            went = f"{output} was not written; nothing kept: the same command begins again"
        _say(f"interrupted; {went}.", style="yellow")
        raise typer.Exit(exit_status(error)) from None
    meta, divergence = rotations.meta, budgets and budgets.found
    address = None
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
            }
        )
        return
    measured = f"clip K {describe_clips(meta.clip_k)}, V {describe_clips(meta.clip_v)}"
    if rotations.is_transform:
        measured = f"coding gain {describe_gains(rotations)}"
    _say(f"{output}: {rotations.granularity} rotations, {measured}, {meta.tokens} tokens")
    bits = ""
    if divergence:
        Console().print(divergence_table(divergence))
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
    """List the models whose rotations are known, and where these would come from."""
    from sglang_kvq.rotations.inspection.zoo_table import known_rotations, zoo_details, zoo_table

    entries = known_rotations()
    if as_json:
        _show_json([entry.to_json() for entry in entries])
    elif verbose:
        for line in zoo_details(entries):
            typer.echo(line)
    else:
        Console().print(zoo_table(entries))


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(help="Rotation folder in either layout, or hub id org/name/folder.")],
    model: Annotated[str | None, typer.Option(help="Measure errors on this model: hub id or folder.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text to measure on; not the one calibrated on.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write; needs matplotlib.")] = None,
    methods: Annotated[str, typer.Option(help="Methods to compare, with commas; empty for all.")] = "",
    contexts: Annotated[int, typer.Option(help="Contexts of the text to measure on.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens per context.")] = 2048,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "",
    trust_remote_code: Annotated[bool, typer.Option(help="Run the code that comes with the model.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show rotations: their origin, clips and sensitivities per layer; with --model the error of each method."""
    from sglang_kvq.rotations.inspection import plot as drawing
    from sglang_kvq.rotations.inspection import tables
    from sglang_kvq.rotations.inspection.layer_errors import measure
    from sglang_kvq.rotations.storage.files import read_rotations

    if plot:
        drawing.need_matplotlib()
    rotations, kv_heads = read_rotations(folder)
    measured = None
    if model:
        if not text:
            raise KVQuantError(f"--model {model}: errors are measured on a text: pass --text FILE.")
        with Phases(console) as phases:
            measured = measure(
                model,
                text,
                rotations,
                [m for m in methods.split(",") if m],
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
        terminal = Console()
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

    convert_rotations(source, output, to=to.value, kv_heads=kv_heads, overwrite=overwrite)
    if as_json:
        _show_json({"output": str(output), "layout": to.value})
    else:
        _say(f"{output}: written")


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Answer for this model instead, by its config alone: hub id or folder.")
    ] = None,
    method: Annotated[str, typer.Option(help="With --model: the --kv-quant to answer for.")] = "oscar",
    bits: Annotated[str | None, typer.Option(help="With --model: its --kv-quant-bits.")] = None,
    rotations: Annotated[str | None, typer.Option(help="With --model: its --kv-quant-rotations.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="With --model: GiB of each GPU for the KV cache; else this GPU's, about.")
    ] = None,
    tp: Annotated[int, typer.Option(help="With --model: GPUs that share the heads.")] = 1,
    trust_remote_code: Annotated[bool, typer.Option(help="With --model: run the code of its config.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that --kv-quant can work in this environment, or that it serves a model; exit status 1 if not."""
    if model is None:
        from sglang_kvq.sglang.doctor import report

        if memory is not None:
            raise KVQuantError(f"--memory {memory:g}: tokens are of a model; add --model MODEL.")
        raise typer.Exit(report(as_json=as_json))
    from sglang_kvq.config import KVQuantConfig
    from sglang_kvq.sglang import doctor_model

    config = KVQuantConfig(method, rotations=rotations, bits=bits)
    request = doctor_model.Request(model, config, memory, tp, trust_remote_code)
    raise typer.Exit(doctor_model.report(request, as_json=as_json))


register_eval(app)


def _say(text: str, style: str = "") -> None:
    """A line on stderr, as it is: no markup in paths, no wrapping."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def _show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _engine(name: str, tp: int, arguments: list[str]) -> dict[str, Any] | None:
    """Keywords of ``sglang.Engine``, or None for transformers."""
    if name not in ("transformers", "sglang"):
        raise KVQuantError(f"--engine {name}: unknown; choose transformers or sglang.")
    if name == "transformers":
        if tp != 1 or arguments:
            raise KVQuantError("--tp and --engine-arg belong to --engine sglang; add it, or use --device auto.")
        return None
    keywords: dict[str, Any] = {"tp_size": tp}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key.isidentifier():
            raise KVQuantError(f"--engine-arg {argument}: must be KEY=VALUE with a keyword of sglang.Engine.")
        try:
            keywords[key] = json.loads(value)
        except ValueError:  # a plain word
            keywords[key] = value
    return keywords


def main() -> None:
    """Entry point: a ``KVQuantError`` is one line and exit status 1, not a traceback."""
    try:
        app()
    except KVQuantError as error:
        _say(f"error: {error}", style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
