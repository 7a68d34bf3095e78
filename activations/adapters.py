"""LoRA adapters on one loaded base, switched in place, with proof that they landed.

A comparison of a base model with its adapter fails silently in one way: the adapter's weights do not reach the layers
(saved under other module names, made for another base, or all zero), and base is compared with base, every number
plausible. So an adapter is attached only if

- its configuration is one that can be switched off exactly (LoRA in any of its forms that leave the base's weights
  alone; retrained modules and biases are swapped in whole, see :mod:`activations.replacements`),
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

from activations import replacements
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
    tensors, whole = replacements.split(name, _read_tensors(name, folder), config, model.hf_model)
    config.modules_to_save, config.bias = None, "none"  # swapped in by us, not by PEFT
    _shapes_fit(name, tensors, model.hf_model)

    internal = f"pairlens{len(model.adapter_names)}"  # peft's own name: user names may hold dots, module names may not
    with model.use(None):
        before = _probe(model)
        try:
            with _only_adapter_changes(model.hf_model):
                _inject(name, config, tensors, model.hf_model, internal)
            _all_landed(name, tensors, model.hf_model, internal)
            switch(model.hf_model, internal)
            slots = replacements.put(model.hf_model, whole)
            try:
                during = _probe(model)
            finally:
                replacements.put_back(slots)
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
        "replaces": [f"{one.module}.{one.parameter}" for one in whole],
    }
    model.peft_names[name] = internal
    model.replaced[name] = whole
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
        if not present:
            if not layer.disable_adapters:
                layer.enable_adapters(False)  # which freezes too
            continue
        layer.set_adapter(internal)
        layer.enable_adapters(True)
        for parameter_name, parameter in layer.named_parameters():
            if "lora_" in parameter_name:
                parameter.requires_grad_(False)


def detach(hf_model: nn.Module, internal: str) -> None:
    """Remove one adapter; a layer left without any becomes the original module again."""
    for name, layer in reversed(list(layers(hf_model))):  # inner wrappers first
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
    _refuse_extras(name, config)
    config.inference_mode = True
    return config


_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _refuse_extras(name: str, config: Any) -> None:
    """What no switch undoes: parts that PEFT puts into the base, and low-rank parts taken out of its weights."""
    for key in ("trainable_token_indices", "layer_replication", "alora_invocation_tokens"):
        if value := getattr(config, key, None):
            raise ModelError(
                f"adapter {name!r} has {key}={value!r}, which cannot be switched off exactly; train it with {key} unset"
            )
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise ModelError(
            f"adapter {name!r} has init_lora_weights={start!r}: it was trained on changed base weights and would change "
            "them here; save it again with path_initial_model_for_weight_conversion, which makes it an ordinary LoRA"
        )
    config.init_lora_weights = True


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
    # a second parameter of one module (joint experts) is wrapped once more, under the first one's base_layer
    missing = sorted({key.partition(".lora_")[0].replace(".base_layer", "") for key in tensors} - set(modules))
    if missing:
        raise ModelError(
            f"{other}: this model has no module {missing[0]!r} ({len(missing)} missing); load its own base"
        )
    for key, tensor in tensors.items():
        target, _, part = key.partition(".lora_")
        if target not in modules:
            continue
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
        with warnings.catch_warnings():  # about checkpointing, Conv1D and shapes that it takes; ours are checked
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

    with warnings.catch_warnings():  # it takes the biases of lora_B for tensors of the wrong shape
        warnings.simplefilter("ignore")
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
