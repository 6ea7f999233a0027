"""Tokens that CosyVoice3 adds to the tokenizer of its Qwen2, in the order of their ids."""

from __future__ import annotations

_SOUNDS = (
    "<|im_start|> <|im_end|> <|endofprompt|> [breath] <strong> </strong> [noise] [laughter] [cough] [clucking] "
    "[accent] [quick_breath] <laughter> </laughter> [hissing] [sigh] [vocalized-noise] [lipsmack] [mn] <|endofsystem|>"
)
_VOWELS, _STRESSES = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW", ("", "0", "1", "2")
_CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
_PINYIN = (
    "a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng "
    "ióng iù iú iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u "
    "uang ue un uo uà uài uàn uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi "
    "uǎn uǎng uǐ uǒ vè w x y z zh à ài àn àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í "
    "ín íng ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn "
    "ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ "
)
_ARPABET = [*_CONSONANTS.split(), *(v + s for v in _VOWELS.split() for s in _STRESSES)]
SPECIAL_TOKENS = (*_SOUNDS.split(), *(f"[{name}]" for name in (*sorted(_ARPABET), *_PINYIN.split())))
