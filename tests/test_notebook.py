"""The notebook, cell by cell, with local files in the place of downloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from archives import write_cifar10

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "colab.ipynb"
SCRIPT = """
    import torch
    from torch.utils.data import DataLoader

    if __name__ == "__main__":
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            for batch in DataLoader(torch.ones(200, 4), 10):
                net(batch).sum().backward()
                optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, as a shell runs them; what a notebook alone can do is left out."""
    md5 = write_cifar10(tmp_path, rows=64)
    (tmp_path / "main.py").write_text(textwrap.dedent(SCRIPT))
    replaced = {
        "https://github.com/OWNER/wellfed": str(ROOT),
        "https://raw.githubusercontent.com/pytorch/examples/main/mnist/main.py": (
            f"file://{tmp_path / 'main.py'}"
        ),
        "data=cifar10": f"data=cifar10 data.root={tmp_path} data.md5={md5} model=small",
        "--epochs 1": "",
        "scripts/gpu_check.py": "scripts/gpu_check.py --quick --group conformance",
    }
    place = tmp_path
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    said = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        lines = "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" else []
        for line in lines:
            for old, new in replaced.items():
                line = line.replace(old, new)
            command, _, rest = line.partition(" ")
            if command.startswith("SOURCE"):
                monkeypatch.setenv("SOURCE", rest.split(chr(34))[1])
            elif command == "%cd":
                place = place / rest
            elif command.startswith("!") and command != "!nvidia-smi":
                done = subprocess.run(
                    line[1:], shell=True, cwd=place, env={**os.environ, "PATH": path},
                    capture_output=True, text=True, timeout=300, check=False,
                )  # fmt: skip
                said.append(done.stdout + done.stderr)
                assert done.returncode == 0, f"{line}\n{said[-1]}"
    reports = sorted(place.glob("outputs/*/report.json"))
    assert [path.parent.name for path in reports] == ["first", "mnist"]
    assert (place / "gpu_check" / "gpu_check-conformance.json").exists()
