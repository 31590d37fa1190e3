"""Damaged image files through every reader of images."""

from collections.abc import Mapping

from fuzz_images import MAX_GROWTH, fuzz_readers

from .part import Part


class Images(Part):
    name = "images"
    what = "damaged image files, through every reader of images"
    promise = "decoded, or refused as unreadable; bounded memory"
    count, per_case, per_chunk = 5_000, 50, 10
    patience = 120.0
    spare_memory = MAX_GROWTH

    def run(self, case: int) -> Mapping[str, int]:
        return fuzz_readers(self.folder, count=self.per_case, seed=self.draw(case).getrandbits(32))
