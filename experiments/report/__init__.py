"""The report: one HTML file that a browser opens without a network, from the files of a finished run.

====================  ==============================================================================================
``source``            the files of a run, read once
``text``              numbers and foreign text as the page shows them
``findings``          the sentences at the top, and the thresholds behind them
``tables``            the numbers at a glance and the link table; ``tables_behaviour``, ``tables_inside`` the others
``drawing``           from matplotlib to an SVG inside the page; ``plots_behaviour``, ``plots_inside``,
                      ``plots_causes`` are the drawings
``pairs``             the pair browser
``page``              view data into ``page.html``
``intervention_*``    the same for `probe patch` and `probe ablate`: ``source``, ``findings``, ``tables`` and ``page``, with
                      ``plots_interventions*``; a whole study's page takes some of their drawings
``about``             what any page says about its run
``template``          values into a template (with ``macros.html`` and ``page.css``), escaped
====================  ==============================================================================================

Nothing is computed here that is not in the run already, and the page is a function of the run's files: written twice, it
is the same to the byte.
"""

from __future__ import annotations

from experiments.rundir import RunDirectory


def write(run: RunDirectory) -> None:
    """Write ``report.html`` of a run, a patching study or an ablation whose results are there.

    Raises:
        RunError: a table of the run is missing.
    """
    from experiments.report import intervention_page
    from experiments.report.intervention_source import NEEDED, command_of
    from experiments.report.page import page
    from experiments.report.source import read

    if command_of(run) in NEEDED:
        intervention_page.write(run)
    else:
        run.write_text("report.html", page(read(run)))
