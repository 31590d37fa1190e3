"""A training run killed with SIGKILL again and again, and resumed each time."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from killed_runs import assert_same_run, kill_and_resume, run_undisturbed

from .part import Part


class Kills(Part):
    name = "kills"
    what = "SIGKILLs of a training run"
    promise = "every checkpoint intact, and the resumed run ends bit for bit as one that was left alone"
    count, per_case, per_chunk = 100, 10, 1
    patience = 300.0

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.reference, self.seconds = run_undisturbed(folder)

    def run(self, case: int) -> Mapping[str, int]:
        folder = self.folder / f"case{case}"
        folder.mkdir()
        seed = self.draw(case).getrandbits(32)
        runs = kill_and_resume(folder, kills=self.per_case, seconds=self.seconds, seed=seed)
        for run in runs:
            assert_same_run(run, self.reference)
        shutil.rmtree(folder)
        saving = self.per_case // 2
        return {
            "while a checkpoint was being written": saving,
            "at a random moment": self.per_case - saving,
            "runs that ended bit-identical": len(runs),
        }
