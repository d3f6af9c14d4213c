"""Glyphs: images of up to a thousand kinds of characters, drawn when they are needed.

The fonts are matplotlib's. An image is a function of its number; small sets are drawn once a
process. Pillow 10.4 and 13.0 draw the same pixels.
"""

import functools
import io
import math
import os
from typing import Dict, NamedTuple, Sequence, Tuple, TypeVar
from unicodedata import name as unicode_name

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from common.errors import DataError
from data.base import SOURCES, Source
from recipe.images import Glyphs
from recipe.randomness import Stream, bits32, key

T = TypeVar("T")

# The first is the only one at difficulty 0.
FONTS = (
    "DejaVuSans",
    "DejaVuSerif",
    "DejaVuSansMono",
    "DejaVuSans-Bold",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
)
# By class; never reorder. Of the glyphs that all fonts have, those that resemble an earlier one
# were left out (Greek Alpha for A, O for 0), by the highest cosine of their images over fonts and
# rotations by 0 and 10 degrees.
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
# Bytes of pixels up to which a set is cached; drawing takes longer than a small step.
_CACHED_BYTES = 2**27
_SCRAPS = 50  # glyphs, of each font, that are drawn as clutter


class GlyphsSource(Source):
    """One glyph an image, in more fonts, poses, colours and clutter the higher the difficulty.

    Difficulty 0 is black on white, upright and centred but for a jitter of 2 %, in one font. At 1
    all of these are random, over pieces of other glyphs, behind lines, blurred and noisy; a person
    can still read them. Some glyphs mirror others (b and d), so recipes do better with data.flip=0.
    The splits "train" and "validation" share no draws.
    """

    def __init__(self, classes: int, images: int, split: str, size: int, difficulty: float):
        """
        Args:
            classes: the first of GLYPHS, up to 1,000.
            images: how many there are.
            split: "train" or "validation".
            size: pixels a side.
            difficulty: 0 to 1.

        Raises:
            DataError: there are no fonts.
        """
        self.place = "data.source=glyphs"
        self.classes = tuple(map(_class_name, GLYPHS[:classes]))
        self.labels = np.arange(images, dtype=np.int64) % classes
        self._split = split
        self._size = size
        self._difficulty = difficulty
        bytes_of_image = 3 * size * size
        self._is_small = images * bytes_of_image <= _CACHED_BYTES
        _tools(size)  # errors come now, and forked workers inherit them

    def name(self, index: int) -> str:
        """Return the split and the number of image `index`."""
        return f"glyphs/{self._split}/{index}"

    def read(self, index: int) -> torch.Tensor:
        """Return image number `index`, drawn where it is not cached: uint8 [3, size, size]."""
        if not self._is_small:
            return self._draw(index)
        cache = _cache_of(len(self.classes), self._split, self._size, self._difficulty)
        if index not in cache:
            cache[index] = self._draw(index)
        return cache[index]

    def draw_ahead(self) -> None:
        """Draw all images of a small set, so that forked processes need not."""
        if self._is_small:
            for index in range(len(self.labels)):
                self.read(index)

    def _draw(self, index: int) -> torch.Tensor:
        """Draw image number `index`: uint8 [3, size, size].

        The order of the draws from the stream is part of the data set.
        """
        stream = Stream(key("glyphs", self._split, int(index)))  # NumPy's integers would be others
        size = self._size
        difficulty = self._difficulty
        tools = _tools(size)
        # Pose and colours come first: the number of later draws varies, and must not change them.
        more_fonts = round(difficulty * (len(FONTS) - 1))
        font = _one_of(tools.fonts[: 1 + more_fonts], stream)
        glyph = GLYPHS[self.labels[index]]
        mask = _posed(glyph, font, size, difficulty, stream)
        light_on_dark = stream.uniform() < difficulty / 2
        near = _colour(stream, not light_on_dark, difficulty)
        far = _colour(stream, not light_on_dark, difficulty)
        ink = _colour(stream, light_on_dark, difficulty)
        # From the back to the front: ground, clutter behind the glyph, the glyph, lines before it.
        # At most two of these are before it, so that a person can read it.
        image = Image.new("RGB", (size, size), near)
        if difficulty:
            angle = stream.uniform(0, 2 * math.pi)
            shade = _gradient(tools.ramp, size, angle)
            image.paste(far, (0, 0), shade)
        draw = ImageDraw.Draw(image)
        behind = stream.integer(1 + round(5 * difficulty))
        before = stream.integer(1 + round(2 * difficulty))
        for _ in range(behind):
            scrap = _one_of(tools.scraps, stream)
            _add_scrap(image, scrap, stream)
            _add_line(draw, size, stream)
        image.paste(ink, (0, 0), mask)
        for _ in range(before):
            _add_line(draw, size, stream)
        return _photographed(image, tools.noise, difficulty, stream)


def _class_name(glyph: str) -> str:
    """Return the glyph's number and name in Unicode."""
    return f"U+{ord(glyph):04X} {unicode_name(glyph)}"


@SOURCES.implements(Glyphs)
def _open(data: Glyphs, classes: int, split: str) -> Source:
    """Open a split, whose images are drawn when they are read."""
    return GlyphsSource(
        classes,
        data.images(split),
        split,
        size=data.glyph_size,
        difficulty=data.glyph_difficulty,
    )


@functools.lru_cache(maxsize=2)  # training and validation
def _cache_of(classes: int, split: str, size: int, difficulty: float) -> Dict[int, torch.Tensor]:
    """Return the images of such a set that this process has drawn, by number."""
    return {}


class _Tools(NamedTuple):
    """Fonts and materials for images of one size."""

    fonts: Tuple[ImageFont.FreeTypeFont, ...]  # as FONTS
    scraps: Tuple[Image.Image, ...]  # coverage of small glyphs, for clutter
    ramp: Image.Image  # 256 rows, from 0 to 255
    noise: np.ndarray  # int16 in [-128, 128), twice what an image needs


@functools.lru_cache(maxsize=4)
def _tools(size: int) -> _Tools:
    """Load fonts and make materials. Raises DataError."""
    try:
        import matplotlib
    except ImportError:
        fault = "its fonts come with matplotlib, which is not installed; pip install matplotlib"
        raise DataError(f"data.source=glyphs: {fault}") from None
    folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
    large = []
    small = []
    for name in FONTS:
        # Into memory: forked workers would share the position in an open file.
        with open(os.path.join(folder, f"{name}.ttf"), "rb") as file:
            encoded = file.read()
        large.append(_font(encoded, size))
        small.append(_font(encoded, size // 2))
    scraps = []
    for glyph in GLYPHS[:: len(GLYPHS) // _SCRAPS]:
        for font in small:
            scraps.append(_upright(glyph, font))
    return _Tools(
        fonts=tuple(large),
        scraps=tuple(scraps),
        ramp=Image.linear_gradient("L"),
        noise=_drawn_noise(size),
    )


def _drawn_noise(size: int) -> np.ndarray:
    """Return int16 in [-128, 128), for images of `size` pixels a side.

    The noise of an image is a part of this, from a random place on: a draw for each pixel would
    take longer than all the rest.
    """
    words = -(-6 * size * size // 4)  # of four bytes; 3 channels, twice
    bits = bits32(key("glyphs noise"), np.arange(words, dtype=np.int64))
    return bits.astype("<u4").view(np.int8).astype(np.int16)


def _font(encoded: bytes, em: int) -> ImageFont.FreeTypeFont:
    """Return the font in a file's bytes, of `em` pixels."""
    basic = ImageFont.Layout.BASIC  # Raqm is slower, and not in every Pillow
    return ImageFont.truetype(io.BytesIO(encoded), em, layout_engine=basic)


def _upright(glyph: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Return the coverage of a glyph as the font has it: "L" image of its size and a margin."""
    left, top, right, bottom = (int(edge) for edge in font.getbbox(glyph))
    width = right - left + 2 * _MARGIN
    height = bottom - top + 2 * _MARGIN
    image = Image.new("L", (width, height))
    corner = (_MARGIN - left, _MARGIN - top)
    ImageDraw.Draw(image).text(corner, glyph, fill=255, font=font)
    return image


def _posed(
    glyph: str,
    font: ImageFont.FreeTypeFont,
    size: int,
    difficulty: float,
    stream: Stream,
) -> Image.Image:
    """Return the coverage of the glyph in a random pose: "L" image of size x size."""
    upright = _upright(glyph, font)
    ink = upright.getbbox()
    assert ink is not None, f"{glyph} has ink in every font"
    return upright.transform(
        (size, size),
        Image.Transform.AFFINE,
        _draw_pose(size, difficulty, stream).from_result(size, ink),
        resample=Image.Resampling.BILINEAR,
    )


class _Pose(NamedTuple):
    """Where a glyph is in an image, and how it is distorted: rotation x shear x stretch.

    x and y are where its centre goes, in pixels.
    """

    share: float  # of the image's side that its longer side takes
    angle: float  # radians
    shear: float
    stretch: float  # by which it is narrower, and as much higher
    x: float
    y: float

    def from_result(self, size: int, ink: Tuple[int, int, int, int]) -> Tuple[float, ...]:
        """Return the affine map from the image's pixels to those of the upright glyph.

        Args:
            size: pixels a side of the image.
            ink: left, top, right and bottom edge of the upright glyph.
        """
        left, top, right, bottom = ink
        centre_x = (left + right) / 2
        centre_y = (top + bottom) / 2
        # Pillow takes the inverse of the pose: (x, y) -> (a x + b y + c, d x + e y + f).
        longer = max(right - left, bottom - top)
        scale = longer / (self.share * size)
        cos = scale * math.cos(self.angle)
        sin = scale * math.sin(self.angle)
        a = (cos + self.shear * sin) / self.stretch
        b = (sin - self.shear * cos) / self.stretch
        d = -sin * self.stretch
        e = cos * self.stretch
        # The offsets make the centres of both meet.
        c = centre_x - a * self.x - b * self.y
        f = centre_y - d * self.x - e * self.y
        return a, b, c, d, e, f


def _draw_pose(size: int, difficulty: float, stream: Stream) -> _Pose:
    """Draw a pose for an image of `size` pixels a side."""
    smallest = 0.68 - 0.2 * difficulty
    largest = 0.72 + 0.1 * difficulty
    share = stream.uniform(smallest, largest)
    angle = math.radians(20) * difficulty * stream.uniform(-1, 1)
    shear = 0.3 * difficulty * stream.uniform(-1, 1)
    stretch = math.exp(0.2 * difficulty * stream.uniform(-1, 1))
    # A glyph that is not turned stays inside of the image.
    room = (1 - share) / 2
    reach = min(0.02 + 0.13 * difficulty, room) * size
    middle = size / 2
    x = middle + reach * stream.uniform(-1, 1)
    y = middle + reach * stream.uniform(-1, 1)
    return _Pose(share, angle, shear, stretch, x=x, y=y)


def _gradient(ramp: Image.Image, size: int, angle: float) -> Image.Image:
    """Return the ramp turned by `angle`, in radians: "L" image of size x size."""
    scale = ramp.width / math.sqrt(2) / size  # the image stays inside the ramp at every angle
    cos = scale * math.cos(angle)
    sin = scale * math.sin(angle)
    middle = ramp.width / 2
    half = size / 2
    # The middle of the image shows that of the ramp.
    x_offset = middle - (cos - sin) * half
    y_offset = middle - (sin + cos) * half
    to_ramp = (cos, -sin, x_offset, sin, cos, y_offset)
    return ramp.transform((size, size), Image.Transform.AFFINE, to_ramp)


def _colour(stream: Stream, light: bool, difficulty: float) -> Tuple[int, ...]:
    """Return a light or a dark colour.

    Every channel of the one is at least 35 levels above that of the other.
    """
    levels = [round(110 / 255 * difficulty * byte) for byte in _bytes(stream)[:3]]
    if light:
        levels = [255 - level for level in levels]
    return tuple(levels)


def _add_scrap(image: Image.Image, scrap: Image.Image, stream: Stream) -> None:
    """Put another, small glyph where the border cuts it."""
    turn, reach, *channels = _bytes(stream)[:5]
    # About the middle of the image, at a distance near half its side.
    angle = 2 * math.pi / 256 * turn
    distance = image.width * (0.45 + 0.2 / 255 * reach)
    right = distance * math.cos(angle)
    down = distance * math.sin(angle)
    left = (image.width - scrap.width) / 2 + right
    top = (image.height - scrap.height) / 2 + down
    corner = (round(left), round(top))
    image.paste(_middling(channels), corner, scrap)


def _add_line(draw: ImageDraw.ImageDraw, size: int, stream: Stream) -> None:
    """Draw a line between two points anywhere."""
    drawn = _bytes(stream)
    ends = [size / 255 * end for end in drawn[:4]]
    colour = _middling(drawn[4:7])
    draw.line(ends, fill=colour, width=max(1, size // 40))


def _middling(channels: Sequence[int]) -> Tuple[int, ...]:
    """Return a colour of middling levels, from three random bytes."""
    return tuple(60 + (channel >> 1) for channel in channels)


def _one_of(options: Sequence[T], stream: Stream) -> T:
    """Draw one of several things."""
    return options[stream.integer(len(options))]


def _bytes(stream: Stream) -> bytes:
    """Return eight random bytes: a draw each would take most of the time of an image."""
    return stream.bits().to_bytes(8, "little")


def _photographed(
    image: Image.Image,
    noise: np.ndarray,
    difficulty: float,
    stream: Stream,
) -> torch.Tensor:
    """Blur an image and add noise: "RGB" of size x size to uint8 [3, size, size]."""
    # Blur comes before noise, as in a camera, or it would take the noise away.
    radius = 0.02 * image.width * difficulty * stream.uniform()
    if radius > 0.05:  # less is not seen
        image = image.filter(ImageFilter.BoxBlur(radius))
    rows = np.frombuffer(image.tobytes(), dtype=np.uint8)
    pixels = rows.reshape(image.height, image.width, 3).transpose(2, 0, 1)
    strength = round(80 * difficulty * stream.uniform())
    if not strength:
        return torch.from_numpy(np.array(pixels, order="C"))
    start = stream.integer(len(noise) - pixels.size + 1)
    part = noise[start : start + pixels.size]
    return torch.from_numpy(_noisy(pixels, strength, part))


def _noisy(pixels: np.ndarray, strength: int, noise: np.ndarray) -> np.ndarray:
    """Add noise, scaled to `strength` levels from end to end.

    Args:
        pixels: uint8, any shape.
        strength: levels.
        noise: int16 in [-128, 128), one number a pixel.
    """
    # In 16 bits, which hold every product and sum.
    added = noise.reshape(pixels.shape) * np.int16(strength) >> 8
    noisy = np.clip(added + pixels, 0, 255)
    return noisy.astype(np.uint8, order="C")
