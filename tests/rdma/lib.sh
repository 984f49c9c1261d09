# shellcheck shell=bash disable=SC2034
# The scripts in this folder source this file. It defines the locations of files, and common
# functions.
rdma=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$rdma/../.." && pwd)
# A relative CARGO_TARGET_DIR is relative to the repository, where cargo runs.
work=$(cd "$repository" && realpath -m "${CARGO_TARGET_DIR:-target}")/rdma
image=$work/image
report=$work/report

# The command line of the guest's kernel.
kernel_options="console=ttyS0 panic=-1 oops=panic mitigations=off nokaslr tsc=reliable nowatchdog rcupdate.rcu_cpu_stall_suppress=1"

# The exit status of a script if the tests cannot run on this machine, which is not a failure.
skipped=77

die() { echo "rdma: $*" >&2; exit 1; }
skip() { echo "SKIPPED: the tests of RDMA in a guest cannot run: $*" >&2; exit $skipped; }

# use_tools: adds the unpacked programs and libraries to the search paths. They replace programs and
# libraries that the machine lacks, or that are too old.
use_tools() {
    PATH=$image/tools/usr/bin:$image/tools/usr/sbin:$PATH
    LD_LIBRARY_PATH=$image/tools/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PATH LD_LIBRARY_PATH
}
