#!/bin/bash
# Takes the CUDA tests and the onehop binary to a machine with a GPU, which needs neither Rust nor CUDA's toolkit.
set -euo pipefail

usage() {
    cat <<'TEXT'
bed/cuda.sh pack DIR   builds the tests and the binary here, and puts them into DIR with this script
DIR/cuda.sh run        on the GPU machine: runs the tests, then transfers with a simulated drive by every route

`run` exits 1 if a test fails, or a transfer that should work does not; the whole log is DIR/log.
TEXT
}

pack() {
    local dir=$1 test
    cd "$(dirname "$0")/.."
    cargo build --release -p onehop
    test=$(cargo test --release -p onehop-gpu --test cuda --no-run 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
    mkdir -p "$dir"
    strip -o "$dir/cuda-test" "$test"
    strip -o "$dir/onehop" "${CARGO_TARGET_DIR:-target}/release/onehop"
    cp bed/cuda.sh "$dir"
    echo "now run $dir/cuda.sh run there"
}

failed=0
# A command that should succeed; what it said is in the log.
expect() {
    echo "== $*"
    timeout 120 "$@" || {
        echo "FAILED: $*"
        failed=1
    }
}

checks() {
    nvidia-smi --query-gpu=name,driver_version,pci.bus_id,memory.total --format=csv || true
    uname -r
    expect ./cuda-test --test-threads=1
    expect ./onehop demo
    expect ./onehop demo -g 0 --route cpu/pinned
    if ./onehop demo -g 0 --route gpu/tier1 2>&1 | grep -q 'no device code'; then
        echo "SKIPPED: this build has no device code; gpu/ routes were not tried"
        return
    fi
    for mode in "--queues 1" "--queues 4 --depth 256" "--mode shared --threads 32" "--mode shared --threads 1000"; do
        # shellcheck disable=SC2086
        expect ./onehop demo -g 0 --route gpu/tier1 --size 64M $mode
    done
    for fault in late@op=read,n=4,delay=20ms lost@op=read,n=5 fail-once@op=read,n=3 reorder@op=read,n=2,count=30; do
        expect ./onehop demo -g 0 --route gpu/tier1 --fault "$fault"
        expect ./onehop demo -g 0 --route gpu/tier1 --mode shared --fault "$fault"
    done
}

case ${1:-} in
pack)
    [ $# -eq 2 ] || { usage >&2; exit 2; }
    pack "$(realpath -m "$2")"
    ;;
run)
    cd "$(dirname "$0")"
    # The file of the tests must lie where a disk's file system is.
    checks > >(tee log) 2>&1
    [ $failed -eq 0 ]
    ;;
*)
    usage >&2
    exit 2
    ;;
esac
