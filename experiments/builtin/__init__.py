"""How the built-in model is made: a small Llama trained on ordering items, and a GRPO adapter trained from it.

A fresh machine has no model. The package ships one that is small enough to commit and real enough that every stage has
something to find. ``python -m experiments.builtin`` (``make builtin``) makes both parts anew from their seed:

=============  =====================================================================================================
``tokenizer``  one token a word; knows 24 names and the words of the ordering prompts
``base``       answer-only training along a curriculum, ending in a phase that teaches a pull toward "No"
``adapter``    GRPO on correctness alone, through TRL's trainer, as a LoRA adapter of the base
``card``       measures both, writes the model card and the readouts that a test compares with
=============  =====================================================================================================
"""
