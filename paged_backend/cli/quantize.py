"""``paged-backend quantize``: writes a checkpoint with quantized weights, without calibration."""

from __future__ import annotations

import argparse
from pathlib import Path

from paged_backend.cli.options import Subparsers

SCHEMES = ("w8a8", "w4a16", "fp8")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a checkpoint with quantized weights",
        description=f"{__doc__} The format is compressed-tensors', which vLLM also reads.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a Hugging Face id")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=SCHEMES,
        help="w8a8: int8 weights, and activations rounded to int8; w4a16: int4 weights in groups; "
        "fp8: float8 weights, and activations rounded to float8 where a GPU multiplies them",
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="DIR", help="a new folder"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=128,
        choices=(32, 64, 128),
        help="weights that share a scale in w4a16 (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint."""
    from paged_backend.tools.quantize import quantize_checkpoint, scheme_of

    quantize_checkpoint(args.model, args.output, scheme_of(args.scheme, args.group_size))
    print(f"wrote {args.output}")
    return 0
