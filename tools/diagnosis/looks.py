"""How the parts of a step look in a terminal and in a picture."""

# By part, in the order of `splitting.PARTS`: letter, words, colours of a terminal, and Okabe and Ito's of a picture,
# which all eyes tell apart. A bar of letters is one in black and white, too.
LOOKS = {
    "compute": ("C", "computing, forward and backward", "white on blue", "#0072b2"),
    "input": ("I", "waiting for images", "black on yellow", "#f0e442"),
    "imbalance": ("M", "imbalance of the stages", "black on cyan", "#56b4e9"),
    "bubble": ("B", "pipeline filling and emptying", "black on white", "#bbbbbb"),
    "exchange": ("X", "exchange that is not hidden", "white on red", "#d55e00"),
    "straggling": ("S", "waiting for slower ranks", "white on magenta", "#cc79a7"),
    "update": ("U", "update", "black on green", "#009e73"),
    "rest": ("r", "rest, in no part", "white on black", "#4d4d4d"),
}
