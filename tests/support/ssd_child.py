"""Run as a process of its own: writes blocks into a tier until it is full or ``BLOCKS`` are in, reads them back, prints what
it found. Arguments: folder, bytes of the tier, limit of a file's size in bytes (0: none)."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from pathlib import Path

from support.ssd import OTHER, right, tier, writes

BLOCKS = 64


async def main(folder: Path, size: int, limit: int) -> dict[str, object]:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    of = await tier(folder, OTHER, ssd_bytes=size)
    placed: dict[int, int] = {}
    for n in range(BLOCKS):
        (extent,) = await of.write(writes(OTHER, [n]))
        if extent is not None:
            placed[n] = extent
    read = await right(of, OTHER, placed)
    numbers, words = of.numbers(), of.words()
    await of.close()
    return {"placed": len(placed), "read": len(read), "bytes": numbers["ssd_bytes"], "words": words}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
