"""PMI-1, the text protocol by which MPICH's and Intel's mpirun serve ranks over PMI_FD: what `meet` needs of it.

    cmd=init ... -> cmd=put key=value -> cmd=barrier_in (all ranks) -> cmd=get -> cmd=finalize

It carries rank 0's address to the others without a shared folder, on any number of hosts.
Source: the PMI-1 wire protocol as spoken by MPICH's hydra (src/pmi in MPICH).

What this does not do: spawn, or leave anything open; MPI in the same process must have been started before.
"""

from __future__ import annotations

import os
import socket
import stat

from shardwise.errors import InputError, RunError

_KEY = "shardwise"


def served(fd_text: str) -> bool:
    """Whether `fd_text`, the value of PMI_FD, is an open socket (a wrapper of this process may have closed it)."""
    try:
        return stat.S_ISSOCK(os.fstat(int(fd_text)).st_mode)
    except (ValueError, OSError):
        return False


def exchange(fd_text: str, rank: int, mine: str, timeout_s: float) -> str:
    """Returns, on every rank, the text that rank 0 passed as `mine`. Collective.

    fd_text    value of PMI_FD; `rank`: this process's rank
    mine       printable text without spaces, below 1000 characters; other ranks' are ignored
    timeout_s  seconds to wait for the other ranks

    Raises `RunError` if ranks do not come in time or mpirun closes the connection, `InputError` if it is not PMI-1.
    """
    with socket.socket(fileno=os.dup(int(fd_text))) as wire:
        wire.settimeout(timeout_s)
        try:
            return _talk(wire, rank, mine)
        except TimeoutError:
            raise RunError(
                f"rank {rank} waited {timeout_s:.0f} s for the other ranks at mpirun's PMI barrier: some have not "
                "started, or do not call shardwise"
            ) from None
        finally:
            wire.settimeout(None)  # the setting belongs to the connection, which others in this process may use


def _talk(wire: socket.socket, rank: int, mine: str) -> str:
    """Runs the PMI-1 dialogue of this module's docstring; returns the value that rank 0 has put."""
    _ask(wire, "cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
    space = _ask(wire, "cmd=get_my_kvsname", "my_kvsname")["kvsname"]
    if rank == 0:
        _ask(wire, f"cmd=put kvsname={space} key={_KEY} value={mine}", "put_result")
    _ask(wire, "cmd=barrier_in", "barrier_out")
    answer = _ask(wire, f"cmd=get kvsname={space} key={_KEY}", "get_result")
    _ask(wire, "cmd=finalize", "finalize_ack")
    return answer["value"]


def _ask(wire: socket.socket, words: str, expected: str) -> dict[str, str]:
    """Sends one command `words`; returns the answer's {field: value}.

    Raises `InputError` unless the answer's "cmd" is `expected` with "rc" 0, `RunError` if the connection is closed.
    """
    wire.sendall(f"{words}\n".encode())
    answer = b""
    while not answer.endswith(b"\n"):
        more = wire.recv(4096)
        if not more:
            raise RunError(f"mpirun closed its PMI connection at '{words.split()[0]}'")
        answer += more
    text = answer.decode(errors="replace").strip()
    fields = dict(word.partition("=")[::2] for word in text.split())
    if fields.get("cmd") != expected or fields.get("rc", "0") != "0":
        raise InputError(
            f"mpirun answers '{text}' to '{words.split()[0]}', which is not PMI-1: set MASTER_ADDR and MASTER_PORT "
            "for all ranks instead"
        )
    return fields
