"""Parses numbers, batches, times and tokens as people write them (16M-tokens, 8k, 20m), and formats bytes and times."""

from __future__ import annotations

import re

from shardwise.errors import InputError

FACTORS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def count(text: str, what: str) -> int:
    """Returns the whole number in `text`, such as 512, 8k or 16M (powers of 1024); else raises `InputError`.

    what  name of the option, with which messages begin
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    value = float(match[1]) * FACTORS[match[2].lower()] if match else 0.0
    if not match or value != int(value) or value < 1:
        raise InputError(f"{what}: expected a whole number of at least 1, such as 512, 8k or 16M, got {text!r}")
    return int(value)


def batch(text: str, seq: int | None) -> int:
    """Returns the samples of a global batch given as `512`, `512-samples` or `16M-tokens` (`seq` tokens a sample).

    Raises `InputError` for other text, for a number of tokens that is no multiple of `seq`, or if `seq` is None.
    """
    number, _, unit = text.strip().partition("-")
    if not number:
        raise InputError(f"--global-batch: expected a number of samples such as 512, or 16M-tokens, got {text!r}")
    if unit in ("", "samples", "sample"):
        samples = count(number, "--global-batch")
        # a million samples in a step are nearly always meant as tokens
        if samples >= 2**20 and not unit:
            raise InputError(
                f"--global-batch: {text} would be {samples:,} samples in a step: write {number}-tokens where tokens "
                f"are meant, {number}-samples where not"
            )
        return samples
    if unit not in ("tokens", "token"):
        raise InputError(f"--global-batch: the unit is samples or tokens, got {unit!r}")
    if seq is None:
        raise InputError("--global-batch in tokens needs --seq: this model's samples are not counted in tokens")
    tokens = count(number, "--global-batch")
    # samples are whole, so tokens must be a multiple of their length
    if tokens % seq:
        low = tokens // seq * seq
        raise InputError(
            f"--global-batch: {tokens} tokens are not a whole number of samples of {seq} tokens; the nearest are "
            f"{low} and {low + seq}"
        )
    return tokens // seq


def duration(text: str, what: str) -> float:
    """Returns the seconds of `90s`, `20m`, `3h` or `2d`; raises `InputError` that begins with `what` otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise InputError(f"{what}: expected a time such as 90s, 20m, 3h or 2d, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def tokens(text: str, what: str) -> float:
    """Returns the tokens of `300B`, `15T` or `5e9` (powers of 1000); raises `InputError` with `what` otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise InputError(f"{what}: expected a number of tokens such as 300B or 15T, got {text!r}")
    return float(match[1]) * 1000.0 ** " kmbt".index(match[2] or " ")


def bytes_text(size: float) -> str:
    """Returns a size as text, such as "12.3 GB" (10^9 bytes)."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def seconds_text(seconds: float) -> str:
    """Returns a time as text, such as "1,234 s", "1.23 s", "45.6 ms" or "78 us"."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
