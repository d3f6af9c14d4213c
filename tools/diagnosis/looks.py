"""How the parts of a step look in a terminal and in a picture."""

from tools.planning.picture import COLOURS

# By part, in the order of `splitting.PARTS`: letter, words, colours of a terminal, and of a picture, where they are
# the plan's. A bar of letters is one in black and white, too.
LOOKS = {
    "compute": ("C", "computing, forward and backward", "white on blue", COLOURS["compute"]),
    "input": ("I", "waiting for images", "black on yellow", COLOURS["input"]),
    "imbalance": ("M", "imbalance of the stages", "black on cyan", COLOURS["imbalance"]),
    "bubble": ("B", "pipeline filling and emptying", "black on white", COLOURS["bubble"]),
    "exchange": ("X", "exchange that is not hidden", "white on red", COLOURS["exchange"]),
    "straggling": ("S", "waiting for slower ranks", "white on magenta", COLOURS["straggling"]),
    "update": ("U", "update", "black on green", COLOURS["update"]),
    "rest": ("r", "rest, in no part", "white on black", "#4d4d4d"),
}
