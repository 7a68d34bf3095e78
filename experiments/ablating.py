"""The stages of an ablation on one arm, as ``probe ablate`` and ``probe run`` do them: rank, cut, describe.

Each table is made unless it is there, as the arm's own or as part of the joined one.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import ablate_effects, ablate_stage
from experiments.ablate_halves import Halves
from experiments.ablate_options import AblateSettings
from experiments.intervention_stage import Arm
from experiments.progress import Reporter
from experiments.study import arm_table, once

EFFECTS = ("ablation", "ablation_above", "ablation_notes")


def arm_tables(how: AblateSettings) -> tuple[str, ...]:
    """The tables that an ablation makes for each arm: without a ranking where the heads are given."""
    ranked = () if how.chosen is not None else ("heads", "head_effects")
    grid = ("head_rows", "head_grid") if how.grid else ()
    return (*ranked, "ablate", *EFFECTS, *grid)


def ablate_arm(
    arm: Arm, how: AblateSettings, halves: Halves, labels: Sequence[str], reporter: Reporter, *, tested: bool
) -> None:
    """Make the tables of one arm, which has to be in use.

    Args:
        how: with ``pairs`` and ``check_cells`` filled in.
        labels: the family's, "yes" first.
        tested: whether heads are patched on the test pairs too, to see the ranking where it did not choose.
    """
    run, config, name = arm.run, arm.config, arm.name

    def there(table: str) -> bool:
        return run.has_table(table) or run.has_table(f"{table}-{name}")

    heads = None
    if how.chosen is None:
        count = ablate_stage.chunk_count(ablate_stage.head_transfers(arm, how, halves, tested=tested))
        with reporter.stage(f"patch heads {name}", count) as done:
            if not there("heads"):
                ablate_stage.head_table(arm, how, halves, done, tested=tested)
        heads = arm_table(run, "heads", name)
    top = ablate_stage.top_heads(heads, how, config)
    count = ablate_stage.chunk_count(ablate_stage.ablate_transfers(arm, halves))
    with reporter.stage(f"ablate heads {name}", count) as done:
        if not there("ablate"):
            ablate_stage.ablate_table(arm, top, how, halves, done)
    if how.grid:
        with reporter.stage(f"ablate each head {name}", count) as done:
            if not there("head_rows"):
                ablate_stage.grid_table(arm, how, halves, done)
    with reporter.stage(f"effects of heads {name}", 1):
        if heads is not None:
            ranked = heads
            once(run, "head_effects", name, lambda: ablate_effects.head_effects(ranked, top, config))
        if not all(there(table) for table in EFFECTS):
            absent = ablate_stage.sets_of(arm, top, how).absent
            made = ablate_effects.ablation_tables(arm_table(run, "ablate", name), labels, config, absent)
            for table, rows in made.items():
                run.write_table(f"{table}-{name}", rows)
        if how.grid:
            rows = arm_table(run, "head_rows", name)
            once(run, "head_grid", name, lambda: ablate_effects.grid_table(rows, labels, config))
