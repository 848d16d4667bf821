#!/usr/bin/env python3
"""Tries what tools/release.sh has written, without a network: python3 tools/release_check.py [DIR]

The tarball: its checksums are right, the program is small enough, and it answers from a root directory that holds nothing but itself and the
libraries that it names. The Debian package: dpkg installs it into an empty root whose status file has this machine's libc6 and
libgcc-s1, the program answers there, and after a purge nothing is left. The unit: a systemd of this script's own, in namespaces, with
the package's files over /usr, shows the unit, starts the daemon and stops it; this needs root and systemd, and is left out, with a
line that says so, without them.

Roots are entered in a user namespace, so that all but the unit works without root. Standard library only; needs unshare, chroot, dpkg.
"""
import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACE = ["unshare", "--user", "--map-root-user"]
PROMPT = "Once upon a time"
# The home directory in a root that a check makes.
HOME = "/user"
SHELLS = {
    "bash": "bash-completion/completions/{}", "zsh": "zsh/*/_{}", "fish": "fish/vendor_completions.d/{}.fish",
}
# What the namespaces of the unit run. $1 is the root that dpkg installed into.
UNIT = r"""
set -eu
mount -t overlay -o "lowerdir=$1/usr:/usr" overlay /usr
mount -t tmpfs none "$2"
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/user/0
chmod 700 /run/user/0
export HOME="$2" XDG_RUNTIME_DIR=/run/user/0 DBUS_SESSION_BUS_ADDRESS=
"$3" --user --log-target=console >/run/log 2>&1 &
for _ in $(seq 100); do [ ! -S /run/user/0/systemd/private ] || break; sleep 0.1; done
systemctl --user cat dynamicinfer.service
systemctl --user start dynamicinfer.service || { cat /run/log; exit 1; }
echo "+ started: $(systemctl --user is-active dynamicinfer.service)"
dynamicinfer load demo
dynamicinfer ps
systemctl --user stop dynamicinfer.service
echo "+ stopped: $(systemctl --user show -p Result dynamicinfer.service)"
"""


def fail(text):
    sys.exit(f"release_check: {text}")


def run(command, **more):
    """Text of a command that has to work; what it says is shown if it does not."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, **more)
    if done.returncode:
        fail(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def one(pattern):
    found = glob.glob(pattern)
    return found[0] if len(found) == 1 else fail(f"{pattern}: {len(found)} files, not one; run tools/release.sh")


def check_sums(folder):
    with open(os.path.join(folder, "SHA256SUMS")) as file:
        lines = file.read().splitlines()
    for line in lines:
        digest, name = line.split(maxsplit=1)
        with open(os.path.join(folder, name), "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() != digest:
                fail(f"{os.path.join(folder, name)} is not what SHA256SUMS says")
    return len(lines)


def libraries(program):
    """Files that the loader maps for a program, by ldd."""
    return sorted(set(re.findall(r"(/\S+) \(0x", run(["ldd", program]).stdout)))


def add_libraries(root, program):
    for path in libraries(program):
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            shutil.copy(path, target)


def inside(root, home, command):
    """Runs a command with `root` as the root directory and nothing of this environment."""
    for folder in ("tmp", home.lstrip("/")):
        os.makedirs(os.path.join(root, folder), exist_ok=True)
    return run([*NAMESPACE, "chroot", root, *command], env={"PATH": PATH, "HOME": home})


def answers(root, program, home=HOME):
    command = [program, "run", "demo", PROMPT, "-n", "16", "--temp", "0"]
    done = inside(root, home, command)
    text = done.stdout.strip()
    if len(text.split()) < 4:
        fail(f"{' '.join(command)} says {text!r}")
    print(f"$ {' '.join(command[:3])} {PROMPT!r} {' '.join(command[4:])}\n{text}\n{done.stderr.strip().splitlines()[-1]}")


def listing(root, without):
    """Paths below a root, but what is below `without`."""
    found = set()
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(below, name)) not in without]
        found |= {os.path.normpath(os.path.join(below, name)) for name in [*folders, *files]}
    return found


def check_completions(share, program):
    for shell, pattern in SHELLS.items():
        path = one(os.path.join(share, pattern.format(program)))
        if os.path.getsize(path) < 1000:
            fail(f"{path} is no completion script")
        if shutil.which(shell):
            run([shell, "-n", path])


def check_tarball(folder, work, limit):
    path = one(os.path.join(folder, "dynamicinfer-*-x86_64-linux.tar.gz"))
    print(f"== {os.path.basename(path)}: {os.path.getsize(path)} bytes")
    run(["tar", "--extract", "--file", path, "--directory", work])
    tree = os.path.join(work, os.path.basename(path).removesuffix(".tar.gz"))
    print(f"{check_sums(tree)} files as SHA256SUMS says")
    root = os.path.join(work, "root")
    local = os.path.join(root, HOME.strip("/"), ".local")
    for name in ("bin", "share"):
        shutil.copytree(os.path.join(tree, name), os.path.join(local, name))
    pages = glob.glob(os.path.join(local, "share/man/man1/*.1"))
    for program in sorted(os.listdir(os.path.join(local, "bin"))):
        whole = os.path.join(local, "bin", program)
        size = os.path.getsize(whole)
        print(f"{program}: {size} bytes; {', '.join(map(os.path.basename, libraries(whole)))}")
        if limit and size > limit * 1_000_000:
            fail(f"{program} has more than {limit} MB")
        check_completions(os.path.join(local, "share"), program)
        add_libraries(root, whole)
        print("$ " + inside(root, HOME, [f"{HOME}/.local/bin/{program}", "--version"]).stdout.strip())
    if len(pages) < 10:
        fail(f"{len(pages)} man pages")
    others = sorted(name for name in listing(root, {HOME.strip("/"), "tmp"}) if os.path.isfile(os.path.join(root, name)))
    print(f"{len(pages)} man pages; beside ~/.local the root has {', '.join(others)}")
    answers(root, f"{HOME}/.local/bin/dynamicinfer")


def prepare_dpkg(root):
    """A database of packages that has only what the program's package depends on, as this machine has it."""
    base = os.path.join(root, "var/lib/dpkg")
    for name in ("info", "updates", "triggers"):
        os.makedirs(os.path.join(base, name))
    fields = ("Package", "Status", "Maintainer", "Architecture", "Multi-Arch", "Version", "Description")
    with open(os.path.join(base, "status"), "w") as status:
        for package in ("libc6", "libgcc-s1"):
            lines = run(["dpkg-query", "-s", package]).stdout.splitlines()
            kept = [line for line in lines if line.split(":")[0] in fields and not line.startswith(" ")]
            status.write("\n".join(kept) + "\n\n")
            open(os.path.join(base, "info", f"{package}:amd64.list"), "w").close()


def check_unit(root, work):
    manager = next((path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if os.path.exists(path)), None)
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() or not manager or subprocess.run([*namespaces, "true"], capture_output=True).returncode:
        print("-- left out: starting the unit, which needs root, namespaces of its own and systemd")
        return
    home = os.path.join(work, "user")
    os.mkdir(home)
    command = [*namespaces, "bash", "-c", UNIT, "unit", root, home, manager]
    print("-- a user's systemd with the package over /usr")
    print(run(command, env={"PATH": PATH}).stdout.strip())


def check_package(folder, work):
    path = one(os.path.join(folder, "dynamicinfer_*_amd64.deb"))
    print(f"== {os.path.basename(path)}: {os.path.getsize(path)} bytes")
    root = os.path.join(work, "debian")
    os.makedirs(root)
    prepare_dpkg(root)
    database, users = "var/lib/dpkg", "root"
    host = {**os.environ, "PATH": f"{PATH}:{os.environ['PATH']}", "LC_ALL": "C"}
    dpkg = [*NAMESPACE, "dpkg", f"--root={root}", "--log=/dev/null"]
    before = listing(root, {database, users, "tmp"})
    done = run([*dpkg, "--install", path], env=host)
    print((done.stdout + done.stderr).strip())
    there = listing(root, {database, users, "tmp"}) - before
    status = run(["dpkg", f"--root={root}", "--status", "dynamicinfer"]).stdout
    print(f"{len(there)} files and folders; conffiles: {status.count('Conffiles:')}")
    installed = os.path.join(root, "usr/bin/dynamicinfer")
    if any("libgcc_s" in path for path in libraries(installed)) and "libgcc-s1" not in status:
        fail("the package does not depend on libgcc-s1, which its program needs")
    libs = os.path.join(work, "with-libraries")
    shutil.copytree(root, libs, symlinks=True)
    add_libraries(libs, os.path.join(libs, "usr/bin/dynamicinfer"))
    answers(libs, "/usr/bin/dynamicinfer")
    check_unit(root, work)
    done = run([*dpkg, "--purge", "dynamicinfer"], env=host)
    print((done.stdout + done.stderr).strip())
    left = sorted(listing(root, {database, users, "tmp"}) - before)
    known = [name for name in listing(os.path.join(root, database), set()) if "dynamicinfer" in name]
    with open(os.path.join(root, database, "status")) as file:
        known += ["status"] if "dynamicinfer" in file.read() else []
    if left or known:
        fail(f"a purge leaves {', '.join(left + known)}")
    print("a purge leaves nothing")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.path.join(ROOT, "target", "packages"), help="what release.sh wrote to")
    parser.add_argument("--max-mb", type=float, default=35, help="most million bytes of a program; 0 for any [%(default)s]")
    options = parser.parse_args()
    for tool in ("unshare", "chroot", "ldd", "dpkg"):
        if not shutil.which(tool, path=f"{PATH}:{os.environ['PATH']}"):
            fail(f"{tool} is missing")
    print(f"{check_sums(options.folder)} packages as SHA256SUMS says")
    with tempfile.TemporaryDirectory() as work:
        check_tarball(options.folder, work, options.max_mb)
        check_package(options.folder, work)


if __name__ == "__main__":
    main()
