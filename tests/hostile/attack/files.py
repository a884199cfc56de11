"""Cases of what lies on the disk: run folders, data, images, checkpoints, caches."""

# mypy: disable-error-code="func-returns-value"
from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hostile.attack.places import (
    BARE,
    IMAGES,
    RUN,
    Case,
    Prepare,
    Step,
    ends,
    flip,
    make_images,
    newest,
    record_with,
    reseal,
    same,
    same_if_done,
)

# root without the right to read and write everything
POWERLESS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
Maker = Callable[[Path], Any]


def fifo(path: Path) -> None:
    """Makes a pipe with a name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def sock(path: Path) -> None:
    """Makes a socket that nobody serves; its address must be short."""
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def one(name: str, words: tuple[str, ...], *codes: int, **more: Any) -> Case:
    """Returns a case of one command."""
    step = {
        key: more.pop(key) for key in ("wrap", "says", "errors", "lines", "limit_s") if key in more
    }
    more.setdefault("needs", ("images",))
    return Case("", name, (Step(words, ends(*codes), **step),), **more)


_SPECIAL: dict[str, Maker] = {
    "FIFO": fifo,
    "socket": sock,
    "folder": lambda path: path.mkdir(),
    "file": lambda path: path.write_text("x"),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to /dev/full": lambda path: path.symlink_to("/dev/full"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere/at/all"),
    "link to a neighbor": lambda path: path.symlink_to("../../../neighbor/keep.txt"),
    "link to a neighbor's folder": lambda path: path.symlink_to("../../../neighbor/run"),
}
_IN_FOLDER = (
    ".lock", ".hydra", ".hydra/config.yaml", "train.log", "metrics.jsonl", "report.json",
    "report.html", "checkpoints", "bad_samples.jsonl", "tuning.json", "checkpoints/step-3.json",
    "checkpoints/step-6.pt", "checkpoints/last.pt", "checkpoints/best.pt", "trace",
)  # fmt: skip


def folders(draw: random.Random) -> Iterator[Case]:
    """Run folders that hold something else, or that cannot be written to."""
    pairs = [(name, kind) for name in _IN_FOLDER for kind in _SPECIAL]
    for name, kind in draw.sample(pairs, 22):

        def prepare(place: Path, name: str = name, kind: str = kind) -> None:
            path = place / "work/outputs/x" / name
            path.parent.mkdir(parents=True)
            _SPECIAL[kind](path)

        resume = draw.choice((("resume=auto",), ()))
        yield one(f"{name} is a {kind}{' resume' * bool(resume)}", (*RUN, *resume),
                  0, 2, 4, 7, prepare=prepare, check=same_if_done, lines=6)  # fmt: skip
    for kind in ("FIFO", "file", "link to itself", "link to nothing", "link to /dev/zero"):
        yield one(
            f"outputs is a {kind}", RUN, 0, 2, 7,
            leaves=("nowhere",), prepare=lambda place, kind=kind: _SPECIAL[kind](
                place / "work/outputs"),
        )  # fmt: skip
    yield one("outputs may not be written", RUN, 2, wrap=POWERLESS,
              prepare=lambda place: (place / "work/outputs").mkdir(0o555))  # fmt: skip
    yield one("the folder may not be written", RUN, 2, wrap=POWERLESS,
              prepare=lambda place: os.chmod(place / "work", 0o555))  # fmt: skip
    yield one("checkpoints may not be written", (*RUN, "resume=auto"), 2, 7, wrap=POWERLESS,
              needs=("images", "stopped"),
              prepare=lambda place: os.chmod(place / "work/outputs/x/checkpoints",
              0o555))  # fmt: skip
    yield one("the run's folder may not be read", (*RUN, "resume=auto"), 2, 4, 7, wrap=POWERLESS,
              needs=("images", "stopped"),
              prepare=lambda place: os.chmod(place / "work/outputs/x", 0o000))  # fmt: skip
    yield one("log may not be written", (*RUN, "resume=auto"), 0, 2, 7, wrap=POWERLESS,
              needs=("images", "stopped"), lines=6,
              prepare=lambda place: os.chmod(place / "work/outputs/x/train.log",
              0o444))  # fmt: skip
    yield from _named_folders()
    yield from _in_the_run(draw)


def _in_the_run(draw: random.Random) -> Iterator[Case]:
    """Something happens to the files while a run goes on; it has begun to train by then."""
    root, run = IMAGES, "outputs/x"
    acts = {
        "the run's folder vanishes": (f"rm -rf {run}", (0, 7)),
        "the run's folder is moved": (f"mv {run} outputs/y", (0, 7)),
        "the checkpoints vanish": (f"rm -rf {run}/checkpoints", (0, 7)),
        "a FIFO in place of checkpoints": (
            f"rm -rf {run}/checkpoints; mkfifo {run}/checkpoints", (0, 7)),
        "the log vanishes": (f"rm -f {run}/train.log {run}/metrics.jsonl {run}/.lock", (0, 7)),
        "a folder in place of report.json": (f"mkdir {run}/report.json", (0, 7)),
        "an image vanishes": (f"rm {root}/train/a/004.jpg", (3,)),
        "an image becomes empty": (f": > {root}/train/a/004.jpg", (3,)),
        "an image becomes a FIFO": (
            f"rm {root}/train/a/004.jpg; mkfifo {root}/train/a/004.jpg", (3,)),
        "an image of validation becomes a folder": (
            f"rm {root}/val/a/004.jpg; mkdir {root}/val/a/004.jpg", (3,)),
        "all images vanish": (f"rm -rf {root}", (3,)),
        "images are added": (f"cp {root}/train/a/004.jpg {root}/train/a/new.jpg", (0,)),
    }  # fmt: skip
    for name, (act, codes) in acts.items():
        script = f"(until grep -q training: out; do sleep 0.2; done; {act}) & "
        script += '"$0" "$@" > out'
        form = draw.choice(((), ("loader.num_workers=1",), ("loader.num_workers=0",)))
        words = (*RUN, *form, "trainer.epochs=300")
        yield one(f"in the run, {name} {' '.join(form)}", words, *codes, wrap=("sh", "-c", script),
                  leaves=("out",), changes_in=True, lines=6)  # fmt: skip


def _named_folders() -> Iterator[Case]:
    for name in ("a b", "ä", "名", "x" * 200, "a=b", "a+b@c-d", "1", "null_", "a.pt", "x.lock"):
        yield one(f"run.name={name[:20]}", (*BARE, f"data.root={IMAGES}", f"run.name='{name}'"), 0,
                  check=lambda place, _, name=name: (
                      [] if (place / "work/outputs" / name / "report.json").exists(
                          ) else ["no report"]
                  ))  # fmt: skip
    for text in ("a\udcff", "\x1b[31m", "new\nline", "\u202e", " x "):
        folder = f"outputs/{text}"
        yield one(f"hydra.run.dir={text!r}", (*BARE, f"data.root={IMAGES}",
        f"hydra.run.dir='{folder}'"),
                  0, 2, leaves=("metrics.jsonl",))  # fmt: skip
    yield one("started in a folder that is not UTF-8", RUN, 0, check=None, wrap=(
        "sh", "-c", 'mkdir -p "$(printf "o\\377")" && cd "$(printf "o\\377")" && '
        'shift && exec "$0" "$@" data.root=../../in/images', "python"),
        leaves=("o\udcff",))  # fmt: skip


def _copied(root: Path, draw: random.Random) -> Path:
    return draw.choice(sorted((root / "train").rglob("*.jpg")))


_IN_DATA: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "empty": (lambda root: shutil.rmtree(root) or root.mkdir(), (3,)),
    "a file": (lambda root: shutil.rmtree(root) or root.write_text("x"), (3,)),
    "a FIFO": (lambda root: shutil.rmtree(root) or fifo(root), (3,)),
    "a link to itself": (lambda root: shutil.rmtree(root) or root.symlink_to(root), (3,)),
    "no val": (lambda root: shutil.rmtree(root / "val"), (3,)),
    "no train": (lambda root: shutil.rmtree(root / "train"), (3,)),
    "val is a file": (lambda root: shutil.rmtree(root / "val") or (root / "val").touch(), (3,)),
    "val is train": (
        lambda root: shutil.rmtree(root / "val") or (root / "val").symlink_to("train"), (0, 3)),
    "val and valid": (lambda root: (root / "valid").mkdir(), (3,)),
    "other classes in val": (lambda root: (root / "val/a").rename(root / "val/c"), (3,)),
    "a class more in train": (lambda root: shutil.copytree(root / "train/a", root / "train/c"),
    (3,)),
    "an empty class": (lambda root: (root / "train/0").mkdir(), (3,)),
    "a class of text files": (
        lambda root: (root / "train/c").mkdir() or (root / "train/c/x.txt").write_text("x"), (3,)),
    "a class in other letters": (lambda root: (root / "val/a").rename(root / "val/A"), (3,)),
    "a class with another form of letters": (
        lambda root: (root / "train/a").rename(root / "train/e\u0301")
        and (root / "val/a").rename(root / "val/\u00e9"), (3,)),
    "one image": (
        lambda root: [path.unlink() for path in sorted((root / "train").rglob("*.jpg"))[2:]], (3,)),
    "fewer than a batch": (
        lambda root: [path.unlink() for path in sorted((root / "train/a").rglob("*"))[1:]
                      + sorted((root / "train/b").rglob("*"))[1:]], (2, 3)),
    "a FIFO among images": (lambda root: fifo(root / "train/a/0.jpg"), (0,)),
    "a socket among images": (lambda root: sock(root / "train/a/0.jpg"), (0,)),
    "a device among images": (lambda root: os.mknod(root / "train/a/0.jpg", 0o20666, 0x105), (0,)),
    "a folder named like an image": (lambda root: (root / "train/a/0.jpg").mkdir(), (0,)),
    "a link to the root": (lambda root: (root / "train/a/up").symlink_to("../.."), (0,)),
    "a link out": (
        lambda root: (root / "train/a/0.jpg").symlink_to("../../../../neighbor/keep.txt"), (0,)),
    "a broken link": (lambda root: (root / "train/a/0.jpg").symlink_to("nowhere"), (0,)),
    "a link in a circle": (lambda root: (root / "train/a/0.jpg").symlink_to("0.jpg"), (0,)),
    "a hidden file": (lambda root: (root / "train/a/.0.jpg").write_text("x"), (0,)),
    "a hidden class": (lambda root: (root / "train/.c").mkdir(), (0,)),
    "Thumbs.db": (lambda root: (root / "train/a/Thumbs.db").write_bytes(b"\xd0\xcf" * 99), (0,)),
    "a file beside the classes": (lambda root: (root / "train/labels.csv").write_text("a"), (0,)),
    "names that are not UTF-8": (
        lambda root: [path.rename(path.with_name(f"{path.stem}\udcff.jpg"))
                      for path in sorted((root / "train").rglob("*.jpg"))], (0,)),
    "names with newlines": (
        lambda root: [path.rename(path.with_name(f"{path.stem}\n\x1b[31m.jpg"))
                      for path in sorted((root / "train").rglob("*.jpg"))], (0,)),
    "names of 255 bytes": (
        lambda root: [path.rename(path.with_name(path.stem.ljust(251, "x") + ".jpg"))
                      for path in sorted((root / "train").rglob("*.jpg"))], (0,)),
    "classes that are not UTF-8": (
        lambda root: [(root / part / "b").rename(root / part / "b\udcff")
                      for part in ("train", "val")], (0,)),
    "classes with newlines": (
        lambda root: [(root / part / "b").rename(root / part / "b\n\x1b]0;x\x07")
                      for part in ("train", "val")], (0,)),
    "classes with odd letters": (
        lambda root: [(root / part / "b").rename(root / part / "b<b>&amp;${x}")
                      for part in ("train", "val")], (0,)),
    "deep": (
        lambda root: [
            os.makedirs(root / "train/a" / "/".join("d" * 200))
        ] and shutil.move(root / "train/a/000.jpg", root / "train/a" / "/".join("d" * 200)), (0,)),
    "links instead of files": (
        lambda root: (root / "store").mkdir() or [
            path.rename(root / "store" / path.name) and path.symlink_to(root / "store" / path.name)
            for path in sorted((root / "train").rglob("*.jpg"))], (0,)),
    "hard links": (
        lambda root: [os.link(path, path.with_suffix(".jpeg.part"))
                      for path in sorted((root / "train").rglob("*.jpg"))[:1]], (0, 3)),
}  # fmt: skip
# the samples, or their order, are others
_OTHER = {"deep", "classes that are not UTF-8", "val is train", "hard links"}


def _in_images(make: Maker) -> Prepare:
    return lambda place: make(place / "in/images")


def data(draw: random.Random) -> Iterator[Case]:
    """Folders of images."""
    loaders = (
        (), ("loader.num_workers=1",), ("loader.num_workers=0",), ("data.cache=ram",), (
            "data.cache=disk",), ("loader.start_method=spawn",
        "loader.backend=processes", "loader.num_workers=1"),
    )  # fmt: skip
    for name, (make, codes) in _IN_DATA.items():
        loader = draw.choice(loaders)
        step = Step((*RUN, *loader), ends(*codes), lines=4)
        yield Case("", f"{name}, {' '.join(loader)}", (step,), needs=("images",),
                   prepare=_in_images(make),
                   check=None if name in _OTHER else same_if_done)  # fmt: skip
    for name in draw.sample(sorted(_IN_DATA), 10):
        make, codes = _IN_DATA[name]
        mode = draw.choice(("verify", "diagnose"))
        yield one(f"{name}, mode={mode}", (*RUN, f"mode={mode}"), *codes, 0, lines=4, limit_s=200.0,
                  prepare=_in_images(make))  # fmt: skip
    for name, pattern in (("an image", "train/a/*.jpg"), ("a class", "train/a"), ("val", "val")):
        for bits in (0o000, 0o200):
            yield one(f"{name} may not be read, {bits:o}", RUN, 3, wrap=POWERLESS,
                      prepare=lambda place, pattern=pattern, bits=bits: [
                          os.chmod(path, bits) for path in sorted((place / "in/images").glob(
                              pattern))[:1]
                      ] and None)  # fmt: skip
    for root in ("/", "/proc", "/dev", "/sys/kernel", "", ".", "..", "~", "//", "in\x00",
    "~root/no",
                 "http://127.0.0.1/x", "s3://bucket", "../in/images/train",
                 "../in/images.tar"):  # fmt: skip
        if "\0" in root:
            continue
        yield one(f"data.root={root}", (*BARE, f"data.root={root}", "run.name=x"), 2, 3)
    for root in ("/proc/self", "/dev"):
        yield one(
            f"{root} as one tree", (*BARE, f"data.root={root}", "data.split_fraction=0.5"), 2, 3
        )
    yield one("one tree of one class", (*BARE, "data.root=../in/images/train/a/..", "run.name=x",
              "data.split_fraction=0.9999"), 0, 2, 3)  # fmt: skip


_ODD_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [1],
    "no model": lambda state: state.pop("model") and None,
    "NaN weights": lambda state: [t.fill_(float("nan")) for t in state["model"].values()
                                  if t.is_floating_point()] and None,
    "weights of another shape": lambda state: state["model"].update(
        {key: t[:1] if t.ndim else t for key, t in state["model"].items()}),
    "a weight more": lambda state: state["model"].update(evil=torch.ones(3)),
    "a weight less": lambda state: state["model"].popitem() and None,
    "weights of integers": lambda state: state["model"].update(
        {key: t.int() for key, t in state["model"].items()}),
    "weights in half": lambda state: state["model"].update(
        {key: t.half() if t.is_floating_point() else t for key, t in state["model"].items()}),
    "weights in double": lambda state: state["model"].update(
        {key: t.double() if t.is_floating_point() else t for key, t in state["model"].items()}),
    "weights that share storage": lambda state: state["model"].update(
        {key: torch.zeros(()).expand(t.shape) for key, t in state["model"].items()}),
    "conjugated weights": lambda state: state["model"].update(
        {key: t.to(torch.complex64).conj() for key, t in state["model"].items()}),
    "step below 0": lambda state: state.update(step=-1),
    "step of 2 to the 80": lambda state: state.update(step=2**80),
    "another step than the record": lambda state: state.update(step=1),
    "epoch is NaN": lambda state: state.update(epoch=float("nan")),
    "epoch beyond the end": lambda state: state.update(epoch=10**6),
    "epoch is a tensor": lambda state: state.update(epoch=torch.tensor(1)),
    "epoch is true": lambda state: state.update(epoch=True),
    "classes are bytes": lambda state: state.update(classes=[b"a", b"b"]),
    "classes turned round": lambda state: state.update(classes=["b", "a"]),
    "classes of control characters": lambda state: state.update(classes=["\x1b[31m\n", "\x07"]),
    "classes of a million letters": lambda state: state.update(classes=["a" * 10**6, "b"]),
    "classes in a deep list": lambda state: state.update(classes=[[["a"]], "b"]),
    "length 0": lambda state: state.update(length=0),
    "length of other data": lambda state: state.update(length=10**9),
    "ranks 0": lambda state: state.update(ranks=0),
    "ranks 10 to the 9": lambda state: state.update(ranks=10**9),
    "stop below 0": lambda state: state.update(stop=-7),
    "settings is a list": lambda state: state.update(settings=[1]),
    "settings of text": lambda state: state["settings"].update(seed="\x1b[31m"),
    "settings with code": lambda state: state["settings"]["model"].update(name="os:system"),
    "settings with an interpolation": lambda state: state["settings"]["data"].update(
        root="${oc.env:HOME}"),
    "settings in a circle": lambda state: state["settings"]["data"].update(root="${data.root}"),
    "unknown settings": lambda state: state["settings"].update(evil={"x": 1}),
    "random states of zeros": lambda state: state.update(random={
        key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v
        for key, v in state["random"].items()}),
    "optimizer of other groups": lambda state: state["optimizer"].update(param_groups=[]),
    "lr is NaN": lambda state: state["optimizer"]["param_groups"][0].update(lr=float("nan")),
    "lr is text": lambda state: state["optimizer"]["param_groups"][0].update(lr="x"),
    "momentum below 0": lambda state: state["optimizer"]["param_groups"][0].update(momentum=-5.0),
    "schedule beyond the end": lambda state: state["schedule"].update(last_epoch=10**12),
    "schedule with more": lambda state: state["schedule"].update(step="x", __class__=5),
    "keys that are numbers": lambda state: {1: 2, None: 3},
}  # fmt: skip
# what is as good as the right one
_STILL_RIGHT = {"weights in double"}


def checkpoints(draw: random.Random) -> Iterator[Case]:
    """Checkpoints and records with damage, and with odd contents under a right digest."""
    for name in draw.sample(sorted(_ODD_STATES), 32):
        change = _ODD_STATES[name]

        def prepare(place: Path, change: Any = change) -> None:
            reseal(place, change)

        kind = draw.choice(("auto", "file", "evaluate", "weights"))
        file = "outputs/x/checkpoints/last.pt"
        words = {
            "auto": (*RUN, "resume=auto"),
            "file": (*BARE, f"data.root={IMAGES}", "run.name=y", f"resume={file}"),
            "evaluate": (*RUN[:-1], "run.name=y", "mode=evaluate", f"resume={file}"),
            "weights": (*RUN[:-1], "run.name=y", "mode=evaluate", f"model.weights={file}"),
        }[kind]
        yield one(f"{name}, {kind}", words, 0, 2, 3, 4, 5, prepare=prepare, lines=5,
                  needs=("images", "stopped"))  # fmt: skip
    for name, change_file in _DAMAGES.items():

        def damage(place: Path, change_file: Any = change_file) -> None:
            change_file(place, draw)

        yield one(name, (*RUN, "resume=auto"), 0, 2, 4, 7, prepare=damage, lines=5,
        check=same_if_done,
                  needs=("images", "stopped"))  # fmt: skip
    yield from _other_resumes()


def _record_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, random.Random], Any]:
    def damage(place: Path, _: random.Random) -> None:
        path = newest(place).path.with_suffix(".json")
        facts = json.loads(path.read_bytes())
        change(facts)
        path.write_text(json.dumps(facts))

    return damage


def _in_place(name: str, make: Maker) -> Callable[[Path, random.Random], Any]:
    def damage(place: Path, _: random.Random) -> None:
        path = place / "work/outputs/x/checkpoints" / name
        path.unlink(missing_ok=True)
        make(path)

    return damage


_DAMAGES: dict[str, Callable[[Path, random.Random], Any]] = {
    "a bit of the checkpoint": lambda place, draw: flip(newest(place).path, draw),
    "a bit of the record": lambda place, draw: flip(newest(place).path.with_suffix(".json"), draw),
    "a bit of both checkpoints": lambda place, draw: [
        flip(path, draw) for path in (place / "work/outputs/x/checkpoints").glob("step-*.pt")]
            and None,
    "a cut checkpoint": lambda place, draw: os.truncate(newest(place).path, draw.randrange(5000)),
    "an empty record": lambda place, draw: os.truncate(newest(place).path.with_suffix(".json"), 0),
    "no record": lambda place, draw: newest(place).path.with_suffix(".json").unlink(),
    "no checkpoint beside its record": lambda place, draw: newest(place).path.unlink(),
    "a record of schema 1": _record_of(lambda facts: facts.update(schema=1)),
    "a record of schema 99": _record_of(lambda facts: facts.update(schema=99)),
    "a record with a longer step": _record_of(lambda facts: facts.update(step=99)),
    "a record that is a FIFO": _in_place("step-4.json", fifo),
    "a checkpoint that is a FIFO": _in_place("step-4.pt", fifo),
    "a checkpoint that is a folder": _in_place("step-4.pt", lambda path: path.mkdir()),
    "a record that is a folder": _in_place("step-4.json", lambda path: path.mkdir()),
    "last.pt is a folder": _in_place("last.pt", lambda path: path.mkdir()),
    "best.pt is a FIFO": _in_place("best.pt", fifo),
    "last.pt leads to itself": _in_place("last.pt", lambda path: path.symlink_to("last.pt")),
    "last.pt leads to a neighbor": _in_place(
        "last.pt", lambda path: path.symlink_to("../../../../neighbor/keep.txt")),
    "a record of step 999999": _in_place("step-999999.json", lambda path: path.write_text("{}")),
    "a temporary file of a killed save": _in_place(
        ".step-5.pt.0.tmp", lambda path: path.write_bytes(b"x" * 99)),
    "metrics.jsonl is torn": lambda place, draw: os.truncate(
        place / "work/outputs/x/metrics.jsonl", 100),
    "metrics.jsonl of zeros": lambda place, draw: (
        place / "work/outputs/x/metrics.jsonl").write_bytes(bytes(5000)) and None,
    "metrics.jsonl is not UTF-8": lambda place, draw: (
        place / "work/outputs/x/metrics.jsonl").write_bytes(b"\xff\xfe{}\n") and None,
    "config.yaml of another run": lambda place, draw: (
        place / "work/outputs/x/.hydra/config.yaml").write_text("a: [\n") and None,
    "the checkpoint of a later step": lambda place, draw: shutil.copy(
        newest(place).path, newest(place).path.with_name("step-5.pt")) and None,
    "the checkpoint under another number": lambda place, draw: (
        newest(place).path.rename(newest(place).path.with_name("step-5.pt")) and None),
}  # fmt: skip


def _other_resumes() -> Iterator[Case]:
    needs = ("images", "stopped")
    base = (*BARE, f"data.root={IMAGES}")
    for words, codes in (
        (("resume=outputs/x",), (0,)), (("resume=outputs/x/",), (0,)),
        (("resume=outputs/x/checkpoints",), (0, 4)), (("resume=outputs/x/.hydra",), (4,)),
        (("resume=outputs",), (4,)), (("resume=outputs/x/train.log",), (4,)),
        (("resume=outputs/x/checkpoints/step-4.json",), (4,)), (("resume=../in/images",), (4,)),
        (("resume=outputs/x", "model=resnet18"), (4,)), (("resume=outputs/x", "optim=adamw"), (4,)),
        (("resume=outputs/x", "loader.batch_size=5"), (0, 2, 4)),
        (("resume=outputs/x", "trainer.epochs=1"), (0,)),
        (("resume=outputs/x", "trainer.max_steps=2"), (0, 2)),
        (("resume=outputs/x", "trainer.precision=bf16"), (0, 4)),
        (("resume=outputs/x", "data.image_size=48"), (0, 4)),
        (("resume=outputs/x", "data=digits", "data.root=null"), (3, 4)),
        (("model.weights=outputs/x/checkpoints/best.pt", "model=resnet18", "run.name=y"), (4,)),
        (("model.weights=outputs/x", "run.name=y"), (0, 4)),
        (("mode=evaluate", "model.weights=../in/images/val/a/000.jpg", "run.name=y"), (4,)),
        (("mode=evaluate", "resume=outputs/x", "run.name=x"), (0, 2)),
        (("mode=evaluate", "resume=outputs/x", "data.root=/nope", "run.name=y"), (3,)),
    ):  # fmt: skip
        yield one(" ".join(words), (*base, *words), *codes, needs=needs, lines=5)

    def other(place: Path) -> None:
        shutil.rmtree(place / "in/images")
        make_images(place / "in/images", sizes=(40, 12))

    yield one("other data, resume=auto", (*RUN, "resume=auto"), 0, 4, needs=needs, prepare=other)

    def swapped(place: Path) -> None:
        record = newest(place)
        older = place / "work/outputs/x/checkpoints/step-3.pt"
        record.path.write_bytes(older.read_bytes())
        assert record_with(record, "x")

    yield one("two checkpoints swapped", (*RUN, "resume=auto"), 0, 4, needs=needs, prepare=swapped,
              check=same_if_done, lines=5)  # fmt: skip


def _cache_files(place: Path, folder: str) -> list[Path]:
    return sorted(path for path in (place / "cache" / folder).rglob("*") if path.is_file())


_IN_CACHE: dict[str, Callable[[Path, random.Random], Any]] = {
    "bits": lambda path, draw: flip(path, draw, 8),
    "cut": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "empty": lambda path, draw: os.truncate(path, 0),
    "longer": lambda path, draw: os.truncate(path, path.stat().st_size + 4096),
    "another content": lambda path, draw: path.write_bytes(draw.randbytes(3000)),
    "a FIFO": lambda path, draw: (path.unlink(), fifo(path)),
    "a folder": lambda path, draw: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path, draw: (path.unlink(), path.symlink_to("nowhere")),
    "a link to a neighbor": lambda path, draw: (
        path.unlink(), path.symlink_to("../../neighbor/keep.txt")),
    "a link to /dev/zero": lambda path, draw: (path.unlink(), path.symlink_to("/dev/zero")),
    "[]": lambda path, draw: path.write_text("[]"),
    "null": lambda path, draw: path.write_text("null"),
    "deep": lambda path, draw: path.write_text("[" * 100_000),
}  # fmt: skip


# a search that other programs disturbed is not remembered
_TUNED = """
import dataclasses, sys
from harness.cli.app import command
from harness.tuning import tuner
tune = tuner.tune
tuner.tune = lambda *a: dataclasses.replace(tune(*a), complete=True, others_cores=None)
sys.argv[0] = "train.py"
command()
"""


def caches(draw: random.Random) -> Iterator[Case]:
    """A first run makes a cache, something happens to it, a second run meets it."""
    kinds: dict[str, tuple[tuple[str, ...], str]] = {
        "index": ((), "index"),
        "decoded": (("data.cache=disk",), "decoded"),
        "tuning": (("loader.autotune=true",), "tuning"),
    }
    pairs = [(kind, name) for kind in kinds for name in _IN_CACHE]
    for kind, name in draw.sample(pairs, 22):
        words, folder = kinds[kind]
        spoil = f"""
import pathlib, random, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.hostile.attack import files as a
place = pathlib.Path("..").resolve()
found = a._cache_files(place, {folder!r})
assert found, "no cache was made"
for path in found:
    a._IN_CACHE[{name!r}](path, random.Random({draw.random()}))
"""
        first = Step((*RUN[:-1], "run.name=first", *words), ends(0), lines=4)
        if kind == "tuning":
            first = first._replace(program=("-c", _TUNED, *first.words), words=())
        between = Step((), ends(0), program=("-c", spoil))
        last = Step((*RUN, *words), ends(0), lines=5)
        # an index is kept of folders that have not changed for two seconds
        yield Case("", f"{kind}: {name}", (first, between, last), needs=("images",), check=same,
                   prepare=lambda place: [
                       os.utime(path, (1e9, 1e9)) for path in (place / "in").rglob("*")
                   ] and None)  # fmt: skip
    for name, make in _SPECIAL.items():
        for folder in draw.sample(("index", "decoded", "tuning", "."), 1):
            words = ("data.cache=disk", "loader.autotune=true", "tuner.budget_s=1")

            def prepare(place: Path, make: Any = make, folder: str = folder) -> None:
                if folder == ".":
                    (place / "cache").rmdir()
                make(place / "cache" if folder == "." else place / "cache" / folder)

            yield one(f"{folder} is a {name}", (*RUN, *words), 0, 2, 7, prepare=prepare, lines=6,
                      check=same_if_done)  # fmt: skip
    yield one("the cache may not be written", (*RUN, "data.cache=disk", "loader.autotune=true",
              "tuner.budget_s=1"), 0, 2, wrap=POWERLESS, lines=6, check=same_if_done,
              prepare=lambda place: os.chmod(place / "cache", 0o555))  # fmt: skip
    yield one("the cache may not be read", (*RUN, "data.cache=disk"), 0, 2, wrap=POWERLESS, lines=6,
              check=same_if_done, prepare=lambda place: os.chmod(place / "cache",
              0o000))  # fmt: skip
