"""The ``kvq`` command: rotations of a model, made and converted, and a check of the environment."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.typer_command import register as register_eval

app = typer.Typer(
    help="Tools around --kv-quant, SGLang's 2-bit KV cache.", no_args_is_help=True, pretty_exceptions_enable=False
)
console = Console(stderr=True, highlight=False)


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
    text: Annotated[Path, typer.Option(help="Text file to calibrate on; not the one you evaluate on.")],
    output: Annotated[Path, typer.Option(help="Folder to write; pass it to --kv-quant-rotations.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 32768,
    context: Annotated[int, typer.Option(help="Tokens per context; best as long as what you serve.")] = 4096,
    granularity: Annotated[str, typer.Option(help="per-head or per-layer.")] = "per-head",
    composition: Annotated[str, typer.Option(help="offset, or oscar for the paper's order.")] = "offset",
    text_share: Annotated[float, typer.Option(help="Use only the first part of the text, 1 for all.")] = 1.0,
    base_model: Annotated[Optional[str], typer.Option(help="Name to record, if MODEL is a local folder.")] = None,
    revision: Annotated[Optional[str], typer.Option(help="Revision of the model on the hub.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto (all GPUs, needs accelerate).")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32; on a CPU float32 unless given.")] = "",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output folder.")] = False,
) -> None:
    """Calibrate rotations and clip ratios on a model and a text."""
    from sglang_kvq.rotations.calibrate import CalibrationSettings
    from sglang_kvq.rotations.models import calibrate_to_folder

    settings = CalibrationSettings(tokens=tokens, context=context, granularity=granularity, composition=composition)
    with console.status("loading") as status:
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
            overwrite=overwrite,
            progress=lambda name, done: status.update(f"{name} {done:.0%}"),
        )
    meta = rotations.meta
    console.print(
        f"{output}: {rotations.granularity} rotations, clip K {meta.clip_k} V {meta.clip_v}, {meta.tokens} tokens"
    )
    console.print(f"serve with: --kv-quant oscar --kv-quant-rotations {output}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder in either layout, or hub id org/name/folder.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[Layout, typer.Option(help="Layout to write.")] = Layout.safetensors,
    kv_heads: Annotated[Optional[int], typer.Option(help="KV heads of the model, if the source does not say.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output folder.")] = False,
) -> None:
    """Convert rotations between our layout and the published .pt one."""
    from sglang_kvq.rotations.files import convert_rotations

    convert_rotations(source, output, to=to.value, kv_heads=kv_heads, overwrite=overwrite)
    console.print(f"{output}: written")


@app.command()
def doctor() -> None:
    """Check that --kv-quant can work in this environment; exit status 1 if not."""
    from sglang_kvq.sglang.doctor import report

    raise typer.Exit(report())


register_eval(app)


def main() -> None:
    """Entry point: a ``KVQuantError`` is one line and exit status 1, not a traceback."""
    try:
        app()
    except KVQuantError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
