"""The commands `checkpoint inspect | verify | convert | diff`: arguments and answers. The work: checkpoint/inspect."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import common
from shardwise.errors import InputError
from shardwise.task_files import folder_above

WHERE = "CHECKPOINT"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")  # endings of files of torch.save, refused for a file of safetensors


@click.group()
def checkpoint() -> None:
    """Inspect, verify, compare and convert checkpoints.

    CHECKPOINT is a checkpoint's folder, or a run's: then its newest one.
    """


@checkpoint.command()
@click.argument("path", metavar=WHERE)
@click.option("--tensors", is_flag=True, help="Each weight and buffer with its dtype and shape.")
@common
@click.pass_obj
def inspect(answer: Answer, path: str, tensors: bool) -> None:
    """What a checkpoint holds: step, plan, position in the data, tensors by kind. Digests are not read.

    \b
    shardwise checkpoint inspect runs/NAME --tensors
    """
    from shardwise.checkpoint.inspect import summary

    info = summary(path)
    answer.fields.update(info)
    lines = [
        f"{info['checkpoint']}: step {info['step']} of {info['task']}, {info['bytes'] / 1e6:,.1f} MB in "
        f"{len(info['files'])} files",
        f"written by {info['world_size']} ranks under {info['plan']}, optimizer {info['optimizer_class']}, "
        f"data {info['data'] and info['data'].get('position')}, "
        + ", ".join(f"{name} {version}" for name, version in info["versions"].items()),
        f"{'kind':<10}{'tensors':>9}{'elements':>16}{'MB':>12}{'pieces':>9}",
    ]
    for kind, row in sorted(info["kinds"].items()):
        numbers = f"{row['tensors']:>9,}{row['elements']:>16,}{row['bytes'] / 1e6:>12,.2f}{row['pieces']:>9,}"
        lines.append(f"{kind:<10}{numbers}")
    if tensors:
        for name, row in info["weights"].items():
            lines.append(f"{name:<60} {row['dtype']:<5} {tuple(row['shape'])}")
    answer.text = "\n".join(lines)


@checkpoint.command()
@click.argument("path", metavar=WHERE)
@common
@click.pass_obj
def verify(answer: Answer, path: str) -> None:
    """Read every file of a checkpoint and compare its digest. Exit code 1 where one is another.

    \b
    shardwise checkpoint verify runs/NAME
    """
    from shardwise.checkpoint import publish
    from shardwise.checkpoint.inspect import find

    folder = find(path)
    wrong = publish.verify(folder)
    answer.fields.update(checkpoint=str(folder), damaged=wrong)
    answer.code = 1 if wrong else 0
    answer.text = "\n".join(wrong) or f"{folder}: every file has its digest"


@checkpoint.command()
@click.argument("path", metavar=WHERE)
@click.argument("target")
@click.option("--ema", is_flag=True, help="The moving average in the place of trained weights.")
@click.option("--like", metavar="FOLDER", help="The transformers model it is: a folder that from_pretrained reads.")
@click.option("--merge", is_flag=True, help="PATH is a run with adapters: a folder of the model with them merged.")
@click.option("--allow-pickle", is_flag=True, help="PATH is of torch.save or torch.distributed.checkpoint.")
@click.option("--dcp", is_flag=True, help="TARGET is a new folder of torch.distributed.checkpoint.")
@click.option("--key", help="Where the state dict lies in what is no safetensors, such as model.")
@common
@click.pass_obj
def convert(
    answer: Answer, path: str, target: str, ema: bool, like: str | None, merge: bool, allow_pickle: bool, dcp: bool,
    key: str | None,
) -> None:  # fmt: skip
    """Its weights as safetensors: one file (TARGET.safetensors), or a folder of them with an index.

    PATH may be safetensors too. With --like, the folder has the names, the configuration and the tokenizer that
    transformers reads. With --allow-pickle, PATH is a file of torch.save or a folder of torch.distributed.checkpoint:
    its tensors are read, and nothing in it is executed. With --dcp, TARGET is such a folder.

    \b
    shardwise checkpoint convert runs/NAME weights.safetensors
    """
    import tempfile

    from shardwise.checkpoint.inspect import convert as turn

    if key is not None and not (allow_pickle or dcp):
        raise InputError("--key says where in a file of torch.save a state dict lies: it needs --allow-pickle or --dcp")
    if dcp and (like is not None or merge or allow_pickle):
        raise InputError("--dcp writes the weights under their own names: leave --like, --merge and --allow-pickle out")
    if Path(target).suffix in PICKLES:
        folder = Path(target).with_suffix("")
        raise InputError(
            f"{target}: weights are written as safetensors: give {folder}.safetensors, or a folder, {folder}"
        )
    if merge:
        if ema or allow_pickle:
            raise InputError("--merge takes a run with adapters: leave --ema and --allow-pickle out")
        from shardwise.hf.export import merge_run

        folder = merge_run(Path(path), like, Path(target))
        answer.fields.update(checkpoint=path, files=[str(file) for file in sorted(folder.glob("*.safetensors"))])
        answer.text = f"wrote {folder}"
        return
    # the temporary folder is beside the target, since /tmp may be in memory or too small for a model
    with tempfile.TemporaryDirectory(dir=folder_above(Path(target))) as between:
        source = _read_foreign(Path(path), key, Path(between)) if allow_pickle else path
        if dcp:
            from shardwise.checkpoint.foreign import write_folder

            (single,) = turn(source, Path(between) / "weights.safetensors", ema=ema)
            files = write_folder(single, Path(target), key)
        # without --like, names are the module's own; with it they are those of transformers
        elif like is None:
            files = turn(source, target, ema=ema)
        else:
            from shardwise.hf.export import export

            (single,) = turn(source, Path(between) / "weights.safetensors", ema=ema)
            export(single, target, like)
            files = sorted(Path(target).glob("*.safetensors"))
    answer.fields.update(checkpoint=path, files=[str(file) for file in files])
    answer.text = "\n".join(f"wrote {file}" for file in files)


def _read_foreign(path: Path, key: str | None, folder: Path) -> Path:
    """Writes the tensors of a pickled file or DCP folder as a safetensors file into `folder`; returns its path.

    key   where the state dict lies in it, None: the only one. Raises `InputError` for other files.
    """
    from safetensors.torch import save_file

    from shardwise.checkpoint.foreign import is_foreign, read

    if not is_foreign(path):
        raise InputError(f"{path} is no file of torch.save and no folder of torch.distributed.checkpoint")
    tensors = {name: value.detach().contiguous().clone() for name, value in read(path, key).items()}
    save_file(tensors, str(folder / "foreign.safetensors"))
    return folder / "foreign.safetensors"


@checkpoint.command()
@click.argument("first", metavar=WHERE)
@click.argument("other", metavar=WHERE)
@common
@click.pass_obj
def diff(answer: Answer, first: str, other: str) -> None:
    """What two checkpoints do not have alike, to the bit; either may be safetensors. Exit code 1 where there is any.

    \b
    shardwise checkpoint diff runs/NAME runs/OTHER
    """
    from shardwise.checkpoint.inspect import diff as compare

    rows = compare(first, other)
    answer.fields.update(checkpoint=first, other=other, differences=rows)
    answer.code = 1 if rows else 0
    lines = [
        f"{row['name']}: {row['what']}" + ("" if row["largest"] is None else f", by at most {row['largest']:.3g}")
        for row in rows
    ]
    answer.text = "\n".join(lines) or "the same, to the bit"
