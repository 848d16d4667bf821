#!/usr/bin/env bash
# Packages the program: a tarball, a Debian package and their checksums. Needs binutils, GNU tar, gzip, xz and python3; without
# --program it builds with cargo. The same inputs make the same bytes.
#
#   tools/release.sh [--program PATH]... [--out DIR]
#
#   --program PATH  package this build instead of making one; again for dynamicinfer-lab
#   --out DIR       write here [target/packages]
#
# tools/release_check.py tries the result in an empty root.
set -euo pipefail
here="$PWD"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() { echo "release.sh: $*" >&2; exit 1; }

programs=() out="$root/target/packages"
while [ $# -gt 0 ]; do
    case "$1" in
        --program) programs+=("$(realpath "${2:?a path}")"); shift 2 ;;
        --out) out="$(realpath -m "${2:?a folder}")"; shift 2 ;;
        -h | --help) sed -n '2,/^set/{/^#/s/^# \?//p}' "$root/tools/release.sh"; exit ;;
        *) fail "unknown argument $1; --help lists all" ;;
    esac
done
for tool in ar objdump strip tar gzip xz python3 sha256sum; do
    command -v $tool >/dev/null || fail "$tool is missing"
done
[ "$(uname -sm)" = "Linux x86_64" ] || fail "packages are for x86-64 Linux; this is $(uname -sm)"

cd "$root"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
if [ ${#programs[@]} = 0 ]; then
    cargo build --locked --profile dist -p dynamicinfer --bins
    target="${CARGO_TARGET_DIR:-target}/dist"
    programs=("$target/dynamicinfer")
    programs+=("$target/dynamicinfer-lab")
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
# Times of files are the commit's, so that two runs differ in nothing.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}" LC_ALL=C TZ=UTC
pack() { # pack FOLDER [NAME]...: a tar of them on stdout, without names of users and with the commit's time
    tar --create --directory "$1" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=gnu "${@:2}"
}

# 1. The tree that both packages share: what lies below ~/.local, /usr/local or /usr.
tree="$work/tree" libc=
install -d "$tree"/bin "$tree"/share/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d,man/man1,systemd/user}
mine=()
for program in "${programs[@]}"; do
    name=$(basename "$program")
    case "$name" in dynamicinfer | dynamicinfer-lab) ;; *) fail "$program is neither dynamicinfer nor dynamicinfer-lab" ;; esac
    mine+=("$name")
    strip -o "$tree/bin/$name" "$program"
    chmod 755 "$tree/bin/$name"
    "$program" --version | grep -F " $version" >/dev/null || fail "$program says $("$program" --version), and Cargo.toml $version"
    libc=$(printf '%s\n' "$libc" $(objdump -T "$program" | grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2) | sort -V | tail -1)
    "$program" completions bash >"$tree/share/bash-completion/completions/$name"
    "$program" completions zsh >"$tree/share/zsh/site-functions/_$name"
    "$program" completions fish >"$tree/share/fish/vendor_completions.d/$name.fish"
    "$program" completions man "$tree/share/man/man1"
done
[[ " ${mine[*]} " = *" dynamicinfer "* ]] || fail "the program dynamicinfer is missing: give it, too"
unit() { # unit PATH-OF-THE-PROGRAM
    sed "s|^ExecStart=[^ ]*|ExecStart=$1|" configs/dynamicinfer.service
}
python3 tools/licences.py >"$work/LICENSES-third-party"

# 2. The tarball.
name="dynamicinfer-$version-x86_64-linux"
mkdir -p "$work/tarball"
cp -a "$tree" "$work/tarball/$name"
unit "%h/.local/bin/dynamicinfer" >"$work/tarball/$name/share/systemd/user/dynamicinfer.service"
cp README.md LICENSE-MIT LICENSE-APACHE configs/default.toml "$work/LICENSES-third-party" "$work/tarball/$name/"
cat >"$work/tarball/$name/INSTALL" <<END
dynamicinfer $version for x86-64 Linux with glibc $libc or newer (ldd --version prints yours).

  mkdir -p ~/.local && cp -r bin share ~/.local/

installs it for you: the program, its completions for bash, zsh and fish, its man pages, and a unit for systemd.
~/.local/bin has to be in PATH. The daemon, if you want one:

  systemctl --user daemon-reload && systemctl --user enable --now dynamicinfer

default.toml lists all settings; yours are in ~/.config/dynamicinfer/config.toml. SHA256SUMS has the files' checksums.
END
(cd "$work/tarball/$name" && find . -type f ! -name SHA256SUMS | sort | xargs sha256sum >SHA256SUMS)
mkdir -p "$out"
rm -f "$out"/dynamicinfer-*-x86_64-linux.tar.gz "$out"/dynamicinfer_*_amd64.deb "$out/SHA256SUMS"
pack "$work/tarball" "$name" | gzip -9n >"$out/$name.tar.gz"

# 3. The Debian package: an ar of three files. It has no scripts, and no conffiles because nothing is in /etc. The unit is a user's: each user
# enables it, and no system-wide daemon starts.
deb="$work/deb" doc="$work/deb/usr/share/doc/dynamicinfer"
mkdir -p "$deb"
cp -a "$tree" "$deb/usr"
mv "$deb/usr/share/zsh/site-functions" "$deb/usr/share/zsh/vendor-completions"
mkdir -p "$deb/usr/lib/systemd"
mv "$deb/usr/share/systemd/user" "$deb/usr/lib/systemd/user"
rmdir "$deb/usr/share/systemd"
unit /usr/bin/dynamicinfer >"$deb/usr/lib/systemd/user/dynamicinfer.service"
gzip -9n "$deb"/usr/share/man/man1/*.1
install -d "$doc/examples"
install -m 644 README.md "$doc/README.md"
install -m 644 configs/default.toml "$doc/examples/config.toml"
gzip -9nc "$work/LICENSES-third-party" >"$doc/LICENSES-third-party.gz"
{
    printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: dynamicinfer\n\n'
    printf 'Files: *\nCopyright: the dynamicinfer developers\nLicense: MIT or Apache-2.0\n'
    printf 'Comment: The program contains crates of others; LICENSES-third-party.gz lists them and their licences.\n'
    printf ' On Debian, /usr/share/common-licenses/Apache-2.0 has the Apache licence.\n\nLicense: MIT\n'
    sed 's/^$/./; s/^/ /' LICENSE-MIT
} >"$doc/copyright"
find "$deb" -type f ! -perm 755 -exec chmod 644 {} +
control="$work/control"
mkdir -p "$control"
gcc_s=$(objdump -p "$deb/usr/bin/dynamicinfer" | grep -w libgcc_s.so.1 >/dev/null && echo ", libgcc-s1 (>= 3.0)" || true)
cat >"$control/control" <<END
Package: dynamicinfer
Version: $version
Architecture: amd64
Maintainer: ${MAINTAINER:-dynamicinfer developers <root@localhost>}
Installed-Size: $(du -k --apparent-size -s "$deb/usr" | cut -f1)
Depends: libc6 (>= $libc)$gcc_s
Section: science
Priority: optional
Description: language models that are larger than VRAM or RAM
 Runs language models (GGUF, safetensors) on the processor, on an NVIDIA card
 whose memory holds a part of the model, or from disk. In models with a
 ReLU-like activation it computes only the neurons that a token needs.
 .
 The systemd unit is a user's: systemctl --user enable --now dynamicinfer
END
(cd "$deb" && find usr -type f | sort | xargs md5sum) >"$control/md5sums"
mkdir -p "$work/ar"
echo 2.0 >"$work/ar/debian-binary"
pack "$control" . | xz -9e --threads=1 >"$work/ar/control.tar.xz"
pack "$deb" . | xz -6 --threads=1 >"$work/ar/data.tar.xz"
(cd "$work/ar" && ar rcD "$work/package.deb" debian-binary control.tar.xz data.tar.xz)
cp "$work/package.deb" "$out/dynamicinfer_${version}_amd64.deb"

(cd "$out" && sha256sum "$name.tar.gz" "dynamicinfer_${version}_amd64.deb" >SHA256SUMS)
for program in "${mine[@]}"; do
    echo "$program: $(stat -c %s "$tree/bin/$program") bytes, needs glibc $libc"
done
cd "$here"
ls -l "$out"/*"$version"* | awk '{print $5, $NF}'
