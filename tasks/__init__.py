"""What is asked: problem families, their oracles, renderers, parsers and graders.

Pure Python; nothing here loads torch, so a user who wants only the generators pays for nothing else.

==================  ====================================================================================
``contracts``       the records that every family produces: instance, presentation, matched set, grade
``streams``         random streams keyed by what is drawn
``registry``        families by name: built in, from an installed package, or from a file
``ordering``        who stands in front of whom: total orders told by adjacent comparisons. ``ordering_params`` checks
                    parameters, ``ordering_layout`` draws, ``ordering_text`` renders, ``ordering_solver`` reads the
                    text again
``relations``       the words of ordering's relations, from ``data/relations.toml``; ``relations_check`` refuses bad ones
``horn``            does a goal follow from rules: ``horn_program`` draws programs, ``horn_solver`` reads the text again
``modals``          does a conclusion about what is probable follow: ``modals_params`` checks parameters,
                    ``modals_catalog`` reads templates and names from ``data/modals.toml``, ``modals_text`` renders,
                    ``modals_schema`` writes statements down, ``modals_oracle`` decides what follows from them,
                    ``modals_solver`` reads the text again
``names``           pools of first names and objects; ``pseudowords`` are pronounceable strings without a meaning
``prompts``         how the answer is asked for: directly, or after reasoning
``parsing``         reading a label from a free-text response: ``parsing_text`` cleans it, ``parsing_words`` is the
                    lexicon, ``parsing_prose`` infers from sentences
``validation``      does a family keep its promises
``files``           matched sets as JSON lines
==================  ====================================================================================
"""

from tasks.contracts import (
    Family,
    Grade,
    Instance,
    MatchedSet,
    Message,
    Parameter,
    Parsed,
    Presentation,
    Span,
    TaskError,
)

__all__ = [
    "Family",
    "Grade",
    "Instance",
    "MatchedSet",
    "Message",
    "Parameter",
    "Parsed",
    "Presentation",
    "Span",
    "TaskError",
]
