"""Kinds of files that are no JPEG and no PNG, known by their first bytes.

They are for errors that say what a file is.
"""

import os
import re
from typing import Optional

# What the first bytes are, and the kind as users call it; the first that fits counts.
_SIGNATURES = (
    (rb"RIFF....WEBP", "a WebP file"),
    (rb"GIF8[79]a", "a GIF file"),
    (rb"BM....\0\0\0\0", "a BMP file"),
    (rb"II[\x2a\x2b]\0|MM\0[\x2a\x2b]", "a TIFF file (or a raw photograph)"),
    (rb"....ftyp(?:avif|avis)", "an AVIF file"),
    (rb"....ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1)", "a HEIC file"),
    (rb"....ftyp", "a video"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "a JPEG XL file"),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000 file"),
    (rb"P[1-6]\s", "a PNM file"),
    (rb"8BPS", "a Photoshop file"),
    (rb"%PDF", "a PDF file"),
    (rb"\x1f\x8b|PK\x03\x04|Rar!|7z\xbc\xaf", "an archive"),
    (rb"version https://git-lfs", "a Git LFS pointer, so the file itself was not fetched"),
    (rb"(?:\xef\xbb\xbf)?\s*(?i:<!doctype html|<html|<head|<body)", "a web page"),
    (rb"(?:\xef\xbb\xbf)?\s*<(?:svg|\?xml|!--)", "SVG or other XML"),
    (rb"(?:\xef\xbb\xbf)?\s*[{\[]", "JSON or other text"),
    (rb"\0+\Z", "zeros only"),
)
_KINDS = tuple((re.compile(pattern, re.DOTALL), kind) for pattern, kind in _SIGNATURES)
_READ = 512  # bytes that are looked at
_EXTENSIONS = (".jpg", ".jpeg", ".png")


def described(encoded: bytes, name: str) -> str:
    """Return what a file that is neither JPEG nor PNG is, as the end of an error about it.

    Args:
        encoded: its content.
        name: its path, whose extension may say something else.

    Returns:
        ", but KIND", or "" if that is not known.
    """
    # Patterns may look far ahead: a bound keeps them quick on files of gigabytes.
    kind = _kind(encoded[:_READ])
    if kind is None:
        return ""
    extension = os.path.splitext(name)[1]
    if extension.lower() in _EXTENSIONS:
        kind += f" named {extension}"
    return f", but {kind}"


def _kind(start: bytes) -> Optional[str]:
    """Return the kind of a file that begins like this."""
    for pattern, kind in _KINDS:
        if pattern.match(start):
            return kind
    return None
