"""LoRA adapters on one loaded base, switched in place, with proof that they landed.

A comparison of a base model with its adapter fails silently in one way: the adapter's weights do not reach the layers
(saved under other module names, made for another base, or all zero), and base is compared with base, every number
plausible. So an adapter is attached only if

- its configuration is one that can be switched off exactly (LoRA without trained biases or replaced modules),
- the base it records is this base, and every module and shape it names exists here,
- every tensor in its file is in the model afterwards, value for value, and the model has no adapter tensor besides,
- at least one ``lora_B`` is not zero and the logits of a fixed prompt change when it is on,
- the logits with it off equal, bit for bit, those from before it was attached.

When a check fails, the layers are put back as they were.

The adapter is injected into the modules (``peft.inject_adapter_in_model``) rather than wrapped around the model, so
module names stay what they were. Nothing is merged: merging rounds the sum and cannot be undone exactly.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from activations.batching import forward_arguments, pad
from activations.errors import ModelError, one_line

if TYPE_CHECKING:
    from activations.model import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def attach(model: Model, path: str, *, name: str | None = None, any_base: bool = False) -> str:
    """Attach the adapter in a folder (or hub repository), leave it switched off, and return its name."""
    folder = _folder(path)
    name = _new_name(name or folder.name, model.adapter_names)
    config = _read_config(name, folder)
    if not any_base:
        _same_base(name, config, model)
    tensors = _without_base_copies(name, _read_tensors(name, folder), model.hf_model)
    _shapes_fit(name, tensors, model.hf_model)

    internal = f"pairlens{len(model.adapter_names)}"  # peft's own name: user names may hold dots, module names may not
    with model.use(None):
        before = _probe(model)
        try:
            with _only_adapter_changes(model.hf_model):
                _inject(name, config, tensors, model.hf_model, internal)
            _all_landed(name, tensors, model.hf_model, internal)
            switch(model.hf_model, internal)
            during = _probe(model)
            switch(model.hf_model, None)
            after = _probe(model)
            if torch.equal(before, during):
                raise ModelError(f"adapter {name!r} changes no logit; it is empty, give a trained adapter")
            if not during.isfinite().all():
                raise ModelError(
                    f"adapter {name!r} makes the logits infinite or NaN; give one trained in this precision"
                )
            if not torch.equal(before, after):
                raise ModelError(
                    f"model {model.name!r} differs by {(before - after).abs().max():.1e} once adapter {name!r} is off "
                    "again; base and adapter would not be comparable, so it is refused"
                )
        except BaseException:
            detach(model.hf_model, internal)
            raise
    model.identity["adapters"][name] = {
        "weights": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
        "config": hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(),
        "base": config.base_model_name_or_path or None,
        "rank": config.r,
        "alpha": config.lora_alpha,
    }
    model.peft_names[name] = internal
    return name


def layers(hf_model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of every layer an adapter has been injected into."""
    if "peft" not in sys.modules:  # nothing can have been injected, and importing it takes seconds
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in hf_model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def switch(hf_model: nn.Module, internal: str | None) -> None:
    """Turn one adapter on, or all off. Layers the adapter does not have are off; no weight is left trainable."""
    for _, layer in layers(hf_model):
        present = internal is not None and internal in layer._all_available_adapter_names()
        if present:
            layer.set_adapter(internal)
        layer.enable_adapters(present)
        for parameter_name, parameter in layer.named_parameters():
            if "lora_" in parameter_name:
                parameter.requires_grad_(False)


def detach(hf_model: nn.Module, internal: str) -> None:
    """Remove one adapter; a layer left without any becomes the original module again."""
    for name, layer in list(layers(hf_model)):
        if internal in layer._all_available_adapter_names():
            with warnings.catch_warnings():  # "was active which is now deleted"
                warnings.simplefilter("ignore")
                layer.delete_adapter(internal)
        if not layer._all_available_adapter_names():
            parent, _, child = name.rpartition(".")
            setattr(hf_model.get_submodule(parent), child, layer.get_base_layer())
    configs: dict[str, Any] = getattr(hf_model, "peft_config", {})
    configs.pop(internal, None)
    if not configs and "peft_config" in vars(hf_model):
        del hf_model.peft_config


def _folder(path: str) -> Path:
    folder = Path(__file__).parent / "builtin" / "grpo" if path == "builtin" else Path(path).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            inside = [child.name for child in sorted(folder.iterdir()) if (child / CONFIG).is_file()]
            hint = f"one of its folders {inside[:5]}" if inside else "a folder written by PEFT's save_pretrained"
            raise ModelError(f"adapter folder {path} has no {CONFIG}; give {hint}")
        return folder
    if path == "builtin" or folder.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelError(
            f"adapter {path!r} is no folder; give a folder with {CONFIG} and {WEIGHTS}, or a hub id owner/name"
        )
    from huggingface_hub import snapshot_download

    from activations.sources import hub_errors

    try:
        return Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS]))
    except hub_errors() as error:
        raise ModelError(
            f"adapter {path!r} is neither a folder here nor found on the hub ({one_line(error, 80)}); give a folder "
            f"with {CONFIG} or check the id and the network"
        ) from error


def _new_name(wanted: str, taken: tuple[str, ...]) -> str:
    name, count = wanted, 2
    while name in taken:
        name, count = f"{wanted}-{count}", count + 1
    return name


def _read_config(name: str, folder: Path) -> Any:
    from peft import LoraConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    try:
        raw = json.loads((folder / CONFIG).read_text())
        kind = str(raw.get("peft_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"adapter {name!r}: {folder / CONFIG} cannot be read ({one_line(error)}); save it again"
        ) from error
    if kind != "LORA":
        known = "supported by PEFT but not here" if kind in PEFT_TYPE_TO_CONFIG_MAPPING else "unknown"
        raise ModelError(f"adapter {name!r} has peft_type {kind!r}, which is {known}; give a LORA adapter")
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"adapter {name!r}: {CONFIG} is not understood ({one_line(error)}); save it with peft"
        ) from error
    extras = {
        "modules_to_save": config.modules_to_save,
        "bias": None if config.bias == "none" else config.bias,
        "trainable_token_indices": config.trainable_token_indices,
        "target_parameters": config.target_parameters,
    }
    for key, value in extras.items():
        if value:
            raise ModelError(
                f"adapter {name!r} has {key}={value!r}, which cannot be switched off exactly; train it with {key} unset"
            )
    config.inference_mode = True
    return config


def _read_tensors(name: str, folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        found = sorted(child.name for child in folder.iterdir())
        raise ModelError(f"adapter {name!r} has no {WEIGHTS} (found {found[:6]}); save it with safe_serialization=True")
    try:
        return {key.removeprefix(_PREFIX): tensor for key, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"adapter {name!r}: {path} is damaged ({one_line(error)}); copy it again") from error


def _without_base_copies(name: str, tensors: dict[str, Tensor], hf_model: nn.Module) -> dict[str, Tensor]:
    """PEFT saves a copy of an embedding beside an adapter on it; a copy of our own weights says nothing new."""
    here = hf_model.state_dict()
    kept = {}
    for key, tensor in tensors.items():
        own = here.get(key, here.get(key.replace(".base_layer.", ".")))
        if ".lora_" in key:
            kept[key] = tensor
        elif own is None or own.shape != tensor.shape or not torch.equal(own.cpu(), tensor.to(own.dtype)):
            raise ModelError(
                f"adapter {name!r} brings a weight of the base itself ({key}), which cannot be switched off exactly; "
                "train it with LoRA layers only, on this base"
            )
    if broken := [key for key, tensor in kept.items() if not tensor.isfinite().all()]:
        raise ModelError(
            f"adapter {name!r} holds infinite or NaN values in {broken[0]!r}; give a checkpoint before that"
        )
    return kept


def _same_base(name: str, config: Any, model: Model) -> None:
    recorded = str(config.base_model_name_or_path or "").rstrip("/")
    if recorded and model.known_as and _last(recorded) not in model.known_as:
        raise ModelError(
            f"adapter {name!r} was made for {recorded!r} and this model is {model.name!r}; load that base, or pass "
            "any_base (--set any_base=true) if they are the same weights"
        )


def _last(path: str) -> str:
    """The comparable part of a model id or folder: last component, lower case; hub cache folders give their model."""
    parts = [part for part in path.replace("\\", "/").split("/") if part]
    for part in parts:
        if part.startswith("models--"):
            return part.rpartition("--")[2].casefold()
    return parts[-1].casefold() if parts else ""


def names_of(*candidates: str | None) -> frozenset[str]:
    """The names a base model answers to, for comparing with what an adapter records."""
    return frozenset(_last(candidate) for candidate in candidates if candidate)


def _shapes_fit(name: str, tensors: dict[str, Tensor], hf_model: nn.Module) -> None:
    modules = dict(hf_model.named_modules())
    other = f"adapter {name!r} was made for another base"
    if not any(".lora_B" in key or "lora_embedding_B" in key for key in tensors):
        raise ModelError(f"adapter {name!r} holds no lora_B tensor (first: {sorted(tensors)[:1]}); give a LoRA adapter")
    missing = sorted({key.partition(".lora_")[0] for key in tensors} - set(modules))
    if missing:
        raise ModelError(
            f"{other}: this model has no module {missing[0]!r} ({len(missing)} missing); load its own base"
        )
    for key, tensor in tensors.items():
        target, _, part = key.partition(".lora_")
        weight = getattr(getattr(modules[target], "base_layer", modules[target]), "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or part not in ("A.weight", "B.weight"):
            continue
        conv = type(getattr(modules[target], "base_layer", modules[target])).__name__ == "Conv1D"
        n_out, n_in = weight.shape[::-1] if conv else weight.shape
        expected = n_in if part == "A.weight" else n_out
        actual = tensor.shape[-1] if part == "A.weight" else tensor.shape[0]
        if actual != expected:
            raise ModelError(
                f"{other}: {key} is {list(tensor.shape)} but {target} is {n_in} -> {n_out}; load its own base"
            )
    if not any(tensor.any() for key, tensor in tensors.items() if "lora_B" in key or "lora_embedding_B" in key):
        raise ModelError(f"adapter {name!r} has only zeros in lora_B, so it changes nothing; give a trained adapter")


@contextmanager
def _only_adapter_changes(hf_model: nn.Module) -> Iterator[None]:
    """PEFT freezes the base as a side effect; give its parameters their flags back."""
    flags = [(parameter, parameter.requires_grad) for parameter in hf_model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _inject(name: str, config: Any, tensors: dict[str, Tensor], hf_model: Any, internal: str) -> None:
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    others: dict[str, Any] = vars(hf_model).pop("peft_config", {})
    try:
        with warnings.catch_warnings():  # about gradient checkpointing and Conv1D, both irrelevant here
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, hf_model, adapter_name=internal)
        set_peft_model_state_dict(
            hf_model, {_PREFIX + key: value for key, value in tensors.items()}, adapter_name=internal
        )
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(
            f"adapter {name!r} was made for another base or PEFT version: {one_line(error)}; load its own base"
        ) from error
    finally:
        hf_model.peft_config = {**others, **vars(hf_model).get("peft_config", {})}
        for _, layer in layers(hf_model):
            layer.eval()


def _all_landed(name: str, tensors: dict[str, Tensor], hf_model: Any, internal: str) -> None:
    from peft import get_peft_model_state_dict

    there = get_peft_model_state_dict(hf_model, adapter_name=internal, save_embedding_layers=False)
    there = {key.removeprefix(_PREFIX): tensor for key, tensor in there.items()}
    unused, unfilled = sorted(set(tensors) - set(there)), sorted(set(there) - set(tensors))
    if unused or unfilled:
        what = f"its tensor {unused[0]!r} has no place" if unused else f"the file has nothing for {unfilled[0]!r}"
        raise ModelError(
            f"adapter {name!r} does not fit: {what} ({len(unused) + len(unfilled)} such); load its own base"
        )
    for key, tensor in tensors.items():
        if not torch.equal(there[key].cpu(), tensor.to(there[key].dtype)):
            raise ModelError(
                f"adapter {name!r}: tensor {key!r} did not arrive unchanged; save the adapter with this peft"
            )


@torch.inference_mode()
def _probe(model: Model) -> Tensor:
    """Logits of a fixed prompt at every position, as bit-exact evidence."""
    ids = tuple((3 + 7 * index) % model.d_vocab for index in range(12))
    padded = pad([ids], model.device, model.pad_id)
    logits: Tensor = model.hf_model(**forward_arguments(model.hf_model, padded)).logits
    return logits.clone()
