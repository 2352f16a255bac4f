"""Decodes image files with Pillow, and stacks images of equal size. Images are scaled only if ``data.size`` is set."""

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import COLOUR_READ_OFF, SIZE_READ_OFF, most_bytes
from fl_sim.data.naming import OwnName
from fl_sim.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})

MOST_SIDE: Final = 4096

_GREY, _COLOUR = frozenset({"1", "L"}), frozenset({"P", "RGB", "RGBA"})
_ORIENTATION: Final = 0x0112  # number of EXIF's tag for the camera's orientation
_DEEP = frozenset({"I", "I;16", "I;16B", "I;16L"})

Pixels: TypeAlias = tuple[NDArray[np.uint8], bool]
"""(pixels of shape (height, width) or (height, width, 3), True if EXIF data rotated or mirrored the image)"""


@dataclass(frozen=True)
class ImageSettings:
    """The settings ``data.size`` and ``data.values`` for image files.

    ``size``: the (width, height) to which images are scaled; None keeps the original size. ``values``: for images with
    16 bits per pixel, the two pixel values that become 0 and 255. With None, such images are refused.
    """

    size: tuple[int, int] | None = None
    values: tuple[int, int] | None = None

    def described(self) -> str:
        """Describe the changes that these settings make to images, for ``Dataset.note``; empty if there are none."""
        size = f"images scaled to {self.size[0]}x{self.size[1]}" if self.size else ""
        values = f"values {self.values[0]}..{self.values[1]} of 16 bits became 0..255" if self.values else ""
        return "; ".join(filter(None, (size, values)))

    @property
    def read_off(self) -> tuple[str, ...]:
        """The facts that were read from the private images and determine the model's input shape.

        One fact is the presence of colour in any image. If ``size`` is None, the size of the images is another fact.
        ``Dataset`` stores these facts in its field ``read_off``, and every privacy statement lists them.
        """
        return (COLOUR_READ_OFF,) if self.size else (SIZE_READ_OFF, COLOUR_READ_OFF)


def image_settings(own: OwnName) -> ImageSettings:
    """Return the settings for images from the parsed name of a data set. Raises UserError for an invalid value."""
    size, values = own.option("size"), own.option("values")
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", size)
    if size and (found is None or max(map(int, found.groups())) > MOST_SIDE):
        raise UserError(f"data.size = {size!r}: write WIDTHxHEIGHT in pixels, such as 32x32, at most {MOST_SIDE}")
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", values)
    if values and (ends is None or int(ends[1]) >= int(ends[2])):
        raise UserError(f"data.values = {values!r}: write LOW..HIGH, two whole numbers, such as 0..65535")
    return ImageSettings(
        (int(found[1]), int(found[2])) if found else None, (int(ends[1]), int(ends[2])) if ends else None
    )


def decoded(content: bytes, where: str, settings: ImageSettings) -> Pixels:
    """Decode the bytes of an image file to grey or RGB pixels. ``where``: the file, for error messages.

    Raises UserError for several pages, transparency and unsupported pixel types. Pillow's warnings are suppressed,
    because they report damage that Pillow tolerates. Pillow receives bytes, not a path, because Pillow 12 rotates a
    memory-mapped TIFF file twice.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 (only images need it)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(BytesIO(content)) as opened:
            image: Any = opened
            mode, is_deep = image.mode, ";16" in str(getattr(image, "tile", ""))
            if (pages := getattr(image, "n_frames", 1)) > 1:
                raise UserError(f"{where} holds {pages} pages or frames; save each of them as a separate file")
            is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
            image.load()  # Pillow's ``load`` rotates TIFF images; ``exif_transpose`` rotates images of other formats
            image = ImageOps.exif_transpose(image)
            if _has_transparency(image):
                raise UserError(
                    f"{where} has transparent pixels, which have no colour; save the image on an opaque background"
                )
            if mode in _DEEP:
                image = Image.fromarray(_with_8_bits(image, where, settings.values))
            elif is_deep:
                raise UserError(f"{where}: colour with 16 bits per channel is not supported; save it with 8 bits")
            elif mode in _GREY | _COLOUR:
                image = image.convert("L" if mode in _GREY else "RGB")
            else:
                raise UserError(f"{where}: pixels of mode {mode!r} are not supported; save it as 8-bit grey or RGB")
            if settings.size is not None and image.size != settings.size:
                image = image.resize(settings.size, resample=2)  # 2 is Pillow's bilinear filter, with antialiasing
            return np.asarray(image), is_turned


def scaled(images: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Scale ``images`` (n, channels, height, width) to ``size`` (width, height), bilinearly with antialiasing.

    Each channel is scaled separately. For image files, the setting ``data.size`` gives the same results.
    """
    from PIL import Image  # noqa: PLC0415 (only images need it)

    if images.shape[:1:-1] == size:
        return images
    new = np.empty((*images.shape[:2], size[1], size[0]), dtype=np.uint8)
    for place in np.ndindex(*images.shape[:2]):
        new[place] = np.asarray(Image.fromarray(np.ascontiguousarray(images[place])).resize(size, resample=2))
    return new


def stack_images(
    opened: Iterable[tuple[str, Callable[[], Pixels]]], count: int
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Read ``count`` images into one array (records, channels, height, width).

    Returns the array, and lines for ``Dataset.inferred``. If all images are grey, the array has one channel, else
    three. ``opened``: for each image, a name for error messages and a function that reads the image. Raises UserError
    if an image has another size than the first, or if the images need more than half of the memory.
    """
    images: list[NDArray[np.uint8]] = []
    first, turned = "", 0
    for where, read in opened:
        image, is_turned = read()
        turned += is_turned
        size = f"{image.shape[1]}x{image.shape[0]}"
        if not images:
            first = where
            if 2 * 3 * count * image.shape[0] * image.shape[1] > most_bytes():
                raise UserError(
                    f"{count:,} images of {size} pixels take more than half of this machine's memory; scale "
                    "them by data.size=WIDTHxHEIGHT, or use fewer images"
                )
        elif image.shape[:2] != images[0].shape[:2]:
            usual = f"{images[0].shape[1]}x{images[0].shape[0]}"
            raise UserError(
                f"{where} has {size} pixels, but {first} has {usual}; give all images one size, or scale them, for "
                f"example with data.size={usual}"
            )
        images.append(image)
    form = f"rotated or mirrored as their EXIF orientation says: {turned:,} of {count:,} images"
    if all(image.ndim == 2 for image in images):
        return np.stack(images)[:, np.newaxis], ("images are grey", form)
    coloured = [image if image.ndim == 3 else np.repeat(image[..., np.newaxis], 3, axis=2) for image in images]
    kept = "images are RGB (in grey images the three channels are equal)"
    return np.stack(coloured).transpose(0, 3, 1, 2), (kept, form)


def _has_transparency(image: Any) -> bool:
    if image.mode == "RGBA":
        alpha = image
    elif image.mode in _GREY | _COLOUR and "transparency" in image.info:
        alpha = image.convert("RGBA")
    else:
        return False
    return bool(alpha.getextrema()[3][0] < 255)


def _with_8_bits(image: Any, where: str, values: tuple[int, int] | None) -> NDArray[np.uint8]:
    if values is None:
        raise UserError(
            f"{where} has 16 bits per pixel: set the values that become 0 and 255, for example data.values=0..65535 "
            "(or 0..4095 for a device with 12 bits), or save the image with 8 bits"
        )
    low, high = values
    scaled = (np.clip(np.asarray(image, dtype=np.float64), low, high) - low) * 255 / (high - low)
    return np.rint(scaled).astype(np.uint8)
