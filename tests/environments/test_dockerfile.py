"""Dockerfiles: the images that Podman and distributions' packages make of them, but for owners."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.images import root_file_system

from .conftest import build_dockerfile, give_to_one_user, list_tree, open_folder, tree_of
from .made import layout, pack_folder

PROGRAMS = "bash sh env cat ls cp mv rm mkdir rmdir ln touch chmod chown install id mknod mkfifo stat true"
STAGES = """ARG WORD=given
FROM localhost/base AS maker
ARG WORD
ARG TARGETOS
WORKDIR /made
COPY --chown=5:6 one.txt folder ./
RUN echo "$WORD" "$TARGETOS" > word && chmod 640 word && ln word linked && ln -s word pointing && \\
    chown -R 7:8 /made && mknod device c 1 3 && mkfifo -m 600 pipe && \\
    mkdir -m 750 closed && echo x > closed/x && chmod 4755 closed/x && chmod 0 one.txt && cat one.txt > read
FROM maker AS more
RUN echo "$WORD" > again && rm deep/two.txt && install -o 3 -m 600 read installed
FROM localhost/base
COPY --from=maker /made /copy
COPY --from=1 /made/word /made/inst* /words/
COPY --from=maker --chmod=700 /made/read /copy
RUN {documents}
USER 77:88
RUN ["bash", "-c", "id -u > /words/id && id -g >> /words/id"]
"""
DOCUMENTS = """<<-'EOF'
	chown 77:88 /words
	echo '$WORD' > /literal
	EOF
COPY <<"EOF" <<-two.txt /texts/
literal $HOME
# text
EOF
		$PATH
two.txt
RUN cat <<A > /texts/a; cat <<A > /texts/b
$(id -u)
A
b
A"""
PLAIN = r"""chown 77:88 /words; mkdir /texts; echo '$WORD' > /literal; cd /texts; echo 0 > a; echo b > b && \
    printf 'literal $HOME\n# text\n' > EOF; echo "$PATH" > two.txt"""


@pytest.fixture
def context(isolating: None) -> Iterator[Path]:
    with open_folder() as made:
        (made / "folder/deep").mkdir(parents=True)
        (made / "one.txt").write_text("first\n")
        (made / "folder/run.sh").write_text("true\n")
        (made / "folder/run.sh").chmod(0o755)
        (made / "folder/deep/two.txt").write_text("second\n")
        yield made


OURS = ("etc", "etc/hosts", "etc/hostname", "etc/resolv.conf", "proc", "sys", "dev", "run", "run/crrl", "tmp")


def test_stages_are_those_of_podman_but_for_owners(context: Path, podman: list[str], tmp_path: Path) -> None:
    root_file_system(tmp_path / "root", PROGRAMS)
    base = pack_folder(tmp_path / "root")
    layout(tmp_path / "oci", [base], "localhost/base", WorkingDir="/testbed")
    ready, said = build_dockerfile(context, STAGES.format(documents=DOCUMENTS), tmp_path / "oci")

    def run(*words: str) -> str:
        return subprocess.run([*podman, *words], check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "base.tar").write_bytes(base)
    run("import", "-q", "--change=WORKDIR /testbed", f"{tmp_path}/base.tar", "localhost/base")
    (context / "Dockerfile").write_text(STAGES.format(documents=PLAIN))  # Podman has here-documents since version 5
    built = run(
        "build",
        "-q",
        "--isolation=chroot",
        "--pull=never",
        "--cap-add=CAP_MKNOD",
        "--build-arg=TARGETOS=linux",
        str(context),
    ).splitlines()[-1]
    theirs = Path(run("image", "mount", built))
    expected, differing = give_to_one_user(list_tree(theirs))
    mine = list_tree(tree_of(ready))

    def compared(files: dict[str, tuple[int, int, str, int, tuple[str, ...]]]) -> dict[str, tuple[object, ...]]:
        return {name: (*row[:3], row[4]) for name, row in files.items() if name not in OURS}

    assert compared(mine) == compared(expected)
    assert sorted(differing) == ["copy/closed/x", "copy/device", "copy/one.txt"]
    owned = [name for name in expected if (theirs / name).lstat().st_uid]
    assert {"copy/word", "words/installed", "words/id"} <= set(owned), "the difference, by its lines:"
    assert any("all files belong to one user" in line and line.endswith(" 6, 7, 11, 16") for line in said), said


USUAL = (
    "git curl build-essential python3-pip python3-venv nodejs npm jq vim-tiny less tmux procps locales openssh-client "
    "ca-certificates unzip wget cmake sqlite3 ripgrep tree sudo man-db"
)
PACKAGES = f"""FROM debian:bookworm AS packages
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends {USUAL} && rm -rf /var/lib/apt/lists/*
FROM packages AS made
RUN useradd -m -s /bin/bash agent && echo "agent ALL=(ALL) NOPASSWD:ALL" >> /etc/sudoers && \\
    sed -i 's/# *en_US.UTF-8/en_US.UTF-8/' /etc/locale.gen && locale-gen
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install six && npm install --prefix /opt/node left-pad
RUN printf 'int main(void) {{ return 7; }}' > seven.c && gcc -o /usr/local/bin/seven seven.c
RUN su agent -c 'touch ~/mine' && git init -q /home/agent/here && chown -R agent:agent /home/agent
FROM debian:bookworm
RUN apt-get update && apt-get install -y --no-install-recommends nodejs python3
COPY --from=made /opt /opt
COPY --from=made /usr/local/bin/seven /usr/bin/jq /usr/local/bin/
WORKDIR /app
RUN seven; echo $? > seven && cd /opt/node && node -p 'require("left-pad")("x", 3, ".")' > /app/padded && cd /app && \\
    /opt/venv/bin/python -c 'import six; print(six.__name__)' > six
"""


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's smallest system, as ``debian:bookworm``."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap (sudo apt-get install debootstrap)")
    home = tmp_path_factory.mktemp("debian")
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", home / "root"], check=True, capture_output=True)
    layout(home / "oci", [pack_folder(home / "root")], "debian:bookworm", compress=lambda data: data)
    return home / "oci"


@pytest.mark.by_hand
@pytest.mark.timeout(3600)
def test_usual_packages_are_installed(context: Path, debian: Path) -> None:
    """By apt-get, pip and npm, in stages: minutes, and a gigabyte."""
    ready, said = build_dockerfile(context, PACKAGES, debian)
    for name, text in {"seven": "7\n", "padded": "..x\n", "six": "six\n"}.items():
        assert (tree_of(ready) / "app" / name).read_text() == text
    assert any("all files belong to one user" in line for line in said)
    ready, said = build_dockerfile(context, PACKAGES.rpartition("FROM")[0] + "WORKDIR /app", debian)
    assert not [line for line in said if ": running " in line], "all of it was kept"
    tree = tree_of(ready)
    packages = (tree / "var/lib/dpkg/status").read_text().split("\n\n")
    states = {row.partition("\n")[0].removeprefix("Package: "): row for row in packages if row.strip()}
    assert set(USUAL.split()) <= set(states) and len(states) > 300
    assert all("Status: install ok installed" in row for row in states.values())
    assert (tree / "home/agent/mine").is_file() and "en_US" in (tree / "etc/locale.gen").read_text()
