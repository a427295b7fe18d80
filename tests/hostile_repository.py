"""A git repository whose own settings start programs, each of which leaves a file with its name in a folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

PROGRAMS = {
    "fsmonitor": ("git config core.fsmonitor '$MARK; false'", "git status"),
    "hook": ("""for name in post-index-change post-checkout pre-commit reference-transaction fsmonitor-watchman; do
        printf '#!/bin/sh\\n$MARK\\n' > .git/hooks/$name; chmod +x .git/hooks/$name; done""",
        "git checkout -q -b other"),
    "hooks folder": ("""mkdir .git/more; printf '#!/bin/sh\\n$MARK\\n' > .git/more/post-index-change
        chmod +x .git/more/post-index-change; git config core.hooksPath .git/more""", "git checkout -q -b other"),
    "clean filter": ("git config filter.a.clean '$MARK; cat'; echo 'a.py filter=a' >> .git/info/attributes",
        "touch -d 2001-01-01 a.py; git status"),
    "smudge filter": ("git config filter.b.smudge '$MARK; cat'; echo 'b.py filter=b' >> .git/info/attributes",
        "rm b.py; git checkout b.py"),
    "filter process": ("git config filter.c.process '$MARK; false'; echo 'c.py filter=c' >> .git/info/attributes",
        "touch -d 2001-01-01 c.py; git status"),
    "included filter": ("""printf '[filter "d"]\\n\\tclean = "$MARK; cat"\\n' > .git/more.config
        git config include.path more.config""", "touch -d 2001-01-01 d.py; git status"),
    "conditional include": ("""printf '[filter "e"]\\n\\tclean = "$MARK; cat"\\n' > .git/if.config
        git config includeIf.gitdir:/.path if.config""", "touch -d 2001-01-01 e.py; git status"),
    "settings of the working tree": ("""git config extensions.worktreeConfig true
        git config --worktree filter.f.clean '$MARK; cat'""", "touch -d 2001-01-01 f.py; git status"),
    "textconv": ("git config diff.a.textconv '$MARK; cat'; echo 'a.py diff=a' >> .git/info/attributes",
        "echo >> a.py; git diff --no-ext-diff"),
    "diff driver": ("git config diff.b.command '$MARK; true'; echo 'b.py diff=b' >> .git/info/attributes",
        "echo >> b.py; git diff"),
    "external diff": ("git config diff.external '$MARK; true'", "echo >> c.py; git diff"),
    "merge driver": ("git config merge.a.driver '$MARK; true'; echo 'a.py merge=a' >> .git/info/attributes",
        """git checkout -qb other; echo 1 > a.py; git commit -qam 1
        git checkout -q main; echo 2 > a.py; git commit -qam 2; git merge other"""),
    "pager": ("git config core.pager '$MARK; cat'", "script -qec 'git log' /dev/null"),
    "editor": ("git config core.editor '$MARK; true'", "git -c commit.gpgSign=false commit --allow-empty"),
    "signing program": ("""printf '#!/bin/sh\\n$MARK\\n' > .git/sign; chmod +x .git/sign
        git config gpg.program "$PWD/.git/sign"; git config commit.gpgSign true""", "git commit --allow-empty -qm x"),
    "verifying program": ("""printf '#!/bin/sh\\n$MARK\\n' > .git/verify; chmod +x .git/verify
        git config gpg.ssh.program "$PWD/.git/verify"; git config log.showSignature true; git config gpg.format ssh
        git config gpg.ssh.allowedSignersFile /dev/null
        (git cat-file commit HEAD | sed -n '1,/^committer/p'
        printf 'gpgsig -----BEGIN SSH SIGNATURE-----\\n x\\n -----END SSH SIGNATURE-----\\n\\nsigned\\n') > .git/signed
        git update-ref HEAD $(git hash-object -t commit -w .git/signed)""", "git log"),
    "alias": ("git config alias.st '!$MARK'", "git st"),
    "ssh command": ("git config core.sshCommand '$MARK; false'; git remote add ssh ssh://127.0.0.1:1/x",
        "git fetch -q ssh"),
    "proxy command": ("""printf '#!/bin/sh\\n$MARK\\n' > .git/proxy; chmod +x .git/proxy
        git config core.gitProxy "$PWD/.git/proxy"; git remote add proxied git://127.0.0.1:1/x""",
        "git fetch -q proxied"),
    "remote helper": ("git config protocol.ext.allow always; git remote add ext \"ext::$MARK\"", "git fetch -q ext"),
    "credential helper": ("git config credential.helper '!$MARK; true'",
        "printf 'protocol=http\\nhost=x\\n\\n' | git credential fill"),
    "asking program": ("""printf '#!/bin/sh\\n$MARK\\n' > .git/ask; chmod +x .git/ask
        git config core.askPass "$PWD/.git/ask" """,
        "printf 'protocol=http\\nhost=x\\n\\n' | git -c credential.helper= credential fill"),
    "upload-pack of a remote": ("git remote add up .; git config remote.up.uploadpack '$MARK; git-upload-pack'",
        "git fetch -q up"),
    "a promised object": ("""git config extensions.partialClone promised; git remote add promised .
        git config remote.promised.promisor true; git config remote.promised.uploadpack '$MARK; git-upload-pack'
        blob=$(git rev-parse HEAD:gone.txt)
        rm -f .git/objects/$(echo $blob | cut -c1-2)/$(echo $blob | cut -c3-)""",
        "git cat-file -e HEAD:gone.txt; git show HEAD:gone.txt"),
    "a submodule": ("""git -C sub config core.fsmonitor '$MARK; false'""", "git status"),
}  # fmt: skip
"""By name: a shell script that adds a program to the repository (``$MARK`` is the command that leaves the file), and
ordinary git commands that start that program."""
SETTINGS, TRIGGERS = ({name: pair[at] for name, pair in PROGRAMS.items()} for at in (0, 1))


class Hostile:
    """A clean repository at `root` with the settings `names`, whose programs leave files in the folder `marks`."""

    def __init__(self, root: Path, marks: Path, names: Iterable[str] = SETTINGS) -> None:
        self.root, self.marks = root, marks
        marks.mkdir(exist_ok=True)
        marks.chmod(0o777)  # programs may run as another user
        root.mkdir()
        self.shell(_START)
        for name in names:
            self.shell(SETTINGS[name].replace("$MARK", f"touch {marks}/{name.replace(' ', '_')}"))
        self.forget()

    @property
    def ran(self) -> set[str]:
        """Names of the programs that ran since the last `forget`."""
        return {path.name.replace("_", " ") for path in self.marks.iterdir()}

    def forget(self) -> None:
        for path in self.marks.iterdir():
            path.unlink()

    def age(self) -> None:
        """Change the files' times, as a copy would, so that git compares their contents."""
        for path in self.root.glob("*.py"):
            os.utime(path, (978307200, 978307200))

    def shell(self, script: str, *, check: bool = True) -> str:
        done = subprocess.run(["bash", "-c", script], cwd=self.root, env=_PLAIN, capture_output=True, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.decode()


_PLAIN = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@t",
}  # fmt: skip
_START = """git init -q -b main
for name in a b c d e f; do echo 'def add(a, b): return a - b' > $name.py; done
echo gone > gone.txt
printf 'd.py filter=d\\ne.py filter=e\\nf.py filter=f\\n' > .gitattributes
git init -q sub; cd sub; echo in > in.txt; git add -A; git commit -qm in; cd ..
git -c protocol.file.allow=always submodule --quiet add ./sub sub
git add -A; git commit -qm start"""
