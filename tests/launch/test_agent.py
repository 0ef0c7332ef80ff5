"""The agent that is torchrun: what it ends with where it is asked to stop before its ranks have begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASKED_WHILE_IMPORTED = "import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(60)\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_asked_before_its_ranks_it_ends_as_one_that_has_saved(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ASKED_WHILE_IMPORTED.format(name=name))
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-m", "shardwise.launch.agent", "--standalone", "--no-python", "true"]
    assert subprocess.run(words, env=environ, timeout=50).returncode == 75
