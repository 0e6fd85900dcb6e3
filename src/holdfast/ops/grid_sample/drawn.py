"""Random problems of grid_sample for ``holdfast bench --drawn``."""

from __future__ import annotations

from functools import partial

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.ops.grid_sample.models import GridSampleModel

#: The kinds of grids, and how often each is drawn. The last two are for images only.
_KINDS = {"affine": 3, "affine + noise": 3, "random": 2, "windows": 1, "around centres": 1}
_PADDINGS = {"zeros": 4, "border": 1, "reflection": 1}
#: Image sizes and channels are at most this; an image has about as many pixels as this, or more.
_LONGEST, _CHANNELS, _PIXELS = 4096, 512, 64


def _draw(sizes: RandomSizes, axes: int) -> GridSampleModel:
    kinds = list(_KINDS)[: None if axes == 2 else 3]
    kind = sizes.one_of(kinds, [_KINDS[kind] for kind in kinds])
    modes = {"bilinear": 6, "nearest": 1, **({"bicubic": 1} if axes == 2 else {})}
    mode, padding = (sizes.one_of(list(of), list(of.values())) for of in (modes, _PADDINGS))
    half = max(sizes.elements // 2, 1)
    channels = sizes.size(1, min(_CHANNELS, max(half // _PIXELS, 1)))
    most = max(half // channels // _PIXELS, 1)
    images = sizes.size(1, most if kind == "windows" else min(most, 64))
    image = sizes.image(max(half // channels // images, 1), axes)
    image = tuple(min(size, _LONGEST) for size in image)
    if kind == "windows":
        side = 2 * sizes.size(1, 5) + 1
        size: tuple[int, ...] = (side, side)
    elif kind == "around centres":
        size = (sizes.near(image[0] * image[1] / 8, 8), sizes.one_of((4, 8)))
    else:
        size = image if sizes.chance(2) else tuple(sizes.near(size, 1.5) for size in image)
    return GridSampleModel(
        f"grid_sample {axes}-D", "", sizes.real, (images, channels, *image), size, kind,
        mode=mode, padding=padding,
    )  # fmt: skip


DRAWS: dict[str, DrawCase] = {f"grid_sample {axes}-D": partial(_draw, axes=axes) for axes in (2, 3)}
