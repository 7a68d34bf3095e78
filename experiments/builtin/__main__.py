"""``python -m experiments.builtin``: train base and adapter, study them, write weights, card and readouts."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.builtin import adapter, base, card, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="where both are trained")
    parser.add_argument("--from-clean", type=Path, help="folder of a base that has been through the curriculum")
    chosen = parser.parse_args()
    started = time.monotonic()

    def report(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:6.0f} s  {line}\n")

    words = tokenizer.build()
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "builtin"
        model = _base(words, chosen, report)
        model.to("cpu").save_pretrained(made / "base")
        words.save_pretrained(made / "base")
        trained = adapter.train(made / "base", words, Path(scratch) / "trainer", report=report, device=chosen.device)
        trained.save_pretrained(made / "grpo")
        (made / "grpo" / "README.md").unlink(missing_ok=True)
        for part in ("base", "grpo"):
            shutil.rmtree(card.FOLDER / part, ignore_errors=True)
            shutil.copytree(made / part, card.FOLDER / part)
            for file in (card.FOLDER / part).iterdir():
                file.chmod(0o644)  # weights are saved readable by their owner alone
        card.write(_study(Path(scratch) / "run"), f"last on {chosen.device}")
    report(f"written to {card.FOLDER}")


def _base(words: Any, chosen: argparse.Namespace, report: Callable[[str], None]) -> Any:
    if chosen.from_clean is None:
        return base.train(words, report=report, device=chosen.device)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(chosen.from_clean).train()
    base.teach_default(model, words, report=report, seed=base.SEED)
    return model.eval()


def _study(directory: Path) -> dict[str, Any]:
    from experiments.config import load
    from experiments.pipeline import run
    from experiments.progress import Reporter

    return run(load(None, [], {}), directory, config_text="", reporter=Reporter(quiet=True))


if __name__ == "__main__":
    main()
