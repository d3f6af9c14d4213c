"""Glyphs: images of up to a thousand kinds of characters in matplotlib's fonts, drawn when they are needed.

An image is a function of its number; small sets are drawn once a process. Pillow 10.4 and 13.0 draw the same pixels.
"""

import functools
import io
import math
import os
from typing import Dict, NamedTuple, Sequence, Tuple
from unicodedata import name as unicode_name

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from common.errors import DataError
from data.base import SOURCES, Source
from recipe.images import Glyphs
from recipe.randomness import Stream, bits32, key

# The first is the only one at difficulty 0.
FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSerif-Italic")
# By class; never reorder. Of the glyphs that all fonts have, those that resemble an earlier one were left out (Greek
# Alpha for A, O for 0), by the highest cosine of their images over fonts and rotations by 0 and 10 degrees.
GLYPHS = (
    "0123456789ABCDEFGHJKLMNPQRSTUVWXYZabdefghkmnopqrtuy#$%&()*+/:;<=>?@^~¢£¤§©«¬±¶»¿Æ×ÞæþŒƁƄƆƇƑƒƔƕƛƜƝƢƤƦ"
    "ƧƩƫƴƸƺƾǁǂǶȜȠȡȤȴȵȸȹȻȾȿɀɁɕɖɘɚɝɧɬɮɰɱɲɳɸɹɻɽʁʇʍʎʐʑʕʛʝʞʤʦʧʩʪʫʬʭʮʯ˦˧˨˩ΞΨαβζνχωϗϙϚϞϟϠϻЂЉЋЏДЖЛФЧЪЫЮЯѣҐҔҖҘҚңҥҬ"
    "ҲӋӶԳԶԷԸԹԻԾԿՀՁՂՃՄՊՌՎՒՔՖ՟թխծջֆგდეთკლრუფქშჩჭჯჰჴჹ჻ᴖᴗᴝᴞᴟᴻ‡‰‹›⁋€₯₸₹←→↓↖↗↘↙↜↝↟↢↣↧↨↫↬↭↯↰↱↲↳↵↶↷↸↹↺↻↽↾↿⇀⇄⇅⇆⇇⇈⇉"
    "⇊⇐⇒⇕⇖⇗⇘⇙⇚⇛⇡⇤⇥⇧⇩⇫⇰⇱⇲⇵⇶⇷⇸∆∇∈∓√∛∝∞∟∠∸∹∺∽≐≑≒≓≤≥⊂⊆⊇⊏⊐⊗⊞⊠⊢⊣⊥⋄⌂⌐⌑⌘⌙⌥⎡⎫⎬⏏␣□▣▭▮▯▰▱▲▶▷▻▼◀◁◅◈◉◊○◌◐◑◒◓◔◚◢◣◤◥◧◨◫◬"
    "◭◴◶◸◹◺◿☀☸☼☿♀♁♂♃♄♅♆♠♡♢♤♥♧♩♪♫♬♭♮♯⟅⟆⧫⩪⩫⬒⬓⬖⬗⬘⬙⬚ⱤⱵ⸟꜈꜍꜓꜔꜕꜖ꞐꞪª¼ÅÈÍÑÒÚÝàåèìñóÿĄĆćĘęĞğĥķņŉŔŕŗŚśťŴŹźưǖǢǣǨǩǬǮȘΈ"
    "ΎΏΐήϊώϒϔϰЍќӁӚӟӬӴӸևḁḂḄḉḍḎḜḝḺḾḿṂṊṔṕṜṝṩṫṲṼẈẊẓẘẬậỨứỰἂἆἊἎἐἚἦἪἮἺἾὊὌὛὟὦὮᾀᾈᾏᾘᾚᾞᾠᾦᾨᾪᾭᾮᾳῦ…‴‷‼⁇⁈⁉№™⅐⅔⅘⅚⅟⇎∄∉≠⊄⊅!"
    "[{¡¥ßðŋƊƋƓƣƱƳƷɐɠɥɷɾɿʅʆʔʣʨΩξςτϡ϶ЊЩЬђѢҺӄӇԵԺՆՇՉՐէձճմնչ฿აზოჟსტღყცჱჲჳჵჶჺᴔᶅ‱‽₴↤↦↪↴⇁⇂⇃⇋⇞⇮⇻⇿∂∜∻≂≃≈≡⊑⊒⊔⊕⎝⎞⎠⎣⎨"
    "▤▬►▽◄◍◎◕◖◘◙◛◠◡◩◪◮◰◱◲◳◵◷◾☺♇➡⟠⬅⬆⬇⬈⬉⬊⬋⬔⬕⸘⸮º¾íďĢĳĶŤơǭǿȑȱΊΰЃйӛӵᶳḅḈḟḸḹḼṃṵṾẁẍẙỡỢỴἌἒἸἼὈᾆᾊῊῳῺῼ⅑⅞↉ꟹﬁ}®Ø÷ŁłƂƈƍƎ"
    "ƏƐƗƪƶƻƼƽƿȺɄɗɞɨɩɪʈʋʌʓʖʗʘʚʠ˥ΓδκμσφϛϺϼϾϿдлщыєћґғҫұԱԲԴԽՅՋՏբըշվփბიპძწჸᴈ†⁆₦↑↕↠↩⇌⇑⇓⇔⇠⇢⇣⇦⇨⇪⇭⇯⇺⇼∀∏∧∫≔⊍⊓⊖⊘⊟⊡⌨⍽"
    "⎛⎜▥▧▨△◇●◗☹♣⟩⟷ⱭⱮⱷⱹⱾ꜉꜊꜋꜌꜎꜏꜐꜑꜒ÏáâéêîòúąĉĎĤĭĴĵĽľĿōŖŝūŮųżƠǯǾȚțʱΆάϐϑϓϖϱӂӞӪӭӹჼᴭᴷᶡḀḒḘḞḤḩḬṟṯṸẋẒẕẗợựἔἘἜἰἳἴἶὃὖὙ"
)

_MARGIN = 2  # pixels around a glyph, so that blending at its edge sees its outside
_CACHED_BYTES = 2**27  # of pixels, up to which a set is cached; drawing takes longer than a small step


class GlyphsSource(Source):
    """One glyph an image of size x size pixels, in more fonts, poses, colours and clutter the higher the difficulty.

    Difficulty 0 is black on white, upright and centred but for a jitter of 2 %, in one font. At 1 all of these are
    random, over pieces of other glyphs, behind lines, blurred and noisy; a person can still read them. Some glyphs
    mirror others (b and d), so recipes do better with data.flip=0. The splits "train" and "validation" share no draws.
    """

    def __init__(self, classes: int, images: int, split: str, size: int, difficulty: float):
        """Raises DataError: there are no fonts."""
        self.place = "data.source=glyphs"
        self.classes = tuple(f"U+{ord(glyph):04X} {unicode_name(glyph)}" for glyph in GLYPHS[:classes])
        self.labels = np.arange(images, dtype=np.int64) % classes
        self._split, self._size, self._difficulty = split, size, difficulty
        self._is_small = images * 3 * size * size <= _CACHED_BYTES
        _tools(size)  # errors come now, and forked workers inherit them

    def name(self, index: int) -> str:
        return f"glyphs/{self._split}/{index}"

    def read(self, index: int) -> torch.Tensor:
        if not self._is_small:
            return self._drawn(index)
        drawn = _cache_of(len(self.classes), self._split, self._size, self._difficulty)
        if index not in drawn:
            drawn[index] = self._drawn(index)
        return drawn[index]

    def draw_ahead(self) -> None:
        """Draw all images of a small set, so that forked processes need not."""
        for index in range(len(self.labels) if self._is_small else 0):
            self.read(index)

    def _drawn(self, index: int) -> torch.Tensor:
        """uint8 [3, size, size]."""
        size, hard = self._size, self._difficulty
        stream = Stream(key("glyphs", self._split, int(index)))  # NumPy's integers would be other keys
        tools = _tools(size)
        glyph = GLYPHS[self.labels[index]]
        mask = _posed(glyph, tools.fonts[stream.integer(1 + round(hard * (len(FONTS) - 1)))], size, hard, stream)
        light_on_dark = stream.uniform() < hard / 2
        near, far = (_colour(stream, not light_on_dark, hard) for _ in range(2))
        ink = _colour(stream, light_on_dark, hard)
        image = Image.new("RGB", (size, size), near)
        if hard:
            image.paste(far, (0, 0), _gradient(tools.ramp, size, stream.uniform(0, 2 * math.pi)))
        draw = ImageDraw.Draw(image)
        behind, before = stream.integer(1 + round(5 * hard)), stream.integer(1 + round(2 * hard))
        for _ in range(behind):
            _add_scrap(image, tools.scraps[stream.integer(len(tools.scraps))], stream)
            _add_line(draw, size, stream)
        image.paste(ink, (0, 0), mask)
        for _ in range(before):
            _add_line(draw, size, stream)
        radius = 0.02 * size * hard * stream.uniform()
        if radius > 0.05:  # less is not seen
            image = image.filter(ImageFilter.BoxBlur(radius))
        pixels = np.frombuffer(image.tobytes(), dtype=np.uint8).reshape(size, size, 3).transpose(2, 0, 1)
        strength = round(80 * hard * stream.uniform())
        if strength:
            start = stream.integer(len(tools.noise) - pixels.size + 1)
            return torch.from_numpy(_noisy(pixels, strength, tools.noise[start : start + pixels.size]))
        return torch.from_numpy(np.array(pixels, order="C"))


@SOURCES.implements(Glyphs)
def _open(data: Glyphs, classes: int, split: str) -> Source:
    return GlyphsSource(classes, data.images(split), split, data.glyph_size, data.glyph_difficulty)


@functools.lru_cache(maxsize=2)  # training and validation
def _cache_of(classes: int, split: str, size: int, difficulty: float) -> Dict[int, torch.Tensor]:
    """Images of such a set that this process has drawn, by number."""
    return {}


class _Tools(NamedTuple):
    """Fonts and materials for images of one size."""

    fonts: Tuple[ImageFont.FreeTypeFont, ...]  # as FONTS
    scraps: Tuple[Image.Image, ...]  # coverage of small glyphs, for clutter
    ramp: Image.Image  # 256 rows, from 0 to 255
    noise: np.ndarray  # int16 in [-128, 128), twice what an image needs


@functools.lru_cache(maxsize=4)
def _tools(size: int) -> _Tools:
    """Raises DataError."""
    try:
        import matplotlib
    except ImportError:
        raise DataError(
            "data.source=glyphs: its fonts come with matplotlib, which is not installed; pip install matplotlib"
        ) from None
    large, small = [], []
    for font in FONTS:
        path = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
        with open(path, "rb") as file:  # into memory: forked workers would share the position in an open file
            encoded = file.read()
        # Raqm is slower, and not in every Pillow.
        for fonts, em in (large, size), (small, size // 2):
            fonts.append(ImageFont.truetype(io.BytesIO(encoded), em, layout_engine=ImageFont.Layout.BASIC))
    words = bits32(key("glyphs noise"), np.arange(-(-6 * size * size // 4), dtype=np.int64))
    return _Tools(
        fonts=tuple(large),
        scraps=tuple(_upright(glyph, font) for glyph in GLYPHS[:: len(GLYPHS) // 50] for font in small),
        ramp=Image.linear_gradient("L"),
        noise=words.astype("<u4").view(np.int8).astype(np.int16),
    )


def _upright(glyph: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Coverage of the glyph as the font has it: "L" image of its size and a margin."""
    left, top, right, bottom = font.getbbox(glyph)
    image = Image.new("L", (right - left + 2 * _MARGIN, bottom - top + 2 * _MARGIN))
    ImageDraw.Draw(image).text((_MARGIN - left, _MARGIN - top), glyph, fill=255, font=font)
    return image


def _posed(glyph: str, font: ImageFont.FreeTypeFont, size: int, hard: float, stream: Stream) -> Image.Image:
    """Coverage of the glyph in a random pose: "L" image of size x size."""
    upright = _upright(glyph, font)
    left, top, right, bottom = upright.getbbox()
    share = stream.uniform(0.68 - 0.2 * hard, 0.72 + 0.1 * hard)
    angle = math.radians(20) * hard * stream.uniform(-1, 1)
    shear = 0.3 * hard * stream.uniform(-1, 1)
    stretch = math.exp(0.2 * hard * stream.uniform(-1, 1))
    reach = min(0.02 + 0.13 * hard, (1 - share) / 2) * size
    x, y = (size / 2 + reach * stream.uniform(-1, 1) for _ in range(2))
    # Pillow takes the inverse of rotation x shear x stretch, about the centres of both: from the result to `upright`.
    scale = max(right - left, bottom - top) / (share * size)
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    a, b = (cos + shear * sin) / stretch, (sin - shear * cos) / stretch
    d, e = -sin * stretch, cos * stretch
    c = (left + right) / 2 - a * x - b * y
    f = (top + bottom) / 2 - d * x - e * y
    return upright.transform((size, size), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR)


def _gradient(ramp: Image.Image, size: int, angle: float) -> Image.Image:
    """The ramp turned by `angle`, in radians: "L" image of size x size."""
    scale = ramp.width / math.sqrt(2) / size  # the image stays inside the ramp at every angle
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    middle, half = ramp.width / 2, size / 2
    rows = (cos, -sin, middle - (cos - sin) * half, sin, cos, middle - (sin + cos) * half)
    return ramp.transform((size, size), Image.Transform.AFFINE, rows)


def _colour(stream: Stream, light: bool, hard: float) -> Tuple[int, ...]:
    """A light or a dark colour: every channel of the one is at least 35 levels above that of the other."""
    levels = [round(110 / 255 * hard * byte) for byte in _bytes(stream)[:3]]
    return tuple(255 - level if light else level for level in levels)


def _add_scrap(image: Image.Image, scrap: Image.Image, stream: Stream) -> None:
    """Put another, small glyph where the border cuts it."""
    turn, distance, *channels, _, _, _ = _bytes(stream)
    angle, distance = 2 * math.pi / 256 * turn, image.width * (0.45 + 0.2 / 255 * distance)
    left = (image.width - scrap.width) / 2 + distance * math.cos(angle)
    top = (image.height - scrap.height) / 2 + distance * math.sin(angle)
    image.paste(_middling(channels), (round(left), round(top)), scrap)


def _add_line(draw: ImageDraw.ImageDraw, size: int, stream: Stream) -> None:
    drawn = _bytes(stream)
    draw.line([size / 255 * end for end in drawn[:4]], fill=_middling(drawn[4:7]), width=max(1, size // 40))


def _middling(channels: Sequence[int]) -> Tuple[int, ...]:
    return tuple(60 + (channel >> 1) for channel in channels)


def _bytes(stream: Stream) -> bytes:
    """Eight random bytes: a draw each would take most of the time of an image."""
    return stream.bits().to_bytes(8, "little")


def _noisy(pixels: np.ndarray, strength: int, noise: np.ndarray) -> np.ndarray:
    """Add noise (int16 in [-128, 128), one number a pixel) scaled to `strength` levels from end to end."""
    return np.clip((noise.reshape(pixels.shape) * np.int16(strength) >> 8) + pixels, 0, 255).astype(np.uint8, order="C")
