# shellcheck shell=bash disable=SC2034
# Sourced by the scripts here: where things are, and how to end.
rdma=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$rdma/../.." && pwd)
# CARGO_TARGET_DIR, if relative, is so to where cargo runs: the repository.
work=$(cd "$repository" && realpath -m "${CARGO_TARGET_DIR:-target}")/rdma
image=$work/image
report=$work/report

# The exit status that says: not here, and not because something is broken.
skipped=77

die() { echo "rdma: $*" >&2; exit 1; }
skip() { echo "SKIPPED: the tests of RDMA in a guest: $*" >&2; exit $skipped; }

# From here on the programs and libraries that were unpacked are found: what the machine lacks, or has too old.
use_tools() {
    PATH=$image/tools/usr/bin:$image/tools/usr/sbin:$PATH
    LD_LIBRARY_PATH=$image/tools/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PATH LD_LIBRARY_PATH
}
