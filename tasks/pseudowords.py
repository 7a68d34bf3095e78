"""Pronounceable words without a meaning.

The atoms of a logic program have to be things that a model has no beliefs about, so that only the program decides, and
that it can still tell apart. A pseudoword here has two syllables of a consonant, a vowel and perhaps a closing n, r or l
("tavu", "mirdon"), or three open ones ("kalovi"). There is no e: most English words of this shape have one, so leaving
it out keeps them away. Words and names that remain ("banana", "normal", "Simon") are listed and left out.

The consonants and vowels of a word tell where its syllables part, so no two syllable sequences spell the same word.
"""

from __future__ import annotations

import random as random_module
from functools import lru_cache

from tasks.contracts import TaskError

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aiou"
CODAS = ("", "n", "r", "l")

# Words of this shape that a tokenizer of English keeps as one piece, which is a fair list of the common ones, and some
# rarer ones that would distract a reader.
_MEANINGFUL = """
baba bali balkan banana barbar baron barri barton basal basil basin bikini bimini bingo bison bongo bonito boron
botan boto bulbul bulgar burma burton dada dago dakota dalton dana data dildo dimin dingo dino diva divan divor
dodo dollar domin domino donor dorsal fanfan fatal favor figur final finito formal fortun fulfil fungal fungi
fungo gaba gaga gallon galvan ganga gaza gigolo gira giza gonna gordon guru kabul kali kangar karma kiki kilo
kimono kola korona kosovo kumar labor lakota lama lamin langu lanka lapar larva larval latin latino lava lido
lima linda lingu lisa logan login logo lolita london lumin luna lunar mali malta mama manga mangan mango manila
manor margin mari marin marina martin mason midi milan milton mini minor mira mirna mirror mobil modal molar
mongo mongol mono moral morgan mormon mortal mortar morton motor multi multil mural musa nadu nano nasa nasal
natal nato naval nazi nina nino normal norman norton nova novo pagan panama panda panor papa papal para paragu
paran pardon paso patina pillar pinata pinto pitu polar polo popul porno portal potato pulumi pupil pursu puta
putin puto rabi radar radi radon ragi ragu rama raman razor rigor rival robin roma roman rosa rotor rural sado
safari saga salami saliva salmon salon salvo samar sami santa sara saran sardin sari satan sati satin silo silva
simon sinful siri situ soda sofa solar solo somali sonar sonata sudan sudo sufi sugar sulfur sultan sumo sunni
susan tabu tamil tango tantal tara tartar tidal timor tintin titan todo tofu tomato tonal torso total tudor
tumor tuna turban turbo tutor tutu vagina vagu valor valu vandal vapor vari vigil vigor villa vino viral virgil
virgin visa vital vivo volta vulgar vulva zika zoro zulu
"""
MEANINGFUL = frozenset(_MEANINGFUL.split())


@lru_cache(maxsize=1)
def pseudowords() -> tuple[str, ...]:
    """All of them, about 225,000. Made once."""
    open_syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    syllables = [syllable + coda for syllable in open_syllables for coda in CODAS]
    two = (first + second for first in syllables for second in syllables)
    three = (a + b + c for a in open_syllables for b in open_syllables for c in open_syllables)
    return tuple(word for words in (two, three) for word in words if word not in MEANINGFUL)


def draw_pseudowords(random: random_module.Random, count: int) -> list[str]:
    """``count`` different pseudowords in random order.

    Raises:
        TaskError: more than there are.
    """
    pool = pseudowords()
    if not 0 <= count <= len(pool):
        raise TaskError(f"asked for {count} pseudowords: ask for 0 to {len(pool):,}")
    return random.sample(pool, count)
