"""Bash scripts of attacks by name; longer ones are in `inside`.

Environment: ``SECRET`` (a file), ``OUTSIDE`` (a writable folder), ``HOLDER`` (a process with a secret), ``TCP UNIX
ABSTRACT`` (servers), ``REMOTE FIXED`` (repository, repairing commit), the limits, ``A`` and ``B`` (halves of the
secret). A successful attack prints ``$A$B``, or creates ``$OUTSIDE/plant`` or a file ``$A$B`` in a temporary folder.
``(root)``: its control (outside a sandbox) needs root.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from coderepairrl.checks.attacks import inside

INSIDE = Path(inside.__file__).read_text(encoding="utf-8")
_QUOTED = shlex.quote(INSIDE)


def _format_inside_command(name: str, *arguments: str) -> str:
    return f"python3 -ISc {_QUOTED} {shlex.join([name, *arguments])}"


ESCAPES = {
    "nested shells": """bash -c 'sh -c "echo x > $OUTSIDE/plant"'""",
    "a path upwards": 'echo x > "../../../../../../../../../..$OUTSIDE/plant"',
    "python": _format_inside_command("plant"),
    "awk": """awk 'BEGIN { print "x" > ENVIRON["OUTSIDE"] "/plant" }'""",
    "awk system": """awk 'BEGIN { system("touch $OUTSIDE/plant") }'""",
    "find -exec": r'find . -maxdepth 0 -exec touch "$OUTSIDE/plant" \;',
    "git alias": """git -c alias.x='!touch "$OUTSIDE/plant"' x""",
    "git fsmonitor": """git -c core.fsmonitor='touch "$OUTSIDE/plant"; false' status""",
    "git filter": """echo '* filter=x' > .gitattributes
        git -c filter.x.clean='touch "$OUTSIDE/plant"; cat' add -A""",
    "git hook": """mkdir -p .git/hooks; printf '#!/bin/sh\\ntouch "$OUTSIDE/plant"\\n' > .git/hooks/pre-commit
        chmod +x .git/hooks/pre-commit; git commit --allow-empty -m x""",
    "git external diff": """echo >> app.py; git -c diff.external='touch "$OUTSIDE/plant"; true' diff""",
    "sed w": 'sed -n "w $OUTSIDE/plant" app.py',
    "sed e": 'sed "1e touch $OUTSIDE/plant" app.py',
    "tee": 'echo x | tee "$OUTSIDE/plant"',
    "xargs": 'echo "$OUTSIDE/plant" | xargs touch',
    "tar checkpoint": 'tar cf /dev/null --checkpoint=1 --checkpoint-action=exec="touch $OUTSIDE/plant" app.py',
    "a write through a link": 'ln -sfn "$OUTSIDE" link; echo x > link/plant',
    "temporary folders of the host": 'touch "/tmp/$A$B" "/dev/shm/$A$B" 2> /dev/null',
    "any other folder": _format_inside_command("write_elsewhere"),
    "the mode of a folder": 'chmod 777 "$OUTSIDE" && echo "$A$B"',
    "the times of a folder": 'touch "$OUTSIDE" && echo "$A$B"',
    "a hard link": 'ln -f "$SECRET" hard; cat hard',
    "a magic link of /proc": 'cat "/proc/self/root$SECRET"; touch "/proc/thread-self/root$OUTSIDE/plant"',
    "a descriptor of /": _format_inside_command("descriptor_of_root"),
    "root of the keeper (root)": 'cat "/proc/$PPID/root$SECRET" "/proc/1/root$SECRET"',
    "working folder of the keeper (root)": 'cat "/proc/1/cwd/$SECRET" "/proc/$PPID/cwd/../../../../..$SECRET"',
}
"""Ways out of the workspace, by tools that write, read or run."""

SECRETS = {
    "a file": 'cat "$SECRET"',
    "a search": """find "${SECRET%/*}" -maxdepth 1 -type f -exec cat {} +""",
    "environment": "env",
    "everybody's environment": r"cat /proc/[0-9]*/environ | tr '\0' '\n'",
    "the process list": "ps axww; cat /proc/[0-9]*/cmdline",
    "another's environment": 'cat "/proc/$HOLDER/environ"',
    "another's command line": 'cat "/proc/$HOLDER/cmdline"',
    "another's memory": _format_inside_command("memory_of_holder"),
    "another's root": 'cat "/proc/$HOLDER/root$SECRET"',
    "a signal to another": 'kill -CONT "$HOLDER" && echo "$A$B"',
    "another's limits": _format_inside_command("limits_of_holder"),
    "another's priority": 'renice -n 19 -p "$HOLDER" && echo "$A$B"',
    "answers in this package": 'cat "$PACKAGE"/tasks/handmade/*/fix.patch && echo "$A$B"',
    "a search for answers": """find "$PACKAGE" /usr/lib/python3* /usr/local/lib /opt -path '*/handmade/*/fix.patch' |
        grep -q . && echo "$A$B\"""",
}
"""Keys, files and processes of the host."""


def _format_connect_command(family: str, variable: str) -> str:
    return f'{_format_inside_command("connect", family)} "${variable}"'


NETWORK = {
    "the host's loopback": _format_connect_command("inet", "TCP"),
    "the host's loopback, mapped": _format_connect_command("inet6", "TCP"),
    "a socket file": _format_connect_command("unix", "UNIX"),
    "an abstract socket": _format_connect_command("abstract", "ABSTRACT"),
    "the internet": _format_inside_command("route"),
    "vsock": _format_inside_command("open_socket", "40", "1"),
    "netlink of the firewall": _format_inside_command("open_socket", "16", "3", "12"),
    "netlink of the kernel's events": _format_inside_command("open_socket", "16", "3", "15"),
    "raw packets (root)": _format_inside_command("open_socket", "17", "3", "0x300"),
    "a raw socket (root)": _format_inside_command("open_socket", "2", "3", "1"),
}
"""Destinations beyond the bridge."""

KERNEL = {name: _format_inside_command("call", name) for name in inside.CALLS} | {
    "unshare": 'unshare -Ur true && echo "$A$B"',
    "priority of all of a user's processes": _format_inside_command("priority_of_all"),
    "/proc/sys (root)": ': 2> /dev/null >> /proc/sys/kernel/core_pattern && echo "$A$B"',
    "any setting in /proc/sys (root)": _format_inside_command("writable", "/proc/sys"),
    "any setting in /sys (root)": _format_inside_command("writable", "/sys/kernel", "/sys/module", "/sys/power"),
    "what runs when a control group is empty (root)": """for file in /sys/fs/cgroup/release_agent \\
        /sys/fs/cgroup/*/release_agent; do : 2> /dev/null >> "$file" && echo "$A$B"; done""",
    "userfaultfd by its device (root)": ': 2> /dev/null < /dev/userfaultfd && echo "$A$B"',
    "the kernel's log (root)": ': 2> /dev/null < /dev/kmsg && echo "$A$B"',
    "sysrq (root)": ': 2> /dev/null >> /proc/sysrq-trigger && echo "$A$B"',
    "the kernel's memory (root)": 'head -c 1 /proc/kcore > /dev/null && echo "$A$B"',
    "a disk (root)": """for disk in $(awk '$4 ~ /[a-z]/ { print "/dev/" $4 }' /proc/partitions)
        do head -c 1 "$disk" > /dev/null && echo "$A$B"; done""",
    "a new device (root)": 'mknod null c 1 3 && echo "$A$B"',
    "a control group (root)": """for root in /sys/fs/cgroup /sys/fs/cgroup/*/
        do mkdir "$root/crrl-probe" && rmdir "$root/crrl-probe" && echo "$A$B"; done""",
    "a set-user-id program (root)": _format_inside_command("set_user_id"),
    "higher priority (root)": 'nice -n -5 true 2>&1 | grep -q . || echo "$A$B"',
}
"""System calls that no repair needs, and kernel files."""

REFERENCE = {
    "the log of all branches": "git log --all -p",
    "the fixing commit by its name": 'git show "$FIXED"',
    "every object there is": "git cat-file --batch-all-objects --batch",
    "packs by hand": "for p in .git/objects/pack/*.idx; do git show-index < $p | cut -d' ' -f2 | xargs git show; done",
    "lost objects": "git fsck --unreachable --no-reflogs | cut -d' ' -f3 | xargs git show; git reflog show -p --all",
    "the remote": "git fetch -q origin main && git show FETCH_HEAD",
    "a clone of the remote": 'git clone -q "$REMOTE" again && git -C again log --all -p',
    "objects borrowed from the remote": """echo "$REMOTE/objects" > .git/objects/info/alternates; git show "$FIXED" """,
    "reading every file around": 'grep -rsh "$A$B" . "$OUTSIDE/.." | head -c 4096',
}

LIMITS = {
    "processes": _format_inside_command("processes"),
    "threads": _format_inside_command("threads"),
    "processes that have left": _format_inside_command("processes_that_left"),
    "memory of one process": _format_inside_command("memory_of_one"),
    "memory of many processes": _format_inside_command("memory_of_many"),
    "memory that is shared": _format_inside_command("memory_that_is_shared"),
    "memory in sockets": _format_inside_command("memory_in_sockets"),
    "one large file": """head -c "$((FILE_BYTES + (1 << 20)))" /dev/zero > big
        test "$(stat -c %s big)" -gt "$FILE_BYTES" && echo "$A$B"; rm big""",
    "/tmp": _format_inside_command("fill", "TMP_BYTES", "/tmp"),
    "/dev/shm": _format_inside_command("fill", "TMP_BYTES", "/dev/shm"),
    "the workspace": _format_inside_command("fill", "DISK_BYTES", "."),
    "files that are deleted but open": _format_inside_command("fill", "DISK_BYTES", ".", "deleted"),
    "a sparse file": """truncate -s "$((FILE_BYTES + (1 << 20)))" sparse
        test "$(stat -c %s sparse)" -gt "$FILE_BYTES" && echo "$A$B"; rm sparse""",
    "a great many files": _format_inside_command("many", "files"),
    "a great many files in /tmp": _format_inside_command("many", "files", "/tmp"),
    "a great many files in /dev/shm": _format_inside_command("many", "files", "/dev/shm"),
    "a great many folders": _format_inside_command("many", "folders"),
    "folders in folders": _format_inside_command("many", "nested"),
    "a great many links": _format_inside_command("many", "links"),
    "a great many names of one file": _format_inside_command("many", "names"),
    "attributes of files": _format_inside_command("many", "attributes", "/dev/shm"),
    "CPU time": _format_inside_command("cpu_time"),
    "terminals": _format_inside_command("terminals"),
    "open files": _format_inside_command("open_files"),
}
"""Attempts to exceed limits, bounded since controls run unsandboxed."""

KEEPER = {
    "killing the keeper": "kill -9 $PPID; kill -9 1; sleep 0.2",
    "stopping the keeper": "kill -STOP $PPID; kill -STOP 1; sleep 0.2",
    "asking the keeper to end": "kill $PPID; kill 1; kill -HUP $PPID; kill -INT $PPID; kill -INT 1; sleep 0.2",
    "killing everything": "kill -9 -1; sleep 0.2",
    "its descriptors": _format_inside_command("kill_by_descriptors"),
    "a forged frame": _format_inside_command("forged_frame"),
    "its limits": _format_inside_command("limits_of_keeper"),
    "its priority": _format_inside_command("priority_of_keeper"),
    "a signal by a descriptor": _format_inside_command("signal_by_descriptor"),
    "tracing it": _format_inside_command("trace"),
    "a copy of its descriptors": _format_inside_command("copy_descriptors"),
    "its memory": _format_inside_command("memory_of_keeper"),
}
"""Attacks on the keeper, parent of each command."""

THREADS = _format_inside_command("daemon_of_threads")

FIX = "sed -i 's/a - b/a + b/' app.py; echo added > new.txt"

_MARK = 'touch "$PWD/RAN"'
DIFF = {
    "a commit": "git add -A; git commit -qm done",
    "a hook": f"""mkdir -p .git/hooks; printf '#!/bin/sh\\n{_MARK}\\n' > .git/hooks/post-index-change
        chmod +x .git/hooks/post-index-change""",
    "fsmonitor": f"git config core.fsmonitor '{_MARK}; false'",
    "a clean filter": f"git config filter.x.clean '{_MARK}; echo gone'; echo '* filter=x' > .git/info/attributes",
    "a filter process": f"git config filter.x.process '{_MARK}; false'; echo '* filter=x' > .gitattributes",
    "textconv": f"git config diff.x.textconv '{_MARK}; echo gone'; echo '* diff=x' > .git/info/attributes",
    "an external diff": f"git config diff.external '{_MARK}; true'",
    "an included configuration": f"printf '[core]\\n\\tfsmonitor = {_MARK}; false\\n' | tr -d '\"' > .git/more"
    "; git config include.path more",
    "attributes of the tree": "echo '* -diff' > .gitattributes",
    "ignored files": "echo '*' > .gitignore",
    "the exclude file": "echo '*' > .git/info/exclude",
    "unchanged by declaration": "git update-index --assume-unchanged app.py",
    "skipped by declaration": "git update-index --skip-worktree app.py",
    "a sparse checkout": "git config core.sparseCheckout true; git config index.sparse true; "
    "printf '/new.txt\\n' > .git/info/sparse-checkout; git update-index --skip-worktree app.py",
    "no repository": "rm -rf .git",
    "no HEAD": "rm .git/HEAD",
    "a broken index": "echo x > .git/index",
    "a locked index": "touch .git/index.lock",
    "a repository elsewhere": "rm -rf .git; ln -s /nonexistent .git",
    "a worktree elsewhere": "git config core.worktree /tmp",
    "a bare repository": "git config core.bare true",
    "another HEAD": "git checkout -q --orphan other; git add -A; git commit -qm x",
    "a replaced commit": "old=$(git rev-parse HEAD); git add -A; new=$(git commit-tree $(git write-tree) -m x); "
    "git replace $old $new",
    "an alternate that is gone": "rm -rf .git/objects/*; mkdir -p .git/objects/info; "
    "echo /nonexistent > .git/objects/info/alternates",
    "a nested repository": "mkdir in; git init -q in; mv new.txt in; cd in; git add -A; "
    "git -c user.name=a -c user.email=a@a commit -qm x",
    "a submodule": "mkdir in; git init -q in; mv new.txt in; cd in; git add -A; "
    "git -c user.name=a -c user.email=a@a commit -qm x; cd ..; "
    "git -c protocol.file.allow=always submodule add -q ./in in",
    "a fifo": "mkfifo pipe",
    "a socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
    "bytes that are no text": r"printf '\377\376' > bytes",
    "a name that is no text": r"echo x > $'\377'",
    "a name of two lines": r"echo x > $'a\nb'",
    "a file that nobody may read": "chmod 000 new.txt",
    "a folder that nobody may enter": "mkdir shut; mv new.txt shut; chmod 000 shut",
    "a link to itself": "ln -s loop loop",
    "a link in the way of the repository": "rm -rf .git; ln -s /nonexistent .GIT; mkdir .git; touch .git/objects",
}
"""Ways to hide a change from the diff, or to make the host run something."""
