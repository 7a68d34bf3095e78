"""The built-in adapter: GRPO on correctness alone, as LoRA on the built-in base.

TRL's GRPOTrainer samples a group of one-token answers for each prompt and moves the policy toward the better ones of the
group. The reward is 1 for the gold answer and 0 for anything else, unread text included. The base knows more answers
than it gives, because of its pull toward "No"; correctness reward works against that pull.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.ordering import Ordering
from tasks.parsing import parse_label

SEED = 42
STEPS = 200
PROMPTS = 32
GENERATIONS = 8
SETS = 600


def training_set() -> Any:
    """Prompts of both presentations and both relations, n = 4 … 8, from the training split, with their gold answers."""
    from datasets import Dataset

    records = []
    for relation in ("front_behind", "left_right"):
        for n in (4, 5, 6, 7, 8):
            params = {"n": n, "relation": relation, "names": "builtin"}
            for matched in islice(Ordering().generate(params, seed=SEED, split="train"), SETS):
                for shown in matched.presentations:
                    records.append({"prompt": shown.chat(), "gold": shown.gold})
    return Dataset.from_list(records).shuffle(seed=SEED)


def correctness(prompts: Any, completions: Any, gold: list[str], **_: Any) -> list[float]:
    """1 where the completion reads as the gold answer, else 0."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [float(parse_label(text).value == answer) for text, answer in zip(texts, gold, strict=True)]


def train(base: Path, tokenizer: Any, directory: Path, *, report: Callable[[str], None], device: str = "cpu") -> Any:
    """Train the adapter of the model in ``base``; the adapter is the return value, merged into nothing.

    Args:
        base: folder of the base model.
        directory: scratch folder of the trainer.
        report: called with one line of text at the end.
    """
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(base)
    # The name is what an analysis compares with the model it is asked to adapt; a path of this machine is no use there.
    model.config._name_or_path = model.name_or_path = "pairlens/builtin"
    settings = GRPOConfig(
        output_dir=str(directory),
        seed=SEED,
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=2,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        beta=0.0,
        temperature=1.0,
        bf16=False,
        use_cpu=device == "cpu",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
    )
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules="all-linear")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correctness,
        args=settings,
        train_dataset=training_set(),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    report(f"GRPO: {STEPS} steps, reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last")
    return trainer.model
