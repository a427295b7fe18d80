"""Commands of Dockerfiles: run in the image's own files, seen in a layer of their own, and in nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coderepairrl.environments import commands, dockerfile
from coderepairrl.environments.images import ReadyImage, prepare_images
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.processes.caches import images_cache
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.rootfs import images_folder
from coderepairrl.types import Task

from .conftest import build_dockerfile, open_folder, tree_of
from .made import archive, entry, folder, hard_link, layout, link

BELOW = archive(
    [
        entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nmaker:x:77:88:m:/home/maker:/bin/sh\n"),
        folder("home/maker"), folder("root"), folder("old"), entry("old/a", b"a"), entry("old/b", b"b"),
        folder("gone"), entry("gone/deep", b"x"), link("way", "old"), entry("one", b"1"), hard_link("two", "one"),
        entry("kept", b"kept"), folder("var/tmp", 0o1777),
    ]
)  # fmt: skip
DOCKERFILE = """FROM base
ARG WORD=given
ENV A="b c"
WORKDIR /app
COPY one.txt ./
RUN printf '%s\\n' "$WORD" "$A" "$(pwd)" "$(id -u)" "$HOME" "$(cat one.txt)" > seen && \\
    rm -rf /gone /old/a && mv /old /moved && rm /way && mkdir /way && echo w > /way/in && \\
    echo more >> /one && ln seen linked && ln -s /nowhere/../seen pointing && chmod 750 seen && mkfifo pipe
ENV LATER=1
COPY two.txt /moved/
USER maker
RUN ["bash", "-c", "echo ${LATER}$WORD $(id -u):$(id -g) $HOME > 'second file'; cat /moved/two.txt >> 'second file'"]
SHELL ["bash", "-o", "pipefail", "-c"]
RUN --mount=type=cache,target=/root/.cache ! false | true; mkdir shut; touch shut/x unread; chmod 0 unread shut
"""


@pytest.fixture
def context(isolating: None) -> Iterator[Path]:
    """The folder of a Dockerfile."""
    with open_folder() as made:
        (made / "one.txt").write_text("first\n")
        (made / "two.txt").write_text("copied\n")
        yield made


@pytest.fixture
def base(shell: bytes, tmp_path: Path) -> Path:
    layout(tmp_path / "oci", [shell, BELOW], "base", compress=lambda data: data, WorkingDir="/old", User="root")
    return tmp_path / "oci"


def build(context: Path, base: Path, text: str = DOCKERFILE) -> tuple[ReadyImage, list[str]]:
    """Build a Dockerfile; return the image and the commands that were run."""
    ready, lines = build_dockerfile(context, text, base)
    return ready, [line for line in lines if ": running " in line]


def test_changes_by_commands_are_in_the_image_and_each_command_runs_once(context: Path, base: Path) -> None:
    ready, ran = build(context, base)
    tree = tree_of(ready)
    app = tree / "app"
    assert (app / "seen").read_text() == "given\nb c\n/app\n0\n/root\nfirst\n"
    assert (app / "second file").read_text() == "1given 77:88 /home/maker\ncopied\n"
    assert [(app / name).stat().st_mode & 0o777 for name in ("seen", "unread", "shut")] == [0o750, 0o600, 0o700]
    assert (app / "linked").samefile(app / "seen") and (app / "pointing").readlink() == Path("/nowhere/../seen")
    assert (app / "pipe").is_fifo() and (app / "shut/x").is_file()
    assert not (tree / "gone").exists() and not (tree / "old").exists()
    assert sorted(path.name for path in (tree / "moved").iterdir()) == ["b", "two.txt"]
    assert not (tree / "way").is_symlink() and (tree / "way/in").read_text() == "w\n"
    assert (tree / "one").read_text() == (tree / "two").read_text() == "1more\n", "two names of one file"
    assert (tree / "kept").read_text() == "kept" and not (tree / "run/crrl").is_file()
    assert (ready.image.workdir, ready.image.user, ready.image.env["LATER"]) == ("/app", 77, "1")
    assert len(ran) == 3 and not list(images_cache().rglob(".building*/tree"))
    # each is run once for what it was run on: not for what comes later; and its layer is what it was, or it runs again
    (context / "two.txt").write_text("another\n")
    ready, ran = build(context, base)
    assert [line.rpartition("echo")[2][:9] for line in ran[:1]] == [" ${LATER}"] and len(ran) == 2
    assert (tree_of(ready) / "app/second file").read_text().endswith("another\n")
    ready, ran = build(context, base, DOCKERFILE.replace("WORD=given", "WORD=other"))
    assert len(ran) == 3 and (tree_of(ready) / "app/seen").read_text().startswith("other\n")
    for kept in (images_cache() / "commands").iterdir():
        kept.write_bytes(kept.read_bytes().replace(b"ustar", b"Ustar", 1))
    assert len(build(context, base, DOCKERFILE + "LABEL a=b\n")[1]) == 3, "damaged layers are not used"


async def test_a_command_changes_no_other_image(context: Path, base: Path) -> None:
    """Not the base, whose files are linked to a pool, by writing to a file in place."""
    [below] = prepare_images([f"oci:{base}:base"])
    ready, _ = build(context, base, "FROM base\nWORKDIR /app\nRUN echo changed >> /kept && echo x >> /usr/bin/cat")
    assert (tree_of(ready) / "kept").read_text() == "keptchanged\n"
    assert (tree_of(below) / "kept").read_text() == "kept"
    assert (tree_of(below) / "usr/bin/cat").read_bytes() == Path("/usr/bin/cat").read_bytes()
    backend = Bubblewrap()
    async with backend.open(Task("t", "", "", f"image:{ready.pinned}", b"")) as box:
        assert (await box.exec(["sh", "-c", "tail -n 1 /kept"])).output == b"keptchanged\n"
    backend.close()


LOOK = """
import os, sys, urllib.request
print("host seen:", any(os.path.exists(name) for name in sys.argv[1:]), "proxy:", bool(os.environ.get("https_proxy")))
try:
    urllib.request.urlopen("https://example.org/", timeout=5)
except OSError as error:
    sys.exit(f"no way out: {error}")
"""


def test_a_command_reaches_the_index_alone_and_nothing_of_the_host(
    context: Path, programs: bytes, tmp_path: Path
) -> None:
    base = tmp_path / "oci"
    layout(base, [programs, BELOW], "base", compress=lambda data: data, WorkingDir="/old")
    (context / "look.py").write_text(LOOK)
    secret = tmp_path / "secret"
    secret.touch()
    text = f"FROM base\nWORKDIR /app\nCOPY look.py ./\nRUN python3 look.py {secret} {images_cache()} /root/.ssh"
    with pytest.raises(TaskError, match="line 4: RUN .*host seen: False proxy: True.no way out") as caught:
        build(context, base, text)
    assert "ended with 1 (it wanted example.org:443: a build reaches only package indexes)" in str(caught.value)
    with pytest.raises(TaskError, match="host seen: False proxy: False.no way out") as caught:
        build(context, base, text.replace("RUN ", "RUN --network=none "))
    assert "it wanted" not in str(caught.value)
    assert not list(images_cache().rglob(".building*/tree")) and not list((images_cache()).glob("commands/*"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RUN exit 3", r"line 2: RUN exit 3 ended with 3: "),
        ("RUN touch /.wh.kept", "a name that hides a file"),
        ("RUN rm -rf /bin /usr/bin /lib64", "no command|cannot|not found|ended with"),
        ("WORKDIR /a\nRUN rm -rf /a; ln -s /etc /a\nWORKDIR /b\nRUN rmdir /b\nRUN true", "the image has no folder /b"),
        ("USER nobody-here\nRUN true", "nobody-here"),
    ],
)
def test_failed_commands_are_named_and_leave_no_files(context: Path, base: Path, text: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        build(context, base, f"FROM base\n{text}\nRUN no-such-program")
    assert not list(images_cache().rglob(".building*/tree"))


def test_links_that_a_command_leaves_lead_nowhere_but_into_the_image(context: Path, base: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    text = f"FROM base\nRUN mkdir /app && ln -s {outside} /app/way && ln -s {outside}/file /app/two.txt\n"
    ready, _ = build(context, base, f"{text}COPY one.txt /app/way/one.txt\nCOPY two.txt /app/\nWORKDIR /app\nRUN true")
    assert not list(outside.iterdir())
    assert (tree_of(ready) / "app/two.txt").read_text() == "copied\n"


def test_a_command_is_stopped_before_the_disk_is_full(
    context: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = commands.check_room

    def full(place: Path, need: int, what: str) -> None:
        checked(place, 1 << 60 if (place / "big").exists() else need, what)

    monkeypatch.setattr(commands, "check_room", full)
    with pytest.raises(PrerequisiteError, match="line 3: the command needs"):
        build(context, base, "FROM base\nWORKDIR /app\nRUN touch /big; sleep 600")
    assert not list(images_cache().rglob(".building*/tree"))


PROGRAM = """
import sys
from coderepairrl.environments.images import prepare_images
from pathlib import Path
prepare_images([sys.argv[1]], offered=Path(sys.argv[2]))
"""


def test_a_killed_build_continues_after_its_last_finished_command(context: Path, base: Path, cache: Path) -> None:
    slow = "FROM base\nWORKDIR /app\nRUN echo once > once\nRUN test -e /app/go || (echo half > /half; sleep 600)\n"
    (context / "Dockerfile").write_text(slow)
    images = images_folder(sandbox_user())
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, dockerfile.dockerfile_image_name(context), str(base)])
    try:
        while not list(images.glob(".building*/tree/half")):  # not from `cache` on, where folders come and go
            assert child.poll() is None
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert len(list((cache / "images/commands").iterdir())) == 1
    ready, ran = build(context, base, slow.replace("sleep 600", "sleep 0"))
    assert len(ran) == 1 and (tree_of(ready) / "half").is_file() and (tree_of(ready) / "app/once").is_file()
