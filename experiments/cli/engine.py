"""Commands of the activation engine: ``capture``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from experiments.cli.app import (
    Adapter,
    Device,
    Dtype,
    Family,
    Json,
    Limit,
    Model,
    Seed,
    Set,
    Split,
    app,
    flag,
    place,
    terminable,
)


@app.command()
def capture(
    out: Annotated[str, flag("out", "Directory of the store; the same command resumes it.", "-o")],
    config: Annotated[str | None, typer.Argument(help="YAML file with the same keys as the flags.")] = None,
    model: Model = None,
    adapter: Adapter = None,
    arm: Annotated[str | None, flag("arm", "base, or the name of the adapter to switch on.")] = None,
    family: Family = None,
    set_: Set = None,
    limit: Limit = None,
    sites: Annotated[
        str | None, flag("sites", "resid_post,z or TransformerLens names such as blocks.3.hook_resid_mid.")
    ] = None,
    layers: Annotated[str | None, flag("layers", "0-3,8 or -1; all if not given.")] = None,
    positions: Annotated[
        str | None,
        flag("positions", "answer, query, premise:17/mean, name:Ann/all, index:5 or -1; commas for several."),
    ] = None,
    pattern_keys: Annotated[
        str | None, flag("pattern-keys", "Width of pattern rows in keys; the longest prompt's if not given.")
    ] = None,
    dtype_store: Annotated[str | None, flag("dtype-store", "float32, bfloat16 or float16.")] = None,
    backend: Annotated[str | None, flag("backend", "hf, transformer_lens or nnsight.")] = None,
    batch_tokens: Annotated[str | None, flag("batch-tokens", "Padded tokens in a batch, at most.")] = None,
    seed: Seed = None,
    split: Split = None,
    device: Device = None,
    dtype: Dtype = None,
    any_base: Annotated[bool, typer.Option("--any-base", help="Accept an adapter that names another base.")] = False,
    json_: Json = False,
) -> None:
    """Write the activations of a family's prompts to a store: chosen sites, layers and positions."""
    import json

    from experiments.capture import CaptureConfig, capture_family, layer_numbers, words
    from experiments.config import load_as
    from experiments.progress import Reporter

    flags = {"model": model, "adapter": tuple(adapter) if adapter else None, "arm": arm, "family": family,
             "limit": limit, "sites": words(sites), "layers": layer_numbers(layers), "positions": words(positions),
             "pattern_keys": pattern_keys, "store_dtype": dtype_store, "backend": backend, "batch_tokens": batch_tokens,
             "seed": seed, "split": split, "device": device, "dtype": dtype, "any_base": any_base or None}  # fmt: skip
    target = place("out", out)
    loaded = load_as(CaptureConfig, config, set_ or [], flags)
    named = bool(adapter) or loaded.adapter not in ((), ("builtin",))
    with terminable():
        store = capture_family(loaded, target, Reporter(quiet=json_), chosen=named)
    stored = sum(path.stat().st_size for path in target.glob("shard-*.h5"))
    if json_:
        layers_of = {site: list(numbers) for site, numbers in store.layers.items()}
        found = {"store": str(target), "rows": len(store), "layers": layers_of, "dtype": store.dtype, "bytes": stored}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write(f"{len(store):,} rows, {stored / 2**20:,.1f} MiB in {target}\n")
