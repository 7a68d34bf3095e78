"""The study: from a configuration to a report that ties failures to what was measured inside.

================  ==================================================================================================
``cli``           the ``probe`` command
``config``        what a run is asked to do; flags and configuration keys are the same words
``rundir``        the run directory: lock, digest, atomic files, tables built in resumable chunks
``pipeline``      the stages of ``probe run``, in order
``behaviour``     asks the model and scores its text
``inside``        captures activations; probes, logit lens, default and signal
``patch_…``       patching: ``probe patch``, and the same stage within ``probe run``
``ablat…``        ablation of heads: ``probe ablate``, and the same stages within ``probe run``
``link``          the table that ties each outcome to what was measured inside
``statistics``    paired statistics of answers
``results``       the headline numbers
``report``        one self-contained HTML page
``builtin``       how the built-in model is made
================  ==================================================================================================
"""
