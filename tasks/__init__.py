"""What is asked: problem families, their oracles, renderers, parsers and graders.

Pure Python; nothing here loads torch, so a user who wants only the generators pays for nothing else.

==================  ====================================================================================
``contracts``       the records that every family produces: instance, presentation, matched set, grade
``streams``         random streams keyed by what is drawn
``registry``        families by name: built in, from an installed package, or from a file
``ordering``        who stands in front of whom: total orders told by adjacent comparisons
``ordering_solver`` the text-level solver that checks ordering's gold answers
``names``           pools of first names
``parsing``         reading a label from a free-text response (``parsing_text`` cleans it, ``parsing_words`` is the lexicon)
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
