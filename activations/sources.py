"""Where checkpoints come from, and what exactly was loaded.

``open_model`` takes what a user types (a hub id, a folder, a ``.gguf`` file, ``smollm2``, ``builtin``) and returns the
network, its tokenizer and their identity: revision and sha256 of the weight files, so that a store or a run can be tied
to the very bytes it was made with. A checkpoint that lacks weights is refused, because transformers would fill the gap
with random numbers and only log it.

Defaults that matter for the numbers: sdpa attention (flash or eager give slightly other values), except for models with
an attention softcap, which sdpa skips, or with attention sinks, which it does not have; parameters frozen, evaluation
mode, no compilation, nothing merged. Quantised checkpoints are taken as they are and marked, with method and bits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from activations import gguf
from activations.adapters import names_of
from activations.errors import ModelError, one_line
from activations.prompts import chat_template
from activations.structure import text_config

DTYPES = ("float32", "bfloat16", "float16", "auto")
BUILTIN = Path(__file__).parent / "builtin" / "base"
_ALLOWED = "a hub id owner/name, a model folder, a .gguf file, 'smollm2' or 'builtin'"
_SHA = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Opened:
    """What ``open_model`` found."""

    hf_model: Any
    tokenizer: Any
    name: str
    source: dict[str, Any]


def open_model(name: str, *, device: str, dtype: str, trust_remote_code: bool) -> Opened:
    """Load network and tokenizer; every way this can fail is a one-line ModelError."""
    place, precision = _device(device), _dtype(dtype)
    where, source = _locate(name)
    known = {name, where, *source.pop("also", ())}

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source["source"] == "hub":
        shared |= _hub_state(name)
    with _Refusing(name):
        config = AutoConfig.from_pretrained(where, **shared)
        tokenizer = AutoTokenizer.from_pretrained(where, **shared)
    chat_template(tokenizer)
    # sdpa skips the attention softcap of Gemma 2 without a word, so those models run eager
    attention = "eager" if getattr(text_config(config), "attn_logit_softcapping", None) else "sdpa"
    if quantization(config):  # its layers are made on their device; the loaded network cannot be moved
        shared["device_map"] = {"": str(place)}
    with _Refusing(name):
        shared |= {"dtype": precision, "output_loading_info": True}
        try:
            hf_model, report = AutoModelForCausalLM.from_pretrained(where, attn_implementation=attention, **shared)
        except ValueError as error:  # attention sinks (gpt-oss) exist only where attention is written out
            if attention == "eager" or "scaled_dot_product_attention" not in str(error):
                raise
            hf_model, report = AutoModelForCausalLM.from_pretrained(where, attn_implementation="eager", **shared)
        hf_model = (hf_model if quantization(config) else hf_model.to(place)).eval().requires_grad_(False)
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ModelError(
            f"checkpoint {name!r} has no weights for {lacking[0]!r} ({len(lacking)} missing), which would be random; "
            "give a complete causal language model"
        )
    source.setdefault("revision", getattr(config, "_commit_hash", None))
    if "weights" not in source:
        source["weights"] = weights_hash(_snapshot(where, shared.get("revision")))
    return Opened(hf_model, tokenizer, name, {**source, "known_as": names_of(*known)})


def quantization(config: Any) -> dict[str, Any] | None:
    """Method and bits of a quantised checkpoint, as its configuration states them; None for an ordinary one.

    The numbers of a quantised model are its own, not those of the model it was made from, so every store and run says so.
    Bits are None where the configuration does not name one number.
    """
    found = getattr(config, "quantization_config", None) or getattr(text_config(config), "quantization_config", None)
    if not found:
        return None
    fields = dict(found) if isinstance(found, Mapping) else found.to_dict()
    method = fields.get("quant_method")
    bits = fields.get("bits") or fields.get("w_bit") or fields.get("weight_bits")
    for flag, width in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        bits = bits or (width if fields.get(flag) else None)
    name = str(getattr(method, "value", method))
    if not bits and (stated := re.search(r"(?:int|fp|float|nf)(\d+)", f"{fields.get('quant_type') or ''} {name}")):
        bits = stated[1]
    return {"method": name, "bits": int(bits) if bits else None}


def versions() -> dict[str, str]:
    """Versions of the libraries whose code makes the numbers."""
    return {name: metadata.version(name) for name in ("torch", "transformers", "peft")}


def in_memory(hf_model: Any, name: str) -> dict[str, Any]:
    """Identity of a model that has no files: sha256 over its sorted state dict."""
    import torch

    digest = hashlib.sha256()
    for key, tensor in sorted(hf_model.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    origin = getattr(hf_model.config, "_name_or_path", "")
    known = names_of(origin, name) if origin else frozenset()
    return {"source": "memory", "revision": None, "weights": digest.hexdigest(), "known_as": known}


def weights_hash(folder: Path) -> str:
    """sha256 over the names and sha256 of a folder's weight files; hub caches name each file by its hash already."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    parts = []
    for file in files:
        blob = file.resolve().name
        parts.append([file.name, blob if _SHA.fullmatch(blob) else gguf.file_hash(file)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hub_errors() -> tuple[type[Exception], ...]:
    """What a hub look-up raises when there is no such repository, no network, or no permission."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # its bases are OSError and the HTTP client's own error class, whichever client this version of the hub library uses
    return (OSError, *HfHubHTTPError.__bases__, HFValidationError)


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or hub id to load from, and what is known about it."""
    path = Path(name).expanduser()
    if not name.strip():
        raise ModelError(f"no model named; give {_ALLOWED}")
    if name == "smollm2" or name.lower().endswith(".gguf"):
        file = gguf.smollm2_file() if name == "smollm2" else path
        folder, digest = gguf.expand(file)
        return str(folder), {
            "source": "gguf",
            "revision": None,
            "weights": digest,
            "also": (gguf.base_name(file), file.stem),
        }
    if name == "builtin":
        if not (BUILTIN / "config.json").is_file():
            raise ModelError(f"the built-in model is missing from {BUILTIN}; reinstall the package, or give {_ALLOWED}")
        return str(BUILTIN), {"source": "builtin", "revision": None}
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), {"source": "folder", "revision": None}
        if (path / "adapter_config.json").is_file():
            raise ModelError(f"{name!r} is an adapter, not a model; load its base model with adapters=[{name!r}]")
        raise ModelError(f"folder {name!r} has no config.json; give {_ALLOWED}")
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"no model {name!r}; give {_ALLOWED}")
    return name, {"source": "hub"}


def _hub_state(name: str) -> dict[str, Any]:
    """Ask the hub once, without retries: pin the revision it has now, or use the local cache if it is away."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return {"revision": HfApi().model_info(name, timeout=10).sha}
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"no model {name!r} here or on the hub; give {_ALLOWED}, or log in if it is private"
        ) from error
    except hub_errors():
        return {"local_files_only": True}


def _snapshot(where: str, revision: str | None) -> Path:
    if Path(where).is_dir():
        return Path(where)
    from transformers.utils import cached_file

    return Path(str(cached_file(where, "config.json", revision=revision, local_files_only=True))).parent


class _Refusing:
    """Turn what transformers raises for a model it cannot load into one line with a next step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from safetensors import SafetensorError

        known = (*hub_errors(), ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
        if error is None or not isinstance(error, known):
            return
        text = one_line(error, 160)
        if "trust_remote_code" in text:
            raise ModelError(
                f"model {self.name!r} runs its own code; read it and pass trust_remote_code=True, or give another model"
            ) from error
        if "Unrecognized configuration class" in text:
            raise ModelError(f"model {self.name!r} is no causal language model; give {_ALLOWED} of one") from error
        if isinstance(error, hub_errors()) and not Path(self.name).expanduser().is_dir():
            raise ModelError(
                f"no model {self.name!r} here, and none was fetched ({one_line(error, 90)}); give {_ALLOWED}, or "
                "check the id, the network and HF_HUB_OFFLINE"
            ) from error
        raise ModelError(f"model {self.name!r} cannot be loaded: {text}; give {_ALLOWED}") from error


def _device(device: str) -> Any:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device is {device!r}; use auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device is {device!r} but torch sees no GPU; use cpu or auto")
    return place


def _dtype(dtype: str) -> Any:
    import torch

    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    return "auto" if dtype == "auto" else getattr(torch, dtype)


def n_parameters(hf_model: Any) -> int:
    """How many parameters a model has, tied ones once; of packed 4-bit weights those that they stand for."""
    counted = getattr(hf_model, "num_parameters", None)
    return int(counted() if callable(counted) else sum(one.numel() for one in hf_model.parameters()))
